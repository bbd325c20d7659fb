"""Lanes: ordered queues of device work, the same on CPU and CUDA. This is where the order of every KV access
is made."""
