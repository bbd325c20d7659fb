"""Blocks in files on a local disk."""
