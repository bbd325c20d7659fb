"""What the engine thread spends on bookkeeping: each part of a turn, and each thing that can come in between,
against the length of the context and the number of requests. Runs on the CPU without a model: scheduler, KV
books and packing are the real ones, the device is not there. Owns the cases and the table.

    python benchmarks/turn_cost.py [--json FILE] [--only PART] [--repeat N]

Times are medians, in milliseconds of processor time. On a shared machine compare runs made one after the
other, not single numbers.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from driver import flags, write
from penstock.config import EVICTIONS
from penstock.contract import Prefix, Request, Sampled, SamplingParams, StepPlan, StepResult
from penstock.engine.execution.batch import Packer
from penstock.engine.scheduling.budget import Budget
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.kv.blocks.eviction import make_order
from penstock.kv.blocks.key import Scope
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.cache import KvCache
from penstock.kv.memory import BlockLayout
from penstock.kv.tiers.cold import ColdLanes, ColdLimits, ColdTier
from penstock.kv.tiers.host import HostTier
from penstock.kv.tiers.policy import TierLimits
from penstock.kv.tiers.tiers import Tiers
from penstock.kv.transfer import Mover
from penstock.testing.stores import MemoryStore

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tests.support.stepped import SteppedLanes

T = TypeVar("T")

BLOCK = 16
CHUNK = 8192  # prompt tokens per step
SCOPE = Scope(weights=b"w", kv_dtype="bfloat16", layout=b"l", block_tokens=BLOCK, position_scheme="rope")
LAYOUT = BlockLayout(num_layers=2, num_kv_heads=1, head_dim=1, block_tokens=BLOCK, dtype="float32")
TOKENS = (1_000, 10_000, 100_000)
REQUESTS = (1, 64, 1000)


class PassedFence:
    """Behind a step that is over."""

    lane, number = "compute", 0

    def passed(self) -> bool:
        return True

    def wait_passed(self, timeout_s: float | None = None) -> None:
        pass


FENCE = PassedFence()


class NoCopy:
    """Moves no bytes: only what it takes to have them moved is timed."""

    def copy(self, source_slots: Any, dest_slots: Any, layers: Any) -> None:
        pass


def _pool(num_blocks: int, name: str) -> BlockPool:
    return BlockPool(num_blocks, name, eviction=make_order(EVICTIONS[0], num_blocks, BLOCK))


class Rig:
    """A scheduler over real KV books; every step is over as soon as it is launched, and samples the same
    token for everybody."""

    def __init__(
        self,
        num_blocks: int,
        max_batch: int = 1,
        chunk: int = CHUNK,
        num_host: int = 0,
        has_disk: bool = True,
        max_overtaken_s: float = 0.0,
    ) -> None:
        self.pool = _pool(num_blocks, "device")
        self.lanes = SteppedLanes()
        self.cache = KvCache(self.pool, SCOPE, True, self._tiers(num_host, has_disk) if num_host else None)
        self.scheduler = Scheduler(self.cache, Budget(max_batch, chunk, max_overtaken_s=max_overtaken_s), ())
        self.packer = Packer(BLOCK, num_blocks, max_batch)
        self.staging = np.empty(4 * (chunk + max_batch) + 8 * max_batch + 8, np.int32)
        self.num_submitted = 0

    def _tiers(self, num_host: int, has_disk: bool) -> Tiers:
        host = HostTier(_pool(num_host, "host"), BLOCK, 1e9)
        to_device, to_host = (
            Mover(ends, NoCopy(), self.lanes.lane(f"to {ends[1]}"), self.lanes.lane(f"launch to {ends[1]}"))
            for ends in ENDS
        )
        limits = TierLimits(0, 1e9, load_always=True, postpones=not has_disk, admission="reuse")
        cold = [self._disk()] if has_disk else []
        return Tiers.of(self.pool, host, cold, (to_device, to_host), LAYOUT, limits)

    def _disk(self) -> ColdTier:
        memory = memoryview(bytearray(64))
        lanes = ColdLanes([self.lanes.lane("read")], [self.lanes.lane("write")], None)
        limits = ColdLimits(group_bytes=64 * 64, stuck_s=1e9)
        return ColdTier(MemoryStore("ssd", local=True), lanes, lambda slot: memory, ("host", 2), limits)

    def submit(
        self, tokens: list[int], max_tokens: int = 64, prefix: Prefix | None = None, **sampling: Any
    ) -> str:
        """`prefix`: that of these tokens, where the caller has it."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)
        prefix = self.cache.prefix_of(tokens) if prefix is None else prefix
        request = Request(f"r{self.num_submitted}", tokens, params, prefix, float(self.num_submitted))
        self.num_submitted += 1
        may_lease = request.prefix is not None and request.may_match
        self.scheduler.add(
            request, self.cache.lease(request.id, request.prefix) if may_lease and request.prefix else None
        )
        return request.id

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan().plan
        assert plan is not None
        self.scheduler.launched(FENCE)
        return plan

    def pack(self, plan: StepPlan) -> None:
        num_ints = (
            4 * (plan.num_tokens + len(plan.chunks))
            + 8 * len(plan.chunks)
            + 8
            + sum(len(c.slots) for c in plan.chunks)
        )
        if num_ints > len(self.staging):
            self.staging = np.empty(2 * num_ints, np.int32)
        self.packer.pack(plan.chunks, plan.num_decodes, None, self.staging)

    def commit(self, plan: StepPlan) -> None:
        sampled = tuple(Sampled(c.request_id, (7,)) for c in plan.chunks if c.num_logits)
        self.scheduler.commit(StepResult(plan.number, sampled))
        self.cache.submit_saves()

    def step(self) -> StepPlan:
        plan = self.plan()
        self.commit(plan)
        return plan

    def flow(self) -> None:
        """Transfers and writes end."""
        while True:
            self.lanes.run_all()
            if not self.cache.settle():
                break


