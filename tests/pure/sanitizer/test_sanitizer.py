"""The sanitizer on real lanes: it reports every pair of accesses that nothing orders, and none that something
does. `test_sanitizer_and_schedules.py` compares it with all schedules of random programs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

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


def elsewhere(work: Callable[[], object], name: str = "other") -> None:
    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join(10.0)


# By what was done to slot 1, in turn: "LANE r" reads, "LANE w" writes, "LANE<OTHER" waits for a fence that is
# recorded on the other lane just now. The pair of lanes that races, if any.
# Holds invariant 1: the sanitizer reports where it is broken (a demotion before the producer ended).
# Holds invariant 2: the sanitizer reports where it is broken (a promotion into a slot still in use).
# Holds invariant 3: the sanitizer reports where it is broken (a read before landing).
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


@pytest.mark.parametrize("how", ["polls", "blocks", "another thread blocks"])
def test_a_thread_that_saw_the_fence_pass_orders_what_it_submits_and_touches(scene: Scene, how: str) -> None:
    fence, touched = scene.write("load", 1), [Access("device", (1,), ALL, Mode.READ)]
    if how == "polls":
        while not fence.passed():
            pass
    elif how == "blocks":
        fence.wait_passed(10.0)
    else:
        elsewhere(fence.wait_passed)
    scene.read("compute", 1)
    scene.lanes["compute"].touch(touched, label="read results")
    seconds = [second.partition(" (")[0] for _, second, _ in scene.races]
    assert seconds == (["compute", "thread MainThread"] if how.startswith("another") else [])


@pytest.mark.parametrize(
    ("lane", "looked", "found"),
    [("launch", False, []), ("compute", False, [Kind.RACE]), ("compute", True, [])],
)
def test_what_work_saw_while_it_ran_is_known_behind_it_on_its_lane_and_to_those_who_look_at_it(
    lane: str, looked: bool, found: list[Kind]
) -> None:
    """Another lane waited for the work before that had run, and so before it had seen anything."""
    sanitizer, write = Sanitizer(), Access("device", [0], ALL, Mode.WRITE)
    sanitizer.submitted("load", 1, "load", [write])
    sanitizer.submitted("launch", 1, "looks", [])
    sanitizer.waited("other", "launch", 1)

    def looks() -> None:
        sanitizer.started("launch", 1)
        sanitizer.host_waited("load", 1, 0.0)
        sanitizer.finished("launch", 1, None)

    elsewhere(looks)
    sanitizer.host_waited("other", 1, 0.0)
    if looked:
        sanitizer.host_waited("launch", 1, 0.0)
    sanitizer.submitted(lane, 2, "writes", [write])
    assert [report.kind for report in sanitizer.reports] == found


def test_a_covered_access_is_forgotten_and_an_uncovered_one_is_not(scene: Scene) -> None:
    compute, load = scene.lanes["compute"], scene.lanes["load"]
    scene.read("save", 1)  # nothing ever waits for this one
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


def test_only_holders_touch_a_slot(scene: Scene) -> None:
    sanitizer = scene.sanitizer
    sanitizer.opened("device", 4)
    sanitizer.moved("device", [1, 2], "free", "active", "r1")
    scene.write("compute", 1, 4)  # slot 4 lies behind the pool: the padding block
    assert sanitizer.reports == []
    scene.lanes["compute"].drain(10.0)
    sanitizer.moved("device", [1], "active", "free", "r1")
    sanitizer.moved("device", [2], "active", "idle", "r1")  # it rests in the cache
    scene.read("compute", 1, label="one")
    scene.read("compute", 2, label="two")
    assert [report.kind for report in sanitizer.reports] == [Kind.LIFETIME] * 2
    assert "slot 1 of device, which no handle covers" in sanitizer.reports[0].sentence
    assert sanitizer.reports[0].deeds[0].owners == ("r1",), "the last one that had it"
