"""The hand-over from the engine's thread, the seats, and a choice's text, each by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.contract import (
    MAX_SEED,
    FinishReason,
    KvSource,
    SamplingParams,
    Submission,
    TokenEvent,
    TokenLogprob,
)
from penstock.errors import EngineClosed, InvalidRequest, Overloaded, StepFailed
from penstock.server.access import Exchange
from penstock.server.client import EngineClient
from penstock.server.generate import OpenRequest, prompt_offsets, prompts_of
from penstock.server.links import EngineService
from penstock.server.replies import usage_of
from penstock.server.schema import CompletionBody, nth_seed
from penstock.server.seats import Gate
from penstock.server.service import Generations, Rules
from penstock.text.answer import ChoiceDelta, ChoiceText, Prompt, ScoredToken, Wants
from penstock.text.stream import StopString
from tests.support.scripted_engine import EOS, ScriptedEngine, ScriptedLoop, ScriptedTokenizer


class Hand:
    """A client of an engine that the test steps by hand, both in this process."""

    def __init__(self) -> None:
        self.engine, self.gate = ScriptedEngine(), Gate(8, "things")
        self.client = EngineClient(
            EngineService(self.engine, ScriptedLoop(self.engine)).attach_here(), self.engine.tokenizer
        )
        self.client.start()

    async def reading(self, num: int) -> Generations:
        num_before = self.engine.num_open
        reading = Generations(self.client, self.gate.take(num))
        for index in range(num):
            reading.submit(index, Submission([1], SamplingParams(max_tokens=10)))
        while self.engine.num_open < num_before + num:
            await asyncio.sleep(0)
        return reading


def test_events_that_have_gathered_are_read_at_once_and_in_order() -> None:
    async def scenario() -> None:
        hand = Hand()
        with await hand.reading(3) as first, await hand.reading(2) as second:
            for _ in range(4):
                hand.engine.step(0.0)
            for reading, num in ((first, 3), (second, 2)):
                events = await reading.next_events()
                assert {index: len(some) for index, some in events.items()} == dict.fromkeys(range(num), 4)
                assert all(bytes(event.tokens[0] for event in some) == b"choi" for some in events.values())

    asyncio.run(scenario())


def test_a_seat_is_free_only_when_the_engine_has_ended_the_request_too() -> None:
    async def scenario() -> None:
        hand = Hand()
        with await hand.reading(3):
            assert hand.gate.taken == 3
        assert hand.gate.taken == 3, "the engine still runs them"
        while hand.engine.num_open:
            hand.engine.step(0.0)
        while hand.gate.taken:
            await asyncio.sleep(0)
        assert not hand.client.num_open

    asyncio.run(scenario())


# Holds invariant 11: a second last event changes nothing.
def test_a_late_or_second_last_event_gives_no_seat_back_twice() -> None:
    async def scenario() -> None:
        hand = Hand()
        with await hand.reading(2) as reading:
            hand.client.give_up()
            events = await reading.next_events()
            assert [[event.finish for event in events[index]] for index in (0, 1)] == [
                [FinishReason.ERROR]
            ] * 2
        while hand.engine.num_open:
            hand.engine.step(0.0)
        await asyncio.sleep(0.01)
        assert hand.gate.taken == 0
        with hand.gate.take(5):
            assert hand.gate.taken == 5

    asyncio.run(scenario())


def test_a_failed_submit_holds_nothing() -> None:
    async def scenario() -> None:
        hand = Hand()
        with pytest.raises(InvalidRequest), Generations(hand.client, hand.gate.take(2)) as reading:
            reading.submit(0, Submission([], SamplingParams(max_tokens=1)))
        assert (hand.gate.taken, hand.client.num_open, hand.engine.num_open) == (0, 0, 0)

    asyncio.run(scenario())


def test_a_gate_takes_all_or_none() -> None:
    gate = Gate(3, "things")
    seats = gate.take(1)
    with pytest.raises(Overloaded, match="3 concurrent things"):
        gate.take(3)
    assert gate.taken == 1
    seats.widen(3)
    with pytest.raises(InvalidRequest):
        seats.widen(4)
    with seats:
        assert gate.taken == 3
    assert gate.taken == 0


# ---------------------------------------------------------------------------------------------- choices' text


def score(token: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0, 1, ())


def event(text: str | bytes, **fields) -> TokenEvent:
    tokens = tuple(text.encode() if isinstance(text, str) else text)
    return TokenEvent("x", tokens, tuple(map(score, tokens)), **fields)


def a_choice(echo: Prompt | None = None, **fields) -> ChoiceText:
    tokenizer, sampling = ScriptedTokenizer(), SamplingParams(max_tokens=100, **fields)
    prompt = Prompt(()) if echo is None else echo._replace(offsets=prompt_offsets(tokenizer, echo))
    return ChoiceText(
        tokenizer, sampling, tuple(map(StopString, sampling.stop)), prompt, Wants(echo=echo is not None)
    )


def test_scores_wait_until_their_text_is_certain() -> None:
    choice = a_choice(stop=("END",), logprobs=0)
    assert choice.feed([event("aE")]) == ChoiceDelta("a", (ScoredToken(97, score(97), 0),), None)
    assert choice.feed([event("N")]) == ChoiceDelta("", (), None)
    piece = choice.feed([event("b")])
    assert (piece.text, [token.offset for token in piece.tokens]) == ("ENb", [1, 2, 3])
    piece = choice.feed([event("cENDx"), event("more")])
    assert (piece.text, [token.token for token in piece.tokens], piece.finish) == ("c", [99], "stop")
    assert choice.num_tokens == len("aENbcEND")


def test_a_torn_character_at_the_end_keeps_its_scores() -> None:
    choice = a_choice(logprobs=0)
    piece = choice.feed([event("é".encode()[:1], finish=FinishReason.LENGTH)])
    assert (piece.text, len(piece.tokens), piece.finish) == ("\ufffd", 1, "length")


@pytest.mark.parametrize(
    ("finish", "kind"), [(FinishReason.ERROR, StepFailed), (FinishReason.CANCELLED, EngineClosed)]
)
def test_what_came_before_a_failure_is_said_first(finish: FinishReason, kind: type) -> None:
    choice = a_choice()
    assert choice.feed([event("ab"), event("c", finish=finish, error="broken")]) == ChoiceDelta(
        "abc", (), None
    )
    assert isinstance(choice.failure, kind)
    assert choice.finish is None


def test_a_failure_is_the_one_that_the_engine_gave_and_a_step_that_failed_where_it_gave_none() -> None:
    """What the client is answered, and whether it is to try again, follows from its type."""
    given, untold = a_choice(), a_choice()
    overloaded = Overloaded("later", 3.0)
    given.feed([TokenEvent("x", finish=FinishReason.ERROR, error="later", failure=overloaded)])
    assert given.failure is overloaded
    untold.feed([TokenEvent("x", finish=FinishReason.ERROR)])
    assert isinstance(untold.failure, StepFailed) and str(untold.failure) == "the generation failed"


def test_special_tokens_before_a_prompt_do_not_shift_its_offsets() -> None:
    tokenizer = ScriptedTokenizer()
    assert prompt_offsets(tokenizer, Prompt(list("aéb".encode()), "aéb")) == [0, 1, 1, 2], (
        "the second half of a character is where the first is"
    )
    assert prompt_offsets(tokenizer, Prompt([0x80, 97, 0xC3, 98], "\ufffda\ufffdb")) == [0, 1, 2, 3], (
        "what is no character is one"
    )
    assert prompt_offsets(tokenizer, Prompt([EOS, *b"ab"], "ab")) == [0, 0, 1]
    assert prompt_offsets(tokenizer, Prompt([97, EOS, 98], "a<256>b")) == [0, 1, 6]


class SkippingTokenizer(ScriptedTokenizer):
    """As vocabularies of models do: special tokens have no text unless it is asked for."""

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        return super().decode([id for id in ids if not (skip_special and self.is_special(id))], skip_special)


def test_a_prompt_of_tokens_is_echoed_with_its_special_ones_however_few_they_are() -> None:
    """Its text is what the client gave, and where its scores lie is counted in it."""
    for ids, text in (([97], "a"), ([97, EOS, 98], "a<256>b")):
        (prompt,) = prompts_of(
            SkippingTokenizer(), CompletionBody(model="m", prompt=ids, echo=True), Rules(10)
        )
        assert (list(prompt.ids), prompt.text) == (ids, text)


def test_usage_counts_each_prompt_once_and_its_sources_sum_to_it() -> None:
    prompts = [Prompt([1] * 20), Prompt([1] * 7)]
    choices = [a_choice() for _ in range(4)]
    sources = [
        KvSource(device=16, computed=4),
        KvSource(device=16, computed=4),
        KvSource(computed=7),
        KvSource(computed=7),
    ]
    for choice, source in zip(choices, sources, strict=True):
        choice.feed([event("abc", source=source, finish=FinishReason.LENGTH)])
    usage = usage_of(prompts, choices, 2)
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (27, 12, 39)
    details = usage["prompt_tokens_details"]
    assert details == {
        "cached_tokens": 16,
        "kv_source": {"device": 16, "host": 0, "ssd": 0, "remote": 0, "computed": 11},
    }
    assert sum(details["kv_source"].values()) == usage["prompt_tokens"]


def test_seeds_of_choices_follow_each_other_and_wrap() -> None:
    assert [nth_seed(5, i) for i in range(3)] == [5, 6, 7]
    assert nth_seed(MAX_SEED, 1) == -MAX_SEED
    assert nth_seed(-MAX_SEED, 0) == -MAX_SEED


def test_of_several_choices_the_one_that_waited_longest_is_noted() -> None:
    """What of its waiting was for keys and for KV belongs to the same one."""

    class Silent:
        failure = finish = None

        def feed(self, events: Any) -> ChoiceDelta:
            """It has nothing to say."""
            return ChoiceDelta("", (), None)

    class Read:
        def __init__(self, *events: dict[int, list[TokenEvent]]) -> None:
            self.events = iter(events)

        async def next_events(self) -> dict[int, list[TokenEvent]]:
            return next(self.events)

    def waited(queue_s: float, matched_s: float, loaded_s: float) -> TokenEvent:
        return TokenEvent("r", waited_s=queue_s, matched_s=matched_s, loaded_s=loaded_s)

    exchange = Exchange("POST", "/v1/completions", 0.0)
    first = {0: [waited(1.0, 0.1, 0.2)], 1: [waited(3.0, 0.3, 0.4), TokenEvent("r")]}
    reading: Any = Read(first, {2: [waited(2.0, 0.5, 0.6)]}, {2: [TokenEvent("r", (7,))]})
    some: Any = None
    running = OpenRequest(some, [], [Silent()] * 3, reading, some, some, exchange)  # type: ignore[list-item]
    for _ in range(2):
        asyncio.run(running.next_pieces())
    assert (exchange.queue_s, exchange.matched_s, exchange.loaded_s) == (3.0, 0.3, 0.4)
    assert exchange.first_s is None, "nobody has had a token"
    asyncio.run(running.next_pieces())
    assert exchange.first_s is not None


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ((None, None), ["cancelled", "stop"]),
        (("the device is gone", None), ["error", "stop"]),
        ((None, "gone"), ["error", "stop"]),
    ],
)
def test_of_several_choices_those_cut_short_are_errors_where_one_has_failed(
    failures: tuple[str | None, ...], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else somebody has hung up."""
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"kv_source": {}}}
    monkeypatch.setattr(OpenRequest, "usage", lambda self: usage)
    some: Any = None
    choices: Any = [
        SimpleNamespace(failure=failure, finish=finish)
        for failure, finish in zip(failures, (None, "stop"), strict=True)
    ]
    exchange = Exchange("POST", "/v1/completions", 0.0)
    OpenRequest(some, [], choices, some, some, some, exchange).settle()
    assert exchange.finish == expected
