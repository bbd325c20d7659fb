"""A copier that a test holds, lets go and breaks. Owns the moment at which bytes move, not how."""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.engine.engine import Engine
from penstock.kv.transfer import Copier, Layers, Mover, Slots

_DEADLINE_S = 30.0  # a test that forgets to let go fails instead of hanging


class GatedCopier:
    """Copies pass one by one while `hold` is on and `let` allows them; each call may be told to fail
    instead."""

    def __init__(self, inner: Copier) -> None:
        self.inner = inner
        # sources, destinations, layers of every copy made
        self.passed: list[tuple[list[int], list[int], Layers]] = []
        self.on_copy: Callable[[Layers], None] = lambda layers: None  # called just before the bytes move
        self.fail_next = 0
        self._allowed: int | None = None  # None: as many as come
        self._changed = threading.Condition()

    def hold(self) -> None:
        with self._changed:
            self._allowed = 0

    def let(self, num_copies: int | None = None) -> None:
        """Allow so many more; None: all from now on."""
        with self._changed:
            self._allowed = None if num_copies is None else (self._allowed or 0) + num_copies
            self._changed.notify_all()

    def copy(self, source_slots: Slots, dest_slots: Slots, layers: Layers) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._allowed is None or self._allowed > 0, _DEADLINE_S):
                raise TimeoutError("nobody let this copy pass")
            if self._allowed is not None:
                self._allowed -= 1
            fails = self.fail_next > 0
            self.fail_next -= fails
        if fails:
            raise OSError("the copy was told to fail")
        self.on_copy(layers)
        self.inner.copy(source_slots, dest_slots, layers)
        self.passed.append((source_slots.tolist(), dest_slots.tolist(), layers))


def gate(mover: Mover) -> GatedCopier:
    """Put a gate into a mover that has nothing in flight."""
    gated = GatedCopier(mover.copier)
    mover.copier = gated
    return gated


def gates(engine: Engine) -> tuple[GatedCopier, GatedCopier]:
    """Of an engine's promotions and of its demotions."""
    cache = engine.cache
    return gate(cache.loads.mover), gate(cache.saves.mover)
