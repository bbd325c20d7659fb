"""Where the bytes are: the layout of a block (a pure value) and the arenas that hold them."""
