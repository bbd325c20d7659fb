"""The masks of a step are those of its requests' answers so far, whatever rows they had before, in any order
of starts, retractions and steps, of which one is always ahead. A request may have the id of one that is
over."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.contract import Chunk, Grammar, SamplingParams, Start
from penstock.engine.execution.grammars import Grammars, Matcher
from penstock.engine.execution.masks import Masks
from penstock.lanes.cpu import CpuLane
from penstock.models.tokenizer import ByteTokenizer

pytest.importorskip("llguidance", reason="structured output is an extra")

NUM_ROWS = 4
NUM_PROMPT = 3
GRAMMARS = [
    None,
    Grammar("regex", "([a-d]x)*"),
    Grammar("regex", "[0-9]{1,9}[a-f]{3}"),
    Grammar("choice", '["yes", "yesterday", "no"]'),
]


@dataclass
class Asked:
    """One request; `row` -1: it waits."""

    id: str
    grammar: Grammar | None
    output: list[int] = field(default_factory=list)
    row: int = -1
    over: bool = False
    in_flight: bool = False  # a token of it was chosen, and nobody was told yet


class World:
    """Masks, and what they have to be by matchers that are made anew for every step."""

    def __init__(self, grammars: Grammars, lane: CpuLane, r: random.Random) -> None:
        self.r, self.grammars, self.lane = r, grammars, lane
        self.masks = Masks(grammars, NUM_ROWS, lane)
        self.asked: list[Asked] = []
        self.news: list[tuple[Asked, int]] = []  # tokens of the step before
        self.num_checked = 0

    def running(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.row >= 0]

    def start(self) -> None:
        rows = set(range(NUM_ROWS)) - {asked.row for asked in self.asked}
        waiting = [asked for asked in self.asked if asked.row < 0 and not asked.over and not asked.in_flight]
        if self.r.random() < 0.5 or not waiting:
            open_ids = {asked.id for asked in self.asked if not asked.over or asked.in_flight}
            free = sorted({asked.id for asked in self.asked} - open_ids)
            id = self.r.choice(free) if free and self.r.random() < 0.5 else f"r{len(self.asked)}"
            waiting = [Asked(id, self.r.choice(GRAMMARS))]
            self.asked += waiting
        if rows:
            asked = self.r.choice(waiting)
            asked.row = self.r.choice(sorted(rows))
            sampling = SamplingParams(max_tokens=100, grammar=asked.grammar)
            self.masks.start(Start(asked.row, asked.id, sampling, tuple(asked.output), None, NUM_PROMPT))
            assert len(self.masks.answers) <= NUM_ROWS, (
                "what has ended is forgotten when its row is used again"
            )

    def leave(self) -> None:
        """It ends, or is pushed out. The masks are not told."""
        if running := self.running():
            asked = self.r.choice(running)
            asked.row, asked.over = -1, self.r.random() < 0.3

    def step(self) -> None:
        """Launched while the tokens of the step before are not known."""
        chosen = self.r.sample(self.running(), len(self.running()))
        num_logits = [asked.in_flight or self.r.random() < 0.7 for asked in chosen]
        places = [len(asked.output) + asked.in_flight + NUM_PROMPT for asked in chosen]
        found = [
            Chunk(asked.id, asked.row, place - 1, (1,), np.zeros(1, np.int32), True, int(wanted))
            for asked, place, wanted in zip(chosen, places, num_logits, strict=True)
        ]
        masks = self.masks.for_step(found, pinned=False)
        self._tell()
        wanted = {
            at: asked for at, asked in enumerate(chosen) if num_logits[at] and asked.grammar is not None
        }
        assert (masks is None) == (not wanted) and (masks is None or list(masks.at) == list(wanted)), (
            "one for each that has a grammar"
        )
        rows: dict[int, NDArray[np.int32]] = {}
        if masks is not None:
            ended = {ending.request_id for ending in masks.wait_filled(self.lane)}
            rows = dict(zip(masks.at, masks.rows, strict=True))
            for at, asked in wanted.items():
                self._check(asked, rows[at], asked.id in ended)
            self.masks.used_until(self.lane.record())
        for at, asked in enumerate(chosen):
            if num_logits[at] and not asked.over:
                asked.in_flight = True
                self.news.append((asked, self._any_of(rows.get(at))))

    def _tell(self) -> None:
        self.masks.advance([(asked.id, (token,)) for asked, token in self.news])
        for asked, token in self.news:
            asked.output.append(token)
            asked.in_flight = False
        self.news = []

    def _check(self, asked: Asked, row: NDArray[np.int32], ended: bool) -> None:
        assert asked.grammar is not None
        matcher, words = (
            self.grammars.wait_compiled(asked.grammar).copy(),
            np.zeros((1, self.grammars.num_words), np.int32),
        )
        matcher.consume(asked.output)
        if not matcher.is_over:
            Matcher.fill([(matcher, 0)], words)
        is_over = matcher.is_over or not words.any()
        assert ended == is_over, f"{asked.id} is over: {is_over}"
        assert is_over or (row == words[0]).all(), (
            f"{asked.id} may go on otherwise behind {bytes(asked.output)!r}"
        )
        asked.over |= is_over
        asked.row = -1 if is_over else asked.row
        self.num_checked += 1

    def _any_of(self, row: NDArray[np.int32] | None) -> int:
        if row is None:
            return self.r.randrange(97, 123)
        return int(
            self.r.choice(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
        )


@pytest.fixture(scope="module")
def lane() -> Iterator[CpuLane]:
    lane = CpuLane("compute")
    yield lane
    lane.close(10.0)


@pytest.mark.parametrize("seed", range(3))
def test_masks_are_those_of_the_answers_so_far_whatever_rows_they_had(seed: int, lane: CpuLane) -> None:
    grammars = Grammars(ByteTokenizer(258), 258, [])
    world = World(grammars, lane, random.Random(seed))
    for _ in range(300):
        world.r.choices([world.start, world.leave, world.step], [3, 1, 6])[0]()
    world.masks.close()
    grammars.close()
    assert world.num_checked > 100
