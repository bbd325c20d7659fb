"""Tokenizers: bytes of tokens, special ones, chat templates, and files that cannot be used."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from penstock.errors import InvalidRequest, ModelError
from penstock.models.chat import ChatTemplate
from penstock.models.llama import TINY_LLAMA
from penstock.models.tokenizer import NFC_SHRINKS, ByteTokenizer, Tokenizer
from penstock.models.tokenizer_files import load_tokenizer
from penstock.testing.tiny_models import CHAT_TEMPLATE, tiny_tokenizer, write_tiny_model
from tests.support.embedded import embedded_tokenizer
from tests.support.vocabularies import rendered, vocabulary

REAL = embedded_tokenizer()
VOCABULARY = REAL.vocab_size
MESSAGES = [{"role": "user", "content": "What is a penstock?"}]


def test_special_tokens_are_recognised_in_text_and_skipped_on_request() -> None:
    ids = REAL.encode("<|im_start|>user\nhi<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2
    assert REAL.is_special(1) and not REAL.is_special(ids[1])
    assert REAL.decode(ids) == "user\nhi"
    assert REAL.decode(ids, skip_special=False) == "<|im_start|>user\nhi<|im_end|>"
    assert REAL.token_bytes(2) == b"<|im_end|>"


def test_digits_stand_alone_and_blanks_before_them_stay_together() -> None:
    """The rule "smollm" splits digits first; splitting words first would make two tokens of the two
    blanks."""
    assert [REAL.token_bytes(id) for id in REAL.encode("x  12")] == [b"x", b"  ", b"1", b"2"]


@pytest.mark.parametrize("tokenizer", [REAL, ByteTokenizer(512)], ids=["real", "bytes"])
def test_half_a_surrogate_pair_is_the_clients_fault(tokenizer: Tokenizer | ByteTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode at character 2"):
        tokenizer.encode("ab\ud800")


# ------------------------------------------------------------------------------------------ long and too long

RUNS = [*" \na7#=é東🙂\x04\t", "<|im_start|>", "<|im_", "end|>", "\n" + " " * 80, "#" * 80, " the", "'s"]
ADVERSARIAL = st.lists(st.tuples(st.sampled_from(RUNS), st.integers(1, 120)), max_size=6).map(
    lambda runs: "".join(r * n for r, n in runs)
)


@given(ADVERSARIAL, st.booleans())
@settings(deadline=None)
def test_encoding_beside_others_gives_the_ids_of_the_library(text: str, add_special: bool) -> None:
    assert REAL.encode(text, add_special) == REAL._backend.encode(text, add_special_tokens=add_special).ids


def test_the_bound_is_met_by_the_longest_token_and_bytes_that_are_lost_do_not_count() -> None:
    assert len(REAL.encode(("\n" + " " * 80) * 50, most=50)) == 50
    assert len(REAL.encode("\x04" * 100_000 + "hi", most=1)) == 1


SENTENCEPIECE = Tokenizer(
    vocabulary("SentencePiece BPE"), (), ChatTemplate("<|user|>{{ messages[0].content }}<|end|>", {})
)


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [(REAL, "7" * 200_000), (SENTENCEPIECE, "7 " * 200_000)],
    ids=["bytes", "SentencePiece"],
)
def test_others_run_while_a_text_is_encoded(tokenizer: Tokenizer, text: str) -> None:
    """No thread is made to give the interpreter up, so that another one has a turn where it is given up, and
    only there."""
    turns, inside, over = 0, False, False

    def turn() -> None:
        nonlocal turns
        while not over:
            turns += inside
            os.sched_yield()  # which gives it up

    def turns_during(work: Callable[[], object]) -> int:
        nonlocal inside, turns
        turns, inside = 0, True
        work()
        inside = False
        return turns

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e6)  # before the other thread can ask for the interpreter
    other = threading.Thread(target=turn)
    other.start()
    try:
        assert turns_during(lambda: tokenizer._backend.encode(text)) == 0, "else the rest proves nothing"
        assert turns_during(lambda: tokenizer.encode(text)) > 0
        assert turns_during(lambda: tokenizer.encode_chat([{"role": "user", "content": text}])) > 0
    finally:
        sys.setswitchinterval(interval)
        over = True
        other.join()


def test_too_many_bytes_are_refused_without_encoding_and_too_many_tokens_before_they_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(InvalidRequest, match="the prompt has 11 tokens; 10 is the most"):
        REAL.encode("7" * 11, most=10)
    monkeypatch.setattr(REAL, "_ids", None)
    with pytest.raises(InvalidRequest, match="811 bytes, which are more than 10 tokens"):
        REAL.encode("7" * 811, most=10)


def changed(**parts: Any) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(tiny_tokenizer().to_str())
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def test_composing_characters_shortens_a_text_by_no_more_than_is_allowed_for() -> None:
    """Every character in its longest spelling: each part of its decomposition as the longest one that is
    canonically the same."""
    longest: dict[str, int] = {}
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    apart = {c: unicodedata.normalize("NFD", c) for c in characters}
    for character, parts in apart.items():
        if len(parts) == 1:
            longest[parts] = max(longest.get(parts, 0), len(character.encode()))
    for character, parts in apart.items():
        spelled = max(len(character.encode()), sum(longest.get(part, len(part.encode())) for part in parts))
        assert spelled <= NFC_SHRINKS * len(unicodedata.normalize("NFC", character).encode())
    assert Tokenizer(changed(normalizer=normalizers.NFC()))._bound == Tokenizer(changed())._bound._replace(
        longest=NFC_SHRINKS * Tokenizer(changed())._bound.longest
    )


# ------------------------------------------------------------------------------------------------------ bytes


@given(st.text(max_size=50))
@example("\x00\x7f\u0080\u07ff\u0800\uffff\U00010000\U0010ffff")
def test_the_byte_tokenizer_is_utf8_of_no_more_bytes_than_are_allowed(text: str) -> None:
    tokenizer, data = ByteTokenizer(256), list(text.encode())
    assert tokenizer.encode(text, most=len(data)) == data and tokenizer.decode(data) == text
    with pytest.raises(InvalidRequest, match=f"has {len(data) + 1} tokens; {len(data)} is the most"):
        tokenizer.encode(text + "7", most=len(data))
    with pytest.raises(ModelError, match="at least 256"):
        ByteTokenizer(255)


def test_ids_behind_the_bytes_are_visible_and_those_behind_the_vocabulary_are_nothing() -> None:
    tokenizer = ByteTokenizer(512)
    assert tokenizer.decode([104, 105, 300, 511, 512]) == "hi<300><511>"
    assert not tokenizer.is_special(300) and tokenizer.eos_ids == frozenset()


# ------------------------------------------------------------------------------------------------------- chat


def with_template(tmp_path: Path, template: Any) -> Tokenizer:
    directory = write_tiny_model(tmp_path / "model")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return load_tokenizer(directory, TINY_LLAMA)


def test_a_chat_is_rendered_by_the_models_own_template() -> None:
    text = rendered(REAL, MESSAGES)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert text.endswith("<|im_start|>user\nWhat is a penstock?<|im_end|>\n<|im_start|>assistant\n")
    assert not rendered(REAL, MESSAGES, False).endswith("assistant\n")


def test_messages_that_the_template_cannot_take_are_the_clients_fault() -> None:
    bad: Any
    for bad in (
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": 5},
        "user",
        {},
    ):
        with pytest.raises(InvalidRequest) as caught:
            rendered(REAL, [bad])
        assert caught.value.param == "messages"


def test_what_a_template_may_not_do_is_the_clients_fault_or_the_models(tmp_path: Path) -> None:
    for source, said in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "unsafe"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            rendered(with_template(tmp_path, source), MESSAGES)
    with pytest.raises(ModelError, match="chat template cannot be parsed"):
        with_template(tmp_path, "{% for %}")
    with pytest.raises(InvalidRequest, match="no chat template; use /v1/completions"):
        with_template(tmp_path, None).encode_chat(MESSAGES)


def test_special_tokens_json_and_training_marks_are_known_to_templates(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{{ eos_token }}{% generation %}{{ messages[0]|tojson }}{% endgeneration %}{% break %}"
    )
    source = template.replace("{% break %}", "{% for m in messages %}{% break %}{% endfor %}")
    text = rendered(with_template(tmp_path, source), [{"role": "user", "content": "<é>"}])
    assert text == '<|endoftext|><|im_end|>{"role": "user", "content": "<é>"}'


# ------------------------------------------------------------------------------------------------------ files


def test_end_ids_come_from_the_generation_config_and_the_tokenizers_own_end_token(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model")
    assert load_tokenizer(directory, TINY_LLAMA).eos_ids == {0, 2}
    (directory / "generation_config.json").unlink()
    config = dataclasses.replace(TINY_LLAMA, eos_ids=(7,))
    assert load_tokenizer(directory, config).eos_ids == {2, 7}
    (directory / "tokenizer_config.json").unlink()
    assert load_tokenizer(directory, config).eos_ids == {7}


UNUSABLE = [  # a file's content, and what is said of it; None: it is not there
    ("tokenizer.json", None, "tokenizer.json is missing or not a tokenizer"),
    ("tokenizer.json", '{"version": "1.0"}', "tokenizer.json is missing or not a tokenizer"),
    ("tokenizer_config.json", "nonsense", "tokenizer_config.json is not valid JSON"),
    ("generation_config.json", "[1]", "generation_config.json must hold a JSON object"),
    ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id"),
    (
        "generation_config.json",
        '{"eos_token_id": 512}',
        "ids up to 512, but the model's vocabulary ends at 511",
    ),
    ("tokenizer_config.json", '{"chat_template": 5}', "chat_template must be text"),
]


def test_tokenizer_files_that_cannot_be_used_are_model_errors(tmp_path: Path) -> None:
    for name, text, message in UNUSABLE:
        directory = write_tiny_model(tmp_path / "model")
        (directory / name).unlink()
        if text is not None:
            (directory / name).write_text(text)
        with pytest.raises(ModelError, match=message):
            load_tokenizer(directory, TINY_LLAMA)
    with pytest.raises(ModelError, match="ids up to 511, but the model's vocabulary ends at 299"):
        load_tokenizer(write_tiny_model(tmp_path / "model"), dataclasses.replace(TINY_LLAMA, vocab=300))


# ---------------------------------------------------------------------------------------- limits and settings


def test_a_chat_of_exactly_the_most_tokens_is_taken_and_one_more_is_not() -> None:
    """Also where it is cut in pieces, none of which is too long by itself."""
    model = Tokenizer(tiny_tokenizer(), (2,), ChatTemplate(CHAT_TEMPLATE, {}))
    for content in ("what is a penstock", "see <|im_end|> and <|im_start|> 12"):
        for special_in_text in (False, True):
            messages = [{"role": "user", "content": content}] * 3
            ids = model.encode_chat(messages, special_in_text=special_in_text)
            assert model.encode_chat(messages, len(ids), special_in_text) == ids
            with pytest.raises(InvalidRequest, match=f"{len(ids) - 1} is the most") as refused:
                model.encode_chat(messages, len(ids) - 1, special_in_text)
            assert refused.value.param == "prompt"


def test_truncation_and_padding_of_a_vocabulary_do_not_touch_prompts() -> None:
    text = "A prompt of some words, none of which may be lost or added to."
    backend = tokenizers.Tokenizer.from_str(REAL._backend.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=64, pad_id=0)
    saved = tokenizers.Tokenizer.from_str(backend.to_str())  # as it comes from a file
    assert len(saved.encode(text).ids) == 64, "settings that do nothing prove nothing"
    assert Tokenizer(saved).encode(text) == REAL.encode(text)


def test_json_is_written_as_the_template_asks_for_it() -> None:
    message, wide = {"role": "user", "content": "b < a & 'é' 東京"}, {"ensure_ascii": True, "indent": 4}
    options: dict[str, Any]
    for options in ({}, {"indent": 2}, {"sort_keys": True}, {"separators": (",", ":")}, wide):
        arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
        text = ChatTemplate("{{ messages[0] | tojson(" + arguments + ") }}", {}).render([message], False)
        assert text == json.dumps(message, **{"ensure_ascii": False, **options})
