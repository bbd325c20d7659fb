"""Acceptance keeps the target's distribution: by enumeration, by 100 000 draws, and token by token where the proposer is deterministic."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.contract import Request, SamplingParams, Start
from penstock.engine.execution.rows import NUM_FLOATS, Rows
from penstock.engine.execution.sampler import Sampler, gumbel_noise
from penstock.engine.execution.staging import Uploads
from penstock.lanes.cpu import CpuLane
from penstock.speculation import accept as module
from penstock.speculation.accept import NO_TOKEN, Drafts, Target, accept, counts_before
from penstock.speculation.distribution import kept_scores
from support.mutation import mutated
from support.toy_target import DRAFT, OPTIONS, TARGET, VOCAB, drafted, joint, keys_of, next_probs, verified

WIDTH = 2
NUM = 100_000


def sampling_of(option: str) -> SamplingParams:
    return SamplingParams(max_tokens=8, **{"temperature": 1.0, **OPTIONS[option]})


# -------------------------------------------------------------------------------------------------------------- enumeration


def acceptance(rule: Any, p: Tensor, q: Tensor) -> Tensor:
    """[VOCAB]: the share of uniform numbers that keep each token, found by bisection of the rule itself."""
    low, high = torch.zeros_like(p), torch.ones_like(p)
    for _ in range(60):
        middle = (low + high) / 2
        kept = rule.keeps_draft(middle, p, q)
        low, high = torch.where(kept, middle, low), torch.where(kept, high, middle)
    return low


def emitted(rule: Any, sampling: SamplingParams, prefix: tuple[int, ...] = ()) -> list[tuple[tuple[int, ...], float]]:
    """Every output of one step with WIDTH drafts, and its probability."""
    before = torch.tensor([prefix], dtype=torch.int64).view(1, -1)
    p = next_probs(TARGET, before, sampling)[0]
    if len(prefix) == WIDTH:
        return [((token,), float(p[token])) for token in range(VOCAB)]
    q = next_probs(DRAFT, before, sampling)[0]
    share, rest = acceptance(rule, p, q), rule.residual(p, q)
    found = [((token,), float((q * (1 - share)).sum() * rest[token])) for token in range(VOCAB)]
    for token in range(VOCAB):
        weight = float(q[token] * share[token])
        found += [((token, *others), weight * part) for others, part in emitted(rule, sampling, (*prefix, token))]
    return found


def check_enumerated(rule: Any, sampling: SamplingParams) -> None:
    """The joint distribution of the first tokens, those behind a step's output drawn plainly, is the target's."""
    found = torch.zeros([VOCAB] * (WIDTH + 1), dtype=torch.float64)
    for sequence, share in emitted(rule, sampling):
        for rest in itertools.product(range(VOCAB), repeat=WIDTH + 1 - len(sequence)):
            whole, part = (*sequence, *rest), share
            for n in range(len(sequence), WIDTH + 1):
                part *= float(NEXT[tuple(whole[:n])][whole[n]])
            found[whole] += part
    distance = (found.flatten() - joint(sampling, WIDTH + 1)).abs().sum() / 2
    assert distance < 1e-12, f"total variation {distance}"


NEXT: dict[tuple[int, ...], Tensor] = {}


def fill_next(sampling: SamplingParams) -> None:
    for n in range(WIDTH + 1):
        for prefix in itertools.product(range(VOCAB), repeat=n):
            NEXT[prefix] = next_probs(TARGET, torch.tensor([prefix], dtype=torch.int64).view(1, -1), sampling)[0]


@pytest.mark.parametrize("option", OPTIONS)
def test_what_a_step_emits_has_the_distribution_of_plain_decoding_exactly(option: str) -> None:
    """Holds by enumeration of every draft and every decision; total variation is zero to rounding."""
    fill_next(sampling_of(option))
    check_enumerated(module, sampling_of(option))


RULE_FAULTS = {
    "the proposal is left out of the ratio": ("return u * q < p", "return u < p"),
    "the ratio is upside down": ("return u * q < p", "return u * p < q"),
    "the residual is not normalised": ("rest / total, p)", "rest, p)"),
    "a rejected draft is replaced by a plain draw": ("rest = (p - q).clamp(min=0.0)", "rest = p + 0.0 * q"),
}


@pytest.mark.parametrize("fault", RULE_FAULTS)
def test_a_rule_that_is_off_by_one_term_is_found_by_enumeration(fault: str, tmp_path: Path) -> None:
    sampling = sampling_of("plain")
    fill_next(sampling)
    with mutated(module, *RULE_FAULTS[fault], tmp_path) as mutant, pytest.raises(AssertionError, match="total variation"):
        check_enumerated(mutant, sampling)


# -------------------------------------------------------------------------------------------------------------------- draws


def check_draws(made: Callable[..., Any], drafts: Drafts, sampling: SamplingParams) -> None:
    """The G statistic of the first WIDTH + 1 tokens of NUM requests, at one in ten thousand; what cannot happen never does."""
    found = made(drafts, verified(drafts, sampling), gumbel_noise)
    outputs = torch.zeros((NUM, 0), dtype=torch.int64)
    for n in range(WIDTH + 1):  # what a step did not emit is drawn plainly, with the key of its position
        plain = module.draw(next_probs(TARGET, outputs, sampling), keys_of(NUM, n), gumbel_noise)
        outputs = torch.cat((outputs, torch.where(found.counts > n, found.tokens[:, n].long(), plain)[:, None]), dim=1)
    number = (outputs * VOCAB ** torch.arange(WIDTH, -1, -1)).sum(dim=1)
    counts = torch.bincount(number, minlength=VOCAB ** (WIDTH + 1)).double()
    expected = joint(sampling, WIDTH + 1) * NUM
    assert bool((counts[expected == 0] == 0).all()), "a token that the target rules out was emitted"
    many = expected >= 10  # the rest is one cell
    seen = torch.cat((counts[many], counts[~many].sum()[None]))
    wanted = torch.cat((expected[many], expected[~many].sum()[None]))
    statistic = 2 * float(torch.where(seen > 0, seen * (seen / wanted).log(), 0.0).sum())
    degrees = max(int((wanted > 0).sum()) - 1, 1)
    # Wilson and Hilferty's approximation of the quantile; 3.72 standard deviations.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert statistic <= limit, f"G {statistic} with {degrees} degrees of freedom"


@pytest.mark.parametrize("option", OPTIONS)
def test_a_hundred_thousand_draws_follow_the_target(option: str) -> None:
    sampling = sampling_of(option)
    check_draws(accept, drafted(NUM, WIDTH, sampling), sampling)


DRAW_FAULTS = {
    "the proposal is left out of the ratio": ("return u * q < p", "return u < p"),
    "both decisions have the same uniform number": ("rows.flatten()], noise)", "rows[:, :1].expand_as(rows).flatten()], noise)"),
    "the decision and the replacement have the same draw": ("noise(salted(keys, DECISION), 1)", "noise(keys, 1)"),
    "the token behind all drafts is of the first row": ("token = target.chosen[last]", "token = target.chosen[target.starts.long()]"),
    "a rejected draft is replaced by a plain draw": ("draw(residual(target.probs[last], q)", "draw(target.probs[last]"),
    "the replacement is of the row before": ("draw(residual(target.probs[last], q)", "draw(residual(target.probs[last - kept], q)"),
    "all decisions are made with the first draft's q": ("    return keeps_draft(u, p, q)", "    return keeps_draft(u, p, q[:, :1])"),
}  # fmt: skip


@pytest.mark.parametrize("fault", DRAW_FAULTS)
def test_a_fault_in_acceptance_is_found_by_draws(fault: str, tmp_path: Path) -> None:
    sampling = sampling_of("plain")
    with mutated(module, *DRAW_FAULTS[fault], tmp_path) as mutant, pytest.raises(AssertionError):
        check_draws(mutant.accept, drafted(NUM, WIDTH, sampling), sampling)


def test_a_proposal_of_another_temperature_is_found_by_draws() -> None:
    sampling = sampling_of("plain")
    with pytest.raises(AssertionError, match="G "):
        check_draws(accept, drafted(NUM, WIDTH, sampling, other=sampling_of("a high temperature")), sampling)


def test_a_greedy_draft_with_the_proposal_of_a_sampled_one_is_found_by_draws() -> None:
    """The bias of a published kernel: drafts were the likeliest tokens, q their softmax."""
    sampling, greedy = sampling_of("plain"), SamplingParams(max_tokens=8, temperature=0.0)
    with pytest.raises(AssertionError, match="G "):
        check_draws(accept, drafted(NUM, WIDTH, greedy, other=sampling), sampling)


def test_a_greedy_draft_with_a_point_mass_follows_the_target() -> None:
    sampling, greedy = sampling_of("plain"), SamplingParams(max_tokens=8, temperature=0.0)
    check_draws(accept, drafted(NUM, WIDTH, greedy), sampling)


def test_drafts_drawn_with_the_key_of_the_token_are_found_by_draws() -> None:
    """Drafts and replacements of one position must be independent."""
    sampling = sampling_of("plain")
    with pytest.raises(AssertionError, match="G "):
        check_draws(accept, drafted(NUM, WIDTH, sampling, salt=0), sampling)


# ------------------------------------------------------------------------------------------------ deterministic proposers


@pytest.mark.parametrize("option", OPTIONS)
def test_with_a_deterministic_proposer_the_output_is_that_of_plain_decoding(option: str) -> None:
    """Holds whatever is proposed: what is emitted is the target's own draw at every position."""
    sampling, num = sampling_of(option), 500
    outputs = torch.zeros((num, 0), dtype=torch.int64)
    for position in range(WIDTH + 1):
        token = module.draw(next_probs(TARGET, outputs, sampling), keys_of(num, position), gumbel_noise)
        outputs = torch.cat((outputs, token[:, None]), dim=1)
    drafts = Drafts(drafted(num, WIDTH, sampling).tokens, torch.full((num,), WIDTH, dtype=torch.int32))
    found = accept(drafts, verified(drafts, sampling), gumbel_noise)
    places = torch.arange(WIDTH + 1)[None, :]
    assert torch.equal(found.tokens, torch.where(places < found.counts[:, None], outputs, NO_TOKEN).to(torch.int32))
    assert found.counts.unique().tolist() == [1, 2, 3], "some drafts were kept, and some not"


