"""A block as one value of a store: its header before its bytes. Owns the copy between value and host slot and the check of what arrived;
the header's format is `envelope`'s."""

from __future__ import annotations

import numpy as np

from penstock.kv.tiers.envelope import HEADER_BYTES, pack, unpack
from penstock.kv.tiers.store import Outcome


def fill(value: memoryview, key: bytes, space: bytes, block: memoryview) -> None:
    """Block into value."""
    value[:HEADER_BYTES] = pack(key, space, block)
    np.copyto(np.frombuffer(value, np.uint8, offset=HEADER_BYTES), np.frombuffer(block, np.uint8))  # without the interpreter's lock


def place(value: memoryview, key: bytes, space: bytes, slot: memoryview) -> Outcome:
    """Value into slot. What is checked lies in the slot: a value may be in other hands, too."""
    if len(value) != HEADER_BYTES + len(slot):
        return Outcome.CORRUPT
    np.copyto(np.frombuffer(slot, np.uint8), np.frombuffer(value, np.uint8, offset=HEADER_BYTES))
    envelope = unpack(bytes(value[:HEADER_BYTES]))
    ours = envelope is not None and envelope.key == key and envelope.space == space and envelope.fits(slot)
    return Outcome.DONE if ours else Outcome.CORRUPT
