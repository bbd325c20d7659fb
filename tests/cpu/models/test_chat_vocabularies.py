"""Chats with every kind of vocabulary: harmless text has the ids of `transformers`, and text that spells
special tokens is cut as the same text is where it spells none."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers

from penstock.errors import InvalidRequest
from penstock.models import tokenizer as tokenizer_module
from penstock.models.chat import ChatTemplate
from penstock.models.tokenizer import Tokenizer
from tests.support.vocabularies import KINDS, SPECIAL, vocabulary

ROLES = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    "marks beside text": "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor "
    "%}<|user|>",
    "marks that are text": "{{ bos_token }}{% for m in messages %}[INST] {{ m.content | trim }} [/INST]{{ "
    "eos_token }}{% endfor %} ok",
    "text first": "System: be brief. {% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% "
    "endfor %}",
}
ORDINARY = [
    [{"role": "user", "content": "the blocks of a cache"}],
    [
        {"role": "user", "content": " two  blanks \n\n\tand 東京 🙂 é "},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "x"},
    ],
    [{"role": "user", "content": "<s <| |> <|use [INST] ▁a \ufffd \0 <0x41>"}],
]
FLAGS: dict[str, dict[str, bool]] = {
    "plain": {"normalized": False},
    "normalized": {"normalized": True},
    "swallows behind": {"normalized": False, "rstrip": True},
    "swallows both": {"normalized": False, "rstrip": True, "lstrip": True},
    "a word by itself": {"normalized": False, "single_word": True},
}
NAMES = [name for name in KINDS if name != "byte-level BPE"]  # test_chat_control_tokens.py has that one
EACH = pytest.mark.parametrize("kind", NAMES)
EVERY_TEMPLATE = pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)


@functools.cache
def flagged(kind: str, flags: str = "plain") -> tokenizers.Tokenizer:
    """Its special tokens are recognised so."""
    backend = tokenizers.Tokenizer.from_str(vocabulary(kind).to_str())
    backend.add_special_tokens([AddedToken(token, **FLAGS[flags]) for token in SPECIAL])
    return backend


@functools.cache
def model(kind: str, template: str, flags: str = "plain") -> Tokenizer:
    return Tokenizer(flagged(kind, flags), (2,), ChatTemplate(template, ROLES))


@functools.cache
def theirs(kind: str, template: str, flags: str) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=flagged(kind, flags), chat_template=template, **ROLES
    )


# The library's Unigram finds special tokens in text by itself, also where they are not recognised as such.
FLAGGED = [
    (kind, flags)
    for kind in NAMES
    for flags in FLAGS
    if flags != "a word by itself" or not kind.startswith("Unigram")
]


@EVERY_TEMPLATE
@pytest.mark.parametrize(("kind", "flags"), FLAGGED)
def test_ordinary_messages_have_the_ids_of_transformers(kind: str, template: str, flags: str) -> None:
    for messages in ORDINARY:
        expected = theirs(kind, template, flags).apply_chat_template(
            messages, tokenize=True, return_dict=False
        )
        assert model(kind, template, flags).encode_chat(messages) == expected


# ---------------------------------------------------------------------------- text that spells special tokens


@functools.cache
def other_names(kind: str, flags: str) -> tokenizers.Tokenizer:
    """The same vocabulary, whose special tokens have other names: for it the usual ones are text."""
    state = flagged(kind, flags).to_str()
    for token in SPECIAL:
        state = state.replace(f'"{token}"', f'"{other(token)}"')
    return tokenizers.Tokenizer.from_str(state)


def other(text: str) -> str:
    for token in SPECIAL:
        text = text.replace(token, f"\u2983{token[1:-1]}\u2984")
    return text


PARTS = [*SPECIAL, "<|", "|>", "user", " ", "\n", "the blocks", "東", "🙂", "7", "▁", "<0xE2>"]
SPELLED = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)


@EACH
@EVERY_TEMPLATE
@pytest.mark.parametrize("flags", ["plain", "normalized", "swallows behind"])
@given(SPELLED, SPELLED)
@settings(max_examples=6, deadline=None)
@example("a<|end|>b", "</s>")
@example("<s> the blocks", " <|user|> ")
@example("<|user|><|end|>", "")
def test_text_that_spells_special_tokens_is_cut_as_text(
    kind: str, template: str, flags: str, first: str, second: str
) -> None:
    messages = [{"role": "user", "content": first}, {"role": "assistant", "content": second}]
    roles = {role: other(token) for role, token in ROLES.items()}
    rendered = ChatTemplate(other(template), roles).render(messages, True)
    expected = other_names(kind, flags).encode(rendered, add_special_tokens=False).ids
    ids = model(kind, template, flags).encode_chat(messages)
    if (kind, flags) == (
        "SentencePiece BPE",
        "normalized",
    ):  # it recognises them behind blanks alone; elsewhere the template's are text, too
        ids, expected = [id for id in ids if id < len(SPECIAL)], [id for id in expected if id < len(SPECIAL)]
    assert ids == expected


@pytest.mark.parametrize(
    ("normalizer", "spelled"),
    [
        (normalizers.NFKC(), "＜s＞"),
        (normalizers.Lowercase(), "<S>"),
        (normalizers.StripAccents(), "<s\u0301>"),
    ],
    ids=repr,
)
def test_text_that_a_normalizer_makes_a_special_token_of_stays_text(normalizer: Any, spelled: str) -> None:
    backend = tokenizers.Tokenizer.from_str(vocabulary("SentencePiece BPE, no prefix").to_str())
    backend.normalizer = normalizers.Sequence([normalizers.NFD(), normalizer, backend.normalizer])
    backend.add_special_tokens([AddedToken("<s>", normalized=True)])
    assert 1 in backend.encode(spelled, add_special_tokens=False).ids, "else the rest proves nothing"
    tokenizer = Tokenizer(backend, (), ChatTemplate(TEMPLATES["marks beside text"], ROLES))
    ids = tokenizer.encode_chat([{"role": "user", "content": f"a {spelled} b"}])
    assert [id for id in ids if tokenizer.is_special(id)] == [1, 3, 4, 3]


def test_a_normalizer_that_removes_private_characters_does_not_make_names_of_digits() -> None:
    """What would be left of the secret name of token 3 is "3"."""
    tokenizer = model("WordPiece", TEMPLATES["marks beside text"], "normalized")
    ids = tokenizer.encode_chat([{"role": "user", "content": "3 1 4 33"}])
    assert ids.count(3) == 2 and ids.count(1) == 1 and ids.count(4) == 1


def test_ids_with_gaps_are_not_taken_for_special_tokens() -> None:
    """The library counts new tokens from the number of tokens on, which are ids that a vocabulary with gaps
    has given away."""
    vocab = {"<unk>": 0, "<s>": 1, "▁": 2, "a": 7, "b": 8, "c": 9, "d": 10}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.add_special_tokens(["<s>", "<unk>"])
    tokenizer = Tokenizer(backend, (), ChatTemplate("<s>{{ messages[0].content }}<s>", ROLES))
    assert tokenizer.encode_chat([{"role": "user", "content": "abcd<s>"}]) == [1, 7, 8, 9, 10, 0, 0, 0, 1]


def test_secret_names_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module.secrets, "choice", lambda _: 0xF0000)
    tokenizer = Tokenizer(
        flagged("SentencePiece BPE"), (), ChatTemplate(TEMPLATES["marks beside text"], ROLES)
    )
    tokenizer.secret_names()
    monkeypatch.undo()
    with pytest.raises(InvalidRequest, match="private characters of Unicode that are taken"):
        tokenizer.encode_chat([{"role": "user", "content": chr(0xF0000) * 9}])
    assert tokenizer.encode_chat([{"role": "user", "content": chr(0xF0000) * 3}])


def test_text_does_not_merge_to_a_special_token_nor_to_the_secret_name_of_one() -> None:
    vocab = {token: id for id, token in enumerate(["e", "n", "d", "en", "end", "<", "▁"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("e", "n"), ("en", "d")], unk_token="▁"))
    backend.add_special_tokens(
        [AddedToken(name, normalized=False) for name in ("end", "▁", "<new>", "<newer>")]
    )
    tokenizer = Tokenizer(backend, (), ChatTemplate("<new>{{ messages[0].content }}<newer>", {}))
    for content, ids in (("en<new>x", [7, 3, 5, 1, 0, 6, 6, 6, 8]), ("endend", [7, 3, 2, 3, 2, 8])):
        assert tokenizer.encode_chat([{"role": "user", "content": content}]) == ids
