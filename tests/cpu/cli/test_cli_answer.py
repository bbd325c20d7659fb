"""One answer: its text, its figures, and its end by stop string, interrupt or failure."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock import answer as answer_module
from penstock.answer import Answer, Figures, running_engine
from penstock.commands.chat import _fitting
from penstock.config import Config, KvConfig, ModelSource
from penstock.contract import FinishReason, KvSource, SamplingParams, TokenEvent, TokenLogprob
from penstock.errors import EngineClosed, StepFailed
from penstock.models.tokenizer import ByteTokenizer
from penstock.progress import ProgressBar


@pytest.fixture(scope="module")
def engine():
    with running_engine(
        Config(ModelSource("tiny-llama", "dummy", "cpu"), KvConfig(device_blocks=256))
    ) as engine:
        yield engine


def _greedy(max_tokens: int, *stop: str) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=stop)


def test_pieces_are_the_text_of_all_tokens(engine):
    answer = Answer(engine, list(b"hello"), _greedy(9))
    text = "".join(answer.pieces())
    figures = answer.figures()
    assert text and (figures.prompt_tokens, figures.generated_tokens, figures.finish) == (5, 9, "length")
    assert 0 < figures.first_token_s < figures.total_s and figures.decode_tokens_per_s > 0


def test_an_interrupt_ends_the_request_and_leaves_no_block_behind(engine):
    answer = Answer(engine, list(b"a long story"), _greedy(2000))
    pieces = answer.pieces()
    assert next(pieces)
    for _ in range(3):  # however often it is pressed
        answer.interrupt()
    assert sum(1 for _ in pieces) < 1000
    assert answer.figures().finish == "cancelled"
    blocks = engine.stats().kv_blocks["device"]
    assert blocks["active"] == blocks["reserved"] == 0


def test_an_interrupt_before_the_submit_is_not_lost(engine):
    answer = Answer(engine, list(b"never mind"), _greedy(2000))
    answer.interrupt()
    assert len("".join(answer.pieces())) < 1000
    assert answer.figures().finish == "cancelled"


def test_a_stop_string_cancels_what_is_left(engine):
    whole = "".join(Answer(engine, list(b"hello"), _greedy(200)).pieces())
    stop = whole[6:9]
    answer = Answer(engine, list(b"hello"), _greedy(200, stop))
    assert "".join(answer.pieces()) == whole[: whole.index(stop)]
    assert answer.figures().finish == "stop" and answer.figures().generated_tokens < 200


class _Failing:
    """An engine whose request fails."""

    tokenizer = ByteTokenizer(256)
    ended = None

    def submit(self, prompt, sampling, listener, adapter=None):
        listener(TokenEvent("r", tokens=(65,), source=KvSource(computed=len(prompt))))
        listener(TokenEvent("r", finish=FinishReason.ERROR, error="the step broke"))
        return "r"


class _Ending:
    """An engine whose first and only word is the token that ends the answer, or comes right before it."""

    tokenizer = ByteTokenizer(256)

    def __init__(self, *tokens: int) -> None:
        self._tokens = tokens

    def submit(self, prompt, sampling, listener, adapter=None):
        for token in self._tokens:
            listener(TokenEvent("r", tokens=(token,)))
        listener(TokenEvent("r", finish=FinishReason.STOP, stop_token=2))
        return "r"


@pytest.mark.parametrize("tokens", [(), (65,), (65, 66)])
def test_a_token_that_ends_the_answer_is_counted_and_timed_though_it_has_no_text(tokens, monkeypatch):
    now = iter(range(100, 200))
    monkeypatch.setattr("penstock.answer.time", SimpleNamespace(monotonic=lambda: float(next(now))))
    answer = Answer(_Ending(*tokens), [1, 2], _greedy(5))
    assert "".join(answer.pieces()) == bytes(tokens).decode()
    figures = answer.figures()
    assert (figures.generated_tokens, figures.finish, figures.kv_source) == (
        len(tokens) + 1,
        "stop",
        KvSource(computed=2),
    )
    assert (figures.first_token_s, figures.total_s) == (1.0, 2.0)


class _AtOnce:
    """An engine that says all of an answer in one event."""

    tokenizer = ByteTokenizer(256)
    ended = None

    def submit(self, prompt, sampling, listener, adapter=None):
        tokens = tuple(b"abcdef")
        scores = tuple(TokenLogprob(token, -1.0, 1, ()) for token in tokens)
        listener(TokenEvent("r", tokens=tokens, logprobs=scores))
        listener(TokenEvent("r", finish=FinishReason.CANCELLED))
        return "r"

    def cancel(self, request_id):
        pass


def test_tokens_and_logprobs_end_together_where_a_stop_string_does():
    answer = Answer(_AtOnce(), [1], SamplingParams(max_tokens=9, stop=("cd",), logprobs=0))
    assert "".join(answer.pieces()) == "ab" and answer.tokens == list(b"abcd")
    assert [score.token for score in answer.logprobs] == answer.tokens
    assert Answer(_AtOnce(), [1], _greedy(9)).logprobs is None


@pytest.mark.parametrize(("room", "expected"), [(-1, 9), (0, 9), (1, 1), (8, 8), (9, 9), (10, 9)])
def test_a_default_length_yields_to_any_room_that_is_left(room, expected):
    """Where none is, what was asked for stays, and the engine says why it cannot be."""
    assert _fitting(_greedy(9), True, room).max_tokens == expected
    assert _fitting(_greedy(9), False, room).max_tokens == 9


def test_a_failed_request_raises_after_the_text_it_had():
    pieces = Answer(_Failing(), [1], _greedy(5)).pieces()
    assert next(pieces) == "A"
    with pytest.raises(StepFailed, match="the step broke"):
        next(pieces)


class _Silent(_Failing):
    """An engine that takes a request, and says no more than one token about it. `ends` is when it turns out
    to have ended."""

    def __init__(self, ends: int | None = None) -> None:
        self.num_looks = 0
        self.cancelled = []
        self._ends = ends

    def submit(self, prompt, sampling, listener, adapter=None):
        listener(TokenEvent("r", tokens=(65,), source=KvSource(computed=len(prompt))))
        return "r"

    def cancel(self, request_id):
        self.cancelled.append(request_id)

    @property
    def ended(self):
        self.num_looks += 1
        return "its thread is gone" if self._ends is not None and self.num_looks > self._ends else None


class _Clock:
    """A second passes with every look at it, and not for ever."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 1.0
        assert self.now_s < 1000.0, "it waits for ever"
        return self.now_s


