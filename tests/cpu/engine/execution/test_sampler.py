"""The sampler against exact distributions: what is chosen, how often, and that neighbours in the batch do not
matter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.contract import Request, SamplingParams, Start
from penstock.engine.execution.sampler import Rows, SampleOutput, gumbel_noise, packed_width, token_logprobs
from penstock.errors import InvariantBroken
from tests.cpu.engine.execution.sampler_on_lane import OnLane

VOCAB = 12


def sample_many(
    logits: torch.Tensor,
    num_draws: int,
    prompt: tuple[int, ...] = (1,),
    output: tuple[int, ...] = (),
    **sampling: Any,
) -> torch.Tensor:
    """One request's next token, drawn at `num_draws` positions with everything else equal: counts by
    token."""
    rows, sampler = Rows(1), OnLane(1, VOCAB)
    start = Start.of(
        0, Request("r", prompt, SamplingParams(max_tokens=1, **{"seed": 11, **sampling})), output
    )
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    rows.start(start)
    batch = 500
    for first in range(0, num_draws, batch):
        sampler.start(start)
        plan = rows.sample_plan(np.zeros(batch, np.int32), np.arange(first, first + batch, dtype=np.int32))
        params = None if plan.params is None else torch.from_numpy(plan.params)
        found = sampler.sample(logits.expand(batch, -1), torch.zeros(batch, dtype=torch.int32), plan, params)
        counts += torch.bincount(found.tokens.long(), minlength=VOCAB)
    return counts


def check_distribution(counts: torch.Tensor, expected: torch.Tensor) -> None:
    """Pearson's statistic over what can happen, at one in ten thousand; what cannot happen never does."""
    total = counts.sum()
    assert bool((counts[expected == 0] == 0).all())
    possible = expected > 0
    statistic = (
        ((counts[possible] - total * expected[possible]) ** 2 / (total * expected[possible])).sum().item()
    )
    degrees = int(possible.sum()) - 1
    # Wilson and Hilferty's approximation of the quantile; 3.72 standard deviations.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3 if degrees else 1e-9
    assert statistic <= limit, (counts, expected * total)


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 2