def greedy_target(chosen: list[int], starts: list[int]) -> Target:
    return Target(torch.tensor(starts, dtype=torch.int32), torch.tensor(chosen, dtype=torch.int32))


RAGGED = Drafts(
    torch.tensor([[4, 5, 6], [9, 9, 9], [7, 8, 0], [0, 0, 0]], dtype=torch.int32), torch.tensor([3, 1, 2, 0], dtype=torch.int32)
)
CHOSEN, STARTS = [4, 1, 6, 2, 9, 3, 7, 2, 8, 6], [0, 4, 6, 9]  # a draft behind a rejected one may be right: it is not kept


def test_drafts_are_kept_up_to_the_first_that_differs() -> None:
    found = accept(RAGGED, greedy_target(CHOSEN, STARTS), gumbel_noise)
    assert found.counts.tolist() == [2, 2, 2, 1]
    assert found.tokens.tolist() == [[4, 1, -1, -1], [9, 3, -1, -1], [7, 2, -1, -1], [6, -1, -1, -1]]


def test_forced_acceptance_keeps_all_drafts_and_the_token_behind_them() -> None:
    found = accept(RAGGED, greedy_target(CHOSEN, STARTS), gumbel_noise, force=True)
    assert found.counts.tolist() == [4, 2, 3, 1]
    assert found.tokens.tolist() == [[4, 5, 6, 2], [9, 3, -1, -1], [7, 8, 8, -1], [6, -1, -1, -1]]


