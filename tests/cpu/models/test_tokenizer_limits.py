"""Where a prompt of exactly the most tokens ends up, however it is cut, and which tokens of a GGUF file end a
text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.errors import InvalidRequest
from penstock.models.chat import ChatTemplate
from penstock.models.tokenizer import Tokenizer
from penstock.models.tokenizer_files import tokenizer_files
from penstock.testing.tiny_models import CHAT_TEMPLATE, tiny_tokenizer

VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>", "</s>", "<turn>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3, 3, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 3,
}


@pytest.mark.parametrize(
    "content",
    ["what is a penstock", "see <|im_end|> and <|im_start|> 12"],
    ids=["plain", "spells special tokens"],
)
@pytest.mark.parametrize("special_in_text", [False, True])
def test_a_chat_of_exactly_the_most_tokens_is_taken_and_one_more_is_not(
    content: str, special_in_text: bool
) -> None:
    """Also where it is cut in pieces, none of which is too long by itself."""
    model = Tokenizer(tiny_tokenizer(), (2,), ChatTemplate(CHAT_TEMPLATE, {}))
    messages = [{"role": "user", "content": content}] * 3
    ids = model.encode_chat(messages, special_in_text=special_in_text)
    assert model.encode_chat(messages, len(ids), special_in_text) == ids
    with pytest.raises(InvalidRequest, match=f"{len(ids) - 1} is the most") as refused:
        model.encode_chat(messages, len(ids) - 1, special_in_text)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    ("ends", "ids"),
    [
        ({}, []),
        ({"eos": 4}, [4]),
        ({"eot": 5}, [5]),
        ({"eos": 5, "eot": 4}, [4, 5]),
        ({"eos": 4, "eot": 4}, [4]),
    ],
)
def test_the_end_of_a_turn_ends_a_text_as_the_end_of_all_does(ends: dict[str, int], ids: list[int]) -> None:
    metadata = VOCABULARY | {f"tokenizer.ggml.{name}_token_id": id for name, id in ends.items()}
    assert json.loads(tokenizer_files(metadata, "x")["generation_config.json"]) == {"eos_token_id": ids}
