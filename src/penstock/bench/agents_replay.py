"""Replays users against an engine in this process. Owns who asks when, and what was seen; judges nothing.

The calling thread steps the engine and does nothing else. One thread besides submits: the listener of an answered request tells it, and it
sends that user's next one, at once or after a pause.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from queue import Empty, SimpleQueue
from typing import cast

from penstock.bench.agents_users import Ask, User
from penstock.contract import FinishReason, SamplingParams, TokenEvent
from penstock.engine.engine import Engine
from penstock.errors import StepFailed
from penstock.models.progress import Progress

STAGE = "agents: requests answered"
IDLE_S = 0.05  # a loop without work looks for its limit this often


@dataclass(slots=True, eq=False)
class Record:
    """What became of one request. Times are seconds since the replay began."""

    conversation: str
    number: int  # of the conversation, from 1 on
    ask: Ask
    submit_s: float
    waited_s: float | None = None  # from submit to its first step; None: not known
    first_s: float | None = None
    end_s: float | None = None
    source: dict[str, int] | None = None  # prompt tokens by where their KV came from
    token_s: list[tuple[float, int]] = field(default_factory=list)  # when tokens came, and how many
    num_output: int | None = None  # as a server counts it; None: as many as came
    error: str | None = None

    @property
    def done(self) -> bool:
        return self.end_s is not None and self.error is None

    @property
    def generated(self) -> int:
        return sum(num for _, num in self.token_s) if self.num_output is None else self.num_output

    def came(self, now_s: float, num_tokens: int) -> None:
        if self.first_s is None:
            self.first_s = now_s
        self.token_s.append((now_s, num_tokens))


class Agenda:
    """Who asks next, and when. `answered` and `end` may be called from any thread, the others from the one that sends."""

    def __init__(self, users: Sequence[User], clock: Callable[[], float]) -> None:
        self._users = users
        self._clock = clock
        self._num_asked = [0] * len(users)
        self._due: list[tuple[float, int]] = [(0.0, user) for user in range(len(users))]  # a heap
        self._answered: SimpleQueue[tuple[float, int] | None] = SimpleQueue()
        self._num_left = sum(len(user.asks) for user in users)  # to be sent
        self._ended = False

    def answered(self, user: int, now_s: float) -> None:
        self._answered.put((now_s, user))

    def end(self) -> None:
        """Nobody asks any more."""
        self._ended = True
        self._answered.put(None)

    def wait_next(self) -> tuple[int, int] | None:
        """Block until a request is due: its user, and its number from 0 on. None: nobody asks any more."""
        while self._num_left and not self._ended:
            due_s = self._due[0][0] - self._clock() if self._due else None
            if due_s is not None and due_s <= 0:
                return self._take()
            with contextlib.suppress(Empty):
                self._schedule(self._answered.get(timeout=due_s))
        return None

    def try_next(self) -> tuple[int, int] | None:
        """The same without waiting; None: nothing is due."""
        while not self._answered.empty():
            self._schedule(self._answered.get())
        return self._take() if self._due and self._due[0][0] <= self._clock() else None

    def _schedule(self, answered: tuple[float, int] | None) -> None:
        if answered is None:
            return
        now_s, user = answered
        if (number := self._num_asked[user]) < len(asks := self._users[user].asks):
            heapq.heappush(self._due, (now_s + asks[number].think_s, user))

    def _take(self) -> tuple[int, int]:
        _, user = heapq.heappop(self._due)
        number = self._num_asked[user]
        self._num_asked[user] += 1
        self._num_left -= 1
        return user, number


class Replay:
    """One run of all users. `records` are in order of submission."""

    def __init__(self, users: Sequence[User], engine: Engine, salt: str) -> None:
        self.records: list[Record] = []
        self._users = users
        self._engine = engine
        self._salt = salt
        self._agenda = Agenda(users, self.now_s)
        self._num_all = self._num_open = sum(len(user.asks) for user in users)  # open: not answered
        self._start_s = time.perf_counter()
        self._turn_s: float | None = None  # tokens of one step have come at the same time
        self._error: BaseException | None = None

    def now_s(self) -> float:
        return time.perf_counter() - self._start_s

    def run(self, limit_s: float | None, progress: Progress) -> float:
        """Until all are answered, or for `limit_s`; returns the seconds that it took. What is open then is left to the engine's close."""
        self._start_s = time.perf_counter()
        thread = threading.Thread(target=self._submit_all, name="bench-users", daemon=True)
        thread.start()
        told = -1
        while self._num_open and self._error is None and (limit_s is None or self.now_s() < limit_s):
            self.step()
            if told != self._num_open:
                told = self._num_open
                progress(STAGE, self._num_all - told, self._num_all)
        end_s = self.now_s()
        self._agenda.end()
        thread.join()
        if self._error is not None:
            raise self._error
        return end_s

    def step(self) -> None:
        """One turn of the engine."""
        self._turn_s = None
        if not self._engine.step():
            self._engine.wait_work(IDLE_S)

    def submit_due(self) -> bool:
        """For a caller that both submits and steps: sends what is due, and returns whether any is open."""
        while (due := self._agenda.try_next()) is not None:
            self._submit(*due)
        return self._num_open > 0

    def _submit_all(self) -> None:
        try:
            while (due := self._agenda.wait_next()) is not None:
                self._submit(*due)
        except BaseException as error:
            self._error = error

    def _submit(self, user: int, number: int) -> None:
        asked = self._users[user]
        ask = asked.asks[number]
        record = Record(asked.conversation, number + 1, ask, self.now_s())
        self.records.append(record)
        sampling = SamplingParams(max_tokens=ask.max_tokens, temperature=0.0, ignore_eos=True)
        prompt = cast(Sequence[int], ask.prompt)  # as the engine takes it
        self._engine.submit(prompt, sampling, self._listener(user, record), cache_salt=self._salt)

    def _listener(self, user: int, record: Record) -> Callable[[TokenEvent], None]:
        def listen(event: TokenEvent) -> None:
            if self._turn_s is None:
                self._turn_s = self.now_s()
            if event.tokens:
                record.came(self._turn_s, len(event.tokens))
            if event.source is not None:
                record.source, record.waited_s = asdict(event.source), event.waited_s
            if event.finish is FinishReason.LENGTH:
                record.end_s = self._turn_s
                self._num_open -= 1
                self._agenda.answered(user, self._turn_s)
            elif event.finish is not None:
                record.error = event.error or f"a request ended early: {event.finish}"
                self._error = StepFailed(record.error)

        return listen