def test_a_batch_without_drafts_is_plain_decoding() -> None:
    none = Drafts(torch.zeros((2, 0), dtype=torch.int32), torch.zeros(2, dtype=torch.int32), torch.zeros((2, 0, VOCAB)))
    found = accept(none, greedy_target([3, 1], [0, 1]), gumbel_noise)
    assert found.counts.tolist() == [1, 1] and found.tokens.tolist() == [[3], [1]]


def test_drawn_and_deterministic_rows_share_a_batch() -> None:
    """A row is decided as it would be alone, whatever its neighbours are."""
    sampling, num = sampling_of("plain"), 400
    drafts = drafted(num, WIDTH, sampling)
    target = verified(drafts, sampling)
    drawn = torch.arange(num) % 2 == 0
    mixed = accept(Drafts(drafts.tokens, drafts.lengths, drafts.proposals, drawn), target, gumbel_noise)
    all_drawn = accept(drafts, target, gumbel_noise)
    matched = accept(Drafts(drafts.tokens, drafts.lengths), target, gumbel_noise)
    assert torch.equal(mixed.tokens, torch.where(drawn[:, None], all_drawn.tokens, matched.tokens))
    assert not torch.equal(all_drawn.tokens, matched.tokens)


# ----------------------------------------------------------------------------------------------------------------- controls


