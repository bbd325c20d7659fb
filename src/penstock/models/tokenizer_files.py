"""The files of a tokenizer: those of a model directory, and the same made from GGUF metadata. Owns where they are looked for, and which
pre-tokenizers of GGUF files are known; the vocabulary is the file's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from penstock.errors import ModelError
from penstock.models.architecture import token_ids
from penstock.models.chat import ChatTemplate
from penstock.models.model import ModelConfig
from penstock.models.tokenizer import Tokenizer, open_vocabulary
from penstock.models.weights import read_json

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_CONTROL, _USER_DEFINED = 3, 4
_QWEN2_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PRE_TOKENIZERS = ("smollm", "qwen2")


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


# ----------------------------------------------------------------------------------------------------------------------- from GGUF metadata


def tokenizer_files(metadata: Mapping[str, Any], where: str) -> dict[str, bytes]:
    """The tokenizer as the files that a model directory has: name -> contents."""
    tokens = _list(metadata, "tokenizer.ggml.tokens", str, where)
    special = {
        role: tokens[id]
        for role, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))
        if (id := _id(metadata, f"tokenizer.ggml.{key}_token_id", len(tokens), where)) is not None
    }
    settings: dict[str, Any] = dict(special)
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    ends = [_id(metadata, f"tokenizer.ggml.{key}_token_id", len(tokens), where) for key in ("eos", "eot")]
    generation = {"eos_token_id": sorted({id for id in ends if id is not None})}
    return {
        "tokenizer.json": _vocabulary(metadata, tokens, special, where).to_str().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
        "generation_config.json": json.dumps(generation).encode(),
    }


def _vocabulary(metadata: Mapping[str, Any], tokens: list[str], special: Mapping[str, str], where: str) -> tokenizers.Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(f"{where}: tokenizer model {kind!r} is not supported, only byte-level BPE ('gpt2')")
    merges = [tuple(merge.split(" ", 1)) for merge in _list(metadata, "tokenizer.ggml.merges", str, where)]
    kinds = _list(metadata, "tokenizer.ggml.token_type", int, where)
    if len(kinds) != len(tokens):
        raise ModelError(f"{where}: {len(tokens)} tokens, but {len(kinds)} token types")
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    except Exception as error:  # the library raises bare Exception for merges that do not fit the vocabulary
        raise ModelError(f"{where}: the vocabulary is damaged: {error}") from error
    _split_words(backend, metadata.get("tokenizer.ggml.pre"), where)
    backend.decoder = decoders.ByteLevel()
    by_kind = {kind: [AddedToken(t, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == kind] for kind in set(kinds)}
    backend.add_special_tokens(by_kind.get(_CONTROL, []))
    backend.add_tokens(by_kind.get(_USER_DEFINED, []))
    if metadata.get("tokenizer.ggml.add_bos_token") and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))])
    return backend


def _split_words(backend: tokenizers.Tokenizer, name: object, where: str) -> None:
    """Where merges may not reach across. These are the rules the vocabularies were trained with."""
    if name == "smollm":
        # Digits first: without it two blanks before a digit would become two tokens instead of the trained one.
        splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    elif name == "qwen2":
        backend.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated")
        splits = [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        raise ModelError(f"{where}: pre-tokenizer {name!r} is not supported; supported are {', '.join(_PRE_TOKENIZERS)}")
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)


def _list(metadata: Mapping[str, Any], key: str, kind: type, where: str) -> list[Any]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(item, kind) for item in value):
        raise ModelError(f"{where} has no usable {key}")
    return value


def _id(metadata: Mapping[str, Any], key: str, num_tokens: int, where: str) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < num_tokens:
        raise ModelError(f"{where}: {key} is {value!r}, outside the vocabulary of {num_tokens}")
    return value
