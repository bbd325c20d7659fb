"""What a request must be answered, computed from docs/http-api.md in float64 with `transformers`, numpy and
plain Python: no code of the engine, its sampler or its text. Owns the expected answer; asks no server."""

from __future__ import annotations

import codecs
import functools
import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.testing.tiny_models import tiny_tokenizer

EOS = (2, 0)  # what the tiny models' generation_config.json says
SPECIAL = {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
MASK = 0xFFFFFFFF
_tokenizer = tiny_tokenizer()


class Weights:
    """A model directory as `transformers` computes it."""

    def __init__(self, directory: Path) -> None:
        transformers = importlib.import_module("transformers")
        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
        self.logits = functools.cache(self._logits)

    @torch.inference_mode()
    def _logits(self, tokens: tuple[int, ...]) -> np.ndarray:
        """[positions, vocabulary]"""
        return self._model(torch.tensor([tokens])).logits[0].numpy()


@dataclass
class Expected:
    """One choice. `margin`: how far every decision was from going the other way; below a float32's error
    nothing can be expected."""

    text: str = ""
    finish: str = "length"
    num_tokens: int = 0
    labels: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[dict[str, float] | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    margin: float = math.inf


# --------------------------------------------------------------------------------------------------- sampling


def noise(seed: int, position: int, vocab: int) -> np.ndarray:
    """Gumbel noise of (seed, position, token): splitmix64 of the first two, two rounds of a 32-bit mixing
    with the third."""
    wide = (1 << 64) - 1
    x = ((seed & wide) + (position + 1) * 0x9E3779B97F4A7C15) & wide
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & wide
    x = (x ^ x >> 27) * 0x94D049BB133111EB & wide
    x ^= x >> 31
    uniform = [(_mixed(_mixed(token ^ x & MASK) ^ x >> 32) + 0.5) / 2**32 for token in range(vocab)]
    return -np.log(-np.log1p(-np.array(uniform)))


def _mixed(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D & MASK
    x = (x ^ x >> 15) * 0x846CA68B & MASK
    return x ^ x >> 16


def penalised(
    logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], fields: Mapping[str, Any]
) -> np.ndarray:
    logits = logits.copy()
    repetition = fields.get("repetition_penalty", 1.0)
    for token in {*prompt, *output}:
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token in set(output):
        logits[token] -= fields.get("frequency_penalty", 0.0) * output.count(token) + fields.get(
            "presence_penalty", 0.0
        )
    for token, bias in fields.get("logit_bias", {}).items():
        logits[int(token)] += bias
    return logits


def kept(scores: np.ndarray, fields: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    """Which tokens may be chosen: the best k and those of at least min_p of the best, then of these the
    fewest that reach top_p. And how near the nearest token is to the other side of one of the limits."""
    order = np.argsort(-scores, kind="stable")
    shares = np.exp(scores - scores.max())
    margin = math.inf
    keep = np.ones(len(scores), bool)
    top_k = fields.get("top_k", 0)
    if 0 < top_k < len(scores):
        keep[order[top_k:]] = False
        margin = min(margin, scores[order[top_k - 1]] - scores[order[top_k]])
    if min_p := fields.get("min_p", 0.0):
        keep &= shares >= min_p
        margin = min(
            margin,
            float(np.abs(np.log(shares) - math.log(min_p)).min())
            if min_p < 1
            else scores[order[0]] - scores[order[1]],
        )
    if (top_p := fields.get("top_p", 1.0)) < 1:
        shares = np.where(keep, shares, 0.0)
        shares /= shares.sum()
        before = np.concatenate([[0.0], np.cumsum(shares[order])[:-1]])
        keep[order[before >= top_p]] = False
        margin = min(margin, float(np.abs(before - top_p).min()))
    return keep, margin


def chosen(logits: np.ndarray, seed: int, position: int, fields: Mapping[str, Any]) -> tuple[int, float]:
    temperature = fields.get("temperature", 1.0)
    if temperature == 0:
        scores, margin = logits, math.inf
    else:
        keep, margin = kept(logits / temperature, fields)
        scores = np.where(keep, logits / temperature + noise(seed, position, len(logits)), -np.inf)
    best, second = np.sort(scores)[[-1, -2]]
    return int(scores.argmax()), min(margin, float(best - second))


# ------------------------------------------------------------------------------------------------------- text


def token_bytes(token: int) -> bytes:
    """The bytes of a token, from the vocabulary's own decoder and the alphabet of byte-level BPE."""
    if token in SPECIAL:
        return SPECIAL[token].encode()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return bytes(alphabet[character] for character in _tokenizer.id_to_token(token))


def label(token: int) -> str:
    data = token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def spans(data: bytes) -> list[tuple[int, int]]:
    """The bytes of each character of `data`, where every run that is no character is one replacement
    character."""
    found: list[tuple[int, int]] = []
    at = 0
    while at < len(data):
        try:
            whole = data[at:].decode()
            bad = (len(data), len(data))
        except UnicodeDecodeError as error:
            whole = data[at : at + error.start].decode()
            bad = (at + error.start, at + error.end)
        for character in whole:
            found.append((at, at + len(character.encode())))
            at = found[-1][1]
        if bad[0] < len(data):
            found.append(bad)
            at = bad[1]
    return found


def starts(pieces: Sequence[bytes]) -> list[int]:
    """The character in which each piece begins. An empty one is where the next character will be, or the
    unfinished one is."""
    characters = spans(b"".join(pieces))
    offsets, at = [], 0
    for piece in pieces:
        ended = sum(end <= at for _, end in characters)
        offsets.append(
            next(i for i, (start, end) in enumerate(characters) if start <= at < end) if piece else ended
        )
        at += len(piece)
    return offsets


def certain(pieces: Sequence[bytes]) -> str:
    """The text so far, without a character that is not finished."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(pieces))


def cut(text: str, stops: Sequence[str]) -> int | None:
    """Where the text ends: before the stop string that is complete first, and of several the longest."""
    for end in range(1, len(text) + 1):
        done = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if done:
            return end - max(done)
    return None


# ----------------------------------------------------------------------------------------------------- answer


def expected(
    weights: Weights, prompt: tuple[int, ...], shown: str, seed: int, fields: Mapping[str, Any]
) -> Expected:
    """The answer to one prompt with one seed. `shown` is its text, for `echo`."""
    answer = Expected()
    stops = [fields["stop"]] if isinstance(fields.get("stop"), str) else fields.get("stop") or []
    ends = {*(fields.get("stop_token_ids") or ()), *(() if fields.get("ignore_eos") else EOS)}
    output: list[int] = []
    pieces: list[bytes] = []
    length: int | None = None
    while len(output) < fields["max_tokens"] and length is None:
        logits = weights.logits((*prompt, *output))[-1]
        token, margin = chosen(
            penalised(logits, prompt, output, fields), seed, len(prompt) + len(output) - 1, fields
        )
        answer.margin = min(answer.margin, margin)
        answer.num_tokens += 1
        if token in ends:
            answer.finish = "stop"
            break
        output.append(token)
        pieces.append(b"" if token in SPECIAL else token_bytes(token))
        length = cut(certain(pieces), stops)
    whole = b"".join(pieces).decode(errors="replace")
    if length is not None:
        answer.finish = "stop"
        whole = whole[:length]
    offsets = starts(pieces)
    scored = [i for i, offset in enumerate(offsets) if length is None or offset < length]
    base = shown if fields.get("echo") else ""
    answer.text = base + whole
    if fields.get("logprobs") is not None:
        if fields.get("echo"):
            _score(
                answer,
                weights,
                (),
                prompt,
                starts([token_bytes(token) for token in prompt]),
                fields["logprobs"],
            )
        _score(
            answer,
            weights,
            prompt,
            [output[i] for i in scored],
            [len(base) + offsets[i] for i in scored],
            fields["logprobs"],
        )
    return answer


def _score(
    answer: Expected,
    weights: Weights,
    before: tuple[int, ...],
    tokens: Sequence[int],
    offsets: list[int],
    num_top: int,
) -> None:
    """Of the model itself: no penalty, temperature or filter. The first token of all has no score."""
    answer.offsets += offsets
    answer.labels += [label(token) for token in tokens]
    for i, token in enumerate(tokens):
        context = (*before, *tokens[:i])
        if not context:
            answer.logprobs.append(None)
            answer.tops.append(None)
            continue
        logits = weights.logits(context)[-1]
        logprobs = logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())
        best = np.argsort(-logprobs)[:num_top]
        answer.logprobs.append(float(logprobs[token]))
        answer.tops.append({label(int(one)): float(logprobs[one]) for one in best})
