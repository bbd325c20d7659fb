"""Grammars as they are compiled: once for all that ask, in a bounded line, and nothing stays of what failed."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from penstock.contract import Chunk, Grammar, SamplingParams, Start
from penstock.engine.execution import grammars as module
from penstock.engine.execution.grammars import Grammars, Matcher
from penstock.engine.execution.masks import Masks
from penstock.errors import InvalidRequest, Overloaded
from penstock.lanes.cpu import CpuLane
from penstock.models.tokenizer import ByteTokenizer

pytest.importorskip("llguidance", reason="structured output is an extra")


class Gated:
    """Grammars whose compiling is noted, and can be held."""

    def __init__(self) -> None:
        self.grammars = Grammars(ByteTokenizer(258), 258, [])
        self.compiled: list[Grammar] = []
        self.gate, self.begun = threading.Event(), threading.Semaphore(0)
        self.gate.set()
        self.errors: dict[str, BaseException] = {}
        self._inner = self.grammars._vocabulary.matcher
        self.grammars._vocabulary.matcher = self._matcher  # type: ignore[method-assign]

    def _matcher(self, grammar: Grammar) -> Matcher:
        self.compiled.append(grammar)
        self.begun.release()
        assert self.gate.wait(60.0)
        if (error := self.errors.pop(grammar.text, None)) is not None:
            raise error
        return self._inner(grammar)

    def wait(self, text: str) -> Matcher:
        return self.grammars.wait_compiled(Grammar("regex", text), 60.0)


@pytest.fixture
def gated() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.gate.set()
    made.grammars.close()


@pytest.mark.parametrize("error", [InvalidRequest("no"), RuntimeError("no"), MemoryError("no")], ids=lambda error: type(error).__name__)
def test_one_that_failed_takes_no_place_and_is_tried_again(gated: Gated, error: BaseException) -> None:
    gated.errors["ab"] = error
    with pytest.raises(type(error)):
        gated.wait("ab")
    assert not gated.grammars._compiling and not gated.grammars._compiled and not gated.grammars._recent
    assert gated.wait("ab").error is None
    assert [grammar.text for grammar in gated.compiled] == ["ab", "ab"]


def test_any_number_that_cannot_be_met_leaves_room_for_the_next(gated: Gated) -> None:
    for number in range(module._MOST_COMPILING + 2):
        with pytest.raises(InvalidRequest, match="regular expression cannot be"):
            gated.wait(f"(a{number}")
    assert gated.wait("ab").error is None and not gated.grammars._compiling


def test_the_line_is_bounded_and_whose_fault_a_wait_is_depends_on_whether_it_was_begun(gated: Gated) -> None:
    gated.gate.clear()
    futures: list[Future[Matcher]] = [gated.grammars.begin(Grammar("regex", f"a{number}")) for number in range(module._MOST_COMPILING)]
    for _ in range(module._NUM_THREADS):
        assert gated.begun.acquire(timeout=60.0)
    with pytest.raises(Overloaded):
        gated.grammars.begin(Grammar("regex", "one more"))
    assert gated.grammars.begin(Grammar("regex", "a3")) is futures[3], "who asks for one that is in line waits for the same"
    with pytest.raises(InvalidRequest, match="too complex: it was not compiled within 0 s"):
        gated.grammars.wait_compiled(Grammar("regex", "a0"), 0.0)
    with pytest.raises(Overloaded, match="was not begun in time"):
        gated.grammars.wait_compiled(Grammar("regex", f"a{module._MOST_COMPILING - 1}"), 0.0)
    gated.gate.set()
    assert all(future.result(60.0).error is None for future in futures)
    assert gated.wait("one more").error is None
    assert len(gated.compiled) == module._MOST_COMPILING + 1


def test_what_was_compiled_lately_is_there_though_nobody_holds_it_and_what_somebody_holds_stays(gated: Gated) -> None:
    held = gated.wait("held")
    gated.wait("a")
    gc.collect()
    gated.wait("a")
    assert [grammar.text for grammar in gated.compiled] == ["held", "a"]
    for number in range(module._KEPT):
        gated.wait(f"b{number}")
    gc.collect()
    assert gated.wait("held") is held
    gated.wait("a")
    assert [grammar.text for grammar in gated.compiled].count("a") == 2 and len(gated.grammars._compiled) <= module._KEPT + 2


def words_of(gated: Gated, matcher: Matcher) -> np.ndarray:
    words = np.zeros((1, gated.grammars.num_words), np.int32)
    Matcher.fill([(matcher, 0)], words)
    return words[0]


def test_an_answer_moves_its_own_copy_alone(gated: Gated) -> None:
    compiled = gated.wait("ab")
    first = words_of(gated, compiled)
    one, other = compiled.copy(), compiled.copy()
    one.consume([97])
    assert (words_of(gated, other) == first).all() and (words_of(gated, compiled) == first).all()
    assert not (words_of(gated, one) == first).all()


def test_a_mask_whose_token_never_comes_allows_every_token(gated: Gated) -> None:
    """Its request has ended, or begins anew. What the buffer had from steps before would be some other request's, or nothing at all."""
    lane = CpuLane("compute")
    masks = Masks(gated.grammars, 4, lane)
    try:
        sampling = SamplingParams(max_tokens=9, grammar=Grammar("regex", "abc"))
        masks.start(Start(0, "r", sampling, (), None, 3))
        first = masks.for_step([chunk(3)], pinned=False)
        assert first is not None and first.wait_filled(lane) == []
        for _ in range(8):  # the whole ring
            ahead: Any = masks.for_step([chunk(4)], pinned=False)
            ahead.rows[:] = 0
            assert ahead.wait_filled(lane) == [] and (ahead.rows == -1).all()
            masks.used_until(lane.record())
    finally:
        masks.close()
        lane.close(10.0)


def chunk(kv_len: int) -> Chunk:
    return Chunk("r", 0, kv_len - 1, (1,), np.zeros(1, np.int32), True, 1)


CHOICES = {
    "as many as a request can name": [str(number) for number in range(9000)],
    "one that begins another": ["no", "nope", "yes"],
    "none of them plain": ['"a"', "b\\", "c\n", "\N{GRINNING FACE}"],
    "nothing, or something": ["", "a"],
    "nothing": [""],
}


@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_each_of_a_list_of_choices_can_be_written_and_nothing_else(gated: Gated, choices: list[str]) -> None:
    compiled = gated.grammars.wait_compiled(Grammar("choice", json.dumps(choices)), 60.0)
    words = np.zeros((1, gated.grammars.num_words), np.int32)
    for choice in (*choices[:4], choices[-1]):
        matcher = compiled.copy()
        for byte in choice.encode():
            Matcher.fill([(matcher, 0)], words)
            assert words[0, byte // 32] >> byte % 32 & 1
            matcher.consume([byte])
        assert matcher.error is None and matcher.is_accepting
        if not matcher.is_over:
            Matcher.fill([(matcher, 0)], words)
            allowed = {chr(byte) for byte in range(128) if words[0, byte // 32] >> byte % 32 & 1}
            assert allowed == {one[len(choice)] for one in choices if one.startswith(choice) and one != choice}
