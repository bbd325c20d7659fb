"""Tiers under another engine: what is asked, read and written, in which order, and what happens when a store
is slow, broken, full or wrong."""

from __future__ import annotations

import pytest

from penstock.errors import DeadlineExceeded, InvariantBroken
from penstock.testing.stores import MemoryStore
from tests.pure.plugins.hosted_rig import BLOCK_BYTES, KEYS, SOON_S, LocalStore, Make, make

__all__ = ["make"]

HIT, MISS, PENDING = True, False, None


# -------------------------------------------------------------------------------------------------- questions


def test_a_disk_answers_at_once(make: Make) -> None:
    rig = make(LocalStore())
    rig.write(KEYS[:2])
    assert [rig.matches.find(key, "request", None) for key in KEYS[:3]] == [HIT, HIT, MISS]


def test_a_shared_store_is_asked_once_for_a_chain_of_keys(make: Make) -> None:
    other, rig = make(store := MemoryStore()), None
    other.write(KEYS[:3])
    rig = make(MemoryStore(blocks=store.blocks))  # it does not know what the other one wrote
    assert rig.find(KEYS[:5], chain="prompt") == [HIT, HIT, HIT, MISS, MISS]
    assert rig.stores[0].calls.count("find") == 1


def test_keys_that_are_no_chain_are_answered_each_for_itself(make: Make) -> None:
    other = make(store := MemoryStore())
    other.write([KEYS[1], KEYS[3]])
    rig = make(MemoryStore(blocks=store.blocks))
    assert rig.find(KEYS[:4]) == [MISS, HIT, MISS, HIT]


def test_a_question_to_a_slow_store_does_not_block(make: Make) -> None:
    rig = make(store := MemoryStore())
    store.gate.hold("find")
    assert rig.matches.find(KEYS[0], "request") is PENDING
    rig.matches.ask()
    store.gate.wait_came()
    assert rig.matches.find(KEYS[0], "request") is PENDING  # while the store is asked
    store.gate.let()
    assert rig.find(KEYS[:1]) == [MISS]


def test_a_store_that_does_not_answer_in_time_has_nothing(make: Make) -> None:
    """Holds invariant 22: a wait has a deadline."""
    rig = make(store := MemoryStore(), patience_s=0.01, stuck_s=1e9)
    store.gate.hold("find")
    assert rig.find(KEYS[:2], chain="prompt") == [MISS, MISS]


def test_an_answer_stays_until_the_request_is_released(make: Make) -> None:
    """Otherwise a request whose answers come one after the other would ask for ever."""
    other = make(store := MemoryStore())
    rig = make(MemoryStore(blocks=store.blocks))
    assert rig.find(KEYS[:1]) == [MISS]
    other.write(KEYS[:1])
    assert rig.find(KEYS[:1]) == [MISS]
    rig.matches.release("request")
    assert rig.find(KEYS[:1]) == [HIT]


def test_what_this_process_wrote_is_not_asked_for(make: Make) -> None:
    rig = make(store := MemoryStore())
    rig.write(KEYS[:2])
    assert [rig.matches.find(key, "request") for key in KEYS[:2]] == [HIT, HIT]
    assert "find" not in store.calls


def test_questions_of_a_released_request_are_not_sent(make: Make) -> None:
    rig = make(store := MemoryStore())
    assert rig.matches.find(KEYS[0], "request") is PENDING
    rig.matches.release("request")
    rig.matches.ask()
    rig.tiers.drain(SOON_S)
    assert "find" not in store.calls


def test_a_broken_store_is_a_miss_without_being_asked(make: Make) -> None:
    rig = make(store := MemoryStore())
    store.die()
    assert rig.find(KEYS[:1], "first") == [MISS]
    assert rig.matches.find(KEYS[0], "second") is MISS
    assert store.calls.count("find") == 1


def test_a_broken_disk_has_nothing_from_the_next_step_on(make: Make) -> None:
    rig = make(disk := LocalStore())
    rig.write(KEYS[:1])
    disk.die()
    assert rig.read(KEYS[:1]) == [False]
    assert rig.find(KEYS[:1]) == [MISS]


