"""Text to token ids and back: any vocabulary of the `tokenizers` library, and plain bytes for models that
have none. Owns which decoders are known, and the bytes that each token stands for; owns no request state."""

from __future__ import annotations

import codecs
import functools
import itertools
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tokenizers import Tokenizer as Backend
from tokenizers import models

from penstock.errors import InvalidRequest, ModelError, PromptTooLong
from penstock.models.chat import ANSWERED, PRIVATE, ChatTemplate, Rendered, Rendering, Tools
from penstock.models.fields import Json

BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
NFC_SHRINKS = 4  # composing characters makes a text shorter by this factor at most, counted in bytes
# pre-tokenizers that only split, unless a Split removes its matches
KEEPS_TEXT = frozenset({"ByteLevel", "Digits", "Split", "Metaspace"})
BLANKS_TO_MARKS = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


# ---------------------------------------------------------------------------------------- the bytes of tokens


def _byte_characters() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 bytes stand for themselves, the others for characters
    from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_characters()
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")  # what byte fallback calls a byte
REPLACE_EACH = "penstock.replace_each"
# Decoders whose text is that of their tokens in a row: parts that change each token by itself. Behind
# ByteFallback or Fuse the text is one: there only its first character may go.
_BY_TOKEN = re.compile(
    "ByteLevel,|((Replace|Metaspace|WordPiece|Strip[0-9]+-[0-9]+),)*(ByteFallback,)?(Fuse,(Strip[01]-0,)?)?"
)
_BEFORE = "x"  # any text, to decode a token after another one


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH, _replace_each)


class Spelling(NamedTuple):
    """The bytes of one token."""

    inside: bytes  # behind another token
    first: bytes  # as the first of a text: some decoders take its leading blank away


class TokenSpelling:
    """The text of many tokens is their bytes in a row: the first one's `first`, the others' `inside`.
    Decoders for which that is not so are refused."""

    def __init__(self, decoder: Any) -> None:
        """`decoder` is the library's, or None."""
        self._decoder = decoder
        parts = flat_parts(decoder, "decoders")
        kinds = [part["type"] for part in parts]
        shape = "".join(
            f"{part['type']}{part['start']}-{part['stop']},"
            if part["type"] == "Strip"
            else f"{part['type']},"
            for part in parts
        )
        if not _BY_TOKEN.fullmatch(shape):
            raise ModelError(
                f"the tokenizer's decoder is not supported: {shape.rstrip(',')}; text could not be shown as "
                "its tokens come"
            )
        self.byte_level, self.byte_fallback = "ByteLevel" in kinds, "ByteFallback" in kinds
        # Bytes that are no character: one mark per byte as SentencePiece has it, or one per broken character
        # as byte-level BPE has it.
        self.errors = REPLACE_EACH if self.byte_fallback else "replace"

    def of(self, token: str) -> Spelling:
        if self.byte_level:
            # an added token is in plain text, not in the byte alphabet
            known = all(character in BYTE_OF for character in token)
            data = bytes(map(BYTE_OF.__getitem__, token)) if known else token.encode()
            return Spelling(data, data)
        byte = BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        if byte is not None and (value := int(byte[1], 16)) >= 0x80:  # no character by itself
            return Spelling(bytes((value,)), bytes((value,)))
        behind = self._decode([_BEFORE, token])
        return Spelling(behind[len(self._decode([_BEFORE])) :].encode(), self._decode([token]).encode())

    def _decode(self, tokens: list[str]) -> str:
        text: str = " ".join(tokens) if self._decoder is None else self._decoder.decode(tokens)
        return text


def flat_parts(part: Any, inside: str) -> list[Json]:
    """The parts of a decoder, normalizer or pre-tokenizer of the library, in order. `inside` names the parts
    of a Sequence."""

    def flat(state: Json) -> list[Json]:
        items = state.get(inside) if state["type"] == "Sequence" else None
        return [state] if items is None else [found for item in items for found in flat(item)]

    return [] if part is None else flat(json.loads(part.__getstate__()))


# ------------------------------------------------------------------------------------------------- tokenizers


