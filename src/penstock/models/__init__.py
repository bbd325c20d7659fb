"""Models: one file per architecture, the forward pass that they share, weights, tokenizers, adapters, and the
loader."""
