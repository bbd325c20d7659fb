"""Which slot holds which key. Owns both directions of that map and nothing about who uses the slots."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import InvariantBroken


class KeyIndex:
    """Keys of sealed slots: each key in one slot, each slot with one key at most."""

    def __init__(self, num_slots: int) -> None:
        self.key_of: list[bytes | None] = [None] * num_slots  # by slot; None: not sealed
        self._slot_of: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._slot_of)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Slots of the longest run of leading `keys` that are here."""
        slots = []
        slot_of = self._slot_of
        for key in keys:
            slot = slot_of.get(key)
            if slot is None:
                break
            slots.append(slot)
        return slots

    def find_each(self, keys: Sequence[bytes]) -> list[int]:
        """The slot of each key; -1 where it is not here."""
        get = self._slot_of.get
        return [get(key, -1) for key in keys]

    def add(self, slots: Sequence[int], keys: Sequence[bytes]) -> list[int]:
        """Give each slot its key unless the key lives elsewhere: first writer wins. Returns the slots that got theirs."""
        key_of, slot_of = self.key_of, self._slot_of
        for slot in slots:
            if key_of[slot] is not None:
                raise InvariantBroken(f"slot {slot} is sealed already")
        taken = []
        for slot, key in zip(slots, keys, strict=True):
            if slot_of.setdefault(key, slot) == slot:
                key_of[slot] = key
                taken.append(slot)
        return taken

    def forget(self, slots: Sequence[int]) -> list[bytes]:
        """The keys of `slots` are no longer here; returns them."""
        keys = []
        for slot in slots:
            key = self.key_of[slot]
            if key is None:
                raise InvariantBroken(f"slot {slot} has no key to forget")
            del self._slot_of[key]
            self.key_of[slot] = None
            keys.append(key)
        return keys

    def check(self) -> None:
        """Raise unless both directions agree."""
        backwards = [(key, slot) for slot, key in enumerate(self.key_of) if key is not None]
        if len(backwards) != len(self._slot_of) or dict(backwards) != self._slot_of:
            raise InvariantBroken(f"{len(backwards)} slots have a key and {len(self._slot_of)} keys have a slot, and they disagree")
