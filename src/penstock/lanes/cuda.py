"""The CUDA backend: a lane is a stream, a fence an event, a replay a captured graph. Work is launched on the
caller's thread. Also chooses the backend for a device."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from penstock.contract import Access, Fence
from penstock.errors import DeadlineExceeded, InvariantBroken, LaneClosed
from penstock.lanes.cpu import CpuLane
from penstock.lanes.lane import Capture, Lane, Op, Replay, Ticket, launched_fence, look_again_s
from penstock.lanes.launched import LaunchedLane
from penstock.observe import LaneObserver


def is_usable() -> bool:
    """Whether there is a GPU that lanes can run on."""
    return torch.cuda.is_available()


def num_devices() -> int:
    """GPUs that this process may use."""
    return torch.cuda.device_count() if is_usable() else 0


def wait_set_up(device: torch.device) -> None:
    """Block until the calling thread's setup outside lanes is done: lanes' streams do not wait for the stream
    that it used."""
    torch.cuda.current_stream(device).synchronize()


def describe_gpus() -> list[dict[str, Any]]:
    """Name, memory and capability of each GPU, for reports."""
    gpus = []
    for index in range(torch.cuda.device_count() if is_usable() else 0):
        properties = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        gpus.append(
            {
                "name": properties.name,
                "memory_gib": round(total_bytes / 2**30, 1),
                "free_gib": round(free_bytes / 2**30, 1),
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    return gpus


class CudaFence:
    """An event on one stream."""

    __slots__ = ("_lane", "event", "number")

    def __init__(self, lane: CudaLane, number: int, event: torch.cuda.Event) -> None:
        self._lane = lane
        self.event = event
        self.number = number

    @property
    def lane(self) -> str:
        return self._lane.name

    def passed(self) -> bool:
        passed = bool(self.event.query())
        if passed:
            self._lane.report_wait(self.number, 0.0)
        return passed

    def wait_passed(self, timeout_s: float | None = None) -> None:
        if self.passed():
            return
        started = time.monotonic()
        if timeout_s is None:
            self.event.synchronize()  # blocks in the driver
        else:
            while not self.event.query():
                waited_s = time.monotonic() - started
                if waited_s > timeout_s:
                    raise DeadlineExceeded(
                        f"lane {self._lane.name}: fence {self.number} did not pass within {timeout_s} s"
                    )
                time.sleep(look_again_s(waited_s))
        self._lane.report_wait(self.number, time.monotonic() - started)


class CudaTicket:
    """Launched work. Its end is rarely polled, so the event is recorded on the first poll: later than the
    work, never earlier."""

    __slots__ = ("_error", "_fence", "_lane", "label", "number")

    def __init__(self, lane: CudaLane, number: int, label: str, error: BaseException | None) -> None:
        self._lane = lane
        self._fence: Fence | None = None
        self._error = error
        self.number = number
        self.label = label

    def _end(self) -> Fence:
        if self._fence is None:
            self._fence = self._lane.record()
        return self._fence

    def done(self) -> bool:
        return self._error is not None or self._end().passed()

    def error(self) -> BaseException | None:
        return self._error

    def wait_done(self, timeout_s: float | None = None) -> None:
        if self._error is not None:
            raise self._error
        self._end().wait_passed(timeout_s)


class CudaReplay(Replay):
    """A captured graph. Tensors made during the capture live in the graph's own memory and are kept alive by
    it."""


class CudaLane:
    """One CUDA stream. `priority` below zero is higher than the default. An op that changes its thread's
    stream or mode restores both."""

    def __init__(
        self, name: str, device: torch.device, observer: LaneObserver | None = None, priority: int = 0
    ) -> None:
        self.name = name
        self.stream = torch.cuda.Stream(device=device, priority=priority)
        self._observer = observer
        self._num_submitted = 0
        self._lock = threading.Lock()
        self._closed = False
        self._recording: Capture | None = None
        self._graph_memory: Any = None  # shared by all captures: their replays are ordered by the lane

    def submit(
        self, op: Op, accesses: Sequence[Access] = (), *, label: str, after: Ticket | None = None
    ) -> Ticket:
        error = after.error() if after is not None else None
        recording = self._recording
        if recording is not None:
            return self._record_op(recording, op, label)
        number = self._announce(label, accesses)
        if error is None:
            try:
                if self.is_current():
                    op()
                else:
                    with torch.inference_mode(), torch.cuda.stream(self.stream):
                        op()
            except Exception as raised:
                error = raised
        if self._observer is not None:
            self._observer.finished(self.name, number, error)
        return CudaTicket(self, number, label, error)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Around many submissions of one thread, even for its whole life: switching the stream for each would
        take tens of microseconds."""
        if self.is_current():
            yield
            return
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            yield

    def record(self) -> Fence:
        if self._recording is not None:
            raise InvariantBroken(
                f"lane {self.name}: a fence recorded inside a capture would never be placed"
            )
        event = torch.cuda.Event()
        event.record(self.stream)
        return CudaFence(self, self._num_submitted, event)

    def wait(self, fence: Fence) -> None:
        if (recording := self._recording) is not None:
            recording.check_thread("wait")
            return
        if fence.lane == self.name:
            return  # the stream is ordered
        point = launched_fence(fence)
        if not isinstance(point, CudaFence):
            raise InvariantBroken(f"lane {self.name} cannot wait on the device for a fence of {fence.lane}")
        with self._lock:
            # a wait has a number of its own, so that fences before and after it differ
            self._num_submitted += 1
            if self._observer is not None:
                self._observer.waited(self.name, fence.lane, fence.number)
        self.stream.wait_event(point.event)

    @contextmanager
    def capture(self, label: str) -> Iterator[Capture]:
        if self._recording is not None:
            raise InvariantBroken(
                f"lane {self.name}: capture {label!r} inside capture {self._recording.label!r}"
            )
        if self._graph_memory is None:
            self._graph_memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        recording = self._recording = Capture(self.name, label)
        collects = gc.isenabled()
        # The collector may find a graph or pinned memory, and freeing those is an error while a stream
        # captures.
        gc.disable()
        # Each thread has a handle of cuBLAS, which cannot be made during a capture; ops may run on another.
        with torch.cuda.stream(self.stream):
            torch.cuda.current_blas_handle()
        try:
            # thread_local: other lanes keep allocating and copying on their threads
            with (
                torch.inference_mode(),
                torch.cuda.graph(graph, self._graph_memory, self.stream, capture_error_mode="thread_local"),
            ):
                yield recording
        except torch.AcceleratorError as broken:  # by the op that failed
            raise recording.error or broken from None
        finally:
            self._recording = None
            if collects:
                gc.enable()
        if recording.error is not None:
            raise recording.error
        recording.made = CudaReplay(label, graph.replay)

    def replay(
        self, replay: Replay, accesses: Sequence[Access] = (), *, after: Ticket | None = None
    ) -> Ticket:
        if not isinstance(replay, CudaReplay):
            raise InvariantBroken(
                f"lane {self.name} cannot replay {replay!r}: it was captured on another backend"
            )
        return self.submit(replay.run, accesses, label=replay.label, after=after)

    def touch(self, accesses: Sequence[Access], *, label: str) -> None:
        if self._observer is not None:
            self._observer.touched(label, accesses)

    def is_current(self) -> bool:
        """Whether the calling thread has the stream and mode that ops need."""
        index = self.stream.device_index
        if not torch.is_inference_mode_enabled() or torch.cuda.current_device() != index:
            return False
        return torch._C._cuda_getCurrentRawStream(index) == self.stream.cuda_stream

    def drain(self, timeout_s: float | None = None) -> None:
        self.record().wait_passed(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        with self._lock:
            self._closed = True
        self.drain(timeout_s)

    def report_wait(self, number: int, seconds: float) -> None:
        if self._observer is not None:
            self._observer.host_waited(self.name, number, seconds)

    def _announce(self, label: str, accesses: Sequence[Access]) -> int:
        with self._lock:
            if self._closed:
                raise LaneClosed(f"lane {self.name} is closed; {label!r} was not submitted")
            self._num_submitted += 1
            number = self._num_submitted
            if self._observer is not None:
                self._observer.submitted(self.name, number, label, accesses)
        return number

    def _record_op(self, recording: Capture, op: Op, label: str) -> Ticket:
        recording.check_thread(label)
        if recording.error is None:
            try:
                op()
            except Exception as raised:
                recording.error = raised
        return CudaTicket(self, 0, label, recording.error)


def make_lane(
    name: str, device: torch.device, observer: LaneObserver | None = None, priority: int = 0
) -> Lane:
    """A stream on a GPU, a thread elsewhere."""
    if device.type == "cuda":
        return CudaLane(name, device, observer, priority)
    return CpuLane(name, observer, around=torch.inference_mode)


def as_current(lane: Lane) -> AbstractContextManager[None]:
    """Around a thread's submissions to `lane`, so that it need not switch streams for each op. A lane with
    its own thread needs nothing."""
    if isinstance(lane, LaunchedLane):
        return as_current(lane.inner)
    return lane.current() if isinstance(lane, CudaLane) else nullcontext()


def make_launcher(lane: Lane, observer: LaneObserver | None = None) -> CpuLane:
    """The lane that launches transfers on `lane`; its thread keeps the stream for life."""
    around = lane.current if isinstance(lane, CudaLane) else torch.inference_mode
    return CpuLane(f"launch-{lane.name}", observer, around=around)