def kept(probabilities: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    masked = torch.where(keep, probabilities, 0.0)
    return masked / masked.sum()


def test_temperature_follows_the_softmax(logits: torch.Tensor) -> None:
    check_distribution(sample_many(logits, 20_000, temperature=0.7), (logits / 0.7).softmax(-1))


def test_the_check_of_distributions_can_fail(logits: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        check_distribution(sample_many(logits, 20_000, temperature=0.7), (logits / 0.75).softmax(-1))


@pytest.mark.parametrize("level", [1.0, -1.0])
@pytest.mark.parametrize(
    ("reward", "seen"),
    [({"presence_penalty": -1.0}, 3), ({"frequency_penalty": -1.0}, 3), ({"repetition_penalty": 0.5}, 2)],
    ids=["presence", "frequency", "repetition"],
)
def test_a_penalty_with_the_other_sign_favours_what_was_seen(
    reward: dict[str, float], seen: int, level: float
) -> None:
    """Of tokens that are all as likely the first would be chosen; 2 is in the prompt, and 3 was generated."""
    counts = sample_many(
        torch.full((VOCAB,), level), 500, prompt=(2,), output=(3,), temperature=0.0, **reward
    )
    assert int(counts.argmax()) == seen


def biased(logits: torch.Tensor, *biases: tuple[int, float]) -> torch.Tensor:
    shifted = logits.clone()
    for token, bias in biases:
        shifted[token] += bias
    return shifted


BIASES = ((0, -1.5), (3, 2.0), (VOCAB - 1, -100.0))


def test_biases_shift_the_distribution(logits: torch.Tensor) -> None:
    expected = (biased(logits, *BIASES) / 0.7).softmax(-1)
    counts = sample_many(logits, 20_000, temperature=0.7, logit_bias=BIASES)
    check_distribution(counts, torch.where(expected < 1e-30, 0.0, expected))


def test_biases_come_before_filters_and_behind_penalties(logits: torch.Tensor) -> None:
    p = biased(logits, *BIASES).softmax(-1)
    check_distribution(
        sample_many(logits, 20_000, top_k=4, logit_bias=BIASES),
        kept(p, p >= p.sort(descending=True).values[3]),
    )
    halved = torch.where(logits > 0, logits / 2, logits * 2)
    penalised = torch.where(torch.arange(VOCAB) == 3, halved, logits)
    counts = sample_many(
        logits, 2000, prompt=(3,), temperature=0.0, repetition_penalty=2.0, logit_bias=((3, 1.0),)
    )
    assert counts.argmax() == biased(penalised, (3, 1.0)).argmax()


def test_a_bias_decides_a_greedy_choice_and_logprobs_are_the_models_own(logits: torch.Tensor) -> None:
    least = int(logits.argmin())
    rows, sampler = Rows(1), OnLane(1, VOCAB)
    start = Start.of(
        0,
        Request(
            "r", (1,), SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, logit_bias=((least, 100.0),))
        ),
        (),
    )
    rows.start(start)
    sampler.start(start)
    plan = rows.sample_plan(np.zeros(1, np.int32), np.zeros(1, np.int32))
    assert plan.params is not None
    found = sampler.sample(
        logits[None], torch.zeros(1, dtype=torch.int32), plan, torch.from_numpy(plan.params)
    )
    assert found.tokens.tolist() == [least]
    assert found.logprobs is not None and torch.equal(found.logprobs, logits.log_softmax(-1)[least][None])


def test_biases_of_a_row_are_not_its_neighbours_nor_those_of_whoever_has_it_next(
    logits: torch.Tensor,
) -> None:
    """The row of the second request was another's, whose biases are still in it: nothing sets up a row that
    needs no state."""
    best, least = int(logits.argmax()), int(logits.argmin())
    rows, sampler = Rows(2), OnLane(2, VOCAB)

    def start(row: int, **sampling: Any) -> None:
        begun = Start.of(
            row, Request("r", (1,), SamplingParams(max_tokens=1, temperature=0.0, **sampling)), ()
        )
        rows.start(begun)
        if sampling:
            sampler.start(begun)

    start(1, logit_bias=((least, 100.0),))
    start(1)
    start(0, logit_bias=((5, 100.0),))
    plan = rows.sample_plan(np.array([0, 1], np.int32), np.zeros(2, np.int32))
    assert plan.params is not None
    found = sampler.sample(
        logits.expand(2, -1), torch.tensor([0, 1], dtype=torch.int32), plan, torch.from_numpy(plan.params)
    )
    assert found.tokens.tolist() == [5, best]
    start(0, logit_bias=((least, 1e-3),))  # fewer or smaller ones replace what was there
    plan = rows.sample_plan(np.array([0], np.int32), np.zeros(1, np.int32))
    assert plan.params is not None
    assert sampler.sample(
        logits[None], torch.tensor([0], dtype=torch.int32), plan, torch.from_numpy(plan.params)
    ).tokens.tolist() == [best]


def test_top_k_keeps_exactly_k(logits: torch.Tensor) -> None:
    p = logits.softmax(-1)
    check_distribution(sample_many(logits, 20_000, top_k=4), kept(p, p >= p.sort(descending=True).values[3]))


def test_top_k_keeps_exactly_k_even_among_equals() -> None:
    counts = sample_many(torch.zeros(VOCAB), 2000, top_k=3)
    assert counts.nonzero().flatten().tolist() == [0, 1, 2]


def test_top_p_keeps_the_smallest_sufficient_set(logits: torch.Tensor) -> None:
    p, ids = logits.softmax(-1).sort(descending=True)
    keep = torch.zeros(VOCAB, dtype=torch.bool)
    keep[ids[(p.cumsum(-1) - p) < 0.8]] = True
    assert 1 < int(keep.sum()) < VOCAB
    check_distribution(sample_many(logits, 20_000, top_p=0.8), kept(logits.softmax(-1), keep))


def test_min_p_is_relative_to_the_likeliest(logits: torch.Tensor) -> None:
    p = logits.softmax(-1)
    keep = p >= 0.05 * p.max()
    assert 1 < int(keep.sum()) < VOCAB
    check_distribution(sample_many(logits, 20_000, min_p=0.05), kept(p, keep))


@pytest.mark.parametrize(
    "sampling",
    [
        *({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}),
        # which divides by nothing so small, though it goes the long way
        {"temperature": 1e-38, "presence_penalty": 1e-9},
    ],
)
def test_the_narrowest_settings_are_greedy(logits: torch.Tensor, sampling: dict[str, float]) -> None:
    counts = sample_many(logits, 500, **sampling)
    assert counts[logits.argmax()] == 500


def test_penalties_change_logits_as_defined(logits: torch.Tensor) -> None:
    prompt, output = (0, 3), (3, 5, 5)
    expected = logits.clone()
    for token in {0, 3, 5}:
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token, count in ((3, 1), (5, 2)):
        expected[token] -= 0.4 * count + 0.7
    settings: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": 0.7}
    # The first draw of each batch of 500 sees the counts as given; within a batch they are read before they
    # are raised.
    check_distribution(sample_many(logits, 20_000, prompt, output, **settings), expected.softmax(-1))


def test_generated_tokens_count_towards_penalties_at_once(logits: torch.Tensor) -> None:
    rows, sampler = Rows(1), OnLane(1, VOCAB)
    start = Start.of(
        0, Request("r", (1,), SamplingParams(max_tokens=9, temperature=0.0, frequency_penalty=2.0)), ()
    )
    rows.start(start)
    sampler.start(start)
    found = []
    expected, reference = [], logits.clone()
    for position in range(6):
        plan = rows.sample_plan(np.zeros(1, np.int32), np.array([position], np.int32))
        found.append(
            int(
                sampler.sample(
                    logits[None], torch.zeros(1, dtype=torch.int32), plan, torch.from_numpy(plan.params)
                ).tokens
            )
        )
        expected.append(int(reference.argmax()))
        reference[expected[-1]] -= 2.0
    assert found == expected
    assert len(set(found)) > 1


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(4, VOCAB)
    rows = Rows(4)
    settings: list[dict[str, Any]] = [
        {},
        {"top_k": 3},
        {"temperature": 0.0},
        {"presence_penalty": 1.0, "top_p": 0.5},
    ]
    sampler = OnLane(4, VOCAB)
    for row, extra in enumerate(settings):
        start = Start.of(row, Request(str(row), (2,), SamplingParams(max_tokens=1, seed=row, **extra)), ())
        rows.start(start)
        sampler.start(start)

    def draw(which: list[int], position: int) -> list[int]:
        index = np.array(which, np.int32)
        plan = rows.sample_plan(index, np.full(len(which), position, np.int32))
        params = None if plan.params is None else torch.from_numpy(plan.params)
        sampler.forget()
        return sampler.sample(logits[which], torch.from_numpy(index), plan, params).tokens.tolist()

    for position in range(50):
        together = draw([0, 1, 2, 3], position)
        assert together == [draw([row], position)[0] for row in range(4)]
        assert together[::-1] == draw([3, 2, 1, 0], position)


def test_noise_has_the_moments_of_a_gumbel_distribution() -> None:
    keys = torch.from_numpy(np.random.default_rng(0).integers(-(2**31), 2**31, (2, 64)).astype(np.int32))
    noise = gumbel_noise(keys, 4096)
    assert bool(noise.isfinite().all())
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(1.6449, abs=0.03)
    assert abs(torch.corrcoef(noise[:2])[0, 1].item()) < 0.06


def test_logprobs_and_ranks_match_a_plain_log_softmax() -> None:
    logits = torch.randn(5, VOCAB)
    tokens = torch.tensor([0, 3, 7, 11, 2])
    found = token_logprobs(logits, tokens, 4)
    expected = logits.log_softmax(-1)
    assert found.logprobs is not None and found.ranks is not None and found.top_ids is not None
    assert torch.allclose(found.logprobs, expected[torch.arange(5), tokens])
    order = expected.argsort(-1, descending=True)
    assert found.ranks.tolist() == [(order[i] == tokens[i]).nonzero().item() + 1 for i in range(5)]
    assert found.top_ids.tolist() == order[:, :4].tolist()


def keys_whose_noise_is_infinite_at(token: int) -> torch.Tensor:
    """Draw keys for which the mixing ends in the largest word at `token`: its steps are undone one by one."""
    mask = 0xFFFFFFFF
    x = mask
    x ^= x >> 16
    x = x * pow(0x846CA68B, -1, 2**32) & mask
    x ^= (x >> 15) ^ (x >> 30)
    x = x * pow(0x7FEB352D, -1, 2**32) & mask
    x ^= x >> 16
    first = 12345
    mixed = token ^ first
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = (mixed ^ (mixed >> shift)) * factor & mask
    mixed ^= mixed >> 16
    return torch.tensor([[first], [mixed ^ x]], dtype=torch.int64).to(torch.int32)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}])
