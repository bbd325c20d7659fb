"""The sanitizer on real lanes: it reports every pair of accesses that nothing orders, and none that something
does."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from penstock.contract import Access, Fence, Mode
from penstock.lanes.cpu import CpuLane
from penstock.sanitizer.report import Kind
from penstock.sanitizer.sanitizer import Sanitizer

ALL = (0, 4)


class Scene:
    """Lanes that one sanitizer watches, and work that does nothing but declare what it would touch."""

    def __init__(self) -> None:
        self.sanitizer = Sanitizer()
        self.lanes = {name: CpuLane(name, self.sanitizer) for name in ("compute", "load", "save")}

    def read(self, lane: str, *slots: int, layers: tuple[int, int] = ALL, label: str = "reader") -> Fence:
        return self._touch(lane, slots, layers, Mode.READ, label)

    def write(self, lane: str, *slots: int, layers: tuple[int, int] = ALL, label: str = "writer") -> Fence:
        return self._touch(lane, slots, layers, Mode.WRITE, label)

    def _touch(
        self, lane: str, slots: tuple[int, ...], layers: tuple[int, int], mode: Mode, label: str
    ) -> Fence:
        self.lanes[lane].submit(lambda: None, [Access("device", slots, layers, mode)], label=label)
        return self.lanes[lane].record()

    @property
    def races(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [
            (r.deeds[0].lane, r.deeds[1].lane, r.slots) for r in self.sanitizer.reports if r.kind is Kind.RACE
        ]


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    for lane in made.lanes.values():
        lane.close(10.0)


def test_what_a_thread_touches_itself_is_in_order_once_it_has_seen_the_work_to_be_over(scene: Scene) -> None:
    fence = scene.write("compute", 1)
    fence.wait_passed(10.0)
    scene.lanes["compute"].touch([Access("device", (1,), ALL, Mode.READ)], label="read results")
    scene.write("compute", 1)
    assert scene.races == []


def test_what_a_thread_touches_itself_under_work_that_it_has_not_seen_to_be_over_is_a_race(
    scene: Scene,
) -> None:
    scene.write("compute", 1)
    scene.lanes["compute"].touch([Access("device", (1,), ALL, Mode.READ)], label="read results")
    [(first, second, slots)] = scene.races
    assert first == "compute" and second.startswith("thread MainThread") and slots == (1,)


def test_two_threads_that_touch_the_same_are_a_race_and_one_is_not(scene: Scene) -> None:
    lane, access = scene.lanes["compute"], [Access("device", (1,), ALL, Mode.WRITE)]
    lane.touch(access, label="refill")
    lane.touch(access, label="refill")
    assert scene.races == []
    other = threading.Thread(target=lane.touch, args=(access,), kwargs={"label": "refill"}, name="other")
    other.start()
    other.join(10.0)
    assert [(first.partition(" (")[0], second.partition(" (")[0]) for first, second, _ in scene.races] == [
        ("thread MainThread", "thread other")
    ]


def test_a_read_that_waits_for_the_write_is_in_order(scene: Scene) -> None:
    fence = scene.write("load", 1, 2)
    scene.lanes["compute"].wait(fence)
    scene.read("compute", 1, 2)
    assert scene.races == []


# Holds invariant 3: the sanitizer reports where it is broken.
def test_a_read_before_landing_is_a_race(scene: Scene) -> None:
    scene.write("load", 1, 2)
    scene.read("compute", 2, 3)
    assert scene.races == [("load", "compute", (2,))]


# Holds invariant 1: the sanitizer reports where it is broken.
def test_a_demotion_before_the_producer_ended_is_a_race(scene: Scene) -> None:
    scene.write("compute", 5)
    scene.read("save", 5)
    assert scene.races == [("compute", "save", (5,))]


# Holds invariant 2: the sanitizer reports where it is broken.
def test_a_promotion_into_a_slot_still_in_use_is_a_race(scene: Scene) -> None:
    scene.read("compute", 5)
    scene.write("load", 5)
    assert scene.races == [("compute", "load", (5,))]


def test_a_slot_reused_during_a_demotion_is_a_race(scene: Scene) -> None:
    produced = scene.write("compute", 5)
    scene.lanes["save"].wait(produced)
    scene.read("save", 5)
    scene.write("compute", 5, label="next owner")
    assert scene.races == [("save", "compute", (5,))]


def test_a_fence_recorded_too_early_does_not_cover_what_comes_after_it(scene: Scene) -> None:
    early = scene.lanes["load"].record()
    scene.write("load", 1)
    scene.lanes["compute"].wait(early)
    scene.read("compute", 1)
    assert scene.races == [("load", "compute", (1,))]


def test_a_wait_on_the_wrong_lane_orders_nothing(scene: Scene) -> None:
    scene.write("load", 1)
    scene.lanes["compute"].wait(scene.lanes["save"].record())
    scene.read("compute", 1)
    assert scene.races == [("load", "compute", (1,))]


def test_a_wait_inside_a_capture_is_no_edge_and_one_before_the_replay_is(scene: Scene) -> None:
    compute = scene.lanes["compute"]
    fence = scene.write("load", 1)
    with compute.capture("step") as capture:
        compute.wait(fence)
        compute.submit(lambda: None, label="layer")
    access = Access("device", (1,), ALL, Mode.READ)
    compute.replay(capture.replay, [access])
    assert scene.races == [("load", "compute", (1,))]
    compute.wait(scene.write("load", 2))
    compute.replay(capture.replay, [access._replace(slots=(2,))])
    assert len(scene.races) == 1


def test_other_layers_of_the_same_slot_are_other_bytes(scene: Scene) -> None:
    landed = scene.write("load", 1, layers=(0, 2))
    scene.write("load", 1, layers=(2, 4))
    scene.lanes["compute"].wait(landed)
    scene.read("compute", 1, layers=(0, 1))
    scene.read("compute", 1, layers=(1, 2))
    assert scene.races == []
    scene.read("compute", 1, layers=(2, 3))
    assert scene.races == [("load", "compute", (1,))]


def test_two_readers_do_not_race(scene: Scene) -> None:
    for lane in ("compute", "load", "save"):
        scene.read(lane, 1)
    assert scene.races == []


def test_order_passes_through_a_third_lane(scene: Scene) -> None:
    scene.lanes["save"].wait(scene.write("load", 1))
    scene.lanes["compute"].wait(scene.lanes["save"].record())
    scene.read("compute", 1)
    assert scene.races == []


def test_a_fence_from_before_a_wait_does_not_carry_it(scene: Scene) -> None:
    landed = scene.write("load", 1)
    before = scene.lanes["save"].record()
    scene.lanes["save"].wait(landed)
    scene.lanes["compute"].wait(before)
    scene.read("compute", 1)
    assert scene.races == [("load", "compute", (1,))]


@pytest.mark.parametrize("poll", [True, False])
def test_a_host_thread_that_saw_the_fence_pass_orders_what_it_submits(scene: Scene, poll: bool) -> None:
    fence = scene.write("load", 1)
    if poll:
        while not fence.passed():
            pass
    else:
        fence.wait_passed(10.0)
    scene.read("compute", 1)
    assert scene.races == []


def test_what_another_thread_saw_does_not_count(scene: Scene) -> None:
    fence = scene.write("load", 1)
    other = threading.Thread(target=fence.wait_passed)
    other.start()
    other.join()
    scene.read("compute", 1)
    assert scene.races == [("load", "compute", (1,))]


def test_a_covered_access_is_forgotten_and_an_uncovered_one_is_not(scene: Scene) -> None:
    compute, load = scene.lanes["compute"], scene.lanes["load"]
    scene.read("save", 1)  # nobody ever waits for this one
    compute.wait(scene.write("load", 2))
    for _ in range(50):
        scene.write("compute", 2)
        load.wait(compute.record())
        scene.read("load", 2)
        compute.wait(load.record())
    assert scene.races == []
    histories = scene.sanitizer._arenas["device"].histories
    assert sum(len(side.each([2])[0].deeds) for side in (histories.writes, histories.reads)) <= 2
    scene.write("compute", 1)
    assert scene.races == [("save", "compute", (1,))]


def test_a_report_names_both_accesses_and_the_missing_edge(scene: Scene) -> None:
    scene.sanitizer.opened("device", 20)
    scene.sanitizer.moved("device", [17], "free", "active", "request 5")
    scene.write("load", 17, label="promote")
    scene.read("compute", 17, layers=(3, 4), label="layer 3")
    (report,) = scene.sanitizer.reports
    text = str(report)
    assert text.count("for request 5, submitted at") == 2
    assert report.slots == (17,)
    assert (
        "read of layer 3 by 'layer 3' on lane compute is not ordered after write of layers 0 to 3 by "
        "'promote' on lane load"
    ) in text
    assert "waits for item 1 of lane load" in text
    assert (
        text.count("test_sanitizer.py") >= 2
        and "test_a_report_names_both_accesses_and_the_missing_edge" in text
    )
    assert report.as_dict()["kind"] == "race"


def test_the_same_pair_is_told_once_and_counted_always(scene: Scene) -> None:
    for slot in range(5):
        scene.write("load", slot, label=f"promote of request {slot}")
        scene.read("compute", slot)
    assert len(scene.races) == 1
    assert scene.sanitizer.num_by_kind[Kind.RACE] == 5


def test_touching_a_slot_that_nobody_holds_is_a_lifetime_error(scene: Scene) -> None:
    scene.sanitizer.opened("device", 4)
    scene.sanitizer.moved("device", [1], "free", "active", "r1")
    scene.write("compute", 1, 4)  # slot 4 lies behind the pool: the padding block
    assert scene.sanitizer.reports == []
    scene.lanes["compute"].drain(10.0)
    scene.sanitizer.moved("device", [1], "active", "free", "r1")
    scene.read("compute", 1)
    (report,) = scene.sanitizer.reports
    assert report.kind is Kind.LIFETIME and "slot 1 of device, which no handle covers" in report.sentence
    assert report.deeds[0].owners == ("r1",), "whoever had it last"


def test_a_block_that_rests_in_the_cache_is_touched_only_by_those_who_hold_it(scene: Scene) -> None:
    sanitizer = scene.sanitizer
    sanitizer.opened("device", 4)
    sanitizer.moved("device", [1], "free", "active", "r1")
    sanitizer.moved("device", [1], "active", "idle", "r1")
    scene.read("compute", 1)
    (report,) = sanitizer.reports
    assert report.kind is Kind.LIFETIME and "which no handle covers" in report.sentence


def test_a_state_that_does_not_follow_from_the_last_is_an_accounting_error() -> None:
    sanitizer = Sanitizer()
    sanitizer.opened("device", 4)
    sanitizer.moved("device", [2], "active", "idle", "r1")
    (report,) = sanitizer.reports
    assert report.kind is Kind.ACCOUNTING and "but it was free" in report.sentence
