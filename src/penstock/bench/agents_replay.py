"""Replays users against an engine in this process, or an OpenAI-compatible server. Owns who asks when, the
connections, and what was seen; judges nothing.

Here the calling thread steps the engine and does nothing else. One thread besides submits: the listener of an
answered request tells it, and it sends that user's next one, at once or after a pause. A server is asked by a
thread and a connection for each user: `POST /v1/completions`, token ids, streamed.
"""

from __future__ import annotations

import contextlib
import heapq
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from queue import Empty, Queue
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

from penstock.bench.trace_files import Question, User
from penstock.contract import FinishReason, SamplingParams, TokenEvent
from penstock.engine.engine import Engine
from penstock.errors import ConfigError, StepFailed
from penstock.models.progress import Progress

STAGE = "agents: requests answered"
IDLE_S = 0.05  # a loop without work looks for its limit this often
TIMEOUT_S = 600.0  # without a byte from a server
LOOK_S = 0.2
_MOST_SHOWN = 300  # characters of a server's error


@dataclass(slots=True, eq=False)
class Record:
    """What became of one request. Times are seconds since the replay began."""

    conversation: str
    number: int  # of the conversation, from 1 on
    ask: Question
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
    """Who asks next, and when. `answered` and `end` may be called from any thread, the others from the one
    that sends."""

    def __init__(self, users: Sequence[User], clock: Callable[[], float]) -> None:
        self._users = users
        self._clock = clock
        self._num_asked = [0] * len(users)
        self._due: list[tuple[float, int]] = [(0.0, user) for user in range(len(users))]  # a heap
        self._answered: Queue[tuple[float, int] | None] = Queue()
        self._num_left = sum(len(user.asks) for user in users)  # to be sent
        self._ended = False

    def answered(self, user: int, now_s: float) -> None:
        self._answered.put((now_s, user))

    def end(self) -> None:
        """No user asks any more."""
        self._ended = True
        self._answered.put(None)

    def wait_next(self) -> tuple[int, int] | None:
        """Block until a request is due: its user, and its number from 0 on. None: no user asks any more."""
        while self._num_left and not self._ended:
            due_s = self._due[0][0] - self._clock() if self._due else None
            if due_s is not None and due_s <= 0:
                return self._take()
            with contextlib.suppress(Empty):
                self._schedule(self._answered.get(timeout=due_s))
        return None

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


class EngineReplay:
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
        """Until all requests are answered, or for `limit_s`; returns the seconds. The engine's close ends
        open requests."""
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


# -------------------------------------------------------------------------------------------------- over HTTP


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where requests go."""

    url: str  # up to and with /v1
    model: str
    api_key: str | None = None
    hints: bool = False  # say which requests belong to one conversation

    def parts(self) -> SplitResult:
        try:
            parts = urlsplit(self.url)
            _ = parts.port
        except ValueError as error:
            raise ConfigError(f"argument --url: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("argument --url: it must look like http://host:port/v1")
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(
                "argument --url: a name, a password, a query or a fragment has no place in it; see --api-key"
            )
        return parts


class ServerRefused(Exception):
    """The server's answer is an error, or no answer."""


