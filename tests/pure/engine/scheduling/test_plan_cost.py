"""What planning looks at: it grows with the requests that a plan looks at, never with the length of their
prompts. Counted, not timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.contract import Request, Sampled, SamplingParams, StepPlan, StepResult
from penstock.engine.scheduling.budget import Budget
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.kv.blocks import key as key_module
from penstock.kv.blocks.key import Scope
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.cache import KvCache
from penstock.kv.rules import rule_for

BLOCK = 4
SCOPE = Scope(weights=b"w", kv_dtype="float32", layout=b"l", block_tokens=BLOCK, position_scheme="rope")
NUM_WAITING = 64


class CountingSlots(dict[bytes, int]):
    """Counts the keys that are looked for."""

    num_lookups = 0

    def __getitem__(self, key: bytes) -> int:
        self.num_lookups += 1
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.num_lookups += 1
        return super().__contains__(key)

    def get(self, key: bytes, default: Any = None) -> Any:
        self.num_lookups += 1
        return super().get(key, default)


class PassedFence:
    lane, number = "compute", 0

    def passed(self) -> bool:
        return True

    def wait_passed(self, timeout_s: float | None = None) -> None:
        pass


class Counted:
    """A scheduler over the real books, whose steps are over when the test says so."""

    def __init__(
        self, num_blocks: int, prefill_chunk: int, overcommit: float = 1.0, window: int = 0, **limits: Any
    ) -> None:
        self.pool = BlockPool(num_blocks, "device")
        self.pool.index.slot_of = self.slots = CountingSlots()
        self.cache = KvCache(self.pool, SCOPE, rule=rule_for((window,), BLOCK))
        self.scheduler = Scheduler(
            self.cache,
            Budget(
                **{"max_batch": 2 * NUM_WAITING, **limits}, prefill_chunk=prefill_chunk, overcommit=overcommit
            ),
            (),
        )
        self.num_submitted = 0

    def submit(self, prompt: Sequence[int], max_tokens: int = 8) -> str:
        request = Request(
            f"r{self.num_submitted}",
            list(prompt),
            SamplingParams(max_tokens=max_tokens),
            self.cache.prefix_of(prompt),
        )
        self.num_submitted += 1
        self.scheduler.add(request)
        return request.id

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan().plan
        assert plan is not None
        self.scheduler.launched(PassedFence())
        return plan

    def commit(self, plan: StepPlan) -> None:
        self.scheduler.commit(
            StepResult(plan.number, tuple(Sampled(c.request_id, (1,)) for c in plan.chunks if c.num_logits))
        )

    def num_lookups_of(self, plan: bool = True) -> int:
        self.slots.num_lookups = 0
        self.plan() if plan else None
        return self.slots.num_lookups


def test_a_request_that_was_pushed_out_computes_keys_of_its_new_blocks_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Counted(600, prefill_chunk=2_000, overcommit=4.0)
    world.submit(range(2_000), max_tokens=200)
    plan = world.plan()
    for _ in range(9):
        world.commit(plan)
        plan = world.plan()
    world.commit(plan)
    hashed: list[int] = []
    token_bytes = key_module.token_bytes
    monkeypatch.setattr(
        key_module, "token_bytes", lambda tokens: hashed.append(len(tokens)) or token_bytes(tokens)
    )
    life = world.scheduler.lives["r0"]
    world.scheduler.retract(world.scheduler.running.requests["r0"])
    plan = world.plan()
    assert life.prefix is not None and life.prefix.keys == world.cache.prefix_of(life.tokens).keys
    assert plan.chunks[0].start == 2_008, "all of its full blocks were there"
    assert hashed[0] <= 10, "what it has generated, and not its prompt again"


def test_with_a_long_line_a_plan_looks_up_what_has_changed_and_nothing_else() -> None:
    """There are more in line than the index remembers answers for: each keeps its own."""
    world = Counted(1_200, prefill_chunk=1_000, max_batch=1, max_overtaken_s=60.0)
    for first in range(0, 10_000, 1_000):
        world.submit(range(first, first + 400), max_tokens=1)
        world.commit(world.plan())
    running = world.submit([1, 2, 3], max_tokens=700)
    world.commit(world.plan())
    ids = [
        world.submit([*range(1_000 * (number % 10), 1_000 * (number % 10) + 400), number], max_tokens=8)
        for number in range(400)
    ]
    for _ in range(100):
        world.commit(world.plan())
    assert {one.request.id for one in world.scheduler.admission.line if one.want is not None} == set(ids)
    for _ in range(120):
        assert world.num_lookups_of() <= 20, "four are looked at, a few times each"
    assert world.pool.evict(3) == 3
    assert sum(world.num_lookups_of() for _ in range(160)) <= 3_200, (
        "what was lost is not looked for block by block"
    )
    world.scheduler.cancel(running)
    assert world.num_lookups_of() <= 30, "and whoever is admitted"
    assert world.scheduler.running.requests


@pytest.mark.parametrize("is_cached", [False, True])
def test_with_windows_a_plan_looks_up_a_window_and_few_keys_before_it(is_cached: bool) -> None:
    """Two thousand blocks each, of which twenty are a window."""
    world = Counted(120, prefill_chunk=100, window=20 * BLOCK, max_batch=1, max_overtaken_s=60.0)
    if is_cached:
        first = world.submit(range(8_000), max_tokens=1)
        while first in world.scheduler.lives:
            world.commit(world.plan())
    world.submit([1, 2, 3], max_tokens=350)
    world.commit(world.plan())
    for number in range(10):
        world.submit([*range(8_000), number] if is_cached else range(number, 8_000 + number))
    for _ in range(40):
        world.commit(world.plan())
    assert world.cache.rule.find(world.pool, world.cache.prefix_of(range(8_000)).keys).num_blocks == (
        2_000 if is_cached else 0
    )
    most = max(world.num_lookups_of() for _ in range(40))
    assert 0 < most <= 4 * 4 * (2 * 20 + 2_000 // 20), "four are looked at, a few times each"
