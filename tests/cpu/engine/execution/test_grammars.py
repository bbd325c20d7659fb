"""Grammars as they are compiled: once for all that ask, in a bounded line, and nothing stays of what
failed."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np
import psutil
import pytest

from penstock.contract import Chunk, Grammar, SamplingParams, Start
from penstock.engine.execution import grammars as module
from penstock.engine.execution import trials
from penstock.engine.execution.grammars import Grammars, Matcher
from penstock.engine.execution.masks import Masks
from penstock.errors import EngineClosed, InvalidRequest, Overloaded
from penstock.lanes.cpu import CpuLane
from penstock.models.tokenizer import ByteTokenizer

pytest.importorskip("llguidance", reason="structured output is an extra")


def endless(number: int) -> str:
    """Each of its patterns is compared with all others; llguidance's own limits do not count that."""
    return json.dumps(
        {
            "type": "object",
            "patternProperties": {f"^q{number}p{i}.*x{i}$": {"type": "string"} for i in range(800)},
        }
    )


ENDLESS = Grammar("json_schema", endless(0))


class Gated:
    """Grammars whose compiling is noted, and can be held."""

    def __init__(self) -> None:
        self.grammars = Grammars(ByteTokenizer(258), 258, [])
        self.compiled: list[Grammar] = []
        self.gate, self.begun = threading.Event(), threading.Semaphore(0)
        self.gate.set()
        self.errors: dict[str, BaseException] = {}
        self._inner = self.grammars._vocabulary.source
        self.grammars._vocabulary.source = self._source  # type: ignore[method-assign]

    def _source(self, grammar: Grammar) -> str:
        self.compiled.append(grammar)
        self.begun.release()
        assert self.gate.wait(60.0)
        if (error := self.errors.pop(grammar.text, None)) is not None:
            raise error
        return self._inner(grammar)

    def wait(self, text: str) -> Matcher:
        return self.grammars.begin(Grammar("regex", text)).result(60.0)


@pytest.fixture
def gated() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.gate.set()
    made.grammars.close()


@pytest.mark.parametrize("error", [InvalidRequest("no"), MemoryError("no")], ids=repr)
def test_one_that_failed_takes_no_place_and_is_tried_again(gated: Gated, error: BaseException) -> None:
    gated.errors["ab"] = error
    with pytest.raises(type(error)):
        gated.wait("ab")
    assert gated.wait("ab").error is None
    assert [grammar.text for grammar in gated.compiled] == ["ab", "ab"]


def test_any_number_that_cannot_be_met_leaves_room_for_the_next(gated: Gated) -> None:
    for number in range(module.MOST_COMPILING + 2):
        with pytest.raises(InvalidRequest, match="regular expression cannot be"):
            gated.wait(f"(a{number}")
    assert gated.wait("ab").error is None


def test_so_many_are_compiled_at_once_and_one_grammar_once_for_all_who_wait(gated: Gated) -> None:
    gated.gate.clear()
    futures: list[Future[Matcher]] = [
        gated.grammars.begin(Grammar("regex", f"a{number}")) for number in range(module.MOST_COMPILING)
    ]
    for _ in futures:
        assert gated.begun.acquire(timeout=60.0), "each has a thread: none waits for another"
    with pytest.raises(Overloaded):
        gated.grammars.begin(Grammar("regex", "one more"))
    futures.append(gated.grammars.begin(Grammar("regex", "a3")))
    gated.gate.set()
    assert all(future.result(60.0).error is None for future in futures)
    assert gated.wait("one more").error is None
    assert len(gated.compiled) == module.MOST_COMPILING + 1


def test_it_is_given_up_when_all_who_wait_have_left_and_not_before(gated: Gated) -> None:
    first, second = (gated.grammars.begin(ENDLESS) for _ in range(2))
    assert first.cancel()
    ordinary = gated.wait("ab")
    assert ordinary.error is None and not second.done()
    assert second.cancel()
    gated.grammars.close()  # waits for its thread; a trial that went on would be refused, not given up
    with pytest.raises(CancelledError):
        second.result(0.0)


