"""Looking at the logits an engine samples from, and comparing them with a reference model's. Owns the
recording, not the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from penstock.engine.engine import Engine
from penstock.engine.execution.sampling import SamplePass
from tests.support.driving import Collected, pass_of


class Logits:
    """Keeps a copy of the logits behind every sampled token, by (row, position of the token before it)."""

    def __init__(self, engine: Engine, monkeypatch: Any) -> None:
        self.seen: dict[tuple[int, int], torch.Tensor] = {}
        sampling = pass_of(engine, SamplePass)

        def looking(op: Any) -> Any:
            def look(step: Any, *others: Any) -> None:
                flow, inputs = step.flow, step.flow.bound_inputs()
                kv_lens = dict(zip(inputs.rows.tolist(), inputs.kv_lens.tolist(), strict=True))
                for row, logits in zip(inputs.sample_rows.tolist(), flow.logits, strict=True):
                    self.seen[row, kv_lens[row] - 1] = logits.float().cpu()
                op(step, *others)

            return look

        for name in ("sample", "hand_on"):  # op by op, and after a replay
            monkeypatch.setattr(sampling, name, looking(getattr(sampling, name)))


def largest_error(
    reference: Any,
    logits: Logits,
    prompts: Sequence[list[int]],
    found: Sequence[Collected],
    *,
    same_tokens: bool = True,
) -> float:
    """Largest deviation from `reference` (a transformers model), relative to the largest logit, over every
    generated token of requests that were submitted together to an idle engine, so that the i-th has row i."""
    worst = 0.0
    for row, (prompt, collected) in enumerate(zip(prompts, found, strict=True)):
        assert collected.tokens, f"request {row} generated nothing: {collected.error}"
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt + collected.tokens])).logits[0].float()
        for at, token in enumerate(collected.tokens, start=len(prompt) - 1):
            ours = logits.seen[row, at]
            error = float((ours - expected[at]).abs().max() / expected[at].abs().max())
            # spoiled memory that was read is no number
            worst = max(worst, error if math.isfinite(error) else math.inf)
            assert not same_tokens or int(expected[at].argmax()) == token or worst > 1e-3, (
                f"request {row}: token {at} differs"
            )
    return worst
