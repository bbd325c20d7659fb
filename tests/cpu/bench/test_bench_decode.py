"""`bench decode`: what counts, what is skipped, and what the report says."""

from __future__ import annotations

import io
import json

import pytest

from penstock.bench.decode import DecodeBench
from penstock.bench.report import print_table
from penstock.cli import main
from penstock.models.progress import silent

TINY = ("--model", "tiny-llama", "--load-format", "dummy", "--device", "cpu", "--device-kv-blocks", "64")


def test_every_run_contributes_its_steady_steps(engine, config):
    results = DecodeBench((1, 3), prompt_tokens=9, tokens=12, repeat=2, seed=0).measure(
        engine, config, silent
    )
    assert results.skipped == []
    assert [row["batch"] for row in results.rows] == [1, 3]
    for row in results.rows:
        # Of 12 tokens the first has no full step before it, and the last one's step finishes: 10 intervals a
        # run.
        assert row["num_steps"] == 2 * 10
        step = row["step_ms"]
        assert 0 < step["min"] <= step["median"] <= step["p99"]
        assert row["tokens_per_s"] == pytest.approx(row["batch"] / step["mean"] * 1000)
        assert len(row["median_ms_by_run"]) == 2


@pytest.mark.parametrize(
    ("batch", "prompt_tokens", "tokens", "said"),
    [
        (1, 1000, 1100, "exceed the context"),
        (9, 8, 8, "raise --max-batch"),
        (8, 100, 100, "--device-kv-blocks 104 would do"),
        (8, 60, 3, "raise --tokens or --prefill-chunk"),
    ],
)
def test_a_size_that_cannot_be_measured_is_skipped_with_a_reason(
    engine, config, batch, prompt_tokens, tokens, said
):
    results = DecodeBench((batch, 1), prompt_tokens, tokens, repeat=1, seed=0).measure(engine, config, silent)
    assert said in results.skipped[0] and results.skipped[0].startswith(f"batch {batch}: ")
    assert not engine.has_work()


def test_prompts_of_different_runs_share_nothing(engine, config):
    DecodeBench((2,), prompt_tokens=40, tokens=4, repeat=3, seed=0).measure(engine, config, silent)
    assert engine.stats().prompt_tokens["device"] == 0


def test_the_command_prints_a_table_and_writes_file_and_picture(tmp_path, capsys):
    file, picture = tmp_path / "decode.json", tmp_path / "decode.png"
    argv = [
        "--batch",
        "2,1,2,999",
        "--prompt-tokens",
        "8",
        "--tokens",
        "8",
        "--repeat",
        "1",
        "--json",
        str(file),
        "--plot",
        str(picture),
    ]
    assert main(["bench", "decode", *TINY, *argv]) == 0
    shown = capsys.readouterr()
    report = json.loads(file.read_text())
    assert set(report) >= {"machine", "config", "results", "skipped", "settings", "model", "device"}
    assert [row["batch"] for row in report["results"]] == [2, 1]
    assert (report["model"], report["device"], report["config"]["kv"]["device_blocks"]) == (
        "tiny-llama",
        "cpu",
        64,
    )
    assert report["settings"]["prompt_tokens"] == 8
    assert f"{report['results'][0]['step_ms']['median']:.3f}" in shown.out
    assert "skipped: batch 999" in shown.err
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_nothing_measured_is_a_failure(capsys):
    assert main(["bench", "decode", *TINY, "--batch", "999"]) == 1
    assert "skipped: batch 999" in capsys.readouterr().err


def test_a_picture_without_matplotlib_is_refused_before_measuring(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("penstock.bench.report.find_spec", lambda package: None)
    monkeypatch.setattr("penstock.commands.bench.load_engine", lambda config: pytest.fail("it was loaded"))
    assert main(["bench", "decode", *TINY, "--plot", str(tmp_path / "x.png")]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_a_models_name_is_no_markup(capsys):
    print_table(["requests at once"], [["1"]], "a[/b][red]")
    assert "a[/b][red]" in capsys.readouterr().out


TITLES, LINES = (
    ["way", *(f"figure {number}" for number in range(12))],
    [["from disk", *(f"{5510.25 + number}" for number in range(12))]],
)


def test_a_table_that_is_piped_is_plain_text_with_every_figure(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    print_table(TITLES, LINES, "a title", left=1)
    title, titles, line = capsys.readouterr().out.splitlines()
    assert title == "a title" and (titles + line).isascii()
    assert line.split() == ["from", "disk", *LINES[0][1:]] and all(name in titles for name in TITLES)


@pytest.mark.parametrize("columns", [20, 80, 200])
def test_a_terminal_shows_every_figure_however_narrow_it_is(monkeypatch, columns):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    print_table(TITLES, LINES, left=1)
    shown = screen.getvalue()
    assert all(cell in shown for cell in (*TITLES, *LINES[0])) and "…" not in shown
    assert ("│" in shown) == (columns == 200)
