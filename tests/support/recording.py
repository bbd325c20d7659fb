"""Plans and results of a run as they were, and the run once more from its plans. Owns no step."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.contract import StepPlan, StepResult
from penstock.engine.engine import Engine
from penstock.engine.execution.executor import Executor


@dataclasses.dataclass(slots=True)
class Recording:
    """One run, from its first step on."""

    plans: list[StepPlan]
    results: list[StepResult]  # of those that were over


@contextmanager
def recorded(engine: Engine) -> Iterator[Recording]:
    """What is launched and committed inside. Copies: arrays may be views of memory that is used again."""
    executor, scheduler = engine.parts.executor, engine.parts.scheduler
    launch, commit = executor.launch, scheduler.commit
    run = Recording([], [])

    def launched(plan: StepPlan, *waits: Any) -> Any:
        run.plans.append(copy.deepcopy(plan))
        return launch(plan, *waits)

    def committed(result: StepResult) -> Any:
        run.results.append(copy.deepcopy(result))
        return commit(result)

    executor.launch, scheduler.commit = launched, committed  # type: ignore[method-assign, assignment]
    try:
        yield run
    finally:
        executor.launch, scheduler.commit = launch, commit  # type: ignore[method-assign]


class _PlainData(pickle.Unpickler):
    """Takes numbers, arrays and the records of `contract`: nothing that lives in one process alone."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name != "penstock.contract" and module_name.partition(".")[0] != "numpy":
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is no plain data")
        return super().find_class(module_name, global_name)


def through_a_file(run: Recording) -> Recording:
    """As another process would read it."""
    with tempfile.TemporaryFile() as file:
        pickle.dump((run.plans, run.results), file)
        file.seek(0)
        return Recording(*_PlainData(file).load())


def replay(run: Recording, executor: Executor) -> Iterator[StepResult]:
    """On an executor that has run nothing yet, with the same weights, adapters and sizes, one step after the
    other. No step of the run may have read KV that a colder tier brought: it is in no plan."""
    for plan in run.plans:
        # Earlier users of its slots were copies of the recorded run. Here nothing but steps uses them, in
        # their order.
        result = executor.sample(executor.launch(dataclasses.replace(plan, after=()))).wait_result()
        executor.masks.advance((one.request_id, one.tokens) for one in result.sampled)
        yield result
