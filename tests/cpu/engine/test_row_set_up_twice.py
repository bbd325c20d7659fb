"""A row that one plan sets up twice: a request left before the step that was to begin with it, and another
one got its row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from penstock.contract import Request, SamplingParams, Start
from penstock.engine.engine import Engine
from penstock.engine.scheduling.scheduler import Planned
from tests.support.driving import generate


@pytest.mark.parametrize(
    "sampling", [{"temperature": 1.0, "seed": 3}, {"frequency_penalty": 2.0}, {"logprobs": 2}], ids=str
)
def test_the_request_that_came_last_counts(
    make_engine: Callable[..., Engine],
    prompts: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
    sampling: dict[str, Any],
) -> None:
    alone = generate(make_engine(), prompts(20), **sampling)
    engine = make_engine()
    gone = Request(
        "gone",
        [1, 2, 3],
        SamplingParams(max_tokens=4, temperature=1.0, seed=9, presence_penalty=-2.0, repetition_penalty=1.5),
    )
    plan = engine._parts.scheduler.plan

    def planned(*args: Any, **named: Any) -> Planned:
        made = plan(*args, **named)
        if made.plan is None:
            return made
        starts = (start for own in made.plan.starts for start in (Start.of(own.row, gone, (5, 5)), own))
        return made._replace(plan=dataclasses.replace(made.plan, starts=tuple(starts)))

    monkeypatch.setattr(engine._parts.scheduler, "plan", planned)
    found = generate(engine, prompts(20), **sampling)
    assert (found.tokens, found.logprobs) == (alone.tokens, alone.logprobs)
