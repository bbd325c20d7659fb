"""`penstock generate`: one prompt, one answer. Owns where the text and the figures go."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.commands.answer import Answer, Figures
from penstock.commands.session import given_adapter, running_engine, tolerate_encodings
from penstock.config import Config
from penstock.contract import SamplingParams
from penstock.errors import ConfigError
from penstock.models.tokenizer import TextCodec


@dataclass(frozen=True, slots=True)
class Task:
    """What was asked for."""

    prompt: str  # "-": stdin
    sampling: SamplingParams
    max_tokens_is_default: bool  # then the context may leave less
    raw: bool  # no chat template
    json_file: Path | None


def generate(config: Config, task: Task) -> int:
    tolerate_encodings()
    text = sys.stdin.read() if task.prompt == "-" else task.prompt
    if not text:
        raise ConfigError("PROMPT is empty")
    with running_engine(config) as engine:
        chat = not task.raw and engine.tokenizer.has_chat_template
        prompt = _encode(engine.tokenizer, text, chat)
        adapter = given_adapter(engine)
        answer = Answer(engine, prompt, _fitting(task, engine.max_model_len - len(prompt)), adapter, begins=chat)
        written: list[str] = []
        for piece in answer.pieces():
            written.append(piece)
            print(piece, end="", flush=True)
        print()
        figures = answer.figures()
        print(figures.line(), file=sys.stderr)
        if task.json_file is not None:
            name = engine.name if adapter is None else adapter.name
            report = {"model": name, **_fields(figures), "text": "".join(written), "config": config.shown()}
            task.json_file.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _encode(tokenizer: TextCodec, text: str, chat: bool) -> list[int]:
    return tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)


def _fitting(task: Task, room: int) -> SamplingParams:
    """A default yields to the context; what was asked for does not, and the engine says why it cannot be."""
    if task.max_tokens_is_default and 1 <= room < task.sampling.max_tokens:
        return dataclasses.replace(task.sampling, max_tokens=room)
    return task.sampling


def _fields(figures: Figures) -> dict[str, Any]:
    return {**dataclasses.asdict(figures), "decode_tokens_per_s": figures.decode_tokens_per_s}
