"""Which slot holds which key. Owns both directions of that map and nothing about who uses the slots."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import repeat

import numpy as np

from penstock.errors import InvariantBroken
from penstock.kv.blocks.slots import Run, as_run


class KeyIndex:
    """Keys of sealed slots: each key in one slot, each slot with one key at most."""

    def __init__(self, num_slots: int) -> None:
        self.key_of: list[bytes | None] = [None] * num_slots  # by slot; None: not sealed
        self.sealed = bytearray(num_slots)  # by slot; 1: it has a key
        self._slot_of: dict[bytes, int] = {}
        self._num_changes = 0
        self._found: tuple[tuple[bytes, ...], int, Run] = (), 0, []  # what was asked last, after how many changes, and the answer

    def __len__(self) -> int:
        return len(self._slot_of)

    def find(self, keys: Sequence[bytes]) -> Run:
        """Slots of the longest run of leading `keys` that are here, which nobody may change. A request asks several times on its way: for
        the same tuple nothing is looked up again until something has changed."""
        asked, num_changes, run = self._found
        if asked is keys and num_changes == self._num_changes:
            return run
        num_changes = self._num_changes
        slots: list[int] = []
        with suppress(KeyError):  # the first that is not here ends it, and the list has those before
            slots.extend(map(self._slot_of.__getitem__, keys))
        run = as_run(slots)
        if isinstance(keys, tuple):
            self._found = keys, num_changes, run
        return run

    def find_each(self, keys: Sequence[bytes]) -> list[int]:
        """The slot of each key; -1 where it is not here."""
        return list(map(self._slot_of.get, keys, repeat(-1)))

    def are_sealed(self, slots: Run) -> bool:
        """Whether all of them are."""
        if isinstance(slots, np.ndarray):
            return bool(np.frombuffer(self.sealed, bool)[slots].all())
        return all(map(self.sealed.__getitem__, slots))

    def add(self, slots: Sequence[int], keys: Sequence[bytes]) -> list[int]:
        """Give each slot its key unless the key lives elsewhere: first writer wins. Returns the slots that got theirs."""
        if any(map(self.key_of.__getitem__, slots)):
            raise InvariantBroken(f"slot {next(slot for slot in slots if self.key_of[slot])} is sealed already")
        homes = list(map(self._slot_of.setdefault, keys, slots))
        taken, given = list(slots), keys
        if homes != taken:
            places = [place for place, slot in enumerate(slots) if homes[place] == slot]
            taken, given = [slots[place] for place in places], [keys[place] for place in places]
        key_of = self.key_of
        for slot, key in zip(taken, given, strict=True):
            key_of[slot] = key
        self._mark(as_run(taken), 1)
        self._num_changes += 1  # behind the change: who looks meanwhile, from another thread, has seen a state that is over
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
        self._mark(as_run(slots), 0)
        self._num_changes += 1
        return keys

    def _mark(self, slots: Run, sealed: int) -> None:
        if isinstance(slots, np.ndarray):
            np.frombuffer(self.sealed, np.uint8)[slots] = sealed
        else:
            for slot in slots:
                self.sealed[slot] = sealed

    def check(self) -> None:
        """Raise unless both directions agree."""
        backwards = [(key, slot) for slot, key in enumerate(self.key_of) if key is not None]
        if len(backwards) != len(self._slot_of) or dict(backwards) != self._slot_of:
            raise InvariantBroken(f"{len(backwards)} slots have a key and {len(self._slot_of)} keys have a slot, and they disagree")
        if [slot for _, slot in backwards] != [slot for slot, sealed in enumerate(self.sealed) if sealed]:
            raise InvariantBroken(f"{len(backwards)} slots have a key, and they are not the {sum(self.sealed)} that are said to be sealed")
