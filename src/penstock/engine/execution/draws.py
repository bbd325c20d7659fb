"""Sampling parameters of each request, by row, on the device. Owns what drafts need to be sampled as the
target will sample at the same position.

The noise of a draw is a function of seed, position and token. The target adds it to its scores and takes the
largest; a draft adds the same noise to its own scores. So the two mostly agree if their distributions do.
Only tokens that the target chose are accepted, so the answer is that of plain decoding. Drafts ignore
penalties and biases.
"""

from __future__ import annotations

import enum
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.execution.sampler import LEAST_NOISE, LEAST_TEMPERATURE, gumbel_noise
from penstock.engine.execution.staging import Uploads

_CANDIDATES = 256  # likeliest tokens that top-k and top-p look at; a cut below them is ignored
_STEP, _FIRST, _SECOND = (
    word - (1 << 64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


class DrawKind(enum.IntEnum):
    """How the drafts of a step are chosen."""

    LIKELIEST = 0  # all requests are greedy
    DRAWN = 1
    FILTERED = 2  # drawn, and some requests have a top-k or top-p


class Draws(Protocol):
    """How drafts are chosen."""

    def load(self, words: NDArray[np.int32]) -> None:
        """Load all rows from `Rows.draw_words`; an op of the lane."""

    def choose(
        self, logits: Tensor, target_ids: Tensor | None, rows: Tensor, positions: Tensor, choice: DrawKind
    ) -> Tensor:
        """int64 [G]: the column of `logits` [G, draft vocab] that is the draft of each request. `target_ids`
        [draft vocab]: the target's token of each column; None: they are equal. `positions` int32 [G]: of the
        tokens before the drafts."""


class RowDraws:
    """Temperature, filters and seed of the request in each row; all start as greedy."""

    def __init__(self, num_rows: int, vocab: int, uploads: Uploads) -> None:
        device = uploads.device
        # temperature, top-p, min-p
        self._floats = torch.zeros((3, num_rows), dtype=torch.float32, device=device)
        self._top_k = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._vocab, self._uploads = vocab, uploads

    def load(self, words: NDArray[np.int32]) -> None:
        sent = self._uploads.send(words.ravel()).view(words.shape)
        self._floats.copy_(sent[:3].to(torch.int32).view(torch.float32))
        self._top_k.copy_(sent[3])
        self._seeds.copy_((sent[4] & 0xFFFFFFFF) | (sent[5] << 32))

    def choose(
        self, logits: Tensor, target_ids: Tensor | None, rows: Tensor, positions: Tensor, choice: DrawKind
    ) -> Tensor:
        if choice is DrawKind.LIKELIEST:
            return logits.argmax(dim=-1)
        temperature, top_p, min_p = self._floats[:, rows.long(), None]
        is_random = temperature >= LEAST_TEMPERATURE
        scores = logits.float() / torch.where(is_random, temperature, 1.0)
        keys = self._keys(draw_keys(self._seeds[rows.long()], positions), rows)
        noise = gumbel_noise(keys, self._vocab).clamp(min=LEAST_NOISE)
        if target_ids is not None:
            noise = noise.index_select(1, target_ids)
        floor = scores.amax(dim=-1, keepdim=True) + torch.log(min_p)
        if choice is DrawKind.FILTERED:
            floor = torch.maximum(floor, _cut(scores, floor, self._top_k[rows.long(), None], top_p))
        left = torch.where(scores >= floor, scores, -torch.inf)
        self._drawn_from(left, target_ids, rows, positions)
        return (left + torch.where(is_random, noise, 0.0)).argmax(dim=-1)

    def _keys(self, keys: Tensor, rows: Tensor) -> Tensor:
        """The keys of drafts, by those of the target's draws [2, G]."""
        return keys

    def _drawn_from(self, scores: Tensor, target_ids: Tensor | None, rows: Tensor, positions: Tensor) -> None:
        """Drafts are drawn from the softmax of `scores` [G, draft vocab]."""


def _cut(scores: Tensor, floor: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[G, 1]: the least score that top-k and top-p keep, as in the sampler; minus infinity if it is not among
    the likeliest few hundred. Sorting the whole vocabulary for a draft would cost more than it gains."""
    ranked = scores.topk(min(_CANDIDATES, scores.shape[-1]), dim=-1).values
    num = ranked.shape[-1]
    place = torch.arange(num, device=scores.device)[None, :]
    keep = (ranked >= floor) & ((place < top_k) | (top_k == 0))
    among = torch.where(keep, ranked, -torch.inf)
    is_short = (top_k > 0) & (top_k <= num)
    total = torch.where(
        is_short,
        among.logsumexp(-1, True),
        torch.where(scores >= floor, scores, -torch.inf).logsumexp(-1, True),
    )
    shares = (among - total).exp()
    keep &= (shares.cumsum(dim=-1) - shares < top_p) | (place == 0)
    least = torch.where(keep, ranked, torch.inf).amin(dim=-1, keepdim=True)
    return torch.where(keep.all(dim=-1, keepdim=True), -torch.inf, least)


def draw_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """int32 [2, G]: as `sampler.draw_keys`, for unsigned seeds stored as int64."""
    x = seeds + (positions.long() + 1) * _STEP
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    x = x ^ _shifted(x, 31)
    return torch.stack([x.to(torch.int32), (x >> 32).to(torch.int32)])


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical shift right."""
    return (x >> by) & ((1 << (64 - by)) - 1)
