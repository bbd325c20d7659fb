"""The sampler against exact distributions: parameters alone and together, in a stated order; a row depends on
nothing but its own request."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from penstock.contract import MAX_SEED
from penstock.engine.execution.sampler import (
    Rows,
    SampleOutput,
    SamplePlan,
    draw_keys,
    gumbel_noise,
    packed_width,
    token_logprobs,
)
from penstock.errors import InvariantBroken
from tests.cpu.engine.execution.sampler_on_lane import OnLane, start_of

VOCAB = 9
LOGITS = torch.tensor([2.0, 1.6, 1.1, 0.6, 0.0, -0.5, -1.0, 3.0, -4.0])
PROMPT, OUTPUT = (7, 0), (7, 7, 2)
NUM_DRAWS = 3000
BIASES = ((0, -1.5), (3, 2.0), (VOCAB - 1, -100.0))

TEMPERATURES: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.5}, {"temperature": 2.0})
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 5, "top_p": 0.8},
    {"top_k": 5, "min_p": 0.3},
    {"top_p": 0.9, "min_p": 0.25},
    {"top_k": 6, "top_p": 0.85, "min_p": 0.1},
)
PENALTIES: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.6, "frequency_penalty": 0.5, "presence_penalty": 0.4},
    {"repetition_penalty": 0.7, "logit_bias": BIASES},
    {"frequency_penalty": -1.0, "presence_penalty": -0.5},
)


def expected(how: dict[str, Any]) -> torch.Tensor:
    """By definition, one step after the other: penalties, biases, temperature, then top-k, min-p and top-p of
    what those leave."""
    logits = LOGITS.double().tolist()
    for token in range(VOCAB):
        if token in {*PROMPT, *OUTPUT}:
            factor = how.get("repetition_penalty", 1.0)
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        repeated = OUTPUT.count(token)
        logits[token] -= how.get("frequency_penalty", 0.0) * repeated
        logits[token] -= how.get("presence_penalty", 0.0) * (repeated > 0)
    for token, bias in how.get("logit_bias", ()):
        logits[token] += bias
    scores = torch.tensor(logits, dtype=torch.float64) / how.get("temperature", 1.0)
    order = scores.argsort(descending=True).tolist()
    kept = [
        token
        for token in order[: how.get("top_k", VOCAB)]
        if (scores[token] - scores[order[0]]).exp() >= how.get("min_p", 0.0)
    ]
    total, enough = 0.0, []
    for token, share in zip(kept, scores[kept].softmax(-1).tolist(), strict=True):
        if total < how.get("top_p", 1.0):
            enough.append(token)
        total += share
    probabilities = torch.zeros(VOCAB, dtype=torch.float64)
    probabilities[enough] = scores[enough].softmax(-1)
    return torch.where(probabilities < 1e-30, 0.0, probabilities)


def drawn(how: dict[str, Any], logits: torch.Tensor = LOGITS) -> torch.Tensor:
    on = OnLane(1, VOCAB)
    on.begin(0, PROMPT, OUTPUT, **how)
    found = on.draw(logits.expand(NUM_DRAWS, -1), [0] * NUM_DRAWS, range(NUM_DRAWS))
    return torch.bincount(found.tokens.long(), minlength=VOCAB)


def agrees(counts: torch.Tensor, wanted: torch.Tensor) -> bool:
    """What cannot happen never does, and what can is within five standard deviations."""
    deviations = (counts - NUM_DRAWS * wanted).abs() / (NUM_DRAWS * wanted * (1 - wanted)).sqrt().clamp(
        min=1e-9
    )
    return bool((counts[wanted == 0] == 0).all() and (deviations[(wanted > 0) & (wanted < 1)] < 5).all())


@pytest.mark.parametrize("penalty", PENALTIES, ids=lambda penalty: " ".join(penalty) or "none")
def test_any_parameters_together_give_the_distribution_that_each_of_them_says(
    penalty: dict[str, Any],
) -> None:
    """And the comparison can fail: it does wherever leaving one out changes a probability by a tenth."""
    for temperature, filtered in itertools.product(TEMPERATURES, FILTERS):
        how = {**temperature, **filtered, **penalty}
        counts = drawn(how)
        assert agrees(counts, expected(how)), how
        for left_out in how:
            without = expected({name: value for name, value in how.items() if name != left_out})
            if (without - expected(how)).abs().max() > 0.1:
                assert not agrees(counts, without), (how, left_out)


def test_the_narrowest_settings_are_greedy_and_top_k_keeps_exactly_k_among_equals() -> None:
    for how in (
        *({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}),
        # which divides by nothing so small, though it goes the long way
        {"temperature": 1e-38, "presence_penalty": 1e-9},
    ):
        assert drawn(how, 4 * LOGITS)[7] == NUM_DRAWS, how
    assert drawn({"top_k": 3}, torch.zeros(VOCAB)).nonzero().flatten().tolist() == [0, 1, 2]
    for off in ({"top_k": -1}, {"top_k": 0}, {"top_k": VOCAB}):
        assert drawn({**off, "top_p": 0.9}).tolist() == drawn({"top_p": 0.9}).tolist(), off


def test_a_bias_decides_a_greedy_choice_and_logprobs_are_the_models_own() -> None:
    on = OnLane(1, VOCAB)
    on.begin(0, temperature=0.0, logprobs=0, logit_bias=((8, 100.0),))
    found = on.draw(LOGITS[None], [0], [0])
    assert found.tokens.tolist() == [8]
    assert found.logprobs is not None and torch.equal(found.logprobs, LOGITS.log_softmax(-1)[8][None])


def test_biases_of_a_row_are_not_those_of_its_neighbours_nor_of_its_next_request() -> None:
    on, least = OnLane(2, VOCAB), 8
    on.begin(1, temperature=0.0, logit_bias=((least, 100.0),))
    on.rows.start(start_of(1, temperature=0.0))  # nothing sets up a row that needs no state
    on.begin(0, temperature=0.0, logit_bias=((5, 100.0),))
    assert on.draw(LOGITS.expand(2, -1), [0, 1], [0, 0]).tokens.tolist() == [5, 7]
    on.begin(0, temperature=0.0, logit_bias=((least, 1e-3),))  # fewer or smaller ones replace what was there
    assert on.draw(LOGITS[None], [0], [0]).tokens.tolist() == [7]


def test_generated_tokens_count_towards_penalties_at_once() -> None:
    on, found, wanted, reference = OnLane(1, VOCAB), [], [], LOGITS.clone()
    on.begin(0, temperature=0.0, frequency_penalty=2.0)
    for position in range(6):
        found += on.draw(LOGITS[None], [0], [position]).tokens.tolist()
        wanted.append(int(reference.argmax()))
        reference[wanted[-1]] -= 2.0
    assert found == wanted and len(set(found)) > 1


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits, on = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1)), OnLane(4, VOCAB)
    hows: tuple[dict[str, Any], ...] = (
        {},
        {"top_k": 3},
        {"temperature": 0.0},
        {"presence_penalty": 1.0, "top_p": 0.5},
    )

    def draw(which: list[int], position: int) -> list[int]:
        for row, how in enumerate(hows):
            on.begin(row, (2,), seed=row, **how)
        return on.draw(logits[which], which, [position] * len(which)).tokens.tolist()

    for position in range(30):
        together = draw([0, 1, 2, 3], position)
        assert together == [draw([row], position)[0] for row in range(4)]
        assert together[::-1] == draw([3, 2, 1, 0], position)


def test_a_row_that_is_used_again_is_as_one_that_is_new() -> None:
    """Neither prompt, output nor parameters of the request before count."""
    hows: tuple[dict[str, Any], ...] = (
        *(
            {"temperature": 0.0},
            {},
            {"top_k": 3},
            {"top_p": 0.9, "min_p": 0.2},
            {"logprobs": 4},
            {"seed": -7},
        ),
        {"presence_penalty": 0.5, "frequency_penalty": -0.5},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": ((3, 1.5), (0, -2.0))},
    )

    def told(plan: SamplePlan) -> tuple[object, ...]:
        flags = plan.greedy, plan.penalties, plan.filters, plan.biases
        return *flags, plan.num_logprobs, None if plan.params is None else plan.params.tolist()

    for before, after in itertools.product(hows, hows):
        new, used = Rows(1), Rows(1)
        for rows, some in ((new, (after,)), (used, (before, after))):
            for how in some:
                rows.start(start_of(0, **how))
        one, other = (
            rows.sample_plan(np.zeros(1, np.int32), np.full(1, 9, np.int32)) for rows in (new, used)
        )
        assert told(one) == told(other), (before, after)
    logits = torch.zeros(VOCAB)
    logits[3], logits[4] = 1.0, 0.9
    for penalty in ({"repetition_penalty": 4.0}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        on = OnLane(1, VOCAB)
        for prompt, output, token in (((3, 3), (3, 3), 4), ((8,), (), 3)):
            on.begin(0, prompt, output, temperature=0.0, **penalty)
            assert on.draw(logits[None], [0], [3]).tokens.tolist() == [token], penalty


def test_the_row_of_padding_asks_for_nothing() -> None:
    """A padded step costs no more than its own requests do, whatever they ask for."""
    on = OnLane(2, VOCAB)
    plan = on.plan([2], [0])
    assert (
        plan.greedy
        and not (plan.penalties or plan.filters)
        and plan.num_logprobs == [-1]
        and plan.params is None
    )
    on.begin(0, seed=1)
    mixed = on.plan([0, 2], [0, 0])
    assert mixed.params is not None and mixed.num_logprobs == [-1, -1]
    assert mixed.params[5].view(np.float32).tolist() == [1.0, 1.0], (
        "a repetition penalty of 0 would divide by it"
    )


def test_every_seed_and_every_position_draws_for_itself() -> None:
    """Seeds that agree in their low or high words, or in their absolute value, and positions a power of two
    apart."""
    seeds = [0, 1, -1, 2, 2**31, 2**32, 2**32 + 1, -(2**32), 2**62, 2**63 - 1, -MAX_SEED, MAX_SEED - 2**32]
    positions = [0, 1, 63, 64, 2**16, 2**16 + 1, 2**22]
    on, keys = OnLane(len(seeds), VOCAB), set()
    for row, seed in enumerate(seeds):
        on.begin(row, seed=seed)
    for position in positions:
        params = on.plan(range(len(seeds)), [position] * len(seeds)).params
        assert params is not None
        keys |= {tuple(words) for words in params[-2:].T.tolist()}
    assert len(keys) == len(seeds) * len(positions)
    same = draw_keys(np.array([7, 7], np.uint64), np.array([5, 5], np.int32))
    assert (same[:, 0] == same[:, 1]).all()


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


@pytest.mark.parametrize("how", [{}, {"top_p": 0.9}, {"top_k": 1}, {"min_p": 1.0}], ids=str)
def test_a_draw_as_unlikely_as_there_is_lets_no_other_token_win(how: dict[str, Any]) -> None:
    """A uniform number that is rounded up to 1 makes noise of minus infinity, as tokens have that are left
    out. Beside a random row, a greedy one is chosen by no noise; and the only token that a filter leaves is
    chosen whatever its draw."""
    likely, logits, on = 7, torch.zeros(2, VOCAB), OnLane(2, VOCAB)
    logits[:, likely] = 9.0
    on.begin(0, temperature=0.0)
    on.begin(1, **how)
    plan = on.plan([0, 1], [5, 5])
    assert plan.params is not None
    for token in (3, likely):
        keys = keys_whose_noise_is_infinite_at(token)
        assert gumbel_noise(keys, VOCAB)[0, token] == -torch.inf, "the one draw in millions"
        params = torch.from_numpy(plan.params.copy())
        params[-2:] = keys
        found = on.sample(logits, [0, 1], plan, params).tokens.tolist()
        assert found[0] == likely and (found[1] == likely or not ({"top_k", "min_p"} & how.keys()))


@pytest.mark.parametrize("call", ["start", "sample"])
def test_the_state_of_rows_is_touched_by_work_of_the_lane_alone(call: str) -> None:
    """A step that is still running counts tokens of the row's last request: a call outside the lane's order
    is refused."""
    on, start = OnLane(1, VOCAB), start_of(0, presence_penalty=1.0)
    on.rows.start(start)
    plan, rows = on.plan([0], [0]), torch.zeros(1, dtype=torch.int32)
    assert plan.params is not None
    given = (start,) if call == "start" else (LOGITS[None], rows, plan, torch.from_numpy(plan.params))
    with pytest.raises(InvariantBroken, match="used outside lane compute"):
        getattr(on.sampler, call)(*given)
    on.lane.submit(lambda: getattr(on.sampler, call)(*given), label=call).wait_done(30)


# --------------------------------------------------------------------------------------------------- logprobs


def test_logprobs_and_ranks_match_a_plain_log_softmax() -> None:
    logits, tokens = (
        torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(2)),
        torch.tensor([0, 3, 7, 8, 2]),
    )
    found, wanted = token_logprobs(logits, tokens, 4), logits.log_softmax(-1)
    assert found.logprobs is not None and found.ranks is not None and found.top_ids is not None
    assert torch.allclose(found.logprobs, wanted[torch.arange(5), tokens])
    order = wanted.argsort(-1, descending=True)
    assert found.ranks.tolist() == [(order[i] == tokens[i]).nonzero().item() + 1 for i in range(5)]
    assert found.top_ids.tolist() == order[:, :4].tolist()
    equal = torch.tensor([[1.0, 3.0, 3.0, 2.0, 1.0]]).expand(5, -1)
    ranks = token_logprobs(equal, torch.arange(5), 0).ranks
    assert ranks is not None and ranks.tolist() == [4, 1, 1, 3, 4], "a rank counts only what is likelier"


def test_what_is_sampled_comes_through_one_packed_copy_unchanged() -> None:
    """Numbers are carried as the bits of 32-bit words: minus infinity and the smallest logprob included."""
    logits, tokens = (
        torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3)),
        torch.tensor([4, 0, 8]),
    )
    logits[0, 4] = -torch.inf
    output = token_logprobs(logits, tokens, 3)
    words = output.packed().numpy()
    assert words.shape == (3, packed_width(3)) and words.dtype == np.int32
    floats = words.view(np.float32)
    found = [words[:, 0], floats[:, 1], words[:, 2], words[:, 3:6], floats[:, 6:]]
    given = output.tokens, output.logprobs, output.ranks, output.top_ids, output.top_logprobs
    for got, want in zip(found, given, strict=True):
        assert want is not None and got.tolist() == want.tolist()
    assert floats[0, 1] == -np.inf
    assert SampleOutput(torch.tensor([5, 6])).packed().tolist() == [5, 6] and packed_width(-1) == 1
    assert token_logprobs(logits, tokens, 0).packed().shape == (3, packed_width(0))


@pytest.mark.parametrize("num_values", [1, 2, 5, 300])
def test_equally_likely_alternatives_come_by_their_ids_whatever_else_is_asked_for(num_values: int) -> None:
    """In bfloat16 many logits are equal. The greedy token is the first of them, and a request that wants
    fewer gets the first ones."""
    for seed, num_top in itertools.product(range(8), (1, 3, 20)):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randint(num_values, (seed % 4 + 1, 300), generator=generator).to(torch.bfloat16)
        logits[0, :3] = -torch.inf
        chosen = logits.argmax(dim=-1)
        assert token_logprobs(torch.full_like(logits, torch.nan), chosen, num_top).top_ids is not None
        output = token_logprobs(logits, chosen, num_top)
        wanted = [
            sorted(range(300), key=lambda token: (-row[token], token))[:num_top] for row in logits.tolist()
        ]
        assert output.top_ids is not None and output.top_ids.tolist() == wanted
        assert output.top_ids[:, 0].tolist() == chosen.tolist()
        logprobs = logits.float().log_softmax(dim=-1).gather(1, torch.tensor(wanted))
        assert output.top_logprobs is not None and torch.equal(output.top_logprobs, logprobs)
