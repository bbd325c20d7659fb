"""The documents say what is there: links lead somewhere, commands parse, flags, targets, routes and metrics
exist. Owns no prose; the README's commands are run elsewhere."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
from pathlib import Path

import pytest

from penstock.cli import make_parser
from penstock.errors import ConfigError
from train_mtp import __main__ as train_mtp

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SERVER = ROOT / "src" / "penstock" / "server"


def fenced(text: str, language: str) -> str:
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL))


def commands(text: str) -> list[str]:
    return [line for line in fenced(text, "sh").replace("\\\n", " ").splitlines() if line.strip()]


def penstock_arguments(command: str) -> list[str] | None:
    """What the command gives to penstock; None: it is another command."""
    words = shlex.split(command.partition(" < ")[0], comments=True)
    if words[:2] in (["make", "serve"], ["make", "chat"], ["make", "demo"], ["make", "bench"]):
        given = [word.removeprefix("ARGS=") for word in words[2:]]
        return [words[1], *shlex.split(" ".join(given))]
    while words and "=" in words[0]:
        words = words[1:]
    if words[0] == ".venv/bin/penstock":
        return words[1:]
    return words[3:] if words[:3] == ["python3", "-m", "penstock"] else None


def is_understood(arguments: list[str]) -> bool:
    try:
        with contextlib.suppress(SystemExit):  # --help
            make_parser().parse_args(arguments)
    except ConfigError:
        return False
    return True


def known_flags() -> set[str]:
    """Of all commands and of the head trainer, found in their help."""
    found: set[str] = set()
    waiting: list[argparse.ArgumentParser] = [make_parser(), train_mtp.make_parser()]
    while waiting:
        for action in waiting.pop()._actions:
            found |= set(action.option_strings)
            if isinstance(action.choices, dict):
                waiting += action.choices.values()
    return found


def each(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(name, DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])


@each("document")
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        if not target.startswith("http"):
            path, _, heading = target.partition("#")
            other = document.parent / path if path else document
            assert other.exists(), f"{document.name} links to {target}"
            if heading:
                headings = re.findall(r"^#+ (.+)$", other.read_text(), flags=re.MULTILINE)
                assert heading in {name.lower().replace(" ", "-") for name in headings}, (
                    f"{document.name} links to {target}"
                )


@each("document")
def test_commands_are_understood(document: Path) -> None:
    for command in commands(document.read_text()):
        arguments = penstock_arguments(command)
        assert arguments is None or is_understood(arguments), f"{document.name}: {command}"


@each("document")
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    text = document.read_text()
    named = re.findall(r"^make " r"([a-z-]+)", fenced(text, "sh"), flags=re.MULTILINE) + re.findall(
        r"`make ([a-z-]+)", text
    )
    assert set(named) <= targets


@each("document")
def test_flags_exist(document: Path) -> None:
    named = set(re.findall(r"`(--[a-z-]+)", document.read_text()))
    assert named <= known_flags()


@each("document")
def test_files_exist(document: Path) -> None:
    named = re.findall(r"`((?:src|tests|docs|tools|benchmarks)/[\w./-]+)`", document.read_text())
    assert all((ROOT / name).exists() for name in named), named


def test_every_route_is_documented_and_no_other() -> None:
    routes = set(re.findall(r"(?m)^(/[^ {]*[^ {/]) [a-z_ ]+: ", (SERVER / "about.py").read_text()))
    documented = set(
        re.findall(r"`(?:GET|POST) " r"(/[a-z0-9/_.]+)", (ROOT / "docs" / "http-api.md").read_text())
    )
    assert len(routes) >= 10
    assert {
        path
        for path in documented
        if not path.startswith(("/v1/models/", "/v1/responses/", "/v1/snapshots/")) and path != "/"
    } == routes


def test_every_metric_is_documented_and_no_other() -> None:
    metrics = {
        name.removesuffix("_total")
        for name in re.findall(r"penstock_\w+", (SERVER / "metrics.py").read_text())
    }
    documented = re.findall(r"penstock_\w+", (ROOT / "docs" / "http-api.md").read_text())
    assert len(metrics) >= 8
    assert {name.removesuffix("_total") for name in documented} == metrics


def test_a_wrong_command_is_noticed() -> None:
    assert not is_understood(["serve", "--no-such-flag"])
    assert penstock_arguments("make serve ARGS='--no-such-flag'") == ["serve", "--no-such-flag"]
    assert penstock_arguments("PYTHONPATH=src python3 -m penstock bench decode") == ["bench", "decode"]
