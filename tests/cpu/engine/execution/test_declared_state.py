"""Device memory of steps besides KV: what each op changes is what it has declared, and a replay uses the
tensors it was captured with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.config import SpeculationConfig
from penstock.contract import Access, Mode
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.execution.sampling import SamplePass
from penstock.errors import InvariantBroken
from penstock.sanitizer.sanitizer import Sanitizer
from tests.support.driving import generate, pass_of, run_all, submit, tiny_config
from tests.support.forced import forced

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]
ROWS = "sampler rows"


class StateWatch(Sanitizer):
    """Compares the sampler's rows before and after each op of the compute lane with what the op has declared
    to write."""

    def __init__(self, arena: str = ROWS) -> None:
        super().__init__()
        self._arena = arena
        self.engine: Engine | None = None
        self.undeclared: list[tuple[str, list[int]]] = []
        self.num_changes = 0
        self._declared: dict[int, tuple[str, list[Access]]] = {}
        self._before: list[torch.Tensor] = []

    def submitted(self, lane: str, ticket: int, label: str, accesses: Sequence[Access]) -> None:
        super().submitted(lane, ticket, label, accesses)
        if lane == "compute":
            self._declared[ticket] = (
                label,
                [a for a in accesses if a.arena == self._arena and a.mode is Mode.WRITE],
            )

    def _state(self) -> list[torch.Tensor]:
        assert self.engine is not None
        sampler = pass_of(self.engine, SamplePass).sampler
        return [sampler.pending, sampler.rejected[:, None], sampler._counts, sampler._in_prompt]

    def _layer(self, number: int) -> int:
        """As accesses count them."""
        return min(number, 1)

    def started(self, lane: str, ticket: int) -> None:
        super().started(lane, ticket)
        if lane == "compute" and self.engine is not None:
            self._before = [state.clone() for state in self._state()]

    def finished(self, lane: str, ticket: int, error: BaseException | None) -> None:
        super().finished(lane, ticket, error)
        if lane != "compute" or self.engine is None:
            return
        label, accesses = self._declared.pop(ticket)
        for layer, (old, new) in enumerate(zip(self._before, self._state(), strict=True)):
            layer = self._layer(layer)
            changed = (old != new).any(dim=1).nonzero()[:, 0].tolist()
            declared = {int(row) for a in accesses if a.layers[0] <= layer < a.layers[1] for row in a.slots}
            self.num_changes += len(changed)
            if not set(changed) <= declared:
                self.undeclared.append((label, sorted(set(changed) - declared)))


class KvWatch(StateWatch):
    """The same for KV, by slot and layer. The padding slot belongs to nobody."""

    def _state(self) -> list[torch.Tensor]:
        assert self.engine is not None
        return [layer.flatten(1) for layer in self.engine.parts.arena.tensor[:-1].unbind(1)]

    def _layer(self, number: int) -> int:
        return number


@pytest.mark.parametrize("draft", [None, "draft:tiny-qwen3"])
def test_every_op_declares_the_kv_that_it_changes(draft: str | None, prompts: Prompts) -> None:
    """Of the target, and of what makes drafts: while it makes some, and before."""
    config = replace(
        tiny_config(max_batch=4, blocks=64), speculation=SpeculationConfig(draft, 4 if draft else None)
    )
    watch = KvWatch("kv")
    engine = build(config, sanitizer=watch)
    engine.parts.arena.tensor.fill_(0.5)
    watch.engine, watch._arena = engine, engine.parts.arena.name
    switch = None if draft is None else forced(engine, is_on=False)
    found = [submit(engine, prompts(20 + number, seed=number), max_tokens=45) for number in range(3)]
    while len(found[0].tokens) < 25:
        engine.step()
    if switch is not None:
        switch.is_on = True
    run_all(engine)
    engine.close(timeout_s=20.0)
    assert watch.undeclared == [] and watch.num_changes > 200 and watch.reports == []


def test_every_op_declares_the_rows_whose_state_it_changes(prompts: Prompts) -> None:
    watch = StateWatch()
    engine = build(tiny_config(max_batch=4), sanitizer=watch)
    watch.engine = engine
    for number in range(6):
        how: dict[str, Any] = {"repetition_penalty": 1.2, "frequency_penalty": 0.5} if number % 2 else {}
        submit(
            engine,
            prompts(20 + number, seed=number),
            max_tokens=5 + number,
            temperature=0.5,
            seed=number,
            **how,
        )
    run_all(engine)
    engine.close(timeout_s=20.0)
    assert watch.undeclared == [] and watch.num_changes > 50 and watch.reports == []


@pytest.mark.cpu_shapes  # it is a decode that cannot be launched, not the prompt before it
def test_a_captured_step_is_not_replayed_over_other_tensors(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    """A replay reads the last tokens where they were when it was captured. Were they somewhere else by now,
    it would decode stale ones."""
    engine = make_engine()
    generate(engine, prompts(20), max_tokens=4)
    sampler = pass_of(engine, SamplePass).sampler
    kept, sampler.pending = sampler.pending, sampler.pending.clone()
    try:
        submit(engine, prompts(20, seed=1), max_tokens=4)
        with pytest.raises(InvariantBroken, match="captured over tensors since replaced"):
            run_all(engine)
    finally:
        sampler.pending = kept
    engine.parts.scheduler._steps._unread.pop()  # the plan that could not be launched


def test_warming_up_leaves_nothing_behind(prompts: Prompts) -> None:
    """No count, no block, no rate: an engine that is warm answers as one that is not, and says that nothing
    was asked of it."""
    cold, sanitizer = build(tiny_config(host_blocks=64)), Sanitizer()
    warm = build(tiny_config(host_blocks=64), sanitizer=sanitizer)
    before = warm.stats()
    stages: list[str] = []
    warm.warm(lambda stage, done, total: stages.append(f"{stage} {done == total}"))
    assert stages[0] == "warming up False" and stages[-1] == "warming up True"
    after = warm.stats()
    assert (after.prompt_tokens, after.generated_tokens, after.steps, after.cache) == (
        before.prompt_tokens,
        before.generated_tokens,
        0,
        before.cache,
    )
    assert after.kv_blocks == before.kv_blocks and sum(after.requests.values()) == 0
    how: dict[str, Any] = {
        "max_tokens": 8,
        "temperature": 0.9,
        "seed": 3,
        "repetition_penalty": 1.3,
        "logprobs": 2,
    }
    assert generate(warm, prompts(40), **how).tokens == generate(cold, prompts(40), **how).tokens
    warm.check()
    for engine in (warm, cold):
        engine.close(timeout_s=20.0)
    assert sanitizer.reports == []
