"""Answers that have to be what a grammar says: whatever the weights want, and whatever happens to the request
meanwhile."""

from __future__ import annotations

import json
import random
import re
import threading
from typing import Any

import psutil
import pytest

from penstock.contract import FinishReason, Grammar
from penstock.engine import sizing
from penstock.engine.engine import Engine
from penstock.engine.execution.replays import cuda_buckets
from penstock.errors import InvalidRequest
from penstock.testing.sanitized import build_sanitized, check_silent
from tests.support.driving import Collected, generate, run_all, submit, tiny_config
from tests.support.schemas import fits, random_schema

pytest.importorskip("llguidance", reason="structured output is an extra")

PROMPT = list(b"Say it as JSON: ")


@pytest.fixture(scope="module")
def engine() -> Any:
    engine, sanitizer = build_sanitized(tiny_config(blocks=1024, max_batch=32))
    yield engine
    engine.close(timeout_s=20.0)
    check_silent(sanitizer)


def text_of(engine: Engine, answer: Collected) -> str:
    return engine.tokenizer.decode(answer.tokens)


def schema_of(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def constrained(engine: Engine, grammar: Grammar, **sampling: Any) -> Collected:
    return submit(
        engine,
        PROMPT,
        **{"grammar": grammar, "ignore_eos": False, "temperature": 1.0, "max_tokens": 400, **sampling},
    )


def test_every_answer_fits_its_schema_whatever_random_weights_want(engine: Engine) -> None:
    rng = random.Random(16)
    schemas = [random_schema(rng) for _ in range(100)]
    answers = [constrained(engine, schema_of(schema), seed=seed) for seed, schema in enumerate(schemas)]
    run_all(engine)
    over = [
        (answer, schema)
        for answer, schema in zip(answers, schemas, strict=True)
        if answer.finish is not FinishReason.LENGTH
    ]
    assert len(over) > 80
    for answer, schema in over:
        assert answer.finish is FinishReason.STOP, answer.error
        assert fits(json.loads(text_of(engine, answer)), schema), (text_of(engine, answer), schema)


def test_a_model_with_experts_keeps_to_a_schema() -> None:
    engine, sanitizer = build_sanitized(tiny_config("tiny-qwen3-moe", speculate="ngram", max_batch=8))
    rng = random.Random(17)
    schemas = [random_schema(rng) for _ in range(8)]
    answers = [constrained(engine, schema_of(schema), seed=seed) for seed, schema in enumerate(schemas)]
    run_all(engine)
    over = [pair for pair in zip(answers, schemas, strict=True) if pair[0].finish is FinishReason.STOP]
    assert len(over) > 4
    assert all(fits(json.loads(text_of(engine, answer)), schema) for answer, schema in over)
    engine.close(timeout_s=20.0)
    check_silent(sanitizer)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", "[a-c]{3}-[0-9]{1,4}x"), "[a-c]{3}-[0-9]{1,4}x"),
        (Grammar("choice", json.dumps(["yes", "no", 'per"haps'])), 'yes|no|per"haps'),
        (Grammar("lark", 'start: "<" word ">"\nword: /[a-z]{1,5}/'), "<[a-z]{1,5}>"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_regular_expressions_choices_and_grammars_are_kept_to(
    engine: Engine, grammar: Grammar, pattern: str, temperature: float
) -> None:
    answer = constrained(engine, grammar, temperature=temperature, seed=3)
    run_all(engine)
    assert answer.finish is FinishReason.STOP
    assert re.fullmatch(pattern, text_of(engine, answer)), text_of(engine, answer)


def test_a_request_with_the_id_of_an_earlier_one_has_nothing_of_its_grammar(engine: Engine) -> None:
    """It gets another row, so that nobody has taken the earlier one's; and as many tokens are before it as
    the earlier one had in all."""
    prompt = [*PROMPT, *b"yes"]
    alone = generate(engine, prompt, max_tokens=5).tokens
    beside = submit(engine, PROMPT, max_tokens=20)
    earlier = submit(engine, PROMPT, id="again", grammar=Grammar("choice", '["yes"]'), ignore_eos=False)
    run_all(engine)
    assert text_of(engine, earlier) == "yes" and beside.finish is FinishReason.LENGTH
    again = generate(engine, prompt, id="again", max_tokens=5)
    assert (again.finish, again.tokens) == (FinishReason.LENGTH, alone)


def test_logprobs_are_those_of_the_model_before_the_mask(engine: Engine) -> None:
    answer = constrained(engine, Grammar("choice", '["q"]'), logprobs=2, temperature=0.0)
    free = submit(engine, PROMPT, logprobs=2, max_tokens=1)
    run_all(engine)
    assert text_of(engine, answer) == "q"
    (entry,), (wanted,) = answer.logprobs, free.logprobs
    assert entry.top == wanted.top and entry.rank > 1 and entry.logprob < wanted.logprob


def test_a_retracted_request_goes_on_within_its_grammar() -> None:
    engine, sanitizer = build_sanitized(tiny_config(blocks=24, max_batch=8, overcommit=4.0))
    grammar = Grammar("regex", "([a-f]{7}[0-9]){10}")
    answers = [constrained(engine, grammar, seed=seed, max_tokens=100) for seed in range(6)]
    run_all(engine)
    assert engine.stats().retractions > 0
    assert all(
        answer.finish is FinishReason.STOP and re.fullmatch(grammar.text, text_of(engine, answer))
        for answer in answers
    )
    engine.close(timeout_s=20.0)
    check_silent(sanitizer)


def test_in_a_captured_step_its_mask_is_its_own_though_others_before_it_sample_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, where short prompts beside decodes are captured: every chunk has a sample, whether it
    wants one or not."""
    monkeypatch.setattr(
        sizing,
        "buckets_for",
        lambda config, limits, device: cuda_buckets(limits.max_rows, limits.prefill_chunk),
    )
    engine, sanitizer = build_sanitized(tiny_config(blocks=64, max_batch=8, prefill_chunk=64))
    submit(engine, [5, *PROMPT], max_tokens=40)
    for _ in range(3):
        engine.step()
    grammar = Grammar("regex", "([a-f]{3}[0-9]){4}")
    submit(engine, [3, *PROMPT[:8]], max_tokens=0)
    answer = constrained(engine, grammar, seed=1, max_tokens=60)
    run_all(engine)
    assert re.fullmatch(grammar.text, text_of(engine, answer)), text_of(engine, answer)
    engine.close(timeout_s=20.0)
    check_silent(sanitizer)


def test_a_cancelled_constrained_request_leaves_nothing(engine: Engine) -> None:
    answers = [
        constrained(engine, Grammar("regex", "[a-f]*"), max_tokens=300, seed=seed) for seed in range(4)
    ]
    for _ in range(5):
        engine.step()
    for answer in answers:
        engine.cancel(answer.request_id)
    run_all(engine)
    assert all(answer.finish is FinishReason.CANCELLED for answer in answers)
    generate(engine, PROMPT)  # its row is taken again
    for grammar in (Grammar("regex", "ok"), None):
        answer = submit(engine, PROMPT, grammar=grammar, ignore_eos=grammar is None, max_tokens=4)
        run_all(engine)
        assert (text_of(engine, answer) == "ok") is (grammar is not None)


HOSTILE = {
    "contradiction": schema_of({"type": "integer", "minimum": 5, "maximum": 3}),
    "endless": schema_of({"$ref": "#"}),
    "far away": schema_of({"$ref": "https://example.com/a.json"}),
    "unknown keyword": schema_of({"not": {"type": "string"}}),
    "exponential": schema_of(
        {
            "allOf": [
                {"anyOf": [{"required": [f"a{i}"], "properties": {f"a{i}": {}}}, {"required": [f"b{i}"]}]}
                for i in range(16)
            ]
        }
    ),
    "deep": Grammar("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000),
    "many remainders": schema_of({"type": "integer", "multipleOf": 86_400, "minimum": 0, "maximum": 10**15}),
    "bad expression": Grammar("regex", "(a"),
    "bad grammar": Grammar("lark", "start: nothing"),
    "no choice": Grammar("choice", "[]"),
    "no strings": Grammar("choice", "[1]"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_met_is_refused_before_it_is_taken(engine: Engine, name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        constrained(engine, HOSTILE[name])
    assert refused.value.param == "structured_outputs" and len(str(refused.value)) < 2000
    assert not engine.has_work()


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "(((a{100}){100}){100}){100}"),
        Grammar("regex", "(a|b)*a(a|b){300}c"),
        schema_of(
            {
                "$defs": {
                    "t": {"type": "object", "properties": {"n": {"$ref": "#/$defs/t"}}, "required": ["n"]}
                },
                "$ref": "#/$defs/t",
            }
        ),
        schema_of({"type": "array", "items": {"type": "integer"}, "minItems": 10**9}),
        Grammar("lark", 'start: s\ns: s s | s s s | "a" | ""'),
        schema_of({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}),
    ],
    ids=["huge", "exponential", "recursive", "a billion", "ambiguous", "wide"],
)
def test_what_is_hard_to_meet_ends_with_an_answer_an_error_or_a_refusal(
    engine: Engine, grammar: Grammar
) -> None:
    try:
        answer = constrained(engine, grammar, max_tokens=40)
    except InvalidRequest:
        assert not engine.has_work()
        return
    beside = submit(engine, PROMPT, max_tokens=10)
    run_all(engine)
    assert answer.finish in (FinishReason.LENGTH, FinishReason.STOP) or (
        answer.finish is FinishReason.ERROR and answer.error
    )
    assert beside.finish is FinishReason.LENGTH and len(beside.tokens) == 10


def test_neither_a_thread_nor_a_process_outlives_an_engine_that_closes_while_a_grammar_is_being_compiled() -> (  # noqa: E501
    None
):
    threads, processes = set(threading.enumerate()), set(psutil.Process().children(recursive=True))
    engine, sanitizer = build_sanitized(tiny_config(blocks=24))
    engine.grammars.wait_compiled(Grammar("regex", "a"))
    engine.grammars.begin(
        schema_of({"type": "object", "patternProperties": {f"^p{i}.*x{i}$": {} for i in range(800)}})
    )
    assert set(psutil.Process().children(recursive=True)) - processes
    engine.close(timeout_s=20.0)
    assert not set(psutil.Process().children(recursive=True)) - processes
    assert not any(thread.name.startswith("grammar") for thread in set(threading.enumerate()) - threads)
    check_silent(sanitizer)
