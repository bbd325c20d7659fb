"""Text to token ids and back: any vocabulary of the `tokenizers` library, and plain bytes for models that
have none. Owns which decoders are known, and the bytes that each token stands for; owns no request state."""

from __future__ import annotations

import codecs
import functools
import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import tokenizers
from tokenizers import AddedToken, models

from penstock.errors import InvalidRequest, ModelError, PromptTooLong
from penstock.models.chat import ANSWERED, PRIVATE, ChatTemplate, Rendered, Rendering, Tools

BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


NFC_SHRINKS = 4  # composing characters makes a text shorter by this factor at most, counted in bytes
# pre-tokenizers that only split, unless a Split removes its matches
KEEPS_TEXT = frozenset({"ByteLevel", "Digits", "Split", "Metaspace"})


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
_BY_TOKEN = frozenset({"Replace", "Metaspace", "WordPiece", "Strip", "ByteFallback", "Fuse"})
_BEFORE = "x"  # any text, to decode a token after another one


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH, _replace_each)


class Spelling(NamedTuple):
    """The bytes of one token."""

    inside: bytes  # behind another token
    first: bytes  # as the first of a text: some decoders take its leading blank away


NO_TEXT = Spelling(b"", b"")


class TokenSpelling:
    """The text of many tokens is their bytes in a row: the first one's `first`, the others' `inside`.
    Decoders for which that is not so are refused."""

    def __init__(self, decoder: Any) -> None:
        """`decoder` is the library's, or None."""
        self._decoder = decoder
        parts = flat_parts(decoder, "decoders")
        kinds = [part["type"] for part in parts]
        self.byte_level = "ByteLevel" in kinds
        self.byte_fallback = "ByteFallback" in kinds
        # Bytes that are no character: one mark per byte as SentencePiece has it, or one per broken character
        # as byte-level BPE has it.
        self.errors = REPLACE_EACH if self.byte_fallback else "replace"
        if self.byte_level:
            _refuse(set(kinds[1:]), "beside ByteLevel")
        else:
            _check_by_token(parts)

    def of(self, token: str) -> Spelling:
        if self.byte_level:
            return _byte_level(token)
        byte = BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        if byte is not None and (value := int(byte[1], 16)) >= 0x80:  # no character by itself
            return Spelling(bytes((value,)), bytes((value,)))
        behind = self._decode([_BEFORE, token])
        return Spelling(behind[len(self._decode([_BEFORE])) :].encode(), self._decode([token]).encode())

    def _decode(self, tokens: list[str]) -> str:
        text: str = " ".join(tokens) if self._decoder is None else self._decoder.decode(tokens)
        return text


def flat_parts(part: Any, inside: str) -> list[dict[str, Any]]:
    """The parts of a decoder, normalizer or pre-tokenizer of the library, in order. `inside` names the parts
    of a Sequence."""
    if part is None:
        return []

    def flat(state: dict[str, Any]) -> list[dict[str, Any]]:
        return (
            [found for item in state[inside] for found in flat(item)]
            if state["type"] == "Sequence"
            else [state]
        )

    return flat(json.loads(part.__getstate__()))


def _byte_level(token: str) -> Spelling:
    try:
        data = bytes(BYTE_OF[character] for character in token)
    except KeyError:  # an added token in plain text, not in the byte alphabet
        data = token.encode()
    return Spelling(data, data)


def _check_by_token(parts: list[dict[str, Any]]) -> None:
    """Every part must change each token by itself. Behind Fuse the text is one: there only its first blank
    may go, once."""
    _refuse({part["type"] for part in parts} - _BY_TOKEN, "")
    bytes_at = next((i for i, part in enumerate(parts) if part["type"] == "ByteFallback"), len(parts))
    fused_at = next((i for i, part in enumerate(parts) if part["type"] == "Fuse"), len(parts))
    whole = parts[min(bytes_at, fused_at) :]
    _refuse(
        {part["type"] for part in whole} - {"ByteFallback", "Fuse", "Strip"}, "behind ByteFallback or Fuse"
    )
    strips = [part for part in whole if part["type"] == "Strip"]
    if len(strips) > 1 or any(
        part["start"] > 1 or part["stop"] or parts.index(part) < fused_at for part in strips
    ):
        _refuse({"Strip"}, "of anything but one leading character of the whole text")


