"""What the scheduler asks of whoever proposes tokens. Owns the interface; proposers are
`penstock.speculation`'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.engine.scheduling.track import Track


class Decoding(NamedTuple):
    """A request that gets one token from the next step, and may get more."""

    track: Track
    most: int  # drafts that there is room for
    num_pending: int = 0  # drafts of it that wait on the device


class Drafter(Protocol):
    """Called by the engine thread."""

    @property
    def needs_results(self) -> bool:
        """Whether it can propose nothing for a request whose drafts are still being verified: their step is
        read first."""

    @property
    def num_ahead(self) -> int:
        """Drafts that the device is to make of each request behind the next step."""

    @property
    def leaves_out(self) -> bool:
        """Whether it need not be computed at all, since no drafts are made soon."""

    @property
    def has_kv(self) -> bool:
        """Whether it passes over the tokens of steps, and keeps KV of them in every block."""

    def considers(self, tracks: Sequence[Track]) -> bool:
        """Whether it may propose something for a step of these, or has the device make drafts behind it.
        Called for every step in which some request decodes; `propose` follows where it says yes."""

    def propose(self, requests: Sequence[Decoding], num_others: int) -> Sequence[tuple[int, ...]]:
        """Drafts for each of them, in a step that also computes `num_others` tokens of prompts."""

    def saw(self, track: Track, num_drafts: int, num_kept: int) -> None:
        """So many of a request's drafts were kept, in order."""

    def ended(self, track: Track) -> None:
        """The request is over."""
