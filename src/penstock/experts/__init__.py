"""Experts that need not be on the device: which stay, where they are, what is recorded of routing. Books and
decisions; tensors and copies are in `engine.execution`."""
