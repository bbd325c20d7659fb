"""The documents are tried: every command and program of a page is run, in order, as it stands there. CI runs
the README; `make docs-check` runs all pages. What is not run has a mark with the reason, which
tests/pure/test_docs.py checks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.documents import ROOT, Page, blocks, documents, started

IN_CI = ("README.md",)
PAGES = [
    page
    for page, text in documents().items()
    if any(
        block.language in ("sh", "python") and "not run" not in block.marks for block in blocks(page, text)
    )
]


@pytest.fixture(scope="module", autouse=True)
def _set_up() -> None:
    done = subprocess.run(["make", "--question", "setup"], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, (
        "commands run in what `make setup` makes, which is missing or out of date: run `make test`"
    )


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with ExitStack() as stack:
        yield Page(tmp_path, stack)


@pytest.mark.parametrize("name", PAGES if "PENSTOCK_DOCS" in os.environ else IN_CI)
def test_every_command_of_a_page_works(name: str, page: Page) -> None:
    found = [block for block in blocks(name, (ROOT / name).read_text()) if block.language in ("sh", "python")]
    for block in found:
        if "not run" not in block.marks:
            print(block.where, flush=True)
            page.run(block)


@pytest.mark.parametrize(
    ("markdown", "complaint"),
    [
        ("```sh\n.venv/bin/penstock generate --no-such-flag\n```", "ended with 2"),
        ("<!-- prints: Rome -->\n```python\nprint('Paris')\n```", "does not print 'Rome'"),
        ("<!-- fails: no such -->\n```sh\n.venv/bin/penstock --version\n```", "ended with 0"),
    ],
)
def test_a_block_that_does_not_do_what_its_page_says_is_noticed(
    markdown: str, complaint: str, page: Page
) -> None:
    (block,) = blocks("page.md", markdown)
    with pytest.raises(AssertionError, match=complaint):
        page.run(block)


def test_a_server_that_ends_before_it_is_ready_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="no such thing"),
        started(["sh", "-c", "echo no such thing; exit 1"], tmp_path, {**os.environ}),
    ):
        pass
