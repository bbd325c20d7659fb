"""The files of a tokenizer: those of a model directory, and the same made from GGUF metadata. Owns where they
are looked for, what of them is taken, and which pre-tokenizers of GGUF files are known; the vocabulary is the
file's."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from penstock.errors import ModelError
from penstock.models.architecture import token_ids
from penstock.models.chat import ChatTemplate
from penstock.models.fields import Json
from penstock.models.model import ModelConfig
from penstock.models.tokenizer import Tokenizer
from penstock.models.weights import read_json

_CONTROLS = ("bos_token", "eos_token", "unk_token")
_ROLES = (*_CONTROLS, "pad_token", "sep_token", "cls_token", "mask_token")
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
    where, generation = directory / "tokenizer_config.json", directory / "generation_config.json"
    settings = {**_optional_json(directory / "special_tokens_map.json"), **_optional_json(where)}
    special = {role: text for role in _ROLES if (text := _content(settings.get(role))) is not None}
    template, tool_template = _template_sources(directory, settings)
    chat = ChatTemplate(template, special, tool_template) if template is not None else None
    backend = _open_vocabulary(directory)
    _add_declared(backend, settings, special, config.vocab, where)
    if backend.post_processor is None:
        _frame(backend, special, [role for role in _ROLES if settings.get(f"add_{role}") is True], str(where))
    ends = token_ids(_optional_json(generation).get("eos_token_id"), f"eos_token_id in {generation}")
    named = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    tokenizer = Tokenizer(backend, {*(ends or config.eos_ids), *([] if named is None else [named])}, chat)
    highest = max(tokenizer.vocab_size - 1, *tokenizer.eos_ids, 0)
    if highest >= config.vocab:
        raise ModelError(
            f"the tokenizer in {directory} has ids up to {highest}, but the model's vocabulary ends at "
            f"{config.vocab - 1}"
        )
    return tokenizer


def _open_vocabulary(directory: Path) -> Backend:
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
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for unreadable and for malformed files
        raise ModelError(f"{path} is missing or not a tokenizer: {error}") from error


def _optional_json(path: Path) -> Json:
    return read_json(path) if path.is_file() else {}


def _content(token: object) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _add_declared(
    backend: Backend, settings: Json, special: Mapping[str, str], vocab: int, where: Path
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
    lists = (items for name in _MORE_SPECIAL if isinstance(items := settings.get(name), list))
    more = (_content(item) for items in lists for item in items)
    named = [
        AddedToken(name, special=True, normalized=False)
        for name in (*map(special.get, _CONTROLS), *more)
        if name and name not in added and backend.token_to_id(name) is not None
    ]
    backend.add_special_tokens(named)


def _frame(backend: Backend, special: Mapping[str, str], roles: Container[str], where: str) -> None:
    """Texts begin with the bos token and end with the eos token, where `roles` has them."""
    first, last = (
        [special[role]] if role in roles and role in special else [] for role in ("bos_token", "eos_token")
    )
    ids = {token: backend.token_to_id(token) for token in (*first, *last)}
    if missing := [token for token, id in ids.items() if id is None]:
        raise ModelError(
            f"{where}: the vocabulary has no {missing[0]!r}, which texts are to begin or end with"
        )
    if ids:
        single = [f"{part}:0" for part in (*first, "$A", *last)]
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=list(ids.items())
        )


def _template_sources(directory: Path, settings: Json) -> tuple[str | None, str | None]:
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


def _named_templates(settings: Json, where: Path) -> Json:
    """The templates that are known here, by name."""
    template = settings.get("chat_template")
    listed = template if isinstance(template, list) else [{"name": "default", "template": template}]
    named = {str(entry.get("name")): entry.get("template") for entry in listed if isinstance(entry, dict)}
    found = {name: named[name] for name in ("default", _TOOL_TEMPLATE) if named.get(name) is not None}
    if not all(isinstance(text, str) for text in found.values()):
        raise ModelError(f"{where}: chat_template must be text")
    return found


# ----------------------------------------------------------------------------------------- from GGUF metadata


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_GGUF_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
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
_BY_REGEX = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _split_by(pattern: str) -> list[Any]:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), bytes_only]


# Where merges may not reach across: the rules the vocabularies were trained with.
_PRE_TOKENIZERS: dict[str, list[Any]] = {
    # Digits first: without it two blanks before a digit would become two tokens instead of the trained one.
    "smollm": [pre_tokenizers.Digits(individual_digits=True), _BY_REGEX],
    "gpt-2": [_BY_REGEX],
    "qwen2": _split_by(_WORDS % ""),
    "llama-bpe": _split_by(_WORDS % "{1,3}"),
    "tekken": _split_by(_TEKKEN_WORDS),
}
# vocabularies whose words are taken whole if they are tokens, merged or not
_WHOLE_WORDS = ("llama-bpe", "tekken")
# Tokens of Phi-3 swallow blanks behind them, all but these. Its GGUF files do not say so.
_PHI3_UNTRIMMED = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def tokenizer_files(metadata: Json, where: str) -> dict[str, bytes]:
    """The tokenizer as the files that a model directory has: name -> contents."""
    return _GgufVocabulary(metadata, where).files()


class _GgufVocabulary:
    """The tokenizer in the metadata of a GGUF file."""

    def __init__(self, metadata: Json, where: str) -> None:
        self._metadata, self._where = metadata, where
        self._tokens = self._list("tokens", str)
        self._vocab = {token: id for id, token in enumerate(self._tokens)}
        ids = {role: self._id(key) for role, key in _GGUF_ROLES.items()}
        self._special = {role: self._tokens[id] for role, id in ids.items() if id is not None}
        self._kinds = self._list("token_type", int)
        if len(self._kinds) != len(self._tokens):
            raise ModelError(f"{where}: {len(self._tokens)} tokens, but {len(self._kinds)} token types")

    def _get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", default)

    def _list(self, name: str, kind: type) -> list[Any]:
        value = self._get(name)
        if not isinstance(value, list) or not value or not all(isinstance(item, kind) for item in value):
            raise ModelError(f"{self._where} has no usable tokenizer.ggml.{name}")
        return value

    def _id(self, key: str) -> int | None:
        name, num_tokens = f"{key}_token_id", len(self._tokens)
        value: int | None = self._get(name)
        if value is not None and (not isinstance(value, int) or not 0 <= value < num_tokens):
            stated = f"tokenizer.ggml.{name} is {value!r}"
            raise ModelError(f"{self._where}: {stated}, outside the vocabulary of {num_tokens}")
        return value

    def files(self) -> dict[str, bytes]:
        settings: dict[str, Any] = dict(self._special)
        stem = "tokenizer.chat_template"
        template, for_tools = (self._metadata.get(stem + name) for name in ("", f".{_TOOL_TEMPLATE}"))
        if isinstance(template, str):
            settings["chat_template"] = template
            if isinstance(for_tools, str):
                both = {"default": template, _TOOL_TEMPLATE: for_tools}
                settings["chat_template"] = [{"name": name, "template": text} for name, text in both.items()]
        ends = {id for key in ("eos", "eot", "eom") if (id := self._id(key)) is not None}
        ends |= {
            id for token, id in self._vocab.items() if token in _TURN_ENDS and self._kinds[id] == _CONTROL
        }
        return {
            "tokenizer.json": self._backend().to_str().encode(),
            "tokenizer_config.json": json.dumps(settings).encode(),
            "generation_config.json": json.dumps({"eos_token_id": sorted(ends)}).encode(),
        }

    def _backend(self) -> Backend:
        makers = {"gpt2": self._byte_level, "llama": self._sentencepiece}
        kind = str(self._get("model"))
        if kind not in makers:
            raise ModelError(
                f"{self._where}: tokenizer model {self._get('model')!r} is not supported; supported are gpt2 "
                "and llama"
            )
        try:
            backend = makers[kind]()
        except ModelError:
            raise
        except Exception as error:  # the library raises bare Exception for merges that do not fit
            raise ModelError(f"{self._where}: the vocabulary is damaged: {error}") from error
        self._mark_added(backend, kind == "llama" and self._metadata.get("general.architecture") == "phi3")
        begins = self._get("add_bos_token", kind == "llama" or self._get("pre") in _WHOLE_WORDS)
        ends = self._get("add_eos_token")
        roles = (*(["bos_token"] if begins else ()), *(["eos_token"] if ends else ()))
        _frame(backend, self._special, roles, self._where)
        return backend

    def _mark_added(self, backend: Backend, trims: bool) -> None:
        """Control tokens are special, and so is the unknown one. User-defined tokens are words that are never
        split."""

        def added(*kinds: int) -> list[AddedToken]:
            names = (name for name, kind in zip(self._tokens, self._kinds, strict=True) if kind in kinds)
            untrimmed = _PHI3_UNTRIMMED if trims else self._vocab
            return [AddedToken(name, normalized=False, rstrip=name not in untrimmed) for name in names]

        backend.add_special_tokens(added(_UNKNOWN, _CONTROL))
        backend.add_tokens(added(_USER_DEFINED))

    def _byte_level(self) -> Backend:
        merges = [tuple(merge.split(" ", 1)) for merge in self._list("merges", str)]
        name = str(self._get("pre"))
        if name not in _PRE_TOKENIZERS:
            raise ModelError(
                f"{self._where}: pre-tokenizer {self._get('pre')!r} is not supported; supported are "
                f"{', '.join(_PRE_TOKENIZERS)}"
            )
        backend = Backend(models.BPE(vocab=self._vocab, merges=merges, ignore_merges=name in _WHOLE_WORDS))
        if name == "qwen2":
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[name])
        backend.decoder = decoders.ByteLevel()
        return backend

    def _sentencepiece(self) -> Backend:
        """A BPE of SentencePiece: pairs are merged by the score of the result, and missing characters become
        bytes."""
        for name in ("precompiled_charsmap", "remove_extra_whitespaces"):
            if self._get(name):
                refused = f"tokenizer.ggml.{name} is not supported for tokenizer model 'llama'"
                raise ModelError(f"{self._where}: {refused}")
        scores = self._list("scores", float)
        if len(scores) != len(self._kinds):
            raise ModelError(f"{self._where}: {len(self._kinds)} tokens, but {len(scores)} scores")
        merges = _merges(
            {token: scores[id] for token, id in self._vocab.items() if self._kinds[id] == _NORMAL}
        )
        unknown = self._special.get("unk_token")
        backend = Backend(
            models.BPE(vocab=self._vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        )
        prefixed = self._get("add_space_prefix", True)
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
