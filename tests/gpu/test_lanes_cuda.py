"""The CUDA lane keeps the same rules as the CPU lane, and some that only streams and graphs have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="NOT TESTED: the CUDA lane needs torch")
if not torch.cuda.is_available():
    pytest.skip(
        "NOT TESTED: the CUDA lane needs an NVIDIA GPU, and there is none here", allow_module_level=True
    )

from tests.pure.lanes.lane_rules import Heard, LaneRules, fail  # noqa: E402

from penstock.errors import InvariantBroken  # noqa: E402
from penstock.lanes.cpu import CpuLane  # noqa: E402
from penstock.lanes.cuda import CudaLane, as_current, make_lane  # noqa: E402
from penstock.lanes.lane import Lane, Op  # noqa: E402
from penstock.observe import LaneObserver  # noqa: E402

pytestmark = pytest.mark.gpu

HOLD_CYCLES = 500_000_000  # about a quarter of a second: far longer than what a test does meanwhile
DEVICE = torch.device("cuda")


class CudaRig:
    """Cells are device numbers; a lane is held by a kernel that spins. Nothing can release it early, so
    releasing is waiting."""

    def __init__(self, make: type[CudaLane] = CudaLane) -> None:
        self.patience_s = 20.0
        self._make = make
        self._lanes: list[CudaLane] = []

    def lane(self, name: str, observer: LaneObserver | None = None) -> CudaLane:
        self._lanes.append(self._make(name, DEVICE, observer))
        return self._lanes[-1]

    def cell(self) -> Any:
        cell = torch.zeros((), dtype=torch.int64, device=DEVICE)
        torch.cuda.synchronize()
        return cell

    def write(self, cell: Any, value: int) -> Op:
        return lambda: cell.fill_(value)

    def push(self, cell: Any, digit: int) -> Op:
        return lambda: cell.mul_(10).add_(digit)

    def copy(self, source: Any, target: Any) -> Op:
        return lambda: target.copy_(source)

    def read(self, cell: Any) -> int:
        return int(cell.item())

    def hold(self, lane: Lane) -> Callable[[], None]:
        lane.submit(lambda: torch.cuda._sleep(HOLD_CYCLES), label="hold")
        return lambda: None

    def close(self) -> None:
        torch.cuda.synchronize()
        for lane in self._lanes:
            lane.close(self.patience_s)


@pytest.fixture(scope="module", autouse=True)
def _kernels_are_loaded() -> None:
    """A kernel's first launch loads its code, which a capture does not like."""
    rig = CudaRig()
    lane, cell, other = rig.lane("warm"), rig.cell(), rig.cell()
    for op in (rig.write(cell, 1), rig.push(cell, 1), rig.copy(cell, other), lambda: torch.cuda._sleep(1000)):
        lane.submit(op, label="warm")
    rig.close()


@pytest.fixture
def rig() -> Iterator[CudaRig]:
    made = CudaRig()
    yield made
    made.close()