def test_a_greedy_row_beside_random_ones_is_never_chosen_by_its_noise(filters: dict[str, float]) -> None:
    unlikely, likely = 3, 7
    logits = torch.zeros(2, VOCAB)
    logits[:, likely] = 9.0
    rows, sampler = Rows(2), OnLane(2, VOCAB)
    for row, sampling in enumerate(({"temperature": 0.0}, {"temperature": 1.0, **filters})):
        rows.start(
            Start.of(row, Request(str(row), (1,), SamplingParams(max_tokens=1, seed=1, **sampling)), ())
        )
    plan = rows.sample_plan(np.array([0, 1], np.int32), np.array([5, 5], np.int32))
    assert plan.params is not None
    keys = keys_whose_noise_is_infinite_at(unlikely)
    assert gumbel_noise(keys, VOCAB)[0, unlikely] == -torch.inf, "the one draw in millions"
    params = torch.from_numpy(plan.params)
    params[-2:, :1] = keys
    assert sampler.sample(logits, torch.tensor([0, 1], dtype=torch.int32), plan, params).tokens[0] == likely


def test_what_is_sampled_comes_through_one_packed_copy_unchanged() -> None:
    """Numbers are carried as the bits of 32-bit words: minus infinity and the smallest logprob included."""
    logits = torch.randn(3, VOCAB)
    logits[0, 4] = -torch.inf
    output = token_logprobs(logits, torch.tensor([4, 0, 11]), 3)
    assert (
        output.logprobs is not None
        and output.top_ids is not None
        and output.top_logprobs is not None
        and output.ranks is not None
    )
    words = output.packed().numpy()
    assert words.shape == (3, packed_width(3)) and words.dtype == np.int32
    assert words[:, 0].tolist() == [4, 0, 11] and words[:, 2].tolist() == output.ranks.tolist()
    assert (
        words[:, 1].view(np.float32).tolist() == output.logprobs.tolist() and output.logprobs[0] == -torch.inf
    )
    assert words[:, 3:6].tolist() == output.top_ids.tolist()
    assert words[:, 6:].view(np.float32).tolist() == output.top_logprobs.tolist()
    assert SampleOutput(torch.tensor([5, 6])).packed().tolist() == [5, 6] and packed_width(-1) == 1
    assert token_logprobs(logits, torch.tensor([4, 0, 11]), 0).packed().shape == (3, packed_width(0))