ENDS = (("host", "device"), ("device", "host"))


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 30_000, num_tokens).tolist()
    return tokens


def blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


def timed(act: Callable[..., T], *args: Any) -> tuple[float, T]:
    """Milliseconds of this thread on a processor, which leaves out what else runs on the machine; and what
    came of it."""
    started = time.thread_time()
    result = act(*args)
    return (time.thread_time() - started) * 1e3, result


# ------------------------------------------------------------------------------------------------------ cases

Times = Iterator[tuple[str, float]]


def decoding(num_tokens: int, num_requests: int) -> Times:
    """All share one prompt, and generate."""
    rig = running(num_tokens, num_requests)
    for _ in range(20):
        ms, plan = timed(rig.plan)
        yield "decode: plan", ms
        yield "decode: pack", timed(rig.pack, plan)[0]
        yield "decode: commit", timed(rig.commit, plan)[0]


def running(num_tokens: int, num_requests: int) -> Rig:
    """A rig in which all share one prompt, and have generated some."""
    rig = Rig(blocks(num_tokens) + 8 * num_requests, num_requests)
    tokens = prompt(num_tokens)
    for _ in range(num_requests):
        rig.submit([*tokens, 1])
    while len((plan := rig.step()).chunks) < num_requests or not plan.is_decode:
        pass
    return rig


