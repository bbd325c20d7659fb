"""Drafts for the requests of a step. Owns what is known of each request that may have some.

`DeviceDrafter`: a head or a smaller model makes drafts on the device. Drafting is on or off for the engine. A
request that starts while it is on is drafted; when it goes off, all running requests are undrafted for good,
since the draft model skips their tokens from then on.

`NgramDrafter`: prompt lookup. Every proposal is compared with the tokens that came, verified or not, so the
acceptance of a request is known without spending a step on it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.engine.scheduling.drafts import Decoding, Drafter
from penstock.engine.scheduling.stages import Life, RunningRequest
from penstock.speculation.length import DraftRecord, Row, StepCosts, choose
from penstock.speculation.ngram import NgramProposer, SharedTexts

log = logging.getLogger(__name__)

# Acceptance rates assumed before any observation. Drafts that would not pay even then are not tried.
_NGRAM_PRIOR, _DEVICE_PRIOR = 0.5, 0.8
_OF_ALL, _OF_ONE = 64, 12  # outcomes remembered of all requests, and of one
_LEAST_GAIN = 1.05  # factor of tokens per second from which drafting goes on again
_DOUBTS = 4  # steps in a row that do not pay before it goes off
_TRUSTED = 64  # steps that pay before the next rest is a short one again
_REST_STEPS, _MOST_REST_STEPS = 256, 8192  # steps before it is tried again; doubles each time
_MOST_WAIT = 8  # tokens between two lookups of a request whose proposals fail


class Speculation(Drafter):
    """What both drafters know: limits, and the costs of steps."""

    def __init__(self, max_drafts: int, max_step_drafts: int, costs: StepCosts) -> None:
        """`max_drafts`: per request. `max_step_drafts`: of all requests of a step."""
        self._max_drafts, self._max_step_drafts = max_drafts, max_step_drafts
        self._costs = costs

    def measure(self, measured: Callable[[StepCosts], StepCosts]) -> None:
        """Replace the costs by those that `measured` finds."""
        self._costs = measured(self._costs)


class DeviceDrafter(Speculation):
    """Drafts that the device makes after each step."""

    def __init__(
        self, max_drafts: int, max_step_drafts: int, costs: StepCosts, has_failed: Callable[[], bool]
    ) -> None:
        """`has_failed`: drafts can no longer be made."""
        super().__init__(max_drafts, max_step_drafts, costs)
        self._has_failed = has_failed
        self._drafted: dict[str, DraftRecord] = {}
        self._undrafted: set[str] = set()  # running requests without drafts
        self._forget()
        self._is_on = True
        self._num_doubts = self._num_paying = self._num_resting = 0
        self._rest_steps = _REST_STEPS

    @property
    def num_ahead(self) -> int:
        makes = self._is_on and (self._drafted or not self._undrafted)
        return self._max_drafts if makes and not self._has_failed() else 0

    def started(self, life: Life) -> None:
        self._undrafted.discard(life.request.id)
        if self._is_on:
            self._drafted[life.request.id] = DraftRecord(self._max_drafts, _OF_ONE)
        else:
            self._undrafted.add(life.request.id)

    def considers(self, num_requests: int) -> bool:
        gain = self._gain(num_requests)
        if not self._is_on:
            self._num_resting = max(0, self._num_resting - 1)
            self._is_on = not self._num_resting and gain >= _LEAST_GAIN
        elif gain >= 1.0:
            self._num_doubts, self._num_paying = 0, self._num_paying + 1
        else:
            self._num_doubts += 1
            if self._num_doubts >= _DOUBTS:
                self._turn_off()
        return self._is_on and bool(self._drafted) and not self._has_failed()

    def wants(self, running: RunningRequest) -> bool:
        return running.num_pending > 0 and running.request.id in self._drafted

    def propose(self, requests: Sequence[Decoding], num_requests: int) -> Sequence[tuple[int, ...]]:
        """The host knows only the number of a request's drafts."""
        rate = self._pool.rate(_DEVICE_PRIOR)
        rows = [
            Row(self._drafted[one.life.request.id].survival(rate), min(one.most, one.num_pending))
            for one in requests
        ]
        nums = choose(rows, num_requests, self._costs, self._max_step_drafts)
        return [tuple(range(-2, -2 - num, -1)) for num in nums]

    def saw(self, life: Life, num_drafts: int, num_kept: int) -> None:
        record = self._drafted.get(life.request.id)
        if record is not None:
            record.saw(num_drafts, num_kept)
            self._pool.saw(num_drafts, num_kept)
            self._survival = self._pool.survival(_DEVICE_PRIOR)

    def ended(self, life: Life) -> None:
        self._drafted.pop(life.request.id, None)
        self._undrafted.discard(life.request.id)

    def _gain(self, num_requests: int) -> float:
        """Tokens per second with drafts, at the best number of them, relative to those without."""
        most = max(1, min(self._max_drafts, self._max_step_drafts // num_requests))
        num_tokens, rates = 1.0, list[float]()
        making_s = self._costs.making(num_requests)
        for depth, survival in enumerate(self._survival[:most], 1):
            num_tokens += survival
            rates.append(num_tokens / (self._costs.of(num_requests * (1 + depth)) + making_s))
        return max(rates) * self._costs.of(num_requests)

    def _turn_off(self) -> None:
        if self._num_paying >= _TRUSTED:
            self._rest_steps = _REST_STEPS
        self._is_on, self._num_doubts, self._num_paying = False, 0, 0
        self._num_resting, self._rest_steps = self._rest_steps, min(2 * self._rest_steps, _MOST_REST_STEPS)
        self._undrafted |= self._drafted.keys()
        self._drafted.clear()
        self._forget()

    def _forget(self) -> None:
        self._pool = DraftRecord(self._max_drafts, _OF_ALL)  # of all requests
        self._survival = self._pool.survival(_DEVICE_PRIOR)


@dataclass(slots=True)
class _LookedUp:
    """A request with prompt lookup."""

    proposer: NgramProposer
    record: DraftRecord
    due: int = 0  # number of its tokens at which it is looked up next
    wait: int = 1  # tokens between two lookups
    guess: tuple[int, ...] = ()  # the last proposal
    guess_at: int = 0  # number of tokens before that


class NgramDrafter(Speculation):
    """Prompt lookup, on the host."""

    needs_results = True

    def __init__(self, max_drafts: int, max_step_drafts: int, costs: StepCosts) -> None:
        super().__init__(max_drafts, max_step_drafts, costs)
        self._shared = SharedTexts()
        self._requests: dict[str, _LookedUp] = {}
        self._pool = DraftRecord(max_drafts, _OF_ALL)  # of all requests

    def started(self, life: Life) -> None:
        prefix = life.request.prefix
        proposer = NgramProposer() if prefix is None else NgramProposer(prefix.scope, self._shared)
        self._requests[life.request.id] = _LookedUp(proposer, DraftRecord(self._max_drafts, _OF_ONE))

    def considers(self, num_requests: int) -> bool:
        return True

    def wants(self, running: RunningRequest) -> bool:
        request = self._requests.get(running.request.id)
        return request is not None and len(running.life.tokens) >= request.due

    def propose(self, requests: Sequence[Decoding], num_requests: int) -> Sequence[tuple[int, ...]]:
        guesses = [self._guess(one) for one in requests]
        if not any(guesses):
            return guesses
        rate = self._pool.rate(_NGRAM_PRIOR)
        known = [self._requests[one.life.request.id] for one in requests]
        rows = [Row(one.record.survival(rate), len(guess)) for one, guess in zip(known, guesses, strict=True)]
        extra_s = self._costs.making(num_requests)
        nums = choose(rows, num_requests, self._costs, self._max_step_drafts, extra_s)
        for one, num in zip(known, nums, strict=True):
            one.due = one.guess_at + 1 if num else one.due
        return [guess[:num] for guess, num in zip(guesses, nums, strict=True)]

    def saw(self, life: Life, num_drafts: int, num_kept: int) -> None:
        """The next lookup compares its tokens with the proposal."""

    def ended(self, life: Life) -> None:
        request = self._requests.pop(life.request.id, None)
        if request is not None:
            request.proposer.end(life.tokens)

    def _guess(self, one: Decoding) -> tuple[int, ...]:
        """If a token is still being sampled, the proposal for its position is dropped."""
        life, request = one.life, self._requests[one.life.request.id]
        try:
            self._compare(request, life.tokens)
            num_unknown = life.num_expected - len(life.tokens)
            found = request.proposer.propose(life.tokens, num_unknown + self._max_drafts)
        except Exception:  # proposals are optional
            log.exception("nothing more is proposed for request %s", life.request.id)
            request.due = sys.maxsize
            return ()
        request.guess, request.guess_at = found, len(life.tokens)
        if not found:
            request.wait = min(2 * request.wait, _MOST_WAIT)
        request.due = request.guess_at + request.wait
        return found[num_unknown:][: one.most]

    def _compare(self, request: _LookedUp, tokens: Sequence[int]) -> None:
        came = tokens[request.guess_at : request.guess_at + len(request.guess)]
        if not came:
            return
        pairs = enumerate(zip(came, request.guess, strict=False))
        num_kept = next((at for at, (one, other) in pairs if one != other), len(came))
        for record in (request.record, self._pool):
            record.saw(len(came), num_kept)
        request.wait = 1 if num_kept else min(2 * request.wait, _MOST_WAIT)
