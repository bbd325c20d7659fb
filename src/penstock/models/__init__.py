"""Models: one straight-line file per architecture, their layers, weights, tokenizers, and the registry that loads them."""