class TextCodec(Protocol):
    """What the server needs of a tokenizer."""

    eos_ids: frozenset[int]
    vocab_size: int  # one more than the highest id that has a text; higher ones decode to nothing
    chat_template: ChatTemplate | None
    controls: Sequence[str]  # spellings of special tokens
    errors: str  # what becomes of bytes that are no character: the name of a codec error handler

    def encode(self, text: str, add_special: bool = True, most: int | None = None) -> list[int]:
        """Spellings of special tokens become them. More than `most` tokens are refused, where possible before
        they are made."""
        ...

    def encode_apart(self, rendered: Rendered, most: int | None) -> list[int]:
        """A prompt in which only the template's spellings of special tokens become them."""
        return self.encode(rendered.plain(rendered.text), False, most)

    def token_bytes(self, id: int, first: bool = False) -> bytes:
        """Exact bytes of a token; one may be only a part of a character. The `first` of a text may have a
        blank less. Ids without a text have none."""
        ...

    def is_special(self, id: int) -> bool:
        return False

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def encode_chat(
        self,
        messages: Sequence[Json],
        most: int | None = None,
        special_in_text: bool = False,
        tools: Tools | None = None,
        how: Rendering = ANSWERED,
    ) -> list[int]:
        """The prompt of a conversation. Special tokens are the template's; with `special_in_text` also those
        that messages spell. `tools` are for templates that take them."""
        chat = self.chat_template
        if chat is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        controls = () if special_in_text else self.controls
        chat.of(tools).check_variables(how, controls)
        if controls:
            return self.encode_apart(chat.render_apart(messages, True, controls, tools, how), most)
        return self.encode(chat.render(messages, True, tools=tools, how=how), False, most)

    def bad_token_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The sequences of tokens that `bad_words` stands for, as vLLM defines it: each word as it is, and
        with a blank before it where that is as many tokens with another first one."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip()
            plain, spaced = (tuple(self.encode(text, add_special=False)) for text in (bare, f" {bare}"))
            if not plain:
                raise InvalidRequest(f"bad_words: {word!r} has no tokens in this model", "bad_words")
            found[plain] = None
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                found[spaced] = None
        return tuple(found)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        kept = [id for id in ids if not (skip_special and self.is_special(id))]
        pieces = list(map(self.token_bytes, kept))
        first = next((at for at, piece in enumerate(pieces) if piece), None)
        if first is not None:
            pieces[first] = self.token_bytes(kept[first], first=True)
        return b"".join(pieces).decode("utf-8", self.errors)


class Tokenizer(TextCodec):
    """A vocabulary: every token is a run of bytes, and the text of many is their bytes in a row."""

    def __init__(
        self, backend: Backend, eos_ids: Iterable[int] = (), chat: ChatTemplate | None = None
    ) -> None:
        self._spelling = TokenSpelling(backend.decoder)
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.chat_template = chat
        added = backend.get_added_tokens_decoder()
        self._added = {id: token.content for id, token in added.items()}
        self._special = frozenset(id for id, token in added.items() if token.special)
        self.controls = tuple(token.content for token in added.values() if token.special and token.content)
        # for chats alone: up to a second of work for a large vocabulary
        self.secret_names = functools.cache(lambda: _SecretNames(backend))
        self.vocab_size = max(backend.get_vocab().values(), default=-1) + 1
        self._bound = _TokenBound.of(backend, self._spelling.byte_level)
        self.eos_ids = frozenset(eos_ids)
        self.errors = self._spelling.errors
        self._spelled = functools.cache(self._spell)

    def vocabulary(self) -> str:
        """As a tokenizer.json."""
        return self._backend.to_str()

    def encode(self, text: str, add_special: bool = True, most: int | None = None) -> list[int]:
        self._check_bytes(utf8(text), most)
        return self._ids(self._backend, text, add_special, most)

    def encode_apart(self, rendered: Rendered, most: int | None) -> list[int]:
        self._check_bytes(utf8(rendered.plain(rendered.text)), most)
        names = self.secret_names()
        return self._ids(names.backend, names.renamed(rendered), False, most)

    def _check_bytes(self, data: bytes, most: int | None) -> None:
        """Refuses a text that is too long for any tokenization, before any work is done."""
        if most is not None and self._bound is not None and self._bound.num_tokens(data) > most:
            raise PromptTooLong(f"{len(data)} bytes, which are more than {most} tokens", most)

    def _ids(self, backend: Backend, text: str, add_special: bool, most: int | None) -> list[int]:
        """`encode` of the library keeps the interpreter for itself while it works; of its calls only those
        for batches do not."""
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special)
        if most is not None and len(encoding) > most:
            raise PromptTooLong(f"{len(encoding)} tokens", most)
        ids: list[int] = encoding.ids
        return ids

    def is_special(self, id: int) -> bool:
        return id in self._special

    def token_bytes(self, id: int, first: bool = False) -> bytes:
        spelling = self._spelled(id)
        return spelling.first if first else spelling.inside

    def _spell(self, id: int) -> Spelling:
        # the library has some of its added tokens normalized
        token = self._added.get(id) or (self._backend.id_to_token(id) if 0 <= id < self.vocab_size else None)
        return Spelling(b"", b"") if token is None else self._spelling.of(token)


