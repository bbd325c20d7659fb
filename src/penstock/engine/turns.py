"""One turn of the engine thread: plan and launch step N+1 while N runs, then read N. Owns the step
that runs."""

from __future__ import annotations

import math
import time

from penstock.contract import StepPlan, Waits
from penstock.engine.cache_calls import Flushes
from penstock.engine.execution.running_step import RunningStep
from penstock.engine.outbox import Outbox
from penstock.engine.pace import Pace
from penstock.engine.parts import EngineParts
from penstock.engine.scheduling.scheduler import News, Planned
from penstock.lanes.lane import POLL_S
from penstock.observe import EngineObserver, StepObserver, all_of


class EngineTurns:
    """Called by the engine thread. Only reading a result blocks, and waiting for grammar masks."""

    def __init__(self, parts: EngineParts, outbox: Outbox, flushes: Flushes, watch: EngineObserver) -> None:
        self._observer: StepObserver | None = all_of(parts.observers.steps)
        self.running: RunningStep | None = None  # launched, not read yet
        self.num_steps = self.num_host_steps = 0
        self.blocked_s = {"result": 0.0, "mask": 0.0, "save": 0.0, "settle": 0.0}
        self._parts, self._outbox, self._flushes, self._watch = parts, outbox, flushes, watch
        self._pace = Pace(parts.scoring)
        # last step that read KV in host memory: its number and launch time
        self._host_step = 0, 0.0
        # monotonic; the earliest time of the next such step while other requests run
        self._reads_host_s = 0.0

    def run(self) -> bool:
        """Returns whether anything was done."""
        settled = self.settle()
        reads = self.running is not None
        with self._watch.part("plan"):
            planned = self._plan()
        launched = None if planned.plan is None else self.launch(planned.plan, planned.waits)
        previous, self.running = self.running, launched
        if previous is not None:
            self.read(previous)
        if launched is not None:
            self.running = self._sample(launched)
        return launched is not None or reads or settled

    def _plan(self) -> Planned:
        """Steps that read KV in host memory get half of the time while other requests run: one takes as long
        as dozens of other steps, and its requests wait for the link."""
        if time.monotonic() < self._reads_host_s:
            planned = self._ask(reads_host=False)
            if planned.plan is not None:
                return planned
        return self._ask(reads_host=True)

    def _ask(self, reads_host: bool) -> Planned:
        scheduler = self._parts.scheduler
        planned = scheduler.plan(reads_host, is_unread=self.running is not None and self.running.samples)
        if planned.reads_first:
            self.read_running()
            planned = scheduler.plan(reads_host)
        self._hear(planned.news)
        return planned

    def _hear(self, news: News) -> None:
        if news.left:
            self._parts.executor.forget(news.left)
        self._outbox.note_moves(news.moves)

    def launch(self, plan: StepPlan, waits: Waits) -> RunningStep:
        with self._watch.part("launch"):
            running = self._parts.executor.launch(plan, waits)
        if plan.reads_host:
            self._reads_host_s, self._host_step = math.inf, (plan.number, time.monotonic())
            self.num_host_steps += 1
        self._pace.launched(plan)
        self._parts.scheduler.launched(running.fence, is_whole=running.late is None)
        self._outbox.note_starts(plan.starts)
        self.num_steps += 1
        if self._observer is not None:
            self._observer.step_launched(plan, time.monotonic())
        return running

    def read_running(self) -> None:
        running, self.running = self.running, None
        if running is not None:
            self.read(running)

    def read(self, step: RunningStep) -> None:
        started = time.monotonic()
        while any(not load.settled for load in step.loads) and not step.fence.passed():
            # settle the step's loads while it computes, not afterwards
            if not self.settle():
                time.sleep(self._parts.cache.look_again_s)
        with self._watch.may_wait("result"):
            result = step.wait_result()
        self.blocked_s["result"] += time.monotonic() - started
        if self._observer is not None:
            self._observer.step_read(result, time.monotonic())
        if step.number == self._host_step[0]:
            # the same time again for other steps
            self._reads_host_s = 2 * time.monotonic() - self._host_step[1]
        if (prefill := self._pace.read()) is not None:
            self._parts.cache.prefill.add(*prefill)
        # the step's loads are over: seal their blocks before later ones
        self.settle()
        # the fence of a load may be a moment late
        while result.error is None and any(not load.settled for load in step.loads):
            time.sleep(POLL_S)
            self.settle()
        with self._watch.part("commit"):
            events, news = self._parts.scheduler.commit(result)
            if (masks := self._parts.executor.masks).answers:
                # their masks can be computed now
                masks.advance(((event.request_id, event.tokens) for event in events), step.drafts())
            self._outbox.publish(events)
        started = time.monotonic()
        with self._watch.part("save"):
            self._parts.cache.submit_saves()
        self.blocked_s["save"] += time.monotonic() - started
        self._hear(news)

    def _sample(self, step: RunningStep) -> RunningStep:
        """Launch its sampling if it waits for masks; they are computed while its forward pass runs."""
        if step.late is None:
            return step
        started = time.monotonic()
        scheduler = self._parts.scheduler
        with self._watch.may_wait("masks"):
            step = self._parts.executor.sample(step)
        # the draft model runs after the sampling, over the same slots
        scheduler.launched(step.fence)
        self.blocked_s["mask"] += time.monotonic() - started
        self._outbox.publish([scheduler.stop(ending.request_id, ending.error) for ending in step.endings])
        return step

    def settle(self) -> bool:
        """Take in transfers that are over; returns whether there were any."""
        started = time.monotonic()
        with self._watch.part("settle"):
            settled = self._parts.cache.settle()
        self.blocked_s["settle"] += time.monotonic() - started
        if self._flushes:
            self._flushes.end()
        return settled
