"""Steps captured once per shape and replayed. Owns the input buffer that all of them read, and the choice of
shape."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.contract import StepPlan
from penstock.engine.execution.batch import DEEP_TOKENS, Packer, Shape
from penstock.engine.execution.forward import Flow, Forward
from penstock.errors import InvariantBroken
from penstock.lanes.lane import Lane, Op, Replay

# most decodes with a separate replay for long sequences: more of them keep every multiprocessor busy anyway
MOST_DEEP = 16
# Most prompt tokens over a long sequence for which a replay is fastest: for more, fused attention over pieces
# of the prefix is worth its launches in every layer.
MOST_DEEP_PROMPT = 1024
_BESIDE = (8, 32, 128)  # decodes beside prompts
# prompt lengths over a long sequence; lengths in between would keep fewer programs busy
_DEEP_LENGTHS = (64, 128, 256, 512, MOST_DEEP_PROMPT)
_DEEP_BESIDE = 32  # most decodes beside one prompt with a separate replay for long sequences
PROMPTS_BESIDE = 8  # prompt chunks beside decodes in other replays
_START_OF = attrgetter("start")


class Captured(NamedTuple):
    """A replay and the flow that holds its logits."""

    replay: Replay
    flow: Flow
    addresses: tuple[int, ...]  # of memory that it uses outside its own


def cuda_buckets(max_batch: int, prefill_chunk: int) -> tuple[Shape, ...]:
    """Shapes worth a graph: decodes, with dense sizes for small steps and sparse ones for large steps; and
    short prompts, alone or beside decodes, whose launches would take longer than their work."""
    decodes = decode_sizes(max_batch)
    deep = [Shape(size, size, size, deep=True) for size in decodes if 1 < size <= MOST_DEEP]
    lengths = [
        tokens
        for tokens in (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
        if tokens <= prefill_chunk
    ]
    lone = [Shape(tokens, 1, 1) for tokens in lengths]
    most = max_batch - 1  # beside a prompt
    beside = [*(size for size in _BESIDE if size < most), *([most] if most else [])]
    mixed = [_beside(size, tokens, PROMPTS_BESIDE) for size in beside for tokens in lengths if tokens >= 64]
    mixed += [
        _beside(size, tokens, 1, deep=True)
        for size in beside
        for tokens in _DEEP_LENGTHS
        if size <= _DEEP_BESIDE and tokens <= prefill_chunk
    ]
    return (*(Shape(size, size, size) for size in decodes), *deep, *lone, *mixed)


def _beside(num_decodes: int, num_tokens: int, num_prompts: int, deep: bool = False) -> Shape:
    """Prompts of `num_tokens` in all, beside decodes."""
    num_chunks = num_decodes + num_prompts
    return Shape(num_decodes + num_tokens, num_chunks, num_chunks, deep, num_decodes)


def decode_sizes(max_rows: int) -> tuple[int, ...]:
    """Numbers of decoded rows that have a graph."""
    sizes = [
        1,
        2,
        4,
        8,
        16,
        20,
        24,
        28,
        32,
        40,
        48,
        56,
        64,
        80,
        96,
        112,
        128,
        160,
        192,
        224,
        256,
        *range(320, max_rows + 64, 64),
    ]
    return (*(size for size in sizes if size < max_rows), max_rows)


def _in_order(shape: Shape) -> tuple[bool, int, int, bool]:
    """Smallest first, but deep shapes with prompts beside decodes before all others."""
    return not (shape.deep and shape.num_beside), shape.num_tokens, shape.num_chunks, not shape.deep


class CapturedPass(NamedTuple):
    """Captured work after a captured step, such as its sampling, and the tensors that hold its inputs and
    results."""

    replay: Replay
    tensors: tuple[Tensor, ...]


class Replays:
    """One captured step per shape. Replays follow each other on one lane, so one input buffer serves them
    all."""

    def __init__(
        self,
        lane: Lane,
        forward: Forward,
        packer: Packer,
        inputs: Tensor,
        buckets: Sequence[Shape],
        others: Callable[[], tuple[Tensor, ...]],
    ) -> None:
        """`others`: the current tensors that a captured step uses besides its inputs and its own memory."""
        self._lane = lane
        self._forward = forward
        self._others = others
        self.packer = packer
        self._captured: dict[Shape, Captured] = {}
        self._passes: dict[tuple[Shape, Hashable], CapturedPass] = {}
        self.inputs = inputs
        self.buckets = tuple(sorted(buckets, key=_in_order))
        self._sees_drafts = any(shape.has_drafts for shape in buckets)
        # successive steps have few different sizes
        self._smallest = functools.lru_cache(maxsize=4096)(self._find)

    def bucket_for(self, plan: StepPlan) -> Shape | None:
        """The smallest shape that holds the step; None if it has to run eagerly."""
        if plan.echoes:
            return None  # needs the logits of every position, which a replay does not compute
        num_prompts = len(plan.chunks) - plan.num_decodes
        num_decodes = plan.num_rows - num_prompts
        num_tokens = plan.num_tokens - num_decodes
        is_deep = False
        if max(map(_START_OF, plan.chunks)) + plan.num_tokens > DEEP_TOKENS:  # otherwise no chunk is deep
            is_deep = (
                max(c.kv_len - c.num_left_out * self.packer.block_tokens for c in plan.chunks) > DEEP_TOKENS
            )
        has_drafts = self._sees_drafts and plan.num_rows > len(plan.chunks)
        return self._smallest(num_decodes, num_prompts, num_tokens, is_deep, has_drafts)

    def _find(
        self, num_decodes: int, num_prompts: int, num_tokens: int, is_deep: bool, has_drafts: bool
    ) -> Shape | None:
        if is_deep and num_tokens > MOST_DEEP_PROMPT:
            return None
        is_alone = num_prompts == 1 and num_decodes == 0
        for shape in self.buckets:
            if (
                shape.is_decode != (num_prompts == 0)
                or shape.deep > is_deep
                or shape.has_drafts != has_drafts
                or (shape.num_decodes == 0) != is_alone
            ):
                continue
            num_others = shape.num_chunks - shape.num_decodes, shape.num_tokens - shape.num_decodes
            if (
                shape.num_decodes >= num_decodes
                and num_others[0] >= num_prompts
                and num_others[1] >= num_tokens
            ):
                return shape
        return None

    def get(self, bucket: Shape) -> Captured:
        """The captured step, captured now if needed. A replay uses the addresses of its capture: if the
        tensors were replaced, it would read stale memory."""
        captured = self._captured.get(bucket)
        if captured is None:
            captured = self._captured[bucket] = self._capture(bucket)
        elif captured.addresses != self._addresses():
            raise InvariantBroken(
                f"the step of {bucket.num_tokens} x {bucket.num_chunks} was captured over tensors since "
                "replaced"
            )
        return captured

    def get_pass(
        self,
        bucket: Shape,
        kind: Hashable,
        room: Callable[[int], tuple[Tensor, ...]],
        run: Callable[[Flow, tuple[Tensor, ...]], None],
    ) -> CapturedPass:
        """`run` after the captured step of `bucket`, captured now if needed; `kind` distinguishes several of
        them. `room` makes its tensors for so many tokens."""
        found = self._passes.get((bucket, kind))
        if found is None:
            flow, tensors = self.get(bucket).flow, self._made(partial(room, bucket.num_tokens))
            name = f"{kind} after {bucket.label}"
            replay = self.whole(name, [("pass", lambda: run(flow, tensors))])
            found = self._passes[bucket, kind] = CapturedPass(replay, tensors)
        return found

    def _made(self, room: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """On the lane: a GPU's lane does not wait for other streams."""
        if self.inputs.device.type != "cuda":
            return room()
        made = list[Tensor]()
        self._lane.submit(lambda: made.extend(room()), label="padding").wait_done()
        return tuple(made)

    def _addresses(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in (self.inputs, *self._others()))

    def _capture(self, bucket: Shape) -> Captured:
        host = np.empty(bucket.fixed_ints + self.packer.num_padding, np.int32)
        packed = self.packer.pack((), 0, bucket, host)
        max_kv_len = DEEP_TOKENS + 1 if bucket.deep else 0
        flow = Flow(packed.shape.views(self.inputs, bucket.num_decodes, max_q_len=0, max_kv_len=max_kv_len))
        if self.inputs.device.type == "cuda":
            ints = torch.from_numpy(packed.ints)
            self._lane.submit(lambda: self.inputs[: len(ints)].copy_(ints), label="padding").wait_done()
        ops = [(one.label, one.op) for one in self._forward.ops(flow, bucket.is_decode)]
        replay = self._forward.recorded(f"step {bucket.label}", ops, self)
        return Captured(replay, flow, self._addresses())

    @property
    def padding_row(self) -> int:
        return self.packer.padding_row

    def piece(self, name: str, ops: Sequence[tuple[str, Op]]) -> Replay:
        """A part of a step. On a GPU it runs once: the next part is recorded over what it leaves."""
        replay = self.whole(name, ops)
        if self.inputs.device.type == "cuda":
            self._lane.replay(replay).wait_done()
        return replay

    def whole(self, name: str, ops: Sequence[tuple[str, Op]]) -> Replay:
        """No op may run while a capture is open. Kernels that compile or choose a plan at first use are run
        once before it."""
        if self.inputs.device.type == "cuda":
            self._lane.drain()
            for label, op in ops:
                self._lane.submit(op, label=label).wait_done()
        with self._lane.capture(name) as capture:
            for label, op in ops:
                self._lane.submit(op, label=label)
        return capture.replay
