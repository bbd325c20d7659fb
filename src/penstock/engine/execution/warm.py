"""Steps of every kind, captured, run and measured before the first request. Owns the list of kinds; the
results are discarded.

Libraries compile, plan, load and allocate at first use, some of them per thread: cuBLAS its workspace, cuDNN
its plans. So the thread that will launch all steps launches these, too.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.contract import Adapter, Chunk, Echo, Request, SamplingParams, Start, StepPlan
from penstock.engine.execution.batch import DEEP_TOKENS, Shape
from penstock.engine.execution.executor import Executor
from penstock.engine.execution.running_step import RunningStep
from penstock.speculation.length import StepCosts

BLANK = Adapter("blank", "")  # for steps that run with an adapter
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
_EVERYTHING = SamplingParams(
    max_tokens=1,
    temperature=0.7,
    top_p=0.9,
    top_k=50,
    min_p=0.05,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    seed=1,
    logprobs=20,
)
_SAMPLINGS = (
    SamplingParams(max_tokens=1, temperature=0.8, seed=1),
    SamplingParams(max_tokens=1, temperature=0.8, seed=1, top_p=0.9, top_k=40, min_p=0.05),
    SamplingParams(max_tokens=1, temperature=0.0, presence_penalty=0.5, repetition_penalty=1.1),
    SamplingParams(max_tokens=1, temperature=0.8, seed=1, logit_bias=((1, 1.0),)),
    SamplingParams(max_tokens=1, temperature=0.0, logprobs=0),
    SamplingParams(max_tokens=1, temperature=0.0, logprobs=5),
    _EVERYTHING,
)
_TIMED_STEPS = 8
_MEASURED_S = 0.5  # total time of measured steps after which no larger size is measured
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)  # sort and selection kernels depend on the number of rows


Report = Callable[[str, int, int], None]


def capture_all(executor: Executor, progress: Report) -> None:
    """Capture every bucket now, so that no request waits for it; the largest first, so that the others reuse
    its memory."""
    buckets = executor.target.replays.buckets
    for done, bucket in enumerate(reversed(buckets)):
        progress("capturing steps", done, len(buckets))
        for one in executor.passes:
            one.capture(bucket)
    progress("capturing steps", len(buckets), len(buckets))


def run_all(executor: Executor, slot: int, max_tokens: int, progress: Report) -> None:
    """Run one step of every kind over `slot`, which the caller holds. Blocks; call it on the thread that will
    launch steps."""
    limits, on_cuda = executor.limits, executor.target.model.device.type == "cuda"
    sizes = Sizes(limits.max_batch, limits.prefill_chunk, max_tokens)
    for attention in dict.fromkeys(attention for one in executor.passes for attention in one.attentions):
        attention.warm(sizes.prefill_chunk, max_tokens, progress)
    kinds = all_kinds(sizes, executor.target.replays.buckets) if on_cuda else few_kinds(sizes)
    drafted = list[StepPlan]()
    if limits.num_ahead:
        drafted = drafted_plans(sizes, slot, limits.block_tokens, limits.num_ahead, on_cuda)
    num = len(kinds) + len(drafted)
    for done, plan in enumerate((*plans(kinds, slot, limits.block_tokens), *drafted)):
        progress("warming up", done, num)
        _wait_step(executor.launch(plan))
    progress("warming up", num, num)


def measured_costs(executor: Executor, slot: int, costs: StepCosts) -> StepCosts:
    """Measure decode steps of `costs.sizes` rows on this machine, and the drafting after them. Blocks for
    some seconds; if steps are slow, the largest sizes are skipped. Call it after `run_all`."""
    limits, seconds = executor.limits, list[float]()
    for size in costs.sizes:
        if sum(seconds) > _MEASURED_S:
            break
        plan = verify_plan(size, slot, limits.block_tokens, limits.max_request_drafts)
        seconds.append(step_s(executor, plan))
    # Noise only adds time, and fewer rows never take more: one slow step does not make all larger ones slow.
    seconds = list(itertools.accumulate(reversed(seconds), min))[::-1]
    measured = replace(costs, sizes=costs.sizes[: len(seconds)], seconds=tuple(seconds))
    counts = 1, min(limits.max_batch, measured.sizes[-1])
    plain, making = (
        [step_s(executor, decode_plan(num, slot, limits.block_tokens, num_ahead), is_alone) for num in counts]
        for num_ahead, is_alone in ((0, False), (limits.num_ahead, not limits.num_ahead))
    )
    few_s, many_s = (max(0.0, other - one) for one, other in zip(plain, making, strict=True))
    row_s = max(0.0, many_s - few_s) / max(1, counts[1] - counts[0])
    return replace(measured, making_s=few_s, making_row_s=row_s)


def step_s(executor: Executor, plan: StepPlan, is_alone: bool = False) -> float:
    """Time of such a step in a pipeline, where each is launched while the one before runs. A slow step, or
    one that `is_alone`, is launched after the one before was read."""
    alone_s = list[float]()
    while len(alone_s) < 2 and min(alone_s, default=1.0) > _MEASURED_S / 4:  # a second try if it was slow
        started_s = time.perf_counter()
        _wait_step(executor.launch(plan))
        ended_s = time.perf_counter()
        alone_s.append(ended_s - started_s)
        plan = replace(plan, starts=())  # rows are set up already
    if min(alone_s) > _MEASURED_S / 4:
        return min(alone_s)
    running, times = None if is_alone else executor.launch(plan), list[float]()
    while len(times) < _TIMED_STEPS and sum(times) < _MEASURED_S / 4:
        launched = executor.launch(plan)
        _wait_step(running or launched)
        running = None if is_alone else launched
        times.append(time.perf_counter() - ended_s)
        ended_s += times[-1]
    if running is not None:
        _wait_step(running)
    # Other processes add to most of the times, and the one after a late reading is too short.
    return sorted(times)[len(times) // 4]


def _wait_step(step: RunningStep) -> None:
    if (error := step.wait_error()) is not None:
        raise error


class Work(NamedTuple):
    """One chunk of a step: `num_tokens` after `prefix` others."""

    num_tokens: int
    prefix: int = 0


class StepKind(NamedTuple):
    """The shape and options of one step."""

    chunks: tuple[Work, ...]
    sampling: SamplingParams = _GREEDY
    adapter: Adapter | None = None
    output: tuple[int, ...] = ()  # generated before a retraction


class Sizes(NamedTuple):
    """Limits of the largest steps."""

    max_batch: int
    prefill_chunk: int
    max_tokens: int  # of one sequence


def _decodes(num: int) -> tuple[Work, ...]:
    return (Work(1, 1),) * num


def few_kinds(sizes: Sizes) -> list[StepKind]:
    """For a CPU, where nothing is compiled: libraries start their threads and allocate memory."""
    short = min(16, sizes.prefill_chunk)
    return [StepKind((Work(short),)), StepKind(_decodes(1)), StepKind(_decodes(1), _EVERYTHING)]


def all_kinds(sizes: Sizes, buckets: Sequence[Shape]) -> list[StepKind]:
    """For a GPU: every replay, every way to sample, every option, prompts of all lengths, alone and beside
    decodes."""
    most, chunk = sizes.max_batch, sizes.prefill_chunk
    kinds = [_filling(bucket) for bucket in buckets if not bucket.has_drafts]
    batches = [num for num in _BATCHES if num < most] + [most]
    kinds += [StepKind(_decodes(num), sampling) for num in batches for sampling in _SAMPLINGS]
    kinds += [StepKind(_decodes(1), _EVERYTHING, output=(1, 2, 1)), StepKind((Work(100),), _EVERYTHING)]
    echoes = [
        SamplingParams(max_tokens=1, temperature=0.0, logprobs=num, prompt_logprobs=num)
        for num in (0, 2, 5, 20)
    ]
    kinds += [StepKind((Work(300),), echo) for echo in echoes]
    # Steps that always run eagerly, of many lengths: matrix products use other kernels for few rows.
    lengths = (8, 24, 48, 100, 200, 500, 700, 1000, 1500, 2000)
    kinds += [StepKind((Work(num),), echoes[1]) for num in lengths]
    kinds += [StepKind((Work(num),), adapter=BLANK) for num in lengths]
    lone = [*range(1024, chunk, 1024), chunk]
    kinds += [StepKind((Work(num - odd),)) for num in lone for odd in (0, 7)]
    kinds += [StepKind((Work(num, prefix),)) for num in (300, 3000, chunk) for prefix in (chunk, 2 * chunk)]
    beside = ((Work(300),), (Work(3000),), (Work(600),) * 2)
    kinds += [StepKind((*_decodes(num), *others)) for num in (1, 7, min(40, most - 3)) for others in beside]
    kinds += [StepKind((*(Work(1, chunk),) * 7, Work(300, chunk)))]
    kinds += [StepKind((*_decodes(most - 1), Work(chunk - 1)), _EVERYTHING)]
    kinds += [StepKind(work, adapter=BLANK) for work in (*map(_decodes, batches), (Work(chunk),))]
    return [kind for kind in kinds if _fits(kind, sizes)]


def _filling(bucket: Shape) -> StepKind:
    """A step that fills the bucket, with one prompt if it has prompts."""
    decodes = (Work(1, DEEP_TOKENS if bucket.deep else 1),) * bucket.num_decodes
    return StepKind(decodes if bucket.is_decode else (*decodes, Work(bucket.num_tokens - bucket.num_decodes)))


def _fits(kind: StepKind, sizes: Sizes) -> bool:
    tokens = sum(work.num_tokens for work in kind.chunks if work.num_tokens > 1)
    longest = max(work.num_tokens + work.prefix for work in kind.chunks)
    return (
        len(kind.chunks) <= sizes.max_batch and tokens <= sizes.prefill_chunk and longest <= sizes.max_tokens
    )


def verify_plan(num_rows: int, slot: int, block_tokens: int, most_drafts: int) -> StepPlan:
    """A step that verifies `num_rows` rows, with at most `most_drafts` drafts per request."""
    chunks = []
    for row, first in enumerate(range(0, num_rows, 1 + most_drafts)):
        num = min(1 + most_drafts, num_rows - first)
        slots = np.full(-(-(num + 1) // block_tokens), slot, np.int32)
        chunks.append(Chunk(f"warm-up {row}", row, 1, (0,) * num, slots, writes=True, num_logits=num))
    starts = tuple(Start.of(chunk.row, Request(chunk.request_id, [0, 0], _GREEDY)) for chunk in chunks)
    return StepPlan(0, tuple(chunks), len(chunks), starts)


def decode_plan(num_requests: int, slot: int, block_tokens: int, num_ahead: int, start: int = 1) -> StepPlan:
    """A step that decodes one token of each request, after which `num_ahead` drafts are made. If it starts
    after token 1, it follows unverified drafts."""
    requests = [Request(f"warm-up {row}", [0] * (start + 1), _GREEDY) for row in range(num_requests)]
    slots = np.full(-(-(start + 1 + num_ahead) // block_tokens), slot, np.int32)
    chunks = tuple(
        Chunk(one.id, row, start, (0,), slots, True, 1, num_unsure=start - 1, room=num_ahead)
        for row, one in enumerate(requests)
    )
    starts = tuple(Start.of(row, one) for row, one in enumerate(requests))
    return StepPlan(0, chunks, num_requests, starts, num_ahead=num_ahead)


def drafted_plans(
    sizes: Sizes, slot: int, block_tokens: int, num_ahead: int, compiles: bool
) -> list[StepPlan]:
    """Steps after which drafts are made, the last of them after unverified drafts."""
    batches = sorted({1, min(4, sizes.max_batch), sizes.max_batch}) if compiles else [1]
    kinds = [(num, 1) for num in batches] + [(1, 1 + num_ahead)]
    return [
        decode_plan(num, slot, block_tokens, num_ahead, start)
        for num, start in kinds
        if start + 1 + num_ahead <= sizes.max_tokens
    ]


def plans(kinds: Sequence[StepKind], slot: int, block_tokens: int) -> Iterator[StepPlan]:
    """Steps of these kinds. All their tables repeat one slot, whose content is never used."""
    for number, kind in enumerate(kinds):
        starts, chunks = [], []
        for row, work in enumerate(kind.chunks):
            length = work.prefix + work.num_tokens
            request = Request(f"warm-up {row}", [0] * (length + 1), kind.sampling, adapter=kind.adapter)
            starts.append(Start.of(row, request, kind.output))
            slots = np.full(-(-length // block_tokens), slot, np.int32)
            tokens, num_top = (0,) * work.num_tokens, kind.sampling.prompt_logprobs
            echo = None if num_top is None else Echo(tokens, num_top)
            chunks.append(
                Chunk(
                    request.id,
                    row,
                    work.prefix,
                    tokens,
                    slots,
                    writes=True,
                    num_logits=1,
                    adapter=kind.adapter,
                    echo=echo,
                )
            )
        yield StepPlan(
            number, tuple(chunks), sum(work.num_tokens == 1 for work in kind.chunks), tuple(starts)
        )
