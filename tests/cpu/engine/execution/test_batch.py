"""Packing a plan into step inputs: every index, padding, and what is refused."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from penstock.contract import Chunk
from penstock.engine.execution.batch import Packer, Shape
from penstock.errors import InvariantBroken

BLOCK, PADDING_SLOT, PADDING_ROW = 4, 99, 7


def chunk(row: int, start: int, tokens: list[int], *, slots: list[int] | None = None, writes: bool = True, num_logits: int = 1) -> Chunk:
    num_slots = -(-(start + len(tokens)) // BLOCK)
    table = np.array(slots if slots is not None else range(row * 10, row * 10 + num_slots), np.int32)
    return Chunk(f"r{row}", row, start, tuple(tokens), table, writes, num_logits)


def test_a_mixed_step_is_laid_out_as_its_kernels_read_it() -> None:
    chunks = (chunk(1, 5, [-1]), chunk(2, 0, [8], writes=False), chunk(3, 2, [4, 5, 6], num_logits=0))
    packed = Packer(BLOCK, PADDING_SLOT, PADDING_ROW).pack(chunks, 2, None, np.full(200, -7, np.int32))
    x = packed.shape.views(torch.from_numpy(packed.ints), packed.num_decodes, packed.max_q_len, packed.max_kv_len)
    assert x.tokens.tolist() == [-1, 8, 4, 5, 6]
    assert x.positions.tolist() == [5, 0, 2, 3, 4]
    assert x.write_at.tolist() == [11 * 4 + 1, PADDING_SLOT * 4, 30 * 4 + 2, 30 * 4 + 3, 31 * 4]
    assert x.q_starts.tolist() == [0, 1, 2, 5]
    assert x.kv_lens.tolist() == [6, 1, 5]
    assert x.table_starts.tolist() == [1, 3, 4]
    assert x.tables.tolist() == [PADDING_SLOT, 10, 11, 20, 30, 31]
    assert x.rows.tolist() == [1, 2, 3]
    assert x.sample_at.tolist() == [0, 1] and x.sample_rows.tolist() == [1, 2]
    assert (x.num_decodes, x.max_q_len, x.max_kv_len) == (2, 3, 6)
    assert packed.read_slots.tolist() == [10, 11, 20, 30, 31]
    assert set(packed.write_slots.tolist()) == {11, PADDING_SLOT, 30, 31}


def test_a_chunk_has_the_logits_of_as_many_of_its_last_tokens_as_it_wants() -> None:
    chunks = (chunk(1, 5, [3]), chunk(2, 0, [8], num_logits=0), chunk(3, 2, [4, 5, 6], num_logits=2), chunk(4, 0, [7, 7], num_logits=2))
    packed = Packer(BLOCK, PADDING_SLOT, PADDING_ROW).pack(chunks, 2, None, np.full(200, -7, np.int32))
    x = packed.shape.views(torch.from_numpy(packed.ints), packed.num_decodes, packed.max_q_len, packed.max_kv_len)
    assert x.q_starts.tolist() == [0, 1, 2, 5, 7] and packed.shape.num_samples == 5
    assert x.sample_at.tolist() == [0, 3, 4, 5, 6] and x.sample_rows.tolist() == [1, 3, 3, 4, 4]


@pytest.mark.parametrize("bucket", [None, Shape(6, 6, 6)], ids=["eager", "captured"])
def test_each_token_of_a_decode_with_drafts_is_a_row(bucket: Shape | None) -> None:
    """Over the same table, each with one token more. What the step before may have rejected can be written, too."""
    drafts = chunk(1, 6, [-1, 8, 9], num_logits=3)._replace(num_unsure=3)
    packed = Packer(BLOCK, PADDING_SLOT, PADDING_ROW).pack((drafts, chunk(2, 5, [7])), 2, bucket, np.full(200, -7, np.int32))
    ints = torch.from_numpy(packed.ints)
    x = packed.shape.views(ints, packed.num_decodes, packed.max_q_len, packed.max_kv_len)
    first, second = (slots.tolist() for slots in (drafts.slots, chunk(2, 5, [7]).slots))
    num = 4 if bucket is None else 6
    assert x.tokens.tolist()[:4] == [-1, 8, 9, 7] and x.positions.tolist()[:4] == [6, 7, 8, 5]
    assert x.kv_lens.tolist() == [7, 8, 9, 6, 1, 1][:num] and x.rows.tolist() == [1, 1, 1, 2, PADDING_ROW, PADDING_ROW][:num]
    assert x.table_starts.tolist() == [1, 1, 1, 4, 0, 0][:num] and x.tables.tolist()[:6] == [PADDING_SLOT, *first, *second]
    assert x.write_at.tolist()[:4] == [first[1] * 4 + 2, first[1] * 4 + 3, first[2] * 4, second[1] * 4 + 1]
    assert x.sample_at.tolist() == list(range(num)) and packed.num_decodes == num
    assert set(packed.write_slots.tolist()) >= {*first, second[1]}, "it may begin three tokens earlier, in its first block"
    assert packed.drafted is not None and (packed.drafted.num_drafts, packed.drafted.num_unsure) == (2, 3)
    found = packed.drafted.views(ints)
    assert found.unsure.tolist() == [1, 1, 1, 0, 0, 0][:num] and found.group_of.tolist() == [0, 0, 0, 1, 2, 3][:num]
    assert found.starts.tolist() == [0, 3, 4, 5][: num - 2] and found.lengths.tolist() == [2, 0, 0, 0][: num - 2]


DECODES = st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=4)  # drafts; whether one without any samples
PROMPTS = st.lists(st.tuples(st.integers(2, 6), st.integers(0, 1)), max_size=3)  # tokens, logits


@example([(2, True), (0, False), (0, True)], [(3, 1), (4, 0)], False)
@example([(2, True), (0, False), (0, True)], [], True)
@given(DECODES, PROMPTS, st.booleans())
@settings(max_examples=200, deadline=None)
def test_in_any_mixture_each_sample_is_of_its_chunks_last_tokens(
    decodes: list[tuple[int, bool]], prompts: list[tuple[int, int]], captured: bool
) -> None:
    """Whoever samples nothing takes no place from others, drafts or not."""
    decodes.sort(key=lambda one: not (one[0] or one[1]))  # as plans have them
    sizes = [(1 + num, 1 + num if num or samples else 0) for num, samples in decodes] + prompts
    assume(sizes)
    chunks = tuple(chunk(row, row + 1, [5] * num, num_logits=logits) for row, (num, logits) in enumerate(sizes))
    captured = captured and bool(decodes) and not prompts
    num_rows = sum(num for num, _ in sizes)
    bucket = Shape(num_rows + 2, num_rows + 2, num_rows + 2) if captured else None
    packed = Packer(BLOCK, PADDING_SLOT, PADDING_ROW).pack(chunks, len(decodes), bucket, np.full(400, -7, np.int32))
    ints = torch.from_numpy(packed.ints)
    x = packed.shape.views(ints, packed.num_decodes, packed.max_q_len, packed.max_kv_len)
    expected, groups, at = [], [], 0
    for row, (num, logits) in enumerate(sizes):
        wanted = max(logits, captured)
        expected += [(at + num - wanted + i, row if logits else PADDING_ROW) for i in range(wanted)]
        groups += [wanted] * bool(wanted)
        at += num
    expected, groups = expected + [(at + i, PADDING_ROW) for i in range(2 * captured)], groups + [1] * 2 * captured
    assert list(zip(x.sample_at.tolist(), x.sample_rows.tolist(), strict=True)) == expected
    assert (packed.drafted is None) == (not any(num for num, _ in decodes))
    if packed.drafted is not None:
        found = packed.drafted.views(ints)
        assert found.lengths.tolist() == [size - 1 for size in groups]
        assert found.group_of.tolist() == [number for number, size in enumerate(groups) for _ in range(size)]


@pytest.mark.parametrize(("sizes", "num_decodes"), [((1, 1, 3), 1), ((1, 1, 3), 3), ((1, 3, 1), 2), ((3, 1), 1), ((2,), 1), ((1,), 0)])
def test_a_step_whose_first_chunks_are_not_its_decodes_is_refused(sizes: tuple[int, ...], num_decodes: int) -> None:
    chunks = tuple(chunk(row, 0, [5] * size) for row, size in enumerate(sizes))
    with pytest.raises(InvariantBroken, match=r"have one token|logits of all its tokens"):
        Packer(BLOCK, PADDING_SLOT, PADDING_ROW).pack(chunks, num_decodes, None, np.zeros(200, np.int32))


def test_a_step_in_which_one_that_samples_nothing_stands_before_one_that_samples_is_refused() -> None:
    silent, loud = chunk(1, 4, [3], num_logits=0), chunk(2, 4, [3])
    packer = Packer(BLOCK, PADDING_SLOT, PADDING_ROW)
    packer.pack((loud, silent), 2, None, np.zeros(200, np.int32))
    with pytest.raises(InvariantBroken, match="stands before one that samples"):
        packer.pack((silent, loud), 2, None, np.zeros(200, np.int32))


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_chunk_that_wants_more_logits_than_it_has_tokens_is_refused(num_tokens: int) -> None:
    packer = Packer(BLOCK, PADDING_SLOT, PADDING_ROW)
    for num_logits in (num_tokens, num_tokens + 1):
        chunks = (chunk(1, 5, [3] * num_tokens, num_logits=num_logits),)
        with pytest.raises(InvariantBroken, match="more logits") if num_logits > num_tokens else contextlib.nullcontext():
            packer.pack(chunks, int(num_tokens == 1), None, np.zeros(200, np.int32))


def test_of_a_padded_step_only_chunks_that_sample_are_sampled_into_their_rows() -> None:
    """A prompt's earlier chunks are sampled all the same, but into the padding row; and what must not be written is not, in any chunk."""
    chunks = (chunk(1, 5, [3]), chunk(2, 0, [8, 9], num_logits=0), chunk(3, 2, [4, 5, 6], writes=False))
    packed = Packer(BLOCK, PADDING_SLOT, PADDING_ROW).pack(chunks, 1, Shape(9, 5, 5), np.full(200, -7, np.int32))
    x = packed.shape.views(torch.from_numpy(packed.ints), packed.num_decodes, 0, 0)
    assert x.sample_rows.tolist() == [1, PADDING_ROW, 3, PADDING_ROW, PADDING_ROW]
    assert x.sample_at.tolist() == [0, 2, 5, 5, 5]
    assert x.q_starts.tolist() == [0, 1, 3, 6, 6, 6], "padding tokens belong to no chunk"
    assert x.write_at.tolist() == [11 * BLOCK + 1, 20 * BLOCK, 20 * BLOCK + 1, *[PADDING_SLOT * BLOCK] * 6]
    assert (x.tokens.tolist()[6:], x.positions.tolist()[6:]) == ([0, 0, 0], [0, 0, 0])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=0, max_size=6), st.integers(0, 3))
