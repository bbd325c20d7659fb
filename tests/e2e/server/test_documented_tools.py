"""The examples of docs/tools.md and docs/structured-output.md, run against the embedded model as they stand
there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("llguidance", reason="structured output is an extra")

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.mark.parametrize(
    ("page", "printed"),
    [("structured-output.md", r"city='.*' " r"kind='(sun|rain|snow)'"), ("tools.md", r"weather \{'city': ")],
)
def test_an_example_prints_what_its_page_promises(
    page: str, printed: str, server_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    assert "http://127.0.0.1:8000" in example
    exec(
        compile(example.replace("http://127.0.0.1:8000", server_url), page, "exec", dont_inherit=True),
        {"__name__": "example"},
    )
    assert re.search(printed, capsys.readouterr().out)