def test_nobody_waits_for_an_engine_that_has_ended(monkeypatch):
    monkeypatch.setattr(answer_module, "LOOK_S", 0.0)
    monkeypatch.setattr(answer_module, "time", _Clock())
    engine = _Silent(ends=3)
    pieces = Answer(engine, [1], _greedy(5)).pieces()
    assert next(pieces) == "A", "what it said before counts"
    with pytest.raises(StepFailed, match="its thread is gone"):
        next(pieces)
    assert engine.num_looks == 4, "as long as it might say something, it is waited for"


class _LastWords(_Silent):
    """An engine that ends with the answer: its last event comes between a look for events and the look
    whether it has ended."""

    def submit(self, prompt, sampling, listener, adapter=None):
        self._listener = listener
        return super().submit(prompt, sampling, listener, adapter)

    @property
    def ended(self):
        if not self.num_looks:
            self._listener(TokenEvent("r", tokens=(66,), finish=FinishReason.LENGTH))
        return super().ended


def test_what_an_engine_said_before_it_ended_is_read_to_its_end(monkeypatch):
    monkeypatch.setattr(answer_module, "LOOK_S", 0.0)
    answer = Answer(_LastWords(ends=0), [1], _greedy(5))
    assert "".join(answer.pieces()) == "AB" and answer.figures().finish == "length"


