"""Settings in a tokenizer.json that are for training: a prompt is as long as its text, whatever they say."""

from __future__ import annotations

import tokenizers

from penstock.models.tokenizer import Tokenizer
from tests.support.embedded import embedded_tokenizer

TEXT = "A prompt of some words, none of which may be lost or added to."


def test_truncation_and_padding_of_a_vocabulary_do_not_touch_prompts() -> None:
    plain = embedded_tokenizer()
    backend = tokenizers.Tokenizer.from_str(plain._backend.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=64, pad_id=0)
    saved = tokenizers.Tokenizer.from_str(backend.to_str())  # as it comes from a file
    assert len(saved.encode(TEXT).ids) == 64, "settings that do nothing prove nothing"
    assert Tokenizer(saved).encode(TEXT) == plain.encode(TEXT)
