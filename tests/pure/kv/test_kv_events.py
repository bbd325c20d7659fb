"""What routers are told about blocks: at any moment exactly what the tiers have, and never a block of a
tenant or of one request alone."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from penstock.contract import Adapter
from penstock.kv.blocks.key import KEY_BYTES
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.events import MOST_BLOCKS, TOKEN_BYTES, Cleared, KvEvents, KvReports, Stored, Told
from penstock.kv.tiers.ssd import survey
from penstock.kv.tiers.ssd.index import Scan
from penstock.kv.tiers.ssd.store import open_ssd
from penstock.kv.tiers.ssd.tokens import TokenFile
from penstock.kv.tiers.store import Outcome, Space
from penstock.server.kv_events import EventBatch, block_hash, on_wire
from tests.event_walks import Event
from tests.pure.kv.stacked_rig import Stacked
from tests.pure.kv.storage_rig import BLOCK
from tests.pure.kv.storage_walks import Shape, Walker, at_once, choose
from tests.support.kv_router import Router

NUM_WALKS = 60
MEDIA = {"device": "GPU", "host": "CPU", "ssd": "STORAGE"}


class Hearing:
    """Events and the books of a router that hears all of them."""

    def __init__(self, block_tokens: int = BLOCK, **limits: int) -> None:
        self.reports = KvReports(**limits)
        self.events = KvEvents(self.reports, block_tokens)
        self.router = Router()
        self._block_tokens = block_tokens

    def hear(self, most: int = 1 << 20) -> None:
        if events := self.events.take(most):
            batch = EventBatch(0.0, [on_wire(event, self._block_tokens) for event in events])
            self.router.hear(self.router.next_sequence, msgspec.msgpack.encode(batch))

    def check(self, *pools: BlockPool) -> None:
        """The router knows exactly the blocks that are there."""
        for pool in pools:
            assert self.router.held(MEDIA[pool.name]) == set(map(block_hash, pool.keys()))


class HearingWalker(Walker):
    """After each event, all that was said adds up to what device and host have."""

    def __init__(self, shape: Shape, told: Hearing) -> None:
        super().__init__(shape, told.events)
        self.told = told

    def check(self) -> None:
        super().check()
        if hasattr(self, "told"):
            self.told.hear()
            self.told.check(self.rig.pool, self.rig.host.pool)


def walk(shape: Shape, events: list[Event], told: Hearing) -> Counter[str]:
    with at_once(shape.read_ahead):
        walker = HearingWalker(shape, told)
        for event in events:
            walker.do(event)
        walker.finish()
        return Counter(told.router.kinds)


def walks(num: int, windowed: bool = False) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(num):
        seen += walk(*choose(seed, windowed), Hearing())
    return seen


def test_at_any_moment_the_events_so_far_are_exactly_what_the_pools_hold() -> None:
    seen = walks(NUM_WALKS)
    assert all(seen[kind] > 10 for kind in ("BlockStored", "BlockRemoved", "AllBlocksCleared")), seen


def test_that_holds_for_blocks_that_leave_windows() -> None:
    assert walks(NUM_WALKS // 2, windowed=True)["BlockStored"]


def _forgets_evictions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvReports, "evicted", lambda *_: None)


def _forgets_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvReports, "sealed", lambda *_: None)


def _does_not_know_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvReports, "tell", lambda *_: None)


def _clears_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    take = KvEvents.take

    def takes(self: KvEvents, most: int) -> object:
        events = take(self, most)
        return [Cleared()] if len(events) > 1 else events

    monkeypatch.setattr(KvEvents, "take", takes)


@pytest.mark.parametrize(
    "fault", [_forgets_evictions, _forgets_seals, _does_not_know_tokens, _clears_too_early]
)
def test_a_walk_notices_a_sender_that(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        walks(10)


# --------------------------------------------------------------------------------------------------- overflow


def overflowed(told: Hearing) -> Stacked:
    """A cache with more changes than there is room for."""
    rig = Stacked("ssd", num_device=24, num_host=32, events=told.events)
    for name in "abc":
        rig.ran(6, name).release(None)
        rig.flow()
    rig.cache.reset(["device"])
    rig.ran(4, "b").release(None)
    rig.flow()
    return rig


def test_after_an_overflow_all_is_said_anew() -> None:
    told = Hearing(most_waiting=8)
    rig = overflowed(told)
    assert told.reports.num_dropped > 0
    rig.prefix(6, "a")  # a request names them again: what the queue lost was their tokens
    told.hear()
    for name in "abc":
        rig.prefix(6, name)
        told.hear()
    assert "AllBlocksCleared" in told.router.kinds
    told.check(rig.pool, rig.host.pool)


def test_without_that_the_router_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvEvents, "_catch_up", lambda self, found: setattr(self.reports, "is_behind", False))
    with pytest.raises((AssertionError, KeyError)):
        test_after_an_overflow_all_is_said_anew()


def test_what_is_said_anew_begins_with_the_parents() -> None:
    told = Hearing()
    rig = overflowed(told)
    told.hear()
    told.reports.is_behind = True  # as after an overflow, with all tokens known
    told.hear()
    told.check(rig.pool, rig.host.pool)
    known: set[int] = set()
    for one in told.router.blocks["CPU"]:
        parent = told.router.parents[one]
        assert parent is None or parent in known, "it comes before its parent"
        known.add(one)


def test_a_queue_that_nobody_takes_from_is_bounded() -> None:
    """Holds invariant: reporting appends or drops, and never waits."""
    reports = KvReports(most_waiting=100)
    pool = BlockPool(50, "device", reports)
    for number in range(200):
        hold = pool.hold("request")
        reservation = pool.try_reserve(1, "request")
        assert reservation is not None
        reservation.commit(hold)
        pool.seal(hold.slots, [number.to_bytes(16, "big")])
        hold.end()
    assert len(reports.queue) == 100 and reports.num_dropped == 251


def test_tokens_of_prompts_that_wait_in_the_queue_are_bounded_in_bytes() -> None:
    """However few prompts they are. What was dropped makes no block known, and clears nothing."""
    reports = KvReports(most_bytes=10_000)
    events = KvEvents(reports, 1)
    reports.make_public(b"s")
    pool = BlockPool(50, "device", reports)
    keys = [number.to_bytes(16, "big") for number in range(40)]
    for _ in range(2):
        for _ in range(9):
            reports.tell(b"s", None, keys, bytes(4 * len(keys)))
        assert [type(one) for one in reports.queue].count(Told) == 3
        assert not reports.is_behind and not events.take()
    assert reports.num_dropped == 12
    hold, reservation = pool.hold("request"), pool.try_reserve(1, "request")
    assert reservation is not None
    reservation.commit(hold)
    pool.seal(hold.slots, keys[:1])
    assert [type(event) for event in events.take()] == [Stored]
    hold.end()


def test_after_the_sender_has_failed_nothing_is_kept() -> None:
    heard = Hearing(BLOCK)
    rig = Stacked("ssd", num_device=24, num_host=32, events=heard.events)
    rig.ran(6, "a").release(None)
    heard.hear()
    heard.events.stop()
    rig.ran(6, "b").release(None)
    rig.flow()
    assert not heard.reports.queue and heard.reports.num_dropped > 6


# ---------------------------------------------------------------------------------------------------- private


def ran_with(rig: Stacked, token: int, salt: str, adapter: Adapter | None = None, more: int = 0) -> None:
    """A request of one tenant computes four blocks, and `more` that it generates."""
    prefix = rig.cache.prefix_of([token] * (4 * BLOCK), salt, adapter)
    table = rig.cache.open("request", prefix, 0)
    assert prefix is not None and table is not None and table.try_extend(4 + more)
    num_tokens = (4 + more) * BLOCK
    table.seal([token] * num_tokens, num_tokens, None)
    rig.pool.index.check()
    table.release(None)


def test_blocks_of_tenants_are_never_named() -> None:
    told = Hearing()
    rig = Stacked("ssd", num_device=24, num_host=32, events=told.events)
    ran_with(rig, 7, "")
    ran_with(rig, 8, "a tenant's", more=2)
    ran_with(rig, 9, "a tenant's", Adapter("fable", "d"))
    rig.cache.extend_prefix(rig.cache.prefix_of([8] * BLOCK, "a tenant's"), [8] * 3 * BLOCK)
    told.hear()
    assert told.router.tokens == {7}
    assert len(rig.pool.keys()) == 14 and len(told.router.held("GPU")) == 4


def test_without_that_rule_they_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    tell = KvReports.tell

    def tells(self: KvReports, scope: bytes, *rest: object) -> None:
        self.make_public(scope)
        tell(self, scope, *rest)

    monkeypatch.setattr(KvReports, "tell", tells)
    with pytest.raises(AssertionError):
        test_blocks_of_tenants_are_never_named()


def test_blocks_of_a_closed_scope_are_never_named() -> None:
    """What a scored request computes after its context was cut is for itself alone."""
    told = Hearing()
    rig = Stacked("ssd", num_device=24, num_host=32, events=told.events)
    table = rig.cache.open("request", rig.prefix(2), 0)
    assert table is not None
    rig.fill(table, 2)
    table.close_scope(2 * BLOCK)
    assert table.try_extend(2)
    table.seal([ord("a")] * (4 * BLOCK), 4 * BLOCK, None)
    told.hear()
    assert len(rig.pool.keys()) == 4 and len(told.router.held("GPU")) == 2


def test_an_adapter_is_named_and_so_are_blocks_that_a_request_generates() -> None:
    told = Hearing()
    rig = Stacked("ssd", num_device=24, num_host=32, events=told.events)
    ran_with(rig, 7, "", Adapter("fable", "d"), more=3)
    told.hear()
    assert len(told.router.held("GPU")) == 7 and set(told.router.adapters.values()) == {"fable"}
    assert all(tokens == (7,) * BLOCK for tokens in told.router.blocks["GPU"].values())
    hashes = [*told.router.blocks["GPU"]]
    assert [told.router.parents[one] for one in hashes] == [None, *hashes[:-1]]


# ----------------------------------------------------------------------------------------------------- events


def test_a_long_prompt_is_a_few_events() -> None:
    events = KvEvents(reports := KvReports(), 1)
    reports.make_public(b"s")
    pool = BlockPool(2 * MOST_BLOCKS, "device", reports)
    keys = [number.to_bytes(16, "big") for number in range(MOST_BLOCKS + 9)]
    reports.tell(b"s", None, keys, bytes(4 * len(keys)))
    hold, reservation = pool.hold("request"), pool.try_reserve(len(keys), "request")
    assert reservation is not None
    reservation.commit(hold)
    pool.seal(hold.slots, keys)
    first, second = events.take()
    assert isinstance(first, Stored) and isinstance(second, Stored)
    assert (len(first.keys), first.parent, len(second.keys)) == (MOST_BLOCKS, None, 9)
    assert second.parent == first.keys[-1]
    hold.end()
    pool.evict(len(keys))
    assert events.take() == [Cleared()]
    assert events.figures().made == {"stored": 2, "removed": 0, "cleared": 1}


def test_tokens_of_blocks_that_are_nowhere_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.kv.events._SPARE_CONTENTS", 4)
    events = KvEvents(reports := KvReports(), 1)
    reports.make_public(b"s")
    BlockPool(1, "device", reports)
    for number in range(100):
        reports.tell(b"s", None, [number.to_bytes(16, "big")], bytes(4))
        events.take()
    assert len(events._contents) <= 8


# ------------------------------------------------------------------------------------------------------- disk

SPACE = Space(b"s" * 32, 4096)
DISK_KEYS = [bytes([number + 1]) * 16 for number in range(12)]
PRIVATE = b"private block   "


class Disk:
    """A store of some blocks, and what is told of it; the blocks are one prefix."""

    def __init__(self, folder: Path, keeps_tokens: bool = False, is_scanned: bool = True) -> None:
        folder.chmod(0o700)
        self.told = Hearing(1)
        self.folder = folder
        self.store = open_ssd(folder, 64 << 10, SPACE, "lru", observer=self.told.reports)
        assert not is_scanned or self.store.wait_scanned(60)
        if keeps_tokens:
            self.told.events = KvEvents(self.told.reports, 1, TokenFile(self.store, TOKEN_BYTES))
        self.told.reports.make_public(b"s")

    @property
    def pool(self) -> BlockPool:
        return self.store._now.index._pool

    def tell(self) -> None:
        """A request brings the tokens."""
        self.told.reports.tell(b"s", None, DISK_KEYS, bytes(range(4 * len(DISK_KEYS))))

    def write(self, keys: list[bytes]) -> None:
        for key in keys:
            self.store.write([key], [DISK_KEYS.index(key)], [memoryview(bytearray(4096))])

    def check(self, most: int = 1 << 20) -> None:
        """`most`: changes that the sender takes in one go."""
        self.told.hear(most)
        while self.told.events.num_waiting:
            self.told.hear(most)
        self.told.check(self.pool)

    @property
    def tokens(self) -> Path:
        (path,) = self.folder.glob("*.tokens")
        return path

    def close(self) -> None:
        self.told.events.take()
        self.told.events.close()
        self.store.close()


def test_the_disk_is_told_of_as_well(tmp_path: Path) -> None:
    """Blocks that it evicts, finds damaged or forgets leave."""
    disk = Disk(tmp_path)
    disk.tell()
    disk.write(DISK_KEYS)
    disk.check()
    assert 0 < len(disk.pool.keys()) < len(DISK_KEYS), "nothing was evicted"
    bad = disk.pool.keys()[0]
    segment, number = disk.store._now.segments.locate(disk.pool.find_each([bad])[0])
    with disk.store.directory.segment_path(segment.head.number).open("r+b") as file:
        file.seek(segment.offset(number))
        file.write(bytes(4096))
    assert disk.store.read([bad], [memoryview(bytearray(4096))]) == [Outcome.CORRUPT]
    disk.check()
    disk.store.reset()
    disk.check()
    assert disk.told.router.kinds[-1] == "AllBlocksCleared"
    disk.close()


def test_after_a_restart_blocks_on_disk_are_told_of_parents_first(tmp_path: Path) -> None:
    disk = Disk(tmp_path, keeps_tokens=True)
    disk.tell()
    disk.write(DISK_KEYS[4::-1])  # the scan finds the deepest first
    disk.check()
    before = disk.told.router.blocks["STORAGE"]
    disk.close()
    disk = Disk(tmp_path, keeps_tokens=True)
    disk.check()
    assert disk.told.router.blocks["STORAGE"] == before and len(before) == 5
    assert disk.told.router.kinds == ["BlockStored"], "all of it is one chain"
    disk.close()


@pytest.mark.parametrize("most", [1, 2])
def test_blocks_on_disk_are_told_of_however_few_changes_are_taken_at_once(
    tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none of their records is dropped from the file."""
    monkeypatch.setattr("penstock.kv.tiers.ssd.tokens._SPARE", 0)
    disk = Disk(tmp_path, keeps_tokens=True)
    disk.tell()
    disk.write(DISK_KEYS[:5])
    disk.check()
    written = disk.tokens.read_bytes()
    disk.close()
    for _ in range(2):
        disk = Disk(tmp_path, keeps_tokens=True)
        disk.check(most)
        assert len(disk.told.router.held("STORAGE")) == 5 and disk.tokens.read_bytes() == written
        disk.close()


