"""Penstock: an LLM inference engine whose KV cache outlives the accelerator."""

__version__ = "0.1.0"
