"""The embedded SmolLM2 against `transformers` on the same GGUF file: logits in float32 to 1e-4 of the
largest, ids and chats exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers

from penstock.config import ModelSource
from penstock.models.loader import LoadedModel
from tests.support.contiguous_kv import ContiguousKv, forward, logits_of
from tests.support.loading import load_on_cpu
from tests.support.reference import reference_model, reference_tokenizer
from tests.support.vocabularies import rendered

TOLERANCE = 1e-4

PROMPTS = {
    "fact": "The capital of France is Paris, and the capital of Italy is",
    "prose": (
        "The river had been rising since morning. By noon the lower gate was under water, and the keeper, "
        "who had seen three floods in his time, walked up to the turbine house to read the gauges himself. "
        "What he found there made him sit down."
    ),
    "code": "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + "
    "fibonacci(n - 2)\n\n\nprint(",
    "unicode": "Ünïcödé, 日本語のテキスト, кириллица, emoji 🙂🚀 and mathematics: ∑ᵢ xᵢ² ≥ 0.",
    "chat": "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
    "one token": "Hello",
}

TEXTS = [
    *PROMPTS.values(),
    "",
    " ",
    "\n",
    " \t \n\n  \r\n x",
    "trailing blanks   ",
    "a\u00a0b\u2003c\u200bd",
    "I'm you're he'll THEY'D it's o'clock",
    "1234567890 3.14159 1e-5 0x7f 10,000",
    "e\u0301 vs \u00e9, ﬁ ligature, Ω Å",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷",
    "<|im_start|><|im_end|><|endoftext|> <repo_name> <|im_star",
    "for(int i=0;i<n;++i){\n\tsum+=a[i]; // ümlaut\n}",
    "\x00\x01\x1b[31m control \x7f",
    "https://example.org/a?b=c&d=%20#e user@example.org",
    "العربية עברית हिन्दी ไทย 한국어",
    "word " * 50,
]
NUMBERS = ["x\n\n  12", "  1", "x ²½Ⅷ٣", "table:\n    1    22\n   333   4", "\t\t7"]

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a penstock? "}],
    [{"role": role, "content": f"{role} says {{{{ 'é' }}}}\n"} for role in ("user", "assistant", "user")],
    [{"role": "user", "content": ""}],
]


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_model()


@pytest.fixture(scope="module")
def their_tokenizer() -> Any:
    return reference_tokenizer()


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_on_cpu(ModelSource())


@torch.inference_mode()
def reference_logits(reference: Any, ids: list[int]) -> torch.Tensor:
    return reference(torch.tensor([ids])).logits[0]


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


def test_prefill_logits_agree_with_transformers_whole_and_in_pieces(
    loaded: LoadedModel, reference: Any
) -> None:
    for prompt in PROMPTS.values():
        ids = loaded.tokenizer.encode(prompt)
        expected = reference_logits(reference, ids)
        assert error(logits_of(loaded.model, ids), expected) < TOLERANCE
        kv = ContiguousKv(loaded.model.config, loaded.model.rope)
        pieces = [forward(loaded.model, kv, ids[at : at + 16]) for at in range(0, len(ids), 16)]
        assert error(torch.cat(pieces), expected) < TOLERANCE


@torch.inference_mode()
def test_incremental_decode_agrees_with_transformers_step_by_step(
    loaded: LoadedModel, reference: Any
) -> None:
    ids = loaded.tokenizer.encode(PROMPTS["chat"])
    kv = ContiguousKv(loaded.model.config, loaded.model.rope)
    ours = forward(loaded.model, kv, ids)[-1]
    step = reference(torch.tensor([ids]), use_cache=True)
    output = []
    for _ in range(12):
        assert error(ours, step.logits[0, -1]) < TOLERANCE
        output.append(int(ours.argmax()))
        assert output[-1] == int(step.logits[0, -1].argmax())
        ours = forward(loaded.model, kv, output[-1:])[-1]
        step = reference(torch.tensor([output[-1:]]), past_key_values=step.past_key_values, use_cache=True)
    assert "4" in loaded.tokenizer.decode(output)


@torch.inference_mode()
def test_rotary_angles_equal_those_of_transformers_at_every_position(
    loaded: LoadedModel, reference: Any
) -> None:
    cos, sin = reference.model.rotary_emb(
        torch.zeros(1), torch.arange(loaded.model.config.max_position)[None]
    )
    half = loaded.model.config.head_dim // 2
    ours = loaded.model.rope
    assert torch.equal(ours[:, :half], cos[0, :, :half]) and torch.equal(ours[:, half:], sin[0, :, :half])


# -------------------------------------------------------------------------------------------------- tokenizer


def test_ids_equal_those_of_transformers(loaded: LoadedModel, their_tokenizer: Any) -> None:
    for text in TEXTS:
        assert loaded.tokenizer.encode(text) == their_tokenizer(text)["input_ids"], text


def test_ids_of_all_numbers_equal_those_of_transformers_once_it_splits_digits(
    loaded: LoadedModel, their_tokenizer: Any
) -> None:
    """`transformers` leaves the digit rule out when it reads a GGUF file; the vocabulary was trained with
    it."""
    backend = their_tokenizer.backend_tokenizer
    words = backend.pre_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    try:
        for text in [*NUMBERS, *TEXTS]:
            assert loaded.tokenizer.encode(text) == their_tokenizer(text)["input_ids"], text
    finally:
        backend.pre_tokenizer = words


def test_decoded_text_equals_that_of_transformers(loaded: LoadedModel, their_tokenizer: Any) -> None:
    for text in TEXTS:
        ids = loaded.tokenizer.encode(text)
        for skip in (False, True):
            assert loaded.tokenizer.decode(ids, skip) == their_tokenizer.decode(ids, skip_special_tokens=skip)


def test_chats_and_the_end_token_equal_those_of_transformers(
    loaded: LoadedModel, their_tokenizer: Any, reference: Any
) -> None:
    for messages in CHATS:
        for prompt in (True, False):
            theirs = their_tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )
            assert rendered(loaded.tokenizer, messages, prompt) == theirs
    assert loaded.tokenizer.eos_ids == {their_tokenizer.eos_token_id} == {reference.config.eos_token_id}