def _refuse(kinds: set[str], where: str) -> None:
    if kinds:
        named = f"{', '.join(sorted(kinds))} {where}".strip()
        raise ModelError(
            f"the tokenizer's decoder is not supported: {named}; text could not be shown as its tokens come"
        )


# ------------------------------------------------------------------------------------------------- tokenizers


class TextCodec(Protocol):
    """What the server needs of a tokenizer."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def chat_template(self) -> ChatTemplate | None: ...

    @property
    def errors(self) -> str:
        """What becomes of bytes that are no character: the name of a codec error handler."""

    def encode(self, text: str, add_special: bool = True, most: int | None = None) -> list[int]:
        """Spellings of special tokens become them. More than `most` tokens are refused, where possible before
        they are made."""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        most: int | None = None,
        special_in_text: bool = False,
        tools: Tools | None = None,
        how: Rendering = ANSWERED,
    ) -> list[int]:
        """The prompt of a conversation. Special tokens are the template's; with `special_in_text` also those
        that messages spell. `tools` are for templates that take them."""

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str: ...

    def is_special(self, id: int) -> bool: ...

    def token_bytes(self, id: int, first: bool = False) -> bytes:
        """Exact bytes of a token; one may be only a part of a character. The `first` of a text may have a
        blank less."""


class Tokenizer:
    """A vocabulary: every token is a run of bytes, and the text of many is their bytes in a row."""

    def __init__(
        self, backend: tokenizers.Tokenizer, eos_ids: Iterable[int] = (), chat: ChatTemplate | None = None
    ) -> None:
        self._spelling = TokenSpelling(backend.decoder)
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.chat_template = chat
        self.has_chat_template = chat is not None
        added = backend.get_added_tokens_decoder()
        self._added = {id: token.content for id, token in added.items()}
        self._special = frozenset(id for id, token in added.items() if token.special)
        self._controls = tuple(token.content for token in added.values() if token.special and token.content)
        self._secret = _SecretNames(backend)
        vocabulary = backend.get_vocab()
        self._spelled: list[Spelling | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
        self._bound = _TokenBound.of(backend, vocabulary, self._spelling.byte_level)
        self.eos_ids = frozenset(eos_ids)
        self.errors = self._spelling.errors

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that has a text. A model may have more rows than that; they decode to
        nothing."""
        return len(self._spelled)

    def vocabulary(self) -> str:
        """As a tokenizer.json."""
        return self._backend.to_str()

    def encode(self, text: str, add_special: bool = True, most: int | None = None) -> list[int]:
        self._check_bytes(utf8(text), most)
        return self._ids(self._backend, text, add_special, most)

    def _check_bytes(self, data: bytes, most: int | None) -> None:
        """Refuses a text that is too long for any tokenization, before any work is done."""
        if most is not None and self._bound is not None and self._bound.num_tokens(data) > most:
            raise PromptTooLong(f"{len(data)} bytes, which are more than {most} tokens", most)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        most: int | None = None,
        special_in_text: bool = False,
        tools: Tools | None = None,
        how: Rendering = ANSWERED,
    ) -> list[int]:
        if self.chat_template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        controls = () if special_in_text else self._controls
        self.chat_template.of(tools).check_variables(how, controls)
        if not controls:
            return self.encode(
                self.chat_template.render(messages, True, tools=tools, how=how), add_special=False, most=most
            )
        rendered = self.chat_template.render_apart(messages, True, controls, tools, how)
        self._check_bytes(utf8(rendered.plain(rendered.text)), most)
        return self._secret.encode(rendered, lambda backend, text: self._ids(backend, text, False, most))

    def _ids(
        self, backend: tokenizers.Tokenizer, text: str, add_special: bool, most: int | None
    ) -> list[int]:
        """`encode` of the library keeps the interpreter for itself while it works; of its calls only those
        for batches do not."""
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special)
        if most is not None and len(encoding) > most:
            raise PromptTooLong(f"{len(encoding)} tokens", most)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        kept = [id for id in ids if not (skip_special and id in self._special)]
        pieces = list(map(self.token_bytes, kept))
        first = next((at for at, piece in enumerate(pieces) if piece), None)
        if first is not None:
            pieces[first] = self.token_bytes(kept[first], first=True)
        return b"".join(pieces).decode("utf-8", self.errors)

    def is_special(self, id: int) -> bool:
        return id in self._special

    def token_bytes(self, id: int, first: bool = False) -> bytes:
        """Ids without a text have none."""
        if not 0 <= id < len(self._spelled):
            return b""
        known = self._spelled[id]
        if known is None:
            # the library has some of its added tokens normalized
            token = self._added.get(id, self._backend.id_to_token(id))
            known = self._spelled[id] = NO_TEXT if token is None else self._spelling.of(token)
        return known.first if first else known.inside


