"""A cold tier whose store fails, hangs or is broken, and whose lanes end: misses and deadlines, nobody waits,
no slot is given up.

Holds invariant 22: a tier that fails or hangs costs a miss, a counter and a bounded wait."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from penstock.errors import DeadlineExceeded, InvariantBroken, LaneClosed, StoreFailed
from penstock.kv.tiers.calls import BreakerState, Way
from penstock.kv.tiers.host import HostLease
from penstock.kv.tiers.store import Outcome
from penstock.testing.stores import HandClock
from tests.pure.kv.cold_rig import KEYS, LIMITS, SOON_S, Make, Rig, Woken, are_over, make
from tests.pure.kv.stacked_rig import Stacked
from tests.pure.kv.storage_rig import BLOCK

DONE, FAILED = Outcome.DONE, Outcome.FAILED
__all__ = ["make"]


# ------------------------------------------------------------------------------------------------ the breaker


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StoreFailed("down"), "store"),
        (TimeoutError(), "timeout"),
        (DeadlineExceeded("late"), "timeout"),
        (OSError("bad"), "error"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_a_store_raises_fails_its_group_and_fences_the_tier_off(
    make: Make, error: Exception, reason: str
) -> None:
    rig = make(num_readers=1)
    rig.write(KEYS[:4])
    rig.store.on_call = lambda call: setattr(rig.store, "raises", error)
    assert rig.read(KEYS[:4]) == [FAILED] * 4
    assert rig.store.calls.count("read") == 1, "what was queued behind it did not try"
    assert rig.tier.counts.failures == {reason: 1, "broken": 1} and rig.tier.calls.breaker.num_openings == 1
    assert (
        not rig.tier.usable and rig.tier.counts.queued_bytes[Way.READ] == 0 and rig.tier.counts.num_read == 0
    )


def test_while_it_is_fenced_off_nothing_is_asked_read_or_written(make: Make) -> None:
    rig = make()
    rig.write(KEYS[:2])
    rig.break_store()
    calls = list(rig.store.calls)
    finding = rig.tier.find(KEYS[:2], 1e9)
    assert finding.ready and finding.num == 0
    assert rig.submit_write(KEYS[2:4]) is None and rig.submit_write(KEYS[2:4], must=True) is None
    assert rig.read(KEYS[:2]) == [FAILED] * 2
    assert rig.store.calls == calls and rig.tier.counts.skipped == {"broken": 4}


def comes_back(rig: Rig) -> None:
    rig.write(KEYS[:2])
    rig.break_store()
    for wait_s in (1.0, 2.0, 4.0):
        rig.clock.advance(0.9 * wait_s)
        rig.settle()
        num_probes = rig.store.calls.count("probe")
        rig.clock.advance(0.2 * wait_s)
        rig.tier.settle()
        rig.settle()
        assert rig.store.calls.count("probe") == num_probes + 1 and not rig.tier.usable
    rig.store.raises = None
    rig.store.lose()  # it was restarted, and is empty
    rig.clock.advance(8.1)
    rig.tier.settle()
    rig.settle()
    assert rig.tier.usable
    assert rig.write(KEYS[:2]).done_keys == KEYS[:2] and set(rig.store.blocks) == set(KEYS[:2]), (
        "nothing is believed to be there"
    )
    assert rig.read(KEYS[:2]) == [DONE] * 2


@pytest.mark.parametrize("local", [True, False])
def test_it_is_probed_on_a_lane_ever_more_rarely_until_it_is_back(make: Make, local: bool) -> None:
    comes_back(make(local))


def test_nothing_of_what_others_raise_is_said_in_a_log_or_an_error(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make()
    rig.store.raises = ConnectionError("redis://user:hunter2@store")
    with caplog.at_level(logging.DEBUG):
        writing = rig.write(KEYS[:1])
    assert "fenced off" in caplog.text and "ConnectionError" in caplog.text
    assert "hunter2" not in caplog.text + str(writing.error) + repr(writing.error)


def test_nothing_is_believed_to_be_in_a_store_from_the_moment_that_it_is_usable_again(make: Make) -> None:
    """It may have come back empty, and other threads write to it as soon as they may."""
    rig = make()
    rig.write(KEYS[:2])
    rig.break_store()
    rig.store.raises = None
    probed, believed = rig.tier.calls.breaker.probed, []

    def usable_again(answers: bool) -> None:
        probed(answers)
        believed.append((rig.tier.usable, rig.tier.calls.known.has_each(KEYS[:2])))

    rig.tier.calls.breaker.probed = usable_again  # type: ignore[method-assign]
    rig.clock.advance(1.0)
    rig.tier.settle()
    rig.settle()
    assert believed == [(True, [False, False])]


def test_a_write_from_before_a_store_was_away_says_nothing_about_what_it_has(make: Make) -> None:
    rig = make()
    rig.store.gate.hold("write")
    early = rig.submit_write(KEYS[:1])
    rig.store.gate.wait_came()
    rig.break_store()
    rig.store.raises = None
    rig.clock.advance(1.0)
    rig.tier.settle()
    assert rig.asker is not None
    rig.asker.drain(SOON_S)
    assert rig.tier.usable, "it was probed"
    rig.store.gate.let()
    assert rig.settle() == [early]
    rig.store.lose()
    rig.write(KEYS[:1])
    assert set(rig.store.blocks) == set(KEYS[:1]), "it is written again"


# ------------------------------------------------------------------------------------------------------ stuck


@pytest.mark.parametrize("call", ["read", "write", "find"])
def test_something_that_takes_too_long_makes_it_unusable_until_that_is_over(make: Make, call: str) -> None:
    rig = make()
    rig.store.gate.hold(call)
    start: dict[str, Callable[[], object]] = {
        "read": lambda: rig.submit_read(KEYS[:1]),
        "write": lambda: rig.submit_write(KEYS[:1]),
        "find": lambda: rig.tier.find(KEYS[:1], 1e9),
    }
    start[call]()
    rig.store.gate.wait_came()
    rig.clock.advance(9.9)
    assert rig.tier.usable
    rig.clock.advance(0.2)
    assert not rig.tier.usable and rig.tier.settle() == [] == rig.tier.settle()
    assert rig.tier.counts.failures == {"stuck": 1}
    assert rig.submit_write(KEYS[1:2]) is None and rig.tier.find(KEYS[:1], 1e9).ready
    assert (len(rig.tier.readings), len(rig.tier.writings)) == (call == "read", call == "write"), (
        "its slots stay with it"
    )
    rig.store.gate.let()
    rig.settle()
    assert rig.tier.usable and rig.tier.calls.breaker.state is BreakerState.CLOSED


def test_a_reset_takes_as_long_as_there_are_blocks_and_is_not_stuck(make: Make) -> None:
    """What is written meanwhile is written behind it, and what is read is read."""
    rig = make()
    rig.store.gate.hold("reset")
    reset = rig.tier.reset()
    rig.store.gate.wait_came()
    rig.clock.advance(1000.0)
    assert rig.tier.usable and not reset.settled
    written = rig.submit_write(KEYS[:1])
    assert written is not None
    rig.store.gate.let()
    rig.settle()
    assert reset.settled and reset.error is None and rig.read(KEYS[:1]) == [DONE]
    assert rig.tier.counts.failures == {}


# -------------------------------------------------------------------------------------------------------- end


@pytest.mark.parametrize("call", ["read", "write", "find", "close"])
def test_a_store_that_hangs_does_not_hang_close(make: Make, call: str) -> None:
    rig = make(num_readers=1)
    rig.store.gate.hold(call)
    begun, _ = rig.submit_read(KEYS[:1])
    rig.submit_write(KEYS[:1])
    rig.tier.find(KEYS[:1], 1e9)
    queued, slots = rig.submit_read(KEYS[1:2])
    with pytest.raises(DeadlineExceeded):
        rig.tier.close(0.05)
    if call in ("write", "find"):
        rig.readers[0].drain(SOON_S)
        assert "close" not in rig.store.calls, "a call is under way"
    assert not rig.store.closed and not rig.tier.usable
    if call == "read":
        assert not are_over(begun) and not are_over(queued), "what is under way keeps its slots"
    rig.store.gate.let()
    rig.tier.close(SOON_S)
    rig.tier.close(SOON_S)
    assert rig.store.closed
    if call == "read":
        assert rig.store.calls.count("read") == 1, "what had not begun never did"
        assert [group.take_outcomes() for group in queued] == [[FAILED]] and not any(rig.host.view(slots[0]))


def test_what_comes_after_the_end_fails_and_nothing_more(make: Make) -> None:
    rig = make()
    rig.close()
    reading, _ = rig.submit_read(KEYS[:3])
    assert are_over(reading) and [group.take_outcomes() for group in reading] == [[FAILED, FAILED], [FAILED]]
    assert rig.submit_write(KEYS[:1]) is None and rig.tier.find(KEYS[:1], 1.0).ready
    persisting = rig.tier.persist()
    assert rig.tier.settle() == [persisting] and persisting.error is not None
    assert rig.tier.counts.queued_bytes[Way.READ] == 0


# -------------------------------------------------------------------------------------------- our own defects


def raised_by(call: Callable[[], object]) -> tuple[int, object]:
    """How often `call` raises what broke, and what it says then."""
    for num in range(10):
        try:
            return num, call()
        except InvariantBroken:
            continue
    raise AssertionError("there is no end to it")


def a_defect_surfaces_and_loses_nothing(rig: Rig) -> None:
    rig.store.raises = InvariantBroken("ours")
    reading, _ = rig.submit_read(KEYS[:3])
    writing = rig.submit_write(KEYS[:1])
    finding = rig.tier.find(KEYS[:1], 1e9)
    persisting = rig.tier.persist()
    rig.tier.drain(SOON_S)
    num, groups = raised_by(lambda: [group.take_outcomes() for group in reading])
    assert num == 2 and groups == [[FAILED, FAILED], [FAILED]]
    num, given = raised_by(rig.tier.settle)
    assert num == 2 and given == [writing, persisting]
    assert writing is not None and writing.done_keys == [] and isinstance(writing.error, InvariantBroken)
    assert finding.ready and finding.num == 0
    assert rig.tier.usable, "the store is not to blame"


def test_a_defect_of_ours_surfaces_on_the_engine_thread_and_loses_nothing(make: Make) -> None:
    a_defect_surfaces_and_loses_nothing(make())


@pytest.mark.parametrize("num_outcomes", [1, 3])
@pytest.mark.parametrize("local", [False, True])
def test_a_store_that_does_not_say_what_became_of_each_block_is_a_defect(
    make: Make, local: bool, num_outcomes: int
) -> None:
    rig = make(local)
    rig.store.read = lambda keys, into: [DONE] * num_outcomes  # type: ignore[method-assign]
    reading, _ = rig.submit_read(KEYS[:2])
    rig.tier.drain(SOON_S)
    num, groups = raised_by(lambda: [group.take_outcomes() for group in reading])
    assert num == 1 and groups == [[FAILED, FAILED]]


def test_a_probe_that_is_a_defect_surfaces_and_the_store_is_probed_again(make: Make) -> None:
    rig = make()
    rig.break_store()
    rig.tier.wake = woken = Woken()
    rig.store.raises = InvariantBroken("ours")
    rig.clock.advance(1.0)
    assert rig.tier.settle() == []
    woken.wait_for(1)
    with pytest.raises(InvariantBroken, match="ours"):
        rig.settle()
    assert rig.tier.calls.breaker.state is BreakerState.OPEN and rig.tier.settle() == [], "told once"
    rig.store.raises = None
    rig.clock.advance(2.0)
    rig.tier.settle()
    rig.settle()
    assert rig.tier.usable and rig.write(KEYS[:2]).done_keys == KEYS[:2]


@pytest.mark.parametrize(
    "refused", [LaneClosed("closed"), MemoryError()], ids=lambda value: type(value).__name__
)
def test_a_probe_that_cannot_be_submitted_is_tried_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, refused: BaseException
) -> None:
    """Nobody would say what came of it: the breaker would wait for that for ever."""
    rig = make()
    rig.break_store()
    rig.store.raises = None
    rig.clock.advance(1.0)
    assert rig.asker is not None

    def refuses(*args: object, **more: object) -> None:
        raise refused

    with monkeypatch.context() as patch:
        patch.setattr(rig.asker, "submit", refuses)
        if isinstance(refused, LaneClosed):
            assert rig.tier.settle() == []
        else:
            with pytest.raises(MemoryError):
                rig.tier.settle()
    assert rig.tier.calls.breaker.state is BreakerState.OPEN
    rig.clock.advance(2.0)
    rig.tier.settle()
    rig.settle()
    assert rig.tier.usable


@pytest.mark.parametrize("way", ["read", "write"])
@pytest.mark.parametrize("where", [0, 1])
def test_a_group_that_cannot_be_submitted_fails_alone_and_frees_the_queue(
    make: Make, monkeypatch: pytest.MonkeyPatch, way: str, where: int
) -> None:
    rig = make()
    rig.write(KEYS[:4])
    lanes = rig.readers if way == "read" else rig.writers
    submit = lanes[where].submit

    def refuses(op: object, accesses: object = (), **more: object) -> object:
        if accesses:
            raise MemoryError("no room for another op")
        return submit(op, accesses, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(lanes[where], "submit", refuses)
        if way == "read":
            outcomes = rig.read(KEYS[:4])
        else:
            writing = rig.submit_write(KEYS[10:14])
            assert (
                writing is not None and rig.settle() == [writing] and isinstance(writing.error, MemoryError)
            )
            outcomes = writing.outcomes
    assert sorted(outcome.value for outcome in outcomes) == ["done", "done", "failed", "failed"]
    assert all(num == 0 for num in rig.tier.calls.tally.queued_bytes.values())
    assert len(rig.tier.readings) == len(rig.tier.writings) == 0
    assert rig.write(KEYS[10:14]).done_keys == KEYS[10:14] and rig.read(KEYS[10:14]) == [DONE] * 4


def test_a_younger_exchange_does_not_hide_one_that_hangs(make: Make) -> None:
    rig = make()
    rig.write(KEYS[:2])
    rig.store.gate.hold("read")
    for number in range(2):
        rig.submit_read(KEYS[number : number + 1])
        rig.store.gate.wait_came(number + 1)
        assert rig.tier.usable
        rig.clock.advance(0.6 * LIMITS.stuck_s)
    assert not rig.tier.usable, "the first of them hangs"
    rig.store.gate.let()
    rig.settle()
    assert rig.tier.usable


@pytest.mark.parametrize("error", [InvariantBroken("it was written to behind its end"), OSError("bad")])
@pytest.mark.parametrize("local", [True, False])
def test_a_store_whose_close_goes_wrong_is_told_by_whoever_closes_its_tier(
    make: Make, local: bool, error: Exception
) -> None:
    """Only a store that does not answer is left with a warning: nobody needs it any more."""
    rig = make(local=local)
    rig.store.raises = error
    for _ in range(2):
        with pytest.raises(type(error)):
            rig.tier.close(SOON_S)
    assert rig.store.calls == ["close"] and not rig.tier.usable


def test_a_defect_of_ours_is_the_error_of_a_write_also_where_the_store_failed_before_it(make: Make) -> None:
    """Two groups of one write go wrong at once: it is told what must be mended, not what goes away by
    itself."""
    rig = make()
    together = threading.Barrier(2)

    def write(keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]) -> list[Outcome]:
        together.wait(SOON_S)
        raise StoreFailed("it is away") if keys[0] == KEYS[0] else InvariantBroken("nobody should come here")

    rig.store.write = write  # type: ignore[method-assign]
    writing = rig.submit_write(KEYS[:4])
    assert writing is not None and len(writing.groups) == 2
    with pytest.raises(InvariantBroken, match="nobody should"):
        rig.settle()
    assert (
        rig.settle() == [writing] and isinstance(writing.error, InvariantBroken) and writing.done_keys == []
    )


def test_a_store_is_not_waited_for_longer_than_a_second_however_long_computing_takes() -> None:
    rig = Stacked("remote")
    rig.set_limits(replace(rig.saves.limits, load_always=False))
    rig.loads.costs.prefill.add(BLOCK, 0.0, 100.0)
    lease = rig.cache.lease("request", rig.prefix(4))
    assert isinstance(lease, HostLease) and lease.parts[0].finding.deadline_s - rig.clock() == pytest.approx(
        1.0
    )
    lease.end()
    rig.flow()
    rig.end()


def test_writes_that_were_queued_when_it_broke_are_skipped(make: Make) -> None:
    rig = make(num_writers=1)
    rig.store.gate.hold("write")
    first, second = rig.submit_write(KEYS[:2]), rig.submit_write(KEYS[2:4])
    rig.store.gate.wait_came()
    rig.store.die()
    rig.store.gate.let()
    assert rig.settle() == [first, second] and first is not None and second is not None
    assert (
        isinstance(first.error, StoreFailed)
        and isinstance(second.error, StoreFailed)
        and not first.done_keys + second.done_keys
    )
    assert rig.store.calls == ["write"] and rig.tier.counts.skipped == {"broken": 2}


def test_blocks_that_fail_one_by_one_fence_it_off_too(make: Make) -> None:
    rig = make()
    rig.store.fails.update(KEYS)
    assert rig.read(KEYS[:7]) == [FAILED] * 7 and rig.tier.usable
    rig.read(KEYS[:1])
    assert (
        not rig.tier.usable
        and rig.tier.counts.failures["block"] == 8
        and rig.tier.calls.breaker.num_openings == 1
    )


def test_a_failure_of_before_does_not_fence_off_a_store_that_is_back(make: Make) -> None:
    rig = make()
    rig.store.gate.hold("read")
    rig.submit_read(KEYS[:1])
    rig.store.gate.wait_came()
    rig.break_store()  # by a question
    rig.clock.advance(1.1)
    rig.store.raises = None
    rig.tier.settle()
    assert rig.asker is not None
    rig.asker.drain(SOON_S)
    assert rig.tier.usable
    rig.store.on_call = lambda call: rig.store.die() if call == "read" else None
    rig.store.gate.let()
    rig.settle()
    assert rig.tier.usable and rig.tier.calls.breaker.num_openings == 1


def test_an_exchange_that_ends_in_anything_is_not_under_way_any_more(make: Make) -> None:
    """Or the tier would be stuck for ever."""
    rig = make(num_readers=1)
    rig.write(KEYS[:2])
    rig.store.raises = InvariantBroken("ours")
    reading, _ = rig.submit_read(KEYS[:2])
    rig.tier.drain(SOON_S)
    with pytest.raises(InvariantBroken):
        [group.take_outcomes() for group in reading]
    rig.store.raises = None
    rig.clock.advance(1000.0)
    assert not rig.tier.calls.stuck and rig.tier.usable and rig.read(KEYS[:2]) == [DONE] * 2


def test_open_questions_are_looked_through_under_the_lock_that_callers_add_theirs_with(make: Make) -> None:
    """Without it one that comes meanwhile would be lost: nobody would know that it is under way."""
    rig = make()
    rig.store.gate.hold("find")
    first = rig.tier.find(KEYS[:1], 1e9)
    engine, locked = threading.current_thread(), []

    class Clock(HandClock):
        def __call__(self) -> float:
            if threading.current_thread() is engine:
                locked.append(rig.tier._asking.locked())
            return super().__call__()

    rig.store.gate.wait_came()
    first._clock = Clock(rig.clock())
    rig.tier.settle()
    assert locked == [True] and len(rig.tier.findings) == 1
    rig.store.gate.let()
    rig.settle()
    assert len(rig.tier.findings) == 0


def test_a_store_is_not_asked_for_somebody_who_has_given_up(make: Make) -> None:
    """Questions queue behind one that takes long: those whose time is over by then would only keep the others
    waiting."""
    rig = make()
    rig.store.gate.hold("find")
    first, second, third = (
        rig.tier.find(KEYS[number : number + 1], patience_s)
        for number, patience_s in enumerate((1e9, 1.0, 1e9))
    )
    rig.store.gate.wait_came()
    rig.clock.advance(2.0)
    rig.store.gate.let()
    rig.settle()
    assert first.ready and second.ready and third.ready and rig.store.calls == ["find", "find"]
