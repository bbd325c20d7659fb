"""Trained draft heads for Penstock's `--speculate mtp`: one folder for each model. Nothing here is code."""