class _TokenBound(NamedTuple):
    """A lower bound on the number of tokens of a text, from its bytes alone."""

    longest: int  # bytes of text that one token can stand for
    lost: bytes  # bytes that the vocabulary does not have: they become no token at all

    @staticmethod
    def of(backend: Backend, byte_level: bool) -> _TokenBound | None:
        """None where a token has no longest text: blanks around some are swallowed, or text is removed,
        replaced or unknown on the way."""
        vocabulary, added = backend.get_vocab(), backend.get_added_tokens_decoder().values()
        normalizer = flat_parts(backend.normalizer, "normalizers")
        lost = bytes(byte for name, byte in BYTE_OF.items() if byte_level and name not in vocabulary)
        keeps = (
            *(not (token.lstrip or token.rstrip) for token in added),
            *(part["type"] in ("NFC", "Prepend") or part == BLANKS_TO_MARKS for part in normalizer),
            *(
                part["type"] in KEEPS_TEXT and part.get("behavior") != "Removed"
                for part in flat_parts(backend.pre_tokenizer, "pretokenizers")
            ),
            not (lost and normalizer),
            byte_level or _spells_bytes(backend, vocabulary),
        )
        if not all(keeps):
            return None
        # its alphabet has one character per byte
        lengths = (len(token if byte_level else token.encode()) for token in vocabulary)
        longest = max([1, *lengths, *(len(token.content.encode()) for token in added)])
        composes = any(part["type"] == "NFC" for part in normalizer)
        return _TokenBound(longest * (NFC_SHRINKS if composes else 1), lost)

    def num_tokens(self, data: bytes) -> int:
        """That many at least."""
        return -(-len(data.translate(None, self.lost)) // self.longest)


def _spells_bytes(backend: Backend, vocabulary: Mapping[str, int]) -> bool:
    """Whether characters that it lacks become their bytes. Elsewhere any number of them may become one
    unknown token, or none."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    strange = backend.encode("\U0010ffff", add_special_tokens=False).tokens
    return vocabulary.keys() >= set(names) and strange[-4:] == [names[byte] for byte in "\U0010ffff".encode()]


class _SecretNames:
    """The same vocabulary with secret names for special tokens: no text spells them, with any normalizer. A
    text is tokenized in one call, so that text beside a special token is split as always."""

    def __init__(self, of: Backend) -> None:
        self._secret = "".join(chr(secrets.choice(PRIVATE)) for _ in range(4))
        added = dict(sorted(of.get_added_tokens_decoder().items()))
        self._names = {
            token.content: f"{self._secret}{id}{self._secret}" for id, token in added.items() if token.special
        }
        self.backend = _renamed(of, self._names)
        # takes the text between added tokens as one word
        self._finder = Backend(models.WordLevel({"\0": 0}, unk_token="\0"))
        if of.normalizer is not None and any(token.special and token.normalized for token in added.values()):
            self._finder.normalizer = of.normalizer
        for special, run in itertools.groupby(added.values(), key=lambda token: token.special):
            (self._finder.add_special_tokens if special else self._finder.add_tokens)(list(run))
        self._found = {id: token.content for id, token in self._finder.get_added_tokens_decoder().items()}

    def renamed(self, rendered: Rendered) -> str:
        """The prompt with secret names for the special tokens that the template spells; which those are is
        the library's to say."""
        text, start, pieces = rendered.text, 0, []
        if self._secret in text:
            raise InvalidRequest("the messages use private characters of Unicode that are taken", "messages")
        encoding = self._finder.encode_batch([text], add_special_tokens=False)[0]
        for token, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            spelled = self._found.get(token, "")
            at = text.find(spelled, begin, end)  # blanks that it swallows lie around it
            if spelled in self._names and at >= 0:
                pieces += [rendered.plain(text[start:at]), self._names[spelled]]
                start = at + len(spelled)
        return "".join([*pieces, rendered.plain(text[start:])])


def _renamed(of: Backend, names: Mapping[str, str]) -> Backend:
    """A copy of a vocabulary, in which some words have other names, no text is merged to them, and no text
    begins or ends with them."""
    state = json.loads(of.to_str())
    model, vocab = state["model"], state["model"]["vocab"]
    if isinstance(vocab, list):
        model["vocab"] = [[names.get(word, word), score] for word, score in vocab]
    else:
        model["vocab"] = {names.get(word, word): id for word, id in vocab.items()}
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not names.keys() & {*pair, "".join(pair)}]
    if (unknown := model.get("unk_token")) is not None:
        model["unk_token"] = names.get(unknown, unknown)
    for token in state["added_tokens"]:
        if name := names.get(token["content"]):
            # some normalizers remove private characters and leave the rest as text
            lasts = of.normalizer is None or name in of.normalizer.normalize_str(name)
            token |= {"content": name, "normalized": token["normalized"] and lasts}
    return Backend.from_str(json.dumps({**state, "post_processor": None}))


