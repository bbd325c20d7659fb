"""The reference agrees with attention over plain contiguous tensors, and refuses what does not fit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.errors import InvariantBroken
from tests.support.ragged import RaggedStep, Span, leave_out, ragged_config, ragged_step, rope_table
from tests.support.reference_attention import ReferenceAttention

SPANS = (Span(37, 1), Span(0, 1), Span(31, 1, writes=False), Span(0, 19), Span(16, 16), Span(5, 30))


def dense(step: RaggedStep, layer: int, q: Tensor) -> Tensor:
    """Attention by one softmax over a full score matrix per chunk, from KV collected token by token out of
    the arena."""
    size, out, begin = step.arena.shape[3], [], 0
    for chunk, span in enumerate(step.spans):
        table = step.inputs.tables[int(step.inputs.table_starts[chunk]) :].tolist()
        kv = torch.stack(
            [step.arena[table[p // size], layer, :, p % size] for p in range(span.kv_len)]
        ).double()
        keys, values = (
            kv[:, i].repeat_interleave(q.shape[1] // kv.shape[2], dim=1).transpose(0, 1) for i in range(2)
        )
        queries = q[begin : begin + span.q_len].double().transpose(0, 1)
        seen = torch.ones(span.q_len, span.kv_len).tril(span.prefix_len).bool()
        scores = (queries @ keys.transpose(1, 2) / queries.shape[-1] ** 0.5).masked_fill(~seen, float("-inf"))
        out.append((scores.softmax(-1) @ values).transpose(0, 1).flatten(1))
        begin += span.q_len
    return torch.cat(out).float()


@pytest.mark.parametrize("block_tokens", [8, 16])
def test_the_reference_agrees_with_a_dense_softmax(block_tokens: int) -> None:
    step = ragged_step(ragged_config(), SPANS, block_tokens=block_tokens, shared_blocks=1, seed=1)
    attention = ReferenceAttention(step.arena, step.config, step.rope)
    for layer in range(step.config.num_layers):
        q, k, v = attention.rotate_and_write(layer, step.qkv(layer), None, None, step.inputs)
        torch.testing.assert_close(
            attention.attend(layer, q, k, v, step.inputs), dense(step, layer, q), rtol=1e-5, atol=1e-5
        )


def test_rotation_turns_pairs_of_half_the_head_apart() -> None:
    config = ragged_config(num_heads=1, num_kv_heads=1, head_dim=4, num_layers=1)
    step = ragged_step(config, [Span(3, 1)], seed=3)
    qkv = torch.arange(1.0, 13.0).view(1, 12)
    q, k, v = ReferenceAttention(step.arena, config, step.rope).rotate_and_write(
        0, qkv, None, None, step.inputs
    )
    angles = torch.tensor([3.0, 3.0 / 100.0])
    turned = torch.polar(torch.ones(2), angles) * torch.complex(
        torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    )
    torch.testing.assert_close(q.flatten(), torch.cat([turned.real, turned.imag]))
    turned = torch.polar(torch.ones(2), angles) * torch.complex(
        torch.tensor([5.0, 6.0]), torch.tensor([7.0, 8.0])
    )
    torch.testing.assert_close(k.flatten(), torch.cat([turned.real, turned.imag]))
    assert v.flatten().tolist() == [9.0, 10.0, 11.0, 12.0]


def test_dimensions_that_do_not_fit_are_refused_at_construction() -> None:
    step = ragged_step(ragged_config(), [Span(0, 1)])
    with pytest.raises(InvariantBroken, match="arena"):
        ReferenceAttention(step.arena[:, :1], step.config, step.rope)
    with pytest.raises(InvariantBroken, match="arena"):
        ReferenceAttention(step.arena.flatten(4), step.config, step.rope)
    with pytest.raises(InvariantBroken, match="rope"):
        ReferenceAttention(step.arena, step.config, step.rope[:, 1:])
    with pytest.raises(InvariantBroken, match="5 heads over 2"):
        ReferenceAttention(step.arena, ragged_config(num_heads=5), step.rope)
    with pytest.raises(InvariantBroken, match="adjacent"):
        ReferenceAttention(
            step.arena.transpose(4, 5).contiguous().transpose(4, 5), step.config, rope_table(step.config)
        )


def test_keys_that_were_left_out_are_as_if_they_had_never_been() -> None:
    """A token sees the other keys, at their own positions; in layers before `blank_from` a key of zeros
    is a key."""
    config = ragged_config()
    step = ragged_step(config, [Span(20, 1)])
    leave_out(step, range(3, 17))
    table = step.inputs.tables.long()[:2]
    backend = ReferenceAttention(step.arena, config, step.rope, blank_from=1)
    for layer, seen in ((0, [*range(21)]), (1, [*range(3), *range(17, 21)])):
        q, k, v = backend.rotate_and_write(layer, step.qkv(layer), None, None, step.inputs)
        keys, values = (
            step.arena[table, layer].transpose(0, 1).flatten(1, 2)[:, seen].repeat_interleave(3, dim=2)
        )
        shares = (torch.einsum("hd,nhd->hn", q[0], keys) * config.scale).softmax(dim=-1)
        found = backend.attend(layer, q, k, v, step.inputs)
        torch.testing.assert_close(found.view(6, -1), torch.einsum("hn,nhd->hd", shares, values))
