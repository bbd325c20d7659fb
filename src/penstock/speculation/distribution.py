"""The distribution that temperature, top-k, top-p and min-p leave of logits. Owns this as a value; the sampler draws from the same one
without writing it down."""

from __future__ import annotations

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5  # as the sampler has it: a lower temperature is none


def kept_scores(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """float32 [S, vocab] of logits, behind penalties and biases -> scores, minus infinity where a token is not among the choices.

    The largest of scores plus Gumbel noise is what the sampler chooses; their softmax is the distribution of that. Parameters are [S]."""
    temperature, top_k, top_p, min_p = (one[:, None] for one in (temperature, top_k, top_p, min_p))
    scores = logits / torch.where(temperature >= GREEDY_BELOW, temperature, 1.0)
    floor = scores.amax(dim=-1, keepdim=True) + torch.log(min_p)
    ranked, ids = scores.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(scores.shape[-1], device=scores.device)[None, :]
    keep = (place < torch.where(top_k > 0, top_k, scores.shape[-1])) & (ranked >= floor)
    shares = torch.where(keep, ranked, -torch.inf).softmax(dim=-1)
    keep &= shares.cumsum(dim=-1) - shares < top_p
    keep[:, 0] = True  # rounding never empties the choice
    return torch.full_like(scores, -torch.inf).scatter(1, ids, torch.where(keep, ranked, -torch.inf))


def probabilities(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[S, vocab]: what is drawn from. A temperature of zero is all on the likeliest, the first of equals."""
    scores = kept_scores(logits, temperature, top_k, top_p, min_p)
    single = torch.zeros_like(scores).scatter(1, scores.argmax(dim=-1, keepdim=True), 1.0)
    return torch.where(temperature[:, None] >= GREEDY_BELOW, scores.softmax(dim=-1), single)
