"""Steady attention agrees with the reference, and gives a token the same bits however its step was put
together."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.engine.execution.attention.cpu_steady import PAD_TOKENS, SteadyAttention
from penstock.engine.execution.batch import StepInputs
from penstock.errors import InvariantBroken
from penstock.models.model import ModelConfig
from tests.support.ragged import RaggedStep, Span, outputs, ragged_config, ragged_step
from tests.support.reference_attention import ReferenceAttention

SPANS = (
    Span(37, 1),
    Span(0, 1),
    Span(31, 1, writes=False),
    Span(300, 1),
    Span(5, 4),
    Span(64, 70),
    Span(0, 140),
    Span(127, 3),
)


def assert_agrees(step: RaggedStep) -> None:
    theirs, ours = step.with_own_arena(), step.with_own_arena()
    expected = outputs(ReferenceAttention(theirs.arena, step.config, step.rope, math=torch.float64), theirs)
    made = outputs(SteadyAttention(ours.arena, step.config, step.rope), ours)
    for got, want in zip(made, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=want is expected[-1])


spans = st.lists(st.builds(Span, st.integers(0, 300), st.integers(1, 150)), min_size=1, max_size=5).map(
    lambda some: sorted(some, key=lambda span: span.q_len != 1)
)


@settings(max_examples=25, deadline=None)
@given(
    spans=spans,
    groups=st.sampled_from([(1, 1), (6, 2), (8, 2), (16, 2), (10, 1)]),
    block=st.sampled_from([8, 16, 32]),
)
@example(list(SPANS), (6, 2), 16)
@example([Span(PAD_TOKENS - 1, 1), Span(PAD_TOKENS, 1), Span(PAD_TOKENS - 1, 2)], (8, 2), 16)
def test_any_ragged_batch_agrees_with_the_reference(
    spans: list[Span], groups: tuple[int, int], block: int
) -> None:
    config = ragged_config(num_heads=groups[0], num_kv_heads=groups[1], head_dim=16)
    assert_agrees(ragged_step(config, spans, block_tokens=block, seed=len(spans)))


@pytest.mark.parametrize("windows", [(0, 20), (130, 7), (1, 0)])
def test_windows_agree_with_the_reference(windows: tuple[int, int]) -> None:
    assert_agrees(ragged_step(dataclasses.replace(ragged_config(), windows=windows), SPANS))


def attended(config: ModelConfig, pieces: list[int], threads: int) -> list[torch.Tensor]:
    """What tokens of one sequence get that is computed in chunks of so many tokens: [layer] of [tokens,
    width]."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(7)
    total, width = sum(pieces), (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    qkv = torch.randn(config.num_layers, total, width, generator=generator)
    whole = ragged_step(config, [Span(0, total)])
    attention = SteadyAttention(whole.arena, config, whole.rope)
    found: list[list[torch.Tensor]] = [[] for _ in range(config.num_layers)]
    begin = 0
    for num in pieces:
        own = slice(begin, begin + num)
        inputs: StepInputs = dataclasses.replace(
            whole.inputs,
            tokens=whole.inputs.tokens[own],
            positions=whole.inputs.positions[own],
            write_at=whole.inputs.write_at[own],
            q_starts=torch.tensor([0, num], dtype=torch.int32),
            kv_lens=torch.tensor([own.stop], dtype=torch.int32),
        )
        for layer in range(config.num_layers):
            q, k, v = attention.rotate_and_write(layer, qkv[layer, own].contiguous(), None, None, inputs)
            found[layer].append(attention.attend(layer, q, k, v, inputs))
        begin = own.stop
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("groups", [(9, 3, 64), (4, 4, 32), (14, 2, 64), (3, 1, 128)])
def test_a_token_gets_the_same_bits_in_chunks_of_any_size_and_on_any_number_of_threads(
    groups: tuple[int, int, int],
) -> None:
    config = dataclasses.replace(ragged_config(*groups), windows=(0, 50))
    expected = attended(config, [600], threads=1)
    ways = (([600], 2), ([100, *[1] * 60, 440], 1), ([7, 120, 1, 1, 300, 83, 88], 2))
    for pieces, threads in ways:
        found = attended(config, pieces, threads)
        assert all(torch.equal(got, want) for got, want in zip(found, expected, strict=True)), pieces[:3]


def test_other_types_than_float32_are_refused() -> None:
    step = ragged_step(ragged_config(), [Span(0, 4)], dtype=torch.bfloat16)
    with pytest.raises(InvariantBroken, match="float32"):
        SteadyAttention(step.arena, step.config, step.rope)