@example([], 1)
@example([BLOCK - 1, BLOCK, 0], 0)
@example([BLOCK - 1, BLOCK, 0], 3)
def test_padding_touches_nothing_but_the_padding_block_and_row(starts: list[int], extra: int) -> None:
    chunks = tuple(chunk(row, start, [5]) for row, start in enumerate(starts))
    bucket = len(chunks) + extra
    if bucket == 0:
        return
    packed = Packer(BLOCK, PADDING_SLOT, PADDING_ROW).pack(chunks, len(chunks), Shape(bucket, bucket, bucket), np.full(500, -7, np.int32))
    x = packed.shape.views(torch.from_numpy(packed.ints), packed.num_decodes, 0, 0)
    assert x.num_decodes == bucket == len(x.tokens) == len(x.sample_at)
    assert x.q_starts.tolist() == list(range(bucket + 1))
    assert bool((torch.from_numpy(packed.ints) != -7).all()), "every input is written"
    for i in range(len(chunks), bucket):
        assert x.write_at[i] == PADDING_SLOT * BLOCK and x.tables[x.table_starts[i]] == PADDING_SLOT
        assert (x.kv_lens[i], x.rows[i], x.sample_rows[i]) == (1, PADDING_ROW, PADDING_ROW)


@pytest.mark.parametrize("slots", [[1], [1, 2, 3]])
def test_a_table_that_is_not_as_long_as_its_sequence_is_refused(slots: list[int]) -> None:
    packer = Packer(BLOCK, PADDING_SLOT, PADDING_ROW)
    with pytest.raises(InvariantBroken, match="not exactly as long"):
        packer.pack((chunk(1, 5, [1], slots=slots),), 1, None, np.zeros(200, np.int32))
