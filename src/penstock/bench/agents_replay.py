"""Replays users against an engine in this process, or an OpenAI-compatible server. Owns who asks when, the
connections, and what was seen; judges nothing.

Every user is a thread that sends the next request when the last is answered, at once or after a pause. In
this process the calling thread steps the engine and does nothing else. A server gets a connection for each
request: `POST /v1/completions`, token ids, streamed.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

from penstock.bench.trace_files import Question, User
from penstock.contract import FinishReason, SamplingParams, Submission, TokenEvent
from penstock.engine.engine import Engine
from penstock.errors import ConfigError, PenstockError, StepFailed
from penstock.models.progress import Progress

IDLE_S = 0.05  # a loop without work looks for its limit this often
TIMEOUT_S = 600.0  # without a byte from a server
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


class UserReplay:
    """One run of all users. A user whose request fails asks no more."""

    def __init__(self, users: Sequence[User]) -> None:
        self.error: Exception | None = None  # of the last request that failed
        self.over = threading.Event()
        self._users = users
        self._lock = threading.Lock()  # records do not change while they are read
        self._records: list[Record] = []
        self._num_asking = len(users)
        self._start_s = 0.0

    def ask(self, record: Record) -> None:
        """Block until the request is answered."""
        raise NotImplementedError

    def meanwhile(self) -> None:
        """What the thread that runs the replay does, again and again."""
        time.sleep(IDLE_S)

    @property
    def records(self) -> list[Record]:
        """In order of submission."""
        with self._lock:
            return sorted(self._records, key=lambda record: record.submit_s)

    def now_s(self) -> float:
        return time.perf_counter() - self._start_s

    def run(self, limit_s: float | None, progress: Progress) -> float:
        """Until all are answered or have failed, or for `limit_s`; returns the seconds that it took."""
        self._start_s = time.perf_counter()
        for user in self._users:
            threading.Thread(target=self._replay, args=(user,), name="bench-user", daemon=True).start()
        total, told = sum(len(user.asks) for user in self._users), -1
        try:
            while self._num_asking and (limit_s is None or self.now_s() < limit_s):
                self.meanwhile()
                if told != len(self._records):
                    told = len(self._records)
                    progress("agents: requests answered", sum(one.done for one in self.records), total)
        finally:
            end_s = self.now_s()
            with self._lock:
                self.over.set()
        ends = [record.end_s for record in self.records if record.end_s is not None]
        return end_s if self._num_asking else max(ends, default=end_s)

    def _replay(self, user: User) -> None:
        for number, ask in enumerate(user.asks, 1):
            if self.over.wait(ask.think_s):
                return
            record, error = Record(user.conversation, number, ask, self.now_s()), None
            with self._lock:
                self._records.append(record)
            try:
                self.ask(record)
            except (PenstockError, ServerRefused, OSError, http.client.HTTPException) as failure:
                error = failure
            with self._lock:
                if self.over.is_set():
                    return
                record.end_s = record.end_s or self.now_s()
                if error is not None:
                    self.error, record.error = error, str(error) or type(error).__name__
                    break
        with self._lock:
            self._num_asking -= 1


class EngineReplay(UserReplay):
    """Asks an engine, and steps it."""

    def __init__(self, users: Sequence[User], engine: Engine, salt: str) -> None:
        super().__init__(users)
        self._engine = engine
        self._salt = salt
        self._turn_s: float | None = None  # tokens of one step have come at the same time

    def run(self, limit_s: float | None, progress: Progress) -> float:
        seconds = super().run(limit_s, progress)
        if self.error is not None:
            raise self.error
        return seconds

    def meanwhile(self) -> None:
        if self.error is not None:
            raise self.error
        self._turn_s = None
        if not self._engine.step():
            self._engine.wait_work(IDLE_S)

    def ask(self, record: Record) -> None:
        """The engine's close ends requests that are open then."""
        ended: Future[TokenEvent] = Future()

        def listen(event: TokenEvent) -> None:
            if self._turn_s is None:
                self._turn_s = self.now_s()
            if event.tokens:
                record.came(self._turn_s, len(event.tokens))
            if event.source is not None:
                record.source, record.waited_s = asdict(event.source), event.waited_s
            if event.finish is not None:
                record.end_s = self._turn_s
                ended.set_result(event)

        sampling = SamplingParams(max_tokens=record.ask.max_tokens, temperature=0.0, ignore_eos=True)
        prompt = cast(Sequence[int], record.ask.prompt)  # as the engine takes it
        self._engine.submit(Submission(prompt, sampling, cache_salt=self._salt), listen)
        if (event := ended.result()).finish is not FinishReason.LENGTH:
            raise StepFailed(event.error or f"a request ended early: {event.finish}")


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


class UrlReplay(UserReplay):
    """Asks a server."""

    def __init__(self, users: Sequence[User], server: ServerAddress) -> None:
        super().__init__(users)
        self._server = server
        self._parts = server.parts()
        self._extensions: dict[str, Any] = {"ignore_eos": True}  # that most servers have

    def ask(self, record: Record) -> None:
        body: dict[str, Any] = {
            "model": self._server.model,
            "prompt": record.ask.prompt.tolist(),
            "max_tokens": record.ask.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._server.hints:
            body |= {"prompt_cache_key": record.conversation, "session_id": record.conversation}
        record.submit_s = self.now_s()
        try:
            self._stream(record, body | self._extensions)
        except ServerRefused as error:
            if record.first_s is not None or "ignore_eos" not in str(error):
                raise
            self._extensions = {}
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
                if self.over.is_set():
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
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        if not line.startswith(b"data:"):
            continue
        try:
            event = json.loads(data)
        except ValueError:
            raise ServerRefused(f"not JSON: {data[:_MOST_SHOWN]!r}") from None
        if isinstance(event, dict):
            yield event
    raise ServerRefused("the answer ended before its time")
