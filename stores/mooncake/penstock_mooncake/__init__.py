"""A `BlockStore` in a Mooncake store, by its master. Owns names, deadlines, what the library's codes mean,
and the processes in which the library runs (`program.py`) with the memory shared with them.

`mooncake://host[:port][?metadata=URL&protocol=tcp|rdma&device=NAME&local=HOST&segment_gib=N&buffer_gib=N]`

One block is one value, its header before its bytes, under `penstock:FORMAT:SPACE:KEY`, in the memory of the
nodes that lend some to the store. The master evicts blocks when that is full, and forgets blocks of lost
nodes.

Values pass through memory shared with that process. This costs one more copy, but the library never gets
access to host slots. The library lets every machine that can reach its port read and write registered memory,
and may touch a buffer after a failed call; so a block is checked in its host slot, after the copy. An overdue
call ends with the process: after it has raised, nothing writes into the shared memory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import mmap
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from penstock.errors import ConfigError, StoreFailed
from penstock.kv.tiers.remote import FLAG, SharedStore, check_hosts, copy_checked, need, parse_url
from penstock.kv.tiers.store import FORMAT, HEADER_BYTES, BlockStore, Outcome, Space, pack
from penstock_mooncake import program

log = logging.getLogger(__name__)

_PORT = 50051
_RESET_S = 60.0  # the master looks at every name it knows
_LOG_VARIABLE = "MC_LOG_LEVEL"  # if it is set, the library's output is shown
_LANE_BYTES = 8 << 20  # bytes of values per call, or one value if that is larger
_LANES = 8  # calls at once
_LEAVE_S = 5.0  # for the process to exit; longer than it gives the library
_SEND_S = 1  # for the process to receive a message
_START_S = 60.0  # for the process to connect; then it is ended, and another one tries
_AGAIN_S = 5.0  # between two tries to lend memory

# The library's codes that need special treatment. Errors of the master as a whole are a range.
_NO_ROOM = (-200, -1700)  # no memory; the tenant's quota is used up
_BAD_LENGTH = -600  # or another rejected argument
_ABSENT = (-703, -704, -707)  # being written; not there; evicted during the read
_THERE_ALREADY = -705
_MASTER = range(-1099, -899)  # it does not answer, or not yet


def open_store(url: str, space: Space, timeout_s: float) -> BlockStore:
    """Connects lazily. Raises ConfigError for what can never work."""
    address = parse_address(url)
    need(sys.platform == "linux", "mooncake:// works on Linux only")
    if importlib.util.find_spec("mooncake") is None:  # the library is never imported here
        raise ConfigError(
            f"{FLAG} mooncake:// needs its client library: pip install 'penstock[mooncake]'; it needs "
            "libibverbs1, too"
        )
    check_hosts([address.host])
    return MooncakeStore(address, space, timeout_s)


class MooncakeAddress(NamedTuple):
    """What the URL says."""

    host: str
    port: int
    metadata: str = "P2PHANDSHAKE"  # nodes find each other without a server for that
    protocol: str = "tcp"
    device: str = ""  # of RDMA; empty: the library chooses
    # this node's address for others; empty: the local address of the connection to the master
    local: str = ""
    segment_bytes: int = 0  # lent to the store by this engine
    buffer_bytes: int = 16 << 20  # for the library's own use


def parse_address(url: str) -> MooncakeAddress:
    """Raises ConfigError. An option without a value has its default."""
    form = "mooncake://host[:port][?option=value&...]"
    parts = parse_url(url, form, ("metadata", "protocol", "device", "local", "segment_gib", "buffer_gib"))
    master, *others = parts.nodes(_PORT)
    need(parts.user is None and not others and not parts.path, f"must look like {form}")
    options = {name: value for name, value in parts.options.items() if value}
    need(options.get("protocol", "tcp") in ("tcp", "rdma"), "has a protocol= that is neither tcp nor rdma")
    texts = {name: options[name] for name in ("metadata", "protocol", "device", "local") if name in options}
    sizes = {
        f"{name}_bytes": _gib(options[f"{name}_gib"])
        for name in ("segment", "buffer")
        if f"{name}_gib" in options
    }
    return MooncakeAddress(*master)._replace(**texts, **sizes)  # type: ignore[arg-type]


def _gib(text: str) -> int:
    need(re.fullmatch(r"\d{1,5}(\.\d{1,6})?", text) is not None, "has a size that is not a number of GiB")
    return int(float(text) * (1 << 30)) // 4096 * 4096


class MooncakeStore(SharedStore):
    """Every call ends within `timeout_s`, except `reset`, which takes as long as the master needs. Written
    blocks outlive this engine in other nodes' memory; there is no stronger durability."""

    def __init__(self, address: MooncakeAddress, space: Space, timeout_s: float) -> None:
        super().__init__(space, timeout_s)
        self._address = address
        self._prefix = f"penstock:{FORMAT}:{space.digest.hex()}:"
        self._clients = MooncakeClients(address, self._value_bytes, timeout_s)
        self._warned_full = False

    def __repr__(self) -> str:
        return f"<MooncakeStore {self._address.host}:{self._address.port} over {self._address.protocol}>"

    def find(self, keys: Sequence[bytes]) -> int:
        codes = self._exist(keys) if keys else []
        return next((place for place, code in enumerate(codes) if code != 1), len(keys))

    def find_last(self, keys: Sequence[bytes]) -> int:
        there = [place for place, code in enumerate(self._exist(keys) if keys else [], 1) if code == 1]
        return there[-1] if there else 0

    def _exist(self, keys: Sequence[bytes]) -> list[int]:
        until = self._until()
        return _checked(self._clients.connected(until).ask("exist", self._names(keys), until))

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        until = self._until()
        client = self._clients.connected(until)
        codes: list[int] = []
        outcomes: list[Outcome] = []
        for some in _runs(len(keys), client.lane_values):
            with client.lane(until) as lane:
                answer = lane.call("read", self._names(keys[some]), until)
                outcomes += map(self._outcome, answer, lane.values, keys[some], into[some])
            codes += answer
        self._repair(client, keys, _checked(codes), outcomes, until)
        return _some_worked(outcomes)

    def _repair(
        self,
        client: MooncakeClient,
        keys: Sequence[bytes],
        codes: Sequence[int],
        outcomes: list[Outcome],
        until: float,
    ) -> None:
        """A value that the library refuses to read may be too long. Wrong values are removed."""
        refused = [place for place, code in enumerate(codes) if code == _BAD_LENGTH]
        if refused:
            lengths = client.ask("size", self._names([keys[place] for place in refused]), until)
            for place, length in zip(refused, _checked(lengths), strict=True):
                outcomes[place] = Outcome.CORRUPT if length > self._value_bytes else Outcome.FAILED
        bad = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.CORRUPT]
        if bad:
            with contextlib.suppress(StoreFailed):  # the wrong value stays; the next reader tries again
                client.ask("remove", self._names(bad), until)

    def _outcome(self, code: int, value: memoryview, key: bytes, slot: memoryview) -> Outcome:
        """`code`: the length, or why there is none."""
        if code in _ABSENT:
            return Outcome.MISSING
        if code < 0:
            return Outcome.FAILED
        return copy_checked(value[:code], key, self._digest, slot)

    def write(
        self, keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]
    ) -> list[Outcome]:
        """Leaves existing values as they are."""
        until = self._until()
        client = self._clients.connected(until)
        codes: list[int] = []
        for some in _runs(len(keys), client.lane_values):
            with client.lane(until) as lane:
                for value, key, block in zip(lane.values, keys[some], blocks[some], strict=False):
                    value[:HEADER_BYTES] = pack(key, self._digest, block)
                    # without the GIL
                    np.copyto(
                        np.frombuffer(value, np.uint8, offset=HEADER_BYTES), np.frombuffer(block, np.uint8)
                    )
                codes += lane.call("write", self._names(keys[some]), until)
        return _some_worked([self._written(code) for code in _checked(codes)])

    def _written(self, code: int) -> Outcome:
        if code in _NO_ROOM:
            if not self._warned_full:
                log.warning("the Mooncake store has no room: no node lends it memory, or not enough")
                self._warned_full = True
            return Outcome.FULL
        return Outcome.DONE if code in (0, _THERE_ALREADY) else Outcome.FAILED

    def probe(self) -> None:
        """The master must answer. A missing node shows when its blocks are read."""
        until = self._until()
        _checked(self._clients.connected(until).ask("exist", [f"{self._prefix}probe"], until))

    def reset(self) -> int:
        client = self._clients.connected(self._until())
        return _checked(client.ask("clear", [f"^{self._prefix}.*"], time.monotonic() + _RESET_S))[0]

    def close(self) -> None:
        self._clients.close()

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]


