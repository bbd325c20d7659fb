"""A cold tier on real lanes: what is written is read back, whatever else is a miss with a counter, and nobody
waits for it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import pytest

from penstock.contract import Access, Mode
from penstock.errors import DeadlineExceeded
from penstock.figures import Traffic
from penstock.kv.tiers import cold
from penstock.kv.tiers.calls import KnownKeys, Meter
from penstock.kv.tiers.policy import LinkRate
from penstock.kv.tiers.store import Outcome
from penstock.lanes.cpu import CpuLane
from tests.pure.kv.cold_rig import BLOCK_BYTES, KEYS, LAYERS, SOON_S, Make, Rig, Woken, are_over, make

DONE, MISSING, CORRUPT, FAILED, FULL = (
    Outcome.DONE,
    Outcome.MISSING,
    Outcome.CORRUPT,
    Outcome.FAILED,
    Outcome.FULL,
)
__all__ = ["make"]


# --------------------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("local", [True, False])
def test_what_was_written_is_found_and_read_into_other_slots(make: Make, local: bool) -> None:
    rig = make(local)
    writing = rig.write(KEYS[:5])
    assert writing.done_keys == KEYS[:5] and writing.error is None and writing.outcomes == [DONE] * 5
    assert rig.find(KEYS[:7]) == 5
    assert rig.read(KEYS[:5]) == [DONE] * 5
    counts = rig.tier.counts
    assert (counts.num_read, counts.num_written) == (5, 5)
    assert (sum(counts.read_s.counts), sum(counts.write_s.counts)) == (3, 1), (
        "what is read is read two by two"
    )
    rig.close()
    assert rig.store.closed


def test_what_a_store_does_not_have_or_has_damaged_is_not_served(make: Make) -> None:
    rig = make()
    rig.write(KEYS[:4])
    rig.store.lose(KEYS[1])
    rig.store.spoil(KEYS[2])
    rig.store.fails.add(KEYS[3])
    assert rig.read(KEYS[:4]) == [DONE, MISSING, CORRUPT, FAILED]
    assert (rig.tier.counts.num_missing, rig.tier.counts.num_corrupt, rig.tier.counts.failures) == (
        1,
        1,
        {"block": 1},
    )
    assert rig.read(KEYS[2:3]) == [MISSING]
    assert rig.tier.usable


def test_every_access_is_declared_where_it_is_submitted() -> None:
    class Heard(CpuLane):
        accesses: ClassVar[dict[str, list[Access]]] = {}

        def submit(self, op, accesses=(), **named):  # type: ignore[no-untyped-def]
            self.accesses.setdefault(self.name, []).extend(accesses)
            return super().submit(op, accesses, **named)

    rig = Rig(lane=Heard)
    rig.write(KEYS[:4])
    _, slots = rig.submit_read(KEYS[:6])
    rig.close()
    for name, wanted in {"read-0": [slots[:2], slots[4:]], "read-1": [slots[2:4]]}.items():
        assert Heard.accesses[name] == [Access("host", some, (0, LAYERS), Mode.WRITE) for some in wanted], (
            "dealt out in turn, two by two"
        )
    assert [access.mode for access in Heard.accesses["write-0"] + Heard.accesses["write-1"]] == [
        Mode.READ
    ] * 2


# ----------------------------------------------------------------------------------------------------- groups


def test_whoever_waits_for_a_reading_waits_until_it_is_over(make: Make) -> None:
    """Its slots are given back then."""
    rig = make(num_readers=1)
    rig.write(KEYS[:4])
    rig.store.gate.hold("read")
    reading, _ = rig.submit_read(KEYS[:4])
    other, _ = rig.submit_read(KEYS[:1])
    rig.store.gate.let(1)
    rig.store.gate.wait_came(2)  # the first group is over, and the second one is being read
    with pytest.raises(DeadlineExceeded):
        reading[-1].wait_over(time.monotonic())
    rig.store.gate.let()
    for group in reading:
        group.wait_over(time.monotonic() + SOON_S)
    assert are_over(reading)
    other[0].wait_over(time.monotonic() + SOON_S)
    assert len(rig.tier.readings) == 3
    rig.tier.settle()
    assert len(rig.tier.readings) == 0, "all that are over are seen at once"


def is_seen_when_woken(rig: Rig) -> None:
    """A wake-up before the fence has passed would be lost: the engine looks, finds nothing, and sleeps."""
    flying: list[Callable[[], bool]] = []
    rig.tier.wake = woken = Woken(lambda: flying[-1]())

    def submitted(is_over: Callable[[], bool]) -> None:
        flying.append(is_over)
        rig.store.gate.let()
        woken.wait_for(len(flying))
        rig.store.gate.hold()

    rig.store.gate.hold()
    writing = rig.submit_write(KEYS[:1])
    assert writing is not None
    submitted(writing.over)
    reading, _ = rig.submit_read(KEYS[:1])
    submitted(lambda: are_over(reading))
    finding = rig.tier.find(KEYS[:1], 1e9)
    submitted(lambda: finding.ready)
    persisting = rig.tier.persist()
    submitted(lambda: all(group.over() for group in persisting.groups))
    assert woken.seen == [True] * 4


def test_whoever_is_woken_sees_what_is_over(make: Make) -> None:
    is_seen_when_woken(make())


# -------------------------------------------------------------------------------------------------- questions


# Holds invariant 11: a late answer is dropped.
def test_an_answer_that_comes_too_late_changes_nothing(make: Make) -> None:
    rig = make()
    rig.write(KEYS[:3])
    rig.store.gate.hold("find")
    finding = rig.tier.find(KEYS[:3], patience_s=0.5)
    rig.store.gate.wait_came()
    assert not finding.ready and finding.num == 0 and len(rig.tier.findings) == 1
    later = rig.tier.find(KEYS[:3], patience_s=0.5)
    rig.clock.advance(0.5)
    assert finding.ready and finding.num == 0
    rig.store.gate.let()
    rig.settle()
    assert finding.ready and later.ready and finding.num == 0 and len(rig.tier.findings) == 0
    assert rig.store.calls.count("find") == 1, "nothing is asked for a request that has given up"


# -------------------------------------------------------------------------------------------- the write queue


def test_the_queue_takes_what_fits_first_blocks_first_and_counts_the_rest(make: Make) -> None:
    rig = make(queue_bytes=3 * BLOCK_BYTES)
    rig.store.gate.hold("write")
    first = rig.submit_write(KEYS[:2])
    second = rig.submit_write(KEYS[2:5])
    assert first is not None and second is not None
    assert rig.submit_write(KEYS[5:7]) is None
    assert rig.tier.counts.skipped == {"queue": 4}
    forced = rig.submit_write(KEYS[7:9], must=True)
    assert rig.submit_write(KEYS[9:13]) is None, "it holds more than fits now, and takes no more than before"
    rig.store.gate.let()
    assert set(rig.settle()) == {first, second, forced}
    assert second.outcomes == [DONE, FULL, FULL] and second.done_keys == KEYS[2:3]
    assert forced is not None and forced.done_keys == KEYS[7:9]
    assert rig.write(KEYS[5:7]).done_keys == KEYS[5:7], "there is room again"


def test_a_local_store_decides_itself_what_it_has(make: Make) -> None:
    rig = make(True)
    rig.write(KEYS[:2])
    assert rig.write(KEYS[:3]).done_keys == KEYS[:3]
    assert rig.store.calls == ["write", "write", "write"], (
        "two blocks in each, and nobody asked it what it has"
    )


def test_what_a_store_far_away_is_known_to_have_is_not_sent_again(make: Make) -> None:
    rig = make(False)
    rig.write(KEYS[:2])
    again = rig.submit_write(KEYS[:3])
    assert again is not None and not again.settled
    assert rig.settle() == [again] and again.done_keys == KEYS[:3]
    nothing = rig.submit_write(KEYS[:2])
    assert (
        nothing is not None
        and not nothing.settled
        and nothing.done_keys == []
        and len(rig.tier.writings) == 1
    )
    assert rig.tier.settle() == [nothing] and nothing.done_keys == KEYS[:2], (
        "it comes out of settle like any other"
    )
    assert rig.store.calls.count("write") == 2 and rig.tier.counts.num_written == 3


@pytest.mark.parametrize(
    "notice", [lambda rig: rig.read(KEYS[:2]), lambda rig: rig.find(KEYS[:2])], ids=["read", "find"]
)
def test_what_is_seen_to_be_gone_is_written_again(make: Make, notice: Callable[[Rig], object]) -> None:
    rig = make()
    rig.write(KEYS[:2])
    rig.store.lose()
    notice(rig)
    rig.write(KEYS[:2])
    assert set(rig.store.blocks) == set(KEYS[:2])


def test_only_so_many_keys_are_remembered_the_newest() -> None:
    known = KnownKeys(max_keys=3)
    known.add(KEYS[:3])
    known.add(KEYS[:1])  # seen again
    known.add(KEYS[3:4])
    assert known.has_each(KEYS[:4]) == [True, False, True, True]
    known.add(KEYS[10:20])  # more at once than there is room for
    assert known.has_each(KEYS[:4]) == [False] * 4 and known.has_each(KEYS[10:20]) == [False] * 7 + [True] * 3


# -------------------------------------------------------------------------------------------- settle, persist


def test_persist_comes_behind_all_writes(make: Make) -> None:
    rig = make()
    rig.store.gate.hold("write")
    writing = rig.submit_write(KEYS[:4])
    persisting = rig.tier.persist()
    rig.store.gate.wait_came(2)
    rig.store.gate.let(1)
    assert rig.tier.settle() == [] and "persist" not in rig.store.calls
    rig.store.gate.let()
    assert rig.settle() == [writing, persisting]
    assert persisting.settled and persisting.error is None and persisting.handle is None
    assert rig.store.calls == ["write", "write", "persist"]


def test_a_reset_takes_what_was_submitted_before_it_and_nothing_that_was_submitted_after(make: Make) -> None:
    rig = make(False)
    rig.write(KEYS[:2])  # the store was seen to have these
    rig.store.gate.hold("write")
    rig.submit_write(KEYS[2:8])  # three groups, on both lanes
    reset = rig.tier.reset()
    again = rig.submit_write(KEYS[:4])
    rig.store.gate.wait_came(2)
    assert rig.store.calls.count("reset") == 0, "it waits for the writes before it"
    rig.store.gate.let()
    rig.settle()
    assert reset.num_forgotten == 8 and reset.error is None
    assert again is not None and again.done_keys == KEYS[:4] and set(rig.store.blocks) == set(KEYS[:4])


def test_a_persist_behind_a_reset_does_not_mind_what_was_lost_before_it(make: Make) -> None:
    rig = make()
    rig.store.fails.add(KEYS[0])
    rig.store.gate.hold("write")
    rig.submit_write(KEYS[:2])
    rig.tier.reset()
    persisting = rig.tier.persist()
    rig.store.gate.wait_came()
    rig.store.gate.let()
    rig.settle()
    assert persisting.settled and persisting.error is None


def test_the_rate_is_of_wall_time_not_of_the_sum_of_parallel_reads(make: Make) -> None:
    rig = make()
    rig.write(KEYS[:4])
    rig.store.gate.hold("read")
    rig.submit_read(KEYS[:4])
    rig.store.gate.wait_came(2)
    rig.clock.advance(2.0)
    rig.store.gate.let()
    rig.settle()
    assert rig.tier.counts.rate.bytes_per_s == 4 * BLOCK_BYTES / 2.0


def test_of_reading_without_a_pause_a_part_is_measured_and_no_short_rest() -> None:
    meter = Meter(LinkRate())
    meter.begin(0.0)
    for number in range(1, 9):  # two at a time, each for a fifth of a second
        meter.begin(number / 10)
        meter.end(number / 10, 100)
        assert meter.rate.bytes_per_s == (None if number < 5 else 1000.0)
    meter.end(0.8001, 100)
    assert meter.rate.bytes_per_s == 1000.0, "the last came in no time after the one before"
    meter.begin(5.0)
    meter.end(5.1, 0)
    assert meter.rate.bytes_per_s == 1000.0, "nothing came"


def test_the_report_tells_all_of_it(make: Make) -> None:
    rig = make(num_writers=1)
    rig.store.max_blocks = 3
    rig.write(KEYS[:4])
    rig.store.spoil(KEYS[0])
    rig.read([KEYS[0], KEYS[1], KEYS[5]])
    rig.break_store()
    traffic = Traffic({}, {}, {}, {}, {"full": 10}, 0)
    rig.tier.report(traffic)
    assert traffic.bytes == {("remote", "host"): BLOCK_BYTES, ("host", "remote"): 3 * BLOCK_BYTES}
    assert sum(traffic.seconds["remote", "host"].counts) == 1
    assert traffic.in_flight == {("remote", "host"): 0, ("host", "remote"): 0}
    assert traffic.failures == {("remote", "store"): 1, ("remote", "missing"): 1}
    assert (
        traffic.skipped == {"full": 11}
        and traffic.checksum_failures == {"remote": 1}
        and traffic.usable == {"remote": False}
    )


def test_each_lane_of_a_drain_has_what_those_before_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    given_s: list[float] = []
    for lane in (*rig.readers, *rig.writers, rig.asker):
        monkeypatch.setattr(lane, "drain", given_s.append)
    with monkeypatch.context() as patch:  # each look at the clock takes a second
        ticks = itertools.count(1000.0, 1.0).__next__
        patch.setattr(cold, "time", SimpleNamespace(monotonic=ticks))
        rig.tier.drain(3.5)
    rig.tier.close(None)
    assert given_s == [2.5, 1.5, 0.5, 0.0, 0.0]
