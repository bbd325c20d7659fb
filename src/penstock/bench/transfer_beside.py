"""What tiers behind host memory are compared with, and the comparison: raw O_DIRECT of as many bytes in a file next to a disk's, and a
store's own client with the same values, as anybody would use it. Owns that file, the clients' connections, and what they wrote.

Client libraries are imported when one is asked for, so that measurements without a store need none of them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import shutil
import socket
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from penstock.bench.report import Results
from penstock.bench.transfer_cold import OWNER, RAW, ColdRig, Promoted, ReadRoom, TierRead, TierWrite, TransferShape
from penstock.bench.transfer_ways import TransferWay, Wait, take_turns, too_large
from penstock.config import OffloadConfig
from penstock.errors import ConfigError, InvariantBroken, PenstockError, StoreFailed
from penstock.kv.blocks.handles import Pin
from penstock.kv.blocks.key import SCOPE_BYTES
from penstock.kv.build import COLD_READERS, COLD_WRITERS
from penstock.kv.tiers.envelope import pack
from penstock.kv.tiers.remote import KINDS, open_store
from penstock.kv.tiers.ssd.directory import LOCK_BYTES
from penstock.kv.tiers.ssd.format import SECTOR_BYTES, segment_bytes, slot_bytes
from penstock.kv.tiers.ssd.store import SsdStore, open_ssd
from penstock.kv.tiers.store import Space
from penstock.models.progress import Progress

WRITE, READ, PROMOTE = "host to ssd", "ssd to host", "ssd to device"
WRITE_REMOTE, READ_REMOTE = "host to remote", "remote to host"
SYNCED = "raw, synced"
RAW_THREADS = 4  # more of them did not make a disk faster
TIMEOUT_S = 60.0  # of a client: nothing is proven here, so that nothing has to be noticed soon
MOONCAKE_BUFFER_BYTES = 512 << 20  # for values on their way
S3_AT_ONCE = 16  # requests, as many as our store has
_SPARE_SLOTS = 16  # what dividing the tier into files may cost it


class EachBlock(TransferWay):
    """A call for every block, on some threads, each one after the other."""

    beside = ()

    def __init__(self, rig: ColdRig, pool: ThreadPoolExecutor, num_threads: int) -> None:
        self._rig = rig
        self._pool = pool
        self._num_threads = num_threads

    def call(self, number: int) -> None:
        raise NotImplementedError

    def launch(self) -> Wait:
        started = [self._pool.submit(self._run, first) for first in range(self._num_threads)]

        def wait() -> None:
            for one in started:
                one.result()
            self.ended()

        return wait

    def ended(self) -> None:
        """All calls have returned; what this does is timed."""

    def _run(self, first: int) -> None:
        for number in range(first, len(self._rig.keys), self._num_threads):
            self.call(number)


# ---------------------------------------------------------------------------------------------------------------- the disk


def measure_ssd(folder: Path, sizes: Sequence[int], shape: TransferShape, progress: Progress) -> Results:
    """`folder` is empty, and is left so but for the files of a cache."""
    results = Results([], [])
    for blocks in sizes:
        refusal = _refusal(blocks, shape, folder)
        if refusal is not None:
            results.skipped.append(f"{blocks} blocks on disk: {refusal}")
            continue
        with ColdRig(shape, blocks, partial(_open_ssd, folder, blocks)) as rig, RawFile(folder, rig) as file:
            rig.fill(progress)
            results.rows.extend(take_turns(rig.tier.name, _disk_ways(rig, file), rig.size, shape.repeat, progress, turning=True))
        if not file.direct:
            results.skipped.append(f"O_DIRECT: the file system of {folder} has none, so that these figures are of memory")
    return results


def _disk_ways(rig: ColdRig, file: RawFile) -> list[TransferWay]:
    return [
        RawWrite(file),
        TierWrite(rig, WRITE, [RAW]),
        RawWrite(file, synced=True),
        TierWrite(rig, WRITE, [SYNCED], persist=True),
        RawRead(file),
        TierRead(rig, READ, [RAW]),
        Promoted(rig, PROMOTE, (READ, RAW)),
    ]


def _refusal(blocks: int, shape: TransferShape, folder: Path) -> str | None:
    one_way = blocks * shape.layout.block_bytes
    if shape.layout.block_bytes % SECTOR_BYTES:
        return f"blocks of {shape.layout.block_bytes} bytes are no whole sectors of {SECTOR_BYTES}, and raw O_DIRECT moves nothing else"
    needs = {torch.device("cpu"): 2 * one_way}
    needs[shape.device] = needs.get(shape.device, 0) + one_way
    if (refusal := too_large(needs)) is not None:
        return refusal
    needed, free = one_way + _tier_bytes(blocks, shape.layout.block_bytes), shutil.disk_usage(folder).free
    return f"they need {needed / 1e9:.1f} GB there, where {free / 1e9:.1f} are free" if needed > free else None


def _tier_bytes(blocks: int, block_bytes: int) -> int:
    """So little that every run writes over what the run before has written, as the raw file's do."""
    return LOCK_BYTES + segment_bytes(blocks, block_bytes) + _SPARE_SLOTS * slot_bytes(block_bytes)


