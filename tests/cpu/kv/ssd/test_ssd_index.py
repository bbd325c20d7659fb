"""The index of the SSD tier: which of two copies counts, what is doubted, what is not published."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.kv.blocks.handles import Reservation
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.tiers.ssd import index as index_module
from penstock.kv.tiers.ssd.index import SlotIndex
from penstock.kv.tiers.ssd.segments import Segment, SegmentHead, SlotHead
from penstock.kv.tiers.store import Envelope, Outcome
from tests.cpu.kv.ssd.ssd_rig import key_of

GENERATION = b"g" * 16
KEY = key_of(1)


class OneFile:
    """All slots are in one file, and none is withheld."""

    written_ns = 0

    def __init__(self) -> None:
        self.segment = Segment(SegmentHead(0, 8, 100, b"s" * 32, GENERATION), 0, 8)

    def renew(self) -> None:
        self.segment.head = self.segment.head._replace(generation=b"n" * 16)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(())

    def locate(self, slot: int) -> tuple[Segment, int]:
        return self.segment, slot


def made(num_slots: int, *num_withheld: int) -> SimpleNamespace:
    pool = BlockPool(num_slots, "ssd")
    files = OneFile()
    index = SlotIndex(pool, files)  # type: ignore[arg-type]
    withheld: list[Reservation | None] = [pool.try_reserve(num, "scan") for num in num_withheld]
    return SimpleNamespace(files=files, pool=pool, index=index, withheld=withheld)


def head_of(key: bytes, slot: int, sequence: int) -> SlotHead:
    return SlotHead(Envelope(key, b"s" * 32, 100, sequence, b"c" * 16), GENERATION, 0, slot, 0)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("newer_first", [False, True])
def test_the_newer_copy_counts_unless_the_other_was_used_since_the_start(
    used: bool, newer_first: bool
) -> None:
    one = made(2, 1, 1)
    for slot, sequence in enumerate((20, 10) if newer_first else (10, 20)):
        one.index.add_scanned(one.withheld[slot], {slot: head_of(KEY, slot, sequence)})
        if used and slot == 0:
            one.index.unpin(one.index.pin_each([KEY])[1])
    one.index.end_scan()
    assert one.pool.find_each([KEY]) == [0 if used or newer_first else 1]
    assert one.pool.counts.free == 1 and one.pool.counts.idle == 1
    one.pool.check()
    one.index.close()


def test_an_older_copy_in_a_group_keeps_nothing_behind_it_from_being_found() -> None:
    """Heads of a group are looked through from the newest on: the copy that does not count is in the
    middle."""
    one = made(4, 4)
    keys, sequences = [KEY, key_of(2), KEY, key_of(3)], [40, 20, 30, 10]
    heads = {slot: head_of(keys[slot], slot, sequences[slot]) for slot in range(4)}
    assert one.index.add_scanned(one.withheld[0], heads) == 3, "blocks, not copies"
    assert one.pool.find_each([KEY, key_of(2), key_of(3)]) == [0, 1, 3]
    one.index.end_scan()
    one.index.close()


def test_what_is_written_counts_though_the_scan_finds_an_older_copy_meanwhile() -> None:
    """The older copy may be torn, and a persist of the write promises that the block is there."""
    one = made(2, 1, 1)
    one.index.add_scanned(one.withheld[0], {})
    claim = one.index.claim([KEY])
    assert claim.slots == [0]
    one.index.add_scanned(one.withheld[1], {1: head_of(KEY, 1, 1)})
    one.index.land(claim, [KEY], [0], {0: GENERATION})
    assert claim.outcomes == [Outcome.DONE] and one.pool.find_each([KEY]) == [0], "the one written now"
    assert one.index.claim([KEY]).unverified == []
    one.index.end_scan()
    assert one.pool.counts.free == 1 and one.pool.counts.idle == 1
    one.pool.check()
    one.index.close()


def test_a_block_whose_generation_is_over_is_not_published() -> None:
    one, keys = made(4), [key_of(1), key_of(2)]
    claim = one.index.claim(keys)
    one.index.land(claim, keys, [0, 1], {0: b"o" * 16, 1: GENERATION})
    assert one.index.find(keys[:1]) == 0 and one.index.find(keys[1:]) == 1
    assert claim.outcomes == [Outcome.DONE] * 2
    one.pool.check()


@pytest.mark.parametrize("reset", [False, True])
def test_what_was_read_before_a_reset_is_not_found_after_it(reset: bool) -> None:
    one, keys = made(2, 2), [key_of(1), key_of(2)]
    heads = {slot: head_of(key, slot, slot) for slot, key in enumerate(keys)}
    if reset:
        assert one.index.reset(one.files.renew) == 0
    one.index.add_scanned(one.withheld[0], heads)
    assert one.index.find(keys) == (0 if reset else 2)
    assert one.pool.counts.free == (2 if reset else 0), "slots that hold nothing can be used"
    one.pool.check()
    one.index.close()


@pytest.mark.parametrize("step_ns", [0, 1, -1000])
def test_no_two_blocks_have_the_same_sequence_whatever_the_clock_says(
    monkeypatch: pytest.MonkeyPatch, step_ns: int
) -> None:
    """Clocks are coarse, and are set back."""
    clock = iter(range(10_000, 10_000 + 5 * step_ns, step_ns) if step_ns else [10_000] * 5)
    monkeypatch.setattr(index_module.time, "time_ns", lambda: next(clock))
    index, given = made(8).index, list[int]()
    for num in (3, 1, 2, 2):
        first = index.claim([key_of(len(given) + place) for place in range(num)]).sequence
        given += range(first, first + num)
    assert given == sorted(set(given))


def test_what_is_written_now_is_newer_than_all_that_was_found_whatever_the_clock_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was set back since an earlier process: a block that is given up and written anew has an old copy in
    the files."""
    monkeypatch.setattr(index_module.time, "time_ns", lambda: 1000)
    one = made(4, 1, 1)
    for slot, sequence in enumerate((5000, 3000)):
        one.index.add_scanned(one.withheld[slot], {slot: head_of(key_of(slot), slot, sequence)})
    one.index.end_scan()
    assert one.index.claim([key_of(2)]).sequence > 5000
