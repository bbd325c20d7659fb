"""Text to token ids and back: byte-level BPE vocabularies, and plain bytes for models that have none. Owns no request state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import decoders

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

    def encode(self, text: str, add_special: bool = True) -> list[int]: ...

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
        self._special = frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)
        self._bytes: list[bytes | None] = [None] * (max(backend.get_vocab().values(), default=-1) + 1)
        self.eos_ids = frozenset(eos_ids)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that has a text. A model may have more rows than that; they decode to nothing."""
        return len(self._bytes)

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        _need_unicode(text)
        return self._backend.encode(text, add_special_tokens=add_special).ids

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
        if self._chat is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        return self._chat.render(messages, add_generation_prompt)


class ByteTokenizer:
    """For random models, which have no vocabulary: ids 0 to 255 are bytes, higher ones read as `<id>` so that output is visible."""

    eos_ids: frozenset[int] = frozenset()
    has_chat_template = True

    def __init__(self, vocab: int) -> None:
        if vocab < 256:
            raise ModelError(f"a model without a tokenizer needs a vocabulary of at least 256 for bytes, this one has {vocab}")
        self.vocab_size = vocab
        self._chat = ChatTemplate(BYTE_CHAT_TEMPLATE, {})

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        _need_unicode(text)
        return list(text.encode())

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


def _need_unicode(text: str) -> None:
    """JSON can carry half of a surrogate pair, which is no character and has no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text is not valid Unicode at character {error.start}: {error.reason}", "prompt") from error
