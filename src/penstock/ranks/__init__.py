"""One model over several processes, each with a part of it: the ranks. `models/split.py` says which part."""
