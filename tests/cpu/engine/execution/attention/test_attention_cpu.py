"""The CPU backend agrees with the reference on random ragged batches, reads nothing that it must not, and
ties what it keeps to a step."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.engine.execution.attention import Attention, cpu
from penstock.engine.execution.attention.cpu import (
    LONE_GROUP,
    LONE_TOKENS,
    PAD_SHARE,
    PAD_TOKENS,
    SCORE_ALIGN,
    SHORT_TOKENS,
    CpuAttention,
)
from penstock.engine.execution.attention.reference import ReferenceAttention
from penstock.errors import InvariantBroken
from penstock.models.model import ModelConfig
from tests.support.mutation import mutated
from tests.support.ragged import RaggedStep, Span, leave_out, outputs, ragged_config, ragged_step

Backend = type[CpuAttention]

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


def assert_agrees(
    step: RaggedStep,
    backend: Backend = CpuAttention,
    atol: float = 1e-5,
    norms: bool = True,
    blank_from: int | None = None,
) -> None:
    theirs, ours = step.with_own_arena(), step.with_own_arena()
    reference, tried = (
        ReferenceAttention(theirs.arena, step.config, step.rope, torch.float64),
        backend(ours.arena, step.config, step.rope),
    )
    if blank_from is not None:
        reference.blank_from = tried.blank_from = blank_from
    expected, made = outputs(reference, theirs, norms=norms), outputs(tried, ours, norms=norms)
    for got, want in zip(made, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=atol, equal_nan=want is expected[-1])


def mixed_step(
    seed: int = 0, config: ModelConfig | None = None, dtype: torch.dtype = torch.float32
) -> RaggedStep:
    return ragged_step(config or ragged_config(), SPANS, shared_blocks=1, seed=seed, dtype=dtype)


def lone_step(
    seed: int = 0, config: ModelConfig | None = None, dtype: torch.dtype = torch.float32
) -> RaggedStep:
    return ragged_step(config or ragged_config(), LONE_SPANS, shared_blocks=3, seed=seed, dtype=dtype)


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


@pytest.mark.parametrize(
    "config",
    [ragged_config(9, 3, 64), ragged_config(4, 4, 128), ragged_config(16, 2, 16)],
    ids=["3x64", "1x128", "8x16"],
)
def test_long_contexts_agree_with_the_reference(config: ModelConfig) -> None:
    assert_agrees(lone_step(9, config))


def test_long_contexts_agree_in_slots_that_follow_each_other_and_in_scattered_ones() -> None:
    scattered = lone_step(10)
    ordered = in_slot_order(scattered)
    assert ordered.inputs.tables.diff().eq(1).sum() > 100
    assert scattered.inputs.tables.diff().eq(1).sum() < 10
    assert_agrees(ordered)
    assert_agrees(scattered)


def test_long_contexts_in_bfloat16_agree_within_its_precision() -> None:
    assert_agrees(lone_step(11, dtype=torch.bfloat16), atol=3e-2)


@pytest.mark.parametrize(
    "span", LONE_SPANS[:2] + LONE_SPANS[3:4], ids=["last block full", "last block begun", "full match"]
)
def test_one_token_with_a_long_context_agrees_when_nothing_else_runs(span: Span) -> None:
    assert_agrees(ragged_step(ragged_config(), [span], seed=12))


def test_an_arena_of_more_rows_than_an_int32_counts_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "INT32_ROWS", 0)
    assert_agrees(lone_step(13))


@pytest.mark.parametrize(
    "config",
    [ragged_config(9, 3, 64), ragged_config(4, 4, 128), ragged_config(16, 2, 16)],
    ids=["3x64", "1x128", "8x16"],
)
def test_a_mixed_step_agrees_with_the_reference(config: ModelConfig) -> None:
    assert_agrees(mixed_step(1, config))


def test_bfloat16_agrees_within_its_precision() -> None:
    assert_agrees(mixed_step(2, dtype=torch.bfloat16), atol=3e-2)


def test_decodes_of_very_different_lengths_and_many_of_one_length_agree() -> None:
    assert_agrees(
        ragged_step(
            ragged_config(), [Span(n, 1) for n in (0, 3, 900, 17, 400, 880)] + [Span(50, 1)] * 12, seed=3
        )
    )


def test_small_groups_agree_with_one_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    step = ragged_step(ragged_config(), [Span(n, 1) for n in range(40, 60)], seed=4)
    assert_agrees(step)
    monkeypatch.setattr(cpu, "GROUP_BYTES", 1)
    assert_agrees(step)


def test_lengths_that_share_a_call_and_lengths_that_do_not_agree() -> None:
    """Below, at and beyond the padding that a call may have: in tokens where sequences are short, as a share
    where they are long."""
    for longest in (PAD_TOKENS + 9, 2000):
        allowed = int(max(PAD_TOKENS, PAD_SHARE * longest))
        lengths = [
            longest - 1 - less
            for less in (0, 1, allowed - 1, allowed, allowed + 1, 2 * allowed)
            if less < longest
        ]
        config = ragged_config(
            num_heads=LONE_GROUP + 1, num_kv_heads=1, head_dim=16
        )  # too many heads for any to be computed alone
        assert_agrees(ragged_step(config, [Span(length, 1) for length in lengths], seed=longest))


@pytest.mark.parametrize("group", [LONE_GROUP - 1, LONE_GROUP, LONE_GROUP + 1])
def test_any_number_of_heads_over_one_key_agrees(group: int) -> None:
    """Around what is computed alone, and around where rows of scores are laid apart."""
    config = ragged_config(num_heads=2 * group, num_kv_heads=2, head_dim=16)
    for length in (SCORE_ALIGN - 1, SCORE_ALIGN, SCORE_ALIGN + 1, LONE_TOKENS + 1):
        assert_agrees(ragged_step(config, [Span(length - 1, 1)], seed=length))


def test_a_long_token_whose_keys_take_several_parts_agrees() -> None:
    """With the size of a part as it is."""
    config = ragged_config(num_heads=2, num_kv_heads=2, head_dim=256, num_layers=1)
    part = cpu.KEY_BYTES // (2 * 256 * 4)
    assert_agrees(ragged_step(config, [Span(2 * part + 5, 1), Span(part - 1, 1)], seed=17), norms=False)


def test_a_chunk_without_keys_gives_zeros() -> None:
    """A captured step's rows that stand for nobody may say that their sequence is empty."""
    step = ragged_step(ragged_config(), [Span(20, 1), Span(7, 1)], seed=5)
    step.inputs.kv_lens[1] = 0
    attention = CpuAttention(step.arena, step.config, step.rope)
    q, k, v = attention.rotate_and_write(0, step.qkv(), None, None, step.inputs)
    out = attention.attend(0, q, k, v, step.inputs)
    assert out[1].eq(0).all() and out[0].isfinite().all()


