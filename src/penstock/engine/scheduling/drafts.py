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

    def started(self, track: Track) -> None:
        """The request joins the steps. If drafting is on, it is drafted from now on."""

    def considers(self, num_requests: int) -> bool:
        """True if a step of so many requests may have drafts. Called once for every step in which a request
        decodes."""

    def wants(self, track: Track) -> bool:
        """True if the request may have drafts in the next step."""

    def propose(self, requests: Sequence[Decoding], num_requests: int) -> Sequence[tuple[int, ...]]:
        """Drafts for each of `requests`, in a step of `num_requests` in all."""

    def saw(self, track: Track, num_drafts: int, num_kept: int) -> None:
        """The target accepted the first `num_kept` of a request's `num_drafts` drafts."""

    def ended(self, track: Track) -> None:
        """The request is over."""
