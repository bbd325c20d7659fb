"""What an engine's observers see, as events of a trace: a track for the engine thread and one for each lane;
requests, steps and transfers as slices that may overlap. Owns what is needed to pair a begin with its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from penstock.contract import Access, KvSource, Request, StepPlan, StepResult, Totals
from penstock.observe import Observers
from penstock.trace.file import TraceEvent, TraceFile

ENGINE = "engine"
_IDLE_TURN_S = 1e-4  # a shorter turn without a step is not written,
_SHORT_PART_S = 1e-5  # nor is a shorter part of one
_SHORT_WAIT_S = 2e-5  # nor is a lane's wait
_INSIDE_S = 1e-6


def observers_of(file: TraceFile, block_bytes: int) -> Observers:
    steps = StepTrack(file)
    return Observers(
        requests=(RequestTracks(file),),
        steps=(steps,),
        lanes=(LaneTracks(file),),
        transfers=(TransferTracks(file, block_bytes),),
        turns=(TurnTrack(file, steps),),
    )


def _slice(name: str, track: str, start_s: float, end_s: float, args: Mapping[str, Any]) -> TraceEvent:
    more: dict[str, Any] = {"dur": round((end_s - start_s) * 1e6, 3)}
    return TraceEvent("X", name, track, start_s, more | {"args": args} if args else more)


def _part(
    kind: str, name: str, ident: tuple[str, str], at_s: float, args: Mapping[str, Any] | None = None
) -> TraceEvent:
    """Of a slice that may overlap others. `ident`: its category, and its id there."""
    more: dict[str, Any] = {"cat": ident[0], "id": ident[1]}
    return TraceEvent(kind, name, ENGINE, at_s, more | {"args": args} if args else more)


# ------------------------------------------------------------------------------- requests, steps, transfers


class RequestTracks:
    """Implements `RequestObserver`: a slice per request, with its states inside."""

    def __init__(self, file: TraceFile) -> None:
        self._put = file.put
        self._states: dict[str, str] = {}  # of open requests

    def request_arrived(self, request: Request, matched_s: float) -> None:
        ident, at_s = ("request", request.id), request.arrival_s
        args = {"id": request.id, "prompt tokens": len(request.prompt)}
        self._states[request.id] = "waiting"
        self._put(
            _part("b", "request", ident, at_s, args),
            _part("b", "look-up", ident, at_s),
            _part("e", "look-up", ident, at_s + matched_s),
            _part("b", "waiting", ident, at_s + matched_s),
        )

    def request_moved(self, request_id: str, state: str, at_s: float) -> None:
        ident, before = ("request", request_id), self._states[request_id]
        self._states[request_id] = state
        self._put(_part("e", before, ident, at_s), _part("b", state, ident, at_s))

    def request_answered(self, request_id: str, source: KvSource, loaded_s: float, at_s: float) -> None:
        tokens = {tier: num for tier in source.__slots__ if (num := getattr(source, tier))}
        args = {"prompt tokens from": tokens, "load ms": round(loaded_s * 1e3, 3)}
        self._put(_part("n", "first token", ("request", request_id), at_s, args))

    def request_ended(self, request_id: str, finish: str, totals: Totals, at_s: float) -> None:
        ident = ("request", request_id)
        args = {"finish": finish, "tokens": totals.written}
        if totals.drafted:
            args |= {"drafts": totals.drafted, "drafts kept": totals.accepted}
        self._put(
            _part("e", self._states.pop(request_id), ident, at_s), _part("e", "request", ident, at_s, args)
        )


class StepTrack:
    """Implements `StepObserver`: a slice per step, from its launch until its result is read, and a mark in
    each request whose prompt it computes."""

    def __init__(self, file: TraceFile) -> None:
        self._put = file.put
        self.num_seen = 0  # launches and reads

    def step_launched(self, plan: StepPlan, at_s: float) -> None:
        self.num_seen += 1
        prompts = {chunk.request_id: chunk.num_tokens for chunk in plan.chunks[plan.num_decodes :]}
        num_drafts = sum(max(0, chunk.num_logits - 1) for chunk in plan.chunks[: plan.num_decodes])
        args = {"step": plan.number, "decodes": plan.num_decodes, "drafts": num_drafts, "prompts": prompts}
        self._put(
            _part("b", "step", ("step", str(plan.number)), at_s, args),
            *(
                _part("n", "prompt chunk", ("request", name), at_s, {"tokens": num, "step": plan.number})
                for name, num in prompts.items()
            ),
        )

    def step_read(self, result: StepResult, at_s: float) -> None:
        self.num_seen += 1
        args = None if result.error is None else {"error": str(result.error)}
        self._put(_part("e", "step", ("step", str(result.number)), at_s, args))


class TransferTracks:
    """Implements `TransferObserver`: a slice per transfer, from its submission until its end was seen."""

    def __init__(self, file: TraceFile, block_bytes: int) -> None:
        self._put = file.put
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._num = 0
        self._open: dict[object, tuple[str, str]] = {}  # number and name

    def transfer_submitted(self, transfer: object, ends: tuple[str, str], label: str) -> None:
        with self._lock:
            self._num += 1
            ident, name = str(self._num), f"{ends[0]} to {ends[1]}"
            self._open[transfer] = ident, name
        args = {"src": ends[0], "dst": ends[1], "label": label}
        self._put(_part("b", name, ("transfer", ident), time.monotonic(), args))

    def transfer_over(self, transfer: object, num_blocks: int, error: BaseException | None) -> None:
        with self._lock:
            ident, name = self._open.pop(transfer)
        args: dict[str, Any] = {"blocks": num_blocks, "bytes": num_blocks * self._block_bytes}
        if error is not None:
            args["error"] = type(error).__name__
        self._put(_part("e", name, ("transfer", ident), time.monotonic(), args))


# ------------------------------------------------------------------------------------------- engine thread


class TurnTrack:
    """Implements `EngineObserver`: turns, and their parts and waits inside."""

    def __init__(self, file: TraceFile, steps: StepTrack) -> None:
        self._put = file.put
        self._steps = steps
        self._parts: list[TraceEvent] = []  # of the current turn
        self._num_seen = 0

    def turn(self) -> AbstractContextManager[None]:
        return _Span(self, "turn")

    def may_wait(self, where: str) -> AbstractContextManager[None]:
        return _Span(self, f"wait for {where}")

    def part(self, name: str) -> AbstractContextManager[None]:
        return _Span(self, name)

    def balanced(self, pool: str, counts: Mapping[str, int]) -> None:
        """Not shown."""

    def ended(self, name: str, start_s: float, end_s: float) -> None:
        """The polls of a thread that waits for transfers are left out."""
        if name != "turn":
            if end_s - start_s >= _SHORT_PART_S:
                self._parts.append(_slice(name, ENGINE, start_s, end_s, {}))
            return
        self._parts.append(_slice(name, ENGINE, start_s, end_s, {}))
        parts, self._parts = self._parts, []
        num_seen, self._num_seen = self._num_seen, self._steps.num_seen
        if num_seen != self._num_seen or end_s - start_s >= _IDLE_TURN_S:
            self._put(*parts)


class _Span:
    """A context that is entered once."""

    __slots__ = ("_name", "_start_s", "_track")

    def __init__(self, track: TurnTrack, name: str) -> None:
        self._track = track
        self._name = name

    def __enter__(self) -> None:
        self._start_s = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._track.ended(self._name, self._start_s, time.monotonic())


# --------------------------------------------------------------------------------------------------- lanes


@dataclass(slots=True)
class _Op:
    label: str
    start_s: float  # of its submission, until it starts
    waits: list[_Wait]  # of its lane, between the op before and this one
    awaited: list[_Wait] = field(default_factory=list)  # of other lanes, for this one
    has_started: bool = False  # never on a CUDA lane


@dataclass(slots=True)
class _Wait:
    of: str  # lane and label of the op that is waited for
    lane: str
    since_s: float
    over_s: float = 0.0
    from_s: float = 0.0  # inside the slice of that op


@dataclass(slots=True)
class _Lane:
    ops: dict[int, _Op] = field(default_factory=dict)  # submitted and not finished, in order
    waits: list[_Wait] = field(default_factory=list)  # since the last op was submitted
    free_s: float = 0.0  # end of its last op


class LaneTracks:
    """Implements `LaneObserver`: the ops of each lane, what it waited for between them, and an arrow to the
    op after that wait. A CUDA lane reports the end of a launch and no start: its ops show when they were
    launched, and its waits are not known."""

    def __init__(self, file: TraceFile) -> None:
        self._put = file.put
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}
        self._num_arrows = 0

    def submitted(self, lane: str, ticket: int, label: str, accesses: Sequence[Access]) -> None:
        with self._lock:
            mine = self._lanes.setdefault(lane, _Lane())
            mine.ops[ticket] = _Op(label, time.monotonic(), mine.waits)
            mine.waits = []

    def waited(self, lane: str, on_lane: str, fence: int) -> None:
        """Only if something that the fence covers is not over: else it is no wait."""
        with self._lock:
            others = self._lanes.setdefault(on_lane, _Lane()).ops
            number = next((number for number in reversed(others) if number <= fence), None)
            if number is not None:
                op = others[number]
                wait = _Wait(f"{on_lane}: {op.label}", on_lane, time.monotonic())
                op.awaited.append(wait)
                self._lanes.setdefault(lane, _Lane()).waits.append(wait)

    def host_waited(self, on_lane: str, fence: int, seconds: float) -> None:
        """Shown by the engine's turns."""

    def touched(self, label: str, accesses: Sequence[Access]) -> None:
        """Not shown."""

    def started(self, lane: str, ticket: int) -> None:
        with self._lock:
            op = self._lanes[lane].ops[ticket]
            op.start_s, op.has_started = time.monotonic(), True

    def finished(self, lane: str, ticket: int, error: BaseException | None) -> None:
        now_s = time.monotonic()
        with self._lock:
            mine = self._lanes[lane]
            op = mine.ops.pop(ticket)
            free_s, mine.free_s = mine.free_s, now_s
            for wait in op.awaited:
                wait.over_s, wait.from_s = now_s, max(op.start_s, now_s - _INSIDE_S)
            args = {} if error is None else {"error": type(error).__name__}
            events = [_slice(op.label, lane, op.start_s, now_s, args)]
            for wait in op.waits if op.has_started else ():
                if wait.over_s and wait.over_s <= op.start_s:
                    events += self._shown(lane, wait, max(free_s, wait.since_s), op.start_s)
                    free_s = max(free_s, wait.over_s)
        self._put(*events)

    def _shown(self, lane: str, wait: _Wait, start_s: float, end_s: float) -> list[TraceEvent]:
        """The lane's wait until the other op was over, and the arrow from there to its next op."""
        self._num_arrows += 1
        more = {"cat": "wait", "id": self._num_arrows}
        arrow = [
            TraceEvent("s", "wait", wait.lane, wait.from_s, more),
            TraceEvent("f", "wait", lane, end_s, {**more, "bp": "e"}),
        ]
        if wait.over_s - start_s < _SHORT_WAIT_S:
            return arrow
        return [_slice(f"wait for {wait.of}", lane, start_s, wait.over_s, {}), *arrow]
