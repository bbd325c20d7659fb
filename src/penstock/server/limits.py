"""What a client may take: seats for work in progress, and the size and pace of a body. Owns counts, not the work."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

import anyio
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from penstock.config import ServerConfig
from penstock.errors import InvalidRequest, Overloaded
from penstock.server.faults import Hangup, Refused


class Count(Protocol):
    """How much work is in progress in all of a server."""

    @property
    def total(self) -> int: ...

    def try_add(self, num: int, limit: int) -> bool:
        """False, and nothing is added, where there would be more than `limit` then."""

    def remove(self, num: int) -> None: ...


class OwnCount:
    """Of a server that is one process."""

    def __init__(self) -> None:
        self.total = 0

    def try_add(self, num: int, limit: int) -> bool:
        if self.total + num > limit:
            return False
        self.total += num
        return True

    def remove(self, num: int) -> None:
        self.total -= num


class Gate:
    """Counts work in progress against a limit. Lives on the event loop's thread; says no rather than wait."""

    def __init__(self, limit: int, what: str, count: Count | None = None) -> None:
        self.limit = limit
        self._what = what
        self._counted: Count = OwnCount() if count is None else count

    @property
    def taken(self) -> int:
        return self._counted.total

    def take(self, num: int) -> Seats:
        """Seats that end with `give_back` or `with`; raises Overloaded and takes none where there are too few."""
        seats = Seats(self)
        seats.widen(num)
        return seats

    def claim(self, num: int) -> None:
        if not self._counted.try_add(num, self.limit):
            raise Overloaded(f"the server is at its limit of {self.limit} concurrent {self._what}; try again later")

    def give_back(self, num: int) -> None:
        self._counted.remove(num)


class Seats:
    """Seats taken at a gate by one HTTP request."""

    def __init__(self, gate: Gate) -> None:
        self.num = 0
        self._gate = gate

    def widen(self, num: int) -> None:
        """Hold `num` seats in all. More than the gate will ever have is the client's mistake, not a matter of time."""
        if num > self._gate.limit:
            raise InvalidRequest(f"one request may ask for {self._gate.limit} generations at most, this one asks for {num}", "n")
        self._gate.claim(num - self.num)
        self.num = num

    def give_back(self, num: int) -> None:
        self.num -= num
        self._gate.give_back(num)

    def __enter__(self) -> Seats:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.give_back(self.num)


async def read_body(scope: Scope, receive: Receive, config: ServerConfig) -> bytes:
    """The whole body, or a refusal as soon as it is known to be too large or too slow; no more bytes than allowed are ever held."""
    limit, timeout_s = config.max_body_bytes, config.read_timeout_s
    headers = Headers(scope=scope)
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise Refused(415, "compressed bodies are not supported: send it without Content-Encoding")
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    with anyio.move_on_after(timeout_s):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Hangup
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)
    raise Refused(408, f"the body did not arrive within {timeout_s:g} seconds", code="timeout")


def _too_large(limit: int) -> Refused:
    return Refused(413, f"the body is larger than the limit of {limit} bytes", code="body_too_large")
