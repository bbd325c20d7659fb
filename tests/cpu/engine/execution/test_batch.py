"""Packing a plan into step inputs: every index, padding, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.contract import Chunk, StepPlan
from penstock.engine.execution.ahead import pack_nexts
from penstock.engine.execution.batch import Packed, Packer, Shape, StepInputs
from penstock.errors import InvariantBroken

BLOCK, PADDING_SLOT, PADDING_ROW = 4, 99, 7


def chunk(
    row: int,
    start: int,
    tokens: list[int],
    *,
    slots: list[int] | None = None,
    writes: bool = True,
    num_logits: int = 1,
) -> Chunk:
    num_slots = -(-(start + len(tokens)) // BLOCK)
    table = np.array(slots if slots is not None else range(row * 10, row * 10 + num_slots), np.int32)
    return Chunk(f"r{row}", row, start, tuple(tokens), table, writes, num_logits)


def test_steps_that_do_not_hold_together_are_refused() -> None:
    decode, prompt, other = chunk(1, 5, [3]), chunk(2, 0, [8, 9]), chunk(3, 2, [4, 5, 6])
    silent, several = chunk(1, 4, [3], num_logits=0), chunk(1, 5, [3], num_logits=2)
    prompts = decode, prompt, other
    for chunks, num_decodes, bucket, why in (
        ((other, decode), 1, None, "have one token|logits of all its tokens"),
        ((prompt,), 1, None, "have one token|logits of all its tokens"),
        ((decode,), 0, None, "have one token|logits of all its tokens"),
        ((silent, chunk(2, 4, [3])), 2, None, "stands before one that samples"),
        ((several,), 1, None, "more logits"),
        ((chunk(1, 5, [3] * 3, num_logits=4),), 0, None, "more logits"),
        ((chunk(1, 5, [1], slots=[1]),), 1, None, "not exactly as long"),
        ((chunk(1, 5, [1], slots=[1, 2, 3]),), 1, None, "not exactly as long"),
        (prompts, 1, Shape(9, 2, 2, num_beside=1), "does not fit"),
        (prompts, 1, Shape(9, 4, 4), "does not fit"),
        (prompts, 1, Shape(2, 2, 2), "does not fit"),
    ):
        with pytest.raises(InvariantBroken, match=why):
            Packer(BLOCK, PADDING_SLOT, PADDING_ROW).pack(
                chunks, num_decodes, bucket, np.zeros(200, np.int32)
            )


@pytest.mark.parametrize("num_ahead", [1, 3, 4, 9])
def test_a_draft_behind_the_step_is_written_to_a_slot_of_its_own_request_or_to_padding(
    num_ahead: int,
) -> None:
    """Of every row, those that pad the step included, and however many blocks the drafts take."""
    chunks = []
    for row, room in enumerate((0, 1, num_ahead)):
        num_slots = -(-(6 + room) // BLOCK)
        chunks.append(
            chunk(row, 5, [3], slots=list(range(row * 10, row * 10 + num_slots)))._replace(room=room)
        )
    packer = Packer(BLOCK, PADDING_SLOT, PADDING_ROW, num_ahead)
    packed = packer.pack(tuple(chunks), 3, Shape(5, 5, 5), np.full(200, -7, np.int32), num_ahead)
    x = packed.shape.views(torch.from_numpy(packed.ints), packed.num_decodes, 0, 0)
    assert x.kv_lens.tolist() == [6, 6, 6, 1, 1]
    for row, (first, end) in enumerate(zip(x.table_starts.tolist(), x.kv_lens.tolist(), strict=True)):
        slots = chunks[row].slots.tolist() if row < len(chunks) else []
        for place in range(end, end + num_ahead):
            own = slots[place // BLOCK] if place // BLOCK < len(slots) else PADDING_SLOT
            assert x.tables[first + place // BLOCK] == own, (row, place)


# -------------------------------------------------------------------------- against a plain reading of a plan


class Reading:
    """What each row of a step has to see, worked out one token at a time."""

    def __init__(self, chunks: tuple[Chunk, ...], num_decodes: int) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.write_at: list[int] = []
        self.rows: list[tuple[int, int, list[int], int]] = []  # first token, end, table, row of its request
        self.samples: list[tuple[int, int]] = []  # token, row of its request; of each row its own
        self.sampled: list[list[int]] = []  # by row: the tokens that are sampled
        self.may_write: set[int] = set()
        for number, one in enumerate(chunks):
            first = len(self.tokens)
            for at, token in enumerate(one.tokens):
                position = one.start + at
                slot = int(one.slots[position // BLOCK - one.num_elsewhere])
                self.tokens.append(token)
                self.positions.append(position)
                self.write_at.append(slot * BLOCK + position % BLOCK if one.writes else PADDING_SLOT * BLOCK)
                self.may_write.add(self.write_at[-1] // BLOCK)
            before = range(max(0, one.start - one.num_unsure), one.start)
            self.may_write |= {int(one.slots[position // BLOCK - one.num_elsewhere]) for position in before}
            wanted = list(range(len(self.tokens) - one.num_logits, len(self.tokens)))
            ends = range(first + 1, len(self.tokens) + 1) if number < num_decodes else [len(self.tokens)]
            for end in ends:
                begin = end - 1 if number < num_decodes else first
                table = one.slots[: -(-(one.start + end - first) // BLOCK) - one.num_elsewhere].tolist()
                self.rows.append((begin, end, table, one.row))
                self.sampled.append([token for token in wanted if begin <= token < end])

    def pad(self, num_decodes: int) -> None:
        """Rows of padding between those of one token and the rest."""
        at = next(
            (number for number, (first, end, *_) in enumerate(self.rows) if end - first > 1), len(self.rows)
        )
        gap = num_decodes - at
        for column, blank in ((self.tokens, 0), (self.positions, 0), (self.write_at, PADDING_SLOT * BLOCK)):
            column[at:at] = [blank] * gap
        moved = [(first + gap, end + gap, table, row) for first, end, table, row in self.rows[at:]]
        self.rows[at:] = [
            (number, number + 1, [PADDING_SLOT], PADDING_ROW) for number in range(at, num_decodes)
        ] + moved
        # rows as they are sampled
        self.order = [*range(at), *range(num_decodes, len(self.rows)), *range(at, num_decodes)]
        self.sampled[at:at] = [[]] * gap


def random_plan(rng: np.random.Generator) -> tuple[tuple[Chunk, ...], int]:
    """Decodes with drafts and without, prompts, sequences whose first blocks are elsewhere, and some that
    write nothing. Every fourth plan has plain decodes only, which have a way of their own."""
    is_plain = bool(rng.random() < 0.25)
    num_decodes, num_prompts = int(rng.integers(is_plain, 5)), 0 if is_plain else int(rng.integers(0, 3))
    num_prompts += num_decodes + num_prompts == 0
    made = []
    for row in range(num_decodes + num_prompts):
        is_decode = row < num_decodes
        num_tokens = 1 if is_decode else int(rng.integers(2, 9))
        if is_decode and not is_plain and rng.random() < 0.5:
            num_tokens += int(rng.integers(1, 5))
        writes = bool(rng.random() < 0.8) or num_tokens > 1 or is_plain
        num_logits = num_tokens if is_decode and num_tokens > 1 else int(rng.integers(0, 2))
        elsewhere = (
            int(rng.integers(1, 4))
            if not is_plain and rng.random() < 0.3 and (num_tokens == 1 or not is_decode)
            else 0
        )
        start = int(rng.integers(0, 12)) + elsewhere * BLOCK
        num_unsure = int(rng.integers(0, 4)) if is_decode and not elsewhere and not is_plain else 0
        num_slots = -(-(start + num_tokens) // BLOCK) - elsewhere
        slots = rng.permutation(9)[:num_slots].astype(np.int32) + 10 * row
        num_paged = int(rng.integers(0, elsewhere + 1))
        one = Chunk(
            f"r{row}", row, start, tuple(rng.integers(0, 50, num_tokens).tolist()), slots, writes, num_logits
        )
        paged = np.arange(num_paged, dtype=np.int32) + 50 + 10 * row if num_paged else None
        made.append(
            one._replace(paged=paged, num_left_out=elsewhere - num_paged, num_unsure=min(num_unsure, start))
        )
    made[:num_decodes] = sorted(made[:num_decodes], key=lambda one: one.num_logits == 0)  # as plans have them
    return tuple(made), num_decodes


def test_any_plan_is_packed_as_it_reads() -> None:
    for seed in range(150):
        check_packed(seed)


def check_packed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    chunks, num_decodes = random_plan(rng)
    reading = Reading(chunks, num_decodes)
    num_tokens, num_rows = len(reading.tokens), len(reading.rows)
    bucket = None
    if seed % 2 and not any(one.num_paged for one in chunks):
        is_decode = num_decodes == len(chunks)
        num_single = sum(end - first == 1 for first, end, *_ in reading.rows)
        num_beside, num_prompts = (
            num_single + int(rng.integers(0, 4)),
            num_rows - num_single + int(rng.integers(0, 3)),
        )
        if is_decode:
            bucket = Shape(num_beside, num_beside, num_beside)
        else:
            num_padded, num_room = (
                num_beside + num_prompts,
                max(num_tokens - num_single + int(rng.integers(0, 4)), num_prompts + 1),
            )
            bucket = Shape(num_beside + num_room, num_padded, num_padded, num_beside=num_beside)
    packed = Packer(BLOCK, PADDING_SLOT, PADDING_ROW).pack(
        chunks, num_decodes, bucket, np.full(600, -7, np.int32)
    )
    if bucket is not None:
        reading.pad(bucket.num_decodes)
        num_tokens = len(reading.tokens)
    ints = torch.from_numpy(packed.ints)
    x = packed.shape.views(ints, packed.num_decodes, packed.max_q_len, packed.max_kv_len)
    assert (
        x.tokens.tolist()[:num_tokens] == reading.tokens
        and x.positions.tolist()[:num_tokens] == reading.positions
    )
    assert x.write_at.tolist()[:num_tokens] == reading.write_at
    assert set(x.write_at.tolist()[num_tokens:]) <= {PADDING_SLOT * BLOCK}, (
        "padding is written where nobody reads"
    )
    for number, (first, end, table, row) in enumerate(reading.rows):
        assert (int(x.q_starts[number]), int(x.q_starts[number + 1])) == (first, end)
        kv_len, table_at = int(x.kv_lens[number]), int(x.table_starts[number])
        assert x.tables.tolist()[table_at : table_at + -(-kv_len // BLOCK)] == table
        assert kv_len % BLOCK == (reading.positions[end - 1] + 1) % BLOCK and int(x.rows[number]) == row
    check_samples(packed, x, reading, bucket is not None)
    assert set(packed.read_slots.tolist()) == {slot for one in chunks for slot in one.slots.tolist()}
    assert set(packed.write_slots.tolist()) == reading.may_write, (
        "what it may write is declared, and nothing else"
    )
    check_paged(packed, x, chunks)
    check_drafted(packed, ints, chunks, bucket is not None)


def check_samples(packed: Packed, x: StepInputs, reading: Reading, is_bucket: bool) -> None:
    found = list(zip(x.sample_at.tolist(), x.sample_rows.tolist(), strict=True))
    if not is_bucket:
        assert found == [
            (token, row[3])
            for row, tokens in zip(reading.rows, reading.sampled, strict=True)
            for token in tokens
        ]
        return
    for number, of_row in enumerate(reading.order):
        row, tokens = reading.rows[of_row], reading.sampled[of_row]
        assert found[number] == (row[1] - 1, row[3] if tokens else PADDING_ROW), "every row is sampled once"
    assert {row for _, row in found[len(reading.rows) :]} <= {PADDING_ROW}


def check_paged(packed: Packed, x: StepInputs, chunks: tuple[Chunk, ...]) -> None:
    first, expected = 0, []
    for one in chunks:
        if one.num_paged:
            expected.append(((first, first + one.num_tokens), one.paged.tolist()))  # type: ignore[union-attr]
        first += one.num_tokens
    assert [(one.rows, one.slots.tolist()) for one in packed.paged] == expected
    for one in packed.paged:
        assert x.tables.tolist()[one.table_at : one.table_at + len(one.slots)] == one.slots.tolist()


def check_drafted(packed: Packed, ints: torch.Tensor, chunks: tuple[Chunk, ...], is_bucket: bool) -> None:
    if not any(one.num_unsure for one in chunks) and not any(one.num_logits > 1 for one in chunks):
        assert packed.drafted is None
        return
    assert packed.drafted is not None
    assert packed.drafted.num_unsure == max(one.num_unsure for one in chunks)
    found, at, groups = packed.drafted.views(ints, ints), 0, []
    for one in chunks:
        size = max(one.num_logits, is_bucket)
        if size:
            assert found.unsure.tolist()[at : at + size] == [int(one.num_unsure > 0)] * size
            assert found.group_of.tolist()[at : at + size] == [len(groups)] * size
            groups.append((at, size - 1))
            at += size
    assert list(zip(found.starts.tolist(), found.lengths.tolist(), strict=True))[: len(groups)] == groups
    assert found.unsure.tolist()[at:] == [0] * (len(found.unsure) - at) and not any(
        found.lengths.tolist()[len(groups) :]
    )


@pytest.mark.parametrize(
    ("is_bucket", "gap"), [(False, 0), (True, 0), (True, 2)], ids=["eager", "captured", "padded between"]
)
def test_the_token_behind_each_is_known_or_the_number_of_its_sample(is_bucket: bool, gap: int) -> None:
    """In a captured step every row has a sample, also those that did not ask; padding is sampled last."""
    chunks = (
        chunk(1, 5, [3, 4], num_logits=2),
        chunk(2, 0, [8], num_logits=0)._replace(next_token=41),
        chunk(3, 0, [7]),
        chunk(4, 2, [4, 5, 6], num_logits=0)._replace(next_token=42),
        chunk(5, 0, [20, 21]),
    )
    into = np.full(12 + gap, -7, np.int32)
    pack_nexts(StepPlan(0, chunks, 3), gap, is_bucket, into)
    third, fifth = (3, 5) if is_bucket else (2, 3)
    assert into.tolist() == [-1, -2, 41, -1 - third, *[0] * gap, 5, 6, 42, 21, -1 - fifth, 0, 0, 0]
