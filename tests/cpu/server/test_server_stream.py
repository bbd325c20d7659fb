"""The hand-over from the engine's thread, the seats, and a choice's text, each by itself."""

from __future__ import annotations

import asyncio

import pytest

from penstock.contract import FinishReason, SamplingParams, Submission, TokenEvent, TokenLogprob
from penstock.errors import InvalidRequest, Overloaded, StepFailed
from penstock.server.client import EngineClient
from penstock.server.generate import prompt_offsets
from penstock.server.links import EngineService
from penstock.server.seats import Gate
from penstock.server.service import Generations
from penstock.text.answer import ChoiceDelta, ChoiceText, Prompt, ScoredToken, StopString, Wants
from tests.support.scripted_engine import ScriptedEngine, ScriptedLoop, ScriptedTokenizer


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


def test_a_failure_is_the_one_that_the_engine_gave_and_a_step_that_failed_where_it_gave_none() -> None:
    """What the client is answered, and whether it is to try again, follows from its type."""
    given, untold = a_choice(), a_choice()
    overloaded = Overloaded("later", 3.0)
    given.feed([TokenEvent("x", finish=FinishReason.ERROR, error="later", failure=overloaded)])
    assert given.failure is overloaded
    untold.feed([TokenEvent("x", finish=FinishReason.ERROR)])
    assert isinstance(untold.failure, StepFailed) and str(untold.failure) == "the generation failed"
