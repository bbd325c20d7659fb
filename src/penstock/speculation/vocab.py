"""The part of the target's vocabulary that a draft head covers. Owns the map from draft ids to target ids
(d2t) and its checks."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from penstock.errors import ModelError


class DraftVocab:
    """Draft id -> target id. A head without this map covers the whole vocabulary, with equal ids."""

    def __init__(self, target_ids: Tensor, vocab: int, where: str, *, offsets: bool = False) -> None:
        """`offsets`: the map holds target id - draft id, as EAGLE's checkpoints do. Raises ModelError if it
        is not valid: otherwise wrong tokens would be proposed without notice."""
        form = f"{target_ids.dtype} of shape {list(target_ids.shape)}"
        is_whole = not target_ids.is_floating_point() and target_ids.dtype != torch.bool
        self._need(target_ids.dim() == 1 and is_whole, where, f" must be a list of whole numbers, got {form}")
        ids = target_ids.to(torch.int64)
        self._need(0 < len(ids) <= vocab, where, f" has {len(ids)} entries; the target has {vocab} tokens")
        if offsets:
            ids = ids + torch.arange(len(ids), device=ids.device)
        for outside in ids[(ids < 0) | (ids >= vocab)][:1].tolist():
            self._need(False, where, f" names token {outside}; the target's go from 0 to {vocab - 1}")
        for repeated in (torch.bincount(ids, minlength=vocab) > 1).nonzero()[:1, 0].tolist():
            self._need(False, where, f" names token {repeated} more than once")
        self.target_ids = ids

    @staticmethod
    def _need(is_so: bool, where: str, problem: str) -> None:
        if not is_so:
            raise ModelError(f"{where}: d2t{problem}")

    def __len__(self) -> int:
        return len(self.target_ids)

    def to(self, device: torch.device) -> DraftVocab:
        moved = copy.copy(self)
        moved.target_ids = self.target_ids.to(device)
        return moved


def read_vocab(
    d2t: Tensor | None, num: int, vocab: int, where: str, *, offsets: bool = False
) -> DraftVocab | None:
    """The map of a head that covers `num` tokens, 0 if all. Refuses a smaller vocabulary without its map: its
    ids would be taken as target ids, and nearly every draft would be rejected."""
    if (d2t is None) != (num == 0):
        raise ModelError(f"{where}: draft_vocab is {num}, and there is {'no' if d2t is None else 'a'} d2t")
    if d2t is None:
        return None
    made = DraftVocab(d2t, vocab, where, offsets=offsets)
    if len(made) != num:
        raise ModelError(f"{where}: d2t has {len(made)} entries, and draft_vocab is {num}")
    return made