@pytest.mark.parametrize(
    ("cpu_s", "clock_s"), [(1, 300.0), (300, 1.0)], ids=["by its processor time", "by the clock"]
)
def test_one_that_never_ends_is_refused_with_the_keyword_and_others_go_on_meanwhile(
    gated: Gated, monkeypatch: pytest.MonkeyPatch, cpu_s: int, clock_s: float
) -> None:
    monkeypatch.setattr(trials, "TRIAL_CPU_S", cpu_s)
    monkeypatch.setattr(trials, "TRIAL_S", clock_s)
    futures = [gated.grammars.begin(Grammar("json_schema", endless(number))) for number in range(3)]
    assert gated.wait("ab").error is None and not any(future.done() for future in futures)
    for future in futures:
        with pytest.raises(
            InvalidRequest,
            match=r"too complex: .* most of the work is for patternProperties",
        ):
            future.result(60.0)


def test_one_that_takes_too_much_memory_is_refused(gated: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "TRIAL_MIB", 1)
    with pytest.raises(InvalidRequest, match="too complex"):
        gated.grammars.begin(Grammar("json_schema", '{"type": "integer", "multipleOf": 9973}')).result(60.0)


def test_a_close_ends_one_that_never_ends_and_waits_for_its_thread(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "TRIAL_S", 300.0)
    monkeypatch.setattr(trials, "TRIAL_CPU_S", 300)
    wait_fits = trials.Trial.wait_fits

    def slow(self: trials.Trial, source: str) -> bool:
        try:
            return wait_fits(self, source)
        finally:
            threading.Event().wait(0.05)  # a close that does not wait for the thread is over by then

    monkeypatch.setattr(trials.Trial, "wait_fits", slow)
    future = gated.grammars.begin(ENDLESS)
    assert gated.begun.acquire(timeout=60.0)
    gated.grammars.close()
    with pytest.raises(EngineClosed):
        future.result(0.0)


def test_a_process_for_trials_that_was_killed_is_started_anew(gated: Gated) -> None:
    assert gated.wait("ab").error is None
    for child in psutil.Process().children():
        if any("trial_process" in word for word in child.cmdline()):
            child.kill()
            child.wait(60.0)
    assert gated.wait("cd").error is None


def test_a_long_text_that_has_to_come_is_cut_into_tokens_by_its_beginning(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for again with every token of the answer."""
    asked: list[int] = []
    encode = ByteTokenizer.encode
    monkeypatch.setattr(
        ByteTokenizer,
        "encode",
        lambda self, text, **how: asked.append(len(text)) or encode(self, text, **how),
    )
    matcher = gated.grammars.begin(Grammar("choice", json.dumps(["xé" * 20_000]))).result(60.0).copy()
    for token in "xéxé".encode():
        assert allowed(gated, matcher) == [token]
        matcher.consume([token])
    assert asked and max(asked) <= 1024


def test_what_was_compiled_lately_is_there_though_nobody_holds_it_and_what_somebody_holds_stays(
    gated: Gated,
) -> None:
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
    assert [grammar.text for grammar in gated.compiled].count("a") == 2


def allowed(gated: Gated, matcher: Matcher) -> list[int]:
    """The tokens that may come next."""
    words = np.zeros((1, gated.grammars.num_words), np.int32)
    Matcher.fill([(matcher, 0)], words)
    return [id for id in range(258) if words[0, id // 32] >> id % 32 & 1]


def test_an_answer_moves_its_own_copy_alone(gated: Gated) -> None:
    compiled = gated.wait("ab")
    one, other = compiled.copy(), compiled.copy()
    one.consume([97])
    assert [allowed(gated, matcher) for matcher in (compiled, other, one)] == [[97], [97], [98]]


def test_a_mask_whose_token_never_comes_allows_every_token(gated: Gated) -> None:
    """Its request has ended, or begins anew. What the buffer had from steps before would be some other
    request's, or nothing at all."""
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


def test_each_of_a_list_of_choices_can_be_written_and_nothing_else(gated: Gated) -> None:
    for choices in CHOICES.values():
        compiled = gated.grammars.wait_compiled(Grammar("choice", json.dumps(choices)))
        for choice in (*choices[:4], choices[-1]):
            matcher = compiled.copy()
            for byte in choice.encode():
                assert byte in allowed(gated, matcher)
                matcher.consume([byte])
            assert matcher.error is None and matcher.is_accepting
            if not matcher.is_over:
                going_on = {one[len(choice)] for one in choices if one.startswith(choice) and one != choice}
                assert {chr(byte) for byte in allowed(gated, matcher) if byte < 128} == going_on
