"""The kernels of acceptance keep and emit what the reference does, for ragged batches of both kinds, without waiting for the device.

With TRITON_INTERPRET=1 the same tests run on CPU tensors.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="NOT TESTED: the kernels of acceptance need torch")
pytest.importorskip("triton", reason="NOT TESTED: the kernels of acceptance need triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("NOT TESTED: the kernels of acceptance need an NVIDIA GPU, and there is none here", allow_module_level=True)

from penstock.engine.execution import triton_noise  # noqa: E402
from penstock.speculation import triton_accept  # noqa: E402
from penstock.speculation.accept import Accepted, Drafts, Target, draw  # noqa: E402
from penstock.speculation.accept import accept as reference  # noqa: E402
from support.mutation import mutated  # noqa: E402

pytestmark = pytest.mark.gpu
on_gpu = pytest.mark.skipif(INTERPRETED, reason="NOT TESTED: needs the device itself")

DEVICE = "cpu" if INTERPRETED else "cuda"
NUM = 16 if INTERPRETED else 700
noise = triton_noise.gumbel_noise


def ragged(seed: int, num: int = NUM, width: int = 4, vocab: int = 37, drawn: bool = True) -> tuple[Drafts, Target]:
    """Drafts of all lengths. Proposals are near the target, so that some are kept and some not; a third are the target's own choice."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, width + 1, (num,), generator=generator)
    starts = (lengths + 1).cumsum(0) - lengths - 1
    rows = int((lengths + 1).sum())
    logits = torch.randn((rows, vocab), generator=generator) * 2
    probs = logits.softmax(dim=-1)
    keys = torch.randint(-(2**31), 2**31, (2, rows), generator=generator).to(torch.int32)
    chosen = draw(probs, keys, lambda words, size: noise(words.to(DEVICE), size).cpu())
    tokens = torch.randint(0, vocab, (num, width), generator=generator)
    proposals = torch.zeros((num, width, vocab))
    for n, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        near = (logits[start : start + length] + torch.randn((length, vocab), generator=generator)).softmax(dim=-1)
        proposals[n, :length] = near
        if length and drawn:
            tokens[n, :length] = torch.multinomial(near, 1, generator=generator)[:, 0]
        if n % 3 == 0:
            tokens[n, :length] = chosen[start : start + length]
    tokens = torch.where(torch.arange(width)[None, :] < lengths[:, None], tokens, 10**6)  # behind the last there may be anything
    made = Drafts(tokens.to(torch.int32).to(DEVICE), lengths.to(torch.int32).to(DEVICE), proposals.to(DEVICE) if drawn else None)
    return made, Target(starts.to(torch.int32).to(DEVICE), chosen.to(torch.int32).to(DEVICE), keys.to(DEVICE), probs.to(DEVICE))


def expected(drafts: Drafts, target: Target, force: bool = False) -> Accepted:
    """The reference reads what lies behind a request's drafts, though nothing follows from it: there a token must be one."""
    vocab = 1 if target.probs is None else target.probs.shape[-1]
    inside = drafts.tokens.clamp(max=vocab - 1) if drafts.proposals is not None else drafts.tokens
    return reference(replace(drafts, tokens=inside), target, noise, force)


def check(module: Any, drafts: Drafts, target: Target, force: bool = False) -> Accepted:
    found, wanted = module.accept(drafts, target, noise, force), expected(drafts, target, force)
    assert torch.equal(found.counts, wanted.counts)
    assert torch.equal(found.tokens, wanted.tokens)
    return found


@pytest.mark.parametrize("vocab", [37, triton_accept._BLOCK, triton_accept._BLOCK + 3])
@pytest.mark.parametrize("width", [1, 4] if INTERPRETED else [1, 3, 4, 7])
def test_drafts_that_were_drawn_are_kept_and_replaced_as_in_the_reference(width: int, vocab: int) -> None:
    found = check(triton_accept, *ragged(width + vocab, num=NUM if vocab < 100 else 6, width=width, vocab=vocab))
    assert vocab > 100 or len(found.counts.unique()) > (1 if INTERPRETED else width), "some are kept and some not"


def test_drafts_of_deterministic_proposers_are_kept_while_they_match() -> None:
    found = check(triton_accept, *ragged(1, drawn=False))
    assert len(found.counts.unique()) > 2


def test_both_kinds_share_a_batch() -> None:
    drafts, target = ragged(2)
    check(triton_accept, replace(drafts, drawn=torch.arange(NUM, device=DEVICE) % 2 == 0), target)


