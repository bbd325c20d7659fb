"""A retrieval transformer whose weights follow from a formula, and haystacks to ask it about. Owns the
formula; recall through it has a known right answer at any length.

A needle is one token, "key i has value j". The token "ask i" makes every head of every layer look for the
needle with key i and add a vote for the value that it finds. The next token is the answer (i, j) where all
heads agree, and another question otherwise:

    after           the likeliest token is
    ask i           answer i, j    where every layer found the needle
                    ask i          otherwise, as long as tries are left; then ask i + 1
    answer i, j     ask i + 1
    go i            ask i

So a prompt that ends in "go i" makes the model ask for one key after the other by itself, each question and
answer a step of decoding. A key with several needles has an answer where they agree on the value, and none
where they do not.

The residual stream, from its first value on. Numbers are two digits, each one-hot:

    asked     key that a question asks for                  queries are made of it
    key       key of a needle                               keys
    value     value of a needle                             values
    votes     what the heads found                          written by attention alone
    next_key, next_tries, next_ask                          the question that comes where there is no answer
    one       1 in all tokens
    start     1 in the first token, which all queries see when they find nothing: an attention sink
    noise     random in all tokens: read by the values of a head that turn with positions, and by the MLP,
              which writes it
    ballast   what makes all embeddings equally long, so that norms change no score

Each layer and KV head has its codes at other places and with other signs, so a block whose layers or heads
are exchanged is not found.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from torch import Tensor

from penstock.models.model import ModelConfig
from penstock.models.registry import layout
from penstock.testing.tiny_models import write_tiny_model

HIDDEN = 128
FFN = 64
MAX_BASE = 8  # of a number's two digits
# ids 0 to 2, as in other tiny models; the first begins a haystack
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

MATCH = 64.0  # score of a needle, in nats: a million other tokens weigh ln(1e6) = 14 together
# score of the first token, as a share of MATCH: above needles that share one digit of the key, which have 0.5
SINK = 0.7
FILLER = 0.3  # largest value of a filler where needles and questions have a digit, as a share of theirs
TURNING = 1.0  # standard deviation of what the part of a head that turns adds to a score, in nats
VOTES = 4.0  # of all heads together
ASKED = 2.0  # logit of an answer to the key that is asked for, without votes
MOST_VOTERS = 16  # one of more would be too small a share of the logits for bfloat16
FILLER_LOGIT = 0.1
NEAR = 0.025  # needles of one depth lie within this share of the haystack, before and behind it


@dataclass(frozen=True, slots=True)
class Retrieval:
    """Dimensions of a retrieval model; its tokens and its weights follow."""

    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    tries: int = 16  # questions for a key before the next one is asked for
    num_fillers: int = 1024
    max_position: int = 1 << 20

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads or not 1 <= self.num_voters <= MOST_VOTERS:
            raise ValueError(
                f"heads must be a multiple of KV heads, and heads of all layers at most {MOST_VOTERS}"
            )
        if self.head_dim < 16 or self.head_dim % 8 or not 1 <= self.tries <= MAX_BASE**2:
            raise ValueError(f"head_dim must be 16 or more and a multiple of 8, tries at most {MAX_BASE**2}")

    @property
    def num_voters(self) -> int:
        return self.num_layers * self.num_heads

    @property
    def rotary_dim(self) -> int:
        return self.head_dim // 4

    @property
    def key_base(self) -> int:
        """Both digits of a key, and the sink, are in what does not turn."""
        return min(MAX_BASE, (self.head_dim - self.rotary_dim - 1) // 2)

    @property
    def num_keys(self) -> int:
        return self.key_base**2

    @property
    def num_values(self) -> int:
        return MAX_BASE**2

    # ------------------------------------------------------------------------------------------------- tokens

    @property
    def start(self) -> int:
        return 0

    def filler(self, number: int) -> int:
        return len(SPECIAL) + number

    def needle(self, key: int, value: int) -> int:
        return self.filler(self.num_fillers) + key * self.num_values + value

    def answer(self, key: int, value: int) -> int:
        return self.needle(self.num_keys, 0) + key * self.num_values + value

    def ask(self, key: int, tries: int | None = None) -> int:
        """`tries`: how many are left, this one included; None: all."""
        return self.answer(self.num_keys, 0) + key % self.num_keys * self.tries + (tries or self.tries) - 1

    def go(self, key: int) -> int:
        return self.ask(self.num_keys - 1) + 1 + key

    @property
    def vocab(self) -> int:
        return self.go(self.num_keys)

    def names(self) -> list[str]:
        """Spellings of all tokens, by id."""
        numbers = list(itertools.product(range(self.num_keys), range(self.num_values)))
        return [
            *SPECIAL,
            *(f"filler{number}" for number in range(self.num_fillers)),
            *(f"needle{key}={value}" for key, value in numbers),
            *(f"answer{key}={value}" for key, value in numbers),
            *(f"ask{key}/{tries + 1}" for key in range(self.num_keys) for tries in range(self.tries)),
            *(f"go{key}" for key in range(self.num_keys)),
        ]

    # ------------------------------------------------------------------------------------------------ weights

    def config(self) -> ModelConfig:
        """Phi-3's architecture is the one whose heads may turn in part."""
        return ModelConfig(
            architecture="phi3",
            num_layers=self.num_layers,
            hidden=HIDDEN,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            ffn=FFN,
            vocab=self.vocab,
            max_position=self.max_position,
            rope_theta=1e4,
            norm_eps=1e-6,
            tied_embeddings=False,
            rotary_dim=self.rotary_dim,
        )

    def tensors(self, seed: int = 0) -> dict[str, Tensor]:
        """All weights under the names that safetensors files use. `seed`: of what is random and changes no
        answer."""
        weights = _Weights(self, seed)
        found = weights.all()
        shapes = {part.name: part.shape for weight in layout(self.config()) for part in weight.parts}
        assert {name: tuple(tensor.shape) for name, tensor in found.items()} == shapes
        return found

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Words with a blank before each, so that prompts and answers can be read."""
        ids = {name if id < len(SPECIAL) else f"Ġ{name}": id for id, name in enumerate(self.names())}
        tokenizer = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="Ġfiller0"))
        cut = pre_tokenizers.Split(Regex(" "), "merged_with_next")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
        return tokenizer


def write_retrieval_model(directory: Path, model: Retrieval | None = None, *, seed: int = 0) -> Path:
    """A model directory as users have them: config.json, tokenizer files and safetensors."""
    model = model or Retrieval()
    return write_tiny_model(
        directory, model.config(), tensors=model.tensors(seed), tokenizer=model.tokenizer()
    )


class _Places(NamedTuple):
    """Where the parts of the residual stream are."""

    asked: Tensor
    key: Tensor
    value: Tensor
    votes: Tensor
    next_key: Tensor
    next_tries: Tensor
    next_ask: Tensor
    one: Tensor
    start: Tensor
    noise: Tensor
    ballast: Tensor

    @classmethod
    def of(cls, model: Retrieval) -> _Places:
        keys, values = 2 * model.key_base, 2 * MAX_BASE
        sizes = [keys, keys, values, values, keys, 2 * MAX_BASE, 1, 1, 1]
        sizes += [HIDDEN - sum(sizes) - 1, 1]
        return cls(*torch.arange(HIDDEN).split(sizes))


class _Weights:
    """The formula. `all` is its result; the rest says how one part of it is made."""

    def __init__(self, model: Retrieval, seed: int) -> None:
        self._model = model
        self._at = _Places.of(model)
        self._random = torch.Generator().manual_seed(seed)

    def all(self) -> dict[str, Tensor]:
        tensors = {"model.embed_tokens.weight": self._embedding()}
        for layer in range(self._model.num_layers):
            tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in self._layer(layer).items()}
        norm, head = self._behind_norm(self._head())
        return {**tensors, "model.norm.weight": norm, "lm_head.weight": head}

    def _noise(self, *shape: int) -> Tensor:
        """Uniform from -1 to 1."""
        return torch.rand(shape, generator=self._random) * 2 - 1

    def _behind_norm(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """A norm's weight, and what `matrix` has to be behind it. It differs from one, so that leaving it out
        shows."""
        norm = 1 + 0.2 * self._noise(HIDDEN)
        return norm, matrix / norm

    def _embedding(self) -> Tensor:
        model, at = self._model, self._at
        rows = torch.zeros(model.vocab, HIDDEN)
        rows[:, at.one] = 1
        rows[model.start, at.start] = 1
        rows[:, at.noise] = 0.5 * self._noise(model.vocab, len(at.noise))
        fillers = slice(model.filler(0), model.filler(model.num_fillers))
        for part in (at.asked, at.key, at.value):
            rows[fillers, part] = FILLER * self._noise(model.num_fillers, len(part))
        for key, value in itertools.product(range(model.num_keys), range(model.num_values)):
            needle = rows[model.needle(key, value)]
            needle[at.key] += _digits(key, model.key_base)
            needle[at.value] += _digits(value, MAX_BASE)
            self._set_next(rows[model.answer(key, value)], key + 1, model.tries)
        for key in range(model.num_keys):
            self._set_next(rows[model.go(key)], key, model.tries)
            for tries in range(1, model.tries + 1):
                question = rows[model.ask(key, tries)]
                question[at.asked] += _digits(key, model.key_base)
                self._set_next(question, *((key, tries - 1) if tries > 1 else (key + 1, model.tries)))
        rows[:, at.ballast] = (HIDDEN - rows.square().sum(dim=1, keepdim=True)).sqrt()
        return rows

    def _set_next(self, row: Tensor, key: int, tries: int) -> None:
        at = self._at
        row[at.next_key] += _digits(key % self._model.num_keys, self._model.key_base)
        row[at.next_tries] += _digits(tries - 1, MAX_BASE)
        row[at.next_ask] += 1

    def _layer(self, layer: int) -> dict[str, Tensor]:
        model, at = self._model, self._at
        group = model.num_heads // model.num_kv_heads
        codes = [_HeadCode.of(model, layer, head) for head in range(model.num_kv_heads)]
        heads = [codes[head // group] for head in range(model.num_heads)]
        qkv = torch.cat(
            [
                *(self._query(code) for code in heads),
                *(self._key(code) for code in codes),
                *(self._value(c) for c in codes),
            ]
        )
        out = torch.zeros(HIDDEN, model.num_heads, model.head_dim)
        for head, code in enumerate(heads):
            out[at.votes, head, code.values] = VOTES / model.num_voters * code.value_signs
        gate_up = torch.zeros(2 * FFN, HIDDEN)
        gate_up[:, at.noise] = self._noise(2 * FFN, len(at.noise))
        down = torch.zeros(HIDDEN, FFN)
        down[at.noise] = 0.05 * self._noise(len(at.noise), FFN)
        attn_norm, qkv = self._behind_norm(qkv)
        ffn_norm, gate_up = self._behind_norm(gate_up)
        return {
            "input_layernorm.weight": attn_norm,
            "self_attn.qkv_proj.weight": qkv,
            "self_attn.o_proj.weight": out.flatten(1).contiguous(),
            "post_attention_layernorm.weight": ffn_norm,
            "mlp.gate_up_proj.weight": gate_up,
            "mlp.down_proj.weight": down,
        }

    def _query(self, code: _HeadCode) -> Tensor:
        rows = self._turning()
        rows[code.keys, self._at.asked] = self._digit * code.key_signs
        rows[code.sink, self._at.one] = self._digit * 0.2
        return rows

    def _key(self, code: _HeadCode) -> Tensor:
        """The sink has most of its product here, where other tokens have none: a query's small share meets
        little in other places."""
        rows = self._turning()
        rows[code.keys, self._at.key] = self._digit * code.key_signs
        rows[code.sink, self._at.start] = self._digit * 2 * SINK / 0.2
        return rows

    def _value(self, code: _HeadCode) -> Tensor:
        rows = torch.zeros(self._model.head_dim, HIDDEN)
        rows[code.values, self._at.value] = code.value_signs
        return rows

    @property
    def _digit(self) -> float:
        """Two digits that match have a score of MATCH."""
        scale: float = self._model.config().scale
        return float((MATCH / (2 * scale)) ** 0.5)

    def _turning(self) -> Tensor:
        """Rows of one head, of which those that turn are random."""
        model, at = self._model, self._at
        rows = torch.zeros(model.head_dim, HIDDEN)
        size = (TURNING**2 * model.head_dim / model.rotary_dim) ** 0.25  # of a value that turns
        per_value = 0.5 / 3 * len(at.noise) ** 0.5  # uniform weights times uniform noise of 0.5
        rows[: model.rotary_dim, at.noise] = size / per_value * self._noise(model.rotary_dim, len(at.noise))
        return rows

    def _head(self) -> Tensor:
        """A question's logit is half a vote below that of an answer for which all have voted."""
        model, at = self._model, self._at
        ask = ASKED + VOTES * (1 - 0.5 / model.num_voters)
        rows = torch.zeros(model.vocab, HIDDEN)
        rows[: model.filler(model.num_fillers), at.noise] = FILLER_LOGIT * self._noise(
            model.filler(model.num_fillers), len(at.noise)
        )
        for key, value in itertools.product(range(model.num_keys), range(model.num_values)):
            answer = rows[model.answer(key, value)]
            answer[at.asked] = ASKED / 2 * _digits(key, model.key_base)
            answer[at.votes] = 0.5 * _digits(value, MAX_BASE)
        for key, tries in itertools.product(range(model.num_keys), range(1, model.tries + 1)):
            question = rows[model.ask(key, tries)]
            question[at.next_ask] = ask / 3
            question[at.next_key] = ask / 6 * _digits(key, model.key_base)
            question[at.next_tries] = ask / 6 * _digits(tries - 1, MAX_BASE)
        return rows


