"""`demo` without its engines: what it plans, how answers are compared and shown, which commands come next.
Real runs are in tests/e2e/cli."""

from __future__ import annotations

import io
import json
import shlex
from dataclasses import replace

import pytest
from rich.console import Console

from penstock.bench.local_store import why_no_store
from penstock.cli import make_parser
from penstock.commands import demo
from penstock.commands.demo_stages import (
    COLD,
    HOST,
    NEXT,
    REMOTE,
    SSD,
    DemoAnswer,
    DemoStage,
    EngineRun,
    difference,
    planned,
    story,
)
from penstock.commands.demo_view import BarView, LineView, bar, bars, line, verdict, view_for
from penstock.config import Config, OffloadConfig
from penstock.contract import KvSource

TOKENS = [504, 10166, 30]
SOURCES = {
    COLD: KvSource(computed=2084),
    HOST: KvSource(host=2080, computed=4),
    SSD: KvSource(ssd=2080, computed=4),
}
SOURCES |= {REMOTE: KvSource(remote=1040, host=1040, computed=4), NEXT: KvSource(device=2064, computed=20)}
TIMES_S = {COLD: 5.25, HOST: 0.05, SSD: 0.105, REMOTE: 0.21, NEXT: 0.0525}


def answer(stage: DemoStage, tokens: list[int] = TOKENS, text: str = "A goat.") -> DemoAnswer:
    return DemoAnswer(stage, 2084, SOURCES[stage], TIMES_S[stage], TIMES_S[stage] + 0.2, tokens, text)


ANSWERS = [*map(answer, (COLD, HOST, SSD, REMOTE)), answer(NEXT, [1, 2], "Seven crowns.")]


def shown(columns: int, *drawn: object) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=columns, force_terminal=True, color_system=None)
    for one in drawn:
        console.print(one)
    return [line.rstrip() for line in file.getvalue().splitlines()]


# --------------------------------------------------------------------------------------------------- the plan


def test_each_engine_after_the_first_has_one_place_alone_and_the_last_gets_the_next_question():
    config = Config(offload=OffloadConfig(ssd_dir="/disk"))
    first, restarted, second = planned(config, "valkey://127.0.0.1")
    places = [(one.config.offload.ssd_dir, one.config.offload.remote) for one in (first, restarted, second)]
    assert places == [("/disk", "valkey://127.0.0.1"), ("/disk", None), (None, "valkey://127.0.0.1")]
    assert [one.stages for one in (first, restarted, second)] == [(COLD, HOST), (SSD,), (REMOTE, NEXT)]
    assert [one.stages for one in planned(config, None)] == [(COLD, HOST), (SSD, NEXT)]


def test_the_story_says_what_is_asked():
    text = " ".join(story().split())
    assert "The gate was opened at night by a goat." in text
    assert "The price of the padlock was seven crowns." in text
    assert 1500 < len(text.split()) < 2500 and text.isascii()


