"""`bench decode` and `bench restore`: what counts, what is skipped, and what the report says."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from penstock.bench.decode import DecodeBench, RestoreBench, steady_times
from penstock.bench.report import print_table
from penstock.bench.run import Driver, Stepped
from penstock.cli import main
from penstock.config import GIB, ExpertsConfig, OffloadConfig
from penstock.engine.build import build
from tests.support.driving import tiny_config

TINY = ["--model", "tiny-llama", "--load-format", "dummy", "--device", "cpu", "--device-kv-blocks", "64"]


def test_only_full_steps_between_full_steps_are_steady():
    turns = [
        Stepped(1.0, 0, 0),  # prefill
        Stepped(2.0, 2, 0),  # two of three have started
        Stepped(4.0, 3, 0),  # full, but the one before was not
        Stepped(5.0, 3, 0),
        Stepped(6.5, 3, 0),
        Stepped(7.0, 3, 1),  # the first finishes
        Stepped(7.1, 2, 2),
    ]
    assert steady_times(turns, 3) == [1.0, 1.5]
    assert steady_times(turns[:2], 3) == []


def test_every_run_contributes_its_steady_steps_and_shares_nothing_with_others(engine, config):
    results = DecodeBench((1, 3), prompt_tokens=40, tokens=12, repeat=2, seed=0).measure(
        Driver(engine, config)
    )
    assert results.skipped == [] and [row["batch"] for row in results.rows] == [1, 3]
    for row in results.rows:
        # Of 12 tokens the first has no full step before it, and the last one's step finishes: 10 intervals a
        # run.
        assert row["num_steps"] <= 2 * 10 and (row["batch"] > 1 or row["num_steps"] == 2 * 10)
        step = row["step_ms"]
        assert 0 < step["min"] <= step["median"] <= step["p99"]
        assert row["tokens_per_s"] == pytest.approx(row["batch"] / step["mean"] * 1000)
        assert len(row["median_ms_by_run"]) == 2 and "expert_wait_ms" not in row
    assert engine.stats().prompt_tokens["device"] == 0


def test_a_row_says_how_long_a_step_waited_for_experts_that_come_and_go():
    config = replace(tiny_config("tiny-qwen3-moe"), experts=ExpertsConfig("9%", guesses=False))
    engine = build(config)
    (row,) = DecodeBench((2,), 40, 12, repeat=1, seed=0).measure(Driver(engine, config)).rows
    assert 0 < row["expert_wait_ms"] < row["step_ms"]["mean"] * 12
    engine.close(timeout_s=20.0)


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
    results = DecodeBench((batch, 1), prompt_tokens, tokens, repeat=1, seed=0).measure(Driver(engine, config))
    assert said in results.skipped[0] and results.skipped[0].startswith(f"batch {batch}: ")
    assert not engine.has_work()


def test_nothing_measured_is_a_failure_and_a_picture_without_matplotlib_is_refused_at_once(
    tmp_path, capsys, monkeypatch
):
    assert main(["bench", "decode", *TINY, "--batch", "999"]) == 1
    assert "skipped: batch 999" in capsys.readouterr().err
    monkeypatch.setattr("penstock.bench.report.find_spec", lambda package: None)
    monkeypatch.setattr("penstock.commands.bench.load_engine", lambda config: pytest.fail("it was loaded"))
    assert main(["bench", "decode", *TINY, "--plot", str(tmp_path / "x.png")]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------- tables


TITLES = ["way", *(f"figure {number}" for number in range(12))]
LINES = [["from disk", *(f"{5510.25 + number}" for number in range(12))]]


def test_a_table_that_is_piped_is_plain_text_with_every_figure(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    print_table(TITLES, LINES, "a[/b][red] title", left=1)  # no markup
    title, titles, line = capsys.readouterr().out.splitlines()
    assert title == "a[/b][red] title" and (titles + line).isascii()
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
    print_table(TITLES, LINES, "a[/b][red]", left=1)
    shown = screen.getvalue()
    assert all(cell in shown for cell in ("a[/b][red]", *TITLES, *LINES[0])) and "…" not in shown
    assert ("│" in shown) == (columns == 200)


# ---------------------------------------------------------------------------------------------------- restore


def restore(engine, config, blocks: float = 10.5, tokens: int = 40):
    gib = blocks * engine.parts.arena.layout.block_bytes / GIB
    return RestoreBench((2,), gib, tokens, repeat=1, seed=0).measure(Driver(engine, config))


def test_decoding_goes_on_while_prefixes_come_back(tiered_engine, tiered_config):
    (row,) = restore(tiered_engine, tiered_config).rows
    assert row["promoted_blocks"] == 10
    assert row["alone_ms"]["steps"] > 20 and row["restoring_ms"]["steps"] > 20
    assert row["p99_ratio"] == row["restoring_ms"]["p99"] / row["alone_ms"]["p99"]


def test_device_and_host_have_to_hold_what_returns(tiered_engine, tiered_config, config):
    results = restore(tiered_engine, tiered_config, blocks=200)
    assert results.rows == [] and "on the device, which holds 64" in results.skipped[0]
    assert " GiB and 2 requests beside them: they need " in results.skipped[0]
    for blocks, num_rows in ((10, 0), (11, 1)):  # one of them to write
        host_gib = blocks * tiered_engine.parts.arena.layout.block_bytes / GIB
        tight = replace(config, offload=OffloadConfig(host_gib=host_gib, load_always=True))
        engine = build(tight)
        results = restore(engine, tight)
        engine.close(timeout_s=20.0)
        assert len(results.rows) == num_rows
        said = "they need 11 KV blocks in host memory, which holds 10 (160 tokens); --kv-offload"
        assert num_rows or said in results.skipped[0]
