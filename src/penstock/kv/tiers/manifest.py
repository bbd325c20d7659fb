"""A manifest: a snapshot outside of any process. Owns the value, its format and version, and the reasons to
refuse one; the store keeps it.

A snapshot has no KV of its own. It is the keys of a sequence's full blocks in order, and their tokens, so
that lost blocks can be computed again. Its KV ends with a block, the unit of identity and of movement: a
longer chunk would only lose tokens.

    head: magic, format, lengths, checksum
    facts: JSON    keys: 16 bytes each    tokens: 4 bytes each    messages: JSON or nothing
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from penstock.errors import SnapshotRefused
from penstock.kv.blocks.key import KEY_BYTES, SCOPE_BYTES, Scope, Tokens, prefix_keys
from penstock.kv.tiers.store import checksum

FORMAT = 1
TENANT_BYTES = 16
_MAGIC = b"penstkSN"
# magic, format, bytes of facts, keys, tokens and messages, checksum of all behind the head
_HEAD = struct.Struct("<8sIIQQQ16s")
_TOKEN_BYTES = 4
_MOST_BLOCK_TOKENS = 1 << 20
_SHOWN = 12  # characters of a digest in a message
_PARTS = ("keys", "tokens", "messages")  # fields that stand behind the facts


@dataclass(frozen=True, slots=True)
class Manifest:
    """A sequence at a token boundary."""

    name: str
    tenant: bytes  # digest of its salt; other tenants do not find it
    # digest of the store's space: everything that decides what the blocks' bytes mean, except salt and
    # adapter
    space: bytes
    scope: bytes  # digest of its keys' scope, including both
    # the fields of its scope in words, without the salt; a refusal names those that differ
    made_with: Mapping[str, str]
    block_tokens: int
    tokens: bytes  # ids, 32 bits each, little-endian; may include up to block_tokens - 1 after the last key
    keys: bytes  # of its full blocks, concatenated
    created_s: float  # time.time()
    expires_s: float | None = None
    adapter: str = ""  # its name when the snapshot was taken
    messages: str = ""  # JSON of the conversation, if it was taken from one
    # with recurrent layers: its KV is of use up to this block, of which a state is kept; 0: all of it is
    state_blocks: int = 0

    @property
    def id(self) -> str:
        """Its name in a store. Another name, or another tenant, gives another id."""
        return snapshot_id(self.tenant, self.name)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // _TOKEN_BYTES

    @property
    def num_blocks(self) -> int:
        return len(self.keys) // KEY_BYTES

    @property
    def block_keys(self) -> tuple[bytes, ...]:
        return tuple(self.keys[at : at + KEY_BYTES] for at in range(0, len(self.keys), KEY_BYTES))

    @property
    def state_keys(self) -> tuple[bytes, ...]:
        """Of the state that it pins."""
        return self.block_keys[self.state_blocks - 1 : self.state_blocks] if self.state_blocks else ()

    def has_expired(self, now_s: float) -> bool:
        return self.expires_s is not None and now_s >= self.expires_s


def snapshot_id(tenant: bytes, name: str) -> str:
    """Begins with the tenant's digest, so that its snapshots can be listed."""
    digest = blake2b(
        name.encode("utf-8", "surrogatepass"), digest_size=16, key=tenant, person=b"penstock snap"
    ).hexdigest()
    return f"{tenant.hex()}-{digest}"


def token_bytes(tokens: Tokens) -> bytes:
    return np.asarray(tokens, "<u4").tobytes()


def words_of(scope: Scope) -> dict[str, str]:
    """The fields of `scope` without the salt, which may be a secret."""
    values = {one.name: getattr(scope, one.name) for one in fields(scope) if one.name != "salt"}
    return {name: value.hex() if isinstance(value, bytes) else str(value) for name, value in values.items()}


def check_space(manifest: Manifest, scope: Scope) -> None:
    """Raises SnapshotRefused unless its blocks belong to the space of `scope`, which has neither salt nor
    adapter."""
    if manifest.space != scope.digest():
        made_with = manifest.made_with
        with_adapter = replace(
            scope, adapter=made_with.get("adapter", ""), adapter_version=made_with.get("adapter_version", "")
        )
        told = _differences(manifest, with_adapter) or "its space is not the one that its own facts give here"
        raise SnapshotRefused(
            f"snapshot {manifest.name!r} is of another model, or of another form of its KV: {told}"
        )