def test_a_server_that_stops_during_the_scan_keeps_the_file_of_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, keeps_tokens=True)
    disk.tell()
    disk.write(DISK_KEYS[:4])
    disk.check()
    written = disk.tokens.read_bytes()
    disk.close()
    gate, heads = threading.Event(), Scan._heads_of
    with monkeypatch.context() as held:
        held.setattr(Scan, "_heads_of", lambda self, group: (gate.wait(120), heads(self, group))[1])
        disk = Disk(tmp_path, keeps_tokens=True, is_scanned=False)
        disk.told.events.take()
        disk.store._now.scan._stop.set()  # as `close`, which waits for what the gate holds
        gate.set()
        disk.store.close()
        disk.told.events.take()  # as the publisher does last
        disk.told.events.close()
    assert disk.tokens.read_bytes() == written
    disk = Disk(tmp_path, keeps_tokens=True)
    disk.check()
    assert len(disk.told.router.held("STORAGE")) == 4
    disk.close()


def test_a_disk_that_was_opened_anew_has_a_file_of_tokens(tmp_path: Path) -> None:
    """Somebody removes its directory: the blocks that are written again are told of after a restart."""
    folder = tmp_path / "ssd"
    folder.mkdir()
    disk = Disk(folder, keeps_tokens=True)
    disk.tell()
    disk.write(DISK_KEYS[:4])
    disk.check()
    folder.rename(tmp_path / "gone")
    disk.store.probe()
    disk.write(DISK_KEYS[2:4])  # before the sender knows of the new directory
    assert disk.store.wait_scanned(60)
    disk.check()
    disk.write(DISK_KEYS[4:7])
    disk.check()
    disk.close()
    disk = Disk(folder, keeps_tokens=True)
    disk.check()
    assert len(disk.told.router.held("STORAGE")) == 5
    disk.close()