class _TokenBound(NamedTuple):
    """A lower bound on the number of tokens of a text, from its bytes alone."""

    longest: int  # bytes of text that one token can stand for
    lost: bytes  # bytes that the vocabulary does not have: they become no token at all

    @staticmethod
    def of(
        backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int], byte_level: bool
    ) -> _TokenBound | None:
        """None where a token has no longest text: blanks around some are swallowed, or text is removed,
        replaced or unknown on the way."""
        added = backend.get_added_tokens_decoder().values()
        normalizer, cutter = (
            flat_parts(backend.normalizer, "normalizers"),
            flat_parts(backend.pre_tokenizer, "pretokenizers"),
        )
        cuts = all(part["type"] in KEEPS_TEXT and part.get("behavior") != "Removed" for part in cutter)
        if (
            any(token.lstrip or token.rstrip for token in added)
            or not cuts
            or not all(map(_keeps_length, normalizer))
        ):
            return None
        lost = (
            bytes(byte for character, byte in BYTE_OF.items() if character not in vocabulary)
            if byte_level
            else b""
        )
        if (lost and normalizer) or not (byte_level or _spells_bytes(backend, vocabulary)):
            return None
        # its alphabet has one per byte
        lengths = map(len, vocabulary) if byte_level else (len(token.encode()) for token in vocabulary)
        longest = max([1, *lengths, *(len(token.content.encode()) for token in added)])
        composes = any(part["type"] == "NFC" for part in normalizer)
        return _TokenBound(longest * (NFC_SHRINKS if composes else 1), lost)

    def num_tokens(self, data: bytes) -> int:
        """That many at least."""
        return -(-len(data.translate(None, self.lost)) // self.longest)


def _keeps_length(normalizer: Mapping[str, Any]) -> bool:
    """Whether it makes no text shorter by more than composing characters does: a blank becomes a longer mark,
    a mark is put in front."""
    replaced = normalizer.get("pattern", {}).get("String", "")
    kept = bool(replaced) and len(normalizer["content"].encode()) >= len(replaced.encode())
    return normalizer["type"] in ("NFC", "Prepend") or (normalizer["type"] == "Replace" and kept)


def _spells_bytes(backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> bool:
    """Whether characters that it lacks become their bytes. Elsewhere any number of them may become one
    unknown token, or none."""
    names = {byte: f"<0x{byte:02X}>" for byte in range(256)}
    strange = backend.encode("\U0010ffff", add_special_tokens=False).tokens
    spelled = strange[-4:] == [names[byte] for byte in "\U0010ffff".encode()]
    return spelled and all(name in vocabulary for name in names.values())


class _SecretNames:
    """The same vocabulary with secret names for special tokens: no text spells them, with any normalizer. A
    text is tokenized in one call, so that text beside a special token is split as always."""

    def __init__(self, of: tokenizers.Tokenizer) -> None:
        self._of = of
        self._secret = "".join(chr(secrets.choice(PRIVATE)) for _ in range(4))
        self._added = dict(sorted(of.get_added_tokens_decoder().items()))
        self._names = {token.content: self._name(id) for id, token in self._added.items() if token.special}
        self._finder = _only_added(of)  # takes all other text as one word
        self._found = {id: token.content for id, token in self._finder.get_added_tokens_decoder().items()}
        # A BPE makes words by merging, so that its model can be shared. Others look words up: text that
        # spells a special one would be it.
        self._shared = isinstance(of.model, models.BPE)
        unknown, words = getattr(of.model, "unk_token", None), of.get_vocab(with_added_tokens=False)
        # special, and the model can make them
        self._words = {words[name] for name in self._names if name in words and name != unknown}
        self._backend, self._known_as = self._copy(of.model) if self._shared else self._apart

    def encode(self, rendered: Rendered, cut: Callable[[tokenizers.Tokenizer, str], list[int]]) -> list[int]:
        text = self.renamed(rendered)
        ids, known_as = cut(self._backend, text), self._known_as
        # a BPE that merges to a special token, or takes words whole
        if self._shared and not self._words.isdisjoint(ids):
            backend, known_as = self._apart
            ids = cut(backend, text)
        return [known_as.get(id, id) for id in ids]

    @functools.cached_property
    def _apart(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """With a model that has no special tokens. Seconds of work for a large vocabulary."""
        return self._copy(_renamed_model(self._of, self._names))

    def _copy(self, model: Any) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """The vocabulary with secret names, and the ids that some of its tokens have elsewhere."""
        backend = tokenizers.Tokenizer(model)
        for part in ("normalizer", "pre_tokenizer"):
            if (value := getattr(self._of, part)) is not None:
                setattr(backend, part, value)
        # The library numbers new tokens from the size of the vocabulary on; where its ids have gaps, some of
        # those are taken.
        gaps = range(backend.get_vocab_size(), max(backend.get_vocab().values(), default=-1) + 1)
        _add_tokens(backend, [AddedToken(self._name(~gap), normalized=False) for gap in gaps])
        named = {id: self._renamed(token) if token.special else token for id, token in self._added.items()}
        _add_tokens(backend, named.values())
        ids = {token.content: id for id, token in backend.get_added_tokens_decoder().items()}
        return backend, {ids[token.content]: id for id, token in named.items()}

    def _name(self, id: int) -> str:
        return f"{self._secret}{id}{self._secret}"

    def _renamed(self, token: AddedToken) -> AddedToken:
        name, normalizer = self._names[token.content], self._of.normalizer
        # some remove private characters and leave the rest as text
        lasts = normalizer is None or name in normalizer.normalize_str(name)
        flags = {flag: getattr(token, flag) for flag in ("single_word", "lstrip", "rstrip")}
        return AddedToken(name, normalized=token.normalized and lasts, special=True, **flags)

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


def _renamed_model(of: tokenizers.Tokenizer, names: Mapping[str, str]) -> Any:
    """A copy of the model of a vocabulary, in which some words have other names and are not merged to."""
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
    return tokenizers.Tokenizer.from_str(
        json.dumps({**state, "added_tokens": [], "post_processor": None})
    ).model


def _only_added(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A vocabulary of the added tokens only: it finds them as `backend` does, and makes the text between them
    one unknown word."""
    unknown = "\0"
    finder = tokenizers.Tokenizer(models.WordLevel({unknown: 0}, unk_token=unknown))
    added = [token for _, token in sorted(backend.get_added_tokens_decoder().items())]
    if backend.normalizer is not None and any(token.special and token.normalized for token in added):
        finder.normalizer = backend.normalizer
    _add_tokens(finder, added)
    return finder


def _add_tokens(to: tokenizers.Tokenizer, added: Iterable[AddedToken]) -> None:
    for special, run in itertools.groupby(added, key=lambda token: token.special):
        (to.add_special_tokens if special else to.add_tokens)(list(run))


class ByteTokenizer:
    """For random models, which have no vocabulary: ids 0 to 255 are bytes, higher ones read as `<id>` so that
    output is visible."""

    eos_ids: frozenset[int] = frozenset()
    has_chat_template = True
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

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        most: int | None = None,
        special_in_text: bool = False,
        tools: Tools | None = None,
        how: Rendering = ANSWERED,
    ) -> list[int]:
        self.chat_template.of(tools).check_variables(how, ())
        return self.encode(
            self.chat_template.render(messages, True, tools=tools, how=how), add_special=False, most=most
        )

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def is_special(self, id: int) -> bool:
        return False

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
    templates = (
        (None, {}, None) if chat is None else (chat.source, dict(chat.special_tokens), chat.tool_source)
    )
    return TokenizerSpec(codec.vocabulary(), codec.vocab_size, tuple(sorted(codec.eos_ids)), *templates)


def tokenizer_of(spec: TokenizerSpec) -> TextCodec:
    if spec.vocabulary is None:
        return ByteTokenizer(spec.vocab_size)
    chat = (
        None
        if spec.template is None
        else ChatTemplate(spec.template, spec.special_tokens, spec.tool_template)
    )
    return Tokenizer(tokenizers.Tokenizer.from_str(spec.vocabulary), spec.eos_ids, chat)


def utf8(text: str) -> bytes:
    """JSON can carry half of a surrogate pair, which is no character and has no bytes."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text is not valid Unicode at character {error.start}: {error.reason}", "prompt"
        ) from error
