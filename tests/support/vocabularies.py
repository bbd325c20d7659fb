"""Small vocabularies of every kind that the `tokenizers` library has, trained on prose of this project. Owns
nothing; for tests."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from penstock.models.tokenizer import TextCodec
from penstock.testing.tiny_models import tiny_tokenizer

PROSE = Path(__file__).parents[1] / "data" / "prose.txt"
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
VOCAB = 900
BLANKS = ["▁" * length for length in range(2, 17)]


@functools.cache
def pages() -> list[str]:
    """Paragraphs of a user guide, and a few words of other scripts."""
    return [
        *PROSE.read_text(encoding="utf-8").split("\n\n"),
        *["東京 日本 привет мир שלום مرحبا naïve café €"] * 20,
    ]


def rendered(codec: TextCodec, messages: Any, add_generation_prompt: bool = True) -> str:
    """By the model's own chat template."""
    assert codec.chat_template is not None
    return codec.chat_template.render(messages, add_generation_prompt)


def sentencepiece_bpe(prefix: str = "prepend") -> tokenizers.Tokenizer:
    """As SentencePiece conversions are: Llama 2 ("prepend"), the same as newer files have it ("first"), Gemma
    ("none")."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # words, for training alone
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[*SPECIAL, *BYTES], show_progress=False)
    trained.train_from_iterator(pages(), trainer)
    model = json.loads(trained.to_str())["model"]
    vocab, merges = model["vocab"], [tuple(pair) for pair in model["merges"]]
    for blanks in BLANKS:
        vocab.setdefault(blanks, len(vocab))
    # the longest run grows first
    merges += [(blanks[1:], "▁") for blanks in reversed(BLANKS) if (blanks[1:], "▁") not in merges]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if prefix == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        prepended = [normalizers.Prepend("▁")] if prefix == "prepend" else []
        backend.normalizer = normalizers.Sequence([*prepended, normalizers.Replace(" ", "▁")])
    return _finished(backend, strip=prefix != "none")


def _finished(backend: tokenizers.Tokenizer, strip: bool) -> tokenizers.Tokenizer:
    stripped = [decoders.Strip(" ", 1, 0)] if strip else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def unigram(byte_fallback: bool) -> tokenizers.Tokenizer:
    """As T5 has it, and the same with bytes for what it lacks."""
    trained = tokenizers.Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCAB - len(BYTES),
        special_tokens=SPECIAL,
        unk_token="<unk>",
        show_progress=False,
        n_sub_iterations=1,
    )
    trained.train_from_iterator(pages(), trainer)
    pieces = [tuple(piece) for piece in json.loads(trained.to_str())["model"]["vocab"]]
    lowest = min(score for _, score in pieces) - 10
    pieces += [(byte, lowest) for byte in BYTES] if byte_fallback else []
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=byte_fallback))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    if byte_fallback:
        return _finished(backend, strip=True)
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return backend


def word_piece() -> tokenizers.Tokenizer:
    """As BERT has it."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(
        pages(), trainers.WordPieceTrainer(vocab_size=VOCAB, special_tokens=SPECIAL, show_progress=False)
    )
    return backend


def words() -> tokenizers.Tokenizer:
    """Whole words and no decoder: its tokens are words with a blank between them."""
    backend = tokenizers.Tokenizer(models.WordLevel({}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.train_from_iterator(
        pages(), trainers.WordLevelTrainer(vocab_size=VOCAB, special_tokens=SPECIAL, show_progress=False)
    )
    return backend


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level BPE": tiny_tokenizer,
    "SentencePiece BPE": sentencepiece_bpe,
    "SentencePiece BPE, Metaspace": lambda: sentencepiece_bpe("first"),
    "SentencePiece BPE, no prefix": lambda: sentencepiece_bpe("none"),
    "Unigram": lambda: unigram(byte_fallback=False),
    "Unigram with bytes": lambda: unigram(byte_fallback=True),
    "WordPiece": word_piece,
    "words": words,
}


@functools.cache
def vocabulary(kind: str) -> tokenizers.Tokenizer:
    """One per process; a test that changes it copies it first."""
    return KINDS[kind]()


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """The vocabulary of `sentencepiece_bpe` as GGUF files have it; its scores are the ranks of its merges."""
    model = json.loads(vocabulary("SentencePiece BPE").to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    ranks = {"".join(pair): -float(rank) for rank, pair in reversed(list(enumerate(model["merges"], 1)))}
    kinds = [
        2 if token == "<unk>" else 3 if token in SPECIAL else 6 if token in BYTES else 1 for token in tokens
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-1e9 if token in BLANKS else ranks.get(token, -1e6) for token in tokens],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }
