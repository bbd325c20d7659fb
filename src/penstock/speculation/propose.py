"""What proposes tokens is to the engine. Owns the interface; one file beside it per proposer."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol


class PointMass(Enum):
    """The proposal of a deterministic proposer: all on the token that it names."""

    POINT_MASS = "point mass"


POINT_MASS: Final = PointMass.POINT_MASS


class Proposal(NamedTuple):
    """Tokens that may come next, of the target's vocabulary."""

    tokens: tuple[int, ...]
    q: Any = POINT_MASS  # or the distributions that they were really drawn from: [len(tokens), vocab], on the device


NOTHING = Proposal(())


class Proposer(Protocol):
    """Proposes for one request. Called by one thread, before a step, with accepted tokens alone."""

    def propose(self, history: Sequence[int], k: int) -> Proposal:
        """At most `k` tokens behind `history`, which is that of the last call with accepted tokens appended. May be fewer, or none."""
