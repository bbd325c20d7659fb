"""The part of the target's vocabulary that a draft head covers. Owns the map from draft ids to target ids
(d2t) and its checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.errors import ModelError


class DraftVocab:
    """Draft id -> target id. A head without this map covers the whole vocabulary, with equal ids."""

    def __init__(self, target_ids: Tensor, vocab: int, where: str) -> None:
        """Raises ModelError if the map is not valid: otherwise wrong tokens would be proposed without
        notice."""
        if target_ids.dim() != 1 or target_ids.is_floating_point() or target_ids.dtype == torch.bool:
            raise ModelError(
                f"{where}: d2t must be a list of whole numbers, got {target_ids.dtype} of shape "
                f"{list(target_ids.shape)}"
            )
        ids = target_ids.to(torch.int64)
        if not 0 < len(ids) <= vocab:
            raise ModelError(f"{where}: d2t has {len(ids)} entries; the target has {vocab} tokens")
        outside = ids[(ids < 0) | (ids >= vocab)]
        if len(outside):
            raise ModelError(
                f"{where}: d2t names token {int(outside[0])}; the target's go from 0 to {vocab - 1}"
            )
        repeated = (torch.bincount(ids, minlength=vocab) > 1).nonzero()
        if len(repeated):
            raise ModelError(f"{where}: d2t names token {int(repeated[0])} more than once")
        self.target_ids = ids
        self.vocab = vocab

    @classmethod
    def of_offsets(cls, offsets: Tensor, vocab: int, where: str) -> DraftVocab:
        """From a checkpoint that stores an offset for each draft id, as EAGLE's do."""
        if offsets.dim() != 1:
            raise ModelError(f"{where}: d2t must be a list of whole numbers, got shape {list(offsets.shape)}")
        return cls(
            offsets + torch.arange(len(offsets), dtype=offsets.dtype, device=offsets.device), vocab, where
        )

    @classmethod
    def most_frequent(cls, counts: Tensor, size: int, always: Sequence[int] = ()) -> DraftVocab:
        """The `size` most frequent tokens, including those in `always`; ties by lower id."""
        ranked = counts.to(torch.int64).clone()
        ranked[list(always)] = int(ranked.max()) + 1
        ids = ranked.sort(descending=True, stable=True).indices[:size]
        return cls(ids.sort().values, len(counts), "token statistics")

    def __len__(self) -> int:
        return len(self.target_ids)

    def to(self, device: torch.device) -> DraftVocab:
        moved = object.__new__(DraftVocab)
        moved.target_ids, moved.vocab = self.target_ids.to(device), self.vocab
        return moved

    def coverage(self, counts: Tensor) -> float:
        """Share of the counted tokens that can be proposed."""
        total = int(counts.sum())
        return int(counts[self.target_ids].sum()) / total if total else 0.0
