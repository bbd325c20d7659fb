"""Tokens that a request rules out: allowed ids, and words that never come. Compared with biases, which reach
the same by another way, and with one token at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from penstock.contract import MAX_BIAS, FinishReason, Grammar, SamplingParams, Thought
from penstock.engine import sizing
from penstock.engine.engine import Engine
from penstock.engine.execution.replays import cuda_buckets
from penstock.engine.execution.token_rules import TokenRules
from penstock.errors import InvalidRequest
from tests.cpu.engine.test_speculation import answered, scripted
from tests.support.driving import generate, run_all, submit

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]
ALLOWED = frozenset({3, 31, 32, 63, 64, 255, 511})
DRAWS = [
    {"temperature": 0.0},
    {"temperature": 1.5, "seed": 5},
    {"temperature": 1.5, "seed": 5, "top_k": 3, "top_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": 1.0, "logprobs": 2},
]


def holds(tokens: Sequence[int], part: Sequence[int]) -> bool:
    return any(tuple(tokens[at : at + len(part)]) == tuple(part) for at in range(len(tokens)))


def one_at_a_time(
    engine: Engine, prompt: Sequence[int], num: int, banned: Sequence[Sequence[int]]
) -> list[int]:
    """Greedy tokens. A bias forbids the last token of each sequence whose others have just come."""
    found: list[int] = []
    for _ in range(num):
        lasts = {last for *before, last in banned if found[len(found) - len(before) :] == before}
        biases = tuple((token, -MAX_BIAS) for token in lasts)
        found += generate(engine, [*prompt, *found], max_tokens=1, logit_bias=biases).tokens
    return found


@pytest.mark.parametrize("draw", DRAWS)
def test_only_allowed_tokens_come_and_neighbours_get_what_they_get_alone(
    make_engine: MakeEngine, prompts: Prompts, draw: dict[str, Any]
) -> None:
    engine = make_engine()
    biases = tuple((token, MAX_BIAS) for token in ALLOWED)
    expected = generate(engine, prompts(20), max_tokens=24, logit_bias=biases, **draw)
    alone = generate(engine, prompts(20, 1), max_tokens=24, **draw)
    beside = submit(engine, prompts(20, 1), max_tokens=24, **draw)
    found = submit(engine, prompts(20), max_tokens=24, allowed_token_ids=ALLOWED, **draw)
    run_all(engine)
    assert found.finish is FinishReason.LENGTH and set(found.tokens) <= ALLOWED
    assert found.tokens == expected.tokens
    assert beside.tokens == alone.tokens and not set(beside.tokens) <= ALLOWED
    assert [one.token for one in found.logprobs] == ([] if "logprobs" not in draw else found.tokens)


def test_banned_sequences_never_come_and_their_tokens_do_elsewhere(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine, prompt = make_engine(), prompts(20)
    free = generate(engine, prompt, max_tokens=12).tokens
    banned = [[free[0]], free[2:4], free[5:8], [free[1], free[2], 7, 9]]
    found = generate(engine, prompt, max_tokens=12, bad_token_ids=tuple(map(tuple, banned)))
    assert found.finish is FinishReason.LENGTH and found.tokens == one_at_a_time(engine, prompt, 12, banned)
    assert not any(holds(found.tokens, part) for part in banned)
    pairs = tuple(itertools.pairwise(free))
    found = generate(engine, prompt, max_tokens=12, bad_token_ids=pairs)
    assert found.tokens == one_at_a_time(engine, prompt, 12, [list(pair) for pair in pairs])
    assert found.tokens[0] == free[0] and not any(holds(found.tokens, pair) for pair in pairs)


def test_a_sequence_counts_from_the_first_token_of_the_answer(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    """Also where its beginning ends the prompt."""
    engine, prompt = make_engine(), prompts(20)
    first = generate(engine, prompt, max_tokens=1).tokens[0]
    found = generate(engine, prompt, max_tokens=1, bad_token_ids=((prompt[-1], first),))
    assert found.tokens == [first]


def test_bad_words_are_their_tokens_with_and_without_a_blank_before_them(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    """The tiny model's tokens are bytes: a word with a blank has one more, and is covered already."""
    engine, prompt = make_engine(), list(b"Say it: ")
    assert engine.tokenizer.bad_token_ids((" ab", "c")) == (tuple(b"ab"), tuple(b"c"))
    free = generate(engine, prompt, max_tokens=12, allowed_token_ids=frozenset(b"abcdefgh")).tokens
    word = bytes(free[3:5]).decode()
    found = generate(
        engine, prompt, max_tokens=12, allowed_token_ids=frozenset(b"abcdefgh"), bad_words=(word, "z")
    )
    assert found.tokens[:4] == free[:4] and not holds(found.tokens, word.encode())


