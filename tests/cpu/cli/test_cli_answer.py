"""One answer: its text, its figures, its end by stop string, interrupt or failure; and how progress is
shown."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from penstock import answer as answer_module
from penstock.answer import Answer, Figures, running_engine
from penstock.config import Config, KvConfig, ModelSource
from penstock.contract import FinishReason, KvSource, SamplingParams, Submission, TokenEvent, TokenLogprob
from penstock.errors import EngineClosed, StepFailed
from penstock.models.tokenizer import ByteTokenizer
from penstock.progress import ProgressBar

TINY = Config(ModelSource("tiny-llama", "dummy", "cpu"), KvConfig(device_blocks=256))


@pytest.fixture(scope="module")
def engine():
    with running_engine(TINY) as engine:
        yield engine


def greedy(max_tokens: int, *stop: str) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=stop)


def test_pieces_are_the_text_of_all_tokens_up_to_a_stop_string(engine):
    answer = Answer(engine, list(b"hello"), greedy(40))
    text = "".join(answer.pieces())
    figures = answer.figures()
    assert text and (figures.prompt_tokens, figures.generated_tokens, figures.finish) == (5, 40, "length")
    assert 0 < figures.first_token_s < figures.total_s and figures.decode_tokens_per_s > 0
    stop = text[6:9]
    answer = Answer(engine, list(b"hello"), greedy(200, stop))
    assert "".join(answer.pieces()) == text[: text.index(stop)]
    assert answer.figures().finish == "stop" and answer.figures().generated_tokens < 40


@pytest.mark.parametrize("when", ["before the submit", "while it runs"])
def test_an_interrupt_ends_the_request_and_leaves_no_block_behind(engine, when):
    answer = Answer(engine, list(b"a long story"), greedy(2000))
    pieces = answer.pieces()
    if when == "while it runs":
        assert next(pieces)
    for _ in range(3):  # however often it is pressed
        answer.interrupt()
    assert sum(1 for _ in pieces) < 1000
    assert answer.figures().finish == "cancelled"
    blocks = engine.stats().kv_blocks["device"]
    assert blocks["active"] == blocks["reserved"] == 0


class Scripted:
    """An engine that says these events, and then no more. After `ends` questions whether it has ended it has;
    None: never."""

    tokenizer = ByteTokenizer(256)

    def __init__(self, *events: TokenEvent, ends: int | None = None) -> None:
        self.num_looks = 0
        self.cancelled = []
        self._events = events
        self._ends = ends

    def submit(self, asked, listener):
        self.listener = listener
        for event in self._events:
            listener(event)
        return "r"

    def cancel(self, request_id):
        self.cancelled.append(request_id)

    @property
    def ended(self):
        self.num_looks += 1
        return "its thread is gone" if self._ends is not None and self.num_looks > self._ends else None


TOKEN = TokenEvent("r", tokens=(65,))


@pytest.mark.parametrize("tokens", [(), (65,), (65, 66)])
def test_a_token_that_ends_the_answer_is_counted_and_timed_though_it_has_no_text(tokens, monkeypatch):
    now = iter(range(100, 200))
    monkeypatch.setattr("penstock.answer.time", SimpleNamespace(monotonic=lambda: float(next(now))))
    said = [TokenEvent("r", tokens=(token,)) for token in tokens]
    end = TokenEvent("r", finish=FinishReason.STOP, stop_token=2)
    answer = Answer(Scripted(*said, end), [1, 2], greedy(5))
    assert "".join(answer.pieces()) == bytes(tokens).decode()
    assert answer.figures() == Figures(2, KvSource(computed=2), len(tokens) + 1, 1.0, 2.0, finish="stop")


def test_tokens_and_logprobs_end_together_where_a_stop_string_does():
    scores = tuple(TokenLogprob(token, -1.0, 1, ()) for token in b"abcdef")
    engine = Scripted(
        TokenEvent("r", tokens=tuple(b"abcdef"), logprobs=scores),
        TokenEvent("r", finish=FinishReason.CANCELLED),
    )
    answer = Answer(engine, [1], SamplingParams(max_tokens=9, stop=("cd",), logprobs=0))
    assert "".join(answer.pieces()) == "ab" and answer.tokens == list(b"abcd")
    assert [score.token for score in answer.logprobs] == answer.tokens
    assert Answer(engine, [1], greedy(9)).logprobs is None


def test_a_failed_request_raises_after_the_text_it_had():
    end = TokenEvent("r", finish=FinishReason.ERROR, error="the step broke")
    pieces = Answer(Scripted(TOKEN, end), [1], greedy(5)).pieces()
    assert next(pieces) == "A"
    with pytest.raises(StepFailed, match="the step broke"):
        next(pieces)


@pytest.fixture
def quick(monkeypatch):
    """A second passes with every look at the clock, and not for ever."""
    seconds = iter(range(1000))
    monkeypatch.setattr(answer_module, "LOOK_S", 0.0)
    monkeypatch.setattr(answer_module, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))


def test_no_answer_is_waited_for_once_the_engine_has_ended(quick):
    engine = Scripted(TOKEN, ends=3)
    pieces = Answer(engine, [1], greedy(5)).pieces()
    assert next(pieces) == "A", "what it said before counts"
    with pytest.raises(StepFailed, match="its thread is gone"):
        next(pieces)
    assert engine.num_looks == 4, "as long as it might say something, it is waited for"


@pytest.mark.parametrize("when", ["before", "while"])
def test_an_engine_thread_that_dies_ends_the_answer_with_the_reason(monkeypatch, when):
    def burst(*_):
        raise RuntimeError("the device is gone")

    with running_engine(TINY) as engine:
        pieces = Answer(engine, list(b"hello"), greedy(2000)).pieces()
        if when == "while":
            assert next(pieces)
        monkeypatch.setattr(engine.parts.scheduler, "cancel", burst)  # its inbox fails as well
        engine.cancel("somebody else")
        with pytest.raises((StepFailed, EngineClosed), match="the device is gone"):
            list(pieces)
        with pytest.raises(EngineClosed, match="the device is gone"):
            next(Answer(engine, list(b"hello"), greedy(5)).pieces())


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
def test_leaving_a_session_closes_its_engine_also_by_an_error(error):
    """What was computed is persisted by that, and the lock of a disk cache is given back."""
    expected = contextlib.nullcontext() if error is None else pytest.raises(error)
    with expected, running_engine(TINY) as engine:
        next(Answer(engine, [1, 2], greedy(200)).pieces())  # still running when the block is left
        if error is not None:
            raise error
    with pytest.raises(EngineClosed):
        engine.submit(Submission([1], greedy(1)), print)


# --------------------------------------------------------------------------------------------------- progress


def test_without_a_terminal_only_long_stages_are_spoken_of_until_they_are_over(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("penstock.progress.time.monotonic", lambda: now[0])
    looks = ((0, "short", 0), (0.5, "short", 9), (0.6, "long", 0), (1.5, "long", 4), (1.6, "long", 5))
    with ProgressBar() as bar:
        for seconds, stage, done in (*looks, (3, "long", 6), (11.6, "long", 8), (50, "long", 10)):
            now[0] = seconds
            bar(stage, done, 10)
    assert capsys.readouterr().err.splitlines() == ["long: 50 %", "long: 80 %"]