def _open_ssd(folder: Path, blocks: int, space: Space) -> SsdStore:
    return open_ssd(folder, _tier_bytes(blocks, space.block_bytes), space, "lru")


class RawFile:
    """A file of as many bytes as the rig's blocks have, in the same folder, and threads that move them."""

    def __init__(self, folder: Path, rig: ColdRig) -> None:
        self.rig = rig
        self.direct = True
        self._path = folder / "raw"
        flags, num_bytes = os.O_RDWR | os.O_CREAT | os.O_EXCL, rig.size.num_bytes
        try:
            self.fd = os.open(self._path, flags | os.O_DIRECT, 0o600)
        except OSError:
            self.direct = False
            self.fd = os.open(self._path, flags & ~os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(self.fd, 0, num_bytes)
        except OSError as error:
            self._close()
            raise ConfigError(f"a file of {num_bytes / 1e9:.1f} GB cannot be made in {folder}: {error.strerror}") from error
        self.threads = ThreadPoolExecutor(RAW_THREADS, "bench-raw")

    def move(self, call: Callable[[int, Sequence[memoryview], int], int], view: memoryview, number: int) -> None:
        """`call`: descriptor, buffer, offset -> bytes moved."""
        size = self.rig.layout.block_bytes
        if call(self.fd, [view], number * size) != size:
            raise InvariantBroken(f"the system moved less than the {size} bytes of block {number}")

    def __enter__(self) -> RawFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown()
        self._close()

    def _close(self) -> None:
        os.close(self.fd)
        self._path.unlink()


class RawWrite(EachBlock):
    """The ceiling of a write: the same bytes from the same slots. `synced`: until the disk says that it has them."""

    direction = WRITE

    def __init__(self, file: RawFile, synced: bool = False) -> None:
        super().__init__(file.rig, file.threads, RAW_THREADS)
        self.name = SYNCED if synced else RAW
        self._file = file
        self._pin: Pin | None = None
        self._views: list[memoryview] = []

    def prepare(self, spoil: bool) -> None:
        slots, self._pin = self._rig.slots.pin_each(self._rig.keys, OWNER)
        self._views = [self._rig.host.view(slot) for slot in slots]

    def call(self, number: int) -> None:
        self._file.move(os.pwritev, self._views[number], number)

    def ended(self) -> None:
        if self.name == SYNCED:
            os.fdatasync(self._file.fd)

    def finish(self, check: bool) -> None:
        if self._pin is not None:
            self._rig.slots.end_handles([self._pin])
            self._pin = None


class RawRead(EachBlock):
    """The ceiling of a read: the same bytes into the same kind of slots."""

    direction = READ
    name = RAW

    def __init__(self, file: RawFile) -> None:
        super().__init__(file.rig, file.threads, RAW_THREADS)
        self._file = file
        self._room = ReadRoom(file.rig)
        self._views: list[memoryview] = []

    def prepare(self, spoil: bool) -> None:
        self._room.take(spoil)
        self._views = self._room.views

    def call(self, number: int) -> None:
        self._file.move(os.preadv, self._views[number], number)

    def finish(self, check: bool) -> None:
        self._room.give_back(f"{self.direction}, {self.name}" if check else None)


# ----------------------------------------------------------------------------------------------------------------- a store


def measure_remote(offload: OffloadConfig, sizes: Sequence[int], shape: TransferShape, progress: Progress) -> Results:
    """What others have in the store is left alone, and what this puts there is removed."""
    results = Results([], [])
    if (url := offload.remote) is None:
        return results
    for blocks in sizes:
        with ColdRig(shape, blocks, partial(open_store, url, timeout_s=offload.remote_timeout_s)) as rig:
            rig.fill(progress)
            with ClientValues(rig, open_client(url, (COLD_READERS, COLD_WRITERS))) as values:
                results.rows.extend(take_turns(rig.tier.name, _store_ways(rig, values), rig.size, shape.repeat, progress, turning=True))
    return results


def _store_ways(rig: ColdRig, values: ClientValues) -> list[TransferWay]:
    """A client may be faster on one thread than on several, where they are in each other's way."""
    readers, writers = (sorted({1, num}) for num in values.client.at_once)
    writes, reads = [ClientWrite(values, num) for num in writers], [ClientRead(values, num) for num in readers]
    tier_write = TierWrite(rig, WRITE_REMOTE, [way.name for way in writes])
    return [*writes, tier_write, *reads, TierRead(rig, READ_REMOTE, [way.name for way in reads])]


class ClientValues:
    """The rig's blocks as the client gets them, header and bytes in one piece, and its threads."""

    def __init__(self, rig: ColdRig, client: StoreClient) -> None:
        self.rig = rig
        self.client = client
        self.names: list[str] = []
        slots, pin = rig.slots.pin_each(rig.keys, OWNER)
        views = [rig.host.view(slot) for slot in slots]
        self.values = [pack(key, bytes(SCOPE_BYTES), view) + bytes(view) for key, view in zip(rig.keys, views, strict=True)]
        rig.slots.end_handles([pin] if pin is not None else [])
        self.threads = ThreadPoolExecutor(max(client.at_once), "bench-client")

    def rename(self) -> None:
        """Other names for the same values, which the store has nothing under; what was there before is removed."""
        self.remove()
        run = secrets.token_hex(8)
        self.names = [f"penstock-bench:{run}:{number}" for number in range(len(self.values))]

    def remove(self) -> None:
        with contextlib.suppress(Exception):  # a store that has gone away has forgotten them, or will
            self.client.remove(self.names)

    def __enter__(self) -> ClientValues:
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown()
        self.remove()
        self.client.close()


class _ClientWay(EachBlock):
    """One value, one call."""

    def __init__(self, values: ClientValues, num_threads: int) -> None:
        super().__init__(values.rig, values.threads, num_threads)
        self.name = f"client, {num_threads} thread{'s' if num_threads > 1 else ''}"
        self._values = values

    def call(self, number: int) -> None:
        """What a client raises may have its settings in it."""
        try:
            self._ask(self._values.names[number], number)
        except PenstockError:
            raise
        except Exception as error:
            raise StoreFailed(f"the store's own client failed ({type(error).__name__})") from None

    def _ask(self, name: str, number: int) -> None:
        raise NotImplementedError


class ClientWrite(_ClientWay):
    """From memory in one piece."""

    direction = WRITE_REMOTE

    def prepare(self, spoil: bool) -> None:
        self._values.rename()

    def _ask(self, name: str, number: int) -> None:
        self._values.client.write(name, self._values.values[number])


class ClientRead(_ClientWay):
    """Into memory that the client brings."""

    direction = READ_REMOTE

    def __init__(self, values: ClientValues, num_threads: int) -> None:
        super().__init__(values, num_threads)
        self._came: dict[int, bytes | memoryview] = {}
        self._keep = False

    def prepare(self, spoil: bool) -> None:
        self._keep = spoil

    def _ask(self, name: str, number: int) -> None:
        value = self._values.client.read(name)
        if value is None or len(value) != len(self._values.values[number]):
            raise StoreFailed("the store does not have what its own client wrote")
        if self._keep:
            self._came[number] = value

    def finish(self, check: bool) -> None:
        if check and self._came != dict(enumerate(self._values.values)):
            raise InvariantBroken(f"{self.direction}, {self.name}: other bytes came than were written")
        self._came = {}


# ----------------------------------------------------------------------------------------------------------------- clients


@dataclass(frozen=True, slots=True)
class StoreClient:
    """Calls of a client library, for several threads at once."""

    at_once: tuple[int, int]  # threads that read, threads that write: as many exchanges as our store has under way
    write: Callable[[str, bytes], object]  # under a name that was not used before
    read: Callable[[str], bytes | memoryview | None]  # None: it is not there
    remove: Callable[[Sequence[str]], object]
    close: Callable[[], object]


def open_client(url: str, at_once: tuple[int, int]) -> StoreClient:
    """`at_once` where the store has no number of its own. Raises ConfigError for a kind that there is no client of here."""
    scheme = urlsplit(url).scheme
    client = {"valkey": _valkey, "s3": _bucket, "mooncake": _mooncake}.get(KINDS.get(scheme, ""))
    if client is None:
        raise ConfigError(f"bench transfer has no client of {scheme}:// to compare with")
    return client(url, at_once)


def _valkey(url: str, at_once: tuple[int, int]) -> StoreClient:
    """GET and SET of valkey-py."""
    try:
        import valkey
        from valkey.cluster import ValkeyCluster
    except ImportError:
        raise ConfigError("bench transfer compares with valkey-py: pip install 'penstock[remote]'") from None

    from penstock.kv.tiers.remote.valkey import parse_address

    address = parse_address(url, os.environ)
    settings: dict[str, Any] = {"username": address.user, "password": address.password, "socket_timeout": TIMEOUT_S}
    host, port = address.nodes[0]
    client: Any
    if address.cluster:
        if address.tls is not None:
            raise ConfigError("bench transfer compares with a cluster of Valkey without TLS only")
        client = ValkeyCluster(host=host, port=port, **settings)
    else:
        kind = valkey.Connection if address.tls is None else _with_tls(valkey.Connection, address.tls)
        client = valkey.Valkey(connection_pool=valkey.ConnectionPool(kind, host=host, port=port, db=address.db, **settings))
    return StoreClient(at_once, client.set, client.get, lambda names: [client.unlink(name) for name in names], client.close)


def _with_tls(plain: Any, context: ssl.SSLContext) -> Any:
    class Encrypted(plain):  # type: ignore[misc]
        """The library would make a context of its own."""

        def _connect(self) -> socket.socket:
            return context.wrap_socket(super()._connect(), server_hostname=self.host)

    return Encrypted


def _bucket(url: str, at_once: tuple[int, int]) -> StoreClient:
    """Objects through obstore."""
    import obstore

    from penstock.kv.tiers.remote.s3 import connect, parse_address

    bucket, store = connect(parse_address(url), TIMEOUT_S), obstore

    def read(name: str) -> memoryview | None:
        try:
            return memoryview(store.get(bucket, name).bytes())
        except FileNotFoundError:
            return None

    write = partial(store.put, bucket, use_multipart=False)
    return StoreClient((S3_AT_ONCE, S3_AT_ONCE), write, read, lambda names: store.delete(bucket, list(names)), lambda: None)


def _mooncake(url: str, at_once: tuple[int, int]) -> StoreClient:
    """put and get of Mooncake's library, in this process."""
    from penstock.kv.tiers.remote.mooncake import parse_address

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
