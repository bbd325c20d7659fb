"""The CPU backend agrees with the reference on random ragged batches, reads nothing that it must not, and
ties what it keeps to a step."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.engine.execution.attention import cpu
from penstock.engine.execution.attention.cpu import (
    LONE_GROUP,
    LONE_TOKENS,
    PAD_SHARE,
    PAD_TOKENS,
    SCORE_ALIGN,
    SHORT_TOKENS,
    CpuAttention,
)
from penstock.errors import InvariantBroken
from penstock.models.model import OtherRope
from tests.support.ragged import RaggedStep, Span, leave_out, outputs, ragged_config, ragged_step
from tests.support.reference_attention import ReferenceAttention

# One of each: decodes of several lengths, a full match, short and long chunks, with and without a prefix,
# aligned and not.
SPANS = (
    Span(37, 1),
    Span(0, 1),
    Span(31, 1, writes=False),
    Span(300, 1),
    Span(5, 4),
    Span(64, 4),
    Span(0, 40),
    Span(16, 32),
    Span(21, 23),
)
# Tokens with a context long enough to be computed alone: with a last block that is full, just begun and in
# between, a full match, others.
LONE_SPANS = (
    Span(LONE_TOKENS - 1, 1),
    Span(LONE_TOKENS, 1),
    Span(37, 1),
    Span(LONE_TOKENS + 90, 1, writes=False),
    Span(9, 3),
    Span(20, 40),
)
SHAPES = (ragged_config(9, 3, 64), ragged_config(4, 4, 128), ragged_config(16, 2, 16))  # of heads


def assert_agrees(
    step: RaggedStep, atol: float = 1e-5, norms: bool = True, blank_from: int | None = None
) -> None:
    theirs, ours = step.with_own_arena(), step.with_own_arena()
    reference = ReferenceAttention(theirs.arena, step.config, step.rope, blank_from, torch.float64)
    tried = CpuAttention(ours.arena, step.config, step.rope, blank_from)
    expected, made = outputs(reference, theirs, norms=norms), outputs(tried, ours, norms=norms)
    for got, want in zip(made, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=atol, equal_nan=want is expected[-1])


def windowed(*windows: int) -> Any:
    return replace(ragged_config(num_layers=len(windows)), windows=windows)


@pytest.mark.parametrize("theta", [700.0, 0.0])
def test_layers_of_another_table_turn_by_theirs(theta: float) -> None:
    plain = replace(ragged_config(num_layers=3), windows=(0, 20, 0))
    step = ragged_step(replace(plain, other_rope=OtherRope((1,), theta)), SPANS)
    assert_agrees(step)
    found = outputs(CpuAttention(step.arena, step.config, step.rope), step)
    same = ragged_step(plain, SPANS)
    before = outputs(CpuAttention(same.arena, same.config, same.rope), same)
    changed = [not torch.equal(one, other) for one, other in zip(found[:12:4], before[:12:4], strict=True)]
    assert changed == [False, True, False]


def in_slot_order(step: RaggedStep) -> RaggedStep:
    """The same step with every request's slots one behind the other, as a pool that has just been opened
    gives them out."""
    order = list(dict.fromkeys(step.inputs.tables.tolist()))
    place = torch.arange(len(step.arena))  # the padding block stays where it is
    place[order] = torch.arange(len(order))
    arena = torch.full_like(step.arena, float("nan"))
    arena[: len(order)] = step.arena[order]
    block, at = step.arena.shape[3], step.inputs.write_at.long()
    moved = place[at // block] * block + at % block
    inputs = replace(step.inputs, tables=place[step.inputs.tables.long()].int(), write_at=moved.int())
    return replace(step, arena=arena, inputs=inputs)


spans = st.lists(
    st.one_of(
        st.builds(Span, st.integers(0, 90), st.just(1), st.booleans()),
        st.builds(Span, st.integers(0, 90), st.integers(2, 3 * SHORT_TOKENS), st.just(True)),
    ),
    min_size=1,
    max_size=9,
).map(lambda some: sorted(some, key=lambda span: span.q_len != 1))


@settings(max_examples=40, deadline=None)
@given(
    spans=spans,
    groups=st.sampled_from([(1, 1), (2, 1), (3, 3), (8, 2)]),
    block=st.sampled_from([8, 16, 32]),
    shared=st.integers(0, 3),
)
@example([Span(0, 1)], (8, 2), 16, 0)
@example([Span(15, 1), Span(16, 1, False), Span(0, SHORT_TOKENS), Span(0, SHORT_TOKENS + 1)], (8, 2), 16, 1)
@example(
    [Span(31, 1), Span(32, 1), Span(90, 1), Span(16, SHORT_TOKENS - 1), Span(17, SHORT_TOKENS + 1)],
    (3, 3),
    8,
    2,
)
@example([Span(PAD_TOKENS + 40, 1), Span(39, 1), Span(40, 1), Span(41, 1)], (2, 1), 32, 0)
def test_any_ragged_batch_agrees_with_the_reference(
    spans: list[Span], groups: tuple[int, int], block: int, shared: int
) -> None:
    config = ragged_config(num_heads=groups[0], num_kv_heads=groups[1], head_dim=16)
    assert_agrees(ragged_step(config, spans, block_tokens=block, shared_blocks=shared, seed=len(spans)))


@settings(max_examples=20, deadline=None)
@given(
    spans=spans,
    groups=st.sampled_from([(1, 1), (2, 1), (6, 2), (8, 2)]),
    blocks=st.integers(1, 4),
    shared=st.integers(0, 3),
)
@example([Span(15, 1), Span(16, 1), Span(63, 1), Span(64, 1), Span(65, 1)], (8, 2), 4, 0)
@example([Span(0, 1), Span(47, 1, False), Span(20, 3)], (6, 2), 1, 1)
def test_any_batch_agrees_where_every_single_token_is_computed_alone(
    spans: list[Span], groups: tuple[int, int], blocks: int, shared: int
) -> None:
    config = ragged_config(num_heads=groups[0], num_kv_heads=groups[1], head_dim=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "LONE_TOKENS", 1)
        patch.setattr(cpu, "KEY_BYTES", blocks * 16 * groups[1] * 16 * 4)
        assert_agrees(ragged_step(config, spans, shared_blocks=shared, seed=len(spans)))


def test_steps_of_every_kind_agree_with_the_reference() -> None:
    """Of several shapes of heads, one token alone, decodes of very different lengths and many of one."""
    for number, (config, spans) in enumerate(itertools.product(SHAPES, (SPANS, LONE_SPANS))):
        assert_agrees(ragged_step(config, spans, shared_blocks=2, seed=number))
    single = [Span(48, 1), Span(31, 1, writes=False), *LONE_SPANS[:2]]
    for number, (span, norms) in enumerate(itertools.product(single, (False, True))):
        assert_agrees(ragged_step(SHAPES[0], [span], seed=number), norms=norms)
    lengths = (0, 3, 900, 17, 400, 880, *[50] * 12)
    assert_agrees(ragged_step(ragged_config(), [Span(n, 1) for n in lengths]))


@pytest.mark.parametrize("spans", [SPANS, LONE_SPANS], ids=["mixed", "long"])
def test_bfloat16_agrees_within_its_precision(spans: tuple[Span, ...]) -> None:
    for config in (ragged_config(), windowed(20, 0)):
        step = ragged_step(config, spans, shared_blocks=1, dtype=torch.bfloat16)
        assert_agrees(step, atol=4e-2)


def test_limits_of_groups_parts_and_indices_change_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    long = ragged_step(ragged_config(), LONE_SPANS, shared_blocks=3)
    ordered = in_slot_order(long)
    assert ordered.inputs.tables.diff().eq(1).sum() > 100 > 10 > long.inputs.tables.diff().eq(1).sum()
    assert_agrees(ordered)
    monkeypatch.setattr(cpu, "INT32_ROWS", 0)  # an arena of more rows than an int32 counts
    assert_agrees(long)
    monkeypatch.setattr(cpu, "GROUP_BYTES", 1)
    assert_agrees(ragged_step(ragged_config(), [Span(n, 1) for n in range(40, 60)]))
    config = ragged_config(num_heads=2, num_kv_heads=2, head_dim=256, num_layers=1)
    part = cpu.KEY_BYTES // (2 * 256 * 4)  # as it is: keys take several parts
    assert_agrees(ragged_step(config, [Span(2 * part + 5, 1), Span(part - 1, 1)]), norms=False)


def test_lengths_that_share_a_call_and_lengths_that_do_not_agree() -> None:
    """Below, at and beyond the padding that a call may have: in tokens where sequences are short, as a share
    where they are long."""
    # too many heads for any to be computed alone
    config = ragged_config(num_heads=LONE_GROUP + 1, num_kv_heads=1, head_dim=16)
    for longest in (PAD_TOKENS + 9, 2000):
        allowed = int(max(PAD_TOKENS, PAD_SHARE * longest))
        less = (0, 1, allowed - 1, allowed, allowed + 1, 2 * allowed)
        spans = [Span(longest - 1 - one, 1) for one in less if one < longest]
        assert_agrees(ragged_step(config, spans, seed=longest))


@pytest.mark.parametrize("group", [LONE_GROUP - 1, LONE_GROUP, LONE_GROUP + 1])
def test_any_number_of_heads_over_one_key_agrees(group: int) -> None:
    """Around what is computed alone, and around where rows of scores are laid apart."""
    config = ragged_config(num_heads=2 * group, num_kv_heads=2, head_dim=16)
    for length in (SCORE_ALIGN - 1, SCORE_ALIGN, SCORE_ALIGN + 1, LONE_TOKENS + 1):
        assert_agrees(ragged_step(config, [Span(length - 1, 1)], seed=length))


def test_a_chunk_without_keys_gives_zeros() -> None:
    """A captured step's padding rows may have empty sequences."""
    step = ragged_step(ragged_config(), [Span(20, 1), Span(7, 1)], seed=5)
    step.inputs.kv_lens[1] = 0
    attention = CpuAttention(step.arena, step.config, step.rope)
    q, k, v = attention.rotate_and_write(0, step.qkv(), None, None, step.inputs)
    out = attention.attend(0, q, k, v, step.inputs)
    assert out[1].eq(0).all() and out[0].isfinite().all()


