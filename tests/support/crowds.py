"""How many random crowds a test of engines goes through. Owns no crowd."""

from __future__ import annotations

import os


def crowds(usual: int) -> range:
    """Their seeds: `usual` of them, or PENSTOCK_CROWDS where that is set, as by `make soak`."""
    return range(int(os.environ.get("PENSTOCK_CROWDS", usual)))
