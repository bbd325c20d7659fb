"""Rejection sampling of drafts, for requests that give no seed. Owns the distributions that drafts were drawn
from.

A draft x that was drawn from q is kept with probability min(1, p(x) / q(x)), where p is what the target draws
from. If it is not kept, the token in its place is drawn from what p has more than q. So tokens have the
distribution p, and no other rule keeps more drafts. A draft that the host proposed has q(x) = 1.

The three draws of a position are independent: that of a draft, that which keeps it, and the target's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.execution.batch import DraftedInputs
from penstock.engine.execution.draws import RowDraws
from penstock.engine.execution.sampler import SamplePlan, Sampler, uniform_of
from penstock.engine.execution.staging import Uploads

_OF_DRAFTS = 0x2545F491  # the second word of a key differs so much from that of the target's draw


class FreeDraws(RowDraws):
    """Draws of drafts that are independent of the target's, where a request gives no seed."""

    def __init__(self, num_rows: int, vocab: int, uploads: Uploads, most: int, draft_vocab: int) -> None:
        """`most`: drafts of a request. `draft_vocab`: tokens that they are drawn from."""
        super().__init__(num_rows, vocab, uploads)
        device = uploads.device
        self._free = torch.zeros(num_rows, dtype=torch.bool, device=device)
        # by the position of the token before it
        self._shares = torch.zeros((num_rows, most, draft_vocab), dtype=torch.float32, device=device)
        self._target_ids: Tensor | None = None

    def load(self, words: NDArray[np.int32]) -> None:
        super().load(words)
        self._free.copy_(self._uploads.send(words[6]) > 0)

    def _keys(self, keys: Tensor, rows: Tensor) -> Tensor:
        own = torch.stack([keys[0], keys[1] ^ _OF_DRAFTS])
        return torch.where(self._free[rows.long()], own, keys)

    def _drawn_from(self, scores: Tensor, target_ids: Tensor | None, rows: Tensor, positions: Tensor) -> None:
        self._target_ids = target_ids
        places = positions.long() % self._shares.shape[1]
        into = self._shares[:, :, : scores.shape[1]]  # a draft model may have fewer tokens
        into.index_put_((rows.long(), places), scores.softmax(dim=-1))

    def shares(self, rows: Tensor, positions: Tensor, vocab: int) -> Tensor:
        """[S, vocab]: what the draft after each of these tokens was drawn from."""
        found = self._shares[rows.long(), positions.long() % self._shares.shape[1]]
        if self._target_ids is None:
            return torch.nn.functional.pad(found, (0, vocab - found.shape[1]))
        return found.new_zeros(len(found), vocab).index_copy_(1, self._target_ids, found)


class RejectionSampler(Sampler):
    """Chooses as `Sampler`, but for rows with a draft after them whose request gave no seed."""

    def __init__(self, *given: Any, draws: FreeDraws | None = None) -> None:
        """`draws`: those of drafts that the device makes; None: the host proposes them."""
        super().__init__(*given)
        self.draws = draws

    def _choose(
        self,
        logits: Tensor,
        rows: Tensor,
        plan: SamplePlan,
        params: Tensor,
        drafting: DraftedInputs | None = None,
    ) -> Tensor:
        scored = self._scored(logits, rows, plan, params, drafting)
        chosen = scored.choice()
        if drafting is None or not drafting.num_drafts or plan.free is None or not plan.free.any():
            return chosen
        free = self._uploads.send(plan.free.astype(np.int32)) > 0
        group_of, places = drafting.group_of.long(), torch.arange(len(rows), device=rows.device)
        has_draft = free & (places - drafting.starts[group_of] < drafting.lengths[group_of])
        # samples have the places of rows, and a draft is the next token
        drafts = drafting.tokens[(places + 1).clamp(max=len(drafting.tokens) - 1)].long().clamp(min=0)
        target = scored.probabilities()
        if self.draws is None:
            drawn = torch.zeros_like(target).scatter_(1, drafts[:, None], 1.0)
        else:
            assert drafting.positions is not None
            drawn = self.draws.shares(rows, drafting.positions, target.shape[1])
        is_kept, rest = verified(target, drawn, drafts, uniform_of(self._keys(params, rows, drafting)))
        other = (rest.log() + scored.noise).argmax(dim=-1)
        return torch.where(has_draft, torch.where(is_kept, drafts, other), chosen)


def verified(target: Tensor, drawn: Tensor, drafts: Tensor, chance: Tensor) -> tuple[Tensor, Tensor]:
    """Which of `drafts` [S] are kept by `chance` [S], uniform in (0, 1]; and the shares [S, vocab], not
    normalised, from which the token is drawn where a draft is not kept. `target` and `drawn` [S, vocab]: p
    and q."""
    p, q = (shares.gather(1, drafts[:, None])[:, 0] for shares in (target, drawn))
    rest = (target - drawn).clamp(min=0.0)
    # without a rest p and q are equal but for rounding
    return chance * q < p, torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, target)
