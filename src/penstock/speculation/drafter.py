"""Drafts for the requests of a step. Owns what is known of each request: its proposer, how its drafts fared, and its account."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.engine.scheduling.drafts import Decoding
from penstock.engine.scheduling.track import Track
from penstock.speculation.length import DraftTrack, Row, StepCosts, Trial, begin, choose, settle
from penstock.speculation.ngram import NgramProposer, SharedTexts

log = logging.getLogger(__name__)

_LEARNS = 0.2  # share of a measured step in what its size is taken to cost


@dataclass(slots=True)
class _Request:
    proposer: NgramProposer | None  # None: drafts are made on the device, or it has failed
    account: DraftTrack
    plain_s: float = 0.0  # of its last step, as it would have been without drafts


class Speculation:
    """Implements `Drafter`: one kind of proposer for all requests."""

    def __init__(self, max_drafts: int, max_step_drafts: int, costs: StepCosts, on_device: bool) -> None:
        """`max_drafts` of a request, `max_step_drafts` of all requests of a step. `on_device`: drafts are made there."""
        self.costs = costs  # a guess, until somebody has measured
        self._max_drafts, self._max_step_drafts = max_drafts, max_step_drafts
        self._on_device = on_device
        self._shared = SharedTexts()
        self._requests: dict[str, _Request] = {}
        self._trials: dict[int, Trial] = {}  # by the number of requests that decode, rounded up
        self._trial = Trial()
        self.has_failed: Callable[[], bool] = lambda: False  # what makes drafts on the device: then there are none any more
        self.force: Callable[[int], int] | None = None  # for tests: drafts of a request, whatever they cost

    @property
    def needs_results(self) -> bool:
        return not self._on_device

    @property
    def num_ahead(self) -> int:
        is_on = self._on_device and (self._trial.is_on or self.force is not None)
        return self._max_drafts if is_on and not self.has_failed() else 0

    @property
    def may_lag(self) -> bool:
        return self._on_device and self.num_ahead == 0

    def propose(self, requests: Sequence[Decoding], num_others: int) -> Sequence[tuple[int, ...]]:
        self._trial = self._trials.setdefault(len(requests).bit_length(), Trial())
        if not self._trial.is_on and self.force is None:
            return [()] * len(requests)
        proposed = [self._proposal(one) for one in requests]
        rows = [Row(self._of(one.track).account, len(drafts)) for one, drafts in zip(requests, proposed, strict=True)]
        choice = choose(rows, self.costs, self._max_step_drafts, num_others, is_bounded=not self._trial.is_look)
        nums = choice.drafts if self.force is None else [min(row.most, self.force(row.most)) for row in rows]
        begin(rows, choice)
        for one in requests:
            self._of(one.track).plain_s = choice.plain_s
        return [drafts[:num] for drafts, num in zip(proposed, nums, strict=True)]

    def saw(self, track: Track, num_drafts: int, num_kept: int) -> None:
        request = self._of(track)
        settle(request.account, num_drafts, num_kept, request.plain_s)

    def step_took(self, num_rows: int, seconds: float, num_tokens: int) -> None:
        """A step that did nothing but decode so many rows, and gave so many tokens."""
        self._trial.add(seconds, num_tokens)
        costs = self.costs
        if (size := costs.padded(num_rows)) is None:
            return
        at = costs.sizes.index(size)
        learned = (1 - _LEARNS) * costs.seconds[at] + _LEARNS * seconds
        self.costs = replace(costs, seconds=(*costs.seconds[:at], learned, *costs.seconds[at + 1 :]))

    def ended(self, track: Track) -> None:
        request = self._requests.pop(track.request.id, None)
        if request is not None and request.proposer is not None:
            request.proposer.end(track.tokens)

    def _of(self, track: Track) -> _Request:
        found = self._requests.get(track.request.id)
        if found is None:
            proposer: NgramProposer | None = None
            if not self._on_device:
                prefix = track.request.prefix
                proposer = NgramProposer(b"" if prefix is None else prefix.scope, None if prefix is None else self._shared)
            found = self._requests[track.request.id] = _Request(proposer, DraftTrack(self._max_drafts))
        return found

    def _proposal(self, one: Decoding) -> tuple[int, ...]:
        """Of what the device has drafted the host knows the number. A token that is being sampled comes first: what is proposed for its
        place is left out."""
        most, track = min(one.most, self._max_drafts), one.track
        if self._on_device:
            return tuple(range(-2, -2 - min(most, one.num_pending), -1))
        num_unknown = track.num_expected - len(track.tokens)
        request = self._of(track)
        if request.proposer is None:
            return ()
        try:
            return request.proposer.propose(track.tokens, most + num_unknown)[num_unknown:]
        except Exception:  # nobody needs a proposal
            log.exception("nothing more is proposed for request %s", track.request.id)
            request.proposer = None
            return ()