def test_a_draft_that_is_the_target_is_kept_whole() -> None:
    sampling = sampling_of("all")
    drafts = drafted(2000, WIDTH, sampling)
    same = verified(drafts, sampling)
    probs = same.probs
    assert probs is not None
    drafts = Drafts(drafts.tokens, drafts.lengths, probs.view(2000, WIDTH + 1, VOCAB)[:, :WIDTH])
    possible = drafts.proposals.gather(2, drafts.tokens.long()[:, :, None])[:, :, 0] > 0  # type: ignore[union-attr]
    found = accept(drafts, same, gumbel_noise)
    assert torch.equal(found.counts, (possible.cumprod(dim=1).sum(dim=1) + 1).to(torch.int32))


def test_where_rounding_leaves_no_residual_the_target_is_drawn_from() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0]])
    assert torch.equal(module.residual(p, p + 1e-3), p)


def test_counts_before_a_draft_hold_the_drafts_before_it() -> None:
    found = counts_before(torch.tensor([[1, 1, 2]], dtype=torch.int32), 3)
    assert found.tolist() == [[[0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 2, 1]]]


# ------------------------------------------------------------------------------------------------- one definition of a draw


@pytest.mark.parametrize("option", OPTIONS)
def test_scores_and_noise_give_what_the_sampler_chooses(option: str) -> None:
    """`kept_scores` is the sampler's own filter: the largest score plus noise is its choice, for every draw."""
    num, sampling = 400, SamplingParams(max_tokens=8, seed=7, **{"temperature": 1.0, **OPTIONS[option]})
    logits = torch.randn((num, 12), generator=torch.Generator().manual_seed(1)) * 2
    rows = Rows(1)
    lane = CpuLane("compute", around=torch.inference_mode)
    sampler = Sampler(1, 12, lane, Uploads(torch.device("cpu"), lane))
    start = Start.of(0, Request("r", (1, 2), sampling), (3, 3))
    rows.start(start)
    plan = rows.sample_plan(np.zeros(num, np.int32), np.arange(num, dtype=np.int32))
    assert plan.params is not None
    params, at = torch.from_numpy(plan.params), torch.zeros(num, dtype=torch.int32)
    floats = params[:NUM_FLOATS].view(torch.float32)
    found: list[Tensor] = []

    def both() -> None:
        sampler.start(start)
        found.append(sampler._penalise(logits, at, *(f[:, None] for f in floats[3:6])))
        found.append(sampler.sample(logits, at, plan, params).tokens)

    lane.submit(both, label="both").wait_done(30)
    lane.close(30)
    scores = kept_scores(found[0], floats[0], params[NUM_FLOATS], floats[1], floats[2])
    noise = gumbel_noise(params[NUM_FLOATS + 1 :], 12).clamp(min=-4.0)
    assert torch.equal((scores + noise).argmax(dim=-1).to(torch.int32), found[1])
