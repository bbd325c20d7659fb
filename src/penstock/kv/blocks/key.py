"""Content identity of full blocks: what a key covers and how it is computed. Owns no table of keys, only a
memory of those computed last.

    key(block i) = H_scope( link to key(block i - 1), tokens of block i )

H is blake2b, 128 bits, keyed with the digest of the scope, so blocks of different scopes live in unrelated
key spaces. The link is one byte that says whether there is a parent, then the parent. Only full blocks have a
key, and the block size is part of the scope, so equal keys mean equal tokens at equal positions, computed by
the same weights into the same layout.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.contract import Adapter
from penstock.errors import InvariantBroken

Tokens = Sequence[int] | NDArray[Any]

KEY_BYTES = 16
SCOPE_BYTES = 32
_TOKEN_BYTES = 4
_MAX_TOKEN = 2**32 - 1
_ROOT = b"\x00"
_CHILD = b"\x01"
_STRETCH = 64  # blocks whose keys are remembered together
_STRETCHES = 1024  # remembered stretches: a million tokens in blocks of 16, about 8 MB with their keys


@dataclass(frozen=True, slots=True)
class Scope:
    """Everything but the tokens that decides whether the bytes of two blocks are interchangeable."""

    weights: bytes  # digest of the model's weights
    kv_dtype: str
    layout: bytes  # fingerprint of the block layout
    block_tokens: int
    position_scheme: str  # how positions enter the cached keys, with its parameters: "rope theta=100000.0"
    adapter: str = ""  # identity of the adapter; empty: none
    adapter_version: str = ""  # changes when an adapter is reloaded under the same name
    salt: str = ""  # the tenant's; requests share KV only with requests of the same salt

    def of(self, salt: str = "", adapter: Adapter | None = None) -> Scope:
        """The scope of blocks that such a request computes."""
        scope = self if adapter is None else replace(self, adapter="lora", adapter_version=adapter.digest)
        return replace(scope, salt=salt)

    def digest(self) -> bytes:
        """32 bytes. Each field goes in as name, type and value, each with its length, so different scopes
        never collide."""
        h = blake2b(digest_size=SCOPE_BYTES, person=b"penstock scope 1")
        for field in fields(self):
            for part in (field.name.encode(), *_typed(getattr(self, field.name))):
                h.update(len(part).to_bytes(8, "little"))
                h.update(part)
        return h.digest()


def tenant_of(salt: str) -> bytes:
    """16 bytes that identify a tenant without its salt, which may be a secret."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16, person=b"penstock tenant").digest()


def _typed(value: str | bytes | int) -> tuple[bytes, bytes]:
    if isinstance(value, str):
        # a salt comes from users: lone surrogates must not raise
        return b"str", value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return b"bytes", value
    return b"int", str(int(value)).encode()


def private_scope() -> bytes:
    """The digest of a scope that no other request has, so no other request finds its blocks."""
    return os.urandom(SCOPE_BYTES)


def block_key(parent: bytes | None, tokens: Tokens, scope_digest: bytes) -> bytes:
    """Key of the full block that holds `tokens` and follows the block `parent` (None: it is the first)."""
    if parent is not None and len(parent) != KEY_BYTES:
        raise InvariantBroken(f"a parent key has {KEY_BYTES} bytes, got {len(parent)}")
    link = _ROOT if parent is None else _CHILD + parent
    return blake2b(link + token_bytes(tokens), key=scope_digest, digest_size=KEY_BYTES).digest()


def prefix_keys(
    tokens: Tokens, block_tokens: int, scope_digest: bytes, parent: bytes | None = None
) -> tuple[bytes, ...]:
    """Keys of all full blocks of `tokens`, in order; an incomplete last block has none. They follow the block
    `parent`, if there is one."""
    num_full = len(tokens) // block_tokens
    data = token_bytes(tokens[: num_full * block_tokens])
    width = _TOKEN_BYTES * block_tokens
    keys: list[bytes] = []
    for start in range(0, len(data), width * _STRETCH):
        stretch = data[start : start + width * _STRETCH]
        chain = _known_chain if len(stretch) == width * _STRETCH else _chain
        keys += chain(keys[-1] if keys else parent, stretch, width, scope_digest)
    return tuple(keys)


def _chain(parent: bytes | None, data: bytes, width: int, scope_digest: bytes) -> tuple[bytes, ...]:
    """Keys of the blocks of `width` bytes in `data`, the first of which follows `parent`."""
    blocks = struct.iter_unpack(f"{width}s", data)
    keys: list[bytes] = []
    if parent is None:
        parent = blake2b(_ROOT + next(blocks)[0], key=scope_digest, digest_size=KEY_BYTES).digest()
        keys.append(parent)
    # copied with the first byte hashed, so the scope is processed once
    child = blake2b(_CHILD, key=scope_digest, digest_size=KEY_BYTES)
    for (block,) in blocks:
        h = child.copy()
        h.update(parent + block)
        parent = h.digest()
        keys.append(parent)
    return tuple(keys)


# Most prompts begin like an earlier one. Cache entries are compared byte for byte.
_known_chain = lru_cache(maxsize=_STRETCHES)(_chain)


def token_bytes(tokens: Tokens) -> bytes:
    """Little-endian, 32 bits, unsigned: a token that is not known yet (negative) or too large raises instead
    of wrapping into another."""
    if isinstance(tokens, np.ndarray):
        fits = tokens.dtype.kind in "iu" and (
            not tokens.size or (tokens.min() >= 0 and tokens.max() <= _MAX_TOKEN)
        )
        if not fits:
            raise InvariantBroken(f"only known token ids have a key, got {tokens}")
        return tokens.astype("<u4").tobytes()
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error as error:
        raise InvariantBroken(f"only known token ids have a key: {error}") from None
