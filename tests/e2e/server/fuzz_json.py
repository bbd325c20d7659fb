"""JSON that a client might send, derived from the server's own types: what fits them, what does not, and text
that is no JSON. Owns values; sends nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec.inspect as mi
from hypothesis import strategies as st


@dataclass(frozen=True)
class Raw:
    """Text that goes into the body as it is, JSON or not."""

    text: bytes


@dataclass(frozen=True)
class Pairs:
    """An object whose keys may repeat."""

    items: tuple[tuple[str, Any], ...]


def encode(value: Any) -> bytes:
    """As `json.dumps`, and with what that cannot say. Half a surrogate pair becomes its escape."""
    match value:
        case Raw():
            return value.text
        case Pairs() | dict():
            items = value.items if isinstance(value, Pairs) else value.items()
            return b"{%b}" % b",".join(
                json.dumps(str(key)).encode() + b":" + encode(item) for key, item in items
            )
        case list():
            return b"[%b]" % b",".join(map(encode, value))
        case _:
            return json.dumps(value).encode()


# Well-formed JSON by kind; the parser has to take it, the schema need not.
BY_KIND: dict[str, list[Any]] = {
    "null": [None],
    "bool": [True, False],
    "int": [0, 1, -1, 7, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, Raw(b"-0")],
    "float": [0.5, -0.5, 1e308, 5e-324, Raw(b"-0.0"), Raw(b"1e-400"), Raw(b"1E2"), Raw(b"0." + b"3" * 400)],
    "str": [
        "",
        "x",
        "tiny",
        "\x00",
        "a\x00b",
        "\U0001f600",
        "naïve 東京",
        "<|im_end|>",
        "\u202e\ufeff",
        "x" * 300,
        "0",
        "null",
        "../..",
        "%00",
    ],
    "array": [[], [None], [[]], [1, "x"], [{}], [0] * 100],
    "object": [{}, {"a": 1}, {"": None}, {"type": "text"}, {"include_usage": 1}],
}
# Text that is not well-formed, or so deep, long or large that a parser may refuse it.
_NO_JSON = (
    rb"""NaN Infinity -Infinity nan +1 01 1. .5 0x10 1_000 tru None 'x' // /**/1 , { [1,] {"a":1,} {"a"} {1:2} "x "\x" "\u12" """  # noqa: E501
    rb""""\ud800" "\ud800\ud800" "\udfff" "a\ud83d" """
)
_NO_TEXT = [b"", b"\x00", b"\xff", b"\xef\xbb\xbf1", b'"\x01"', b'"\xff\xfe"', b'"\xed\xa0\x80"']
_NO_END = [b"[" * 40, b"[" * 3000, b'{"a":' * 3000, b"[" * 3000 + b"]" * 3000]
BROKEN: list[Raw] = [Raw(text) for text in (*_NO_JSON.split(), *_NO_TEXT, *_NO_END)]
HUGE: list[Raw] = [
    Raw(b"1e400"),
    Raw(b"-1e400"),
    Raw(b"9" * 5000),
    Raw(b"1e" + b"9" * 400),
    Raw(b'"' + b"y" * 20_000 + b'"'),
    Raw(b"[" * 60 + b"]" * 60),
    Raw(b"[" + b"0," * 9000 + b"0]"),
    Raw(b'{"k":' * 60 + b"1" + b"}" * 60),
]

well_formed = st.sampled_from([value for values in BY_KIND.values() for value in values])
anything = st.one_of(
    well_formed,
    st.sampled_from(HUGE),
    st.sampled_from(BROKEN),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=5,
    ),
)


# ------------------------------------------------------------------------------------------------------ types


def kinds(kind: mi.Type) -> set[str]:
    """The kinds of JSON value that a type can be made of. Raises for a type that this fuzzer has not met."""
    match kind:
        case mi.NoneType():
            return {"null"}
        case mi.BoolType():
            return {"bool"}
        case mi.IntType():
            return {"int"}
        case mi.FloatType():
            return {"int", "float"}
        case mi.LiteralType():
            return {"bool"} if isinstance(kind.values[0], bool) else {"str"}
        case mi.StrType():
            return {"str"}
        case mi.ListType() | mi.TupleType():
            return {"array"}
        case mi.StructType() | mi.DictType():
            return {"object"}
        case mi.AnyType():
            return set(BY_KIND)
        case mi.UnionType():
            return set().union(*map(kinds, kind.types))
    raise NotImplementedError(f"the fuzzer does not know the type {kind}: say here what fits it")


