"""Drafts that the device makes behind a step, for the next one. Owns the passes of a multi-token-prediction head over the paged KV.

The head's KV is one layer more of every block, behind the target's: it is saved, loaded and forgotten with them. The entry of a token is
stored at the place of the token before it, whose hidden state it takes.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from penstock.engine.execution.attention import Attention
from penstock.engine.execution.batch import StepInputs
from penstock.engine.execution.forward import Flow
from penstock.speculation.mtp import MtpHead


class _HeadKv:
    """Implements `PagedKv`: the head's only layer is the last of the arena's."""

    def __init__(self, attention: Attention, inputs: StepInputs) -> None:
        self._attention, self._inputs = attention, inputs
        self._layer = attention.arena.shape[1] - 1

    def rotate_and_write(self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return self._attention.rotate_and_write(self._layer, qkv, q_norm, k_norm, self._inputs)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attention.attend(self._layer, q, k, v, self._inputs)


class HeadPasses:
    """Leaves drafts in `pending` [rows, 1 + most], behind each request's last token."""

    def __init__(self, head: MtpHead, attention: Attention, pending: Tensor, padding_slot: int) -> None:
        self._head = head
        self._attention = attention
        self._pending = pending
        self._block_tokens = attention.arena.shape[3]
        self._padding_at = padding_slot * self._block_tokens
        self._last_position = head.dims.max_position - 1

    def run(self, flow: Flow, nexts: Tensor, lasts: Tensor, rows: Tensor, num_drafts: int) -> None:
        """`nexts` [T] are the tokens behind those of the step, as far as they are known by now; `lasts` int64 [G] the places in the step of
        the last token that each request has kept, and `rows` [G] whose they are."""
        assert flow.hidden is not None and flow.residual is not None
        inputs = flow.bound_inputs()
        hidden = flow.hidden.sum(dim=0) if flow.hidden.dim() == 3 else flow.hidden
        state = flow.residual + hidden.to(flow.residual.dtype)
        if num_drafts == 0 or len(lasts) == 0:  # a prompt is under way, or drafts are not worth it
            self._head.step(state, nexts, _HeadKv(self._attention, inputs), lasts[:0])
            return
        guess = self._head.step(state, nexts, _HeadKv(self._attention, inputs), lasts)
        place = self._ahead(inputs, lasts, rows)
        for number in range(1, num_drafts + 1):
            drafts = self._head.target_ids(guess.logits.argmax(dim=-1)).to(torch.int32)
            self._pending[:, number].index_copy_(0, rows.long(), drafts)
            if number < num_drafts:
                place = self._moved(place, drafts)
                guess = self._head.step(guess.hidden, drafts, _HeadKv(self._attention, place))

    def _ahead(self, inputs: StepInputs, lasts: Tensor, rows: Tensor) -> StepInputs:
        """One row for each request, at the last token that it has kept."""
        num = len(lasts)
        if inputs.num_decodes == len(inputs.tokens):
            of_token, behind = lasts, torch.zeros_like(lasts)
        else:
            of_token = torch.searchsorted(inputs.q_starts[1:], lasts.to(torch.int32), right=True)
            behind = inputs.q_starts[of_token + 1] - 1 - lasts  # tokens of its chunk that come later
        return StepInputs(
            tokens=inputs.tokens[lasts],
            positions=inputs.positions[lasts],
            write_at=inputs.write_at[lasts],
            q_starts=torch.arange(num + 1, dtype=torch.int32, device=lasts.device),
            kv_lens=(inputs.kv_lens[of_token] - behind).to(torch.int32),
            table_starts=inputs.table_starts[of_token],
            tables=inputs.tables,
            rows=rows,
            sample_at=rows[:0],
            sample_rows=rows[:0],
            num_decodes=num,
            max_q_len=1,
            max_kv_len=inputs.max_kv_len,
        )

    def _moved(self, place: StepInputs, drafts: Tensor) -> StepInputs:
        """One token further. A draft whose place would be in another block, which its request may not have, leaves no KV."""
        size = self._block_tokens
        fits = place.kv_lens % size != 0
        return dataclasses.replace(
            place,
            tokens=drafts,
            positions=(place.positions + 1).clamp(max=self._last_position),
            write_at=torch.where(fits, place.write_at + 1, self._padding_at).to(torch.int32),
            kv_lens=place.kv_lens + fits.to(torch.int32),
        )
