"""The scheduler's interface to a proposer of draft tokens. Implemented in `penstock.speculation`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.engine.scheduling.track import Track


class Decoding(NamedTuple):
    """A request that gets one token from the next step, and may get more."""

    track: Track
    most: int  # drafts that fit
    num_pending: int = 0  # its drafts already on the device


class Drafter(Protocol):
    """Called by the engine thread."""

    @property
    def needs_results(self) -> bool:
        """True if it cannot propose for a request whose drafts are still being verified: the engine reads
        that step first."""

    @property
    def num_ahead(self) -> int:
        """Drafts per request that the device makes after the next step."""

    @property
    def leaves_out(self) -> bool:
        """True if the draft model may skip tokens for good, since no drafts are expected soon."""

    @property
    def has_kv(self) -> bool:
        """True if the draft model also runs over each step's tokens and keeps KV in every block."""

    def considers(self, tracks: Sequence[Track]) -> bool:
        """True if it may propose drafts for a step of `tracks`, or let the device make drafts after it.
        Called for every step in which a request decodes; `propose` follows if True."""

    def propose(self, requests: Sequence[Decoding], num_others: int) -> Sequence[tuple[int, ...]]:
        """Drafts for each request, in a step that also computes `num_others` prompt tokens."""

    def saw(self, track: Track, num_drafts: int, num_kept: int) -> None:
        """The target accepted the first `num_kept` of a request's `num_drafts` drafts."""

    def ended(self, track: Track) -> None:
        """The request is over."""
