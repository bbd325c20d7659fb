"""How fast blocks move between host memory and a shared store, beside the store's own client with the same values on as many threads. Owns
the comparison and what the client wrote; the turns are `transfer_cold`'s."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from penstock.bench.cold_rig import OWNER, ColdRig, Shape
from penstock.bench.report import Results
from penstock.bench.store_clients import Client, open_client
from penstock.bench.transfer_cold import Beside, ColdWay, TierRead, TierWrite, Wait, take_turns
from penstock.config import OffloadConfig
from penstock.engine.build import COLD_READERS, COLD_WRITERS
from penstock.errors import InvariantBroken, PenstockError, StoreFailed
from penstock.kv.blocks.key import SCOPE_BYTES
from penstock.kv.tiers.envelope import pack
from penstock.kv.tiers.remote import open_store
from penstock.models.progress import Progress

WRITE, READ = "host to remote", "remote to host"


def measure_remote(offload: OffloadConfig, sizes: Sequence[int], shape: Shape, progress: Progress) -> Results:
    """What others have in the store is left alone, and what this puts there is removed."""
    results = Results([], [])
    if (url := offload.remote) is None:
        return results
    for blocks in sizes:
        with ColdRig(shape, blocks, partial(open_store, url, timeout_s=offload.remote_timeout_s)) as rig:
            rig.fill(progress)
            with Values(rig, open_client(url, (COLD_READERS, COLD_WRITERS))) as values:
                results.rows.extend(take_turns(rig, _ways(rig, values), shape.repeat, progress))
    return results


def _ways(rig: ColdRig, values: Values) -> list[ColdWay]:
    """A client may be faster on one thread than on several, where they are in each other's way."""
    readers, writers = (sorted({1, num}) for num in values.client.at_once)
    writes: list[ColdWay] = [ClientWrite(values, num) for num in writers]
    reads: list[ColdWay] = [ClientRead(values, num) for num in readers]
    tier_write, tier_read = TierWrite(rig, WRITE, [way.name for way in writes]), TierRead(rig, READ, [way.name for way in reads])
    return [*writes, tier_write, *reads, tier_read]


def _name(num_threads: int) -> str:
    return f"client, {num_threads} thread{'s' if num_threads > 1 else ''}"


class Values:
    """The rig's blocks as the client gets them, header and bytes in one piece, and its threads."""

    def __init__(self, rig: ColdRig, client: Client) -> None:
        self.rig = rig
        self.client = client
        self.named: dict[str, bytes] = {}
        slots, pin = rig.slots.pin_each(rig.keys, OWNER)
        views = [rig.host.view(slot) for slot in slots]
        self._values = [pack(key, bytes(SCOPE_BYTES), view) + bytes(view) for key, view in zip(rig.keys, views, strict=True)]
        rig.slots.end_handles([pin] if pin is not None else [])
        self._threads = ThreadPoolExecutor(max(client.at_once), "bench-client")

    def rename(self) -> None:
        """Other names for the same values, which the store has nothing under; what was there before is removed."""
        self.remove()
        run = secrets.token_hex(8)
        self.named = {f"penstock-bench:{run}:{number}": value for number, value in enumerate(self._values)}

    def remove(self) -> None:
        with contextlib.suppress(Exception):  # a store that has gone away has forgotten them, or will
            self.client.remove(list(self.named))

    def start(self, call: Callable[[str], None], num_threads: int) -> Wait:
        """`call` for every name, each thread one after the other."""
        names = list(self.named)

        def run(first: int) -> None:
            for name in names[first::num_threads]:
                call(name)

        started = [self._threads.submit(run, first) for first in range(num_threads)]
        return partial(_wait_all, started)

    def __enter__(self) -> Values:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        self.remove()
        self.client.close()


def _wait_all(started: Sequence[Future[None]]) -> None:
    """What a client raises may have its settings in it."""
    try:
        for one in started:
            one.result()
    except PenstockError:
        raise
    except Exception as error:
        raise StoreFailed(f"the store's own client failed ({type(error).__name__})") from None


class ClientWrite:
    """One value, one call, on each of some threads."""

    direction = WRITE
    beside: Beside = ()

    def __init__(self, values: Values, num_threads: int) -> None:
        self.name = _name(num_threads)
        self._values = values
        self._num_threads = num_threads

    def prepare(self, spoil: bool) -> None:
        self._values.rename()

    def launch(self) -> Wait:
        values = self._values
        return values.start(lambda name: values.client.write(name, values.named[name]), self._num_threads)

    def finish(self, check: bool) -> None:
        """What was written is checked when it is read."""


class ClientRead:
    """The same in the other direction, into memory that the client brings."""

    direction = READ
    beside: Beside = ()

    def __init__(self, values: Values, num_threads: int) -> None:
        self.name = _name(num_threads)
        self._values = values
        self._num_threads = num_threads
        self._came: dict[str, bytes | memoryview | None] = {}
        self._keep = False

    def prepare(self, spoil: bool) -> None:
        self._keep = spoil

    def launch(self) -> Wait:
        return self._values.start(self._read, self._num_threads)

    def _read(self, name: str) -> None:
        value = self._values.client.read(name)
        if value is None or len(value) != len(self._values.named[name]):
            raise StoreFailed("the store does not have what its own client wrote")
        if self._keep:
            self._came[name] = value

    def finish(self, check: bool) -> None:
        if check and self._came != self._values.named:
            raise InvariantBroken(f"{self.direction}, {self.name}: other bytes came than were written")
        self._came = {}
