"""How programs for tests are fetched: the sources that apt is given, one fetch for all who ask at once, a
failure that can be retried."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from types import ModuleType

import pytest

FETCH = Path(__file__).resolve().parents[3] / "tools" / "parts" / "fetch.py"


@pytest.fixture
def tool(tmp_path: Path) -> ModuleType:
    """The script, with a cache of its own."""
    spec = importlib.util.spec_from_file_location("parts_fetch", FETCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.CACHE = tmp_path
    return module


STANZAS = """\
Types: deb
# a comment
URIs: http://archive.example/debian
Suites: sid-like bookworm bookworm-updates
Components: main
Signed-By: /a/key

Types: deb
URIs: http://other.example
Suites: stable
Components: main
"""
LINES = """\
# deb http://commented.example bookworm main
deb [signed-by=/a/key arch=amd64] http://archive.example/debian bookworm main contrib
deb http://archive.example/debian bookworm-security main
deb-src http://archive.example/debian bookworm main
deb http://other.example jammy main
"""


def test_stanzas_of_the_release_are_taken_with_its_backports_where_they_are_wanted(tool: ModuleType) -> None:
    (plain,) = tool.stanza_sources(STANZAS, "bookworm", False)
    assert (
        ("Suites: bookworm bookworm-updates\n") in plain
        and ("Signed-By: /a/key") in plain
        and "comment" not in plain
    )
    (newer,) = tool.stanza_sources(STANZAS, "bookworm", True)
    assert "Suites: bookworm bookworm-updates bookworm-backports\n" in newer


def test_lines_of_the_release_are_taken_with_its_backports_where_they_are_wanted(tool: ModuleType) -> None:
    first, second = LINES.splitlines()[1:3]
    assert list(tool.one_line_sources(LINES, "bookworm", False)) == [first, second]
    assert list(tool.one_line_sources(LINES, "bookworm", True)) == [
        first,
        first.replace("bookworm", "bookworm-backports"),
        second,
    ]


def test_who_asks_at_once_waits_for_one_fetch(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    fetches: list[str] = []
    together = threading.Barrier(4)

    def download(part: str, state: Path) -> Path:
        fetches.append(part)
        state.mkdir()
        return state

    def ask() -> None:
        together.wait()
        tool.fetch("valkey")

    monkeypatch.setattr(tool, "download", download)
    askers = [threading.Thread(target=ask) for _ in range(4)]
    for one in askers:
        one.start()
    for one in askers:
        one.join()
    assert fetches == ["valkey"]
    assert (tool.CACHE / "valkey").is_dir() and not (tool.CACHE / "valkey.apt").exists()


def test_a_fetch_that_failed_leaves_nothing_that_looks_fetched(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "reason_against", lambda packages, state, backports: f"no {packages[0]} here")
    assert tool.main(["valkey"]) == 1
    assert "valkey cannot be had" in capsys.readouterr().err
    assert not (tool.CACHE / "valkey").exists()


def test_an_unknown_part_is_refused(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["no-such-part"]) == tool.main([]) == 2
    assert "valkey" in capsys.readouterr().err
