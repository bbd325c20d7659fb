"""Every two sampling options together, over HTTP, against a reference in float64: tokens, text, scores,
offsets, reasons and counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.server import schema
from penstock.testing.tiny_models import TINY_LLAMA, tiny_tensors, tiny_tokenizer, write_tiny_model
from tests.e2e.server.fuzz_cases import ADAPTER, MODEL, Case
from tests.e2e.server.fuzz_json import encode
from tests.e2e.server.fuzz_oracles import Choice, generated
from tests.e2e.server.fuzz_target import Target
from tests.e2e.server.sampling_reference import Expected, Weights, expected
from tests.pairwise import pairwise
from tests.support.adapters import adapter_tensors, merged

TOLERANCE = 2e-3  # of a logprob in float32
# of scores: closer decisions are not float32's to make; choose another seed or value where a case has one
LEAST_MARGIN = 1e-5
TOKENIZER = tiny_tokenizer()
SMILE = "\U0001f600"  # four tokens, one character

# What every option does, and what it does not. Absent ones are null, which is the default.
SHARED: dict[str, list[Any]] = {
    "model": [MODEL, ADAPTER],
    "temperature": [None, 0, 0.6, 1.7],
    "top_p": [None, 0.5, 0.93],
    "top_k": [None, 3, 60],
    "min_p": [None, 0.02, 0.3],
    "presence_penalty": [None, 1.3, -0.8],
    "frequency_penalty": [None, 0.9, -0.6],
    "repetition_penalty": [None, 1.6, 0.3],
    "seed": [5, -12, 2**63 - 1],
    "n": [None, 3],
    "stop": [None, "e", ["qqq", " the", "n", "on"]],
    "stop_token_ids": [None, list(range(3, 500, 9))],
    "ignore_eos": [None, True],
    "stream": [None, True],
    "cache_salt": [None, "mine"],
    "max_tokens": [9, 0, 1, 24],
}
COMPLETIONS = {
    **SHARED,
    "prompt": [
        "When the gate opens too early",
        [40, 2, 300, 2, *range(60, 90)],
        ["x", "the lazy dog"],
        f"a {SMILE}{SMILE}b",
        [[200, 130, 88], [11]],
    ],
    "logprobs": [None, 0, 4, 20],
    "echo": [None, True],
}
CHAT = {
    **SHARED,
    "messages": [
        [{"role": "user", "content": "open the gate"}],
        [
            {"role": "system", "content": "x"},
            {"role": "user", "content": [{"type": "text", "text": "y"}, {"type": "text", "text": SMILE}]},
        ],
    ],
    "logprobs": [None, True],
    "top_logprobs": [None, 3],
}
# Not about sampling, or another name of one that is.
UNUSED = {
    "stream_options",
    "user",
    "max_completion_tokens",
    "response_format",
    "priority",
    "session_id",
    "prompt_cache_key",
    "cache_hint",
}
UNUSED |= {"kv_residency", "kv_pin_spans", "snapshot"}
# they replace what is sampled from
UNUSED |= {"structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
UNUSED |= {"tools", "tool_choice", "parallel_tool_calls"}
UNUSED |= {"logit_bias", "min_tokens"}  # cpu/engine: execution/test_sampler.py and test_combined_requests.py
# cpu/engine/test_token_rules.py and cpu/server/test_server_vllm_fields.py
UNUSED |= {"allowed_token_ids", "bad_words", "prompt_logprobs", "truncate_prompt_tokens"}
# What is shown, not what is sampled.
UNUSED |= {
    "return_token_ids",
    "return_tokens_as_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
}
# What stands in the prompt.
UNUSED |= {"add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
UNUSED |= {"reasoning_effort", "thinking_token_budget"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with Target(tmp_path_factory.mktemp("pairs")) as started:
        yield started


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Weights]:
    folder = tmp_path_factory.mktemp("reference")
    base = tiny_tensors(TINY_LLAMA)
    joined = merged(base, adapter_tensors(TINY_LLAMA, 0), 2.0)
    return {
        name: Weights(write_tiny_model(folder / name, tensors=tensors))
        for name, tensors in ((MODEL, base), (ADAPTER, joined))
    }


def prompts_of(fields: dict[str, Any]) -> list[tuple[tuple[int, ...], str]]:
    """Token ids and text of each prompt."""
    if "messages" in fields:
        text = "".join(
            f"<|im_start|>{turn['role']}\n{said(turn['content'])}<|im_end|>\n" for turn in fields["messages"]
        )
        return [(tuple(TOKENIZER.encode(text + "<|im_start|>assistant\n").ids), "")]
    prompt = fields["prompt"]
    items = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    texts = [
        item if isinstance(item, str) else TOKENIZER.decode(item, skip_special_tokens=False) for item in items
    ]
    return [
        (tuple(TOKENIZER.encode(item).ids if isinstance(item, str) else item), text)
        for item, text in zip(items, texts, strict=True)
    ]


def said(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def seed_of(seed: int, choice: int) -> int:
    """Past the largest seed it goes on from the smallest."""
    largest = 2**63 - 1
    return seed + choice if seed + choice <= largest else seed + choice - 2 * largest - 1


def answers(weights: Weights, fields: dict[str, Any]) -> tuple[list[Expected], int]:
    """The choices in order, and the tokens of all prompts."""
    asked = dict(fields)
    if "messages" in fields:
        asked["logprobs"] = fields.get("top_logprobs", 0) if fields.get("logprobs") else None
    prompts = prompts_of(fields)
    choices = [
        expected(weights, ids, text, seed_of(fields["seed"], i), asked)
        for ids, text in prompts
        for i in range(fields.get("n") or 1)
    ]
    return choices, sum(len(ids) for ids, _ in prompts)


def check_choice(found: Choice, wanted: Expected, chat: bool) -> None:
    assert (found.text, found.finish, list(found.tokens)) == (wanted.text, wanted.finish, wanted.labels)
    assert chat or list(found.offsets) == wanted.offsets
    assert list(found.logprobs) == pytest.approx(wanted.logprobs, abs=TOLERANCE)
    for got, top, name, logprob in zip(found.tops, wanted.tops, wanted.labels, wanted.logprobs, strict=False):
        if top is None:
            assert got is None
        else:
            check_top(got, top if chat else {**top, name: logprob})


def check_top(got: dict[str, float], top: dict[str, float]) -> None:
    """The same alternatives; where two are about as likely as the last one, either may be it."""
    assert len(got) == len(top)
    for name in {*got, *top}:
        one, other = got.get(name, min(got.values())), top.get(name, min(top.values()))
        assert one == pytest.approx(other, abs=TOLERANCE), name


def check(target: Target, weights: dict[str, Weights], path: str, fields: dict[str, Any]) -> list[Expected]:
    wanted, num_prompt = answers(weights[fields["model"]], fields)
    margin = min(choice.margin for choice in wanted)
    assert margin > LEAST_MARGIN, f"too close to call ({margin:.1e}): {fields}"
    case = Case("POST", path, encode(fields), fields=fields, legal=True)
    got = generated(case, target.judged(case))
    for found, one in zip(got.choices, wanted, strict=True):
        check_choice(found, one, path.startswith("/v1/chat"))
    if got.usage is not None:
        assert got.usage["prompt_tokens"] == num_prompt
        assert got.usage["completion_tokens"] == sum(choice.num_tokens for choice in wanted)
    return wanted


def cases_of(options: dict[str, list[Any]]) -> list[dict[str, Any]]:
    cases = [{name: value for name, value in case.items() if value is not None} for case in pairwise(options)]
    for case in cases:
        if case.get("top_logprobs") and not case.get("logprobs"):
            del case["top_logprobs"]
    return cases


@pytest.mark.parametrize(
    ("path", "options"),
    [("/v1/completions", COMPLETIONS), ("/v1/chat/completions", CHAT)],
    ids=["completions", "chat"],
)
def test_every_two_options_together_are_answered_as_the_reference_says(
    target: Target, weights: dict[str, Weights], path: str, options: dict[str, list[Any]]
) -> None:
    endings: set[tuple[str, bool]] = set()
    for number, fields in enumerate(cases_of(options)):
        try:
            wanted = check(target, weights, path, fields)
        except AssertionError as error:
            raise AssertionError(
                f"case {number}, {Case('POST', path, encode(fields)).curl(target.url)}\n{error}"
            ) from error
        endings |= {(choice.finish, bool(choice.num_tokens)) for choice in wanted}
    assert endings == {("stop", True), ("length", True), ("length", False)}, (
        "some end by a stop, some by length, some at once"
    )
    target.rest.check()


@pytest.mark.parametrize(("body", "options"), [(schema.CompletionBody, COMPLETIONS), (schema.ChatBody, CHAT)])
def test_no_option_is_left_out(body: type, options: dict[str, list[Any]]) -> None:
    import msgspec.inspect as mi

    fields = {
        field.encode_name for field in mi.type_info(body).fields if not isinstance(field.type, mi.NoneType)
    }
    assert fields - UNUSED == set(options)
