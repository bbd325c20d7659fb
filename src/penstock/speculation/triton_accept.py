"""Acceptance of a batch on the device; the host waits for nothing. The rule is that of `accept.accept`, which says what tensors mean."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.speculation.accept import Accepted, Drafts, Noise, Target, uniforms

_BLOCK = 4096  # of the vocabulary at once


@triton.jit(do_not_specialize=["width", "vocab", "num_rows", "num_requests"])
def _decide_kernel(
    drafts_ptr, lengths_ptr, starts_ptr, chosen_ptr, drawn_ptr, uniforms_ptr, probs_ptr, proposals_ptr, keys_ptr,
    counts_ptr, tokens_ptr, last_ptr, rejected_ptr, last_keys_ptr,
    width, vocab, num_rows, num_requests,
    HAS_DRAWN: tl.constexpr, FORCE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One program per request: how many drafts are kept, and the target's own token behind them."""
    request = tl.program_id(0)
    place = tl.arange(0, PLACES)
    length = tl.load(lengths_ptr + request)
    start = tl.load(starts_ptr + request)
    real = place < length
    draft = tl.load(drafts_ptr + request * width + place, mask=real, other=0)
    row = start + tl.where(real, place, 0)
    keeps = draft == tl.load(chosen_ptr + row, mask=real, other=-1)
    is_drawn = 0
    if HAS_DRAWN:
        is_drawn = tl.load(drawn_ptr + request).to(tl.int32)
        asks = real & (is_drawn != 0)
        p = tl.load(probs_ptr + row.to(tl.int64) * vocab + draft, mask=asks, other=0.0)
        q = tl.load(proposals_ptr + (request * width + place).to(tl.int64) * vocab + draft, mask=asks, other=0.0)
        u = tl.load(uniforms_ptr + row, mask=asks, other=1.0)
        keeps = tl.where(asks, u * q < p, keeps)
    if FORCE:
        keeps = real
    kept = tl.min(tl.where(real & keeps, PLACES, place))  # the place behind the last draft is none: it ends there at the latest
    last = start + kept
    tl.store(counts_ptr + request, kept + 1)
    token = tl.load(chosen_ptr + last)
    found = tl.where(place < kept, draft, tl.where(place == kept, token, -1))
    tl.store(tokens_ptr + request * (width + 1) + place, found, mask=place < width + 1)
    if HAS_DRAWN and not FORCE:
        tl.store(last_ptr + request, last)
        tl.store(rejected_ptr + request, ((is_drawn != 0) & (kept < length)).to(tl.int32))
        tl.store(last_keys_ptr + request, tl.load(keys_ptr + last))
        tl.store(last_keys_ptr + num_requests + request, tl.load(keys_ptr + num_rows + last))


@triton.jit(do_not_specialize=["width"])
def _replace_kernel(
    counts_ptr, last_ptr, rejected_ptr, probs_ptr, proposals_ptr, noise_ptr, tokens_ptr, width, vocab, BLOCK: tl.constexpr
):  # fmt: skip
    """One program per request: where a draft was rejected, a draw from the positive part of p - q; from p where nothing is left of it."""
    request = tl.program_id(0)
    if tl.load(rejected_ptr + request) != 0:
        kept = tl.load(counts_ptr + request) - 1
        p_row = probs_ptr + tl.load(last_ptr + request).to(tl.int64) * vocab
        q_row = proposals_ptr + (request * width + kept).to(tl.int64) * vocab
        noise_row = noise_ptr + request.to(tl.int64) * vocab
        # By lane the best so far; a later one must be larger, so that of equals the first stays, as argmax has it.
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        plain_best = tl.full((BLOCK,), float("-inf"), tl.float32)
        token = tl.zeros((BLOCK,), tl.int32)
        plain_token = tl.zeros((BLOCK,), tl.int32)
        for begin in range(0, vocab, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            inside = at < vocab
            p = tl.load(p_row + at, mask=inside, other=0.0).to(tl.float32)
            q = tl.load(q_row + at, mask=inside, other=0.0).to(tl.float32)
            noise = tl.maximum(tl.load(noise_row + at, mask=inside, other=0.0), -4.0)
            score = tl.where(p > q, tl.log(tl.where(p > q, p - q, 1.0)) + noise, float("-inf"))
            plain = tl.where(p > 0, tl.log(tl.where(p > 0, p, 1.0)) + noise, float("-inf"))
            token = tl.where(score > best, at, token)
            plain_token = tl.where(plain > plain_best, at, plain_token)
            best, plain_best = tl.maximum(best, score), tl.maximum(plain_best, plain)
        top = tl.max(best)
        drawn = tl.min(tl.where(best == top, token, vocab))
        plainly = tl.min(tl.where(plain_best == tl.max(plain_best), plain_token, vocab))
        tl.store(tokens_ptr + request * (width + 1) + kept, tl.where(top > float("-inf"), drawn, plainly))


def accept(drafts: Drafts, target: Target, noise: Noise, force: bool = False) -> Accepted:
    """As `accept.accept`; two launches, and those of the noise."""
    num, width = drafts.tokens.shape
    device = drafts.tokens.device
    counts = torch.empty(num, dtype=torch.int32, device=device)
    tokens = torch.empty((num, width + 1), dtype=torch.int32, device=device)
    if num == 0:
        return Accepted(counts, tokens)
    sampled = drafts.proposals is not None and width > 0
    scratch = torch.empty((4, num), dtype=torch.int32, device=device)  # last row, rejected, and two words of its key
    given = [_whole(one) for one in (drafts.tokens, drafts.lengths, target.starts, target.chosen)]
    probs = proposals = keys = drawn = decisions = counts  # what is not read may be anything
    if sampled:
        assert drafts.proposals is not None and target.probs is not None and target.keys is not None
        probs, proposals, keys = _whole(target.probs), _whole(drafts.proposals), _whole(target.keys)
        drawn = torch.ones(num, dtype=torch.bool, device=device) if drafts.drawn is None else drafts.drawn
        decisions = uniforms(keys, noise)
    vocab = probs.shape[-1]
    _decide_kernel[(num,)](
        *given, drawn, decisions, probs, proposals, keys, counts, tokens, scratch[0], scratch[1], scratch[2:],
        width, vocab, len(target.chosen), num,
        HAS_DRAWN=sampled, FORCE=force, PLACES=triton.next_power_of_2(width + 1),
    )  # fmt: skip
    if sampled and not force:
        _replace_kernel[(num,)](
            counts, scratch[0], scratch[1], probs, proposals, noise(scratch[2:], vocab), tokens, width, vocab, BLOCK=_BLOCK
        )
    return Accepted(counts, tokens)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.contiguous()
