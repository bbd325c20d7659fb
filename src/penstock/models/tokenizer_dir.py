"""The tokenizer of a model directory: tokenizer.json, its config, chat template and end-of-sequence ids. Owns where they are looked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.errors import ModelError
from penstock.models.architecture import token_ids
from penstock.models.chat import ChatTemplate
from penstock.models.model import ModelConfig
from penstock.models.safetensors_dir import read_json
from penstock.models.tokenizer import Tokenizer, open_vocabulary

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_tokenizer(directory: Path, config: ModelConfig) -> Tokenizer:
    """`config` gives the vocabulary that ids must fit into, and the end-of-sequence ids where generation_config.json has none."""
    settings = _optional_json(directory / "tokenizer_config.json")
    special = dict(_special_tokens(settings))
    template = _template_source(directory, settings)
    chat = ChatTemplate(template, special) if template is not None else None
    backend = open_vocabulary(directory / "tokenizer.json")
    generation = _optional_json(directory / "generation_config.json")
    declared = token_ids(generation.get("eos_token_id"), f"eos_token_id in {directory / 'generation_config.json'}")
    named = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    tokenizer = Tokenizer(backend, {*(declared or config.eos_ids), *(() if named is None else (named,))}, chat)
    highest = max(tokenizer.vocab_size - 1, *tokenizer.eos_ids, 0)
    if highest >= config.vocab:
        raise ModelError(f"the tokenizer in {directory} has ids up to {highest}, but the model's vocabulary ends at {config.vocab - 1}")
    return tokenizer


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _special_tokens(settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in _SPECIAL:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            yield name, text


def _template_source(directory: Path, settings: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{directory / 'tokenizer_config.json'}: chat_template must be text")
    return template