@pytest.mark.parametrize("ahead", [False, True], ids=["reads first", "plans ahead"])
def test_beside_requests_with_drafts_the_rules_hold(
    make_engine: MakeEngine, prompts: Prompts, ahead: bool
) -> None:
    plain = make_engine()
    right = generate(plain, prompts(20), max_tokens=30)
    pairs = tuple(itertools.pairwise(right.tokens))
    ruled = generate(plain, prompts(20), max_tokens=30, bad_token_ids=pairs)
    engine, script = scripted(make_engine, ahead)
    beside = answered(engine, script, prompts(20), right, max_tokens=30)
    found = answered(engine, script, prompts(20), right, max_tokens=30, bad_token_ids=pairs)
    run_all(engine)
    assert beside.tokens == right.tokens and found.tokens == ruled.tokens
    assert any(num_kept for _, num_kept in script.seen)


@pytest.mark.parametrize("draw", DRAWS)
def test_drafts_are_verified_under_the_rules(
    make_engine: MakeEngine, prompts: Prompts, draw: dict[str, Any]
) -> None:
    """The host knows them, so each has a mask of its own. An answer ends where no token may follow."""
    plain = make_engine()
    free = generate(plain, prompts(20), max_tokens=30, **draw).tokens
    rules = [
        {"bad_token_ids": tuple(itertools.pairwise(free[::2]))},
        {"allowed_token_ids": ALLOWED, "bad_token_ids": ((3, 3), (300, 511), (31,))},
        {"allowed_token_ids": frozenset({5, 6}), "bad_token_ids": ((5,) * 9, (6,), (6, 5, 5))},
    ]
    engine, script = scripted(make_engine, ahead=False, right_share=0.9)
    for rule in rules:
        right = generate(plain, prompts(20), max_tokens=30, **rule, **draw)
        found = answered(engine, script, prompts(20), right, max_tokens=30, **rule, **draw)
        script.answers[found.request_id] = [*right.tokens, *[5] * 30]
        run_all(engine)
        engine.check()
        assert (found.finish, found.tokens) == (right.finish, right.tokens)
    assert found.tokens == [5] * 8 and found.finish is FinishReason.STOP
    assert sum(num_kept for _, num_kept in script.seen) > 10


def test_drafts_are_verified_under_rules_and_a_grammar(make_engine: MakeEngine, prompts: Prompts) -> None:
    pytest.importorskip("llguidance", reason="structured output is an extra")
    plain = make_engine()
    engine, script = scripted(make_engine, ahead=False, right_share=0.9)
    regex = Grammar("regex", "[a-f]{20}")
    rules: list[dict[str, Any]] = [
        {"bad_token_ids": ((97, 98), (99, 99), (100,))},
        {"allowed_token_ids": frozenset(b"ab"), "bad_token_ids": (tuple(b"aaa"), tuple(b"bb"))},
        {"allowed_token_ids": frozenset(b"a"), "bad_token_ids": (tuple(b"aaaaaa"),)},
    ]
    both: dict[str, Any] = {"grammar": regex, "ignore_eos": False, "max_tokens": 30}
    for rule in rules:
        right = generate(plain, prompts(20), **both, **rule)
        found = answered(engine, script, prompts(20), right, **both, **rule)
        script.answers[found.request_id] = [*right.tokens, *b"aaaaaaaaaaaaa"]
        run_all(engine)
        engine.check()
        assert (found.finish, found.tokens, found.error) == (right.finish, right.tokens, right.error)
    assert bytes(found.tokens) == b"aaaaa" and found.finish is FinishReason.ERROR
    assert sum(num_kept for _, num_kept in script.seen) > 5


def test_a_retracted_request_goes_on_within_its_rules(make_engine: MakeEngine, prompts: Prompts) -> None:
    """Its last tokens count after it has come back: two take turns."""
    engine = make_engine(blocks=24, max_batch=8, overcommit=4.0)
    rules = {"allowed_token_ids": frozenset({5, 6}), "bad_token_ids": ((5, 5), (6, 6))}
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 100, **rules}
    found = [submit(engine, prompts(20, n), seed=n, **options) for n in range(6)]
    run_all(engine)
    assert engine.stats().retractions > 0
    for one in found:
        assert len(one.tokens) == 100 and all(a != b for a, b in itertools.pairwise(one.tokens))