@pytest.mark.parametrize("drawn", [True, False])
def test_forced_acceptance_keeps_all(drawn: bool) -> None:
    drafts, target = ragged(3, drawn=drawn)
    assert torch.equal(check(triton_accept, drafts, target, force=True).counts, drafts.lengths + 1)


def test_a_batch_without_drafts_and_one_without_requests() -> None:
    drafts, target = ragged(4, width=2)
    none = replace(drafts, lengths=torch.zeros_like(drafts.lengths))
    check(triton_accept, none, target)
    empty = Drafts(none.tokens[:, :0], none.lengths, none.proposals[:, :0])
    assert check(triton_accept, empty, target).tokens.shape == (NUM, 1)
    nobody = Drafts(none.tokens[:0], none.lengths[:0], none.proposals[:0])
    assert len(triton_accept.accept(nobody, replace(target, starts=target.starts[:0]), noise).counts) == 0


def test_where_nothing_is_left_of_the_target_it_is_drawn_from() -> None:
    """q above p everywhere, as rounding makes it where both are equal."""
    drafts, target = ragged(5, width=1)
    probs = torch.full_like(target.probs, 1 / 37)
    high = torch.full_like(drafts.proposals, 0.9)
    lengths = torch.minimum(drafts.lengths, torch.ones_like(drafts.lengths))
    found = check(triton_accept, replace(drafts, proposals=high, lengths=lengths), replace(target, probs=probs))
    assert (found.tokens[:, 0] >= 0).all() and (found.tokens[:, 0] < 37).all()


def test_tensors_that_do_not_lie_in_one_piece_are_taken() -> None:
    drafts, target = ragged(6)
    spread = replace(drafts, tokens=drafts.tokens.repeat_interleave(2, dim=1)[:, ::2], proposals=drafts.proposals.mT.contiguous().mT)
    assert not spread.proposals.is_contiguous()
    assert torch.equal(triton_accept.accept(spread, target, noise).tokens, triton_accept.accept(drafts, target, noise).tokens)


@on_gpu
def test_the_host_waits_for_nothing() -> None:
    drafts, target = ragged(7)
    triton_accept.accept(drafts, target, noise)  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        triton_accept.accept(drafts, target, noise)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_gpu
def test_a_captured_acceptance_follows_its_inputs() -> None:
    (drafts, target), (others, other_target) = ragged(8, num=64), ragged(8, num=64)
    others.tokens[::2] = 0
    triton_accept.accept(drafts, target, noise)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = triton_accept.accept(drafts, target, noise)
    drafts.tokens.copy_(others.tokens)
    graph.replay()
    wanted = expected(others, other_target)
    assert torch.equal(found.tokens, wanted.tokens) and torch.equal(found.counts, wanted.counts)


FAULTS = {
    "the proposal is left out of the ratio": ("u * q < p", "u < p"),
    "the ratio is upside down": ("u * q < p", "u * p < q"),
    "a draft that may not be is kept": ("u * q < p", "u * q <= p * 1.5"),
    "a rejected draft is replaced by a plain draw": ("tl.where(p > q, p - q, 1.0)", "tl.where(p > q, p, 1.0)"),
    "the replacement has the key of the first row": ("tl.load(keys_ptr + last))", "tl.load(keys_ptr + start))"),
    "the replacement is from the first request's row": ("probs_ptr + tl.load(last_ptr + request)", "probs_ptr + tl.load(last_ptr)"),
    "q of the first draft": ("q_row = proposals_ptr + (request * width + kept)", "q_row = proposals_ptr + (request * width)"),
    "the token behind all drafts is of the first row": ("token = tl.load(chosen_ptr + last)", "token = tl.load(chosen_ptr + start)"),
    "one draft too many": ("tl.where(real & keeps, PLACES, place)", "tl.where(real & keeps, PLACES, place + 1)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_turns_the_comparison_red(fault: str, tmp_path: Path) -> None:
    drafts, target = ragged(9)
    drafts = replace(drafts, tokens=drafts.tokens.clamp(max=36))  # a fault reads no memory that is not ours
    drafts = replace(drafts, drawn=torch.arange(NUM, device=DEVICE) % 4 != 0)
    check(triton_accept, drafts, target)
    with mutated(triton_accept, *FAULTS[fault], tmp_path) as mutant, pytest.raises(AssertionError):
        check(mutant, drafts, target)
