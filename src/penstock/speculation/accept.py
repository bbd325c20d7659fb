"""Which drafts are kept, and the token behind them: the reference that a device's kernel is compared with. Owns the rule of acceptance.

A draft is verified by the target's own choice at its position. Where the proposer is deterministic, the draft is kept exactly when that
choice is the same token: the output is that of plain decoding, token by token, greedy or sampled. Where drafts are drawn from a
distribution q, a draft x is kept with probability min(1, p(x) / q(x)), and the first that is not is replaced by a draw from the positive
part of p - q: the output has the target's distribution, whatever q is.

Three draws belong to one position, and they are independent: that of the draft, the uniform number that decides, and that of the token
which is emitted. All come from the request's (seed, position); `salted` keeps them apart. The last has the key of plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Noise = Callable[[Tensor, int], Tensor]  # int32 keys [2, S], vocab -> Gumbel noise [S, vocab]: `sampler.gumbel_noise` or a device's

DRAFT_DRAW = 0x2545F491  # salts: any two numbers, never 0
DECISION = 0x5851F42D
NO_TOKEN = -1
_LEAST_NOISE = -4.0  # as in the sampler: a draw of minus infinity would lose to tokens of probability 0


@dataclass(frozen=True, slots=True)
class Drafts:
    """What was proposed for R requests, at most K tokens each."""

    tokens: Tensor  # int32 [R, K]; what lies behind a request's own number is ignored
    lengths: Tensor  # int32 [R]: 0 to K
    # float32 [R, K, vocab]: the distribution that each draft was really drawn from. None: all proposers are deterministic.
    proposals: Tensor | None = None
    drawn: Tensor | None = None  # bool [R]: drafts of this request were drawn. None: all, where there are proposals


@dataclass(frozen=True, slots=True)
class Target:
    """What the target says of them: a row for each draft, and one behind the last, request after request."""

    starts: Tensor  # int32 [R]: the first row of each request
    chosen: Tensor  # int32 [S]: what plain decoding would emit in this row, by the sampler
    keys: Tensor | None = None  # int32 [2, S]: draw keys of plain decoding. None: nothing was drawn
    probs: Tensor | None = None  # float32 [S, vocab], behind penalties, temperature and filters


class Accepted(NamedTuple):
    counts: Tensor  # int32 [R]: tokens emitted, 1 to length + 1
    tokens: Tensor  # int32 [R, K + 1]: kept drafts, then the target's token, then NO_TOKEN


def accept(drafts: Drafts, target: Target, noise: Noise, force: bool = False) -> Accepted:
    """`force` keeps every draft, for measurements of what full acceptance would give: the output is not the target's."""
    width = drafts.tokens.shape[1]
    place = torch.arange(width, device=drafts.tokens.device)[None, :]
    real = place < drafts.lengths[:, None]
    rows = target.starts.long()[:, None] + torch.where(real, place, 0)
    keeps = drafts.tokens == target.chosen[rows]
    drawn = _drawn(drafts)
    if drawn is not None:
        keeps = torch.where(drawn[:, None], _ratio_keeps(drafts, target, rows, noise), keeps)
    if force:
        keeps = torch.ones_like(keeps)
    kept = (keeps & real).cumprod(dim=1).sum(dim=1)
    last = target.starts.long() + kept
    token = target.chosen[last]
    if drawn is not None and not force:
        rejected = drawn & (kept < drafts.lengths)
        token = torch.where(rejected, _replacements(drafts, target, kept, last, noise), token)
    places = torch.arange(width + 1, device=place.device)[None, :]
    padded = torch.nn.functional.pad(drafts.tokens, (0, 1))
    tokens = torch.where(places < kept[:, None], padded, torch.where(places == kept[:, None], token[:, None], NO_TOKEN))
    return Accepted((kept + 1).to(torch.int32), tokens.to(torch.int32))


def keeps_draft(u: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Whether a draft that q proposed with probability `q` is kept; strict, so that what the target rules out never is."""
    return u * q < p


def residual(p: Tensor, q: Tensor) -> Tensor:
    """[.., vocab]: what replaces a rejected draft. Where p and q are equal but for rounding nothing is left of them, and it is p."""
    rest = (p - q).clamp(min=0.0)
    total = rest.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, rest / total, p)


def salted(keys: Tensor, salt: int) -> Tensor:
    """Keys of independent draws for the same positions. The second word takes the salt: the first meets token ids, and a salt there would
    be the same draw with tokens exchanged."""
    second = keys[1] ^ (salt - (1 << 32) if salt >= 1 << 31 else salt)
    return torch.stack((keys[0], second))


def uniforms(keys: Tensor, noise: Noise) -> Tensor:
    """float32 [S] in (0, 1): those that decide on drafts, by the noise's own definition of a draw."""
    return torch.exp(-torch.exp(-noise(salted(keys, DECISION), 1)[:, 0]))


def draw(probs: Tensor, keys: Tensor, noise: Noise) -> Tensor:
    """int64 [S]: a token of each row of `probs`, which need not sum to one."""
    return (probs.log() + noise(keys, probs.shape[-1]).clamp(min=_LEAST_NOISE)).argmax(dim=-1)


def counts_before(drafts: Tensor, vocab: int) -> Tensor:
    """int32 [R, K + 1, vocab]: how often each token is among a request's drafts before a place. Penalties of a verified row count them, as
    if they had been emitted; a rejected one was never counted."""
    hits = torch.nn.functional.one_hot(drafts.long().clamp(min=0), vocab).to(torch.int32)
    return torch.nn.functional.pad(hits.cumsum(dim=1), (0, 0, 1, 0)).to(torch.int32)


def _drawn(drafts: Drafts) -> Tensor | None:
    if drafts.proposals is None or drafts.tokens.shape[1] == 0:
        return None
    return torch.ones_like(drafts.lengths, dtype=torch.bool) if drafts.drawn is None else drafts.drawn


def _ratio_keeps(drafts: Drafts, target: Target, rows: Tensor, noise: Noise) -> Tensor:
    assert drafts.proposals is not None and target.probs is not None and target.keys is not None
    ids = drafts.tokens.long().clamp(min=0)  # behind a request's own drafts there may be anything
    p = target.probs[rows].gather(2, ids[:, :, None])[:, :, 0]
    q = drafts.proposals.gather(2, ids[:, :, None])[:, :, 0]
    u = uniforms(target.keys[:, rows.flatten()], noise).view(rows.shape)
    return keeps_draft(u, p, q)


def _replacements(drafts: Drafts, target: Target, kept: Tensor, last: Tensor, noise: Noise) -> Tensor:
    assert drafts.proposals is not None and target.probs is not None and target.keys is not None
    q = drafts.proposals[torch.arange(len(kept), device=kept.device), kept.clamp(max=drafts.tokens.shape[1] - 1)]
    return draw(residual(target.probs[last], q), target.keys[:, last], noise).to(target.chosen.dtype)
