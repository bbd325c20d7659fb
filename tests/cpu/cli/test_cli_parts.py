"""Parts of the commands by themselves: what a chat keeps of an answer, what a terminal is shown, what the
doctor says of a machine that is not this one."""

from __future__ import annotations

import dataclasses
import io
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from penstock.answer import Figures
from penstock.commands import cache, chat, doctor
from penstock.commands.chat import Chat, Conversation, _fitting
from penstock.config import Config, ModelSource
from penstock.contract import KvSource, SamplingParams
from penstock.errors import ModelError
from penstock.kv.tiers.ssd.survey import SpaceSurvey, Survey
from penstock.models import embedded, loader
from penstock.models.tokenizer import ByteTokenizer
from penstock.progress import ProgressBar
from tests.support.scripted_engine import ScriptedEngine

# ------------------------------------------------------------------------------------------------------- chat


class _Answered:
    """An answer that was given, or was stopped half-way."""

    pieces_of = ("par", "tial")
    finish = "cancelled"

    def __init__(self, engine: object, prompt: list[int], sampling: SamplingParams, adapter: object) -> None:
        self.asked = prompt, sampling, adapter

    def pieces(self) -> Iterator[str]:
        yield from self.pieces_of

    def figures(self) -> Figures:
        return Figures(3, KvSource(computed=3), 2, 0.1, 0.2, self.finish)


def a_chat(context: int = 200, max_tokens: int = 40) -> Chat:
    engine = ScriptedEngine()
    return Chat(
        engine, Conversation(ByteTokenizer(512), context, max_tokens), SamplingParams(max_tokens=max_tokens)
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("finish", ["stop", "length", "cancelled"])
def test_what_was_said_before_an_interrupt_belongs_to_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], finish: str
) -> None:
    monkeypatch.setattr(chat, "Answer", type("Answered", (_Answered,), {"finish": finish}))
    talk = a_chat()
    talk._answer("why?")
    assert talk._conversation._turns == [("why?", "partial")]
    said = capsys.readouterr()
    assert said.out == "partial\n" and f"({finish})" in said.err


def test_an_answer_has_no_more_tokens_than_the_context_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[_Answered] = []
    monkeypatch.setattr(chat, "Answer", lambda *given: made.append(_Answered(*given)) or made[-1])
    talk = a_chat(context=60, max_tokens=40)
    talk._answer("x" * 10)
    (prompt, sampling, adapter) = made[0].asked
    assert sampling == dataclasses.replace(talk._sampling, max_tokens=60 - len(prompt)) and adapter is None


def test_turns_that_were_forgotten_are_gone_and_told_of_once() -> None:
    conversation = Conversation(ByteTokenizer(512), context=200, max_tokens=20, system="be brief")
    for letter in "ab":
        conversation.add(letter * 40, letter * 10)
    turn = conversation.ask("c" * 60)
    assert (turn.num_forgotten, len(conversation._turns)) == (1, 1)
    again = conversation.ask("c" * 60)
    assert (again.num_forgotten, again.prompt) == (0, turn.prompt)
    assert bytes(turn.prompt).startswith(b"system: be brief") and b"aaa" not in bytes(turn.prompt)


def test_an_answer_on_another_thread_leaves_the_handlers_of_signals_alone() -> None:
    entered: list[bool] = []

    def answer() -> None:
        with chat._interrupts(None):  # type: ignore[arg-type]
            entered.append(True)

    thread = threading.Thread(target=answer)
    thread.start()
    thread.join(30.0)
    assert entered == [True]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_is_not_driven_by_what_a_model_writes_and_a_pipe_gets_it_all(is_terminal: bool) -> None:
    talk, out = a_chat(), io.StringIO()
    talk._out = Console(
        file=out, force_terminal=is_terminal, soft_wrap=True, highlight=False, markup=False, color_system=None
    )
    written = "a b\x1b[2J\x07\x08\x7f\x9bc\r\nd"
    talk._show(written)
    assert out.getvalue() == ("a b[2Jc\nd" if is_terminal else written)


@pytest.mark.parametrize(
    ("is_default", "room", "max_tokens"),
    [(True, 5, 5), (True, 10, 10), (True, 11, 10), (True, 1, 1), (True, 0, 10), (False, 5, 10)],
)
def test_only_a_default_yields_to_the_context(is_default: bool, room: int, max_tokens: int) -> None:
    assert _fitting(SamplingParams(max_tokens=10), is_default, room).max_tokens == max_tokens


# --------------------------------------------------------------------------------------------------- progress


def test_a_terminal_has_one_bar_for_the_stage_that_is_under_way() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with ProgressBar(console) as bar:
        assert bar._bar is not None
        for stage, done, total in (("weights", 0, 10), ("weights", 5, 10), ("cache", 1, 4)):
            bar(stage, done, total)
            (task,) = bar._bar.tasks
            assert (task.description, task.completed, task.total) == (stage, done, total)
        drawn = bar._bar
        assert drawn.live.is_started
    assert not drawn.live.is_started


def test_without_a_terminal_there_is_no_bar() -> None:
    with ProgressBar(Console(file=io.StringIO())) as bar:
        bar("weights", 1, 2)
        assert bar._bar is None


def test_a_stage_that_is_over_is_not_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    now, out = [0.0], io.StringIO()
    monkeypatch.setattr("penstock.progress.time.monotonic", lambda: now[0])
    with ProgressBar(Console(file=out)) as bar:
        for seconds, done in ((0.0, 0), (0.9, 1), (1.0, 2), (10.9, 3), (11.0, 4), (50.0, 5)):
            now[0] = seconds
            bar("long", done, 5)
    assert out.getvalue().splitlines() == ["long: 40 %", "long: 80 %"]