class _HeadCode(NamedTuple):
    """Where a KV head of a layer has the codes of keys and values, and with which signs."""

    keys: Tensor
    key_signs: Tensor
    sink: int
    values: Tensor
    value_signs: Tensor

    @classmethod
    def of(cls, model: Retrieval, layer: int, head: int) -> _HeadCode:
        shift = layer * model.num_kv_heads + head
        still = model.head_dim - model.rotary_dim
        keys = (torch.arange(2 * model.key_base + 1) + shift) % still + model.rotary_dim
        values = (torch.arange(2 * MAX_BASE) + shift) % model.head_dim
        signs = torch.randint(2, (2, 2 * MAX_BASE), generator=torch.Generator().manual_seed(shift)) * 2.0 - 1
        return cls(keys[:-1], signs[0, : 2 * model.key_base], int(keys[-1]), values, signs[1])


def _digits(number: int, base: int) -> Tensor:
    """float32 [2 * base]: one-hot of both digits."""
    code = torch.zeros(2 * base)
    code[number // base] = code[base + number % base] = 1
    return code


# -------------------------------------------------------------------------------------------------- haystacks


class Needle(NamedTuple):
    key: int
    value: int
    position: int


@dataclass(frozen=True, slots=True)
class Haystack:
    """Fillers with needles among them, and what can be asked. A prompt is `tokens` and one token more."""

    model: Retrieval
    tokens: list[int]
    needles: tuple[Needle, ...]  # their keys follow each other, in no order of positions

    def questions(self) -> Iterator[tuple[list[int], int]]:
        """For each needle a prompt, and the token that comes next."""
        for needle in self.needles:
            yield [*self.tokens, self.model.ask(needle.key)], self.model.answer(needle.key, needle.value)

    def all_questions(self) -> list[int]:
        """A prompt after which the model asks for all needles by itself, one after the other."""
        return [*self.tokens, self.model.go(self.needles[0].key)]

    @property
    def output(self) -> list[int]:
        """What comes after it where all are found at once: a question and its answer in turn."""
        return [
            token
            for n in self.needles
            for token in (self.model.ask(n.key), self.model.answer(n.key, n.value))
        ]

    @property
    def stop(self) -> int:
        """The token by which the model says that it has asked for all: it asks for a key that is not
        there."""
        return self.model.ask(self.needles[-1].key + 1)

    @property
    def most_tokens(self) -> int:
        """Of an output in which nothing is found before its last try."""
        return len(self.needles) * (self.model.tries + 1)

    def asked(self, output: Iterable[int]) -> int:
        """Questions in `output`: as many as there are needles where each was found at once."""
        return sum(self.model.ask(0, 1) <= token < self.model.go(0) for token in output)

    def found(self, output: Iterable[int]) -> int:
        """Needles that `output` has the right answer of, and no other."""
        answers: dict[int, set[int]] = {}
        first, last = self.model.answer(0, 0), self.model.answer(self.model.num_keys, 0)
        for token in output:
            if first <= token < last:
                key, value = divmod(token - first, self.model.num_values)
                answers.setdefault(key, set()).add(value)
        return sum(answers.get(needle.key) == {needle.value} for needle in self.needles)


def haystack(
    num_tokens: int,
    needles: int = 16,
    depths: Sequence[float] = (0.1, 0.5, 0.9),
    seed: int = 0,
    model: Retrieval | None = None,
) -> Haystack:
    """Of a prompt of `num_tokens` tokens, its last one included. Needles are spread evenly over `depths`
    (shares of the length), and those of one depth over its neighbourhood. Values and the first key follow
    from `seed`."""
    model = model or Retrieval()
    if not 1 <= needles < model.num_keys:
        raise ValueError(f"{needles} needles: there are keys for 1 to {model.num_keys - 1}")
    random = np.random.default_rng(seed)
    tokens = random.integers(model.filler(0), model.filler(model.num_fillers), num_tokens - 1)
    tokens[0] = model.start
    positions: list[int] = []
    for depth, num in zip(
        depths, np.bincount(np.arange(needles) % len(depths), minlength=len(depths)), strict=True
    ):
        first, last = (int(num_tokens * min(max(depth + side, 0.0), 1.0)) for side in (-NEAR, NEAR))
        free = np.setdiff1d(np.arange(max(first, 1), min(last, num_tokens - 2) + 1), positions)
        if len(free) < num:
            raise ValueError(f"{num_tokens} tokens have no room for {num} needles at depth {depth:g}")
        positions += random.choice(free, num, replace=False).tolist()
    first_key = int(random.integers(model.num_keys))
    values = random.choice(model.num_values, needles, replace=False).tolist()
    placed = [
        Needle((first_key + i) % model.num_keys, values[i], at)
        for i, at in enumerate(random.permutation(positions).tolist())
    ]
    for needle in placed:
        tokens[needle.position] = model.needle(needle.key, needle.value)
    return Haystack(model, tokens.tolist(), tuple(placed))
