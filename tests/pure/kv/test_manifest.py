"""Manifests of snapshots: what goes in comes out, and what is damaged, cut off or of another model is refused
with the reason."""

from __future__ import annotations

import dataclasses
import json
import struct
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SnapshotRefused
from penstock.kv.blocks.key import Scope, prefix_keys, tenant_of
from penstock.kv.tiers import manifest as format_
from penstock.kv.tiers.manifest import (
    Manifest,
    check_scope,
    check_space,
    pack,
    snapshot_id,
    token_bytes,
    unpack,
    words_of,
)

SCOPE = Scope(b"w" * 32, "float32", b"l" * 16, 16, "rope theta=10000.0")
TOKENS = list(range(5, 75))


def made(tokens: list[int] = TOKENS, scope: Scope = SCOPE, **fields: Any) -> Manifest:
    salted = dataclasses.replace(scope, salt="me")
    space = dataclasses.replace(scope, adapter="", adapter_version="").digest()
    keys = b"".join(prefix_keys(tokens, 16, salted.digest()))
    rest = {"name": "talk", "tenant": tenant_of("me"), "created_s": 1e9, **fields}
    return Manifest(
        space=space,
        scope=salted.digest(),
        made_with=words_of(salted),
        block_tokens=16,
        tokens=token_bytes(tokens),
        keys=keys,
        **rest,
    )


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=200),
    st.text(min_size=1, max_size=20),
    st.none() | st.floats(1e9, 2e9),
    st.text(max_size=50),
)
def test_what_is_packed_is_unpacked(
    tokens: list[int], name: str, expires: float | None, messages: str
) -> None:
    manifest = made(tokens, name=name, expires_s=expires, messages=messages)
    assert unpack(pack(manifest)) == manifest
    assert (manifest.num_tokens, manifest.num_blocks) == (len(tokens), len(tokens) // 16)


# Holds invariant 23: bytes that come back are checked before they are used.
@given(st.data())
def test_every_flipped_bit_is_found(data: st.DataObject) -> None:
    packed = bytearray(pack(made()))
    bit = data.draw(st.integers(0, 8 * len(packed) - 1))
    packed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(SnapshotRefused):
        unpack(bytes(packed))


@given(st.integers(0, 10_000))
def test_every_cut_is_found(at: int) -> None:
    packed = pack(made())
    with pytest.raises(SnapshotRefused, match="truncated"):
        unpack(packed[: at % len(packed)])


def test_another_version_is_named() -> None:
    packed = bytearray(pack(made()))
    struct.pack_into("<I", packed, 8, 2)
    with pytest.raises(SnapshotRefused, match="format 2, and this version of penstock reads format 1"):
        unpack(bytes(packed))


def test_keys_that_are_not_those_of_the_tokens_are_refused() -> None:
    """A checksum finds accidents of a disk; this finds a manifest that was put together wrongly."""
    wrong = dataclasses.replace(made(), tokens=token_bytes([*TOKENS[:20], 99, *TOKENS[21:]]))
    with pytest.raises(SnapshotRefused, match="keys are not those of its tokens"):
        unpack(pack(wrong))


def with_facts(**changed: Any) -> bytes:
    """A manifest that is whole, and says otherwise. A fact that is `...` is left out."""
    packed = pack(made())
    _, _, *lengths, _ = format_._HEAD.unpack_from(packed)
    body = packed[format_._HEAD.size :]
    facts = {**json.loads(body[: lengths[0]]), **changed}
    text = json.dumps({name: fact for name, fact in facts.items() if fact is not ...}).encode()
    body = text + body[lengths[0] :]
    return (
        format_._HEAD.pack(format_._MAGIC, format_.FORMAT, len(text), *lengths[1:], format_.checksum(body))
        + body
    )


FACTS = ("name", "tenant", "space", "scope", "made_with", "block_tokens", "created_s", "expires_s", "adapter")
WRONG: list[dict[str, Any]] = [
    *({name: ...} for name in FACTS),
    *(
        {name: value}
        for name in ("tenant", "space", "scope")
        for value in ("", "00", "zz", 7, None, "00" * 64)
    ),
    *({"block_tokens": value} for value in (0, -16, None, "x", [], float("inf"), float("nan"), 10**400)),
    *({"created_s": value} for value in (None, "x", [], 10**400, float("nan"), float("inf"))),
    *({"expires_s": value} for value in ("x", [], 10**400, float("nan"), float("inf"))),
    *({"made_with": value} for value in (None, [], "x", 7)),
]


@pytest.mark.parametrize(
    "changed", WRONG, ids=[f"{name}={str(value)[:9]}" for one in WRONG for name, value in one.items()]
)
def test_whatever_a_fact_is_instead_it_is_refused(changed: dict[str, Any]) -> None:
    """Its checksum is right: whoever wrote it was another program, or meant no good. Nothing but a refusal
    comes of it."""
    assert unpack(with_facts()) == made()
    with pytest.raises(SnapshotRefused, match="facts cannot be read"):
        unpack(with_facts(**changed))


@pytest.mark.parametrize(
    "keys", [b"", made().keys[:-1], made().keys[:-16], made().keys + bytes(16), made().keys[16:]]
)
def test_more_or_fewer_keys_than_its_tokens_have_are_refused(keys: bytes) -> None:
    with pytest.raises(SnapshotRefused, match="keys are not those of its tokens"):
        unpack(pack(dataclasses.replace(made(), keys=keys)))


def test_a_refusal_shows_the_beginning_of_a_digest_and_words_in_full() -> None:
    """And of an adapter's snapshot not that it has one: it may."""
    adapted = made(scope=dataclasses.replace(SCOPE, adapter="lora", adapter_version="abc"))
    with pytest.raises(SnapshotRefused) as refusal:
        check_space(adapted, dataclasses.replace(SCOPE, weights=b"x" * 32, position_scheme="none at all"))
    told = (
        "position_scheme is rope theta=10000.0 and here none at all, weights is 777777777777... and here "
        "787878787878..."
    )
    assert str(refusal.value).endswith(f": {told}")


def test_an_adapter_is_no_other_space_but_another_scope() -> None:
    adapted = made(scope=dataclasses.replace(SCOPE, adapter="lora", adapter_version="abc"))
    check_space(adapted, SCOPE)
    check_scope(adapted, dataclasses.replace(SCOPE, adapter="lora", adapter_version="abc", salt="me"))
    with pytest.raises(
        SnapshotRefused,
        match=r"adapter is lora and here none, adapter_version is abc and here none",
    ):
        check_scope(adapted, dataclasses.replace(SCOPE, salt="me"))


def test_what_an_earlier_process_has_kept_is_found_and_read() -> None:
    """Whoever changes one of these loses the snapshots of everybody who upgrades: the format gets another
    number then."""
    assert (
        snapshot_id(tenant_of("me"), "talk")
        == "2d40a8d3bcc27ec5d89cb6daf70e1cbd-4a20ab7a81088a2e0dd7d6db2ca73264"
    )
    assert (format_.FORMAT, blake2b(pack(made()), digest_size=16).hexdigest()) == (
        1,
        "df0fb5d8c0af57416914bd632986590c",
    )


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_part_of_a_token_is_refused(cut: int) -> None:
    whole = made()
    with pytest.raises(SnapshotRefused, match="facts cannot be read"):
        unpack(pack(dataclasses.replace(whole, tokens=whole.tokens[:-cut])))
