"""What a cold tier counts and measures: rates of wall time, times of what brought something, a report of all
of it."""

from __future__ import annotations

from penstock.figures import Traffic
from penstock.kv.tiers.calls import Meter
from penstock.kv.tiers.policy import LinkRate
from tests.pure.kv.cold_rig import BLOCK_BYTES, KEYS, Make, make

__all__ = ["make"]


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
