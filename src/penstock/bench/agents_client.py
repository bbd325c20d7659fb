"""Replays users against an OpenAI-compatible server: `POST /v1/completions`, token ids, streamed. Owns the connections; judges nothing."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from penstock.bench.agents_replay import STAGE, Record
from penstock.bench.agents_users import Ask, User
from penstock.errors import ConfigError
from penstock.models.progress import Progress

TIMEOUT_S = 600.0  # without a byte from the server
LOOK_S = 0.2
_MOST_SHOWN = 300  # characters of a server's error


@dataclass(frozen=True, slots=True)
class Server:
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
            raise ConfigError("argument --url: a name, a password, a query or a fragment has no place in it; see --api-key")
        return parts


class Refused(Exception):
    """The server's answer is an error, or no answer."""


class UrlReplay:
    """One run of all users, each on a thread and a connection of its own. A user whose request fails asks no more."""

    def __init__(self, users: Sequence[User], server: Server) -> None:
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
        threads = [threading.Thread(target=self._replay, args=(user,), name="bench-user", daemon=True) for user in self._users]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and (limit_s is None or self.now_s() < limit_s):
                thread.join(LOOK_S)
                progress(STAGE, sum(record.done for record in self.records), total)
        end_s = self.now_s()
        with self._lock:  # records do not change behind the back of whoever reads them
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
            except (Refused, OSError, http.client.HTTPException) as error:
                failure = str(error) or type(error).__name__
            with self._lock:
                if not self._over.is_set():
                    record.end_s, record.error = self.now_s(), failure
            if failure is not None:
                return

    def _body(self, user: User, ask: Ask) -> dict[str, Any]:
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
        except Refused as error:
            if record.first_s is not None or "ignore_eos" not in str(error):
                raise
            self._ignore_eos = False
            self._stream(record, body)

    def _stream(self, record: Record, body: dict[str, Any]) -> None:
        parts = self._parts
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if self._server.api_key is not None:
            headers["Authorization"] = f"Bearer {self._server.api_key}"
        try:
            connection.request("POST", parts.path.rstrip("/") + "/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise Refused(f"{answer.status}: {answer.read(4096).decode(errors='replace')[:_MOST_SHOWN]}")
            for event in _events(answer):
                if self._over.is_set():
                    return
                self._take_in(record, event)
        finally:
            connection.close()
        if record.first_s is None:
            raise Refused("the answer had no token")

    def _take_in(self, record: Record, event: dict[str, Any]) -> None:
        if event.get("error"):
            raise Refused(json.dumps(event["error"])[:_MOST_SHOWN])
        for choice in event.get("choices") or []:
            if choice.get("text") or choice.get("finish_reason") is None or record.first_s is None:  # else it only says that it is over
                record.came(self.now_s(), 1)
        if isinstance(usage := event.get("usage"), dict):
            record.source = source_of(usage, len(record.ask.prompt))
            if isinstance(num := usage.get("completion_tokens"), int):
                record.num_output = num


def source_of(usage: dict[str, Any], num_prompt: int) -> dict[str, int] | None:
    """By tier where the server says so, as `penstock serve` does; else what it had and what not. None: it does not say."""
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
            raise Refused(f"not JSON: {data[:_MOST_SHOWN]!r}") from None
        if isinstance(event, dict):
            yield event
    raise Refused("the answer ended before its time")