def _checked(codes: Sequence[int]) -> list[int]:
    """Raises StoreFailed if the master failed, rather than a single block."""
    for code in codes:
        if code in _MASTER:
            raise StoreFailed(f"Mooncake's master did not answer ({code})")
    return list(codes)


def _some_worked(outcomes: list[Outcome]) -> list[Outcome]:
    """If every block failed, the store has failed."""
    if outcomes and all(outcome is Outcome.FAILED for outcome in outcomes):
        raise StoreFailed("Mooncake could not move any of the blocks: their nodes do not answer")
    return outcomes


def _runs(num: int, at_once: int) -> Iterator[slice]:
    for first in range(0, num, at_once):
        yield slice(first, min(num, first + at_once))


# ---------------------------------------------------------------------------------------------- its processes


class MooncakeLane:
    """Memory for values shared by two processes, and a socket to the other process. For one call at a
    time."""

    def __init__(self, link: socket.socket, values: Sequence[tuple[int, memoryview]]) -> None:
        self.values = [view for _, view in values]
        self.owed = False  # an answer did not come; the lane cannot be used again
        self._offsets = [offset for offset, _ in values]
        self._link = link

    def call(self, what: str, names: Sequence[str], until: float) -> list[int]:
        """The library's codes, one per name. If the call moves values, the first values are those of the
        names. Raises OSError if no answer comes."""
        self.owed = True
        _send(self._link, [what, names, self._offsets[: len(names)]], until)
        codes, why = _receive(self._link, until)
        self.owed = False
        if why or len(codes) != len(names):
            raise StoreFailed(
                f"Mooncake's client: {why or f'{len(codes)} answers to {len(names)} questions'}"
            )
        return codes

    def close(self) -> None:
        self._link.close()


