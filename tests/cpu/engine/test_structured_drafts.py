"""Drafts under grammars: each draft has a mask of its own, and an answer ends where it ends without drafts.
The proposals know the right answer and spoil some of it; everything runs under the sanitizer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="structured output is an extra")
from penstock.config import SpeculationConfig
from penstock.contract import FinishReason, Grammar, Thought
from penstock.engine.engine import Engine
from penstock.engine.execution.grammars import Matcher
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.testing.sanitized import build_sanitized, check_silent
from tests.cpu.engine.test_speculation import SAMPLED, Script, answered, assert_same, scripted
from tests.support.driving import Collected, generate, run_all, tiny_config
from tests.support.forced import forced

Make = Callable[..., Engine]
Prompts = Callable[..., list[int]]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 4, "maxItems": 9}},
    "required": ["a"],
}
GRAMMARS = {
    "regex": Grammar("regex", "([a-f]{3}[0-9]){7}"),
    "a short choice": Grammar("choice", '["yes", "no, not at all"]'),
    "json": Grammar("json_schema", json.dumps(SCHEMA)),
}


class Overreaching(Script):
    """Proposes tokens behind the end of the answer, too."""

    def _drafts(self, one: Any) -> tuple[int, ...]:
        answer = self.answers.get(one.life.request.id, ())
        if answer and not isinstance(answer, Longer):
            self.answers[one.life.request.id] = Longer([*answer, *b"abcabcabc"])
        return super()._drafts(one)


class Longer(list[int]):
    """An answer, and what is said behind its end."""


def formed(engine: Engine, prompt: list[int], grammar: Grammar, **options: Any) -> Collected:
    asked = {"grammar": grammar, "ignore_eos": False, "max_tokens": 60, **options}
    return generate(engine, prompt, **asked)


@pytest.mark.parametrize("options", [{"logprobs": 2}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", GRAMMARS)
def test_an_answer_with_a_grammar_is_that_of_plain_decoding(
    kind: str, options: dict[str, Any], make_engine: Make, prompts: Prompts
) -> None:
    plain = make_engine()
    engine, _ = scripted(make_engine, False)
    script = engine.parts.scheduler._drafts.drafter = Overreaching(False, 0.8)
    for seed in range(3):
        right = formed(plain, prompts(20, seed), GRAMMARS[kind], **options)
        asked = {"grammar": GRAMMARS[kind], "ignore_eos": False, "max_tokens": 60, **options}
        found = answered(engine, script, prompts(20, seed), right, **asked)
        run_all(engine)
        engine.check()
        assert_same(found, right)
        assert kind == "json" or found.finish is FinishReason.STOP
    assert sum(kept for _, kept in script.seen) > 5 and any(num > kept for num, kept in script.seen)


def test_requests_with_and_without_grammars_share_steps_with_drafts(
    make_engine: Make, prompts: Prompts
) -> None:
    """Some reason before they answer: drafts stop before the first mask. Memory is promised several times
    over, and some requests are cancelled."""
    r = random.Random(1)
    plain = make_engine(blocks=200)
    engine, script = scripted(
        make_engine, False, blocks=24, host_blocks=300, overcommit=3.0, max_batch=5, max_model_len=256
    )
    pairs: list[tuple[Collected, Collected]] = []
    for number in range(14):
        options: dict[str, Any] = {
            "max_tokens": r.randint(1, 60),
            **r.choice([{}, {**SAMPLED, "seed": number}]),
        }
        kind = r.choice([*GRAMMARS, None, None])
        if kind is not None:
            options |= {"grammar": GRAMMARS[kind], "ignore_eos": False}
            if r.random() < 0.3:
                options["thought"] = Thought(9, True, (), (60, 47))
        prompt = prompts(r.randint(1, 60), seed=number)
        right = generate(plain, prompt, **options)
        pairs.append((answered(engine, script, prompt, right, **options), right))
        for _ in range(r.randint(0, 5)):
            engine.step()
        if r.random() < 0.15:
            engine.cancel(r.choice(pairs)[0].request_id)
    run_all(engine)
    engine.check()
    for found, right in pairs:
        if found.finish is FinishReason.CANCELLED:
            assert found.tokens == right.tokens[: len(found.tokens)]
        else:
            assert_same(found, right)


def test_a_draft_is_not_kept_against_the_grammar(
    make_engine: Make, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: only the first token of a step has a mask. What the model says after a draft without a
    grammar is kept."""

    def only_first(own: Matcher, row: int, drafts: Any, words: Any) -> int | None:
        most = FILL(own, row, drafts, words)
        words[row + 1 : row + 1 + len(drafts)] = -1
        return most

    grammar = Grammar("regex", "[ab]{30}")
    right = formed(make_engine(), prompts(20), grammar)
    answers = []
    for fill in (FILL, only_first):
        monkeypatch.setattr(Matcher, "fill_drafted", fill)
        engine, script = scripted(make_engine, False, 1.0)
        found = answered(engine, script, prompts(20), right, grammar=grammar, ignore_eos=False, max_tokens=40)
        run_all(engine)
        answers.append(found.tokens)
    assert answers[0] == right.tokens != answers[1]


FILL = Matcher.fill_drafted


def test_lookups_draft_under_a_grammar(make_engine: Make, prompts: Prompts) -> None:
    """What repeats itself in an answer that a grammar allows is found."""
    plain, engine = make_engine(), make_engine(speculate="ngram")
    forced(engine)
    grammar = Grammar("regex", "(abcdefgh){6}")
    right = formed(plain, prompts(20), grammar)
    found = formed(engine, prompts(20), grammar)
    assert_same(found, right)
    assert bytes(found.tokens) == b"abcdefgh" * 6
    assert sum(event.accepted for event in found.events) > 20


@pytest.mark.parametrize("options", [{"logprobs": 2}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", GRAMMARS)
def test_drafts_that_the_device_made_have_masks_too(
    kind: str, options: dict[str, Any], make_engine: Make, prompts: Prompts
) -> None:
    """The host reads them with the result of the step that made them. The draft model is the target, and
    knows nothing of the grammar."""
    plain, (engine, sanitizer) = make_engine(), drafting_engine()
    drafted = accepted = 0
    for seed in range(3):
        found = formed(engine, prompts(20, seed), GRAMMARS[kind], **options)
        assert_same(found, formed(plain, prompts(20, seed), GRAMMARS[kind], **options))
        drafted += sum(event.drafted for event in found.events)
        accepted += sum(event.accepted for event in found.events)
        engine.check()
    assert drafted > accepted >= 0 and drafted > 10
    engine.close(timeout_s=20.0)
    check_silent(sanitizer)


def test_drafts_that_the_grammar_allows_are_kept(make_engine: Make, prompts: Prompts) -> None:
    """A grammar that forbids one token of what the model says, and nothing else."""
    free = generate(make_engine(), prompts(20), max_tokens=30)
    engine, sanitizer = drafting_engine()
    grammar = Grammar("lark", "start: TEXT\nTEXT: /(.|\\n){1,400}/")
    found = formed(engine, prompts(20), grammar, max_tokens=30)
    assert sum(event.accepted for event in found.events) > 5 and len(free.tokens) == 30
    engine.close(timeout_s=20.0)
    check_silent(sanitizer)


def drafting_engine() -> tuple[Engine, Sanitizer]:
    config = replace(tiny_config(), speculation=SpeculationConfig("draft:tiny-qwen3", 4))
    engine, sanitizer = build_sanitized(config)
    forced(engine)
    return engine, sanitizer
