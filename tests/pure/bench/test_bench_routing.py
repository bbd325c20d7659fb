"""`bench routing`: hit rates worked out by hand, none above the optimum, and bad traces refused by line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.bench.routing import OPTIMUM, measure, repeated, replay
from penstock.cli import main
from penstock.errors import ConfigError
from penstock.experts.order import ORDERS
from penstock.experts.routing import RoutedStep, RoutingTrace, RoutingWriter, read_routing
from penstock.models.progress import silent

EXPERTS, TOP_K = 4, 2


def routed(*layers: tuple[int, ...], num_tokens: int = 1) -> RoutedStep:
    experts = tuple(np.array(own, np.int64) for own in layers)
    return RoutedStep(num_tokens, experts, tuple(np.ones(len(own), np.int64) for own in layers))


def trace_of(*steps: RoutedStep) -> RoutingTrace:
    return RoutingTrace("by hand", "made", EXPERTS, TOP_K, tuple(range(len(steps[0].experts))), steps)


def written(trace: RoutingTrace, path: Path) -> Path:
    about = {"model": trace.model, "experts": EXPERTS, "top_k": TOP_K, "layers": list(trace.layers)}
    writer = RoutingWriter(str(path), about)
    for step in trace.steps:
        writer.put(step)
    writer.close()
    return path


def test_hits_are_those_worked_out_by_hand() -> None:
    trace = trace_of(*[routed((0, 1))] * 3, routed((2, 3)), routed((0, 1)))
    assert replay(trace, "lfu", 2, silent) == 4
    assert replay(trace, "lfu", 4, silent) == 6
    assert replay(trace, "none", 3, silent) == 5
    assert repeated(trace) == pytest.approx(4 / 8)


def test_a_step_with_many_tokens_does_not_drive_out_what_is_used_often() -> None:
    steps = [routed((0, 1))] * 5 + [routed((0, 1, 2, 3), num_tokens=100)] + [routed((0, 1))]
    assert replay(trace_of(*steps), "lfu", 3, silent) == 4 * 2 + 2 + 2


steps_of = st.lists(
    st.lists(st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=3), min_size=2, max_size=2),
    min_size=1,
    max_size=12,
)


@settings(max_examples=50, deadline=None)
@given(steps_of, st.integers(2, 8))
def test_no_rule_finds_more_than_the_optimum(steps: list[list[set[int]]], slots: int) -> None:
    trace = trace_of(*(routed(*(tuple(sorted(own)) for own in step)) for step in steps))
    rows = measure(trace, list(ORDERS), [100 * slots / trace.num_all], silent)
    best = next(row["hit_rate"] for row in rows if row["order"] == OPTIMUM)
    assert all(row["hit_rate"] <= best for row in rows)


@pytest.mark.parametrize("name", ["routing.jsonl", "routing.jsonl.gz"])
def test_a_file_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    trace = trace_of(routed((0, 1), (2, 3)), routed((3,), ()))
    found = read_routing(written(trace, tmp_path / name))
    assert found.layers == trace.layers and found.num_experts == EXPERTS
    assert [step.line for step in found.steps] == [step.line for step in trace.steps]
    assert len(read_routing(tmp_path / name, 1).steps) == 1


BAD = {
    "not JSON": "not JSON",
    '{"tokens": 1, "hits": [[0, 1]]}': "hits of 2 layers",
    '{"tokens": 0, "hits": [[0, 1], []]}': "expected tokens",
    '{"tokens": 1, "hits": [[4, 1], []]}': "experts below 4",
    '{"tokens": 1, "hits": [[0], []]}': "expected tokens",
    '{"tokens": 1, "hits": [[0, 1, 0, 1], []]}': "expected tokens",
    "[]": "expected tokens",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_refused_by_its_number(line: str, tmp_path: Path) -> None:
    path = written(trace_of(routed((0, 1), (2, 3))), tmp_path / "routing.jsonl")
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match=f"line 3.*{BAD[line]}"):
        read_routing(path)


@pytest.mark.parametrize("head", ['{"routing_trace": 2}', "{}", '{"routing_trace": 1, "experts": 0}'])
def test_another_file_is_refused(head: str, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(head + "\n")
    with pytest.raises(ConfigError, match="line 1"):
        read_routing(path)


def test_a_file_without_steps_and_one_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_routing(tmp_path / "none")
    path = written(trace_of(routed((0,), ())), tmp_path / "empty.jsonl")
    path.write_text(path.read_text().splitlines()[0])
    with pytest.raises(ConfigError, match="no steps"):
        read_routing(path)


def test_the_command_prints_each_rule_beside_the_optimum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(trace_of(*[routed((0, 1), (2, 3))] * 4), tmp_path / "routing.jsonl")
    file = tmp_path / "found.json"
    assert main(["bench", "routing", str(path), "--shares", "50,100", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "lfu" in shown and OPTIMUM in shown and "75.0" in shown
    assert json.loads(file.read_text())["results"][0] == {
        "order": "lfu",
        "share": 50.0,
        "slots": 4,
        "hit_rate": 0.75,
    }


@pytest.mark.parametrize("flag", [["--shares", "0"], ["--shares", "x"], ["--policies", "fifo"]])
def test_wrong_flags_are_refused(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "routing", "trace.jsonl", *flag]) == 2
    assert flag[1] in capsys.readouterr().err
