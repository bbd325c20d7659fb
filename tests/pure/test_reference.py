"""The reference that tools/reference.py writes has every flag, route, field and metric."""

from __future__ import annotations

import re

import pytest

import reference
from penstock.flags import SETTINGS
from penstock.server import metrics
from penstock.server.about import ROUTES


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("reference")
    reference.write(folder)
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_every_flag_has_its_default_and_what_it_takes(pages: dict[str, str]) -> None:
    assert {one.flag for one in SETTINGS.values()} <= set(re.findall(r"`(--[a-z-]+)`", pages["cli.md"]))
    assert "| `--port` | `N`, between 0 and 65535 | `8000` | port to listen on" in pages["cli.md"]
    assert "| `--seed` | `N` | `0` |" in pages["cli.md"]  # a default that is false, and no switch


def test_a_command_shows_only_where_it_differs_from_another(pages: dict[str, str]) -> None:
    soak = pages["cli.md"].partition("## penstock bench soak")[2].partition("\n## ")[0]
    assert "| `--max-batch` | `N`, between 1 and 4096 | `12` |" in soak
    assert "--block-tokens" not in soak and "As [penstock serve](#penstock-serve)" in soak


def test_every_setting_of_a_file_has_a_type(pages: dict[str, str]) -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| ([^|]+) \|", pages["config.md"], flags=re.MULTILINE)
    assert {name for name, _ in rows} == {one.flag.removeprefix("--") for one in SETTINGS.values()}
    kinds = dict(rows)
    named = [kinds[name] for name in ("port", "lora", "kv-pin-spans", "kv-offload", "sanitize")]
    assert named == [
        "integer, between 0 and 65535",
        "list of strings",
        "string",
        "boolean",
        '`"report"`, `"strict"`, `true`',
    ]


def test_every_route_has_its_fields(pages: dict[str, str]) -> None:
    headings = re.findall(r"^## ([A-Z]+) (/\S*)", pages["http.md"], flags=re.MULTILINE)
    assert {path for _, path in headings} == set(ROUTES)
    for row in ROUTES.values():
        for name in () if row.body is None else row.body.__struct_encode_fields__:
            assert f"| `{name}` |" in pages["http.md"]
    assert "| `n` | integer |  | 1 to 128 |" in pages["http.md"]
    links = set(re.findall(r"\]\(#(\w+)\)", pages["http.md"]))
    assert links <= {name.lower() for name in re.findall(r"^## (\w+)$", pages["http.md"], flags=re.MULTILINE)}


def test_every_metric_has_its_labels(pages: dict[str, str]) -> None:
    lines = [one for table, *_ in metrics.TABLES.values() for one in metrics.described(table)]
    assert len(lines) > 50
    assert all(one.name in pages["metrics.md"] for one in lines)
    assert "`penstock_finished_total{model,reason}`" in pages["metrics.md"]
    assert "`penstock_build_info{version,model}`" in pages["metrics.md"]


def test_no_text_is_taken_for_html(pages: dict[str, str]) -> None:
    """But for the comment at the beginning."""
    for text in pages.values():
        bare = re.sub(r"`[^`\n]*`|<!--.*-->", "", text)
        assert not re.search(r"<\w", bare)
