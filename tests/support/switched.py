"""Speculation that a test turns on and off. Owns the switch; what is drafted while it is on is Speculation's
own."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engine.engine import Engine
from penstock.engine.scheduling.drafts import Decoding
from penstock.speculation.drafter import Speculation


class Switched(Speculation):
    """Drafts while `is_on`, and never else."""

    is_on = False

    @property
    def num_ahead(self) -> int:
        return super().num_ahead if self.is_on else 0

    def propose(self, requests: Sequence[Decoding], num_others: int) -> Sequence[tuple[int, ...]]:
        return super().propose(requests, num_others) if self.is_on else [()] * len(requests)


def switched(engine: Engine) -> Switched:
    """That of `engine`, off; it has been told by `force` what to draft. What is decoded is passed over all
    the same."""
    speculation = engine._parts.speculation
    assert speculation is not None and speculation.force is not None
    speculation.__class__ = Switched
    assert isinstance(speculation, Switched)
    speculation.leaves_out = False
    return speculation
