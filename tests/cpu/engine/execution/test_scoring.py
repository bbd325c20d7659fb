"""What is kept of keys by part, and what queries make of it."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.contract import Chunk, KeptSums, Scoring
from penstock.engine.execution.batch import PagedChunk
from penstock.engine.execution.scoring import ContextKeys, KeyBounds, Recency, _sum_up
from penstock.errors import InvariantBroken
from penstock.lanes.cpu import CpuLane

ARENA = torch.empty(0, 2, 2, 16, 2, 8)  # 2 layers, blocks of 16 tokens, 2 KV heads of 8
SCORING = Scoring(part_blocks=4, most_parts=5, first=0, slots=np.empty(0, np.int32), paged=False, num_parts=5)


def random_blocks(num: int = 20) -> torch.Tensor:
    return torch.randn(num, 16, 2, 8, generator=torch.Generator().manual_seed(num))


@pytest.mark.parametrize("cuts", [(4,), (1, 2, 3), (3, 9, 14), (7, 8, 9)])
def test_blocks_may_come_in_any_pieces(cuts: tuple[int, ...]) -> None:
    blocks, whole, cut = random_blocks(), KeyBounds(5, ARENA), KeyBounds(5, ARENA)
    _sum_up(whole, 1, SCORING, 0, blocks)
    for first, end in reversed(list(itertools.pairwise((0, *cuts, 20)))):
        _sum_up(cut, 1, SCORING, first, blocks[first:end])
    assert torch.equal(whole._bounds[1], cut._bounds[1])
    assert torch.equal(whole._bounds[1][:, :, 0], blocks.view(5, 64, 2, 8).amin(1))
    assert torch.isinf(whole._bounds[0]).all(), "of the other layer nothing has come"


def test_the_part_with_the_best_key_gets_the_vote() -> None:
    """Also where the average of its keys says nothing."""
    blocks = random_blocks() * 0.1
    query = torch.zeros(4, 8)
    query[:, 3] = 4.0
    blocks[9, 5, :, 3], blocks[9, 6, :, 3] = 20.0, -20.0
    bounds, scores = KeyBounds(5, ARENA), torch.zeros(5)
    for layer in range(2):
        _sum_up(bounds, layer, SCORING, 0, blocks)
        bounds.add_scores(layer, query, scores)
    assert int(scores.argmax()) == 9 // 4
    assert float(scores.sum()) == pytest.approx(2 * 4), "each head of each layer has one vote"


def test_bounds_are_never_below_any_key() -> None:
    blocks, query = random_blocks(), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    bounds = KeyBounds(5, ARENA)
    _sum_up(bounds, 0, SCORING, 0, blocks)
    low, high = bounds._bounds[0].unbind(2)
    heads = query.view(2, 2, 8)
    best = torch.einsum("kgd,pkd->kgp", heads.clamp(min=0), high) + torch.einsum(
        "kgd,pkd->kgp", heads.clamp(max=0), low
    )
    scores = torch.zeros(5)
    bounds.add_scores(0, query, scores)
    expected = torch.softmax(best * 8**-0.5 / 2, -1).sum((0, 1))
    assert torch.allclose(scores, expected)
    true = torch.einsum("kgd,ptkd->kgpt", heads, blocks.view(5, 64, 2, 8)).amax(-1)
    assert (best >= true - 1e-4).all()


def test_recency_looks_at_nothing() -> None:
    recency, scores = Recency(5, ARENA), torch.zeros(5)
    for layer in range(2):
        recency.add_scores(layer, torch.randn(4, 8), scores)
    assert scores.tolist() == [1, 2, 3, 4, 5]


# ------------------------------------------------------------------------------------- over a request's steps

LAYERS, TOKENS, HEADS, WIDTH, PART, MOST = 2, 4, 2, 8, 4, 10  # a part has 4 blocks of 4 tokens
NUM_BLOCKS = PART * MOST


class Scored:
    """One request and its blocks. Block `n` is in slot `n` of an arena, or in host memory."""

    def __init__(self, known: ContextKeys, id: str, row: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.known, self.id, self.row = known, id, row
        self.blocks = torch.randn(LAYERS, NUM_BLOCKS, TOKENS, HEADS, WIDTH, generator=generator)
        self.q = torch.randn(LAYERS, 2 * HEADS, WIDTH, generator=generator)  # of its last token
        self.summed: set[int] = set()

    def chunk(self, scoring: Scoring | None, paged: list[int], num_tokens: int) -> Chunk:
        return Chunk(
            self.id,
            self.row,
            0,
            (1,) * num_tokens,
            np.empty(0, np.int32),
            True,
            1,
            paged=np.array(paged),
            scoring=scoring,
        )

    def bounds(self) -> torch.Tensor:
        found = self.known._known[self.id]
        assert isinstance(found, KeyBounds)
        return found._bounds

    def check(self) -> None:
        for part in range(MOST):
            blocks = sorted(self.summed & set(range(PART * part, PART * part + PART)))
            low, high = self.bounds()[:, part].unbind(2)
            if not blocks:
                assert torch.isinf(low).all() and torch.isinf(high).all(), "nothing of it has come"
                continue
            keys = self.blocks[:, blocks].flatten(1, 2)
            assert torch.equal(low, keys.amin(1)) and torch.equal(high, keys.amax(1)), f"part {part}"

    def expected_scores(self, num_parts: int) -> torch.Tensor:
        scores = torch.zeros(num_parts)
        for layer in range(LAYERS):
            self.known._known[self.id].add_scores(layer, self.q[layer], scores)
        return scores


class Stepped:
    """Steps of some requests, as the executor makes them: pieces in between, layers one after the other."""

    def __init__(self, lane: CpuLane, num_kept: int = 0, scorer: str = "qk") -> None:
        self.arena = torch.zeros(2 * NUM_BLOCKS, LAYERS, 2, TOKENS, HEADS, WIDTH)
        uploads = SimpleNamespace(send=lambda slots: torch.tensor(slots, dtype=torch.int32))
        attention: Any = SimpleNamespace(arena=self.arena, lse_nats=0.5)
        self.known = ContextKeys(scorer, attention, lane, uploads, num_kept)  # type: ignore[arg-type]
        self.out: dict[str, torch.Tensor] = {}

    def place(self, request: Scored, at: int) -> None:
        """Its blocks are on the device from slot `at` on."""
        self.arena[at : at + NUM_BLOCKS, :, 0] = request.blocks.transpose(0, 1)

    def run(self, *shares: tuple[Scored, Scoring | None, list[int], int], resident: float = 1.0) -> None:
        """By request: what is asked for, its blocks that stream in, and its tokens in the step."""
        chunks, paged, first, table_at = [], list[PagedChunk](), 0, 40
        for request, scoring, blocks, num_tokens in shares:
            chunks.append(request.chunk(scoring, blocks, num_tokens))
            if blocks:
                paged.append(PagedChunk((first, first + num_tokens), np.array(blocks, np.int32), table_at))
                table_at += len(blocks)
            first += num_tokens
        step = self.known.for_step(chunks, SimpleNamespace(paged=tuple(paged)), self._room)  # type: ignore[arg-type]
        assert (step is None) == all(scoring is None for _, scoring, _, _ in shares)
        if step is None:
            return
        for layer in range(LAYERS):
            q = torch.full((first, 2 * HEADS, WIDTH), 100.0)
            end = 0
            for request, _, _, num_tokens in shares:
                end += num_tokens
                q[end - 1] = request.q[layer]
            lse = torch.zeros(first, 2 * HEADS)
            step.note_resident(lse)
            for (request, *_), one in zip([share for share in shares if share[2]], paged, strict=True):
                for at in range(0, len(one.slots), 3):
                    slots = one.slots[at : at + 3]
                    buffer = torch.stack([request.blocks[layer, slots].flatten(0, 1)] * 2)
                    op = step.piece(
                        layer, PagedChunk(one.rows, slots, one.table_at + at), lambda buffer=buffer: buffer
                    )  # type: ignore[misc]
                    if op is not None:
                        op()
            lse += resident  # what streams in is added to the same tensor
            step.add_layer(layer, q, lse)
        step.finish()

    def _room(self, id: str, scoring: Scoring) -> torch.Tensor:
        self.out[id] = torch.zeros(scoring.num_parts + 1, dtype=torch.int32)
        return self.out[id]

    def scores(self, request: Scored) -> torch.Tensor:
        return self.out[request.id].view(torch.float32)


@pytest.fixture
def lane() -> Iterator[CpuLane]:
    made = CpuLane("compute")
    yield made
    made.close(10.0)


def scoring_of(
    first: int, end: int, at: int = 0, paged: bool = False, num_parts: int = 0, recall: bool = False
) -> Scoring:
    return Scoring(
        PART, MOST, first, np.arange(at + first, at + end, dtype=np.int32), paged, num_parts, recall
    )


@pytest.mark.parametrize("num_paged", [0, 1, 4, 13, 22])
def test_from_its_prompt_to_its_answer_sums_are_those_of_its_blocks(num_paged: int, lane: CpuLane) -> None:
    """Beside another one, and one that asks for nothing; a step that reads all to see what was left out adds
    nothing to them."""
    steps = Stepped(lane)
    one, other = Scored(steps.known, "one", 3, 1), Scored(steps.known, "other", 0, 2)
    nobody = Scored(steps.known, "nobody", 1, 3)
    steps.place(one, 0)
    steps.place(other, NUM_BLOCKS)
    exact = scoring_of(num_paged, 22, paged=num_paged > 0, num_parts=5)
    steps.run(
        (nobody, None, [0, 1], 2),
        (other, scoring_of(0, 6, at=NUM_BLOCKS), [], 1),
        (one, exact, list(range(num_paged)), 7),
    )
    one.summed, other.summed = set(range(22)), set(range(6))
    for request in (one, other):
        request.check()
    assert (
        torch.allclose(steps.scores(one)[:-1], one.expected_scores(5))
        and "other" not in steps.out
        and "nobody" not in steps.known._known
    )
    left_out = [block for block in range(20) if block not in (4, 5, 6, 7)]
    for first, end in ((22, 23), (23, 23), (23, 30)):
        recall = scoring_of(first, end, num_parts=end // PART, recall=True)
        steps.run((one, recall, left_out, 1), (other, None, [], 1), resident=2.0)
        one.summed |= set(range(first, end))
        one.check()
        assert torch.allclose(steps.scores(one)[:-1], one.expected_scores(end // PART))
        assert float(steps.scores(one)[-1]) == pytest.approx(np.exp(-2.0 * 0.5)), (
            "of each layer alike, what was there before the pieces"
        )
    steps.run((one, scoring_of(30, 30, num_parts=7), [], 1))
    assert float(steps.scores(one)[-1]) == 0.0, "nobody asked"


def test_what_has_left_is_forgotten_behind_the_steps_that_use_it(lane: CpuLane) -> None:
    """A step that was launched for it would make it anew, and its next life would begin with half of what it
    was."""
    steps = Stepped(lane)
    one, other = Scored(steps.known, "one", 3, 1), Scored(steps.known, "other", 0, 2)
    gate = threading.Event()
    lane.submit(lambda: gate.wait(60.0) and None, label="a step that runs")
    runs = [functools.partial(steps.run, (request, scoring_of(0, 8), [], 1)) for request in (one, other)]
    launched = [lane.submit(run, label="launched") for run in runs]
    steps.known.forget([("one", range(0)), ("gone before", range(2))])
    gate.set()
    lane.record().wait_passed(60.0)
    assert [ticket.error() for ticket in launched] == [None, None]
    assert set(steps.known._known) == {"other"}


def test_what_is_known_of_its_keys_is_kept_in_its_place_and_taken_up_by_the_next_turn(lane: CpuLane) -> None:
    """Of which the first parts may be enough; nothing beside the place is touched, and the next turn adds to
    what it has."""
    steps = Stepped(lane, num_kept=12)
    one, other, again = (
        Scored(steps.known, id, row, seed)
        for id, row, seed in (("one", 3, 1), ("other", 0, 2), ("again", 2, 1))
    )
    steps.known._kept.fill_(7.0)
    for request in (one, other):
        steps.place(request, 0)
        steps.run((request, scoring_of(0, 22), [], 1))
    steps.known.forget([("one", range(2, 7)), ("other", range(8, 11))])
    lane.record().wait_passed(60.0)
    width = steps.known._width
    assert (steps.known._kept[: 2 * width] == 7.0).all() and (
        steps.known._kept[7 * width : 8 * width] == 7.0
    ).all()
    steps.place(again, 0)
    goes_on = scoring_of(16, 16, num_parts=4)._replace(kept=KeptSums(2, 7, 4))
    steps.run((again, goes_on, [], 1))
    again.summed = set(range(16))
    again.check()
    assert torch.allclose(steps.scores(again)[:-1], again.expected_scores(4))
    steps.run((again, scoring_of(16, 30), [], 1))
    again.summed = set(range(30))
    again.check()


def test_more_blocks_than_its_life_has_are_no_part_of_it(lane: CpuLane) -> None:
    steps = Stepped(lane)
    one = Scored(steps.known, "one", 3, 1)
    with pytest.raises(InvariantBroken, match="41 blocks are summed up for a request of 10 parts"):
        steps.run((one, scoring_of(NUM_BLOCKS - 1, NUM_BLOCKS + 1), [], 1))