class UrlReplay:
    """One run of all users, each on a thread and a connection of its own. A user whose request fails asks no
    more."""

    def __init__(self, users: Sequence[User], server: ServerAddress) -> None:
        self._users = users
        self._server = server
        self._parts = server.parts()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._records: list[Record] = []
        self._ignore_eos = True  # an extension of the API that most servers have
        self._start_s = 0.0

    @property
    def records(self) -> list[Record]:
        with self._lock:
            return sorted(self._records, key=lambda record: record.submit_s)

    def now_s(self) -> float:
        return time.perf_counter() - self._start_s

    def run(self, limit_s: float | None, progress: Progress) -> float:
        """Until all are answered or have failed, or for `limit_s`; returns the seconds that it took."""
        total = sum(len(user.asks) for user in self._users)
        self._start_s = time.perf_counter()
        threads = [
            threading.Thread(target=self._replay, args=(user,), name="bench-user", daemon=True)
            for user in self._users
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and (limit_s is None or self.now_s() < limit_s):
                thread.join(LOOK_S)
                progress(STAGE, sum(record.done for record in self.records), total)
        end_s = self.now_s()
        with self._lock:  # records do not change while they are read
            self._over.set()
        done = [record.end_s for record in self.records if record.end_s is not None]
        return end_s if limit_s is not None and end_s >= limit_s else max(done, default=end_s)

    def _replay(self, user: User) -> None:
        for number, ask in enumerate(user.asks, 1):
            if self._over.wait(ask.think_s):
                return
            body = self._body(user, ask)
            record = Record(user.conversation, number, ask, self.now_s())
            failure = None
            with self._lock:
                self._records.append(record)
            try:
                self._ask(record, body)
            except (ServerRefused, OSError, http.client.HTTPException) as error:
                failure = str(error) or type(error).__name__
            with self._lock:
                if not self._over.is_set():
                    record.end_s, record.error = self.now_s(), failure
            if failure is not None:
                return

    def _body(self, user: User, ask: Question) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._server.model,
            "prompt": ask.prompt.tolist(),
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._server.hints:
            body |= {"prompt_cache_key": user.conversation, "session_id": user.conversation}
        return body

    def _ask(self, record: Record, body: dict[str, Any]) -> None:
        try:
            self._stream(record, body | ({"ignore_eos": True} if self._ignore_eos else {}))
        except ServerRefused as error:
            if record.first_s is not None or "ignore_eos" not in str(error):
                raise
            self._ignore_eos = False
            self._stream(record, body)

    def _stream(self, record: Record, body: dict[str, Any]) -> None:
        parts = self._parts
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        headers: dict[str, str | bytes] = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if self._server.api_key is not None:
            headers["Authorization"] = f"Bearer {self._server.api_key}".encode()
        try:
            connection.request("POST", parts.path.rstrip("/") + "/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise ServerRefused(
                    f"{answer.status}: {answer.read(4096).decode(errors='replace')[:_MOST_SHOWN]}"
                )
            for event in _events(answer):
                if self._over.is_set():
                    return
                self._take_in(record, event)
        finally:
            connection.close()
        if record.first_s is None:
            raise ServerRefused("the answer had no token")

    def _take_in(self, record: Record, event: dict[str, Any]) -> None:
        if event.get("error"):
            raise ServerRefused(json.dumps(event["error"])[:_MOST_SHOWN])
        for choice in event.get("choices") or []:
            # else it only says that it is over
            if choice.get("text") or choice.get("finish_reason") is None or record.first_s is None:
                record.came(self.now_s(), 1)
        if isinstance(usage := event.get("usage"), dict):
            record.source = source_of(usage, len(record.ask.prompt))
            if isinstance(num := usage.get("completion_tokens"), int):
                record.num_output = num


def source_of(usage: dict[str, Any], num_prompt: int) -> dict[str, int] | None:
    """By tier if the server reports that, as `penstock serve` does; else cached and computed. None: it
    reports nothing."""
    details = usage.get("prompt_tokens_details")
    if not isinstance(details, dict):
        return None
    by_tier = details.get("kv_source")
    if isinstance(by_tier, dict) and by_tier and all(isinstance(num, int) for num in by_tier.values()):
        return {str(tier): num for tier, num in by_tier.items()}
    cached = details.get("cached_tokens")
    return {"cached": cached, "computed": num_prompt - cached} if isinstance(cached, int) else None


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """What the server sends, until it says that it is done."""
    for line in answer:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise ServerRefused(f"not JSON: {data[:_MOST_SHOWN]!r}") from None
        if isinstance(event, dict):
            yield event
    raise ServerRefused("the answer ended before its time")
