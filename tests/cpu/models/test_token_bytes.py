"""Every kind of vocabulary: text there and back, ids decoded as the library decodes them, and streams that
join to the whole."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders

from penstock.errors import InvalidRequest, ModelError
from penstock.models.tokenizer import BYTE_TOKEN, Spelling, Tokenizer, TokenSpelling
from penstock.text.answer import TextStream
from tests.support.vocabularies import KINDS, SPECIAL, vocabulary

SPELL_ALL = ("byte-level BPE", "SentencePiece BPE", "SentencePiece BPE, no prefix")  # any text comes back
WITH_BYTES = (
    "SentencePiece BPE",
    "SentencePiece BPE, Metaspace",
    "SentencePiece BPE, no prefix",
    "Unigram with bytes",
)
EACH = pytest.mark.parametrize("kind", KINDS)
CORPUS = {
    "latin": "The quick brown fox, naïve café, Straße, Łódź, İstanbul, ﬁne ﬂow",
    "greek, cyrillic": "Καλημέρα κόσμε; Съешь же ещё этих мягких булок",
    "right to left": "שלום עולם \u200fמרחבא\u200e مرحبا بالعالم ١٢٣ \u202bx\u202c",
    "indic": "नमस्ते दुनिया, வணக்கம், ನಮಸ್ಕಾರ, বাংলা, ไทยไม่มีช่องว่าง, བོད་སྐད་",
    "east asian": "東京は日本の首都です。今日は、안녕하세요 세계 𠮷野家 㐀",
    "rare planes": "𐍈𐌰 𓀀𓂀 𝔘𝔫𝔦 🜁 \U000e0041 \U0010ffff \U000f0001",
    "emoji": "🙂👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷🇩🇪🇯 ❤️ 1️⃣ 🧑🏿‍🚀",
    "combining": "e\u0301 a\u0300\u0323\u0308 Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯ \u0301 가\u11a8",
    "blanks": "a  b   c\td\t\te \n\n\n  f\r\n\u00a0g\u2003h\u3000i\u2028j   ",
    "controls": "a\x00b\x01\x1b[0m\x7f\x80\x9f\ufeffz\u200bq\u00ad",
    "marks": "\ufffd is text, so is \ufffd\ufffd, and <0x41> <0xE2> ##ing <s </s",
    "code": "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": x**2}  # §\n\n\tif x:\n\t\tpass\n",
}
TEXT = st.one_of(
    st.text(max_size=40),
    st.lists(st.one_of(st.sampled_from([*CORPUS.values(), " ", "  ", "\n"])), max_size=4).map("".join),
)


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(vocabulary(kind))


def by_token(kind: str, ids: list[int], skip_special: bool = True) -> str:
    """Streamed, one token a push."""
    stream = TextStream(tokenizer(kind) if skip_special else Shown(tokenizer(kind)), begins=True)
    return "".join(stream.push([id]).text for id in ids) + stream.finish()


class Shown:
    """Special tokens have text."""

    def __init__(self, of: Tokenizer) -> None:
        self.errors, self.token_bytes = of.errors, of.token_bytes

    def is_special(self, id: int) -> bool:
        return False


def also(*cases: tuple[Any, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def with_examples(test: Callable[..., None]) -> Callable[..., None]:
        for case in cases:
            test = example(*case)(test)
        return test

    return with_examples


def is_broken(kind: str, ids: list[int]) -> bool:
    """Whether bytes in a row are no text: the library then replaces the whole row, good characters too."""
    rows = itertools.groupby(
        ids, key=lambda id: BYTE_TOKEN.fullmatch(vocabulary(kind).id_to_token(id) or "") is not None
    )
    for is_byte, row in rows:
        if is_byte and kind in WITH_BYTES:
            try:
                bytes(int((vocabulary(kind).id_to_token(id) or "")[3:5], 16) for id in row).decode()
            except UnicodeDecodeError:
                return True
    return False


def as_sentencepiece(kind: str, ids: list[int]) -> str:
    """What SentencePiece says: of bytes in a row each whole character stands, and each byte that is in none
    is one mark."""
    pieces = []
    for is_byte, row in itertools.groupby(
        (vocabulary(kind).id_to_token(id) or "" for id in ids),
        key=lambda token: BYTE_TOKEN.fullmatch(token) is not None,
    ):
        if not is_byte:
            pieces += [token.replace("▁", " ") for token in row]
            continue
        data = bytes(int(token[3:5], 16) for token in row)
        while data:
            text, length = "\ufffd", 1
            for end in range(1, min(4, len(data)) + 1):
                try:
                    text, length = data[:end].decode(), end
                    break
                except UnicodeDecodeError:
                    continue
            pieces.append(text)
            data = data[length:]
    text = "".join(pieces)
    return text[text.startswith(" ") and kind != "SentencePiece BPE, no prefix" :]


# --------------------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("kind", SPELL_ALL)
@given(TEXT)
@settings(max_examples=60, deadline=None)
@also(*((text,) for text in CORPUS.values()), ("",), (" ",), ("  a",), ("\n",), ("\0",), ("a ",), ("\ufffd",))
def test_any_text_comes_back(kind: str, text: str) -> None:
    text = text.replace("▁", "_")  # SentencePiece writes blanks so: it cannot tell the two apart
    text = text if kind != "byte-level BPE" else "".join(text.split("<|"))  # spellings of special tokens
    for token in SPECIAL:
        text = text.replace(token, "")
    assert tokenizer(kind).decode(tokenizer(kind).encode(text, add_special=False)) == text


@EACH
@given(TEXT)
@settings(max_examples=40, deadline=None)
@also(
    *((text,) for text in CORPUS.values()),
    ("",),
    (" a",),
    ("▁a ▁",),
    ("<s>a</s> b",),
    ("a <s> <|user|>\n b",),
)
def test_encoded_text_decodes_and_streams_as_the_library_decodes_it(kind: str, text: str) -> None:
    # the library's Unigram reads names of bytes in text as bytes
    text = text.replace("<0x", "<Ox") if kind.startswith("Unigram") else text
    ids = tokenizer(kind).encode(text)
    assert not is_broken(kind, ids)
    for skip in (True, False):
        whole = vocabulary(kind).decode(ids, skip_special_tokens=skip)
        assert tokenizer(kind).decode(ids, skip) == whole == by_token(kind, ids, skip)


# ---------------------------------------------------------------------------------------------------- any ids


def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    size = tokenizer(kind).vocab_size
    some_bytes = [id for token, id in vocabulary(kind).get_vocab().items() if BYTE_TOKEN.fullmatch(token)]
    one = st.integers(0, size - 1)
    return st.lists(st.one_of(one, st.sampled_from(some_bytes)) if some_bytes else one, max_size=24)


@EACH
@given(st.data(), st.booleans(), st.lists(st.integers(0, 30), max_size=6))
@settings(max_examples=80, deadline=None)
def test_any_ids_in_any_pushes_join_to_the_decoded_whole(
    kind: str, data: st.DataObject, skip: bool, cuts: list[int]
) -> None:
    ids = data.draw(ids_of(kind))
    model = tokenizer(kind)
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    stream = TextStream(model if skip else Shown(model), begins=True)
    text = "".join(stream.push(ids[a:b]).text for a, b in itertools.pairwise(edges)) + stream.finish()
    assert text == model.decode(ids, skip) == by_token(kind, ids, skip)
    kept = [id for id in ids if not (skip and model.is_special(id))]
    if not is_broken(kind, kept):
        assert text == vocabulary(kind).decode(kept, skip_special_tokens=False)
    if kind in WITH_BYTES:
        assert text == as_sentencepiece(kind, kept)


def as_ids(kind: str, *tokens: str | bytes) -> list[int]:
    """Bytes are byte tokens, text is a token."""
    names = [
        name
        for token in tokens
        for name in ([token] if isinstance(token, str) else [f"<0x{byte:02X}>" for byte in token])
    ]
    ids = [vocabulary(kind).token_to_id(name) for name in names]
    assert None not in ids, names
    return ids  # type: ignore[return-value]


BROKEN = [
    ((b"\xe2\x82\xac",), "€"),  # one character of three tokens
    ((b"\xc3\xa9\xe2A",), "é\ufffdA"),  # what was whole stays, though the row is broken behind it
    ((b"A\xff\xf0\x9f\x99\x82\xf0\x9f",), "A\ufffd🙂\ufffd\ufffd"),
    ((b"\xe2\x82",), "\ufffd\ufffd"),  # unfinished at the end: a mark for each byte
    ((b"\xed\xa0\x80",), "\ufffd\ufffd\ufffd"),  # half of a surrogate pair
    ((b"\xe2", "</s>", b"\x82\xac"), "€"),  # special tokens are not there
    ((b"\xe2", "a", b"\x82\xac"), "\ufffda\ufffd\ufffd"),
    ((b"\xef\xbf\xbd",), "\ufffd"),  # it is what the bytes say
    ((b" ", "▁the"), " the"),  # the first blank of a text goes, also as a byte
    (("▁", "▁the"), " the"),
    (("</s>", "▁the"), "the"),
    ((b"\xe2", "▁the"), "\ufffd the"),
]


@pytest.mark.parametrize("kind", ["SentencePiece BPE", "Unigram with bytes"])
def test_bytes_that_are_tokens(kind: str) -> None:
    for tokens, text in BROKEN:
        ids = as_ids(kind, *tokens)
        assert tokenizer(kind).decode(ids) == text == by_token(kind, ids), tokens
    # A model may have more rows than its vocabulary has tokens, and choose one of the others.
    ids = [tokenizer(kind).vocab_size, -1, *as_ids(kind, "▁the", "▁the")]
    assert tokenizer(kind).decode(ids) == "the the" == by_token(kind, ids)


def test_offsets_of_byte_tokens_point_at_the_character_they_belong_to_or_the_mark_they_became() -> None:
    kind = "SentencePiece BPE"

    def offsets(*tokens: str | bytes) -> tuple[int, ...]:
        return TextStream(tokenizer(kind)).push(as_ids(kind, *tokens)).offsets

    assert offsets(b"\xe2\x82\xac", "a") == (0, 0, 0, 1)
    assert offsets(b"\xe2\x82", "a") == (0, 0, 2)  # two marks stand for the two bytes
    assert offsets(b"\xf0\x9f\x99\xe2\x82\xac") == (0, 0, 0, 3, 3, 3)
    assert offsets("▁the", "▁the") == (0, 4)


@EACH
def test_a_prompt_and_what_goes_on_with_it_are_the_text_of_both(kind: str) -> None:
    ids = tokenizer(kind).encode("the blocks of a cache and the engine, 東京 and more", add_special=False)
    whole = tokenizer(kind).decode(ids)
    for cut in range(1, len(ids)):
        stream = TextStream(tokenizer(kind))
        text = stream.push(ids[cut:]).text + stream.finish()
        before = TextStream(tokenizer(kind), begins=True)
        head = before.push(ids[:cut]).text
        assert whole.startswith(head) and (head + text == whole or before.finish()), (
            "but for a character that was cut in two"
        )


def test_special_tokens_that_are_recognised_in_normalized_text_are_special_and_shown_as_they_are_written() -> (  # noqa: E501
    None
):
    """The library shows them with the mark that its normalizer puts before them, and also where they are to
    be left out."""
    backend = tokenizers.Tokenizer.from_str(vocabulary("SentencePiece BPE").to_str())
    backend.add_special_tokens([AddedToken("<s>", normalized=True)])
    model = Tokenizer(backend)
    ids = [*model.encode("the", add_special=False), 1]
    assert model.decode(ids) == "the" and model.decode(ids, skip_special=False) == "the<s>"


# --------------------------------------------------------------------------------------------------- decoders

D, N, P = decoders, tokenizers.normalizers, tokenizers.pre_tokenizers
REFUSED = {  # as the message names each
    "BPEDecoder": D.BPEDecoder(),  # looks ahead
    "CTC": D.CTC(),  # drops repetitions
    "ByteFallback,Replace": D.Sequence([D.ByteFallback(), D.Replace("▁", " ")]),  # in what bytes spell
    "Fuse,Replace": D.Sequence([D.Fuse(), D.Replace("ab", "c")]),  # across tokens
    "Fuse,Strip1-0,Strip1-0": D.Sequence([D.Fuse(), D.Strip(" ", 1, 0), D.Strip(" ", 1, 0)]),
    "ByteFallback,Strip1-0": D.Sequence([D.ByteFallback(), D.Strip(" ", 1, 0)]),  # each row of bytes
    "Fuse,Strip2-0": D.Sequence([D.Fuse(), D.Strip(" ", 2, 0)]),
    "Fuse,Strip0-1": D.Sequence([D.Fuse(), D.Strip(" ", 0, 1)]),
    "ByteLevel,Strip1-0": D.Sequence([D.ByteLevel(), D.Strip(" ", 1, 0)]),
    "Fuse,ByteLevel": D.Sequence([D.Fuse(), D.ByteLevel()]),
}


def test_a_decoder_whose_text_is_not_that_of_its_tokens_in_a_row_is_refused_by_name() -> None:
    for name, decoder in REFUSED.items():
        with pytest.raises(ModelError, match=f"decoder is not supported: {name};"):
            TokenSpelling(decoder)


SPELLED = [
    (None, "a", b" a", b"a"),
    (D.ByteLevel(), "\u0120a", b" a", b" a"),
    (D.Metaspace(), "▁a", b" a", b"a"),
    (D.Metaspace(prepend_scheme="never"), "▁a", b" a", b" a"),
    (D.WordPiece(), "##a", b"a", b"##a"),
    (D.WordPiece(), "a", b" a", b"a"),
    (D.Sequence([D.Replace("▁", " "), D.ByteFallback(), D.Fuse(), D.Strip(" ", 1, 0)]), "▁a", b" a", b"a"),
    (D.Sequence([D.Replace("▁", " "), D.ByteFallback(), D.Fuse()]), "▁a", b" a", b" a"),
    (D.ByteFallback(), "<0xe2>", b"\xe2", b"\xe2"),
    (D.ByteFallback(), "<0x4>", b"<0x4>", b"<0x4>"),
    (D.Metaspace(), "<0xE2>", b"<0xE2>", b"<0xE2>"),
    (D.Strip("a", 1, 0), "aab", b"ab", b"ab"),
]


def test_bytes_of_a_token_behind_another_and_as_the_first() -> None:
    for decoder, token, inside, first in SPELLED:
        assert TokenSpelling(decoder).of(token) == Spelling(inside, first), (decoder, token)


# ------------------------------------------------------------------------------------------ long and too long


@EACH
@given(TEXT, st.integers(0, 3))
@settings(max_examples=30, deadline=None)
@also(("▁" * 30, 0), (" " * 40, 1), ("🙂" * 5, 0), ("\ufb03" * 9, 0))
def test_a_prompt_that_fits_is_never_refused_for_its_bytes(kind: str, text: str, spare: int) -> None:
    ids = vocabulary(kind).encode(text).ids
    assert tokenizer(kind).encode(text, most=len(ids) + spare) == ids


def test_where_every_byte_is_a_token_a_prompt_that_cannot_fit_is_refused_before_it_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind in WITH_BYTES:
        model = Tokenizer(vocabulary(kind))
        longest = max(len(token.encode()) for token in vocabulary(kind).get_vocab())
        monkeypatch.setattr(model, "_ids", None)
        with pytest.raises(InvalidRequest, match=f"{10 * longest + 1} bytes, which are more than 10 tokens"):
            model.encode("7" * (10 * longest + 1), most=10)


def test_where_a_token_may_stand_for_any_number_of_bytes_none_are_refused_for_theirs() -> None:
    """Characters that become unknown or nothing, and normalizers that shorten a text."""
    state = vocabulary("SentencePiece BPE").to_str()
    backends = [vocabulary(kind) for kind in ("Unigram", "WordPiece", "words")]
    for byte in (0x00, 0x41, 0xFF):
        backends.append(tokenizers.Tokenizer.from_str(state.replace(f"<0x{byte:02X}>", f"<Ox{byte:02X}>")))
    replaces = [("aaaa", "b"), (tokenizers.Regex("a+"), "bbbbbbbb"), ("a", "")]
    for normalizer in (*(N.Replace(*pair) for pair in replaces), N.Strip(), N.NFKC(), N.StripAccents()):
        backends.append(tokenizers.Tokenizer.from_str(state))
        backends[-1].normalizer = N.Sequence([backends[-1].normalizer, normalizer])
    for change in (
        lambda backend: backend.add_special_tokens([AddedToken("<E>", rstrip=True)]),  # swallows blanks
        lambda backend: setattr(
            backend, "pre_tokenizer", P.Sequence([P.Split(" ", "removed"), P.ByteLevel()])
        ),
        lambda backend: setattr(backend, "pre_tokenizer", P.Sequence([P.WhitespaceSplit(), P.ByteLevel()])),
    ):
        backends.append(tokenizers.Tokenizer.from_str(vocabulary("byte-level BPE").to_str()))
        change(backends[-1])
    for backend in backends:
        assert Tokenizer(backend)._bound is None


def test_added_tokens_longer_than_any_word_count() -> None:
    backend = tokenizers.Tokenizer.from_str(vocabulary("SentencePiece BPE").to_str())
    backend.add_tokens([AddedToken("=" * 400, normalized=False)])
    assert len(Tokenizer(backend).encode("=" * 4000, add_special=False, most=10)) == 10