class MooncakeClient:
    """One process with the library in it. `setup` are the arguments of the library's call of that name."""

    def __init__(self, setup: Sequence[object], value_bytes: int, environment: Mapping[str, str]) -> None:
        self.began_s = time.monotonic()
        self.lane_values = max(1, _LANE_BYTES // value_bytes)
        # the one last used is still in the CPU's caches
        self._lanes: queue.LifoQueue[MooncakeLane] = queue.LifoQueue()
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
            self._lanes.put(MooncakeLane(link, views[first : first + self.lane_values]))
        with contextlib.suppress(OSError):  # the process has ended; the next check finds that out
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
        """Wait until the library is connected. Raises StoreFailed if it is not by then; it goes on
        connecting. One caller at a time."""
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
    def lane(self, until: float) -> Iterator[MooncakeLane]:
        """A lane for one call. After the call, even a failed one, nothing touches the lane's values."""
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
        """The library's codes for a call without values."""
        with self.lane(until) as lane:
            return lane.call(what, names, until)

    def kill(self) -> None:
        """Idempotent. Over when this returns."""
        self._process.kill()
        self._process.wait()

    def leave(self) -> None:
        """The process disconnects from the master and ends. Does not wait for it; idempotent."""
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
        # -P: nothing beside the program is imported.
        [sys.executable, "-P", program.__file__, *map(str, descriptors)],
        env={**environment, **os.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # the library logs everything twice, and every failure at length
        stderr=None if _LOG_VARIABLE in os.environ else subprocess.DEVNULL,
        pass_fds=descriptors,
        start_new_session=True,  # an interrupt from the terminal is for the engine, which then closes it
    )


def _send(link: socket.socket, message: object, until: float) -> None:
    link.settimeout(max(0.001, until - time.monotonic()))
    program.send(link, message)


def _receive(link: socket.socket, until: float) -> tuple[list[int], str]:
    """One answer; no other is in flight. After a timeout the caller may wait again."""
    data = b""
    while not data.endswith(b"\n"):
        link.settimeout(max(0.001, until - time.monotonic()))
        some = link.recv(1 << 16)
        if not some:
            raise ConnectionResetError
        data += some
    codes, why = json.loads(data)
    return codes, why


class MooncakeClients:
    """The client of a store, started on demand and restarted after it has ended. If the engine lends memory
    to the store, a second client does only that, so that it survives overdue calls."""

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
            again = (
                self._lender is None
                or self._lender.alive
                or time.monotonic() - self._lender.began_s > _AGAIN_S
            )
            if self._address.segment_bytes and again:
                self._lender = self._living(self._lender, until, self._address.segment_bytes)
            client.wait_ready(until)  # no call works before that
            return client
        finally:
            self._lock.release()

    def _living(self, client: MooncakeClient | None, until: float, segment_bytes: int) -> MooncakeClient:
        """This client, or a new one if it has ended or is stuck."""
        if (
            client is not None
            and client.alive
            and (client.ready or time.monotonic() - client.began_s < _START_S)
        ):
            return client
        if client is not None:
            client.kill()
        address = self._address
        own = _own_address(address.host, address.port, max(0.01, until - time.monotonic()))
        sizes = (segment_bytes, address.buffer_bytes)
        setup = (
            address.local or own,
            address.metadata,
            *sizes,
            address.protocol,
            address.device,
            f"{address.host}:{address.port}",
        )
        try:
            return MooncakeClient(setup, self._value_bytes, _limits(self._timeout_s))
        except OSError as error:
            raise StoreFailed(
                f"Mooncake's client cannot be started: {error.strerror or type(error).__name__}"
            ) from None

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
    """Environment variables of the library: its own timeouts."""
    milliseconds, seconds = str(math.ceil(timeout_s * 1000)), str(math.ceil(timeout_s))
    waits = {
        "MC_RPC_TIMEOUT_MS": milliseconds,
        "MC_RPC_CONNECT_TIMEOUT_MS": milliseconds,
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    }
    return {**waits, "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds, "MC_TCP_STATUS_TIMEOUT_SEC": seconds}


def _own_address(host: str, port: int, patience_s: float) -> str:
    """The local address of the connection to the master. A missing master is detected here, without starting
    a process."""
    try:
        with socket.create_connection((host, port), timeout=patience_s) as link:
            return str(link.getsockname()[0])
    except OSError as error:
        raise StoreFailed(
            f"Mooncake's master cannot be reached: {error.strerror or type(error).__name__}"
        ) from None
