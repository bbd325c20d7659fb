"""A store behind host memory beside its own client with the same values, as anybody would use it: valkey-py,
obstore, Mooncake's library. Owns the clients' connections, and what they wrote.

    PYTHONPATH=src python3 benchmarks/store_clients.py --kv-offload-remote valkey://127.0.0.1:6379 [--model
    qwen3-4b --blocks 127 ...]

One value per call, on one thread and on as many as our side has calls under way; the tier is compared with
the faster of the two. Client libraries are imported when one is asked for.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.bench.report import BenchReport, Results
from penstock.bench.transfer import TransferBench, dimensions_of, layout_of
from penstock.bench.transfer_ways import (
    OWNER,
    READ_REMOTE,
    TIER,
    WRITE_REMOTE,
    TransferRig,
    TransferShape,
    TransferWay,
    Turn,
    read_tier,
    take_turns,
    write_tier,
)
from penstock.config import OffloadConfig
from penstock.engine.build import device_for
from penstock.errors import ConfigError, InvariantBroken, PenstockError, StoreFailed
from penstock.flags import (
    Parser,
    add_flags,
    config_of,
    counts,
    new_file,
    positive,
)
from penstock.kv.blocks.key import SCOPE_BYTES
from penstock.kv.build import COLD_READERS, COLD_WRITERS
from penstock.kv.tiers.remote import KINDS
from penstock.kv.tiers.store import pack
from penstock.models.progress import Progress
from penstock.progress import ProgressBar

TIMEOUT_S = 60.0  # of a client: nothing is proven here, so that nothing has to be noticed soon
MOONCAKE_BUFFER_BYTES = 512 << 20  # for values on their way
S3_AT_ONCE = 16  # requests, as many as our store has


def measure(
    offload: OffloadConfig, sizes: Sequence[int], shape: TransferShape, progress: Progress
) -> Results:
    """What others have in the store is left alone, and what this puts there is removed."""
    results = Results([], [])
    if (url := offload.remote) is None:
        raise ConfigError("--kv-offload-remote says which store is measured")
    for blocks in sizes:
        with TransferRig(shape, blocks, offload) as rig:
            rig.fill(progress)
            with ClientValues(rig, open_client(url, (COLD_READERS, COLD_WRITERS))) as values:
                ways = store_ways(rig, values)
                results.rows.extend(take_turns(rig.tier.name, ways, rig.size, shape.repeat, progress))
    return results


def store_ways(rig: TransferRig, values: ClientValues) -> list[TransferWay]:
    """A client may be faster on one thread than on several, where they are in each other's way."""
    readers, writers = (
        {f"client, {num} thread{'s' if num > 1 else ''}": num for num in sorted({1, most})}
        for most in values.client.at_once
    )
    return [
        *(TransferWay(WRITE_REMOTE, name, partial(values.write, num)) for name, num in writers.items()),
        TransferWay(
            WRITE_REMOTE,
            TIER,
            partial(write_tier, rig, WRITE_REMOTE),
            tuple((WRITE_REMOTE, name) for name in writers),
        ),
        *(TransferWay(READ_REMOTE, name, partial(values.read, num, name)) for name, num in readers.items()),
        TransferWay(
            READ_REMOTE,
            TIER,
            partial(read_tier, rig, READ_REMOTE),
            tuple((READ_REMOTE, name) for name in readers),
        ),
    ]


class ClientValues:
    """The rig's blocks as the client gets them, header and bytes in one piece, and its threads."""

    def __init__(self, rig: TransferRig, client: StoreClient) -> None:
        self.client = client
        self._names: list[str] = []
        slots, pin = rig.cache.host.pin_each(rig.keys, OWNER)
        views = [rig.host.view(slot) for slot in slots]
        self._values = [
            pack(key, bytes(SCOPE_BYTES), view) + bytes(view)
            for key, view in zip(rig.keys, views, strict=True)
        ]
        if pin is not None:
            pin.end()
        self._threads = ThreadPoolExecutor(max(client.at_once), "bench-client")

    def write(self, num_threads: int, checked: bool) -> Turn:
        """From memory in one piece, one value a call."""
        self._rename()
        yield from self._call_each(
            num_threads, lambda number: self.client.write(self._names[number], self._values[number])
        )

    def read(self, num_threads: int, way: str, checked: bool) -> Turn:
        """Into memory that the client brings."""
        came: dict[int, bytes | memoryview] = {}

        def read(number: int) -> None:
            value = self.client.read(self._names[number])
            if value is None or len(value) != len(self._values[number]):
                raise StoreFailed("the store does not have what its own client wrote")
            if checked:
                came[number] = value

        yield from self._call_each(num_threads, read)
        if checked and came != dict(enumerate(self._values)):
            raise InvariantBroken(f"{READ_REMOTE}, {way}: other bytes came than were written")

    def _call_each(self, num_threads: int, ask: Callable[[int], object]) -> Turn:
        """For every value, on some threads, each one after the other. What a client raises may have its
        settings in it."""

        def run(first: int) -> None:
            try:
                for number in range(first, len(self._values), num_threads):
                    ask(number)
            except PenstockError:
                raise
            except Exception as error:
                raise StoreFailed(f"the store's own client failed ({type(error).__name__})") from None

        yield
        started = self._threads.map(run, range(num_threads))
        yield
        list(started)
        yield

    def _rename(self) -> None:
        """Other names for the same values, which the store has nothing under; what was there before is
        removed."""
        self._remove()
        run = secrets.token_hex(8)
        self._names = [f"penstock-bench:{run}:{number}" for number in range(len(self._values))]

    def _remove(self) -> None:
        with contextlib.suppress(Exception):  # a store that has gone away has forgotten them, or will
            self.client.remove(self._names)

    def __enter__(self) -> ClientValues:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        self._remove()
        self.client.close()


