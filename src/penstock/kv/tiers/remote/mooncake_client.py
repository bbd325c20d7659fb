"""The engine's end of the processes in which Mooncake's library runs. Owns those processes, the memory shared with them and the calls that
are under way; what is asked, and what codes mean, is the store's business.

A call that is overdue ends with the process: when `call` has raised, nothing writes into the shared memory any more.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import StoreFailed

if TYPE_CHECKING:
    from penstock.kv.tiers.remote.mooncake import MooncakeAddress

_PROGRAM = Path(__file__).with_name("mooncake_program.py")
_LOG_VARIABLE = "MC_LOG_LEVEL"  # whoever sets it wants to see what the library says
_LANE_BYTES = 8 << 20  # of values that one call moves at most, as far as one value is not more
_LANES = 8  # calls at once
_LEAVE_S = 5.0  # for the process to end by itself, longer than it allows the library
_SEND_S = 1  # for the process to take a message
_START_S = 60.0  # for the process to connect; then it is ended, and another one tries
_AGAIN_S = 5.0  # between two tries to lend memory


class ValueRoom:
    """Room for values in memory that two processes have, and a way to ask the other one about them. For one call at a time."""

    def __init__(self, link: socket.socket, values: Sequence[tuple[int, memoryview]]) -> None:
        self.values = [view for _, view in values]
        self.owed = False  # an answer that did not come: the lane is of no use any more
        self._offsets = [offset for offset, _ in values]
        self._link = link

    def exchange(self, what: str, names: Sequence[str], until: float) -> list[int]:
        """The library's codes, one for each name; the first values are those of the names, where it is about values. Raises OSError where
        no answer comes."""
        self.owed = True
        _send(self._link, [what, names, self._offsets[: len(names)]], until)
        codes, why = _receive(self._link, until)
        self.owed = False
        if why or len(codes) != len(names):
            raise StoreFailed(f"Mooncake's client: {why or f'{len(codes)} answers to {len(names)} questions'}")
        return codes

    def close(self) -> None:
        self._link.close()


class MooncakeClient:
    """One process with the library in it. `setup` are the arguments of the library's call of that name."""

    def __init__(self, setup: Sequence[object], value_bytes: int, environment: Mapping[str, str]) -> None:
        self.began_s = time.monotonic()
        self.lane_values = max(1, _LANE_BYTES // value_bytes)
        self._lanes: queue.LifoQueue[ValueRoom] = queue.LifoQueue()  # the one last used is still in the CPU's caches
        self._ready = False
        with contextlib.ExitStack() as given, contextlib.ExitStack() as undo:
            descriptor = os.memfd_create("penstock-mooncake")
            given.callback(os.close, descriptor)  # the mapping stays
            pairs = []
            for _ in range(_LANES + 1):
                ours, theirs = socket.socketpair()
                given.callback(theirs.close)
                undo.callback(ours.close)
                pairs.append((ours, theirs))
            views = _views(descriptor, self.lane_values, value_bytes)
            self._process = _spawn([descriptor, *(theirs.fileno() for _, theirs in pairs)], environment)
            undo.pop_all()
        self._link, *links = [ours for ours, _ in pairs]
        for first, link in zip(range(0, len(views), self.lane_values), links, strict=True):
            self._lanes.put(ValueRoom(link, views[first : first + self.lane_values]))
        with contextlib.suppress(OSError):  # it has ended already, as the next one to look finds out
            _send(self._link, {"setup": list(setup), "value_bytes": value_bytes}, self.began_s + _SEND_S)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def ready(self) -> bool:
        return self._ready and self.alive

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, until: float) -> None:
        """The library is connected. Raises StoreFailed where it is not by then; it goes on connecting. One caller at a time."""
        if self._ready:
            return
        try:
            _, why = _receive(self._link, until)
        except TimeoutError:
            raise StoreFailed("Mooncake's client is still connecting") from None
        except OSError:
            why = "it ended while it was connecting"
        if why:
            raise StoreFailed(f"Mooncake's client: {why}")
        self._ready = True

    @contextlib.contextmanager
    def lane(self, until: float) -> Iterator[ValueRoom]:
        """A lane for one call. When that ends, however it does, nothing touches the lane's values any more."""
        try:
            lane = self._lanes.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise StoreFailed("too many calls to Mooncake are under way") from None
        try:
            yield lane
        except TimeoutError:
            raise StoreFailed("Mooncake did not answer in time; its client was ended") from None
        except OSError:
            raise StoreFailed("Mooncake's client has ended") from None
        finally:
            if lane.owed:
                self.kill()
            self._lanes.put(lane)

    def ask(self, what: str, names: Sequence[str], until: float) -> list[int]:
        """The library's codes for a question that is not about values."""
        with self.lane(until) as lane:
            return lane.exchange(what, names, until)

    def kill(self) -> None:
        """Idempotent. Over when this returns."""
        self._process.kill()
        self._process.wait()

    def leave(self) -> None:
        """The process takes leave of the master and ends. Does not wait for it; idempotent."""
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Idempotent. No call is under way."""
        self.leave()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_S)
        self.kill()
        self._link.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self._lanes.get_nowait().close()


def _views(descriptor: int, lane_values: int, value_bytes: int) -> list[tuple[int, memoryview]]:
    """Offsets of all values, and the values."""
    stride = -(-value_bytes // mmap.PAGESIZE) * mmap.PAGESIZE  # values do not share pages
    os.ftruncate(descriptor, _LANES * lane_values * stride)  # takes memory where it is used
    memory = memoryview(mmap.mmap(descriptor, 0))
    return [(offset, memory[offset : offset + value_bytes]) for offset in range(0, len(memory), stride)]


def _spawn(descriptors: Sequence[int], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # -P: beside the program lies a module with the library's name.
        [sys.executable, "-P", str(_PROGRAM), *map(str, descriptors)],
        env={**environment, **os.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=None if _LOG_VARIABLE in os.environ else subprocess.DEVNULL,  # it tells everything twice, and every failure at length
        pass_fds=descriptors,
        start_new_session=True,  # an interrupt from the terminal is for the engine, which then closes it
    )


def _send(link: socket.socket, message: object, until: float) -> None:
    link.settimeout(max(0.001, until - time.monotonic()))
    link.sendall(json.dumps(message).encode() + b"\n")


def _receive(link: socket.socket, until: float) -> tuple[list[int], str]:
    """One answer; nothing else is on its way. Where time runs out it can be waited for again."""
    data = b""
    while not data.endswith(b"\n"):
        link.settimeout(max(0.001, until - time.monotonic()))
        some = link.recv(1 << 16)
        if not some:
            raise ConnectionResetError
        data += some
    codes, why = json.loads(data)
    return codes, why


# ----------------------------------------------------------------------------------------------------------------- their lives


class Clients:
    """The client of a store, started when it is needed and again after it has ended; and where the engine lends memory to the store another
    one that does nothing else, so that it outlives calls that are overdue."""

    def __init__(self, address: MooncakeAddress, value_bytes: int, timeout_s: float) -> None:
        self._address = address
        self._value_bytes = value_bytes
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # of the three below
        self._client: MooncakeClient | None = None
        self._lender: MooncakeClient | None = None
        self._closed = False

    def connected(self, until: float) -> MooncakeClient:
        if not self._lock.acquire(timeout=max(0.0, until - time.monotonic())):
            raise StoreFailed("Mooncake's client is still being started")
        try:
            if self._closed:
                raise StoreFailed("the store was closed")
            client = self._client = self._living(self._client, until, 0)
            again = self._lender is None or self._lender.alive or time.monotonic() - self._lender.began_s > _AGAIN_S
            if self._address.segment_bytes and again:
                self._lender = self._living(self._lender, until, self._address.segment_bytes)
            client.wait_ready(until)  # nobody could do anything before that
            return client
        finally:
            self._lock.release()

    def _living(self, client: MooncakeClient | None, until: float, segment_bytes: int) -> MooncakeClient:
        """This one, or another where it has ended or does not get anywhere."""
        if client is not None and client.alive and (client.ready or time.monotonic() - client.began_s < _START_S):
            return client
        if client is not None:
            client.kill()
        address = self._address
        own = _own_address(address.host, address.port, max(0.01, until - time.monotonic()))
        sizes = (segment_bytes, address.buffer_bytes)
        setup = (address.local or own, address.metadata, *sizes, address.protocol, address.device, f"{address.host}:{address.port}")
        try:
            return MooncakeClient(setup, self._value_bytes, _limits(self._timeout_s))
        except OSError as error:
            raise StoreFailed(f"Mooncake's client cannot be started: {error.strerror or type(error).__name__}") from None

    def close(self) -> None:
        """Idempotent. No call is under way."""
        with self._lock:
            self._closed = True
            clients = [client for client in (self._client, self._lender) if client is not None]
        for client in clients:
            client.leave()
        for client in clients:
            client.close()


def _limits(timeout_s: float) -> dict[str, str]:
    """What the library takes from its environment: how long it waits by itself."""
    milliseconds, seconds = str(math.ceil(timeout_s * 1000)), str(math.ceil(timeout_s))
    waits = {"MC_RPC_TIMEOUT_MS": milliseconds, "MC_RPC_CONNECT_TIMEOUT_MS": milliseconds, "MC_STORE_CLIENT_SETUP_RETRIES": "1"}
    return {**waits, "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds, "MC_TCP_STATUS_TIMEOUT_SEC": seconds}


def _own_address(host: str, port: int, patience_s: float) -> str:
    """From where the master is reached. A master that is not there is found out here, without starting a process for it."""
    try:
        with socket.create_connection((host, port), timeout=patience_s) as link:
            return str(link.getsockname()[0])
    except OSError as error:
        raise StoreFailed(f"Mooncake's master cannot be reached: {error.strerror or type(error).__name__}") from None