# ------------------------------------------------------------------------------------------------------ cache


@pytest.mark.parametrize("which", ["damaged", "corrupt", "torn"])
@pytest.mark.parametrize("num", [0, 1, cache.MOST_LINES, cache.MOST_LINES + 3])
def test_whatever_is_damaged_is_named_and_verify_ends_with_it(
    capsys: pytest.CaptureFixture[str], which: str, num: int
) -> None:
    found = Survey(Path("/kv"), num_segments=1, num_good=7)
    getattr(found, which).extend(f"place {i}" for i in range(num))
    for action, code in (("inspect", 0), ("verify", int(num > 0))):
        assert cache._show(found, verified=action == "verify") == code
        said = capsys.readouterr().out
        assert said.count("damaged: place ") == min(num, cache.MOST_LINES)
        assert ("and 3 more" in said) == (num > cache.MOST_LINES)
        assert ("nothing is damaged" in said) == (action == "verify" and not num)
    shown = {"damaged": "damaged files", "corrupt": "damaged heads", "torn": "torn blocks"}
    assert (
        dict(cache._counts(found))[shown[which]] == str(num)
        and dict(cache._counts(found))["whole blocks"] == "7"
    )


def test_the_largest_space_is_shown_first_with_its_times(capsys: pytest.CaptureFixture[str]) -> None:
    day = 86_400 * 10**9
    found = Survey(
        Path("/kv"),
        spaces={"a" * 64: SpaceSurvey(1, 10, 0, day), "b" * 64: SpaceSurvey(3, 3 << 20, day, 2 * day)},
    )
    cache._show(found, verified=False)
    large, small = [line for line in capsys.readouterr().out.splitlines() if "aaaa" in line or "bbbb" in line]
    assert (
        "b" * cache.NUM_DIGITS in large
        and ("3.0 MiB") in large
        and "1970-01-02" in large
        and "1970-01-03" in large
    )
    assert "a" * cache.NUM_DIGITS in small and "10 bytes" in small and "1970-01-01" in small
    assert found.num_blocks == 4


@pytest.mark.parametrize(
    ("num_bytes", "told"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1 << 20, "1.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 30, "1.0 GiB"),
    ],
)
def test_sizes_read_well(num_bytes: int, told: str) -> None:
    assert cache._size(num_bytes) == told


# ----------------------------------------------------------------------------------------------------- doctor


def test_a_built_in_name_is_known_and_an_embedded_model_that_is_missing_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = {check.name: check for check in doctor._model(Config(ModelSource("tiny-llama", device="cpu")))}
    assert (
        named["model"].status is named["weights"].status is doctor.Status.OK
        and "dummy" in named["weights"].hint
    )

    def missing() -> Path:
        raise ModelError("they are not in this package")

    monkeypatch.setattr(loader, "embedded_file", missing)
    (check,) = doctor._model(Config(ModelSource(embedded.NAME, device="cpu")))
    assert (check.name, check.status, check.detail) == (
        "model",
        doctor.Status.WARN,
        "they are not in this package",
    )


def test_a_machine_with_a_gpu_is_asked_for_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"name": "H200", "free_gib": 130.5, "memory_gib": 139.8, "capability": "9.0"}
    monkeypatch.setattr(doctor, "describe_gpus", lambda: [gpu])
    monkeypatch.setattr(doctor, "device_of", lambda config: "cuda")
    config = Config(ModelSource("tiny-llama"))
    check = doctor._device(config)
    assert (check.status, check.detail) == (
        doctor.Status.OK,
        "cuda; GPUs: H200, 130.5 of 139.8 GiB free, capability 9.0",
    )
    for version, status in ((None, doctor.Status.FAIL), ("3.4", doctor.Status.OK)):
        monkeypatch.setattr(doctor, "installed_version", lambda package, version=version: version)
        assert doctor._triton().status is status
    monkeypatch.setattr(
        doctor, "_tiny_generation", lambda device: doctor.Check("generation", doctor.Status.OK, device)
    )
    names = [check.name for check in doctor._checks(config)]
    assert names[:5] == ["python", "torch", "threads", "device", "triton"] and names[-1] == "generation"
    monkeypatch.setattr(doctor, "device_of", lambda config: "cpu")
    assert "triton" not in [check.name for check in doctor._checks(config)]


def test_what_breaks_in_a_check_is_what_it_found() -> None:
    def broken() -> doctor.Check:
        raise ZeroDivisionError("out of order")

    check = doctor._attempt("generation", broken)
    assert (check.name, check.status, check.detail) == (
        "generation",
        doctor.Status.FAIL,
        "ZeroDivisionError: out of order",
    )
    assert "--json" in check.hint


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (("ok", "ok"), 0),
        (("ok", "warn"), 0),
        (("ok", "fail"), 1),
        (("fail", "warn"), 1),
        (("fail", "fail"), 1),
    ],
)
def test_the_exit_code_says_whether_anything_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], statuses: tuple[str, ...], code: int
) -> None:
    checks = [
        doctor.Check(f"check {i}", doctor.Status(status), "found", "do this")
        for i, status in enumerate(statuses)
    ]
    monkeypatch.setattr(doctor, "_checks", lambda config: iter(checks))
    assert doctor.doctor(Config(ModelSource("tiny-llama", device="cpu")), None) == code
    shown = capsys.readouterr().out
    assert all(word in shown for check in checks for word in (check.name, check.status, "do this"))