def test_leading_keys_are_counted_over_both_tiers(make: Make) -> None:
    disk, far = LocalStore(), MemoryStore()
    writer = make(far)
    writer.write(KEYS[2:4])
    rig = make(disk, MemoryStore(blocks=far.blocks))
    make(disk).write([*KEYS[:2], KEYS[4]])
    assert rig.tiers.wait_leading(KEYS[:8], SOON_S) == 5


# ---------------------------------------------------------------------------------------------------- reading


def test_blocks_come_back_as_they_were_written(make: Make) -> None:
    rig = make(LocalStore(), MemoryStore())
    assert rig.write(KEYS[:5]).whole
    assert rig.read(KEYS[:6]) == [True] * 5 + [False]


def test_what_the_disk_lacks_comes_from_the_store(make: Make) -> None:
    disk, far = LocalStore(), MemoryStore()
    rig = make(disk, far)
    rig.write(KEYS[:4])
    disk.lose(KEYS[1])
    assert rig.read(KEYS[:4]) == [True] * 4
    assert far.calls.count("read") == 1


def test_what_is_damaged_on_the_disk_comes_from_the_store(make: Make) -> None:
    """Holds invariant 23: damaged bytes are not served."""
    disk, far = LocalStore(), MemoryStore()
    rig = make(disk, far)
    rig.write(KEYS[:3])
    disk.spoil(KEYS[2])
    assert rig.read(KEYS[:3]) == [True] * 3
    assert rig.tiers.traffic().checksum_failures["ssd"] == 1


def test_a_damaged_block_without_another_copy_is_missing_and_the_others_are_not(make: Make) -> None:
    rig = make(far := MemoryStore())
    rig.write(KEYS[:4])
    far.spoil(KEYS[1])
    assert rig.read(KEYS[:4]) == [True, False, True, True]


def test_a_request_does_not_find_again_what_could_not_be_read(make: Make) -> None:
    """Otherwise it would find and read the same bad block for ever."""
    disk = LocalStore()
    rig = make(disk)
    rig.write(KEYS[:2])
    disk.fails.add(KEYS[0])
    assert rig.read(KEYS[:2]) == [False, True]
    rig.matches.give_up("request", KEYS[:1])
    assert rig.find(KEYS[:2], "request") == [MISS, HIT]
    assert rig.find(KEYS[:2], "another") == [HIT, HIT]


def test_a_job_is_not_finished_while_the_store_may_touch_its_slots(make: Make) -> None:
    """Holds invariant 7: a deadline ends a wait, not the use of a slot."""
    rig = make(far := MemoryStore())
    rig.write(KEYS[:1])
    far.gate.hold("read")
    job, _ = rig.submit_read(KEYS[:1])
    far.gate.wait_came()
    assert rig.tiers.settle() == []
    with pytest.raises(DeadlineExceeded):
        rig.tiers.wait_finished(job, 0.01)
    far.gate.let()
    assert rig.tiers.wait_finished(job, SOON_S).whole


def test_a_job_in_flight_cannot_be_submitted_again(make: Make) -> None:
    rig = make(far := MemoryStore())
    far.gate.hold("read")
    job, slots = rig.submit_read(KEYS[:1])
    with pytest.raises(InvariantBroken, match="submitted again"):
        rig.tiers.read(job, KEYS[:1], slots)
    far.gate.let()


def test_a_job_without_a_usable_tier_is_finished_at_once(make: Make) -> None:
    rig = make(far := MemoryStore())
    far.die()
    rig.find(KEYS[:1])
    rig.submit_write(KEYS[:1])
    rig.submit_read(KEYS[:1])
    assert [finished.done for finished in rig.tiers.settle()] == [(False,), (False,)]


# ---------------------------------------------------------------------------------------------------- writing


def test_a_block_is_written_to_each_tier(make: Make) -> None:
    rig = make(disk := LocalStore(), far := MemoryStore())
    rig.write(KEYS[:3])
    assert set(disk.blocks) == set(far.blocks) == set(KEYS[:3])


def test_a_write_is_done_where_one_tier_has_it(make: Make) -> None:
    rig = make(disk := LocalStore(), far := MemoryStore())
    disk.fails.add(KEYS[0])
    far.fails.update(KEYS[:2])
    assert rig.write(KEYS[:3]).done == (False, True, True)


