"""The bytes that each token of a vocabulary stands for, told from its decoder. Owns which decoders are known; holds no vocabulary."""

from __future__ import annotations

import codecs
import json
import re
from typing import Any, NamedTuple

from penstock.errors import ModelError


def _byte_characters() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_characters()
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")  # what byte fallback calls a byte
REPLACE_EACH = "penstock.replace_each"
_BY_TOKEN = frozenset({"Replace", "Metaspace", "WordPiece", "Strip", "ByteFallback", "Fuse"})
_BEFORE = "x"  # any text: what a token is behind another


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH, _replace_each)


class Spelling(NamedTuple):
    """The bytes of one token."""

    inside: bytes  # behind another token
    first: bytes  # as the first of a text: some decoders take its leading blank away


class TokenSpelling:
    """The text of many tokens is their bytes in a row: the first one's `first`, the others' `inside`. Decoders for which that is not so
    are refused."""

    def __init__(self, decoder: Any) -> None:
        """`decoder` is the library's, or None."""
        self._decoder = decoder
        parts = flat_parts(decoder, "decoders")
        kinds = [part["type"] for part in parts]
        self.byte_level = "ByteLevel" in kinds
        self.byte_fallback = "ByteFallback" in kinds
        # Bytes that are no character: one mark per byte as SentencePiece has it, or one per broken character as byte-level BPE has it.
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
    """What a decoder, normalizer or pre-tokenizer of the library is made of, in order. `inside` names the parts of a Sequence."""
    if part is None:
        return []

    def flat(state: dict[str, Any]) -> list[dict[str, Any]]:
        return [found for item in state[inside] for found in flat(item)] if state["type"] == "Sequence" else [state]

    return flat(json.loads(part.__getstate__()))


def _byte_level(token: str) -> Spelling:
    try:
        data = bytes(BYTE_OF[character] for character in token)
    except KeyError:  # an added token in plain text, not in the byte alphabet
        data = token.encode()
    return Spelling(data, data)


def _check_by_token(parts: list[dict[str, Any]]) -> None:
    """Every part must change each token by itself. Behind Fuse the text is one: there only its first blank may go, once."""
    _refuse({part["type"] for part in parts} - _BY_TOKEN, "")
    bytes_at = next((i for i, part in enumerate(parts) if part["type"] == "ByteFallback"), len(parts))
    fused_at = next((i for i, part in enumerate(parts) if part["type"] == "Fuse"), len(parts))
    whole = parts[min(bytes_at, fused_at) :]
    _refuse({part["type"] for part in whole} - {"ByteFallback", "Fuse", "Strip"}, "behind ByteFallback or Fuse")
    strips = [part for part in whole if part["type"] == "Strip"]
    if len(strips) > 1 or any(part["start"] > 1 or part["stop"] or parts.index(part) < fused_at for part in strips):
        _refuse({"Strip"}, "of anything but one leading character of the whole text")


def _refuse(kinds: set[str], where: str) -> None:
    if kinds:
        named = f"{', '.join(sorted(kinds))} {where}".strip()
        raise ModelError(f"the tokenizer's decoder is not supported: {named}; text could not be shown as its tokens come")