def waiting(num_tokens: int, num_requests: int) -> Times:
    """One has its last prompt tokens computed; all the others have the same prompt, and wait for it."""
    rig = Rig(blocks(num_tokens) + 8 * num_requests + 8, num_requests + 1, chunk=max(BLOCK, num_tokens // 4))
    tokens = prompt(num_tokens)
    for _ in range(num_requests + 1):
        rig.submit([*tokens, 1])
    rig.step()
    while rig.scheduler.running.requests["r0"].num_left > num_tokens // 4 + BLOCK:
        rig.step()
    rig.plan()
    yield "others wait: first plan", timed(rig.plan)[0]
    for _ in range(5):
        yield "others wait: plan", timed(rig.scheduler.plan)[0]


def queueing(num_tokens: int, num_requests: int) -> Times:
    """All but one wait, each for its turn in one of 48 conversations, of which the device has a third, and
    host memory another. Between two plans both lose some blocks. Whoever is cheapest to start goes first."""
    num = blocks(num_tokens)
    rig = Rig(16 * num + num_requests // 4 + 64, 1, num_host=16 * num, has_disk=False, max_overtaken_s=60.0)
    cache = rig.cache
    cache.prefill.add(8192, 4096.0, 0.2)
    cache.loads.costs.link.bytes_per_s = 1e9
    known = [
        (tokens, rig.cache.prefix_of(tokens))
        for tokens in (prompt(num_tokens, number) for number in range(48))
    ]
    for number, (_, prefix) in enumerate(known[:32]):
        assert prefix is not None
        if number < 16:
            remember(rig.pool, prefix.keys)
        else:
            remember(cache.host.pool, prefix.keys)
    rig.submit([1, 2, 3], max_tokens=2 * num_requests + 100)
    rig.step()
    for number in range(num_requests):  # one comes in each turn
        tokens, prefix = known[number % 48]
        assert prefix is not None
        rig.submit(tokens, 16, Prefix(prefix.scope, (*prefix.keys[:-1], number.to_bytes(16, "big"))))
        ms, plan = timed(rig.plan)
        yield "line: plan, one is new", ms
        rig.commit(plan)
    for _ in range(50):
        yield "line: blocks are evicted", timed(lambda: (rig.pool.evict(8), cache.host.pool.evict(8)))[0]
        ms, plan = timed(rig.plan)
        yield "line: plan", ms
        rig.commit(plan)
    for _ in range(10):
        for request_id in list(rig.scheduler.running.requests):
            rig.scheduler.cancel(request_id)
        while rig.scheduler.has_work() and not rig.scheduler.running.requests:
            ms, step = timed(rig.scheduler.plan)
            yield "line: plan, admits", ms
            if step.plan is not None:
                rig.scheduler.launched(FENCE)
                rig.commit(step.plan)
            rig.flow()


def remember(pool: BlockPool, keys: Sequence[bytes]) -> None:
    """Somebody has used these blocks before."""
    hold = pool.hold("somebody")
    reservation = pool.try_reserve(len(keys), "somebody")
    assert reservation is not None
    reservation.commit(hold)
    pool.seal(hold.slots, keys, range(len(keys)))
    hold.end()


def computing(num_tokens: int, num_requests: int) -> Times:
    """A prompt in chunks: first into free slots, then in the place of the one before."""
    if num_requests > 1:
        return
    rig = Rig(blocks(num_tokens) + 8)
    for number in range(3):
        rig.submit(prompt(num_tokens, number), max_tokens=0)
        while rig.scheduler.has_work():
            ms, plan = timed(rig.plan)
            yield "prompt chunk: plan, evicts" if number else "prompt chunk: plan", ms
            yield "prompt chunk: pack", timed(rig.pack, plan)[0]
            yield "prompt chunk: commit", timed(rig.commit, plan)[0]


def coming_and_going(num_tokens: int, num_requests: int) -> Times:
    """One more comes for a prompt that is cached, and leaves; in the end all leave at once."""
    rig = running(num_tokens, num_requests)
    rig.scheduler.running.free_rows.append(num_requests)
    known = [*prompt(num_tokens), 2]
    for number in range(10):
        yield "caller: keys of a new prompt", timed(rig.cache.prefix_of, prompt(num_tokens, 1 + number))[0]
        yield "caller: keys of a known prompt", timed(rig.cache.prefix_of, known)[0]
        request_id = rig.submit(known)
        ms, plan = timed(rig.plan)
        yield "admit a cached prompt: plan", ms
        rig.commit(plan)
        yield "cancel", timed(rig.scheduler.cancel, request_id)[0]
        rig.step()
    yield (
        ("cancel all"),
        timed(lambda: [rig.scheduler.cancel(request_id) for request_id in list(rig.scheduler.lives)])[0],
    )
    yield "reset", timed(rig.cache.reset)[0]


def retracting(num_tokens: int, num_requests: int) -> Times:
    if num_requests > 1:
        return
    for _ in range(3):
        rig = Rig(blocks(num_tokens) + 32, 1, num_host=2 * blocks(num_tokens) + 64)
        rig.submit(prompt(num_tokens))
        while not rig.step().chunks[0].num_logits:
            rig.flow()
        rig.flow()
        running = next(iter(rig.scheduler.running.requests.values()))
        yield "retract", timed(rig.scheduler.retract, running)[0]
        rig.lanes.run_all()
        yield "retraction settles", timed(rig.cache.settle)[0]
        rig.cache.reset(["device"])
        yield "promote: plan", timed(rig.scheduler.plan)[0]
        rig.lanes.run_all()
        yield "promotion settles", timed(rig.cache.settle)[0]


CASES = (
    decoding,
    waiting,
    queueing,
    computing,
    coming_and_going,
    retracting,
)

# ------------------------------------------------------------------------------------------------------ table


class Row(NamedTuple):
    what: str
    num_tokens: int
    num_requests: int
    ms: float  # the median
    most_ms: float


def measure(only: str, repeat: int) -> Iterator[Row]:
    for case in CASES:
        if only not in case.__name__:
            continue
        for num_requests in REQUESTS:
            for num_tokens in TOKENS:
                found: dict[str, list[float]] = {}
                for _ in range(repeat):
                    gc.collect()
                    gc.disable()  # a collection belongs to nobody's turn
                    for what, ms in case(num_tokens, num_requests):
                        found.setdefault(what, []).append(ms)
                    gc.enable()
                for what, times in found.items():
                    yield Row(what, num_tokens, num_requests, statistics.median(times), max(times))


def table(rows: list[Row]) -> str:
    columns = [(tokens, requests) for requests in REQUESTS for tokens in TOKENS]
    lines = [
        f"{'median ms; tokens x requests':34s}"
        + "".join(f"{f'{tokens // 1000}k x {requests}':>12s}" for tokens, requests in columns)
    ]
    for what in dict.fromkeys(row.what for row in rows):
        found = {(row.num_tokens, row.num_requests): row.ms for row in rows if row.what == what}
        lines.append(
            f"{what:34s}" + "".join(f"{found[c]:12.3f}" if c in found else f"{'':>12s}" for c in columns)
        )
    return "\n".join(lines)


def main() -> None:
    args = flags(
        __doc__,
        only=("", "cases whose name contains this"),
        repeat=(3, "runs of each case"),
    ).parse_args()
    rows = list(measure(args.only, args.repeat))
    print(table(rows))
    write(args.json, [row._asdict() for row in rows])


if __name__ == "__main__":
    main()