def test_what_a_store_lacks_is_said_with_how_to_get_it(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "apt install valkey-server" in why_no_store()


# ------------------------------------------------------------------------------------------------- comparison


def test_answers_are_compared_token_by_token_within_a_question():
    assert difference(ANSWERS) is None
    for tokens, at in (
        ([504, 9, 30], "token 2 is 10166 and 9"),
        ([504, 10166], "token 3 is 30 and none"),
        ([], "token 1"),
    ):
        found = difference([*ANSWERS[:2], answer(SSD, tokens)])
        assert "'nothing cached' and 'from disk, restarted' differ" in found and at in found


@pytest.fixture
def demo_with(penstock, monkeypatch, tmp_path):
    """The command, with engines that give these answers."""

    def run(*answers: DemoAnswer):
        runs = iter([EngineRun({"model": "m", "machine": {}}, 2038, 130, 1.0, list(answers[:2]))])
        later = iter([EngineRun({}, 2038, 130, 1.0, list(answers[2:]))])

        def run_in_process(work, args, listen):
            one = next(runs, None) or next(later)
            for given in one.answers:
                listen("answered", given)
            return one

        monkeypatch.setenv("PATH", "")  # no store
        monkeypatch.setattr(demo, "run_in_process", run_in_process)
        file = tmp_path / "figures.json"
        ran = penstock("demo", "--kv-offload-ssd-dir", str(tmp_path), "--json", str(file))
        assert [path.name for path in tmp_path.iterdir()] == [file.name]
        return ran, json.loads(file.read_text())

    return run


def test_a_different_answer_is_shown_and_is_an_error(demo_with):
    ran, figures = demo_with(answer(COLD), answer(HOST), answer(SSD, [504, 9, 30], "A ghost."))
    assert ran.code == 1 and figures["identical"] is False
    assert "A goat." in ran.out and "3 A ghost." in ran.out and "identical" not in ran.out
    assert "'from disk, restarted' differ: token 2 is 10166 and 9" in ran.err and "Next:" not in ran.out


def test_a_tier_that_served_nothing_is_an_error(demo_with):
    lost = replace(answer(SSD), source=KvSource(computed=2084))
    ran, figures = demo_with(answer(COLD), answer(HOST), lost)
    assert (
        ran.code == 1 and "nothing of the prompt came from" in ran.err and "'from disk, restarted'" in ran.err
    )
    assert figures["identical"] is True and figures["stages"][2]["source"]["computed"] == 2084


def test_figures_and_next_commands_come_with_equal_answers(demo_with):
    ran, figures = demo_with(*ANSWERS[:3], ANSWERS[4])
    assert ran.code == 0 and figures["identical"] is True and figures["store"]["program"] is None
    assert [one["factor"] for one in figures["stages"]] == pytest.approx([1, 105, 50, 100])
    assert "Without a shared store: neither valkey-server" in ran.out
    assert "3 answers of 3 tokens" in ran.out and "What was the price of the padlock?" in ran.out
    serve, curl, bench = (line.strip() for line in ran.out.partition("Next:\n")[2].splitlines())
    for command in (serve, bench):
        words = shlex.split(command)
        make_parser().parse_args(words[1:] if words[1] != "-m" else words[3:])
    assert json.loads(shlex.split(curl)[-1])["model"] == "m"


def test_next_commands_have_the_flags_of_the_demo():
    args = make_parser().parse_args(["demo", "--model", "a model", "--device", "cuda", "--tokens", "9000"])
    serve, _, bench = demo.next_commands(args, EngineRun({"model": "m"}, 1, 1, 1.0, []))[-3:]
    assert "serve --model 'a model' --device cuda --kv-offload-ssd-dir" in serve
    assert bench.endswith("bench ttft --model 'a model' --device cuda")


# -------------------------------------------------------------------------------------------------- the views


@pytest.mark.parametrize("columns", [76, 80, 100, 160])
def test_a_table_of_bars_has_every_figure_at_any_width(columns):
    text = shown(columns, bars(ANSWERS, columns))
    assert all(len(line) <= columns for line in text)
    together = " ".join(" ".join(text).split())
    for figure in (
        "5.25 s 1x - 2,084",
        "50 ms 105x 2,080 host 4",
        "2,080 disk 4",
        "210 ms 25x",
        "2,064 device 20",
    ):
        assert figure in together
    assert "1,040 store" in together and "1,040 host" in together.replace("1,040 host,", "1,040 host")


def test_bars_are_as_long_as_their_times():
    lines = [text for text in shown(100, bars(ANSWERS, 100)) if text[0].isdigit()]
    assert [text.count("█") for text in lines] == [34, 0, 0, 1, 0]
    assert [any(eighths in text for eighths in "▏▎▍▌▋▊▉") for text in lines] == [
        False,
        True,
        True,
        True,
        True,
    ]
    assert bar(1.0, 8) == "█" * 8 and bar(0.5, 8) == "█" * 4 and bar(0.0, 8) == "▏" and bar(9.0, 8) == "█" * 8


def test_one_that_is_awaited_has_a_bar_that_grows():
    text = shown(80, bars(ANSWERS[:1], 80, HOST, 2.6))
    assert (
        "2 from host memory" in text[-1]
        and "2.6 s" in text[-1]
        and 0 < text[-1].count("█") < text[-2].count("█")
    )


def test_bars_are_for_terminals_that_can_show_them(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    utf8 = io.TextIOWrapper(io.BytesIO(), "utf-8")
    ascii_only = io.TextIOWrapper(io.BytesIO(), "ascii")
    for file, columns, terminal, kind in (
        (utf8, 80, True, BarView),
        (utf8, 60, True, LineView),
        (ascii_only, 80, True, LineView),
        (utf8, 80, False, LineView),
    ):
        assert type(view_for(Console(file=file, width=columns, force_terminal=terminal))) is kind
    monkeypatch.setenv("TERM", "dumb")
    assert type(view_for(Console(file=utf8, width=80))) is LineView


def test_lines_have_every_figure(capsys):
    with LineView() as view:
        for one in ANSWERS:
            view.asking(one.stage)
            view.answered(one)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 nothing cached: first token after 5.25 s; 2,084 prompt tokens: 2,084 computed"
    slow = replace(answer(HOST), ttft_s=10.5)
    assert "after 10.50 s (2.0x slower than cold)" in line(slow, ANSWERS[0])
    assert lines[3].endswith(
        "210 ms (25x faster than cold); 2,084 prompt tokens: 1,040 host, 1,040 store, 4 computed"
    )


def test_what_a_model_writes_does_not_drive_the_terminal():
    one = answer(COLD, text="a\x1b[2Jb\nc")
    assert any("1 a [2Jb c" in text for text in shown(80, verdict([one], Console())))
