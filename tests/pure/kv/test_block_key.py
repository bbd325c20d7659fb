"""Keys: what they cover, and that nothing collides by the way it is written down.

Holds invariant 13: a key covers parent, tokens and every field of a framed scope."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.contract import TOKEN_IN_FLIGHT
from penstock.errors import InvariantBroken
from penstock.kv.blocks.key import KEY_BYTES, Scope, block_key, prefix_keys

SCOPE = Scope(
    weights=b"weights",
    kv_dtype="float32",
    layout=b"layout",
    block_tokens=4,
    position_scheme="rope theta=10000.0",
)
DIGEST = SCOPE.digest()
TEXT_FIELDS = ["kv_dtype", "position_scheme", "adapter", "adapter_version", "salt"]


def colliding_scopes() -> list[tuple[Scope, Scope]]:
    """Pairs that differ only in where one field ends and the next begins."""
    return [
        (
            dataclasses.replace(SCOPE, **{one: "ab", other: ""}),
            dataclasses.replace(SCOPE, **{one: "a", other: "b"}),
        )
        for one, other in itertools.permutations(TEXT_FIELDS, 2)
    ]


def test_text_cannot_wander_from_one_field_of_a_scope_into_another():
    for one, other in colliding_scopes():
        assert one.digest() != other.digest(), (one, other)


def test_a_tenant_salt_and_an_adapter_name_cannot_collide():
    tenant = dataclasses.replace(SCOPE, salt="alice")
    adapter = dataclasses.replace(SCOPE, adapter="alice")
    version = dataclasses.replace(SCOPE, adapter_version="alice")
    assert len({SCOPE.digest(), tenant.digest(), adapter.digest(), version.digest()}) == 4


def test_every_field_of_a_scope_counts():
    others = {
        "weights": b"other",
        "kv_dtype": "bfloat16",
        "layout": b"other",
        "block_tokens": 8,
        "position_scheme": "rope theta=500000.0",
        "adapter": "sql",
        "adapter_version": "2",
        "salt": "s",
    }
    assert set(others) == {field.name for field in dataclasses.fields(Scope)}
    digests = {dataclasses.replace(SCOPE, **{name: value}).digest() for name, value in others.items()}
    assert len(digests | {DIGEST}) == len(others) + 1


def test_a_salt_may_be_any_text_a_client_sends():
    odd = [
        dataclasses.replace(SCOPE, salt=salt).digest()
        for salt in ("\ud800", "\udfff", "\x00", "", "é", "e\u0301")
    ]
    assert len(set(odd)) == len(odd)


def test_a_key_depends_on_scope_parent_and_every_token():
    tokens = [1, 2, 3, 4]
    first = block_key(None, tokens, DIGEST)
    assert len(first) == KEY_BYTES == 16
    others = {
        block_key(first, tokens, DIGEST),
        block_key(bytes(KEY_BYTES), tokens, DIGEST),
        block_key(None, tokens, dataclasses.replace(SCOPE, salt="x").digest()),
        *(block_key(None, [*tokens[:i], 9, *tokens[i + 1 :]], DIGEST) for i in range(4)),
    }
    assert len(others | {first}) == 8


def test_a_parent_cannot_be_forged_from_tokens():
    """The bytes of a parent, read as tokens of a longer first block, give another key."""
    parent = block_key(None, [1, 2, 3, 4], DIGEST)
    as_tokens = np.frombuffer(parent, "<u4").tolist()
    assert block_key(parent, [5, 6, 7, 8], DIGEST) != block_key(None, [*as_tokens, 5, 6, 7, 8], DIGEST)


# Holds invariant 14: only full blocks have a key.
@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.sampled_from([1, 4, 7, 16]))
@example([], 4)
@example([1, 2, 3], 4)
@example([0, 0, 0, 0, 2**32 - 1, 2**31, 2**31 - 1, 1], 4)
@example(list(range(40)), 1)
@example(list(range(33)), 16)
def test_prefix_keys_are_the_chain_of_block_keys_over_full_blocks(tokens, block_tokens):
    expected = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        expected.append(
            block_key(expected[-1] if expected else None, tokens[start : start + block_tokens], DIGEST)
        )
    assert prefix_keys(tokens, block_tokens, DIGEST) == tuple(expected)
    assert prefix_keys(np.array(tokens, np.int64), block_tokens, DIGEST) == tuple(expected)
    assert prefix_keys(tuple(tokens), block_tokens, DIGEST) == tuple(expected)


def test_keys_of_long_prompts_are_the_same_chain_computed_or_remembered():
    """Stretches of a long prompt are remembered: the second answer comes from there, and what differs is told
    apart."""
    one = list(range(4 * 200 + 3))
    other = [*one[:400], one[400] + 1, *one[401:]]
    for tokens, scope in [
        (one, DIGEST),
        (one, DIGEST),
        (other, DIGEST),
        (one, b"another scope"),
        (one[256:], DIGEST),
        (one[:300], DIGEST),
    ]:
        expected: list[bytes] = []
        for start in range(0, len(tokens) - 3, 4):
            expected.append(block_key(expected[-1] if expected else None, tokens[start : start + 4], scope))
        assert prefix_keys(tokens, 4, scope) == tuple(expected)


@pytest.mark.parametrize("bad", [TOKEN_IN_FLIGHT, 2**32, 2**32 + 1])
def test_a_token_that_is_not_known_or_does_not_fit_gets_no_key(bad):
    for tokens in ([1, 2, 3, bad], np.array([1, 2, 3, bad], np.int64)):
        with pytest.raises(InvariantBroken):
            block_key(None, tokens, DIGEST)
        with pytest.raises(InvariantBroken):
            prefix_keys(tokens, 4, DIGEST)


@pytest.mark.parametrize("bad", [[1.0, 2.0], np.array([1.0, 2.0])])
def test_fractional_tokens_get_no_key(bad):
    with pytest.raises(InvariantBroken):
        block_key(None, bad, DIGEST)
