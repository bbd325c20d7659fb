"""A replay of recorded agents in modelled time: the real scheduler and the real books of device and host
memory, with steps and copies that take as long as on an H200 with Qwen3-4B's shape. Shows what a change of
order or of eviction does, without a GPU, in a minute.

    python benchmarks/agents_model.py agentic-coding.jsonl.gz --users 20 --device-blocks 16384 --host-blocks
    36408

What it leaves out: time of the engine thread, and that a client needs a moment before it goes on
(`--client-ms` stands for it).
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.bench.trace_files import Asking, User, read_conversations, reusable, select
from penstock.config import DEVICE_EVICTIONS, EVICTIONS
from penstock.contract import (
    FinishReason,
    Request,
    Sampled,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenEvent,
    Waits,
)
from penstock.engine.scheduling.budget import Budget
from penstock.engine.scheduling.scheduler import Estimates, Planned, Scheduler
from penstock.kv.blocks.eviction import make_order
from penstock.kv.blocks.key import Scope
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.cache import KvCache
from penstock.kv.memory import BlockLayout
from penstock.kv.rules import rule_for
from penstock.kv.states import KEPT_STATES, KeptStates
from penstock.kv.tiers.host import HostTier
from penstock.kv.tiers.policy import TierLimits
from penstock.kv.tiers.tiers import Tiers
from penstock.kv.transfer import Mover
from penstock.testing.stores import HandClock

BLOCK = 16
LAYOUT = BlockLayout(36, 8, 128, BLOCK, "bfloat16")
# The H200 as `bench ttft`, `decode` and `transfer` have it: prompts of 8,192 and 32,768 tokens in 127 and 921
# ms, a decode step of one short request in 2.9 ms, and memory and link at their rates.
TOKEN_S, DEPTH_S = 11.3e-6, 1.025e-9  # of a prompt's token, and for each token before it
STEP_S = 2.9e-3
MEMORY_BYTES_S = 4.3e12
LINK_BYTES_S = 52e9
# How far steps, and clients before they go on, are from their mean where they are random (`--seed`).
STEPS_VARY = 0.05
CLIENT_VARIES = 0.7


@dataclass(eq=False)
class ModelFence:
    lane: str
    end_s: float
    clock: HandClock
    number: int = field(default_factory=itertools.count().__next__)

    def passed(self) -> bool:
        return self.clock.now_s >= self.end_s

    def wait_passed(self, timeout_s: float | None = None) -> None:
        self.clock.now_s = max(self.clock.now_s, self.end_s)


class DoneTicket:
    """Of work that was done when it was submitted; only its lane is busy for longer."""

    def done(self) -> bool:
        return True

    def error(self) -> BaseException | None:
        return None

    def wait_done(self, timeout_s: float | None = None) -> None: ...


class ModelLane:
    """Work that takes modelled time, one piece after the other."""

    def __init__(self, name: str, clock: HandClock) -> None:
        self.name = name
        self.clock = clock
        self.busy_s = 0.0  # until then

    def submit(self, op: Any, accesses: Sequence[Any] = (), *, label: str, after: Any = None) -> DoneTicket:
        self.busy_s = max(self.busy_s, self.clock.now_s)
        op()
        return DoneTicket()

    def record(self) -> ModelFence:
        return ModelFence(self.name, max(self.busy_s, self.clock.now_s), self.clock)

    def wait(self, fence: Any) -> None:
        self.busy_s = max(self.busy_s, fence.end_s)

    def close(self, timeout_s: float | None = None) -> None: ...


class ModelCopier:
    """No bytes: only their time, on its lane."""

    def __init__(self) -> None:
        self.lane: ModelLane

    def copy(self, source_slots: Any, dest_slots: Any, layers: tuple[int, int]) -> None:
        share = (layers[1] - layers[0]) / LAYOUT.num_layers
        self.lane.busy_s += len(source_slots) * LAYOUT.block_bytes * share / LINK_BYTES_S


@dataclass(eq=False)
class Asked:
    """One request, from when it is sent to its end."""

    user: int
    number: int
    sent_s: float
    first_s: float = 0.0
    end_s: float = 0.0
    source: Any = None


@dataclass(eq=False)
class Model:
    """The replay."""

    users: Sequence[User]
    options: argparse.Namespace
    clock: HandClock = field(default_factory=HandClock)  # modelled seconds

    def __post_init__(self) -> None:
        o = self.options
        on_device = o.eviction if o.eviction in DEVICE_EVICTIONS else "lru"
        self.pool = BlockPool(
            o.device_blocks, "device", eviction=make_order(on_device, o.device_blocks, BLOCK)
        )
        host_pool = BlockPool(o.host_blocks, "host", eviction=make_order(o.eviction, o.host_blocks, BLOCK))
        host = HostTier(host_pool, BLOCK, 1e9, self.clock)
        movers = self._mover("host", "device"), self._mover("device", "host")
        tiers = Tiers.of(self.pool, host, (), movers, LAYOUT, TierLimits(1024, 30.0, postpones=True))
        num_states = int(o.states_gib * 1024 / o.state_mib)
        states = KeptStates(BlockPool(num_states, KEPT_STATES)) if num_states else None
        self.cache = KvCache(
            self.pool,
            Scope(b"w" * 32, LAYOUT.dtype, LAYOUT.fingerprint(), BLOCK, "rope"),
            True,
            tiers,
            rule_for((), BLOCK, states),
        )
        bound_s = o.max_overtaken_s if o.scheduling == "cost" else 0.0
        budget = Budget(256, 8192, max_overtaken_s=bound_s, chunk_s=o.chunk_ms / 1000, min_chunk=512)
        budget = replace(budget, state_every=o.state_every)
        self.scheduler = Scheduler(self.cache, budget, (), estimates=Estimates(self.cache.prefill))
        self.compute = ModelLane("compute", self.clock)
        self.arriving: list[tuple[float, int, int, int]] = []  # when, order, user, number
        self.asked: dict[str, Asked] = {}
        # launched, with what they say of prefill
        self.steps: deque[tuple[StepPlan, ModelFence, tuple[int, float, float] | None]] = deque()
        self.num_done = 0
        self.random = random.Random(o.seed)
        for number in range(len(self.users)):
            self._send_later(number, 0)

    def _mover(self, source: str, dest: str) -> Mover:
        copier, lane = ModelCopier(), ModelLane(f"to {dest}", self.clock)
        copier.lane = lane
        return Mover((source, dest), copier, lane, ModelLane(f"launch to {dest}", self.clock))  # type: ignore[arg-type]

    def _send_later(self, user: int, number: int) -> None:
        client_s = self._varied(self.options.client_ms / 1000, CLIENT_VARIES)
        think_s = self.users[user].asks[number].think_s + client_s
        heapq.heappush(
            self.arriving, (self.clock.now_s + think_s, len(self.asked) + len(self.arriving), user, number)
        )

    def _varied(self, seconds: float, by: float) -> float:
        """Without a seed as given, else a random time of that mean."""
        return seconds * (1.0 + self.random.uniform(-by, by)) if self.options.seed else seconds

    def _send(self, user: int, number: int) -> None:
        ask = self.users[user].asks[number]
        prefix = self.cache.prefix_of(ask.prompt)
        assert prefix is not None
        sampling = SamplingParams(max_tokens=ask.max_tokens, temperature=0.0, ignore_eos=True)
        request = Request(f"u{user}.{number}", ask.prompt.tolist(), sampling, prefix, self.clock.now_s)
        self.asked[request.id] = Asked(user, number, self.clock.now_s)
        self.scheduler.add(request, self.cache.lease(request.id, prefix))

    def run(self, show: bool) -> float:
        began_s, told = self.clock.now_s, 0
        total = sum(len(user.asks) for user in self.users)
        while self.num_done < total:
            self._turn()
            if show and self.num_done >= told:
                print(
                    f"agents: {self.num_done} of {total} after {self.clock.now_s - began_s:.0f} s",
                    file=sys.stderr,
                )
                told = self.num_done + total // 10
        return self.clock.now_s - began_s

    def _turn(self) -> None:
        while self.arriving and self.arriving[0][0] <= self.clock.now_s:
            _, _, user, number = heapq.heappop(self.arriving)
            self._send(user, number)
        self.cache.settle()
        planned = self.scheduler.plan() if len(self.steps) < 2 else Planned()
        plan = planned.plan
        if plan is not None:
            self._launch(plan, planned.waits)
            self.cache.submit_saves()
        if len(self.steps) >= 2 or (plan is None and self.steps):
            self._read()
        elif plan is None:
            self._rest()

    def _launch(self, plan: StepPlan, waits: Waits) -> None:
        lane = self.compute
        lane.busy_s = max(lane.busy_s, self.clock.now_s)
        for earlier in waits.fences.values():
            lane.wait(earlier)
        for load in waits.loads.values():
            for arrival in load.arrivals or ():
                lane.wait(arrival.fence)
        context = sum(chunk.start + chunk.num_tokens for chunk in plan.chunks if chunk.num_tokens == 1)
        step_s = STEP_S + context * LAYOUT.block_bytes / BLOCK / MEMORY_BYTES_S
        prompts = [
            (chunk.num_tokens, chunk.start + chunk.num_tokens / 2)
            for chunk in plan.chunks
            if chunk.num_tokens > 1
        ]
        prompt_s = sum(num * (TOKEN_S + DEPTH_S * depth) for num, depth in prompts)
        slower = 1.0 + self.options.slower
        step_s, prompt_s = (
            self._varied(step_s * slower, STEPS_VARY),
            self._varied(prompt_s * slower, STEPS_VARY),
        )
        lane.busy_s += step_s + prompt_s
        seen = None
        if prompts:
            num = sum(num for num, _ in prompts)
            seen = num, sum(num * depth for num, depth in prompts) / num, prompt_s + step_s
        fence = lane.record()
        self.scheduler.launched(fence)
        self.steps.append((plan, fence, seen))

    def _read(self) -> None:
        plan, fence, seen = self.steps.popleft()
        fence.wait_passed()
        self.cache.settle()
        if seen is not None:
            self.cache.prefill.add(*seen)
        sampled = tuple(Sampled(chunk.request_id, (1,)) for chunk in plan.chunks if chunk.num_logits)
        for event in self.scheduler.commit(StepResult(plan.number, sampled)).events:
            self._hear(event)

    def _hear(self, event: TokenEvent) -> None:
        asked = self.asked[event.request_id]
        asked.first_s = asked.first_s or self.clock.now_s
        asked.source = asked.source or event.source
        if event.finish is not None:
            assert event.finish is FinishReason.LENGTH, event
            asked.end_s = self.clock.now_s
            self.num_done += 1
            if asked.number + 1 < len(self.users[asked.user].asks):
                self._send_later(asked.user, asked.number + 1)

    def _rest(self) -> None:
        """Nothing is computed: until a copy is over, or somebody sends something."""
        times = [mover.lane.busy_s for mover in (self.cache.loads.mover, self.cache.saves.mover)]  # type: ignore[attr-defined]
        times += [when for when, *_ in self.arriving[:1]]
        later = [when for when in times if when > self.clock.now_s]
        self.clock.now_s = min(min(later, default=self.clock.now_s + 0.001), self.clock.now_s + 0.005)


def figures(model: Model, seconds: float) -> dict[str, float]:
    records = sorted(model.asked.values(), key=lambda one: one.end_s)
    prompts = [model.users[one.user].asks[one.number].prompt for one in records]
    possible = reusable(prompts, BLOCK)
    total = sum(map(len, prompts))
    computed = sum(one.source.computed for one in records)
    later = [one.first_s - one.sent_s for one in records if one.number]
    first = [one.first_s - one.sent_s for one in records if not one.number]
    return {
        "seconds": seconds,
        "reused": 1 - computed / total,
        "reusable": sum(possible) / total,
        "states_kept": 0 if model.cache.states is None else model.cache.states.pool.num_keys,
        "device": sum(one.source.device for one in records) / total,
        "later_p50": float(np.percentile(later, 50)),
        "later_p95": float(np.percentile(later, 95)),
        "later_max": max(later),
        "mean": float(np.mean(later + first)),
        "first_p50": float(np.percentile(first, 50)),
        "first_p95": float(np.percentile(first, 95)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--think", type=float, default=0.0)
    parser.add_argument("--max-think-s", type=float, default=None)
    parser.add_argument("--device-blocks", type=int, default=16384)
    parser.add_argument("--host-blocks", type=int, default=36408)
    parser.add_argument("--eviction", choices=EVICTIONS, default=EVICTIONS[0])
    parser.add_argument("--scheduling", choices=("cost", "fifo"), default="cost")
    parser.add_argument("--max-overtaken-s", type=float, default=60.0)
    parser.add_argument("--chunk-ms", type=float, default=150.0)
    parser.add_argument("--client-ms", type=float, default=30.0)
    parser.add_argument(
        "--slower", type=float, default=0.0, help="by which share steps take longer than their rates say"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of random times of steps and clients; 0: none is random"
    )
    parser.add_argument(
        "--states-gib",
        type=float,
        default=0.0,
        help="host memory for states of recurrent layers; 0: every layer attends",
    )
    parser.add_argument("--state-mib", type=float, default=63.0, help="one state; Qwen3.5-35B-A3B has 63")
    parser.add_argument("--state-every", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="figures as one line of JSON")
    options = parser.parse_args()
    o = options
    asking = Asking(str(o.trace), o.users, o.context, o.requests, o.tokens, o.think, o.max_think_s)
    chosen = select(read_conversations(options.trace), options.users, options.context, options.requests)
    users = asking.users_of(chosen, 32000)
    model = Model(users, options)
    time.monotonic = model.clock  # deadlines of storage are in modelled time, too
    found = figures(model, model.run(show=not options.json))
    print(
        json.dumps(found)
        if options.json
        else "\n".join(f"{name:10} {value:8.3f}" for name, value in found.items())
    )


if __name__ == "__main__":
    main()