def test_a_full_queue_skips_and_counts_blocks(make: Make) -> None:
    """Holds invariant 24: nothing waits for room."""
    rig = make(far := MemoryStore(), queue_bytes=4 * BLOCK_BYTES)
    far.gate.hold("write")
    first = rig.submit_write(KEYS[:3])
    second = rig.submit_write(KEYS[3:6])
    third = rig.submit_write(KEYS[6:8])
    assert [finished.job for finished in rig.tiers.settle()] == [third]
    assert rig.tiers.traffic().skipped["queue"] == 4
    far.gate.let()
    assert rig.tiers.wait_finished(first, SOON_S).whole
    assert rig.tiers.wait_finished(second, SOON_S).done == (True, False, False)


def test_a_full_store_is_counted_and_the_job_ends(make: Make) -> None:
    rig = make(far := MemoryStore())
    far.max_blocks = 2
    assert sum(rig.write(KEYS[:4]).done) == 2
    assert rig.tiers.traffic().skipped["full"] == 2


def test_what_was_written_to_a_disk_is_made_durable_after_a_while(make: Make) -> None:
    rig = make(disk := LocalStore(), far := MemoryStore(), persist_s=0.0)
    rig.write(KEYS[:2])
    rig.tiers.settle()
    rig.tiers.drain(SOON_S)
    assert disk.calls.count("persist") == 1
    assert "persist" not in far.calls
    rig.tiers.settle()
    rig.tiers.drain(SOON_S)
    assert disk.calls.count("persist") == 1  # nothing was written since


# -------------------------------------------------------------------------------------------------------- end


def test_a_reset_forgets_blocks(make: Make) -> None:
    rig = make(disk := LocalStore(), far := MemoryStore())
    rig.write(KEYS[:2])
    rig.tiers.reset("reset")
    assert rig.tiers.wait_finished("reset", SOON_S).whole
    assert rig.find(KEYS[:2]) == [MISS, MISS]
    assert not disk.blocks
    assert not far.blocks


def test_a_reset_that_fails_says_so(make: Make) -> None:
    rig = make(LocalStore(), far := MemoryStore())
    far.die()
    rig.tiers.reset("reset")
    assert not rig.tiers.wait_finished("reset", SOON_S).whole


def test_a_drain_waits_for_submitted_jobs_and_leaves_them_to_settle(make: Make) -> None:
    """Holds invariant 10: a drain covers what is submitted."""
    rig = make(LocalStore(), far := MemoryStore())
    far.gate.hold("write")
    job = rig.submit_write(KEYS[:4])
    with pytest.raises(DeadlineExceeded):
        rig.tiers.drain(0.01)
    assert rig.tiers.settle() == []
    far.gate.let()
    rig.tiers.drain(SOON_S)
    assert [finished.job for finished in rig.tiers.settle()] == [job]


def test_a_drain_covers_reads_that_go_on_at_the_next_tier(make: Make) -> None:
    disk, far = LocalStore(), MemoryStore()
    rig = make(disk, far)
    rig.write(KEYS[:2])
    disk.spoil(KEYS[0])
    job, _ = rig.submit_read(KEYS[:2])
    rig.tiers.drain(SOON_S)
    assert [(finished.job, finished.done) for finished in rig.tiers.settle()] == [(job, (True, True))]


def test_a_close_that_is_late_can_be_repeated_and_ends_every_job(make: Make) -> None:
    rig = make(far := MemoryStore())
    far.gate.hold("write")
    job = rig.submit_write(KEYS[:1])
    far.gate.wait_came()
    with pytest.raises(DeadlineExceeded):
        rig.tiers.close(0.01)
    assert rig.tiers.num_jobs == 1  # its slots are still in use
    far.gate.let()
    rig.tiers.close(SOON_S)
    assert far.closed
    assert [finished.job for finished in rig.tiers.settle()] == [job]


def test_nothing_is_taken_after_close_and_nothing_hangs(make: Make) -> None:
    rig = make(LocalStore(), MemoryStore())
    rig.tiers.close(SOON_S)
    assert not rig.write(KEYS[:1]).whole
    assert rig.read(KEYS[:1]) == [False]
    assert rig.find(KEYS[:1]) == [MISS]
