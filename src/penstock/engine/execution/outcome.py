"""A launched step and what can be read from it once it is over. Owns the host copies of its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from penstock.contract import Chunk, Fence, Load, LogprobPart, PromptLogprobs, Sampled, StepResult, TokenLogprob
from penstock.engine.execution.sampler import SampleOutput
from penstock.lanes.lane import Ticket
from penstock.models.lora import LoraRuns


@dataclass(slots=True)
class Outputs:
    """Host tensors filled by the step's last op; nobody else touches them before its fence has passed."""

    sampled: SampleOutput | None = None
    prompts: list[tuple[str, SampleOutput]] = field(default_factory=list)
    lora: LoraRuns | None = None  # only kept: the device may still read weights that everybody else has let go


@dataclass(frozen=True, slots=True)
class RunningStep:
    """A step on the compute lane."""

    number: int
    chunks: Sequence[Chunk]  # those with an entry in the sampled outputs, in order
    num_logprobs: Sequence[int]  # by chunk: alternatives wanted; -1: no logprobs
    outputs: Outputs
    last: Ticket
    fence: Fence
    loads: Sequence[Load] = ()  # what it waits for on the device

    def wait_result(self) -> StepResult:
        """Block until the step is over. A failure is part of the result, not raised."""
        try:
            self.fence.wait_passed()
            if (error := self.last.error()) is not None:
                return StepResult(self.number, (), error=error)
            parts: dict[str, list[LogprobPart]] = {}
            for request_id, output in self.outputs.prompts:
                parts.setdefault(request_id, []).append((len(output.tokens), partial(_rows, output)))
            prompts = {request_id: PromptLogprobs(some) for request_id, some in parts.items()}
            return StepResult(self.number, self._sampled(), prompts)
        except Exception as error:  # a device that failed says so here
            return StepResult(self.number, (), error=error)

    def _sampled(self) -> list[Sampled]:
        output = self.outputs.sampled
        if output is None:
            return []
        if output.logprobs is None:
            tokens = output.tokens.tolist()
            return [Sampled(c.request_id, (token,)) for c, token in zip(self.chunks, tokens, strict=False) if c.samples]
        found = zip(self.chunks, _rows(output), self.num_logprobs, strict=False)
        return [
            Sampled(c.request_id, (row.token,), None if num < 0 else (row._replace(top=row.top[:num]),))
            for c, row, num in found
            if c.samples
        ]


def _rows(output: SampleOutput) -> list[TokenLogprob]:
    assert output.logprobs is not None and output.ranks is not None
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(output.tokens)
    if output.top_ids is not None and output.top_logprobs is not None:
        pairs = zip(output.top_ids.tolist(), output.top_logprobs.tolist(), strict=True)
        tops = [tuple(zip(ids, values, strict=True)) for ids, values in pairs]
    return [TokenLogprob(*row) for row in zip(output.tokens.tolist(), output.logprobs.tolist(), output.ranks.tolist(), tops, strict=True)]