REPLAYS = (
    ([Span(40, 1), Span(9, 1)], [Span(12, 1), Span(36, 1)]),
    ([Span(40, 1)], [Span(36, 1)]),
)  # a step, and the next of its shape


@pytest.mark.parametrize("spans", REPLAYS, ids=["two tokens", "one token"])
def test_a_replay_sees_inputs_that_were_refilled_in_place(spans: tuple[list[Span], list[Span]]) -> None:
    """The second step has other lengths, slots and positions in the very same tensors."""
    first, second = (ragged_step(ragged_config(), some, seed=6 + number) for number, some in enumerate(spans))
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


@pytest.mark.parametrize("spans", REPLAYS, ids=["two tokens", "one token"])
def test_keeping_the_first_steps_indices_through_a_replay_is_noticed(
    spans: tuple[list[Span], list[Span]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mutated(cpu, "if layer == 0 or self._step is None", "if self._step is None", tmp_path) as mutant:
        monkeypatch.setitem(globals(), "CpuAttention", mutant.CpuAttention)
        with pytest.raises(AssertionError):
            test_a_replay_sees_inputs_that_were_refilled_in_place(spans)


def test_attention_of_a_step_that_was_never_written_is_refused() -> None:
    step = mixed_step()
    q = torch.zeros(step.num_tokens, 6, 32)
    with pytest.raises(InvariantBroken):
        CpuAttention(step.arena, step.config, step.rope).attend(0, q, q[:, :2], q[:, :2], step.inputs)


def test_a_table_that_is_too_short_is_refused() -> None:
    step = ragged_step(ragged_config(), [Span(40, 1)])
    short = replace(step.inputs, tables=step.inputs.tables[:2])
    with pytest.raises(InvariantBroken, match="table of 2 blocks"):
        CpuAttention(step.arena, step.config, step.rope).rotate_and_write(0, step.qkv(), None, None, short)


def test_a_slot_that_is_no_whole_number_of_blocks_is_refused() -> None:
    """Other layers may lie between those of two slots, but all are found as blocks of one array."""
    step = ragged_step(ragged_config(), [Span(40, 1)])
    arena = step.arena
    CpuAttention(arena[::2], step.config, step.rope)
    torn = torch.zeros(2 * arena.numel()).as_strided(arena.shape, (arena.stride(0) + 2, *arena.stride()[1:]))
    with pytest.raises(InvariantBroken, match="a whole number of them"):
        CpuAttention(torn, step.config, step.rope)


FAULTS = {
    "a causal mask off by one": ("- q_len + torch.arange(q_len)", "- q_len - 1 + torch.arange(q_len)"),
    "no mask behind a shorter sequence": ("if q_len > 1 or any(span.kv_len != longest for span in group):", "if q_len > 1:"),  # noqa: E501
    "padding that reads behind the end": ("keys[span.kv_len :] = rows[0]", "keys[span.kv_len :] = rows[-1] + 1"),  # noqa: E501
    "one token too many of the prefix": ("prefix_len = span.kv_len - span.q_len", "prefix_len = span.kv_len - span.q_len + 1"),  # noqa: E501
    "a prefix and its chunk joined the wrong way round": ("torch.sigmoid(lse", "torch.sigmoid(-lse"),
    "values in place of keys": ("index_copy_(0, tokens.value_rows", "index_copy_(0, tokens.key_rows"),
    "the layer before": ("rows = self._layers[layer].rows", "rows = self._layers[0].rows"),
    "rotation the other way": ("sin, value=-1.0)", "sin, value=1.0)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_turns_the_comparison_red(fault: str, tmp_path: Path) -> None:
    with mutated(cpu, *FAULTS[fault], tmp_path) as mutant, pytest.raises(AssertionError):
        assert_agrees(mixed_step(8), mutant.CpuAttention)


LONE_FAULTS = {
    "keys behind the end": ("[skipped : skipped + of_part.shape[-1]]", "[-of_part.shape[-1] :]"),
    "values one token further": ("self.key_rows(span) + sizes.block_tokens", "self.key_rows(span) + 1 + sizes.block_tokens"),  # noqa: E501
    "keys one slot further": ("in (span.table * self._blocks_per_slot).split", "in ((span.table + 1) * self._blocks_per_slot).split"),  # noqa: E501
    "keys of layer 0": ("(arena.blocks, 0, part.gather", "(self._layers[0].blocks, 0, part.gather"),
    "values of layer 0": ("embedding_bag(arena.heads", "embedding_bag(self._layers[0].heads"),
    "another KV head's values": ("repeat_interleave(sizes.group, dim=0)", "repeat(sizes.group, 1)"),
    "parts of the keys in one workspace, multiplied too late": (
        "            part.scores.baddbmm_", "        for part in lone.parts:\n            part.scores.baddbmm_"  # noqa: E501
    ),
    "scores added to what was there": ("beta=0.0", "beta=1.0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", LONE_FAULTS)
def test_a_fault_in_long_contexts_turns_the_comparison_red(fault: str, tmp_path: Path) -> None:
    with mutated(cpu, *LONE_FAULTS[fault], tmp_path) as mutant:
        mutant.KEY_BYTES = 64 << 10  # several parts
        with pytest.raises(AssertionError):
            assert_agrees(lone_step(14), mutant.CpuAttention)


# Two layers with windows beside one that sees all. Windows of a block, of less and of more, and one that some
# contexts just fill.
WINDOWS = ((16, 0, 16), (7, 40, 0), (38, 0, 38), (39, 1, 100), (300, 301, 302))
LONG_WINDOWS = ((LONE_TOKENS - 1, 0, 40), (LONE_TOKENS + 5, 0, LONE_TOKENS))
WIDE_SPANS = (Span(0, 300), Span(90, 200))  # several bands


def windowed(windows: tuple[int, ...]) -> ModelConfig:
    return dataclasses.replace(ragged_config(num_layers=len(windows)), windows=windows)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("block_tokens", [8, 16])
def test_windows_hide_what_they_hide_in_the_reference(windows: tuple[int, ...], block_tokens: int) -> None:
    assert_agrees(ragged_step(windowed(windows), SPANS, shared_blocks=1, seed=31, block_tokens=block_tokens))


@pytest.mark.parametrize("windows", LONG_WINDOWS, ids=str)
def test_windows_over_long_contexts_agree_with_the_reference(
    windows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "KEY_BYTES", 64 << 10)  # several parts
    assert_agrees(lone_step(32, windowed(windows)))


@pytest.mark.parametrize("span", WIDE_SPANS, ids=str)
def test_a_long_chunk_sees_its_window_whatever_band_a_token_is_in(span: Span) -> None:
    assert_agrees(ragged_step(windowed((50, 0, 299)), [span], seed=33))


@pytest.mark.parametrize("span", [Span(37, 1), Span(48, 1), Span(47, 1), Span(0, 1)], ids=str)
@pytest.mark.parametrize("window", [1, 16, 37, 38, 39])
def test_a_step_of_one_token_sees_its_window(span: Span, window: int) -> None:
    assert_agrees(ragged_step(windowed((window, 0)), [span], seed=34))


def test_windows_in_bfloat16_agree_as_all_else_does() -> None:
    step = ragged_step(windowed((20, 0)), SPANS, shared_blocks=1, seed=35, dtype=torch.bfloat16)
    assert_agrees(step, atol=4e-2)


def test_windows_that_hide_nothing_are_computed_as_if_there_were_none() -> None:
    step = mixed_step(36, windowed((301, 4096, 0)))
    plain = dataclasses.replace(step, config=windowed((0, 0, 0)), arena=step.arena.clone())
    made, expected = (
        outputs(CpuAttention(one.arena, one.config, one.rope), one)[:-1] for one in (step, plain)
    )
    assert all(torch.equal(got, want) for got, want in zip(made, expected, strict=True))


WINDOW_FAULTS = {
    "a token sees one key more": ("first = self.kv_len - self.q_len + 1 - window", "first = self.kv_len - self.q_len - window"),  # noqa: E501
    "a token of a short chunk sees one key more": ("hidden |= keys <= last_visible", "hidden |= keys < last_visible"),  # noqa: E501
    "a token of a long chunk sees one key more": ("self._short([band], window)", "self._short([band], window + 1)"),  # noqa: E501
    "a token of a long chunk sees one key less": ("self._short([band], window)", "self._short([band], window - 1)"),  # noqa: E501
    "a window of one layer in all": ("[plans[window] for window in windows]", "[plans[windows[0]] for window in windows]"),  # noqa: E501
    "what is hidden of a first block is seen": ("begin, skipped = 0, span.skipped", "begin, skipped = 0, 0"),
}  # fmt: skip


def windows_agree(backend: Backend) -> None:
    for spans in ((Span(45, 1),), (Span(45, 4),), (Span(45, 90),)):
        assert_agrees(ragged_step(windowed((20, 0)), spans, seed=37), backend)


@pytest.mark.parametrize("fault", WINDOW_FAULTS)
def test_a_fault_in_windows_turns_the_comparison_red(fault: str, tmp_path: Path) -> None:
    with mutated(cpu, *WINDOW_FAULTS[fault], tmp_path) as mutant, pytest.raises(AssertionError):
        windows_agree(mutant.CpuAttention)


# Steps of one token, as a single conversation has them: one that begins a block, one in it, one that must not
# be written, and the first.
SINGLE_SPANS = (Span(48, 1), Span(37, 1), Span(31, 1, writes=False), Span(0, 1))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("span", SINGLE_SPANS, ids=str)
def test_a_step_of_one_token_agrees_with_the_reference(span: Span, normed: bool) -> None:
    step = ragged_step(ragged_config(9, 3, 64, num_layers=3), [span], seed=15)
    assert_agrees(step, norms=normed)


SINGLE_FAULTS = {
    "rotation the other way": ("+ torch.diag(sin, half) -", "- torch.diag(sin, half) +"),
    "keys of another layer": ("out=tokens.keys[layer]", "out=tokens.keys[0]"),
    "values of another layer": ("tokens.values[layer].copy_", "tokens.values[0].copy_"),
    "values in place of keys": ("place[:, 1:].unbind(0)", "place[:, :1].unbind(0)"),
    "another token of the block": (":, :, at % size]", ":, :, 0]"),
}  # fmt: skip


@pytest.mark.parametrize("fault", SINGLE_FAULTS)
def test_a_fault_in_a_step_of_one_token_turns_the_comparison_red(fault: str, tmp_path: Path) -> None:
    with mutated(cpu, *SINGLE_FAULTS[fault], tmp_path) as mutant, pytest.raises(AssertionError):
        assert_agrees(ragged_step(ragged_config(), SINGLE_SPANS[1:2], seed=16), mutant.CpuAttention)


def test_an_output_that_nobody_writes_would_be_nan_here() -> None:
    assert torch.empty(8).isnan().all()


def test_both_backends_are_attention() -> None:
    step = mixed_step()
    backends: list[Attention] = [
        CpuAttention(step.arena, step.config, step.rope),
        ReferenceAttention(step.arena, step.config, step.rope),
    ]
    assert all(callable(backend.attend) for backend in backends)


@pytest.mark.parametrize("left_out", [range(5), range(3, 40), range(2000)], ids=["first", "some", "all"])
@pytest.mark.parametrize("windows", [(), (50, 0)], ids=["no windows", "windows"])
@pytest.mark.parametrize("make_step", [mixed_step, lone_step])
def test_keys_that_were_left_out_are_seen_by_nobody(
    make_step: Any, windows: tuple[int, ...], left_out: range
) -> None:
    """Alone, in batches, in long chunks, under a window; in one layer and not in the other."""
    step = make_step(config=replace(ragged_config(), windows=windows))
    leave_out(step, left_out)
    for blank_from in (0, 1):
        assert_agrees(step, blank_from=blank_from)
    with pytest.raises(AssertionError):
        assert_agrees(step, NotSkipping, blank_from=0)


class NotSkipping(CpuAttention):
    """Takes keys of zeros for keys."""

    blank_from = property(lambda self: 99, lambda self, value: None)  # type: ignore[assignment]
