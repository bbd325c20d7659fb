"""Drafts in the engine: whatever is proposed, requests get what they get without. Proposals here come from a
script that knows the right answer and spoils some of it, so that every number of drafts is kept now and then;
both where the host reads each result before it plans, and where it plans ahead and the device works out where
rows begin. Everything runs under the sanitizer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.contract import FinishReason, StepPlan, Thought, Waits
from penstock.engine.engine import Engine
from penstock.engine.execution import sampler
from penstock.engine.scheduling.drafts import Decoding
from penstock.engine.scheduling.stages import Life, RunningRequest
from penstock.speculation.length import StepCosts
from penstock.speculation.ngram import NgramProposer
from tests.support.driving import Collected, generate, run_all, submit
from tests.support.forced import forced

Make = Callable[..., Engine]
Prompts = Callable[..., list[int]]
PLANS = pytest.mark.parametrize("ahead", [False, True], ids=["reads first", "plans ahead"])
SAMPLED = {"temperature": 0.9, "seed": 11}


class Script:
    """Implements `Drafter`: proposes what the request will say, with mistakes."""

    def __init__(self, ahead: bool, right_share: float = 0.7, most: int = 8, seed: int = 0) -> None:
        self.needs_results, self.num_ahead = not ahead, 0
        self.answers: dict[str, Sequence[int]] = {}
        self.seen: list[tuple[int, int]] = []  # drafts, and those kept
        self.ended_ids: list[str] = []
        self.ended_texts: list[Sequence[int]] = []
        self.default: Sequence[int] = ()  # the answer of requests that are not in `answers`
        self._right_share, self._most, self._random = right_share, most, random.Random(seed)

    def started(self, life: Life) -> None:
        """Each may have drafts at any time."""

    def considers(self, num_requests: int) -> bool:
        return True

    def wants(self, running: RunningRequest) -> bool:
        return True

    def propose(self, requests: Sequence[Decoding], num_requests: int) -> Sequence[tuple[int, ...]]:
        return [self._drafts(one) for one in requests]

    def _drafts(self, one: Decoding) -> tuple[int, ...]:
        num = self._random.randint(0, min(one.most, self._most))
        first = one.life.num_expected - one.life.num_prompt
        answer = self.answers.get(one.life.request.id, self.default)
        right = [*answer[first : first + num], *([0] * num)][:num]
        return tuple(
            token if self._random.random() < self._right_share else self._random.randrange(500)
            for token in right
        )

    def saw(self, life: Life, num_drafts: int, num_kept: int) -> None:
        self.seen.append((num_drafts, num_kept))

    def ended(self, life: Life) -> None:
        self.ended_ids.append(life.request.id)
        self.ended_texts.append(life.tokens[life.num_prompt :])


def scripted(
    make_engine: Make, ahead: bool, right_share: float = 0.7, seed: int = 0, **settings: Any
) -> tuple[Engine, Script]:
    engine = make_engine(speculate="ngram", **settings)
    script = Script(ahead, right_share, seed=seed)
    engine.parts.scheduler._drafts.drafter, engine.parts.speculation = script, None
    return engine, script


def answered(
    engine: Engine, script: Script, prompt: Sequence[int], right: Collected, **sampling: Any
) -> Collected:
    """Its drafts are made from what `right` got."""
    found = submit(engine, prompt, **sampling)
    script.answers[found.request_id] = right.tokens
    return found


def assert_same(found: Collected, right: Collected) -> None:
    assert found.error is None and found.finish is right.finish
    assert found.tokens == right.tokens
    assert len(found.logprobs) == len(right.logprobs)
    for ours, theirs in zip(found.logprobs, right.logprobs, strict=True):
        assert ours.token == theirs.token and ours.rank == theirs.rank
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    SAMPLED,
    {**SAMPLED, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs": 2},
    {**SAMPLED, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {**SAMPLED, "logit_bias": ((7, 4.0), (9, -100.0))},
    {"prompt_logprobs": 2, "logprobs": 2},
    {"min_tokens": 17, "stop_token_ids": frozenset(range(0, 500, 2))},
    {**SAMPLED, "min_tokens": 17, "stop_token_ids": frozenset(range(0, 500, 2))},
    {"thought": Thought(17, True, (), (60, 47))},
    {**SAMPLED, "thought": Thought(18, True, (), (60, 47))},
]


@PLANS
@pytest.mark.parametrize("options", OPTIONS, ids=[",".join(options) or "greedy" for options in OPTIONS])
def test_a_request_gets_the_tokens_and_scores_of_plain_decoding(
    options: dict[str, Any], ahead: bool, make_engine: Make, prompts: Prompts
) -> None:
    plain = make_engine()
    engine, script = scripted(make_engine, ahead)
    for n, length in enumerate((1, 16, 17, 40)):
        right = generate(plain, prompts(length, seed=n), max_tokens=32, **options)
        found = answered(engine, script, prompts(length, seed=n), right, max_tokens=32, **options)
        run_all(engine)
        engine.check()
        assert_same(found, right)
    assert len({kept for _, kept in script.seen}) >= 4, "all sorts of lengths are kept"
    assert any(num > kept for num, kept in script.seen) and any(num == kept > 2 for num, kept in script.seen)


@PLANS
def test_many_requests_share_steps(ahead: bool, make_engine: Make, prompts: Prompts) -> None:
    """Some with drafts, some without, beside prompts; some are cancelled."""
    choose = random.Random(0)
    plain = make_engine(blocks=512)
    engine, script = scripted(make_engine, ahead, blocks=512, host_blocks=512, max_batch=6)
    pairs = []
    for n in range(14):
        options: dict[str, Any] = choose.choice(OPTIONS)
        length, num_tokens = choose.randint(1, 150), choose.randint(1, 50)
        num_tokens = max(num_tokens, options.get("min_tokens", 0))
        prompt = prompts(length, seed=n % 5)
        right = generate(plain, prompt, max_tokens=num_tokens, **options)
        found = answered(engine, script, prompt, right, max_tokens=num_tokens, **options)
        if choose.random() < 0.3:
            script.answers.pop(found.request_id)  # nothing right is proposed for it
        if choose.random() < 0.15:
            engine.cancel(found.request_id)
            continue
        pairs.append((found, right))
        for _ in range(choose.randint(0, 9)):
            engine.step()
    run_all(engine)
    engine.check()
    for found, right in pairs:
        assert_same(found, right)
    assert len(script.ended_ids) == 14


@PLANS
@pytest.mark.parametrize("options", [{}, {**SAMPLED, "presence_penalty": 0.7}], ids=["greedy", "sampled"])
def test_beside_chunks_of_one_token_that_sample_nothing_everybody_gets_their_own_token(
    options: dict[str, Any], ahead: bool, make_engine: Make, prompts: Prompts
) -> None:
    """A prompt that is only scored may end with a chunk of one token. It looks like a decode, and has no
    place among the samples."""
    plain = make_engine()
    engine, script = scripted(make_engine, ahead)
    right = generate(plain, prompts(20, seed=1), max_tokens=60, **options)
    pairs = [(answered(engine, script, prompts(20, seed=1), right, max_tokens=60, **options), right)]
    for n in range(6):
        theirs = generate(plain, prompts(10, seed=100 + n), max_tokens=5, **options)
        submit(engine, prompts(65, seed=50 + n), max_tokens=0)
        engine.step()
        pairs.append(
            (answered(engine, script, prompts(10, seed=100 + n), theirs, max_tokens=5, **options), theirs)
        )
        for _ in range(3):
            engine.step()
    run_all(engine)
    engine.check()
    for found, expected in pairs:
        assert_same(found, expected)


@PLANS
def test_under_retraction_it_is_the_same(ahead: bool, make_engine: Make, prompts: Prompts) -> None:
    """Memory is promised several times over, so that requests lose theirs in the middle of a draft and go on
    from what was saved."""
    plain = make_engine(blocks=512)
    engine, script = scripted(
        make_engine,
        ahead,
        right_share=0.4,
        blocks=24,
        host_blocks=512,
        overcommit=3.0,
        max_batch=6,
        max_model_len=256,
    )
    pairs = []
    for n in range(16):
        prompt = prompts(20 + 7 * n, seed=n)
        options = OPTIONS[n % len(OPTIONS)]
        right = generate(plain, prompt, max_tokens=90, **options)
        pairs.append((answered(engine, script, prompt, right, max_tokens=90, **options), right))
    run_all(engine)
    engine.check()
    for found, right in pairs:
        assert_same(found, right)
    assert engine.stats().retractions > 3 and any(kept for _, kept in script.seen)


@PLANS
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_it_ends_where_plain_decoding_ends(
    num_tokens: int, ahead: bool, make_engine: Make, prompts: Prompts
) -> None:
    """By length, and by a token that stops it in the middle of kept drafts: nothing behind it is told or
    kept."""
    plain = make_engine()
    engine, script = scripted(make_engine, ahead, right_share=1.0)
    prompt = prompts(21)
    right = generate(plain, prompt, max_tokens=40)
    short = answered(engine, script, prompt, right, max_tokens=num_tokens)
    run_all(engine)
    assert short.tokens == right.tokens[:num_tokens] and short.finish is FinishReason.LENGTH
    stop = right.tokens[10 + num_tokens]
    place = right.tokens.index(stop)
    stopped = answered(engine, script, prompt, right, max_tokens=40, stop_token_ids=frozenset({stop}))
    run_all(engine)
    assert stopped.tokens == right.tokens[:place] and stopped.finish is FinishReason.STOP
    assert stopped.events[-1].stop_token == stop
    engine.check()


LOOPS = tuple((token, 40.0) for token in (3, 5, 7, 11, 13))  # a greedy text of these says the same for long


def timed(engine: Engine) -> Engine:
    """Every step takes as long, with drafts or without."""
    if (speculation := engine.parts.speculation) is not None:
        speculation.measure(lambda costs: StepCosts((1, 2, 4, 8, 16), (1e-3,) * 5))
    return engine


def turns_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the engine does, in order: it launches steps, with drafts or without, and reads results."""
    done: list[str] = []
    launch, read = engine.turns.launch, engine.turns.read

    def launched(plan: StepPlan, waits: Waits) -> Any:
        done.append("drafts" if any(chunk.num_logits > 1 for chunk in plan.chunks) else "launch")
        return launch(plan, waits)

    def was_read(step: Any) -> None:
        done.append("read")
        read(step)

    monkeypatch.setattr(engine.turns, "launch", launched)
    monkeypatch.setattr(engine.turns, "read", was_read)
    return done