def test_in_captured_steps_the_rules_hold(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(make_engine(), prompts(20), max_tokens=24, allowed_token_ids=ALLOWED).tokens
    monkeypatch.setattr(
        sizing,
        "buckets_for",
        lambda config, limits, device: cuda_buckets(limits.max_rows, limits.prefill_chunk),
    )
    engine = make_engine(blocks=64, max_batch=8, prefill_chunk=64)
    beside = submit(engine, prompts(20, 1), max_tokens=40)
    for _ in range(3):
        engine.step()
    submit(engine, prompts(9, 2), max_tokens=0)
    found = submit(engine, prompts(20), max_tokens=24, allowed_token_ids=ALLOWED)
    run_all(engine)
    assert found.tokens == expected and not set(beside.tokens) <= ALLOWED


def test_rules_and_a_grammar_hold_together(make_engine: MakeEngine) -> None:
    pytest.importorskip("llguidance", reason="structured output is an extra")
    engine, prompt = make_engine(blocks=1024), list(b"Say it: ")
    regex = Grammar("regex", "[a-f]{12}")
    both: dict[str, Any] = {"grammar": regex, "ignore_eos": False, "max_tokens": 20}
    free = generate(engine, prompt, **both)
    found = generate(engine, prompt, **both, bad_token_ids=((free.tokens[0],),))
    assert found.finish is FinishReason.STOP and len(found.tokens) == 12
    assert free.tokens[0] not in found.tokens and set(found.tokens) <= set(b"abcdef")
    few = generate(engine, prompt, **both, allowed_token_ids=frozenset(b"abxyz"))
    assert few.finish is FinishReason.STOP and len(few.tokens) == 12 and set(few.tokens) <= set(b"ab")
    unmet = generate(engine, prompt, **both, allowed_token_ids=frozenset(b"xyz"))
    assert unmet.finish is FinishReason.ERROR and "schema or grammar" in (unmet.error or "")
    # complete after three: what may follow is not allowed, nor is the end of the text
    choice = {**both, "grammar": Grammar("choice", '["abc", "abcd"]')}
    ended = generate(engine, prompt, **choice, allowed_token_ids=frozenset(b"abc"))
    assert ended.finish is FinishReason.STOP and bytes(ended.tokens) == b"abc"


def test_reasoning_ends_though_its_mark_is_ruled_out(make_engine: MakeEngine, prompts: Prompts) -> None:
    """Its length has a limit, which holds; before and after it the rules do."""
    engine = make_engine()
    thought = Thought(6, True, tuple(b"<think>"), close := tuple(b"</think>"))
    found = generate(engine, prompts(20), max_tokens=24, allowed_token_ids=ALLOWED, thought=thought).tokens
    assert tuple(found[6:14]) == close and set(found[:6]) | set(found[14:]) <= ALLOWED
    assert len(found) == 24


def test_an_answer_for_which_the_rules_leave_no_token_ends(make_engine: MakeEngine, prompts: Prompts) -> None:
    engine = make_engine()
    beside = submit(engine, prompts(20, 1), max_tokens=20)
    found = submit(
        engine, prompts(20), max_tokens=20, allowed_token_ids=frozenset({5}), bad_token_ids=((5, 5, 5),)
    )
    run_all(engine)
    assert (found.finish, found.tokens) == (FinishReason.STOP, [5, 5])
    assert beside.finish is FinishReason.LENGTH and len(beside.tokens) == 20


def test_an_answer_whose_end_is_not_allowed_goes_on(make_engine: MakeEngine, prompts: Prompts) -> None:
    engine = make_engine()
    ends: dict[str, Any] = {"stop_token_ids": frozenset({9}), "logit_bias": ((9, 50.0),)}
    over = generate(engine, prompts(20), allowed_token_ids=frozenset({9, 7}), **ends)
    assert (over.finish, over.tokens) == (FinishReason.STOP, [])
    later = generate(engine, prompts(20), allowed_token_ids=frozenset({9, 7}), min_tokens=3, **ends)
    assert (later.finish, later.tokens) == (FinishReason.STOP, [7, 7, 7])
    going = generate(engine, prompts(20), allowed_token_ids=frozenset({7}), **ends)
    assert (going.finish, going.tokens) == (FinishReason.LENGTH, [7] * 8)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"allowed_token_ids": frozenset()}, "allowed_token_ids"),
        ({"allowed_token_ids": frozenset({100_000})}, "allowed_token_ids"),
        ({"allowed_token_ids": frozenset({-1})}, "allowed_token_ids"),
        ({"allowed_token_ids": frozenset(range(70_000))}, "allowed_token_ids"),
        ({"allowed_token_ids": frozenset(b"ab"), "bad_words": ("a", "b", "cd")}, "bad_words"),
        ({"bad_words": ("",)}, "bad_words"),
        ({"bad_words": ("a" * 300,)}, "bad_words"),
        ({"bad_words": tuple(f"a{n}" for n in range(300))}, "bad_words"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(
    make_engine: MakeEngine, given: dict[str, Any], param: str
) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest) as refused:
        submit(engine, [1, 2, 3], **given)
    assert refused.value.param == param and not engine.has_work()


def test_a_mask_has_a_bit_for_each_token_that_may_come() -> None:
    params = SamplingParams(allowed_token_ids=ALLOWED, bad_token_ids=((31,), (64, 3), (63,)))
    rules, rows = TokenRules(params, 17), np.full((3, 17), -1, np.int32)
    assert rules.apply(rows, (3, 64)) is None
    found = [set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))) for row in rows]
    assert found == [ALLOWED - {31, 63}, ALLOWED - {31, 63}, ALLOWED - {31, 63, 3}]
