"""Text to token ids and back: byte-level BPE vocabularies, and plain bytes for models that have none. Owns no request state."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import tokenizers
from tokenizers import decoders, models

from penstock.errors import InvalidRequest, ModelError
from penstock.models.chat import ChatTemplate

BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def _byte_characters() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_characters()
NFC_SHRINKS = 4  # composing characters makes a text shorter by this factor at most, counted in bytes
KEEPS_TEXT = frozenset({"ByteLevel", "Digits", "Split", "Sequence"})  # pre-tokenizers that only cut, unless a Split removes what it finds


def open_vocabulary(path: Path) -> tokenizers.Tokenizer:
    """The vocabulary in a tokenizer.json."""
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for unreadable and for malformed files
        raise ModelError(f"{path} is missing or not a tokenizer: {error}") from error


class TextCodec(Protocol):
    """What the server needs of a tokenizer."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, add_special: bool = True, most: int | None = None) -> list[int]:
        """Spellings of special tokens become them. More than `most` tokens are refused, where possible before they are made."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], most: int | None = None, special_in_text: bool = False) -> list[int]:
        """The prompt of a conversation. Special tokens are the template's; with `special_in_text` also those that messages spell."""

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str: ...

    def is_special(self, id: int) -> bool: ...

    def token_text(self, id: int) -> str: ...

    def token_bytes(self, id: int) -> bytes: ...

    def apply_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str: ...


class Tokenizer:
    """A byte-level BPE vocabulary: every token is a run of bytes, and the text of many is their bytes in a row."""

    def __init__(self, backend: tokenizers.Tokenizer, eos_ids: Iterable[int] = (), chat: ChatTemplate | None = None) -> None:
        if not isinstance(backend.decoder, decoders.ByteLevel):
            raise ModelError("the tokenizer is not a byte-level BPE (its decoder is not ByteLevel); others are not supported")
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._chat = chat
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(id for id, token in added.items() if token.special)
        self._controls = tuple(token.content for token in added.values() if token.special and token.content)
        self._textual = _without_special(backend)  # takes spellings of special tokens as text
        self._splitter = _only_added(backend)  # takes all other text as one word
        vocabulary = backend.get_vocab()
        self._bytes: list[bytes | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
        self._bound = _TokenBound.of(backend, vocabulary)
        self.eos_ids = frozenset(eos_ids)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that has a text. A model may have more rows than that; they decode to nothing."""
        return len(self._bytes)

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def encode(self, text: str, add_special: bool = True, most: int | None = None) -> list[int]:
        self._check_bytes(utf8(text), most)
        return self._ids(self._backend, text, add_special, most)

    def _check_bytes(self, data: bytes, most: int | None) -> None:
        """Refuses what is too long however it is cut into tokens: that is known before any work is done."""
        if most is not None and self._bound is not None and self._bound.num_tokens(data) > most:
            raise too_long(f"{len(data)} bytes, which are more than {most} tokens", most)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], most: int | None = None, special_in_text: bool = False) -> list[int]:
        if special_in_text or not self._controls:
            return self.encode(self.apply_chat(messages), add_special=False, most=most)
        rendered = self._needed_chat.render_apart(messages, True, self._controls)
        if not rendered.disguises:
            return self.encode(rendered.text, add_special=False, most=most)
        self._check_bytes(utf8(rendered.plain(rendered.text)), most)
        ids: list[int] = []
        for text, special in self._runs(rendered.text):
            ids += self._ids(self._textual, rendered.plain(text), False, most)
            ids += special
            if most is not None and len(ids) > most:
                raise too_long(f"more than {most} tokens", most)
        return ids

    def _runs(self, text: str) -> Iterator[tuple[str, list[int]]]:
        """`text` between special tokens, each run with the token behind it; where they begin and end is the library's to say."""
        encoding = self._splitter.encode_batch([text], add_special_tokens=False)[0]
        start = 0
        for token, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            id = self._backend.token_to_id(self._splitter.id_to_token(token) or "")
            if id is not None and id in self._special:
                yield text[start:begin], [id]
                start = end
        yield text[start:], []

    def _ids(self, backend: tokenizers.Tokenizer, text: str, add_special: bool, most: int | None) -> list[int]:
        """`encode` of the library keeps the interpreter for itself while it works; of its calls only those for batches do not."""
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special)
        if most is not None and len(encoding) > most:
            raise too_long(f"{len(encoding)} tokens", most)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        kept = (self.token_bytes(id) for id in ids if not (skip_special and id in self._special))
        return b"".join(kept).decode("utf-8", "replace")

    def is_special(self, id: int) -> bool:
        return id in self._special

    def token_text(self, id: int) -> str:
        return self.token_bytes(id).decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        """Exact bytes of a token; one token may be only a part of a character. Ids without a text have none."""
        if not 0 <= id < len(self._bytes):
            return b""
        known = self._bytes[id]
        if known is None:
            known = self._bytes[id] = self._look_up(id)
        return known

    def _look_up(self, id: int) -> bytes:
        token = self._backend.id_to_token(id) or ""
        try:
            return bytes(BYTE_OF[character] for character in token)
        except KeyError:  # an added token in plain text, not in the byte alphabet
            return token.encode()

    def apply_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        return self._needed_chat.render(messages, add_generation_prompt)

    @property
    def _needed_chat(self) -> ChatTemplate:
        if self._chat is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        return self._chat


