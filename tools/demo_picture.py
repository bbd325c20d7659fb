"""Draws docs/pictures/demo.svg: what a terminal shows at the end of a real `penstock demo`. Owns the form of
the picture; the figures are those of the demo's JSON file.

python tools/demo_picture.py DEMO.json PICTURE.svg
"""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from penstock.commands import demo_stages
from penstock.commands.demo import ABOUT
from penstock.commands.demo_stages import DemoAnswer, DemoStage, story
from penstock.commands.demo_view import bars, verdict
from penstock.contract import KvSource

COLUMNS = 94
STAGES = {one.name: one for one in vars(demo_stages).values() if isinstance(one, DemoStage)}


def main(report: Path, picture: Path) -> None:
    found = json.loads(report.read_text())
    answers = [_answer(one) for one in found["stages"]]
    console = Console(
        width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    machine, title = found["machine"], story().partition("\n")[0]
    where = f"{machine['cpu']}, threads: {machine['threads']}"
    if found["device"] == "cuda":
        where = machine["gpus"][0]["name"]
    document = f"the document: {title}, {found['document_tokens']:,} tokens"
    for line, style in (
        ("$ penstock demo", "bold"),
        (ABOUT, ""),
        (f"{found['model']} on {where}; {document}", "dim"),
    ):
        console.print(Text(line, style))
    console.print()
    console.print(bars(answers, COLUMNS))
    console.print()
    console.print(verdict(answers, console))
    drawn = console.export_svg(title="", unique_id="demo")
    # no font that a browser would have to fetch
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    picture.write_text(drawn.replace("Fira Code", "Menlo, Consolas, DejaVu Sans Mono"))


def _answer(one: dict[str, Any]) -> DemoAnswer:
    source = KvSource(**one["source"])
    figures = one["prompt_tokens"], source, one["ttft_s"], one["total_s"], one["tokens"], one["text"]
    return DemoAnswer(STAGES[one["name"]], *figures)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