def test_nobody_waits_for_ever_for_a_request_to_be_cancelled(monkeypatch):
    monkeypatch.setattr(answer_module, "LOOK_S", 0.0)
    monkeypatch.setattr(answer_module, "time", _Clock())
    engine = _Silent()
    answer = Answer(engine, [1], _greedy(5))
    pieces = answer.pieces()
    assert next(pieces) == "A"
    answer.interrupt()
    with pytest.raises(StepFailed, match="did not end the request"):
        next(pieces)
    assert engine.cancelled == ["r"] and engine.num_looks > answer_module.CANCEL_S - 5, "it has all that time"


@pytest.mark.parametrize("when", ["before", "while"])
def test_an_engine_thread_that_dies_ends_the_answer_with_the_reason(monkeypatch, when):
    def burst(*_):
        raise RuntimeError("the device is gone")

    with running_engine(
        Config(ModelSource("tiny-llama", "dummy", "cpu"), KvConfig(device_blocks=256))
    ) as engine:
        pieces = Answer(engine, list(b"hello"), _greedy(2000)).pieces()
        if when == "while":
            assert next(pieces)
        monkeypatch.setattr(engine._parts.scheduler, "cancel", burst)  # its inbox fails as well
        engine.cancel("somebody else")
        with pytest.raises((StepFailed, EngineClosed), match="the device is gone"):
            for _ in pieces:
                pass
        with pytest.raises(EngineClosed, match="the device is gone"):
            next(Answer(engine, list(b"hello"), _greedy(5)).pieces())


def test_leaving_a_session_closes_its_engine():
    with running_engine(
        Config(ModelSource("tiny-llama", "dummy", "cpu"), KvConfig(device_blocks=16))
    ) as engine:
        next(Answer(engine, [1, 2], _greedy(200)).pieces())  # still running when the block is left
    with pytest.raises(EngineClosed):
        engine.submit([1], _greedy(1), print)


@pytest.mark.parametrize(
    ("num", "said"), [(0, "0 tokens, first"), (1, "1 token, first"), (3, "3 tokens at 2.0 tok/s, first")]
)
def test_figures_read_well_for_any_number_of_tokens(num, said):
    assert said in Figures(10, KvSource(8, 2), num, 1.0, 2.0, "stop").line()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (KvSource(8, computed=2), "8 from the device cache (stop)"),
        (KvSource(0, 8, computed=2), "0 from the device cache, 8 from host memory (stop)"),
        (
            KvSource(1, 2, 3, 4),
            "1 from the device cache, 2 from host memory, 3 from disk, 4 from the shared store (stop)",
        ),
    ],
)
def test_figures_say_which_tier_served_the_prompt(source, said):
    assert Figures(10, source, 1, 1.0, 2.0, "stop").line().endswith(f"prompt 10 tokens, {said}")


def test_without_a_terminal_only_long_stages_are_spoken_of(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("penstock.progress.time.monotonic", lambda: now[0])
    with ProgressBar() as bar:
        for seconds, stage, done in (
            (0, "short", 0),
            (0.5, "short", 9),
            (0.6, "long", 0),
            (2, "long", 5),
            (3, "long", 6),
            (13, "long", 8),
        ):
            now[0] = seconds
            bar(stage, done, 10)
    assert capsys.readouterr().err.splitlines() == ["long: 50 %", "long: 80 %"]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_leaving_a_session_by_an_error_closes_its_engine(error):
    """What was computed is persisted by that, and the lock of a disk cache is given back."""
    with (
        pytest.raises(error),
        running_engine(
            Config(ModelSource("tiny-llama", "dummy", "cpu"), KvConfig(device_blocks=16))
        ) as engine,
    ):
        raise error
    with pytest.raises(EngineClosed):
        engine.submit([1], _greedy(1), print)