class ByteTokenizer(TextCodec):
    """For random models, which have no vocabulary: ids 0 to 255 are bytes, higher ones read as `<id>` so that
    output is visible."""

    eos_ids = frozenset[int]()
    controls = ()
    errors = "replace"

    def __init__(self, vocab: int) -> None:
        if vocab < 256:
            raise ModelError(
                "a model without a tokenizer needs a vocabulary of at least 256 for bytes, this one has "
                f"{vocab}"
            )
        self.vocab_size = vocab
        self.chat_template = ChatTemplate(BYTE_CHAT_TEMPLATE, {})

    def encode(self, text: str, add_special: bool = True, most: int | None = None) -> list[int]:
        data = utf8(text)
        if most is not None and len(data) > most:
            raise PromptTooLong(f"{len(data)} tokens", most)
        return list(data)

    def token_bytes(self, id: int, first: bool = False) -> bytes:
        if 0 <= id < 256:
            return bytes((id,))
        return f"<{id}>".encode() if id < self.vocab_size else b""


class TokenizerSpec(NamedTuple):
    """All that a tokenizer is made of, as plain data: another process makes the same one of it, without the
    model's files."""

    vocabulary: str | None  # a tokenizer.json; None: plain bytes
    vocab_size: int
    eos_ids: tuple[int, ...] = ()
    template: str | None = None
    special_tokens: dict[str, str] = {}  # noqa: RUF012 - of the template
    tool_template: str | None = None


def spec_of(codec: TextCodec) -> TokenizerSpec:
    if isinstance(codec, ByteTokenizer):
        return TokenizerSpec(None, codec.vocab_size)
    if not isinstance(codec, Tokenizer):
        raise TypeError(f"{type(codec).__name__} cannot be taken apart")
    chat = codec.chat_template
    templates = () if chat is None else (chat.source, chat.special_tokens, chat.tool_source)
    return TokenizerSpec(codec.vocabulary(), codec.vocab_size, tuple(sorted(codec.eos_ids)), *templates)


def tokenizer_of(spec: TokenizerSpec) -> TextCodec:
    if spec.vocabulary is None:
        return ByteTokenizer(spec.vocab_size)
    template = spec.template
    chat = None if template is None else ChatTemplate(template, spec.special_tokens, spec.tool_template)
    tokenizer = Tokenizer(Backend.from_str(spec.vocabulary), spec.eos_ids, chat)
    if chat is not None and tokenizer.controls:
        tokenizer.secret_names()  # now, and not while the first chat waits
    return tokenizer


def utf8(text: str) -> bytes:
    """JSON can carry half of a surrogate pair, which is no character and has no bytes."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text is not valid Unicode at character {error.start}: {error.reason}", "prompt"
        ) from error