def test_where_a_text_does_not_repeat_itself_steps_are_launched_and_read_as_without_speculation(
    make_engine: Make, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []
    for proposer in (None, "ngram"):
        engine = timed(make_engine(speculate=proposer))
        done.append(turns_of(engine, monkeypatch))
        found = [
            submit(engine, prompts(20, seed=n), max_tokens=48, temperature=2.0, seed=n) for n in range(4)
        ]
        run_all(engine)
        assert all(len(one.tokens) == 48 for one in found)
    plain, looked = done
    assert looked == plain and "drafts" not in looked


def test_a_text_that_repeats_itself_gets_drafts_within_sixteen_tokens(
    make_engine: Make, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, engine = make_engine(), timed(make_engine(speculate="ngram"))
    done = turns_of(engine, monkeypatch)
    prompt = prompts(40, seed=1)
    right = generate(plain, prompt, max_tokens=110, logit_bias=LOOPS)
    found = submit(engine, prompt, max_tokens=110, logit_bias=LOOPS)
    run_all(engine)
    assert_same(found, right)
    assert done[: done.index("drafts")].count("read") <= 16
    assert engine.stats().steps < 60


def test_a_proposer_that_fails_costs_its_request_the_drafts_alone(
    make_engine: Make, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others go on with theirs, and nothing is said to anybody."""
    plain, engine = make_engine(), make_engine(speculate="ngram")
    forced(engine)
    prompt = prompts(8, seed=1) * 4
    right = generate(plain, prompt, max_tokens=40)
    whole = NgramProposer.propose
    failed: list[NgramProposer] = []

    def propose(self: NgramProposer, history: Sequence[int], k: int) -> tuple[int, ...]:
        if not failed or self in failed:
            failed.append(self)
            raise RuntimeError("no idea")
        return whole(self, history, k)

    monkeypatch.setattr(NgramProposer, "propose", propose)
    found = [submit(engine, prompt, max_tokens=40), submit(engine, prompt, max_tokens=40)]
    run_all(engine)
    for one in found:
        assert_same(one, right)
    assert len(failed) == 1 and sum(event.drafted for event in found[0].events) == 0
    assert sum(event.drafted for event in found[1].events) > 0


def test_a_step_that_fails_over_drafts_ends_its_requests_and_no_others(
    make_engine: Make, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_engine()
    engine, script = scripted(make_engine, ahead=True)
    right = generate(plain, prompts(20), max_tokens=30)
    first = answered(engine, script, prompts(20), right, max_tokens=30)
    kept, calls = sampler.kept_tokens, []

    def fail(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("broken")
        return kept(*args)

    monkeypatch.setattr(sampler, "kept_tokens", fail)
    run_all(engine)
    assert first.finish is FinishReason.ERROR and "broken" in (first.error or "")
    second = answered(engine, script, prompts(20), right, max_tokens=30)
    run_all(engine)
    engine.check()
    assert_same(second, right)
