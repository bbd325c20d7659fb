"""`--trace`: what lanes, steps, transfers and requests do, as a file in Chrome's trace format. Observers, as
is the sanitizer."""
