"""A launched step and its result. Owns the host copies of its outputs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.contract import (
    Access,
    Chunk,
    Fence,
    Load,
    PartScores,
    Sampled,
    Scoring,
    StepFailure,
    StepResult,
    TokenLogprob,
    TokenScores,
)
from penstock.engine.execution.masks import GrammarEnd, StepMasks
from penstock.engine.execution.sampler import NO_TOKEN, SampleOutput, packed_width
from penstock.lanes.lane import Lane, Ticket
from penstock.models.lora import LoraRuns

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outputs:
    """Rows of packed words (`SampleOutput.packed`) in a host buffer, filled by the step's ops. Read them only
    after the step's fence has passed and before the buffer is reused."""

    lane: Lane
    buffer: Tensor  # int32
    access: Access  # the host's access when it reads
    # kept alive: the device may still read weights that are held nowhere else
    lora: LoraRuns | None = None
    sampled: Tensor | None = None  # [S, width], or [S]: tokens alone
    prompts: list[tuple[str, Tensor]] = field(default_factory=list)  # request and [tokens, width]
    # request, whether recall is wanted, [parts + 1]
    parts: list[tuple[str, bool, Tensor]] = field(default_factory=list)
    num_used: int = 0
    made: SampleOutput | None = None  # on the device, until drafts have been made from it
    drafts: Tensor | None = None  # [rows, 1 + most]: last tokens and drafts, where masks need them

    def room_for(self, num_rows: int, num_top: int) -> Tensor:
        """Room in the buffer for packed rows with `num_top` alternatives each: [num_rows, width], or
        [num_rows] for tokens alone."""
        width = packed_width(num_top)
        first, self.num_used = self.num_used, self.num_used + num_rows * width
        room = self.buffer[first : self.num_used]
        return room if width == 1 else room.view(num_rows, width)

    def room_for_drafts(self, num_rows: int, width: int) -> Tensor:
        first, self.num_used = self.num_used, self.num_used + num_rows * width
        self.drafts = self.buffer[first : self.num_used].view(num_rows, width)
        return self.drafts

    def room_for_parts(self, request_id: str, scoring: Scoring) -> Tensor:
        """Room for the requested scores, followed by the recall."""
        first, self.num_used = self.num_used, self.num_used + scoring.num_parts + 1
        room = self.buffer[first : self.num_used]
        self.parts.append((request_id, scoring.recall, room))
        return room


class LateSample(NamedTuple):
    """Sampling that waits for masks. Once they are filled, `submit` puts it on the lane and returns its last
    op and the fence after it."""

    masks: StepMasks
    submit: Callable[[], tuple[Ticket, Fence]]


@dataclass(frozen=True, slots=True)
class RunningStep:
    """A step on the compute lane."""

    number: int
    chunks: Sequence[Chunk]  # the chunk of each sampled entry; a chunk with drafts has several
    num_logprobs: Sequence[int]  # by entry: alternatives wanted; -1: no logprobs
    outputs: Outputs
    last: Ticket
    fence: Fence
    loads: Sequence[Load] = ()  # loads that it waits for on the device
    late: LateSample | None = None  # its sampling, if not on the lane yet
    # requests whose grammars allow no further token, known at sampling
    endings: Sequence[GrammarEnd] = ()
    # by request: tokens that it gets at most, since its grammar allows no further one
    most: Mapping[str, int] = field(default_factory=dict)

    @property
    def samples(self) -> bool:
        """True if a request gets a token from it."""
        return any(chunk.num_logits for chunk in self.chunks)

    def wait_result(self) -> StepResult:
        """Block until the step is over. A failure is logged and part of the result, not raised."""
        try:
            if (error := self.wait_error()) is None:
                return self._result()
        except Exception as failed:  # a device failure is raised here
            error = failed
        log.error("step %d failed", self.number, exc_info=error)
        return StepResult(self.number, (), error=StepFailure.of(error))

    def drafts(self) -> NDArray[np.int32] | None:
        """By row: its last token, and drafts made after it. After `wait_result`; None: no masks need them."""
        return None if self.outputs.drafts is None else self.outputs.drafts.numpy().copy()

    def wait_error(self) -> BaseException | None:
        """Block until the step is over; returns the error of a failed op, or None. Raises if the device
        itself failed."""
        self.fence.wait_passed()
        return self.last.error()

    def _result(self) -> StepResult:
        self.outputs.lane.touch((self.outputs.access,), label="read results")
        # A copy: the reader uses it later, on another thread, when the buffer may be in use again.
        prompts = ((request_id, _scores(room.numpy().copy())) for request_id, room in self.outputs.prompts)
        parts = (_part_scores(*one) for one in self.outputs.parts)
        return StepResult(self.number, tuple(self._sampled()), tuple(prompts), part_scores=tuple(parts))

    def _sampled(self) -> list[Sampled]:
        """In a replay every chunk has an entry, even if it wants none."""
        if self.outputs.sampled is None:
            return []
        output = self.outputs.sampled.numpy()
        if output.ndim > 1 or any(c.num_logits > 1 for c in self.chunks):
            return self._several_sampled(output)
        return [
            Sampled(c.request_id, (token,))
            for c, token in zip(self.chunks, output.tolist(), strict=False)
            if c.num_logits
        ]

    def _several_sampled(self, output: NDArray[np.int32]) -> list[Sampled]:
        """The accepted entries of each request, in order, with the requested logprobs."""
        found: dict[str, list[TokenLogprob]] = {}
        wanted = {
            c.request_id: num for c, num in zip(self.chunks, self.num_logprobs, strict=False) if c.num_logits
        }
        if output.ndim == 1:
            entries: Iterable[TokenLogprob] = (TokenLogprob(token, 0.0, 0, ()) for token in output.tolist())
        else:
            entries = _scores(output).entries()
        for c, entry in zip(self.chunks, entries, strict=False):
            if c.num_logits and entry.token != NO_TOKEN:
                found.setdefault(c.request_id, []).append(entry)
        sampled = []
        for request_id, every in found.items():
            num, some = wanted[request_id], every[: self.most.get(request_id, len(every))]
            logprobs = None if num < 0 else tuple(one._replace(top=one.top[:num]) for one in some)
            sampled.append(Sampled(request_id, tuple(one.token for one in some), logprobs))
        return sampled


def _part_scores(request_id: str, recall: bool, room: Tensor) -> PartScores:
    values = room.numpy().view(np.float32).copy()
    return PartScores(request_id, values[:-1], float(values[-1]) if recall else None)


def _scores(words: NDArray[np.int32]) -> TokenScores:
    """Packed rows, taken apart."""
    num_top = (words.shape[1] - packed_width(0)) // 2
    top_logprobs = words[:, 3 + num_top :].view(np.float32)
    return TokenScores(
        words[:, 0], words[:, 1].view(np.float32), words[:, 2], words[:, 3 : 3 + num_top], top_logprobs
    )
