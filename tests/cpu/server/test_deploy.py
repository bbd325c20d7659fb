"""What the documents and the files for operators say is what the server has: fields, metrics and flags."""

from __future__ import annotations

import configparser
import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock import cli
from penstock.server.metrics import exposition
from penstock.server.seats import RequestFigures
from penstock.settings_file import take_in
from tests.cpu.server.test_metrics import STATS, Fixed

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
METRIC = re.compile(r"\b(?:penstock_|process_|python_|vllm:)[a-z0-9_]+")


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compatibility", ROOT / "tools" / "compatibility.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exposed() -> set[str]:
    """Every name that a scrape of a full engine has, suffixes of histograms included."""
    engine: Any = Fixed(STATS)
    figures = RequestFigures()
    figures.by_status["/x", "200"] = figures.by_finish["stop"] = 1
    families = text_string_to_metric_families(exposition(engine.stats(), figures, "m", 1).decode())
    return {sample.name for family in families for sample in family.samples}


def test_the_page_on_compatibility_is_what_the_parser_takes() -> None:
    """`PYTHONPATH=src python3 tools/compatibility.py --write` brings it up to date."""
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert tool().with_tables(page) == page


@pytest.mark.parametrize("file", ["grafana.json", "alerts.yml"])
def test_every_metric_of_the_board_and_the_alerts_exists(file: str) -> None:
    named = set(METRIC.findall((DEPLOY / file).read_text()))
    assert len(named) >= 6
    assert named <= exposed(), named - exposed()


def test_every_name_of_vllm_that_the_page_lists_exists_and_no_other_is_there() -> None:
    page = set(re.findall(r"vllm:[a-z0-9_]+", (ROOT / "docs" / "coming-from-vllm.md").read_text()))
    families = {
        re.sub(r"_(bucket|sum|count|created)$", "", name) for name in exposed() if name.startswith("vllm:")
    }
    assert {name.removesuffix("_total") for name in page} == {
        name.removesuffix("_total") for name in families
    }


def test_the_board_is_one_that_grafana_reads() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) >= 10
    assert all(
        target["expr"].count("(") == target["expr"].count(")")
        for panel in board["panels"]
        for target in panel["targets"]
    )


def test_alerts_are_rules_with_a_name_an_expression_and_a_text() -> None:
    text = (DEPLOY / "alerts.yml").read_text()
    rules = text.split("- alert: ")[1:]
    assert len(rules) >= 5
    for rule in rules:
        assert re.match(
            r"Penstock\w+\n\s+expr: .+\n(\s+for: \d+m\n)?\s+annotations: \{summary: \".+\"\}\s*$", rule
        ), rule


def test_the_unit_and_the_image_start_a_server_with_flags_that_exist() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "penstock.service")
    command, flag, file = shlex.split(unit["Service"]["ExecStart"])[1:]
    words = [command, flag, str(DEPLOY / Path(file).name)]
    args = cli.make_parser().parse_args(words)
    take_in(args, words)
    assert (args.log_format, args.kv_offload_ssd_dir) == ("json", "/var/lib/penstock")
    assert f"/{unit['Service']['StateDirectory']}" in args.kv_offload_ssd_dir
    assert float(unit["Service"]["TimeoutStopSec"]) > 20 + 5
    # homes are hidden from it
    assert unit["Service"]["Environment"] == f"PENSTOCK_CACHE=/var/cache/{unit['Service']['CacheDirectory']}"
    assert (
        f"useradd --system --home-dir /var/lib/penstock --shell /usr/sbin/nologin {unit['Service']['User']}"
        in (ROOT / "docs" / "deploying.md").read_text()
    )
    image = (DEPLOY / "Containerfile").read_text()
    command = json.loads(re.search(r"^CMD (\[.*\])$", image, flags=re.MULTILINE)[1])  # type: ignore[index]
    assert cli.make_parser().parse_args(command).host == "0.0.0.0"
