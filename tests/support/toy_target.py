"""A target and a draft small enough to enumerate: the next token depends on the last one, and on what penalties count. Owns the two tables;
penalties and filters are those of the package."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from penstock.contract import SamplingParams
from penstock.engine.execution.rows import draw_keys
from penstock.engine.execution.sampler import Sampler, gumbel_noise
from penstock.speculation.accept import DRAFT_DRAW, Drafts, Target, draw, salted
from penstock.speculation.distribution import probabilities

VOCAB = 5
PROMPT = (3, 1)
_GENERATOR = torch.Generator().manual_seed(3)
TARGET = torch.randn((VOCAB, VOCAB), generator=_GENERATOR, dtype=torch.float64) * 1.5
DRAFT = TARGET + torch.randn((VOCAB, VOCAB), generator=_GENERATOR, dtype=torch.float64)  # near the target, and wrong

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "a high temperature": {"temperature": 2.5},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "frequency_penalty": {"frequency_penalty": 1.2},
    "presence_penalty": {"presence_penalty": 1.5},
    "all": {"temperature": 1.3, "top_k": 4, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
}


def next_probs(table: Tensor, outputs: Tensor, sampling: SamplingParams) -> Tensor:
    """float64 [R, VOCAB]: the distribution behind `outputs` int64 [R, n], as plain decoding has it."""
    num = len(outputs)
    last = outputs[:, -1] if outputs.shape[1] else torch.full((num,), PROMPT[-1])
    counts = torch.nn.functional.one_hot(outputs, VOCAB).sum(dim=1).to(torch.int32)
    in_prompt = torch.zeros((num, VOCAB), dtype=torch.bool)
    in_prompt[:, list(PROMPT)] = True
    state = cast(Sampler, SimpleNamespace(_counts=counts, _in_prompt=in_prompt))
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    columns = (torch.full((num, 1), value, dtype=torch.float64) for value in penalties)
    logits = Sampler._penalise(state, table[last], torch.arange(num), *columns)
    filters = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    return probabilities(logits, *(torch.full((num,), value, dtype=torch.float64) for value in filters))


def joint(sampling: SamplingParams, length: int) -> Tensor:
    """float64 [VOCAB ** length]: of what plain decoding emits first, as numbers in base VOCAB."""
    found = torch.zeros(VOCAB**length, dtype=torch.float64)
    for number, sequence in enumerate(itertools.product(range(VOCAB), repeat=length)):
        share = 1.0
        for n, token in enumerate(sequence):
            share *= float(next_probs(TARGET, torch.tensor([sequence[:n]], dtype=torch.int64), sampling)[0, token])
        found[number] = share
    return found


def keys_of(num: int, position: int) -> Tensor:
    """int32 [2, num]: of requests with the seeds 0, 1, 2 and so on."""
    return torch.from_numpy(draw_keys(np.arange(num, dtype=np.uint64), np.full(num, position, np.int32)))


def drafted(num: int, width: int, sampling: SamplingParams, other: SamplingParams | None = None, salt: int = DRAFT_DRAW) -> Drafts:
    """Drafts of `num` requests, drawn from DRAFT with `sampling`. `other` is what their q is wrongly said to be."""
    outputs, proposals = torch.zeros((num, 0), dtype=torch.int64), []
    for position in range(width):
        q = next_probs(DRAFT, outputs, sampling)
        proposals.append(q if other is None else next_probs(DRAFT, outputs, other))
        token = draw(q, salted(keys_of(num, position), salt), gumbel_noise)
        outputs = torch.cat((outputs, token[:, None]), dim=1)
    return Drafts(outputs.to(torch.int32), torch.full((num,), width, dtype=torch.int32), torch.stack(proposals, dim=1))


def verified(drafts: Drafts, sampling: SamplingParams) -> Target:
    """What the target says of them, by plain draws."""
    num, width = drafts.tokens.shape
    tokens = drafts.tokens.long()
    probs = torch.stack([next_probs(TARGET, tokens[:, :n], sampling) for n in range(width + 1)], dim=1).flatten(0, 1)
    keys = torch.stack([keys_of(num, n) for n in range(width + 1)], dim=2).flatten(1, 2)
    chosen = draw(probs, keys, gumbel_noise).to(torch.int32)
    return Target(torch.arange(num, dtype=torch.int32) * (width + 1), chosen, keys, probs)