def test_without_the_file_they_are_told_of_when_a_request_brings_their_tokens(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.tell()
    disk.write(DISK_KEYS[:4])
    disk.close()
    disk = Disk(tmp_path)
    disk.told.hear()
    assert len(disk.pool.keys()) == 4 and not disk.told.router.held("STORAGE")
    disk.tell()
    disk.check()
    disk.close()


def test_a_damaged_record_is_skipped_and_private_ones_are_not_written(tmp_path: Path) -> None:
    disk = Disk(tmp_path, keeps_tokens=True)
    disk.tell()
    disk.write(DISK_KEYS[:4])
    disk.store.write([PRIVATE], [0], [memoryview(bytearray(4096))])
    disk.close()
    data = bytearray(disk.tokens.read_bytes())
    assert PRIVATE not in bytes(data) and len(data) % 4 == 0
    data[len(data) // 4 + 2 * KEY_BYTES] ^= 1  # a token of the second of four records
    disk.tokens.write_bytes(bytes(data) + b"half a record")
    disk = Disk(tmp_path, keeps_tokens=True)
    disk.told.hear()
    hashes = [block_hash(key) for key in (DISK_KEYS[0], *DISK_KEYS[2:4])]
    assert disk.told.router.held("STORAGE") == set(hashes)
    disk.close()


def test_the_file_of_tokens_is_bounded_and_a_reset_empties_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.kv.tiers.ssd.tokens._SPARE", 4)
    disk = Disk(tmp_path, keeps_tokens=True)
    disk.tell()
    for _ in range(10):
        disk.write(DISK_KEYS)
        disk.check()
    record_bytes = 2 * KEY_BYTES + TOKEN_BYTES + 8
    most = 2 * len(disk.pool.keys()) + 4
    assert 0 < disk.tokens.stat().st_size // record_bytes <= most + len(DISK_KEYS)
    disk.store.reset()
    disk.check()
    assert disk.tokens.stat().st_size == 0
    disk.close()
    survey.clear(tmp_path, lambda done, total: None)
    assert not [*tmp_path.glob("penstock-*")]


def test_a_file_of_tokens_that_cannot_be_used_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(tmp_path, keeps_tokens=True)
    path = disk.tokens
    disk.close()
    path.unlink()
    path.mkdir()
    disk = Disk(tmp_path, keeps_tokens=True)
    assert caplog.text.count("cannot be used") == 1
    disk.tell()
    disk.write(DISK_KEYS[:4])
    disk.check()
    disk.close()
