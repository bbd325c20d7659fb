"""Training of draft heads for `--speculate mtp:PATH`. Not part of the installed package."""
