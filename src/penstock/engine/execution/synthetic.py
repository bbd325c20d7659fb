"""A verifier that keeps drafts by chance. For `penstock bench drafts` alone: what it writes is no answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.engine.execution.batch import DraftedInputs
from penstock.engine.execution.sampler import Sampler


class SyntheticSampler(Sampler):
    """Keeps each draft behind kept ones with the probability `share`, whatever the model says. It does the
    work of a sampler, and a little more."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.share = 0.0
        self._chance = torch.Generator(device=self.pending.device).manual_seed(0)

    def _keep(
        self, drafting: DraftedInputs, rows: Tensor, chosen: Tensor, counts_tokens: bool
    ) -> tuple[Tensor, Tensor]:
        places = torch.arange(len(rows), device=rows.device)
        drafts = drafting.tokens[(places + 1).clamp(max=len(drafting.tokens) - 1)].long().clamp(min=0)
        is_kept = torch.rand(len(rows), generator=self._chance, device=rows.device) < self.share
        # a token beside the draft is not the draft
        chosen = torch.where(is_kept, drafts, (drafts + 1) % self._counts.shape[1])
        return super()._keep(drafting, rows, chosen, counts_tokens)