# ---------------------------------------------------------------------------------------------------- clients


@dataclass(frozen=True, slots=True)
class StoreClient:
    """Calls of a client library, for several threads at once."""

    # threads that read, threads that write: as many exchanges as our store has under way
    at_once: tuple[int, int]
    write: Callable[[str, bytes], object]  # under a name that was not used before
    read: Callable[[str], bytes | memoryview | None]  # None: it is not there
    remove: Callable[[Sequence[str]], object]
    close: Callable[[], object]


def open_client(url: str, at_once: tuple[int, int]) -> StoreClient:
    """`at_once` where the store has no number of its own. Raises ConfigError for a kind that there is no
    client of here."""
    scheme = urlsplit(url).scheme
    client = {"valkey": _valkey, "s3": _bucket, "mooncake": _mooncake}.get(KINDS.get(scheme, ""))
    if client is None:
        raise ConfigError(f"there is no client of {scheme}:// to compare with")
    return client(url, at_once)


def _valkey(url: str, at_once: tuple[int, int]) -> StoreClient:
    """GET and SET of valkey-py."""
    from penstock_valkey import connect, parse_address

    client: Any = connect(parse_address(url, os.environ), TIMEOUT_S)
    return StoreClient(
        at_once, client.set, client.get, lambda names: [client.unlink(name) for name in names], client.close
    )


def _bucket(url: str, at_once: tuple[int, int]) -> StoreClient:
    """Objects through obstore."""
    import obstore

    from penstock_s3 import connect, parse_address

    bucket, store = connect(parse_address(url), TIMEOUT_S), obstore

    def read(name: str) -> memoryview | None:
        try:
            return memoryview(store.get(bucket, name).bytes())
        except FileNotFoundError:
            return None

    write = partial(store.put, bucket, use_multipart=False)
    return StoreClient(
        (S3_AT_ONCE, S3_AT_ONCE), write, read, lambda names: store.delete(bucket, list(names)), lambda: None
    )


def _mooncake(url: str, at_once: tuple[int, int]) -> StoreClient:
    """put and get of Mooncake's library, in this process."""
    from penstock_mooncake import parse_address

    address = parse_address(url)
    try:
        library = importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ConfigError(f"Mooncake's client library cannot be used in this process: {error}") from None
    with socket.create_connection((address.host, address.port), TIMEOUT_S) as link:
        own = str(link.getsockname()[0])
    client: Any = library.MooncakeDistributedStore()
    where = (address.protocol, address.device, f"{address.host}:{address.port}")
    if code := client.setup(address.local or own, address.metadata, 0, MOONCAKE_BUFFER_BYTES, *where):
        raise StoreFailed(f"Mooncake's master does not take the library in ({code})")

    def write(name: str, value: bytes) -> None:
        if code := client.put(name, value):
            raise StoreFailed(f"Mooncake's library could not write ({code})")

    def remove(names: Sequence[str]) -> None:
        """What was read a moment ago stays for a while, whatever is asked."""
        for name in names:
            client.remove(name)

    return StoreClient(at_once, write, lambda name: client.get(name) or None, remove, client.close)


# ------------------------------------------------------------------------------------------------ the command


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description="A shared store beside its own client.")
    add_flags(parser, "model", "device", "kv_offload_remote", "kv_offload_remote_timeout_s")
    parser.set_defaults(load_format="dummy")
    parser.add_argument(
        "--blocks", type=counts, default="127,511", metavar="N,N", help="blocks moved at once"
    )
    parser.add_argument(
        "--repeat", type=positive, default=5, metavar="N", help="measured runs, after one that only warms up"
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write settings and results there")
    args = parser.parse_args(argv)
    try:
        config = config_of(args)
        shape = TransferShape(layout_of(config), device_for(config), args.repeat, 0)
        with ProgressBar() as bar:
            results = measure(config.offload, args.blocks, shape, bar)
    except PenstockError as error:
        raise SystemExit(f"store_clients.py: {error}") from None
    report = BenchReport(
        TransferBench(args.blocks, (), args.repeat, 0), dimensions_of(args.model)[0], config, results
    )
    report.show()
    if args.json is not None:
        report.write(Path(args.json))


if __name__ == "__main__":
    main()
