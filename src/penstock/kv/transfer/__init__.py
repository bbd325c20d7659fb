"""How bytes move: copies for each pair of arenas, and the mover that keeps both ends of a transfer until it is over."""
