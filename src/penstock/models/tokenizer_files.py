"""The files of a tokenizer: those of a model directory, and the same made from GGUF metadata. Owns where they
are looked for, what of them is taken, and which pre-tokenizers of GGUF files are known; the vocabulary is the
file's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from penstock.errors import ModelError
from penstock.models.architecture import token_ids
from penstock.models.chat import ChatTemplate
from penstock.models.model import ModelConfig
from penstock.models.tokenizer import Tokenizer
from penstock.models.weights import read_json

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_CONTROLS = ("bos_token", "eos_token", "unk_token")
_TOOL_TEMPLATE = "tool_use"  # the name of the template for requests with tools, if there are several
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MORE_SPECIAL = ("additional_special_tokens", "extra_special_tokens")
_OTHER_VOCABULARIES = {  # what transformers needs besides to convert each
    "tokenizer.model": " sentencepiece protobuf",
    "spiece.model": " sentencepiece protobuf",
    "tekken.json": " mistral-common",
    "vocab.json": "",
    "vocab.txt": "",
}


def load_tokenizer(directory: Path, config: ModelConfig) -> Tokenizer:
    """`config` gives the vocabulary that ids must fit into, and the end-of-sequence ids where
    generation_config.json has none."""
    settings = {
        **_optional_json(directory / "special_tokens_map.json"),
        **_optional_json(directory / "tokenizer_config.json"),
    }
    special = {role: text for role in _ROLES if (text := _content(settings.get(role))) is not None}
    template, tool_template = _template_sources(directory, settings)
    chat = ChatTemplate(template, special, tool_template) if template is not None else None
    backend = _open_vocabulary(directory)
    _add_declared(backend, settings, special, config.vocab, directory / "tokenizer_config.json")
    _set_ends(backend, settings, special, directory / "tokenizer_config.json")
    generation = _optional_json(directory / "generation_config.json")
    declared = token_ids(
        generation.get("eos_token_id"), f"eos_token_id in {directory / 'generation_config.json'}"
    )
    named = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    tokenizer = Tokenizer(
        backend, {*(declared or config.eos_ids), *(() if named is None else (named,))}, chat
    )
    highest = max(tokenizer.vocab_size - 1, *tokenizer.eos_ids, 0)
    if highest >= config.vocab:
        raise ModelError(
            f"the tokenizer in {directory} has ids up to {highest}, but the model's vocabulary ends at "
            f"{config.vocab - 1}"
        )
    return tokenizer


def _open_vocabulary(directory: Path) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    other = next((name for name in _OTHER_VOCABULARIES if (directory / name).is_file()), None)
    if other is not None and not path.is_file():
        convert = (
            "from transformers import AutoTokenizer as t; "
            f"t.from_pretrained({str(directory)!r}).save_pretrained({str(directory)!r})"
        )
        raise ModelError(
            f"{directory} has {other} but no tokenizer.json, and only that is read. To make one: "
            f'pip install transformers{_OTHER_VOCABULARIES[other]}, then python -c "{convert}"'
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for unreadable and for malformed files
        raise ModelError(f"{path} is missing or not a tokenizer: {error}") from error


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _content(token: object) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _add_declared(
    backend: tokenizers.Tokenizer,
    settings: Mapping[str, Any],
    special: Mapping[str, str],
    vocab: int,
    where: Path,
) -> None:
    """Added tokens that are declared beside the vocabulary, except those without a row in the model. Tokens
    that begin or end a text are special even if no flag says so. Padding is not: it may be any word, and no
    prompt has any."""
    declared = settings.get("added_tokens_decoder") or {}
    try:
        tokens = {
            int(id): AddedToken(
                fields["content"], **{flag: fields[flag] for flag in _FLAGS if flag in fields}
            )
            for id, fields in declared.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{where}: added_tokens_decoder cannot be read: {error}") from error
    known = {id: repr(token) for id, token in backend.get_added_tokens_decoder().items()}
    for id, token in sorted(tokens.items()):
        if id < vocab and known.get(id) != repr(token):
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
            if (its_id := backend.token_to_id(token.content)) != id:
                raise ModelError(f"{where}: token {token.content!r} is declared as {id}, but is {its_id}")
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    more = [
        _content(item)
        for name in _MORE_SPECIAL
        if isinstance(items := settings.get(name), list)
        for item in items
    ]
    roles = [special.get(role) for role in _CONTROLS]
    named = [
        name
        for name in (*roles, *more)
        if name and name not in added and backend.token_to_id(name) is not None
    ]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in named])


def _set_ends(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], special: Mapping[str, str], where: Path
) -> None:
    """The tokens that a text begins and ends with: from the vocabulary's post-processor, or else from the
    settings."""
    if backend.post_processor is None:
        first, last = (
            special.get(role) if settings.get(f"add_{role}") is True else None
            for role in ("bos_token", "eos_token")
        )
        _frame(backend, first, last, str(where))


def _frame(backend: tokenizers.Tokenizer, first: str | None, last: str | None, where: str) -> None:
    """Texts begin with `first` and end with `last`, if given."""
    ids = {token: backend.token_to_id(token) for token in (first, last) if token is not None}
    if missing := [token for token, id in ids.items() if id is None]:
        raise ModelError(
            f"{where}: the vocabulary has no {missing[0]!r}, which texts are to begin or end with"
        )
    single = [*([] if first is None else [f"{first}:0"]), "$A:0", *([] if last is None else [f"{last}:0"])]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(ids.items()))


def _template_sources(directory: Path, settings: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The chat template, and the one that the model has besides for requests with tools."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        other = directory / "additional_chat_templates" / f"{_TOOL_TEMPLATE}.jinja"
        return _template_text(path), _template_text(other) if other.is_file() else None
    templates = _named_templates(settings, directory / "tokenizer_config.json")
    path = directory / "chat_template.json"
    templates = templates if "default" in templates else _named_templates(_optional_json(path), path)
    return templates.get("default"), templates.get(_TOOL_TEMPLATE)


def _template_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _named_templates(settings: Mapping[str, Any], where: Path) -> dict[str, str]:
    """The templates that are known here, by name."""
    template = settings.get("chat_template")
    named: dict[str, Any] = {"default": template}
    if isinstance(template, list):
        named = {
            str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)
        }
    found = {name: named[name] for name in ("default", _TOOL_TEMPLATE) if named.get(name) is not None}
    if not all(isinstance(text, str) for text in found.values()):
        raise ModelError(f"{where}: chat_template must be text")
    return found


# ----------------------------------------------------------------------------------------- from GGUF metadata


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_TURN_ENDS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"})
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REGEXES = {"qwen2": _WORDS % "", "llama-bpe": _WORDS % "{1,3}", "tekken": _TEKKEN_WORDS}
_PRE_TOKENIZERS = ("smollm", "gpt-2", *_REGEXES)
# vocabularies whose words are taken whole if they are tokens, merged or not
_WHOLE_WORDS = ("llama-bpe", "tekken")
# Tokens of Phi-3 swallow blanks behind them, all but these. Its GGUF files do not say so.
_PHI3_UNTRIMMED = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def tokenizer_files(metadata: Mapping[str, Any], where: str) -> dict[str, bytes]:
    """The tokenizer as the files that a model directory has: name -> contents."""
    tokens = _list(metadata, "tokenizer.ggml.tokens", str, where)
    special = {
        role: tokens[id]
        for role, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
        if (id := _id(metadata, f"tokenizer.ggml.{key}_token_id", len(tokens), where)) is not None
    }
    settings: dict[str, Any] = dict(special)
    template, for_tools = (
        metadata.get(f"tokenizer.chat_template{name}") for name in ("", f".{_TOOL_TEMPLATE}")
    )
    if isinstance(template, str):
        settings["chat_template"] = template
        if isinstance(for_tools, str):
            both = {"default": template, _TOOL_TEMPLATE: for_tools}
            settings["chat_template"] = [{"name": name, "template": text} for name, text in both.items()]
    kinds = _list(metadata, "tokenizer.ggml.token_type", int, where)
    if len(kinds) != len(tokens):
        raise ModelError(f"{where}: {len(tokens)} tokens, but {len(kinds)} token types")
    ends = {
        _id(metadata, f"tokenizer.ggml.{key}_token_id", len(tokens), where) for key in ("eos", "eot", "eom")
    }
    ends |= {
        id
        for id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == _CONTROL and token in _TURN_ENDS
    }
    generation = {"eos_token_id": sorted(id for id in ends if id is not None)}
    return {
        "tokenizer.json": _vocabulary(metadata, tokens, kinds, special, where).to_str().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
        "generation_config.json": json.dumps(generation).encode(),
    }


def _vocabulary(
    metadata: Mapping[str, Any], tokens: list[str], kinds: list[int], special: Mapping[str, str], where: str
) -> tokenizers.Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"{where}: tokenizer model {kind!r} is not supported; supported are gpt2 and llama")
    try:
        make = _byte_level if kind == "gpt2" else _sentencepiece
        backend = make(metadata, {token: id for id, token in enumerate(tokens)}, kinds, special, where)
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exception for merges that do not fit the vocabulary
        raise ModelError(f"{where}: the vocabulary is damaged: {error}") from error
    _mark_added(backend, metadata, list(zip(tokens, kinds, strict=True)))
    begins = metadata.get(
        "tokenizer.ggml.add_bos_token", kind == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    )
    first = special.get("bos_token") if begins else None
    last = special.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token") else None
    if first is not None or last is not None:
        _frame(backend, first, last, where)
    return backend


def _mark_added(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[tuple[str, int]]
) -> None:
    """Control tokens are special, and so is the unknown one. User-defined tokens are words that are never
    split."""
    trims = metadata.get("tokenizer.ggml.model") == "llama" and metadata.get("general.architecture") == "phi3"
    for kinds, add in (
        ((_UNKNOWN, _CONTROL), backend.add_special_tokens),
        ((_USER_DEFINED,), backend.add_tokens),
    ):
        names = [token for token, kind in tokens if kind in kinds]
        add(
            [
                AddedToken(name, normalized=False, rstrip=trims and name not in _PHI3_UNTRIMMED)
                for name in names
            ]
        )


def _byte_level(
    metadata: Mapping[str, Any],
    vocab: dict[str, int],
    kinds: Sequence[int],
    special: Mapping[str, str],
    where: str,
) -> tokenizers.Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in _list(metadata, "tokenizer.ggml.merges", str, where)]
    name = metadata.get("tokenizer.ggml.pre")
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=name in _WHOLE_WORDS))
    _split_words(backend, name, where)
    backend.decoder = decoders.ByteLevel()
    return backend


def _split_words(backend: tokenizers.Tokenizer, name: object, where: str) -> None:
    """Where merges may not reach across. These are the rules the vocabularies were trained with."""
    by_regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        # Digits first: without it two blanks before a digit would become two tokens instead of the trained
        # one.
        splits = [pre_tokenizers.Digits(individual_digits=True), by_regex]
    elif name == "gpt-2":
        splits = [by_regex]
    elif name in _REGEXES:
        if name == "qwen2":
            backend.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(Regex(_REGEXES[str(name)]), behavior="isolated")
        splits = [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        raise ModelError(
            f"{where}: pre-tokenizer {name!r} is not supported; supported are {', '.join(_PRE_TOKENIZERS)}"
        )
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)


def _sentencepiece(
    metadata: Mapping[str, Any],
    vocab: dict[str, int],
    kinds: Sequence[int],
    special: Mapping[str, str],
    where: str,
) -> tokenizers.Tokenizer:
    """A BPE of SentencePiece: pairs are merged by the score of the result, and missing characters become
    bytes."""
    for name in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if metadata.get(f"tokenizer.ggml.{name}"):
            raise ModelError(f"{where}: tokenizer.ggml.{name} is not supported for tokenizer model 'llama'")
    scores = _list(metadata, "tokenizer.ggml.scores", float, where)
    if len(scores) != len(kinds):
        raise ModelError(f"{where}: {len(kinds)} tokens, but {len(scores)} scores")
    merges = _merges({token: scores[id] for token, id in vocab.items() if kinds[id] == _NORMAL})
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab, merges=merges, unk_token=special.get("unk_token"), fuse_unk=True, byte_fallback=True
        )
    )
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    blanks = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks]) if prefixed else blanks
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way in which a token is made of two, best first. Of equal scores SentencePiece takes the leftmost
    pair in the text; to go on with the longest left part does the same wherever one token grows by one, as
    runs of blanks do."""
    halves = (
        (token[:at], token[at:])
        for token in scores
        for at in range(1, len(token))
        if token[:at] in scores and token[at:] in scores
    )
    return sorted(halves, key=lambda pair: (-scores["".join(pair)], -len(pair[0]), -len(pair[1])))


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
