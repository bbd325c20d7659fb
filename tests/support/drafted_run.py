"""Requests that decode under `Speculation`, on a clock of their own. Owns the steps: what each takes, and
when its result is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.contract import Prefix, Request, SamplingParams
from penstock.engine.scheduling.drafts import Decoding
from penstock.engine.scheduling.track import Track
from penstock.speculation.drafter import Speculation
from penstock.speculation.length import StepCosts

BLOCK = 16
SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128)
Kept = Callable[[int, int, int], int]  # request, step, drafts -> how many are kept


@dataclass(frozen=True)
class Prices:
    """What steps really take, in milliseconds. The table has what rows take, and what warming up has found
    for making drafts."""

    plain: float = 1.0
    row: float = 0.0005  # each row of a padded step
    drafting: float = 0.35  # of a step that makes drafts on the device, or is read before the next is planned
    lookup: float = 0.0
    following: float = 0.0  # of a pass over a block of each request, by what makes drafts
    bookkeeping: float = 0.0  # of every step, since there is speculation

    def table(self) -> StepCosts:
        seconds = tuple((self.plain + self.row * size) / 1e3 for size in SIZES)
        return StepCosts(
            SIZES,
            seconds,
            self.drafting / 1e3,
            follow_s=self.following / BLOCK / 1e3,
            bookkeeping_s=self.bookkeeping / 1e3,
        )

    def step_s(self, num_rows: int, drafts: bool, catches_up: bool = False) -> float:
        rows = self.row * next(size for size in SIZES if size >= num_rows)
        return (self.plain + rows + self.drafting * drafts + self.following * catches_up) / 1e3


@dataclass
class Ran:
    """One answer of each request."""

    plain_s: float  # without speculation
    seconds: dict[str, float] = field(default_factory=dict)
    with_drafts: list[int] = field(default_factory=list)  # numbers of the steps that had to do with drafts
    num_passes: int = 0  # over what was decoded before, while no drafts were made
    num_steps: int = 0
    worst: float = 0.0  # how far a request was behind plain decoding at any time, as a share of that

    @property
    def slowest(self) -> float:
        return max(self.seconds.values()) / self.plain_s


class _Unread(NamedTuple):
    shares: list[tuple[Track, tuple[int, ...]]]
    num_ahead: int
    started_s: float
    ended_s: float
    catches_up: bool

    @property
    def num_rows(self) -> int:
        return sum(1 + len(drafts) for _, drafts in self.shares)

    @property
    def drafts(self) -> bool:
        return self.num_ahead > 0 or self.catches_up or self.num_rows > len(self.shares)


class _Timed(Speculation):
    """Lookups take time on the clock of the run."""

    tell: Callable[[], None]

    def _search(self, *args: Any) -> Any:
        self.tell()
        return super()._search(*args)


class Run:
    """All requests begin together, and a step takes what it took at the beginning: nobody gains by the end of
    others. `kept` says how the device's drafts fare; what is looked up is compared with `answers`.
    `host_bound`: what a step takes is the host's work of planning and launching it, done while the step
    before is running; that one is read after it, and has its time."""

    def __init__(
        self,
        prices: Prices,
        num_requests: int,
        kept: Kept | None = None,
        answers: Callable[[int], Sequence[int]] = lambda n: range(n, 10**9),
        host_bound: bool = False,
    ) -> None:
        self._on_device = kept is not None
        self._prices, self._kept, self._answers, self._num_requests = prices, kept, answers, num_requests
        self._now_s, self._number = 0.0, 0
        self._host_bound, self._read_s = host_bound, 0.0
        self.speculation = _Timed(4 if kept else 8, 64, prices.table(), self._on_device, lambda: self._now_s)
        self.speculation.tell = self._look_up

    def _look_up(self) -> None:
        self._now_s += self._prices.lookup / 1e3

    def go(self, num_tokens: int) -> Ran:
        """What was learned stays for the next call."""
        self._number += 1
        tracks = [self._track(n, num_tokens) for n in range(self._num_requests)]
        plain_s, began_s = self._prices.step_s(self._num_requests, drafts=False), self._now_s
        ran, unread, num_pending = Ran(num_tokens * plain_s), list[_Unread](), 0
        while len(ran.seconds) < len(tracks):
            if unread and not self._on_device and unread[0].num_rows > len(unread[0].shares):
                self._read(unread, ran, began_s, num_tokens)
            due = [track for track in tracks if track.num_expected - track.num_prompt < num_tokens]
            if due:
                unread.append(self._step(due, num_pending, num_tokens))
                num_pending = unread[-1].num_ahead
                if ran.num_steps == 0:
                    self._read_s = self._now_s  # by now the prompts' step was read
                if num_pending or unread[-1].num_rows > len(due):
                    ran.with_drafts.append(ran.num_steps)
                ran.num_steps += 1
                ran.num_passes += unread[-1].catches_up
            if len(unread) > 1 or (unread and not due):
                self._read(unread, ran, began_s, num_tokens)
        return ran

    def _step(self, due: Sequence[Track], num_pending: int, num_tokens: int) -> _Unread:
        started_s, proposed = self._now_s, list[tuple[int, ...]]([()] * len(due))
        for track in due:
            track.num_planned = track.num_expected
        if self.speculation.considers(due):
            mosts = (num_tokens - (track.num_expected - track.num_prompt) - 1 for track in due)
            proposed[:] = self.speculation.propose(
                [Decoding(*one, num_pending) for one in zip(due, mosts, strict=True)], 0
            )
        num_ahead, num_drafts = self.speculation.num_ahead, sum(map(len, proposed))
        for track, drafts in zip(due, proposed, strict=True):
            track.num_in_flight += 1 + len(drafts)
        catches_up = self._on_device and self._catches_up(due, num_ahead > 0)
        drafting = bool(num_ahead if self._on_device else num_drafts)
        self._now_s += (
            self._prices.step_s(self._num_requests + num_drafts, drafting, catches_up)
            + self._prices.bookkeeping / 1e3
        )
        return _Unread(list(zip(due, proposed, strict=True)), num_ahead, started_s, self._now_s, catches_up)

    def _catches_up(self, due: Sequence[Track], is_followed: bool) -> bool:
        """As the scheduler has it: a pass over what some request lacks a block of, unless it is left out."""
        if not is_followed and all(track.num_planned - track.num_followed < BLOCK for track in due):
            return False
        for track in due:
            track.num_followed = track.num_planned
            if not is_followed and self.speculation.leaves_out:
                track.blank_to = track.num_planned
        return not is_followed and not self.speculation.leaves_out

    def _read(self, unread: list[_Unread], ran: Ran, began_s: float, num_tokens: int) -> None:
        step, leads = unread.pop(0), bool(unread) and unread[0].drafts
        started_s, ended_s = (
            (self._read_s, self._now_s) if self._host_bound else (step.started_s, step.ended_s)
        )
        self._read_s = self._now_s
        for track, drafts in step.shares:
            number, first = int(track.request.id), len(track.tokens) - track.num_prompt
            answer = self._answers(number)[first : first + 1 + len(drafts)]
            agree = (at for at, pair in enumerate(zip(drafts, answer, strict=False)) if pair[0] != pair[1])
            num_kept = (
                next(agree, len(drafts))
                if self._kept is None
                else self._kept(number, ran.num_steps, len(drafts))
            )
            num_kept = min(num_kept, len(drafts), num_tokens - first - 1)
            track.num_in_flight -= 1 + len(drafts)
            track.tokens += answer[: 1 + num_kept]
            if drafts:
                self.speculation.saw(track, len(drafts), num_kept)
            done = first + 1 + num_kept
            took_s = ended_s - began_s
            ran.worst = max(ran.worst, took_s / (done * ran.plain_s / num_tokens) - 1)
            if done == num_tokens:
                ran.seconds[track.request.id] = took_s
                self.speculation.ended(track)
        if ended_s > started_s:  # a host that has launched nothing more just waits for the last step
            self.speculation.step_took(
                len(step.shares), step.num_rows, ended_s - started_s, step.num_ahead, step.catches_up, leads
            )

    def _track(self, number: int, num_tokens: int) -> Track:
        request = Request(
            str(number), [7], SamplingParams(max_tokens=num_tokens), prefix=Prefix(b"%d" % self._number, ())
        )
        return Track(request, 1, request.prefix, tokens=[7])
