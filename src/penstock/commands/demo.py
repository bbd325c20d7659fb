"""`penstock demo`: one question about a long document, asked of several engines in turn, each of which has
its KV in another place. Owns the order of processes, the store between them, and the verdict."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.bench.child import run_in_process
from penstock.bench.local_store import local_store, store_program, why_no_store
from penstock.bench.report import write_json
from penstock.bench.scratch import scratch_ssd
from penstock.commands.demo_stages import (
    DemoAnswer,
    DemoEngine,
    EngineRun,
    difference,
    factor,
    planned,
    story,
    unserved,
)
from penstock.commands.demo_view import DemoView, verdict, view_for
from penstock.config import Config
from penstock.errors import InvariantBroken, StoreFailed
from penstock.flags import SETTINGS, typed
from penstock.progress import plain_console

ABOUT = "A question about a long document; what changes is where its KV is."
_DISK = "~/.cache/penstock/kv"


def run(args: Namespace, config: Config) -> int:
    """Files first, then the verdict: what is wrong is the last line."""
    began_s, out = time.monotonic(), Console(highlight=False)
    with scratch_ssd(config, needed=True) as config:
        plain_console().print(ABOUT)
        with view_for(out) as view:
            runs, no_store = _runs(args, config, view)
    answers = [answer for one in runs for answer in one.answers]
    differs = difference(answers)
    if args.json is not None:
        store = {"program": None if no_store else store_program(), "missing": no_store}
        found = {"identical": differs is None, "store": store, **_figures(runs)}
        write_json(args.json, "demo", runs[0].measured_on | found | {"wall_s": time.monotonic() - began_s})
    out.print(verdict(answers, out, differs is None), soft_wrap=not out.is_terminal)
    if differs is not None:
        raise InvariantBroken(f"{differs}; on a CPU, --deterministic excludes differences by rounding")
    if (lost := unserved(answers)) is not None:
        raise InvariantBroken(lost)
    plain_console().print("\n".join(["", "Next:", *(f"  {line}" for line in next_commands(args, runs[0]))]))
    return 0


# ---------------------------------------------------------------------------------------------- the processes


def _runs(args: Namespace, config: Config, view: DemoView) -> tuple[list[EngineRun], str | None]:
    """Of each engine, and why there is no store, if there is none."""
    folder = Path(config.offload.ssd_dir or "")
    config = replace(config, offload=replace(config.offload, ssd_dir=str(folder / "disk")))
    with contextlib.ExitStack() as stack:
        url, missing = None, why_no_store()
        if missing is None:
            try:
                url = stack.enter_context(local_store(folder / "store"))
            except StoreFailed as error:
                missing = str(error)
        if missing is not None:
            view.note(f"Without a shared store: {missing}")
        runs: list[EngineRun] = []
        for engine in planned(config, url):
            view.progress(f"starting engine {len(runs) + 1}, a new process", 0, 1)
            blocks = runs[0].blocks_on_disk if runs and engine.config.offload.ssd_dir else 0
            listen = _listener(view, is_first=not runs)
            runs.append(run_in_process(_ask_all, (engine, args.tokens, blocks), listen))
    return runs, missing


def _ask_all(engine: DemoEngine, tokens: int | None, blocks: int, say: Callable[..., None]) -> EngineRun:
    """In the new process. Imported there: this one needs no torch, and shows something at once."""
    from penstock.commands.demo_engine import ask_all

    return ask_all(engine, tokens, blocks, say)


def _listener(view: DemoView, is_first: bool) -> Callable[..., None]:
    def ready(model: str, device: str, document_tokens: int) -> None:
        if is_first:
            title = story().partition("\n")[0]
            view.note(f"{model} on {device}; the document: {title}, {document_tokens:,} tokens")

    happened: dict[str, Callable[..., None]] = {
        "progress": view.progress,
        "ready": ready,
        "asking": view.asking,
        "first_token": view.first_token,
        "answered": view.answered,
    }
    return lambda what, *said: happened[what](*said)


# ------------------------------------------------------------------------------------------------ its results


def _figures(runs: list[EngineRun]) -> dict[str, Any]:
    cold = runs[0].answers[0]
    return {
        "document_tokens": runs[0].document_tokens,
        "stages": [
            _stage(answer, cold) | {"engine": number}
            for number, one in enumerate(runs, 1)
            for answer in one.answers
        ],
        "engines": [{"start_s": one.start_s, "blocks_on_disk": one.blocks_on_disk} for one in runs],
    }


def _stage(answer: DemoAnswer, cold: DemoAnswer) -> dict[str, Any]:
    found = asdict(answer)
    del found["stage"]
    return {
        "name": answer.stage.name,
        "question": answer.stage.question,
        **found,
        "factor": factor(cold, answer),
    }


def next_commands(args: Namespace, run: EngineRun) -> list[str]:
    """As they can be typed here, with the flags of this demo."""
    names = ("model", "load_format", "device", "dtype", "weights")
    given = {name: getattr(args, name) for name in names if getattr(args, name) != SETTINGS[name].default}
    penstock, flags = _program(), "".join(f" {shlex.quote(word)}" for word in typed(given))
    messages = [{"role": "user", "content": "What is a penstock?"}]
    body = shlex.quote(json.dumps({"model": run.measured_on["model"], "messages": messages}))
    url = "http://127.0.0.1:8000/v1/chat/completions"
    lines = [
        f"{penstock} serve{flags} --kv-offload-ssd-dir {_DISK}",
        f"curl -s {url} -H 'Content-Type: application/json' -d {body}",
        f"{penstock} bench ttft{flags}",
    ]
    return lines if find_spec("uvicorn") else ["pip install 'penstock[server]'", *lines]


def _program() -> str:
    script = Path(sys.executable).with_name("penstock")
    found = shutil.which("penstock")
    if found is not None and Path(found).absolute() == script:
        return "penstock"
    words = [script] if script.exists() else [sys.executable, "-m", "penstock"]
    here = Path.cwd()
    near = [os.path.relpath(word) if Path(word).is_relative_to(here) else str(word) for word in words]
    return shlex.join(near)
