"""Blocks on their way from host memory to the device. Owns nothing but what one such transfer is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.kv.blocks.handles import Handle, RunPin
from penstock.kv.transfer.mover import Group, Slots, Transfer


class Promotion(Transfer):
    """Blocks on their way into the slots of a table."""

    def __init__(self, pin: RunPin, sources: Sequence[int] | Slots, kept: Sequence[Handle], groups: Sequence[Group], layered: bool) -> None:
        super().__init__(f"promote of {pin.owner}", groups)
        self.pins = [pin]
        self.first = pin.first  # block of the table
        self.kept = kept  # the protection of the sources
        self.source_slots = np.array(sources, np.int64)
        self.dest_slots = pin.array.astype(np.int64)
        self._layered = layered

    @property
    def layered(self) -> bool:
        return self._layered