@pytest.mark.parametrize("call", ["start", "sample"])
def test_the_state_of_rows_is_touched_by_work_of_the_lane_alone(call: str) -> None:
    """A step that is still running counts tokens of the row's last request: whoever does not come behind it
    on the lane is refused."""
    rows, made = Rows(1), OnLane(1, VOCAB)
    start = Start.of(0, Request("r", (1,), SamplingParams(max_tokens=1, presence_penalty=1.0)), ())
    rows.start(start)
    plan = rows.sample_plan(np.zeros(1, np.int32), np.zeros(1, np.int32))
    assert plan.params is not None
    given = (
        (start,)
        if call == "start"
        else (torch.zeros(1, VOCAB), torch.zeros(1, dtype=torch.int32), plan, torch.from_numpy(plan.params))
    )
    with pytest.raises(InvariantBroken, match="used outside lane compute"):
        getattr(made.sampler, call)(*given)
    getattr(made, call)(*given)


def test_every_bit_of_a_seed_counts() -> None:
    """Seeds that the engine draws have 63 bits, and clients give negative ones too."""
    drawn = {}
    for seed in (0, 1, -1, 1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1, -(1 << 32), -((1 << 63) - 1)):
        rows = Rows(1)
        rows.start(Start.of(0, Request("r", [1], SamplingParams(max_tokens=4, seed=seed)), ()))
        params = rows.sample_plan(np.array([0], np.int32), np.array([7], np.int32)).params
        assert params is not None
        drawn[seed] = params[-2:].tobytes()
    assert len(set(drawn.values())) == len(drawn)


def test_a_rank_counts_only_what_is_likelier() -> None:
    """Tokens that are equally likely have the same rank, the best one that they could have."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 1.0]]).expand(5, -1)
    found = token_logprobs(logits, torch.arange(5), 0)
    assert found.ranks is not None
    assert found.ranks.tolist() == [4, 1, 1, 3, 4]


@pytest.mark.parametrize("num_top", [1, 3, 20])
@pytest.mark.parametrize("num_values", [1, 2, 5, 300])
def test_equally_likely_alternatives_come_by_their_ids_whatever_else_is_asked_for(
    num_values: int, num_top: int
) -> None:
    """In bfloat16 many logits are equal. The greedy token is the first of them, and a request that wants
    fewer gets the first ones."""
    for seed in range(20):
        logits = torch.randint(
            num_values, (seed % 4 + 1, 300), generator=torch.Generator().manual_seed(seed)
        ).to(torch.bfloat16)
        logits[0, :3] = -torch.inf
        assert (
            token_logprobs(torch.full_like(logits, torch.nan), logits.argmax(dim=-1), num_top).top_ids
            is not None
        ), "nor does NaN fail"
        chosen = logits.argmax(dim=-1)
        output = token_logprobs(logits, chosen, num_top)
        expected = [
            sorted(range(300), key=lambda token: (-row[token], token))[:num_top] for row in logits.tolist()
        ]
        assert output.top_ids is not None and output.top_ids.tolist() == expected
        assert output.top_ids[:, 0].tolist() == chosen.tolist()
        logprobs = logits.float().log_softmax(dim=-1).gather(1, torch.tensor(expected))
        assert output.top_logprobs is not None and torch.equal(output.top_logprobs, logprobs)
