"""Vocabularies of published models, against the programs that they were made with. Mistral's are data files
of the package mistral-common, which `make test` puts into a folder of its own: transformers would import it
where it could, and its dependencies are not here."""

from __future__ import annotations

import base64
import functools
import importlib.util
import itertools
import json
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from penstock.models import tokenizer_files as files_module
from penstock.models.chat import ChatTemplate
from penstock.models.tokenizer import BYTE_OF, Tokenizer
from penstock.models.tokenizer_files import tokenizer_files
from tests.cpu.models.test_token_bytes import CORPUS
from tests.support.vocabularies import pages

DATA = Path(sys.prefix) / "vocabularies" / "mistral_common" / "data"
if not DATA.is_dir() or importlib.util.find_spec("sentencepiece") is None:
    pytest.skip(f"no vocabularies in {DATA}, or no sentencepiece: make setup-dev", allow_module_level=True)

MODELS = [
    "tokenizer.model.v1",
    "mistral_instruct_tokenizer_240323.model.v3",
    "mistral_instruct_tokenizer_241114.model.v7",
]
EACH = pytest.mark.parametrize("name", MODELS)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of one protobuf message: numbers, and bytes of texts and messages inside."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
            continue
        length = varint() if kind == 2 else 4
        yield number, data[at : at + length]
        at += length


@functools.cache
def metadata(name: str) -> dict[str, Any]:
    """As llama.cpp's converter writes a SentencePiece model into a GGUF file."""
    pieces = [dict(fields(piece)) for number, piece in fields((DATA / name).read_bytes()) if number == 1]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece[1].decode() for piece in pieces],
        "tokenizer.ggml.scores": [struct.unpack("<f", piece[2])[0] for piece in pieces],
        "tokenizer.ggml.token_type": [piece.get(3, 1) for piece in pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(tokenizer_files(metadata(name), name)["tokenizer.json"].decode())
    return Tokenizer(backend, (2,), ChatTemplate(TEMPLATE, {"bos_token": "<s>", "eos_token": "</s>"}))


@functools.cache
def original(name: str) -> Any:
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(str(DATA / name))


def texts() -> list[str]:
    rng = random.Random(3)
    bits = ["a", " ", "  ", "\t", "\n", "é", "東", "x", "aa", " the", "🙂", "0", "▁"]
    runs = [
        "".join(rng.choice(bits) * rng.randint(1, rng.choice([2, 5, 40])) for _ in range(rng.randint(1, 12)))
        for _ in range(800)
    ]
    return [*CORPUS.values(), *runs, *pages()]


@EACH
def test_text_is_cut_as_sentencepiece_cuts_it(name: str) -> None:
    controls = [
        token
        for token, kind in zip(
            *(metadata(name)[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type")), strict=True
        )
        if kind in (2, 3)
    ]
    num_compared = 0
    for text in texts():
        if any(control in text for control in controls):  # it takes them for text
            continue
        ids = tokenizer(name).encode(text, add_special=False)
        assert ids == original(name).encode(text), text
        assert tokenizer(name).decode(ids) == text.replace("▁", " ")
        num_compared += 1
    assert num_compared > 800


@EACH
def test_a_chat_is_cut_as_its_texts_are_between_special_tokens(name: str) -> None:
    """Mistral's own tokenizer cuts every text by itself: each has the blank before its first word."""
    sp, model = original(name), tokenizer(name)
    begin, end = (model._backend.token_to_id(token) for token in ("[INST]", "[/INST]"))
    question, answer = "Which blocks?  東京", "The first, [/INST] and the </s> last 🙂"
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "<s>"},
    ]
    ids = model.encode_chat(messages)
    assert [id for id in ids if model.is_special(id)] == ([1, begin, end, 2, begin, end] if begin else [1, 2])
    if begin:
        assert ids == [
            1,
            begin,
            *sp.encode(question),
            end,
            *sp.encode(answer),
            2,
            begin,
            *sp.encode("<s>"),
            end,
        ]


# ----------------------------------------------------------------------------------------------------- tekken


@functools.cache
def tekken(num_tokens: int = 6000) -> tuple[Tokenizer, dict[bytes, int]]:
    """The beginning of Mistral Nemo's vocabulary, as a GGUF file has it."""
    content = json.loads((DATA / "tekken_240911.json").read_text(encoding="utf-8"))
    assert content["config"]["pattern"] == files_module._TEKKEN_WORDS
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in content["vocab"][:num_tokens]}
    letters = {byte: letter for letter, byte in BYTE_OF.items()}
    words = {word: "".join(letters[byte] for byte in word) for word in ranks}
    halves = [
        (word[:at], word[at:])
        for word in ranks
        for at in range(1, len(word))
        if word[:at] in ranks and word[at:] in ranks
    ]
    backend = tokenizer_files(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "tekken",
            "tokenizer.ggml.tokens": list(words.values()),
            "tokenizer.ggml.token_type": [1] * len(words),
            "tokenizer.ggml.merges": [" ".join(map(words.__getitem__, pair)) for pair in halves],
        },
        "tekken",
    )["tokenizer.json"]
    return Tokenizer(tokenizers.Tokenizer.from_str(backend.decode())), ranks


def by_rank(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Byte pairs merged by the rank of what they become, as Mistral's tokenizer does it."""
    parts = [word] if word in ranks else [bytes((byte,)) for byte in word]
    while len(parts) > 1:
        best = min(
            itertools.pairwise(range(len(parts))),
            key=lambda at: ranks.get(parts[at[0]] + parts[at[1]], len(ranks)),
        )
        joined = parts[best[0]] + parts[best[1]]
        if joined not in ranks:
            break
        parts[best[0] : best[1] + 1] = [joined]
    return [ranks[part] for part in parts]


def test_tekken_cuts_text_by_rank_and_gives_it_back() -> None:
    model, ranks = tekken()
    for text in texts()[::7]:
        ids = model.encode(text)
        words = model._backend.pre_tokenizer.pre_tokenize_str(text)
        expected = [by_rank(text[begin:end].encode(), ranks) for _, (begin, end) in words]
        assert ids == list(itertools.chain.from_iterable(expected)), text
        assert model.decode(ids) == text