class _TokenBound(NamedTuple):
    """How few tokens a text can have, told from its bytes alone."""

    longest: int  # bytes of text that one token can stand for
    lost: bytes  # bytes that the vocabulary does not have: they become no token at all

    @staticmethod
    def of(backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> _TokenBound | None:
        """None where a token has no longest text: blanks around some are swallowed, or text is removed or replaced on the way."""
        added = backend.get_added_tokens_decoder().values()
        lost = bytes(byte for character, byte in BYTE_OF.items() if character not in vocabulary)
        normalizer, cutter = _kinds(backend.normalizer), _kinds(backend.pre_tokenizer)
        swallows = any(token.lstrip or token.rstrip for token in added)
        known = {kind for kind, _ in normalizer} <= {"NFC", "Sequence"} and {kind for kind, _ in cutter} <= KEEPS_TEXT
        if swallows or not known or any(behavior == "Removed" for _, behavior in cutter) or (lost and normalizer):
            return None
        longest = max([1, *map(len, vocabulary), *(len(token.content.encode()) for token in added)])  # of the byte alphabet or plain text
        return _TokenBound(longest * (NFC_SHRINKS if normalizer else 1), lost)

    def num_tokens(self, data: bytes) -> int:
        """That many at least."""
        return -(-len(data.translate(None, self.lost)) // self.longest)


def _kinds(part: Any) -> list[tuple[str, str]]:
    """What a normalizer or pre-tokenizer is made of: its type, and what it does with what it finds, where it has a choice."""
    if part is None:
        return []
    waiting, found = [json.loads(part.__getstate__())], []
    while waiting:
        state = waiting.pop()
        found.append((state["type"], state.get("behavior", "")))
        waiting += state.get("pretokenizers", []) + state.get("normalizers", [])
    return found


def _only_added(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A vocabulary of nothing but the added tokens: it finds them as `backend` does, and makes one unknown word of what is between."""
    unknown = "\0"
    splitter = tokenizers.Tokenizer(models.WordLevel({unknown: 0}, unk_token=unknown))
    if backend.normalizer is not None:
        splitter.normalizer = backend.normalizer
    _add_tokens(splitter, backend)
    return splitter


def _add_tokens(to: tokenizers.Tokenizer, of: tokenizers.Tokenizer) -> None:
    """The added tokens of `of`, in the order of their ids."""
    added = (token for _, token in sorted(of.get_added_tokens_decoder().items()))
    for special, run in itertools.groupby(added, key=lambda token: token.special):
        (to.add_special_tokens if special else to.add_tokens)(list(run))


def _without_special(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same vocabulary, for which spellings of special tokens are text like any other. The model in it is shared, not copied."""
    textual = tokenizers.Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor"):
        if (value := getattr(backend, part)) is not None:
            setattr(textual, part, value)
    _add_tokens(textual, backend)
    added = backend.get_added_tokens_decoder().items()
    if any(textual.token_to_id(token.content) != id for id, token in added):  # ids with gaps cannot be given again in a row
        textual = tokenizers.Tokenizer.from_str(backend.to_str())
    textual.encode_special_tokens = True
    return textual


class ByteTokenizer:
    """For random models, which have no vocabulary: ids 0 to 255 are bytes, higher ones read as `<id>` so that output is visible."""

    eos_ids: frozenset[int] = frozenset()
    has_chat_template = True

    def __init__(self, vocab: int) -> None:
        if vocab < 256:
            raise ModelError(f"a model without a tokenizer needs a vocabulary of at least 256 for bytes, this one has {vocab}")
        self.vocab_size = vocab
        self._chat = ChatTemplate(BYTE_CHAT_TEMPLATE, {})

    def encode(self, text: str, add_special: bool = True, most: int | None = None) -> list[int]:
        data = utf8(text)
        if most is not None and len(data) > most:
            raise too_long(f"{len(data)} tokens", most)
        return list(data)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], most: int | None = None, special_in_text: bool = False) -> list[int]:
        return self.encode(self.apply_chat(messages), add_special=False, most=most)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def is_special(self, id: int) -> bool:
        return False

    def token_text(self, id: int) -> str:
        return self.token_bytes(id).decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        if 0 <= id < 256:
            return bytes((id,))
        return f"<{id}>".encode() if id < self.vocab_size else b""

    def apply_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        return self._chat.render(messages, add_generation_prompt)


def utf8(text: str) -> bytes:
    """JSON can carry half of a surrogate pair, which is no character and has no bytes."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text is not valid Unicode at character {error.start}: {error.reason}", "prompt") from error


def too_long(what: str, most: int) -> InvalidRequest:
    return InvalidRequest(f"the prompt has {what}; {most} is the most that is taken", "prompt")
