"""Drafts for the requests of a step. Owns the state of each request: its proposer, the acceptance of its
drafts, and its account.

While nothing is drafted, steps are planned ahead as without speculation, and the overhead is a few
microseconds per step for any number of requests. Prompt lookup is then tried on one request after the other,
within a small share of the time: what it would have proposed some tokens ago is compared with the actual
tokens. So its acceptance is known before a step is spent on drafts. Drafts made on the device need real
passes: a few steps measure their acceptance when every account can pay for them. While drafts do not pay, or
accounts are far from able to pay, the draft model skips decoded tokens. Its passes begin some tokens before
drafts do, since the latest tokens matter most to a draft.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.engine.scheduling.drafts import Decoding
from penstock.engine.scheduling.track import Track
from penstock.speculation.length import (
    LEAST_GAIN,
    MOST_RETRY_STEPS,
    RETRY_STEPS,
    SURE,
    Account,
    Books,
    DraftRecord,
    Row,
    StepCosts,
    choose,
)
from penstock.speculation.ngram import NgramProposer, SharedTexts

_Found = TypeVar("_Found")
log = logging.getLogger(__name__)

LOOK_SHARE = 0.005  # share of the time for trial lookups
_SAVED_STEPS = 8  # steps whose share can be saved up
# Acceptance rates assumed before any observation. Trial lookups correct the first one for free. The second is
# that of a good draft model: drafts that would not pay even then are not tried, and accounts bound the cost
# of trials.
_SEARCH_PRIOR, _DEVICE_PRIOR = 0.3, 0.8
_TRUSTED = 64  # steps with drafts after which the retry interval is reset
_PROMISING = 0.5  # expected accepted drafts from which a request is looked up for a step
_FORGOTTEN_TOKENS = 8  # tokens after which an unpromising request is looked up again
_MOST_VAIN = 31  # most steps without lookups, after several without drafts
_NEWEST = 0.1  # weight of the newest lookup
_LEAD_TOKENS = 64  # tokens that the draft model processes after skipped ones before it drafts for a request
# Most steps between two checks whether drafts pay, if nothing is learned meanwhile; the second for prompt
# lookup, which also searches no text then.
_REST_STEPS, _SEARCH_REST_STEPS = 15, 7


@dataclass(slots=True)
class _Request:
    proposer: NgramProposer | None  # None: drafts are made on the device, or the proposer failed
    record: DraftRecord
    account: Account
    gained_s: float = 0.0  # time saved by its accepted drafts
    is_promising: bool = True  # by its record
    num_seen: int = 0  # tokens that it had when its record was last updated


@dataclass(slots=True)
class _Rested:
    """Plain steps that are not booked yet."""

    num_requests: int = 0
    most_s: float = 0.0  # upper clip of one step's time, against outliers
    num_steps: int = 0
    seconds: float = 0.0


class Speculation:
    """Implements `Drafter`: one kind of proposer for all requests."""

    def __init__(
        self,
        max_drafts: int,
        max_step_drafts: int,
        costs: StepCosts,
        on_device: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_drafts`: per request. `max_step_drafts`: of all requests of a step. `on_device`: the device
        makes the drafts."""
        self.books = Books(costs, on_device)
        self._max_drafts, self._max_step_drafts = max_drafts, max_step_drafts
        self._on_device, self._clock = on_device, clock
        self._shared = SharedTexts()
        self._requests: dict[str, _Request] = {}
        self._prior = _DEVICE_PRIOR if on_device else _SEARCH_PRIOR
        self._pool = DraftRecord(max_drafts)  # of all requests
        self._survival = self._pool.survival(self._prior)  # its acceptance by position
        self._num_kept = 0.0  # recent average of accepted drafts per lookup
        self._look_s = 0.0  # time left for trial lookups
        self._search_s = 0.0  # time of one lookup
        self._busy_s = 0.0  # time of lookups since the last step was read; not part of the step's time
        # steps without lookups, after lookups that gave no drafts
        self._num_skipped = self._num_vain = 0
        self._num_looks = 0
        # the step planned last leaves drafts on the device; the one before did
        self._makes = self._was_made = False
        self._has_drafts = False  # the step planned last verifies drafts
        self._room_s = 0.0  # extra time that it may take
        self._paid_at_s = 0.0  # on the clock of plain steps: until then some account cannot pay
        self._followed_from_s = 0.0  # until then the draft model skips decoded tokens
        self._num_idle, self._retry_steps = 0, RETRY_STEPS
        self._num_paying = 0  # steps with drafts since they last did not pay
        self._num_resting = 0  # remaining steps without a check
        self.leaves_out = on_device  # until drafts are due soon
        self._rested = _Rested()
        self._started_s = 0.0
        # True if drafting on the device failed: then no more drafts are made
        self.has_failed: Callable[[], bool] = lambda: False
        # for tests: number of drafts of a request, at any cost
        self.force: Callable[[int], int] | None = None

    @property
    def needs_results(self) -> bool:
        return not self._on_device

    @property
    def has_kv(self) -> bool:
        return self._on_device

    @property
    def num_ahead(self) -> int:
        if not self._makes and (self.force is None or not self._on_device):
            return 0
        return 0 if self.has_failed() else self._max_drafts

    def considers(self, tracks: Sequence[Track]) -> bool:
        if self._num_resting and len(tracks) == self._rested.num_requests:
            self._num_resting -= 1
            return False
        self._was_made, self._makes, self._has_drafts = self._makes, False, False
        if self.force is not None:
            return True
        if self.has_failed():
            return False
        self._end_rest()
        if len(self._requests) != len(tracks):
            for track in tracks:
                self._of(track)
        if not self._on_device:
            self._look(tracks)
        if self._num_skipped:
            self._num_skipped -= 1
            return False
        pays = self._pays(len(tracks))
        if not pays and not self._was_made:
            return False
        self._started_s = self._clock()
        wants = self._can_pay(tracks, pays)
        self.leaves_out = self._on_device and (not pays or self.books.plain_s < self._followed_from_s)
        wants = wants and not any(map(_num_lacking, tracks))
        self._makes = wants and self._on_device
        self._num_paying += wants
        if self._num_paying >= _TRUSTED:
            self._retry_steps = RETRY_STEPS
        if self._on_device and not wants and not self._was_made:
            self._rest(len(tracks), self._num_waiting(tracks))
        return wants or self._was_made

    def propose(self, requests: Sequence[Decoding], num_others: int) -> Sequence[tuple[int, ...]]:
        none: list[tuple[int, ...]] = [()] * len(requests)
        if num_others and self.force is None:  # the cost of drafts beside prompts is not known
            self._makes = False
            return none
        proposed = [self._proposal(one) for one in requests]
        if self.force is not None:
            return [drafts[: self.force(len(drafts))] for drafts in proposed]
        nums = [0] * len(requests)
        if any(proposed):
            # requests without drafts pay, too
            prior, depth = self._pool.rate(self._prior), self._depth(sum(map(bool, proposed)))
            rows = [
                Row(self._of(one.track).record.survival(prior), min(depth, len(drafts)))
                for one, drafts in zip(requests, proposed, strict=True)
            ]
            nums = choose(rows, self.books, self._max_step_drafts, self._room_s, is_paid=self._on_device)
        self._has_drafts = any(nums)
        if not self._on_device:
            took_s = self._clock() - self._started_s
            self.books.charge(took_s)
            self._busy_s += took_s
            self._num_vain = 0 if self._has_drafts else min(2 * self._num_vain + 1, _MOST_VAIN)
            self._num_skipped = self._num_vain
        return [drafts[:num] for drafts, num in zip(proposed, nums, strict=True)]

    def saw(self, track: Track, num_drafts: int, num_kept: int) -> None:
        request = self._of(track)
        self._end_rest()
        if num_kept:
            request.gained_s += num_kept * self.books.plain_step_s(len(self._requests))
            self._paid_at_s = 0.0
        self._learn(request, track, num_drafts, num_kept)

    def step_took(
        self,
        num_requests: int,
        num_rows: int,
        seconds: float,
        num_ahead: int,
        catches_up: bool = False,
        leads: bool = False,
    ) -> None:
        """A decode-only step of `num_requests` requests took `seconds`, with `num_ahead` drafts made after
        it, or a pass over earlier tokens. `leads`: the next step involves drafts and was launched in this
        time."""
        rested = self._rested
        seconds, self._busy_s = max(0.0, seconds - self._busy_s), 0.0
        if (
            self._num_resting
            and num_rows == rested.num_requests
            and not (num_ahead or catches_up or leads or self.books.is_drafting)
        ):
            rested.num_steps += 1
            rested.seconds += min(seconds, rested.most_s)
            return
        self._save_up(seconds, 1)
        self.books.took(num_requests, num_rows, seconds, num_ahead, catches_up, leads)

    def step_had_prompts(self) -> None:
        """A step also computed prompts: the cost of its drafts is not known, so the upper bound is
        charged."""
        if self._makes or self._was_made or self._has_drafts:
            self.books.charge(self.books.estimate(max(1, len(self._requests))).most_extra_s)

    def ended(self, track: Track) -> None:
        request = self._requests.pop(track.request.id, None)
        if request is None:
            return
        self._paid_at_s = 0.0
        self._num_resting = 0
        if request.proposer is not None:
            request.proposer.end(track.tokens)

    # ---------------------------------------------------------------------------------------- whether it pays

    def _pays(self, num_requests: int) -> bool:
        """True if steps with drafts should give more tokens per second. If not, they are tried again at
        growing intervals: costs and texts change."""
        if not self.books.is_known(num_requests):
            return False
        plain_s, extra_s, _ = self.books.estimate(num_requests)
        depth = self._depth(num_requests)
        gain = sum(self._survival[:depth]) if self._on_device else min(depth, self._num_kept)
        extra_s += (
            self.books.rows_s(num_requests, num_requests * depth)
            if self._on_device
            else num_requests * self._search_s
        )
        if (1 + gain) * plain_s > LEAST_GAIN * (plain_s + extra_s):
            return True
        self.leaves_out = self._on_device
        self._num_idle, self._num_paying = self._num_idle + 1, 0
        if self._num_idle >= self._retry_steps:
            self._num_idle, self._retry_steps = 0, min(2 * self._retry_steps, MOST_RETRY_STEPS)
            self.books.forget(num_requests)
            if self._on_device:  # trial lookups notice it without this
                for record in (self._pool, *(request.record for request in self._requests.values())):
                    record.forget()
            self._survival = self._pool.survival(self._prior)
        elif not self._was_made:
            self._rest(num_requests, self._retry_steps - self._num_idle - 1)
            self._num_idle += self._num_resting
        return False

    def _rest(self, num_requests: int, num_steps: int) -> None:
        """For at most `num_steps` steps drafts do not pay or accounts cannot pay. The answer stays the same
        until something is learned or a request joins or leaves."""
        self._num_resting = max(0, min(num_steps, _REST_STEPS if self._on_device else _SEARCH_REST_STEPS))
        self._rested = _Rested(num_requests, 2 * self.books.plain_step_s(num_requests))

    def _num_waiting(self, tracks: Sequence[Track]) -> int:
        """Steps before the draft model's passes begin, or before accounts can pay for drafts and the passes
        have caught up."""
        until_s = min(self._paid_at_s, self._followed_from_s) if self.leaves_out else self._paid_at_s
        num = math.ceil(
            min(1.0 + _REST_STEPS, (until_s - self.books.plain_s) / self.books.plain_step_s(len(tracks)))
        )
        return (num if self.leaves_out else max(num, *map(_num_lacking, tracks))) - 1

    def _end_rest(self) -> None:
        """Book the postponed steps before anything else: new accounts start at the clocks of the books."""
        self._num_resting, rested = 0, self._rested
        if rested.num_steps:
            step_s = rested.seconds / rested.num_steps
            self.books.took_plain(rested.num_requests, step_s, rested.num_steps)
            self._save_up(step_s, rested.num_steps)
            self._rested = _Rested()

    def _save_up(self, step_s: float, num_steps: int) -> None:
        """Add the lookup time of `num_steps` steps."""
        self._look_s = min(_SAVED_STEPS * LOOK_SHARE * step_s, self._look_s + num_steps * LOOK_SHARE * step_s)

    def _depth(self, num_requests: int) -> int:
        """Most drafts per request that a step verifies."""
        return max(1, min(self._max_drafts, self._max_step_drafts // num_requests))

    def _can_pay(self, tracks: Sequence[Track], wants: bool) -> bool:
        """True if every account can pay for the next step and the outstanding one, even if all drafts
        fail."""
        if self.books.plain_s < self._paid_at_s and not self._was_made:
            return False
        num = len(tracks)
        most_extra_s = self.books.estimate(num).most_extra_s
        requests = [self._of(track) for track in tracks]
        least_s = min(self.books.balance_s(one.account, one.gained_s) for one in requests)
        self._room_s = least_s - (most_extra_s if self._was_made else 0.0)
        need_s = most_extra_s + SURE * self.books.rows_s(num, num * self._depth(num))
        if not self._on_device:
            lookups_s = SURE * self._search_s * sum(map(_is_looked_up, requests, tracks))
            need_s += lookups_s
            self._room_s -= lookups_s
        if least_s < need_s or self.leaves_out:
            self._paid_at_s, self._followed_from_s = self._when_paid(tracks, need_s - least_s)
        return wants and least_s >= (1 + self._was_made) * need_s

    def _when_paid(self, tracks: Sequence[Track], missing_s: float) -> tuple[float, float]:
        """On the clock of plain steps: when every account has earned what is missing, and when the draft
        model's passes begin. Passes cost time, too. If they cost more than they bring, they begin as late as
        drafts allow."""
        books, num, now_s = self.books, len(tracks), self.books.plain_s
        share = books.earned_share(num)
        if share <= 0:
            return math.inf, math.inf
        if not self._on_device:
            return now_s + missing_s / share, now_s
        step_s, follow_s = books.plain_step_s(num), SURE * books.follow_s(num)
        # share of the time earned while passes run
        wait_s, earned = step_s * max(map(_num_lacking, tracks)), share - follow_s / step_s
        if earned > 0:
            wait_s = max(wait_s, missing_s / earned)
        elif wait_s * earned < missing_s:
            wait_s = math.inf
        lead_s = step_s * _LEAD_TOKENS
        apart_s = max(lead_s, (missing_s + follow_s * _LEAD_TOKENS) / share)
        return (now_s + wait_s, now_s) if wait_s <= apart_s else (now_s + apart_s, now_s + apart_s - lead_s)

    def _learn(self, request: _Request, track: Track, num_drafts: int, num_kept: int) -> None:
        request.num_seen = len(track.tokens)
        request.record.saw(num_drafts, num_kept)
        self._pool.saw(num_drafts, num_kept)
        self._survival = self._pool.survival(self._prior)
        if not self._on_device:
            request.is_promising = sum(request.record.survival(self._pool.rate(self._prior))) >= _PROMISING
            self._num_kept += _NEWEST * (num_kept - self._num_kept)

    # ------------------------------------------------------------------------------------------------ lookups

    def _look(self, tracks: Sequence[Track]) -> None:
        """Try lookups on a few requests while the time for them lasts."""
        for _ in tracks:
            if self._look_s <= 0:
                return
            self._num_looks += 1
            track = tracks[self._num_looks % len(tracks)]
            if (
                len(track.tokens) < track.num_prompt + self._max_drafts
                or track.request.sampling.grammar is not None
            ):
                return  # nothing to compare; the next step tries another request
            started_s = self._clock()
            self._look_at(track)
            took_s = self._clock() - started_s
            self._look_s -= took_s
            self._busy_s += took_s
            self._search_s = max(took_s, 0.9 * self._search_s)

    def _look_at(self, track: Track) -> None:
        """Measure how many of its last tokens a lookup would have proposed."""
        request, num = self._of(track), self._max_drafts
        num_kept = self._search(request, track, lambda proposer: proposer.hindsight(track.tokens, num))
        self._learn(request, track, *((1, 0) if num_kept is None else (num, num_kept)))

    def _search(
        self, request: _Request, track: Track, look: Callable[[NgramProposer], _Found]
    ) -> _Found | None:
        if request.proposer is None:
            return None
        try:
            return look(request.proposer)
        except Exception:  # proposals are optional
            log.exception("nothing more is proposed for request %s", track.request.id)
            request.proposer = None
            return None

    def _proposal(self, one: Decoding) -> tuple[int, ...]:
        """Of drafts on the device the host knows only the number. If a token is still being sampled, the
        proposal for its position is dropped."""
        most, track = min(one.most, self._max_drafts), one.track
        if self._on_device:
            return tuple(range(-2, -2 - min(most, one.num_pending), -1))
        request = self._of(track)
        if self.force is None and not _is_looked_up(request, track):
            return ()
        num_unknown = track.num_expected - len(track.tokens)
        found = self._search(
            request, track, lambda proposer: proposer.propose(track.tokens, most + num_unknown)
        )
        drafts = (found or ())[num_unknown:]
        if not drafts and self.force is None:
            self._learn(request, track, 1, 0)
        return drafts

    def _of(self, track: Track) -> _Request:
        found = self._requests.get(track.request.id)
        if found is None:
            proposer: NgramProposer | None = None
            if not self._on_device:
                prefix = track.request.prefix
                proposer = NgramProposer(
                    b"" if prefix is None else prefix.scope, None if prefix is None else self._shared
                )
            found = _Request(
                proposer, DraftRecord(self._max_drafts), self.books.opened(), num_seen=len(track.tokens)
            )
            self._requests[track.request.id] = found
        return found


def _num_lacking(track: Track) -> int:
    """Tokens that the draft model must still process before it drafts, since it skipped earlier ones."""
    return max(0, track.blank_to + _LEAD_TOKENS - track.num_planned) if track.blank_to else 0


def _is_looked_up(request: _Request, track: Track) -> bool:
    """True if a step looks it up. Trial lookups cover every request."""
    return request.is_promising or len(track.tokens) - request.num_seen >= _FORGOTTEN_TOKENS
