"""Coding agents by their own commands, with their own prompts and tools: one question each, and where the
agent has it, the events of the answer and a second question in the same conversation. Each has a home of its
own, and calls no one but the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from checks import KEY, MODEL, QUESTION, URL, V1, check

SAID = "Hello from Penstock"  # by the model of long_model.py
FOLDER = Path.cwd()  # where the agent is installed
HOME = Path(tempfile.mkdtemp())
WORK = HOME / "work"
THEN = "Say it again."


def ran(program: str, *words: str, **settings: str) -> str:
    path = next(
        path
        for path in (FOLDER / "node_modules" / ".bin" / program, Path(sys.executable).parent / program)
        if path.exists()
    )
    environment = {"PATH": os.environ["PATH"], "HOME": str(HOME), "DO_NOT_TRACK": "1", **settings}
    made = subprocess.run(
        [str(path), *words],
        cwd=WORK,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert made.returncode == 0, (made.stderr or made.stdout)[-500:]
    return made.stdout


def claude(*words: str) -> str:
    known = {
        "ANTHROPIC_BASE_URL": URL,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
    }
    return ran("claude", "-p", *words, **known, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1")


def try_claude() -> None:
    with check("one prompt with all tools"):
        answered(claude(QUESTION))
    with check("events"):
        words = ("--output-format", "stream-json", "--verbose", "--include-partial-messages")
        lines = [json.loads(line) for line in claude(QUESTION, *words).splitlines()]
        events = [line["event"]["type"] for line in lines if line["type"] == "stream_event"]
        assert (events[0], events[-1]) == ("message_start", "message_stop"), events
        assert lines[-1]["is_error"] is False and lines[-1]["result"] == SAID, lines[-1]
    with check("second prompt"):
        answered(claude(THEN, "--continue"))


def codex(*words: str) -> str:
    provider = f'{{name="Penstock", base_url="{V1}", wire_api="responses"}}'
    settings = (
        "-c",
        f'model="{MODEL}"',
        "-c",
        'model_provider="penstock"',
        "-c",
        f"model_providers.penstock={provider}",
    )
    return ran("codex", "exec", "--skip-git-repo-check", *settings, *words, CODEX_HOME=str(HOME))


def try_codex() -> None:
    with check("one prompt with all tools"):
        answered(codex(QUESTION))
    with check("events"):
        lines = [json.loads(line) for line in codex("--json", QUESTION).splitlines() if line.startswith("{")]
        assert lines[-1]["type"] == "turn.completed", lines[-1]
        assert SAID in [line["item"].get("text") for line in lines if line["type"] == "item.completed"], lines
    with check("second prompt"):
        answered(codex("resume", "--last", THEN))


def opencode(*words: str) -> str:
    model = {"name": MODEL, "limit": {"context": 100_000, "output": 1000}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": V1, "apiKey": KEY},
        "models": {MODEL: model},
    }
    name = f"penstock/{MODEL}"
    known = {
        "autoupdate": False,
        "share": "disabled",
        "provider": {"penstock": provider},
        "model": name,
        "small_model": name,
    }
    (WORK / "opencode.json").write_text(json.dumps(known))
    return ran("opencode", "run", *words, OPENCODE_DISABLE_AUTOUPDATE="1", OPENCODE_DISABLE_MODELS_FETCH="1")


def try_opencode() -> None:
    with check("one prompt with all tools"):
        answered(opencode(QUESTION))
    with check("second prompt"):
        answered(opencode("--continue", THEN))


def try_aider() -> None:
    with check("one prompt"):
        words = (
            "--no-show-model-warnings",
            "--no-check-update",
            "--analytics-disable",
            "--no-git",
            "--yes-always",
        )
        said = ran(
            "aider",
            "--model",
            f"openai/{MODEL}",
            *words,
            "--message",
            QUESTION,
            OPENAI_API_BASE=V1,
            OPENAI_API_KEY=KEY,
        )
        answered(said)


def try_qwen() -> None:
    with check("one prompt with all tools"):
        known = {"OPENAI_BASE_URL": V1, "OPENAI_API_KEY": KEY, "OPENAI_MODEL": MODEL}
        answered(ran("qwen", "--auth-type", "openai", "-p", QUESTION, **known))


def try_continue() -> None:
    with check("one prompt with all tools"):
        model = {
            "name": MODEL,
            "provider": "openai",
            "model": MODEL,
            "apiBase": V1,
            "apiKey": KEY,
            "roles": ["chat"],
        }
        config = {"name": "penstock", "version": "1.0.0", "schema": "v1", "models": [model]}
        (HOME / "config.yaml").write_text(json.dumps(config))
        answered(
            ran("cn", "-p", QUESTION, "--config", str(HOME / "config.yaml"), CONTINUE_TELEMETRY_ENABLED="0")
        )


def answered(text: str) -> None:
    assert SAID in text, f"the answer is not there: {text[-300:]!r}"


AGENTS: dict[str, Callable[[], None]] = {
    "Claude Code": try_claude,
    "Codex": try_codex,
    "opencode": try_opencode,
    "aider": try_aider,
    "Qwen Code": try_qwen,
    "Continue": try_continue,
}

if __name__ == "__main__":
    WORK.mkdir()
    AGENTS[os.environ["PENSTOCK_CLIENT"]]()