class TestCudaLane(LaneRules):
    def test_captures_of_one_lane_keep_their_results_apart_in_shared_memory(self, rig: CudaRig) -> None:
        lane, sources = rig.lane("a"), [rig.cell(), rig.cell()]
        results: list[Any] = []
        replays = []
        for source in sources:
            with lane.capture("double") as capture:
                lane.submit(lambda source=source: results.append(source * 2), label="double")  # type: ignore[misc]
            replays.append(capture.replay)
        for value, source, replay, result in zip((3, 4), sources, replays, results, strict=True):
            lane.submit(rig.write(source, value), label="write")
            lane.replay(replay).wait_done(rig.patience_s)
            assert rig.read(result) == 2 * value

    def test_an_op_that_fails_inside_a_capture_fails_the_capture(self, rig: CudaRig) -> None:
        lane, cell = rig.lane("a"), rig.cell()
        captures: list[Any] = []

        def capture_what_fails() -> None:
            with lane.capture("broken") as capture:
                captures.append(capture)
                lane.submit(rig.push(cell, 1), label="push")
                lane.submit(fail, label="fail")
                lane.submit(rig.push(cell, 2), label="push")

        with pytest.raises(ZeroDivisionError):
            capture_what_fails()
        with pytest.raises(InvariantBroken, match="broken"):
            _ = captures[0].replay
        lane.submit(rig.push(cell, 3), label="push").wait_done(rig.patience_s)
        assert rig.read(cell) == 3

    def test_another_lane_can_be_given_work_while_one_captures(self, rig: CudaRig) -> None:
        capturing, other, first, second = rig.lane("a"), rig.lane("b"), rig.cell(), rig.cell()
        with capturing.capture("push") as capture:
            capturing.submit(rig.push(first, 1), label="push")
            ticket = other.submit(rig.push(second, 2), label="push")
        ticket.wait_done(rig.patience_s)
        assert (rig.read(first), rig.read(second)) == (0, 2)
        capturing.replay(capture.replay).wait_done(rig.patience_s)
        assert (rig.read(first), rig.read(second)) == (1, 2)

    def test_submitting_leaves_the_callers_stream_and_mode_alone(self, rig: CudaRig) -> None:
        lane = rig.lane("a")
        seen: list[Any] = []
        before = torch.cuda.current_stream()
        lane.submit(
            lambda: seen.extend((torch.cuda.current_stream(), torch.is_inference_mode_enabled())),
            label="look",
        )
        assert seen == [lane.stream, True] and lane.stream != before
        assert torch.cuda.current_stream() == before and not torch.is_inference_mode_enabled()

    def test_a_thread_that_stays_on_a_lane_runs_its_ops_there_and_those_of_other_lanes_on_theirs(
        self, rig: CudaRig
    ) -> None:
        lane, other = rig.lane("a"), rig.lane("b")
        seen: list[Any] = []

        def look() -> None:
            seen.append((torch.cuda.current_stream(), torch.is_inference_mode_enabled()))

        before = torch.cuda.current_stream()
        with lane.current():
            for where in (lane, other, lane):
                where.submit(look, label="look")
            look()
        look()
        assert seen == [
            (lane.stream, True),
            (other.stream, True),
            (lane.stream, True),
            (lane.stream, True),
            (before, False),
        ]

    def test_an_op_that_leaves_another_stream_behind_misleads_no_op_after_it(self, rig: CudaRig) -> None:
        lane, elsewhere = rig.lane("a"), rig.lane("b")
        seen: list[Any] = []
        with lane.current():
            lane.submit(lambda: torch.cuda.set_stream(elsewhere.stream), label="stray")
            lane.submit(lambda: seen.append(torch.cuda.current_stream()), label="look")
        assert seen == [lane.stream]

    def test_a_launchers_thread_that_stays_on_a_lane_submits_captures_and_fails_as_any_other(
        self, rig: CudaRig
    ) -> None:
        lane, cell = rig.lane("a"), rig.cell()
        launcher = CpuLane("launcher", around=lane.current)
        replays: list[Any] = []

        def capture() -> None:
            with lane.capture("push") as recording:
                lane.submit(rig.push(cell, 2), label="push")
            replays.append(recording.replay)

        launcher.submit(lambda: lane.submit(rig.push(cell, 1), label="push"), label="launch")
        launcher.submit(capture, label="capture").wait_done(rig.patience_s)
        failed = launcher.submit(lambda: replays.append(lane.submit(fail, label="fail")), label="launch")
        launcher.submit(lambda: lane.replay(replays[0]), label="replay")
        launcher.close(rig.patience_s)
        lane.drain(rig.patience_s)
        assert (
            rig.read(cell) == 12
            and failed.error() is None
            and isinstance(replays[1].error(), ZeroDivisionError)
        )

    def test_a_host_thread_that_blocked_is_reported(self, rig: CudaRig) -> None:
        heard = Heard()
        lane = rig.lane("a", heard)
        for wait in (lambda f: f.wait_passed(), lambda f: f.wait_passed(rig.patience_s)):
            rig.hold(lane)
            fence: Any = lane.record()
            wait(fence)
            assert heard.of("host_waited")[-1] == ("host_waited", "a", fence.number)
            wait(fence)
        assert len(heard.of("host_waited")) == 4, "whoever finds it passed knows as much as whoever blocked"

    def test_the_device_cannot_wait_for_a_thread_but_a_thread_can_wait_for_the_device(
        self, rig: CudaRig
    ) -> None:
        thread, device, cell = CpuLane("thread"), rig.lane("device"), rig.cell()
        with pytest.raises(InvariantBroken, match="thread"):
            device.wait(thread.record())
        seen: list[bool] = []
        rig.hold(device)
        device.submit(rig.write(cell, 7), label="write")
        fence = device.record()
        thread.wait(fence)
        thread.submit(lambda: seen.append(fence.passed()), label="look").wait_done(rig.patience_s)
        thread.close(rig.patience_s)
        assert seen == [True] and rig.read(cell) == 7


def test_a_thread_that_is_on_a_lane_already_stays_there() -> None:
    """As the engine's does: it enters once, and every step enters again."""
    lane = CudaLane("mine", DEVICE)
    before = torch.cuda.current_stream()
    with as_current(lane):
        with as_current(lane):
            assert lane.is_current()
        assert lane.is_current()
    assert (
        not lane.is_current()
        and torch.cuda.current_stream() == before
        and not torch.is_inference_mode_enabled()
    )


def test_lanes_with_threads_of_their_own_need_no_switch() -> None:
    lane = make_lane("cpu", torch.device("cpu"))
    with as_current(lane):
        assert not lane.is_current(), "its ops run elsewhere"
    lane.close()
