"""A vocabulary that writes blanks as tokens' first characters and rare characters as bytes, through every
route that has text."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from penstock.contract import Grammar
from penstock.engine.execution.grammars import Grammars
from penstock.models.chat import ChatTemplate
from penstock.models.tokenizer import Tokenizer
from tests.cpu.server.served import MODEL, Served, serving
from tests.support.scripted_engine import ScriptedEngine
from tests.support.vocabularies import vocabulary

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}<|end|>"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
ROLES = {"bos_token": "<s>", "eos_token": "</s>"}
ANSWER = "the blocks of 東京 🙂\n\t end"
SENTENCEPIECE = Tokenizer(vocabulary("SentencePiece BPE"), (2,), ChatTemplate(TEMPLATE, ROLES))
IDS = SENTENCEPIECE.encode(ANSWER, add_special=False)


@pytest.fixture
def saying() -> Iterator[Served]:
    engine = ScriptedEngine(lambda prompt, sampling: list(IDS))
    engine.tokenizer = SENTENCEPIECE  # type: ignore[assignment]
    with serving(engine) as running:
        yield running
        running.assert_idle()


def messages(text: str = "which blocks") -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_chat_answer_is_a_text_of_its_own_whole_and_streamed(saying: Served) -> None:
    chat = saying.client().chat.completions
    whole = chat.create(model=MODEL, messages=messages(), max_tokens=100)
    assert whole.choices[0].message.content == ANSWER == vocabulary("SentencePiece BPE").decode(IDS)
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in chat.create(model=MODEL, messages=messages(), max_tokens=100, stream=True)
    ]
    assert "".join(pieces) == ANSWER and not any("\ufffd" in piece for piece in pieces)


def test_a_blank_that_a_grammar_asks_for_is_part_of_the_answer(saying: Served) -> None:
    """The engine here says what it says without a grammar, and a grammar that reads its tokens finds the
    blank."""
    pytest.importorskip("llguidance", reason="structured output is an extra")
    saying.engine.grammars = grammars = Grammars(SENTENCEPIECE, SENTENCEPIECE.vocab_size, (2,))  # type: ignore[attr-defined]
    matcher = grammars.wait_compiled(Grammar("choice", json.dumps([f" {ANSWER}"]))).copy()
    matcher.consume(IDS)
    assert matcher.is_accepting and matcher.error is None
    asked = {
        "model": MODEL,
        "messages": messages(),
        "max_tokens": 100,
        "logprobs": True,
        "guided_choice": [f" {ANSWER}"],
    }
    choice = saying.http.post("/v1/chat/completions", json=asked).json()["choices"][0]
    assert choice["message"]["content"] == f" {ANSWER}"
    assert (
        bytes(byte for token in choice["logprobs"]["content"] for byte in token["bytes"]).decode()
        == f" {ANSWER}"
    )
    grammars.close()


def test_the_answer_sent_back_is_cut_as_it_was_generated(saying: Served) -> None:
    """So that the next turn finds its prefix."""
    turn = [*messages(), {"role": "assistant", "content": ANSWER}, *messages("and then")]
    saying.client().chat.completions.create(model=MODEL, messages=messages(), max_tokens=100)
    saying.client().chat.completions.create(model=MODEL, messages=turn, max_tokens=100)
    (first, *_), (second, *_) = saying.engine.submitted
    assert second[: len(first) + len(IDS)] == [*first, *IDS]


def test_a_completion_goes_on_with_its_prompt(saying: Served) -> None:
    client = saying.client().completions
    assert client.create(model=MODEL, prompt="all", max_tokens=100).choices[0].text == f" {ANSWER}"
    assert client.create(model=MODEL, prompt="all", max_tokens=100, echo=True).choices[0].text == (
        f"all {ANSWER}"
    )
    streamed = client.create(model=MODEL, prompt="all", max_tokens=100, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == f"all {ANSWER}"
    ids = SENTENCEPIECE.encode("all of the", add_special=False)
    assert client.create(model=MODEL, prompt=ids, max_tokens=100, echo=True).choices[0].text == (
        f"all of the {ANSWER}"
    )


@pytest.mark.parametrize("prompt", ["all of the 東京", " two  blanks", "a 🙂 b", ""])
def test_offsets_of_scored_tokens_point_at_their_text(saying: Served, prompt: str) -> None:
    reply = saying.client().completions.create(
        model=MODEL, prompt=prompt, max_tokens=100, echo=True, logprobs=1
    )
    text, scores = reply.choices[0].text, reply.choices[0].logprobs
    assert text == f"{prompt} {ANSWER}" and scores.tokens[0] == "<s>" and scores.text_offset[0] == 0
    num_prompt = len(SENTENCEPIECE.encode(prompt))
    for at, (token, offset) in enumerate(zip(scores.tokens, scores.text_offset, strict=True)):
        if token.startswith("bytes:"):
            assert text[offset] in "🙂東京"
        elif at:
            # the blank before the first word is the tokenizer's
            own = token[1:] if at == 1 < num_prompt else token
            assert text.startswith(own, offset), (at, token, offset)
    assert scores.text_offset[num_prompt] == len(prompt)


def test_stop_strings_are_found_where_the_text_has_them(saying: Served) -> None:
    chat = saying.client().chat.completions
    for stop, left in (
        ("🙂", "the blocks of 東京 "),
        ("the", ""),
        (" blocks", "the"),
        ("\t end", "the blocks of 東京 🙂\n"),
    ):
        choice = chat.create(model=MODEL, messages=messages(), max_tokens=100, stop=[stop]).choices[0]
        assert (choice.message.content or "", choice.finish_reason) == (left, "stop")
    stopped = (
        saying.client()
        .completions.create(model=MODEL, prompt="all", max_tokens=100, stop=[" the"])
        .choices[0]
    )
    assert (stopped.text, stopped.finish_reason) == ("", "stop"), (
        "the text goes on with a blank, which is part of the stop string"
    )
