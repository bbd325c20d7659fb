"""Plans and results of a run in a file, and the run once more from it. Owns the form of the file; decides nothing about a step.

The file is JSON lines, UTF-8. The first line is the head, then comes one line per plan, when its step is launched, and one per result:

    {"recording": 1, "sizes": {"block_tokens": 16, ...}}
    {"plan": {"type": "StepPlan", "number": 1, ...}, "promoted": 0}
    {"result": {"type": "StepResult", "number": 1, ...}}

| in a plan or result                  | in the file                                                        |
|--------------------------------------|--------------------------------------------------------------------|
| None, bool, int, float, str          | itself; a float is read back bit for bit                           |
| tuple                                | a list                                                             |
| frozenset                            | {"set": [...]}, sorted                                             |
| numpy array                          | {"array": "int32", "shape": [...], "values": [...]}, in C order    |
| dataclass, named tuple of `_RECORDS` | {"type": its name, and its fields by name}; a field that is not     |
|                                      | there has its default                                              |

`promoted` counts the blocks that colder tiers had brought to the device by then. Their KV is in no plan, so that a step which may read it
cannot be run again from plans alone: `Recording.colder_from` names the first such step, and `replay` refuses the recording.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from penstock.contract import (
    Adapter,
    Chunk,
    Echo,
    FenceId,
    Grammar,
    PartScores,
    Sampled,
    SamplingParams,
    Scoring,
    Start,
    StepFailure,
    StepPlan,
    StepResult,
    TokenLogprob,
    TokenScores,
)
from penstock.errors import InvariantBroken, UserError

if TYPE_CHECKING:
    from penstock.engine.execution.executor import Executor

VERSION = 1
_RECORDS: Mapping[str, Any] = {
    record.__name__: record
    for record in (
        *(StepPlan, Chunk, Scoring, Echo, Adapter, Start, SamplingParams, Grammar, FenceId),
        *(StepResult, Sampled, TokenLogprob, TokenScores, PartScores, StepFailure),
    )
}


class Recorder:
    """Writes what it is given to `file`, which is its owner's to close. Called from the engine thread, which waits for the disk: for those
    who look for a defect, not for every day. It has to see a run from its first step on."""

    def __init__(self, file: TextIO, sizes: Mapping[str, int | str]) -> None:
        """`sizes`: those of the executor, that is the fields of its limits."""
        self._file = file
        self._write({"recording": VERSION, "sizes": dict(sizes)})

    def add_plan(self, plan: StepPlan, num_promoted: int) -> None:
        """Before it is launched. `num_promoted`: blocks that have come from colder tiers since the engine was built."""
        self._write({"plan": _encode(plan), "promoted": num_promoted})

    def add_result(self, result: StepResult) -> None:
        self._write({"result": _encode(result)})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()  # what led to a crash is what is looked for


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """One run, as far as it was written down."""

    sizes: Mapping[str, int | str]
    plans: tuple[StepPlan, ...]
    results: tuple[StepResult, ...]  # of those that were over
    colder_from: int | None  # the first step that may read KV from a colder tier; None: no step does


def read(path: Path) -> Recording:
    """Raises UserError where `path` is no recording of this version. A last line that was not finished is left out."""
    try:
        lines = path.read_text("utf-8").split("\n")[:-1]
        head, *rest = map(json.loads, lines)
        if head["recording"] != VERSION:
            raise UserError(f"{path} is a recording of version {head['recording']}; this is version {VERSION}")
        planned = [(_decode(line["plan"]), line["promoted"]) for line in rest if "plan" in line]
        results = tuple(_decode(line["result"]) for line in rest if "result" in line)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no recording of a run: {type(error).__name__}: {error}") from error
    colder = (plan.number for plan, num in planned if plan.loads or num or any(chunk.num_paged for chunk in plan.chunks))
    return Recording(head["sizes"], tuple(plan for plan, _ in planned), results, next(colder, None))


def replay(recording: Recording, executor: Executor) -> Iterator[StepResult]:
    """Run the plans on an executor that has run nothing yet, with the same weights and adapters, one step after the other; gives their
    results. Raises UserError before the first step where the plans alone do not say enough."""
    if recording.sizes != dataclasses.asdict(executor.limits):
        raise UserError(f"the recording is of an engine of other sizes: {dict(recording.sizes)}, here {executor.limits}")
    if recording.colder_from is not None:
        raise UserError(f"from step {recording.colder_from} on it may read KV that came from a colder tier, which no plan holds")
    numbers = [plan.number for plan in recording.plans]
    if numbers != list(range(1, len(numbers) + 1)):
        raise UserError(f"the recording does not hold every step from the first one on: {numbers[:3]}...")
    return (_run(plan, executor) for plan in recording.plans)


def _run(plan: StepPlan, executor: Executor) -> StepResult:
    # Earlier users of its slots were copies of the recorded run. Here nothing but steps uses them, in their order.
    result = executor.sample(executor.launch(dataclasses.replace(plan, after=()))).wait_result()
    executor.masks.advance((one.request_id, one.tokens) for one in result.sampled)
    return result


def _encode(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray):
        return {"array": value.dtype.name, "shape": list(value.shape), "values": value.ravel().tolist()}
    if type(value) is frozenset:
        return {"set": sorted(value)}
    if type(value) is tuple:
        return [_encode(one) for one in value]
    name = type(value).__name__
    if _RECORDS.get(name) is not type(value):
        raise InvariantBroken(f"{name} is in a plan or result, and is no plain data")
    return {"type": name, **{field: _encode(getattr(value, field)) for field in _fields(type(value))}}


def _fields(record: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = record._fields if issubclass(record, tuple) else tuple(field.name for field in dataclasses.fields(record))
    return names


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_decode, value))
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return np.array(value["values"], value["array"]).reshape(value["shape"])
    if "set" in value:
        return frozenset(value["set"])
    return _RECORDS[value["type"]](**{name: _decode(one) for name, one in value.items() if name != "type"})