@pytest.mark.parametrize(("before", "after"), [((40, 9), (12, 36)), ((40,), (36,))])
def test_a_replay_sees_inputs_that_were_refilled_in_place(
    before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    """The second step has other lengths, slots and positions in the very same tensors."""
    first, second = (
        ragged_step(ragged_config(), [Span(prefix, 1) for prefix in some], seed=sum(some))
        for some in (before, after)
    )
    assert first.arena.shape == second.arena.shape and first.inputs.tables.shape == second.inputs.tables.shape
    attention = CpuAttention(first.arena, first.config, first.rope)
    outputs(attention, first)
    expected = outputs(CpuAttention(second.arena.clone(), second.config, second.rope), second)[:-1]
    first.arena.copy_(second.arena)
    for field in ("positions", "write_at", "kv_lens", "table_starts", "tables"):
        getattr(first.inputs, field).copy_(getattr(second.inputs, field))
    replayed = outputs(attention, replace(second, arena=first.arena, inputs=first.inputs))[:-1]
    for got, want in zip(replayed, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_what_cannot_be_attended_is_refused() -> None:
    """A step that was never written, a table that is too short, a slot that is no whole number of blocks."""
    step = ragged_step(ragged_config(), [Span(40, 1)])
    attention, q, arena = CpuAttention(step.arena, step.config, step.rope), torch.zeros(1, 6, 32), step.arena
    with pytest.raises(InvariantBroken, match="before this step's KV"):
        attention.attend(0, q, q[:, :2], q[:, :2], step.inputs)
    short = replace(step.inputs, tables=step.inputs.tables[:2])
    with pytest.raises(InvariantBroken, match="table of 2 blocks"):
        attention.rotate_and_write(0, step.qkv(), None, None, short)
    CpuAttention(arena[::2], step.config, step.rope)  # other layers may lie between those of two slots
    torn = torch.zeros(2 * arena.numel()).as_strided(arena.shape, (arena.stride(0) + 2, *arena.stride()[1:]))
    with pytest.raises(InvariantBroken, match="a whole number of them"):
        CpuAttention(torn, step.config, step.rope)


def test_windows_hide_what_they_hide_in_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of a block, of less and of more, ones that some contexts just fill, beside layers that see all;
    in short chunks, in bands of long ones, for one token, over parts of long contexts."""
    for windows, block in itertools.product(
        ((7, 40, 0), (38, 0, 39), (300, 301, 302), (16, 1, 100)), (8, 16)
    ):
        assert_agrees(ragged_step(windowed(*windows), SPANS, shared_blocks=1, block_tokens=block))
    for span in (Span(0, 300), Span(90, 200)):
        assert_agrees(ragged_step(windowed(50, 0, 299), [span]))
    for prefix, window in itertools.product((37, 48, 47, 0), (1, 16, 37, 38, 39)):
        assert_agrees(ragged_step(windowed(window, 0), [Span(prefix, 1)]))
    monkeypatch.setattr(cpu, "KEY_BYTES", 64 << 10)  # several parts
    for windows in ((LONE_TOKENS - 1, 0, 40), (LONE_TOKENS + 5, 0, LONE_TOKENS)):
        assert_agrees(ragged_step(windowed(*windows), LONE_SPANS, shared_blocks=3))


def test_windows_that_hide_nothing_are_computed_as_if_there_were_none() -> None:
    step = ragged_step(windowed(301, 4096, 0), SPANS)
    plain = replace(step, config=windowed(0, 0, 0), arena=step.arena.clone())
    made, expected = (
        outputs(CpuAttention(one.arena, one.config, one.rope), one)[:-1] for one in (step, plain)
    )
    assert all(torch.equal(got, want) for got, want in zip(made, expected, strict=True))


@pytest.mark.parametrize("spans", [SPANS, LONE_SPANS], ids=["mixed", "long"])
def test_keys_that_were_left_out_are_seen_by_no_token(spans: tuple[Span, ...]) -> None:
    """Alone, in batches, in long chunks, under a window; in one layer and not in the other."""
    for windows, left_out in itertools.product(((0, 0), (50, 0)), (range(5), range(3, 40), range(2000))):
        step = ragged_step(windowed(*windows), spans, shared_blocks=3)
        leave_out(step, left_out)
        for blank_from in (0, 1):
            assert_agrees(step, blank_from=blank_from)


def test_an_output_that_is_never_written_would_be_nan_here() -> None:
    assert torch.empty(8).isnan().all()