def check_scope(manifest: Manifest, scope: Scope) -> None:
    """Raises SnapshotRefused unless its blocks belong to `scope`, which includes salt and adapter."""
    if manifest.scope != scope.digest():
        told = _differences(manifest, scope) or "the cache_salt is another"
        raise SnapshotRefused(
            f"snapshot {manifest.name!r} was computed otherwise than this request would be: {told}"
        )


def _differences(manifest: Manifest, scope: Scope) -> str:
    here, there = words_of(scope), manifest.made_with
    differing = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
    return ", ".join(
        f"{name} is {_shown(there.get(name))} and here {_shown(here.get(name))}" for name in differing
    )


def _shown(value: str | None) -> str:
    if value is None:
        return "unknown"
    return (value if len(value) <= 2 * _SHOWN else f"{value[:_SHOWN]}...") or "none"


# ----------------------------------------------------------------------------------------------------- format


def pack(manifest: Manifest) -> bytes:
    named = {one.name: getattr(manifest, one.name) for one in fields(manifest) if one.name not in _PARTS}
    if not manifest.state_blocks:  # as before there were states
        del named["state_blocks"]
    facts = json.dumps(named, default=bytes.hex)
    parts = facts.encode(), manifest.keys, manifest.tokens, manifest.messages.encode("utf-8", "surrogatepass")
    body = b"".join(parts)
    return _HEAD.pack(_MAGIC, FORMAT, *map(len, parts), checksum(body)) + body


def unpack(data: bytes) -> Manifest:
    """Raises SnapshotRefused with the reason."""
    if len(data) < _HEAD.size:
        raise SnapshotRefused(
            f"the manifest is truncated: {len(data)} bytes, and its head alone has {_HEAD.size}"
        )
    magic, version, *lengths, digest = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise SnapshotRefused("this is no manifest of a snapshot")
    if version != FORMAT:
        raise SnapshotRefused(
            f"the manifest has format {version}, and this version of penstock reads format {FORMAT}"
        )
    body = data[_HEAD.size :]
    if len(body) != sum(lengths):
        what = "truncated" if len(body) < sum(lengths) else "longer than it says"
        raise SnapshotRefused(
            f"the manifest is {what}: {len(body)} bytes behind its head, which says {sum(lengths)}"
        )
    if checksum(body) != digest:
        raise SnapshotRefused("the manifest is damaged: its checksum is not that of its content")
    ends = np.cumsum(lengths).tolist()
    facts, keys, tokens, messages = (
        body[end - length : end] for end, length in zip(ends, lengths, strict=True)
    )
    try:
        made = _made(json.loads(facts), keys, tokens, messages.decode("utf-8", "surrogatepass"))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise SnapshotRefused(f"the manifest's facts cannot be read: {type(error).__name__}") from None
    ids = np.frombuffer(tokens, "<u4")
    if b"".join(prefix_keys(ids, made.block_tokens, made.scope)) != keys:
        raise SnapshotRefused("the manifest is damaged: its keys are not those of its tokens")
    return made


_FACTS: dict[str, Callable[[Any], Any]] = {
    "name": str,
    "tenant": bytes.fromhex,
    "space": bytes.fromhex,
    "scope": bytes.fromhex,
    "made_with": lambda words: {str(name): str(value) for name, value in words.items()},
    "block_tokens": int,
    "created_s": float,
    "expires_s": lambda seconds: None if seconds is None else float(seconds),
    "adapter": str,
}


def _made(facts: dict[str, Any], keys: bytes, tokens: bytes, messages: str) -> Manifest:
    read = {name: of(facts[name]) for name, of in _FACTS.items()}
    state_blocks = int(facts.get("state_blocks", 0))  # earlier versions do not have it
    made = Manifest(**read, tokens=tokens, keys=keys, messages=messages, state_blocks=state_blocks)
    sizes = (
        len(made.tenant),
        len(made.space),
        len(made.scope),
        len(tokens) % _TOKEN_BYTES,
        0 < made.block_tokens <= _MOST_BLOCK_TOKENS,
        0 <= state_blocks <= made.num_blocks,
    )
    if sizes != (TENANT_BYTES, SCOPE_BYTES, SCOPE_BYTES, 0, True, True):
        raise ValueError("a part of it has another size")
    if not all(map(math.isfinite, (made.created_s, made.expires_s or 0.0))):
        raise ValueError("a time of it is none")
    return made
