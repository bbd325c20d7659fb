"""The runner that prepares a step: one task at a time, values in and out, and every way in which a task can go wrong."""

from __future__ import annotations

import gc
import threading
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.errors import DeadlineExceeded, HandleEnded, InvariantBroken, LaneClosed
from penstock.lanes.cpu import CpuLane
from penstock.speculation.runner import PrepareRunner

LONG_S = 30.0


@pytest.fixture
def lane() -> Iterator[CpuLane]:
    lane = CpuLane("prepare")
    yield lane
    lane.close(LONG_S)


@pytest.fixture
def runner(lane: CpuLane) -> PrepareRunner:
    return PrepareRunner(lane)


def start(runner: PrepareRunner, work: Any, value: Any = None) -> Any:
    task = runner.try_start(work, value, label="prepare")
    assert task is not None
    return task


def fail(value: str) -> None:
    raise KeyError(value)


def test_a_value_goes_in_and_a_result_with_its_fence_comes_out(runner: PrepareRunner) -> None:
    task = start(runner, lambda value: (threading.get_ident(), value + 1), 41)
    made = task.result(LONG_S)
    assert made.value[1] == 42 and made.value[0] != threading.get_ident()
    assert made.fence.passed()


def test_the_fence_is_behind_what_the_task_launched(lane: CpuLane) -> None:
    """The result is there while the device still copies: whoever uses it waits for the fence on its own lane."""
    device, gate = CpuLane("device"), threading.Event()
    runner = PrepareRunner(lane, device.record)
    made = start(runner, lambda value: device.submit(gate.wait, label="upload")).result(LONG_S)
    assert not made.fence.passed()
    gate.set()
    made.fence.wait_passed(LONG_S)
    device.close(LONG_S)


def test_an_exception_surfaces_at_the_result_with_its_traceback_and_the_runner_goes_on(runner: PrepareRunner) -> None:
    with pytest.raises(KeyError) as raised:
        start(runner, fail, "what went wrong").result(LONG_S)
    assert "fail" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert start(runner, lambda value: value, 7).result(LONG_S).value == 7


def test_what_a_failed_task_launched_has_a_fence_too(lane: CpuLane) -> None:
    """Its buffers may not be used again before."""
    device, gate = CpuLane("device"), threading.Event()
    runner = PrepareRunner(lane, device.record)

    def launch_and_fail(value: Any) -> None:
        device.submit(gate.wait, label="upload")
        fail("behind the launch")

    task = start(runner, launch_and_fail)
    with pytest.raises(KeyError):
        task.result(LONG_S)
    assert task.fence is not None and not task.fence.passed()
    gate.set()
    device.close(LONG_S)
    assert task.fence.passed()


def test_a_slow_task_does_not_hold_the_caller_and_can_be_waited_for_again(runner: PrepareRunner) -> None:
    gate = threading.Event()
    task = start(runner, lambda value: gate.wait())
    with pytest.raises(DeadlineExceeded):
        task.result(0.0)
    assert not task.done()
    gate.set()
    assert task.result(LONG_S).value is True


def test_a_deadline_that_the_task_itself_missed_is_its_own_error(runner: PrepareRunner) -> None:
    def missed(value: Any) -> None:
        raise DeadlineExceeded("inside")

    task = start(runner, missed)
    with pytest.raises(DeadlineExceeded, match="inside"):
        task.result(LONG_S)
    assert task.ended


def test_a_result_is_taken_once(runner: PrepareRunner) -> None:
    task = start(runner, lambda value: value)
    task.result(LONG_S)
    with pytest.raises(HandleEnded):
        task.result(LONG_S)


def test_one_task_at_a_time(runner: PrepareRunner) -> None:
    task = start(runner, lambda value: value)
    with pytest.raises(InvariantBroken, match="before prepare was taken"):
        runner.try_start(lambda value: value, None, label="next")
    task.result(LONG_S)


def test_while_a_cancelled_task_runs_the_caller_is_told_to_prepare_itself(runner: PrepareRunner, caplog: pytest.LogCaptureFixture) -> None:
    gate, began = threading.Event(), threading.Event()

    def slow(value: Any) -> None:
        began.set()
        gate.wait()
        fail("nobody hears it")

    task = start(runner, slow)
    assert began.wait(LONG_S)
    task.cancel()
    task.cancel()
    with pytest.raises(HandleEnded):
        task.result(LONG_S)
    assert runner.try_start(lambda value: value, None, label="next") is None
    gate.set()
    runner._lane.drain(LONG_S)
    assert "was cancelled, and failed" in caplog.text
    assert start(runner, lambda value: value, 5).result(LONG_S).value == 5


def test_what_a_cancelled_task_made_is_dropped(runner: PrepareRunner) -> None:
    class Made:
        pass

    gate, kept = threading.Event(), []

    def make(value: Any) -> Made:
        gate.wait()
        made = Made()
        kept.append(weakref.ref(made))
        return made

    task = start(runner, make)
    task.cancel()
    gate.set()
    runner._lane.drain(LONG_S)
    gc.collect()
    assert kept[0]() is None


def test_what_was_handed_over_is_gone_when_the_task_is_over(runner: PrepareRunner) -> None:
    """The caller may count on it: a request's resources are given back only when no worker holds them."""

    class Given:
        pass

    given = Given()
    alive = weakref.ref(given)
    task = start(runner, lambda value: 1, given)
    del given
    task.result(LONG_S)
    assert alive() is None


def test_a_dead_worker_is_an_error_and_no_hang() -> None:
    @contextmanager
    def broken() -> Iterator[None]:
        raise OSError("the device is gone")
        yield

    runner = PrepareRunner(CpuLane("prepare", around=broken))
    for _ in range(2):
        with pytest.raises(OSError, match="the device is gone"):
            start(runner, lambda value: value).result(LONG_S)
    runner.close(LONG_S)


def test_close_while_a_task_runs_is_bounded_and_can_be_repeated(lane: CpuLane) -> None:
    runner, gate, began = PrepareRunner(lane), threading.Event(), threading.Event()
    task = start(runner, lambda value: began.set() or gate.wait())
    assert began.wait(LONG_S)
    with pytest.raises(DeadlineExceeded):
        runner.close(0.0)
    with pytest.raises(HandleEnded):
        task.result(LONG_S)
    gate.set()
    runner.close(LONG_S)
    runner.close(LONG_S)


def test_use_after_close_is_refused(runner: PrepareRunner) -> None:
    runner.close(LONG_S)
    with pytest.raises(LaneClosed):
        runner.try_start(lambda value: value, None, label="late")


def test_a_hundred_tasks_each_give_their_own_result(runner: PrepareRunner) -> None:
    assert [start(runner, lambda value: 2 * value, n).result(LONG_S).value for n in range(100)] == [2 * n for n in range(100)]
