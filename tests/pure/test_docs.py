"""The documents say what is there: links lead somewhere, every page is in the navigation, commands parse and
are run or say why not, questions fit the schemas, flags, targets, routes and metrics exist. Owns no prose;
commands are run in tests/e2e/test_documents.py."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

import docs_site
from penstock.cli import make_parser
from penstock.errors import ConfigError, InvalidRequest
from penstock.server import schema
from penstock.server.about import ROUTES
from tests.support.documents import REASONS, ROOT, Block, blocks, documents, is_known, penstock_arguments
from train_mtp import __main__ as train_mtp

DOCUMENTS = documents()
BLOCKS = [block for page, text in DOCUMENTS.items() for block in blocks(page, text)]
SERVER = ROOT / "src" / "penstock" / "server"
URL = "http://127.0.0.1:8000"


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


each_document = pytest.mark.parametrize("page", DOCUMENTS)


def headings(text: str) -> set[str]:
    """As GitHub and the site name them."""
    found = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in found}


# ----------------------------------------------------------------------------------- links and the navigation


@each_document
def test_links_lead_somewhere(page: str) -> None:
    for path, heading in docs_site.targets(page):
        assert (ROOT / path).exists(), f"{page} links to {path}"
        assert not heading or heading in headings(DOCUMENTS[path]), f"{page} links to {path}#{heading}"


def nav_pages(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        for path in entry.values():
            if isinstance(path, list):
                yield from nav_pages(path)
            else:
                yield from (
                    [f"{path}/{name}" for name in docs_site.listing(path)]
                    if (ROOT / path).is_dir()
                    else [path]
                )


def test_every_page_is_in_the_navigation_once() -> None:
    found = [*nav_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])]
    assert sorted(found) == sorted(DOCUMENTS)
    assert docs_site.pages() == sorted(DOCUMENTS)


def test_a_wrong_link_is_noticed() -> None:
    assert headings("# What's in it? (all)\n```sh\n# no heading\n```\n") == {"whats-in-it-all"}
    assert docs_site.LINK.search("[a](b.md#c)").groups() == ("[a](", "b.md", "#c)")  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------ blocks of code


def complaints(block: Block) -> list[str]:
    """What is wrong with a block, without running it."""
    said = []
    if block.language not in ("sh", "python", "text", "json", "yaml", "toml", "js"):
        said.append(f"a block of the language {block.language!r}")
    if unknown := block.marks.keys() - {"not run", "prints", "answers", "fails"}:
        said.append(f"marks that mean nothing: {unknown}")
    if (reason := block.marks.get("not run")) is not None and not is_reason(reason):
        said.append(f"not run for no known reason: {reason}")
    if block.language == "python":
        compile(block.text, block.where, "exec")
    if block.language == "sh" and "not run" not in block.marks:
        said += [f"no way is known to run: {one}" for one in block.commands if not is_known(one)]
    if block.language in ("sh", "text"):
        said += [f"does not parse: {one}" for one in block.commands if not parses(one)]
    return said


def is_reason(reason: str) -> bool:
    by = reason.removeprefix("run by ")
    return reason in REASONS or (by != reason and (ROOT / by).is_file())


def parses(command: str) -> bool:
    if re.match(r"(curl|(\S+=\S+ )*(\S*/)?penstock|make|(\S+=\S+ )?python3 -m penstock) ", command) is None:
        return True
    arguments = penstock_arguments(command)
    if arguments is not None:
        return is_understood(arguments)
    return not command.startswith("curl ") or fits(shlex.split(command))


def fits(words: list[str]) -> bool:
    """Whether curl would ask a route that exists, with a body that it takes."""
    (url,) = (word for word in words if word.startswith("http"))
    parts = urlsplit(url)
    row = next(
        (row for path, row in ROUTES.items() if re.fullmatch(re.sub(r"{\w+}", "[^/]+", path), parts.path)),
        None,
    )
    data = words[words.index("-d") + 1] if "-d" in words else None
    method = words[words.index("-X") + 1] if "-X" in words else "GET" if data is None else "POST"
    if row is None or method.lower() not in row.methods:
        return False
    if data is None:
        return True
    try:
        schema.decode(data.encode(), row.body)
    except InvalidRequest:
        return False
    return True


def test_every_block_is_run_or_says_why_not_and_fits_what_it_asks() -> None:
    found = [f"{block.where}: {said}" for block in BLOCKS for said in complaints(block)]
    assert not found, "\n" + "\n".join(found)
    assert all(text.count("```") == 2 * len(blocks(page, text)) for page, text in DOCUMENTS.items())
    assert len(BLOCKS) > 60


@pytest.mark.parametrize(
    "markdown",
    [
        "```sh\nfrobnicate --now\n```",
        "```sh\nmake test\n```",
        "<!-- not run: no time -->\n```sh\nmake test\n```",
        "<!-- not run: run by tests/e2e/test_nothing.py -->\n```sh\nmake test\n```",
        "<!-- print: x -->\n```text\nx\n```",
        "```bash\nls\n```",
        "```sh\npenstock serve --no-such-flag\n```",
        "```text\nPATH=x penstock serve --no-such-flag\n```",
        "<!-- not run: needs a GPU -->\n```sh\npenstock serve --devise cuda\n```",
        f"```sh\ncurl {URL}/cache/stat\n```",
        f"```sh\ncurl -X DELETE {URL}/cache/stats\n```",
        f"""```sh\ncurl {URL}/v1/completions -d '{{"model": "m", "promt": "x"}}'\n```""",
    ],
)
def test_a_wrong_block_is_noticed(markdown: str) -> None:
    (block,) = blocks("page.md", markdown)
    assert complaints(block)


@pytest.mark.parametrize(
    "markdown",
    [
        "<!-- not run: takes minutes -->\n```sh\nmake test\n```",
        "<!-- answers: 429 -->\n<!-- prints: later -->\n```sh\ncurl -s http://127.0.0.1:8000/cache/stats\n```",
        "```sh\n# why\ncurl -s \\\n  http://127.0.0.1:8000/metrics | grep x\n\npenstock --version\n```",
    ],
)
def test_a_right_block_is_left_alone(markdown: str) -> None:
    (block,) = blocks("page.md", markdown)
    assert complaints(block) == []


# ------------------------------------------------------------------------------------------------- names


@each_document
def test_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    text = DOCUMENTS[page]
    named = re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE)
    assert set(named) <= targets


@each_document
def test_flags_exist(page: str) -> None:
    named = set(re.findall(r"`(--[a-z-]+)", DOCUMENTS[page]))
    assert named <= known_flags()


@each_document
def test_files_exist(page: str) -> None:
    named = re.findall(r"`((?:src|tests|docs|tools|benchmarks)/[\w./-]+)`", DOCUMENTS[page])
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


def test_every_metric_that_a_page_names_exists() -> None:
    """That each is in the generated reference: tests/pure/test_reference.py."""
    metrics = {
        name.removesuffix("_total")
        for name in re.findall(r"penstock_\w+", (SERVER / "metrics.py").read_text())
    }
    assert len(metrics) >= 8
    inside_vllm = (ROOT / "src" / "penstock" / "plugins" / "vllm.py").read_text()
    metrics |= {f"penstock_{name}" for name in re.findall(r'^    "(\w+)": "', inside_vllm, re.MULTILINE)}
    packages = {
        "penstock_valkey",
        "penstock_s3",
        "penstock_mooncake",
        "penstock_heads",
        "penstock_spec_",
        "penstock_",
    }
    for page, text in DOCUMENTS.items():
        named = {
            re.sub(r"_(total|sum|count|bucket)$", "", name) for name in re.findall(r"penstock_\w*", text)
        }
        assert named - packages <= metrics, f"{page}: {named - packages - metrics}"


def test_a_wrong_command_is_noticed() -> None:
    assert not is_understood(["serve", "--no-such-flag"])
    assert penstock_arguments("make serve ARGS='--no-such-flag'") == ["serve", "--no-such-flag"]
    assert penstock_arguments("PYTHONPATH=src python3 -m penstock bench decode") == ["bench", "decode"]
