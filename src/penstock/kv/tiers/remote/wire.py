"""One connection's bytes under a deadline, and as much of RESP2 as moving blocks needs. Owns the socket and what was received and not yet
read; what is asked, and what answers mean, is the store's business.

A value is received where it shall lie and sent from where it lies. Nothing unexpected is put up with: it ends in `StoreFailed`, and a
wire that still owes answers is never used again.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import StoreFailed

Buffer = bytes | bytearray | memoryview

_LINE_BYTES = 4096  # the longest line that is put up with; also how much of a value is copied once more, at most
_MAX_VALUE_BYTES = 1 << 31
_SCRATCH_BYTES = 1 << 18
_MAX_PARTS = 512  # the system takes about a thousand at once
_END = b"\r\n"


class Refusal(NamedTuple):
    """An error that the server answered with; of its text only the first word is kept, which names its kind."""

    word: str


class TimedSocket:
    """A connected socket on which nothing waits beyond the deadline, however many pieces things come in. The client library's connections
    use it as their socket, for the exchanges that are theirs."""

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self._socket = connected
        self.deadline = deadline  # on the monotonic clock

    def send_parts(self, parts: Sequence[Buffer]) -> None:
        """All of them, one behind the other, without joining them."""
        if isinstance(self._socket, ssl.SSLSocket):
            for part in parts:
                self.sendall(part)
            return
        for first in range(0, len(parts), _MAX_PARTS):
            self._send_some(parts[first : first + _MAX_PARTS])

    def _send_some(self, parts: Sequence[Buffer]) -> None:
        left = [memoryview(part) for part in parts]
        while left:
            self._arm()
            try:
                sent = self._socket.sendmsg(left)
            except OSError as error:
                raise _failure(error) from None
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left:
                left[0] = left[0][sent:]

    def sendall(self, data: Buffer) -> None:
        """Piece by piece: an encrypted socket's own gives each piece the whole time."""
        left = memoryview(data)
        while left:
            self._arm()
            try:
                left = left[self._socket.send(left) :]
            except OSError as error:
                raise _failure(error) from None

    def recv_into(self, target: memoryview | bytearray) -> int:
        """Some bytes, at least one."""
        self._arm()
        try:
            received = self._socket.recv_into(target)
        except OSError as error:
            raise _failure(error) from None
        if not received:
            raise StoreFailed("the shared store closed the connection")
        return received

    def recv(self, num_bytes: int) -> bytes:
        target = bytearray(num_bytes)
        return bytes(target[: self.recv_into(target)])

    @property
    def readable(self) -> bool:
        """Something has arrived, or the other side is gone."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def settimeout(self, timeout_s: float | None) -> None:
        """The library's wish; the deadline is what counts."""

    def shutdown(self, how: int) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()

    def _arm(self) -> None:
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise _failure(TimeoutError())
        self._socket.settimeout(remaining)


class Wire(TimedSocket):
    """A socket that speaks RESP2."""

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        super().__init__(connected, deadline)
        self._buffer = bytearray(_LINE_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # what was received and not yet read
        self.num_owed = 0  # answers that are still to come

    @property
    def quiet(self) -> bool:
        """Nothing is owed and nothing arrives: whatever comes unasked, an end included, makes it useless."""
        return not self.num_owed and self._start == self._end and not self.readable

    def send(self, parts: Sequence[Buffer], num_answers: int) -> None:
        """Commands, in `parts` wherever they lie."""
        self.num_owed += num_answers
        self.send_parts(parts)

    def read_answer(self) -> bytes | int | Refusal:
        """A whole answer that is one line: a status, a number or a refusal."""
        line = self._read_line()
        kind, rest = line[:1], line[1:]
        if kind not in (b"+", b":", b"-"):
            raise StoreFailed("the shared store answered with something else than a line")
        answer = rest if kind == b"+" else _number(rest) if kind == b":" else refusal_of(rest)
        self.num_owed -= 1
        return answer

    def read_value_size(self) -> int | Refusal | None:
        """What stands before a value: its size. None: there is none. After a size, `read_into` or `skip` all of it, then `end_value`."""
        line = self._read_line()
        kind, rest = line[:1], line[1:]
        size = _number(rest) if kind == b"$" else None
        if size is not None and 0 <= size <= _MAX_VALUE_BYTES:
            return size
        if size != -1 and kind != b"-":
            raise StoreFailed("the shared store answered with something else than a value")
        self.num_owed -= 1
        return refusal_of(rest) if kind == b"-" else None

    def read_into(self, target: memoryview) -> None:
        """Fill `target`."""
        done = min(len(target), self._end - self._start)
        target[:done] = self._view[self._start : self._start + done]
        self._start += done
        while done < len(target):
            done += self.recv_into(target[done:])

    def skip(self, num_bytes: int) -> None:
        scratch = memoryview(bytearray(min(num_bytes, _SCRATCH_BYTES)))
        while num_bytes:
            piece = scratch[: min(num_bytes, len(scratch))]
            self.read_into(piece)
            num_bytes -= len(piece)

    def end_value(self) -> None:
        end = bytearray(len(_END))
        self.read_into(memoryview(end))
        if end != _END:
            raise StoreFailed("the shared store sent a value longer than it said")
        self.num_owed -= 1

    def _read_line(self) -> bytes:
        """Without its end."""
        while (found := self._buffer.find(_END, self._start, self._end)) < 0:
            self._refill()
        line = bytes(self._view[self._start : found])
        self._start = found + len(_END)
        return line

    def _refill(self) -> None:
        if self._start:
            kept = self._end - self._start
            self._buffer[:kept] = self._buffer[self._start : self._end]
            self._start, self._end = 0, kept
        if self._end == len(self._buffer):
            raise StoreFailed("the shared store answered with a line that does not end")
        self._end += self.recv_into(self._view[self._end :])


def command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def command_with_value(words: Sequence[bytes], value_bytes: int, after: Sequence[bytes] = ()) -> tuple[bytes, bytes]:
    """What stands before and behind a value of so many bytes in a command of `words`, the value, and the words `after` it."""
    head = b"*%d\r\n" % (len(words) + 1 + len(after)) + command(*words).partition(_END)[2] + b"$%d\r\n" % value_bytes
    return head, _END + command(*after).partition(_END)[2]


def refusal_of(text: bytes) -> Refusal:
    word = text.partition(b" ")[0].decode("ascii", "replace")
    return Refusal(word if word.isalnum() and word.isupper() and len(word) <= 32 else "ERR")


def _number(text: bytes) -> int:
    digits = text[1:] if text[:1] == b"-" else text
    if not digits.isdigit() or len(digits) > 18:
        raise StoreFailed("the shared store sent something else where a number belongs")
    return int(text)


def _failure(error: OSError) -> StoreFailed:
    if isinstance(error, TimeoutError):
        return StoreFailed("the shared store did not answer in time")
    return StoreFailed(f"the connection to the shared store broke: {error.strerror or type(error).__name__}")