def fits(kind: mi.Type) -> st.SearchStrategy[Any]:
    """Values that satisfy a type. Whether they make sense is another question."""
    match kind:
        case mi.NoneType():
            return st.none()
        case mi.BoolType():
            return st.booleans()
        case mi.IntType():
            low, high = _bounds(kind)
            edges = [edge for edge in (low, low + 1, 0, 1, 2, 3, 5, high - 1, high) if low <= edge <= high]
            return st.sampled_from(edges) | st.integers(low, min(high, low + 40))
        case mi.FloatType():
            return st.sampled_from([0, 1, -1, 2, -2, 100, *BY_KIND["float"]]) | st.floats(-3, 3)
        case mi.StrType(pattern=str()):
            # names of functions: no other field has a pattern
            return st.sampled_from(["f", "a-b_c.1", "x" * 64])
        case mi.StrType():
            low, high = kind.min_length or 0, kind.max_length or 400
            texts = [text for text in BY_KIND["str"] if low <= len(text) <= high]
            return st.sampled_from(texts) | st.text(
                st.characters(exclude_categories=["Cs"]), min_size=low, max_size=min(high, 12)
            )
        case mi.LiteralType():
            return st.sampled_from(list(kind.values))
        case mi.ListType():
            return st.lists(
                fits(kind.item_type), min_size=kind.min_length or 0, max_size=max(3, kind.min_length or 0)
            )
        case mi.TupleType():
            return st.tuples(*map(fits, kind.item_types)).map(list)
        case mi.StructType():
            return _struct(kind)
        case mi.DictType() if isinstance(kind.value_type, mi.AnyType):  # schemas
            return st.sampled_from(
                [
                    {},
                    {"type": "object"},
                    {"enum": [1, "a"]},
                    {"type": "strange"},
                    {"$ref": "#"},
                    {"properties": {"a": {}}},
                ]
            )
        case mi.DictType():
            return st.dictionaries(fits(kind.key_type), fits(kind.value_type), max_size=3)
        case mi.AnyType():
            return well_formed
        case mi.UnionType():
            return st.one_of(*map(fits, kind.types))
    raise NotImplementedError(f"the fuzzer does not know the type {kind}: say here what fits it")


def fits_not(kind: mi.Type) -> st.SearchStrategy[Any]:
    """Well-formed JSON that the type certainly refuses: of another kind, out of its bounds, or with such a
    part."""
    taken = kinds(kind)
    wrong = [st.sampled_from(values) for name, values in BY_KIND.items() if name not in taken]
    wrong.append(st.sampled_from([Raw(b"1e400"), Raw(b"-1e400")]))
    if not taken & {"array", "object"}:
        wrong.append(st.sampled_from([Raw(b"[" * 60 + b"]" * 60), Raw(b'{"k":' * 60 + b"1" + b"}" * 60)]))
    for part in _parts(kind):
        match part:
            case mi.IntType() if "float" not in taken:
                wrong.append(st.sampled_from(list(_outside(part)) or [0.5]))
            case mi.LiteralType():
                wrong.append(st.sampled_from([text for text in BY_KIND["str"] if text not in part.values]))
            case mi.StrType(min_length=low) if low:
                wrong.append(st.just(""))
            case mi.ListType() if not isinstance(part.item_type, mi.AnyType):
                wrong.append(
                    st.tuples(fits(part), fits_not(part.item_type)).map(lambda both: [*both[0], both[1]])
                )
                if part.min_length:
                    wrong.append(st.just([]))
            case mi.StructType():
                wrong.append(_broken_struct(part))
    return st.one_of(*wrong)


def _parts(kind: mi.Type) -> Iterator[mi.Type]:
    yield from kind.types if isinstance(kind, mi.UnionType) else (kind,)


def _bounds(kind: mi.IntType) -> tuple[int, int]:
    low = kind.ge if kind.ge is not None else -(2**70) if kind.gt is None else kind.gt + 1
    high = kind.le if kind.le is not None else 2**70 if kind.lt is None else kind.lt - 1
    return low, high


def _outside(kind: mi.IntType) -> Iterator[int]:
    low, high = _bounds(kind)
    if low > -(2**70):
        yield from (low - 1, -(2**63), -(2**80))
    if high < 2**70:
        yield from (high + 1, 2**63, 2**64, 10**40)


def _struct(kind: mi.StructType) -> st.SearchStrategy[Any]:
    required = {field.encode_name: fits(field.type) for field in kind.fields if field.required}
    if kind.tag_field is not None:
        required[kind.tag_field] = st.just(kind.tag)
    optional = {field.encode_name: fits(field.type) for field in kind.fields if not field.required}
    return st.fixed_dictionaries(required, optional=optional)


def _broken_struct(kind: mi.StructType) -> st.SearchStrategy[Any]:
    """One of its fields is wrong or missing, or there is one more."""
    whole = _struct(kind)
    ways = [
        st.tuples(whole, st.text("abc_", min_size=6, max_size=9)).map(lambda both: {**both[0], both[1]: 1})
    ]
    if (tag := kind.tag_field) is not None:
        ways.append(whole.map(lambda fields: {**fields, tag: "image"}))
        ways.append(whole.map(lambda fields: {key: value for key, value in fields.items() if key != tag}))
    for field in kind.fields:
        name = field.encode_name
        ways.append(
            st.tuples(whole, st.just(name), fits_not(field.type)).map(
                lambda three: {**three[0], three[1]: three[2]}
            )
        )
        if field.required:
            ways.append(
                st.tuples(whole, st.just(name)).map(
                    lambda both: {key: value for key, value in both[0].items() if key != both[1]}
                )
            )
    return st.one_of(*ways)
