"""A file in Chrome's trace format: a JSON array of events. Owns the queue, the thread that writes, and the
limits of both; knows nothing of what the events mean.

The array needs no closing bracket, so a file whose process was killed can be opened, too.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.errors import ConfigError

log = logging.getLogger(__name__)

MOST_QUEUED = 1 << 16  # events
FLUSH_S = 0.2
_JOIN_S = 10.0
_ENCODED_TOGETHER = 64  # events; meanwhile no other thread has the interpreter
_ENCODE = json.JSONEncoder(separators=(",", ":"), default=str).encode
_FIRST_TRACKS = ("engine", "compute")


class TraceEvent(NamedTuple):
    """One event, as the format has it. `more`: its fields besides these."""

    kind: str  # "X" for a slice with a duration, and so on
    name: str
    track: str
    at_s: float  # time.monotonic()
    more: Mapping[str, Any] = {}


class TraceFile:
    """`put` is for any thread and never waits: an event for which there is no room is dropped and counted.
    `close` ends the thread; idempotent."""

    def __init__(self, path: str, most_bytes: int, about: Mapping[str, Any]) -> None:
        """`about`: what the file says of itself. Raises ConfigError if it cannot be written."""
        self.num_dropped = 0
        self._path = path
        self._num_left = most_bytes
        self._start_s = time.monotonic()
        self._queue: deque[TraceEvent] = deque()
        self._full = False  # no more is written
        self._counting = threading.Lock()
        self._num_told = 0  # dropped events that the file mentions
        self._tracks: dict[str, int] = {}
        self._pid = os.getpid()
        self._ending = threading.Event()
        self._size = 0  # bytes of the file, without half an event
        try:
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - until `close`
            try:
                self._append(f"[{_ENCODE(self._metadata('process_name', 0, {'name': 'penstock'}))},\n")
            except OSError:
                self._file.close()
                raise
        except OSError as error:
            raise ConfigError(f"--trace {path} cannot be written: {error.strerror or error}") from None
        self.put(
            TraceEvent("i", "about this trace", "engine", self._start_s, {"s": "g", "args": dict(about)})
        )
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, *events: TraceEvent) -> None:
        if self._full or len(self._queue) + len(events) > MOST_QUEUED:
            with self._counting:
                self.num_dropped += len(events)
        else:
            self._queue.extend(events)

    def close(self) -> None:
        if not self._ending.is_set():
            self._ending.set()
            self._thread.join(_JOIN_S)
            atexit.unregister(self.close)
            if self.num_dropped:
                log.warning("%s lacks %d events that were dropped", self._path, self.num_dropped)

    # -------------------------------------------------------------------------------------------- its thread

    def _run(self) -> None:
        while not self._ending.wait(FLUSH_S):
            self._flush()
        self._flush()
        args = {"events dropped": self.num_dropped}
        end = TraceEvent("i", "end of the trace", "engine", time.monotonic(), {"s": "g", "args": args})
        self._write(f"{self._encoded([end])[:-2]}]\n")
        self._full = True
        self._file.close()

    def _flush(self) -> None:
        num_queued = len(self._queue)
        while num_queued > 0 and not self._full:
            num = min(num_queued, _ENCODED_TOGETHER)
            self._write_events([self._queue.popleft() for _ in range(num)])
            num_queued -= num
        if self._full:
            self._drop(0)  # what was put meanwhile
        elif self.num_dropped > self._num_told:
            self._num_told = self.num_dropped
            self._write(self._encoded([self._dropped()]))

    def _write_events(self, events: list[TraceEvent]) -> None:
        text = self._encoded(events)
        self._num_left -= len(text)
        if self._num_left < 0:
            self._full = True
            log.warning("%s has reached --trace-mib; nothing later is written to it", self._path)
        elif self._write(text):
            return
        self._drop(len(events))

    def _drop(self, num: int) -> None:
        """As many, and those in the queue."""
        while self._queue:
            self._queue.popleft()
            num += 1
        with self._counting:
            self.num_dropped += num

    def _encoded(self, events: list[TraceEvent]) -> str:
        """With what names their tracks, for those that are new."""
        fields: list[dict[str, Any]] = []
        for event in events:
            if event.track not in self._tracks:
                fields += self._new_track(event.track)
            fields.append(self._fields(event))
        return f"{_ENCODE(fields)[1:-1]},\n"

    def _new_track(self, name: str) -> list[dict[str, Any]]:
        number = self._tracks[name] = len(self._tracks) + 1
        place = _FIRST_TRACKS.index(name) if name in _FIRST_TRACKS else number
        return [
            self._metadata("thread_name", number, {"name": name}),
            self._metadata("thread_sort_index", number, {"sort_index": place}),
        ]

    def _fields(self, event: TraceEvent) -> dict[str, Any]:
        return {
            "ph": event.kind,
            "name": event.name,
            "pid": self._pid,
            "tid": self._tracks[event.track],
            "ts": round((event.at_s - self._start_s) * 1e6, 3),
            **event.more,
        }

    def _dropped(self) -> TraceEvent:
        args = {"dropped so far": self._num_told}
        return TraceEvent("i", "events dropped", "engine", time.monotonic(), {"s": "g", "args": args})

    def _metadata(self, name: str, track: int, args: Mapping[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": self._pid, "tid": track, "args": args}

    def _write(self, text: str) -> bool:
        """False: it failed, and the file ends before it. Where that cannot be, it is closed."""
        if self._file.closed:
            return False
        try:
            self._append(text)
        except OSError as error:
            self._full = True
            log.warning("%s cannot be written any more: %s", self._path, error)
            try:
                self._file.truncate(self._size)
                self._file.seek(self._size)
            except OSError:
                self._file.close()
            return False
        return True

    def _append(self, text: str) -> None:
        """At once: a killed process leaves no half of an event."""
        data = text.encode()
        size = self._size + len(data)
        while data:
            data = data[self._file.write(data) :]
        self._size = size
