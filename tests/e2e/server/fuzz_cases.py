"""What the fuzzer sends: requests to every route, derived from the routes and types of the server itself.
Owns the choice of requests and what may come of them; sends nothing and judges nothing."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec.inspect as mi
from hypothesis import strategies as st

from penstock.server import ignored, messages, responses, schema
from penstock.server.routes import make_routes
from tests.e2e.server.fuzz_json import BROKEN, HUGE, Pairs, anything, encode, fits, fits_not

MODEL, ADAPTER = "tiny", "steady"  # the adapter that is there from start to end; others come and go
MAX_MODEL_LEN = 160
MAX_BODY_BYTES = 48 << 10
MAX_CONCURRENT = 32

_PAGE = SimpleNamespace(has_viewers=True)
_SERVICE: Any = SimpleNamespace(
    engine=None, viewers=None, config=_PAGE
)  # routes look at it when they are called, and these never are
ROUTES: dict[str, set[str]] = {route.path: set(route.methods or ()) for route in make_routes(_SERVICE)}
BODIES: dict[str, type] = {
    "/v1/completions": schema.CompletionBody,
    "/v1/chat/completions": schema.ChatBody,
    "/v1/responses": responses.ResponsesBody,
    "/v1/messages": messages.MessagesBody,
    "/v1/messages/count_tokens": messages.CountTokensBody,
    "/tokenize": schema.TokenizeBody,
    "/detokenize": schema.DetokenizeBody,
    "/v1/load_lora_adapter": schema.LoadLoraBody,
    "/v1/unload_lora_adapter": schema.UnloadLoraBody,
    "/cache/flush": schema.NoFields,
    "/cache/prefetch": schema.PrefetchBody,
    "/cache/reset": schema.NoFields,
    "/v1/snapshots": schema.SnapshotBody,
}
QUERIES: dict[str, dict[str, list[str]]] = {
    "/cache/flush": {"level": ["captured", "visible", "persisted"]},
    "/cache/reset": {"tier": ["device", "host", "ssd", "all"]},
    "/v1/snapshots": {"cache_salt": ["", "a"]},
    "/v1/snapshots/no": {"cache_salt": ["", "a"]},
    "/v1/messages": {"beta": ["true"]},
    "/v1/messages/count_tokens": {"beta": ["true"]},
}
GENERATING = ("/v1/completions", "/v1/chat/completions")
DOORS = ("/v1/messages", "/v1/responses")  # of other APIs
HELLO = [{"role": "user", "content": "open the gate"}]
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "When the gate opens", "max_tokens": 2, "seed": 1},
    "/v1/chat/completions": {"model": MODEL, "messages": HELLO, "max_tokens": 2, "seed": 1},
    "/v1/responses": {"model": MODEL, "input": "open the gate", "max_output_tokens": 2, "seed": 1},
    "/v1/messages": {"model": MODEL, "messages": HELLO, "max_tokens": 2, "seed": 1},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": HELLO},
    "/tokenize": {"prompt": "the dog"},
    "/detokenize": {"tokens": [5, 70, 300]},
    "/v1/load_lora_adapter": {"lora_name": "passing", "lora_path": "a1"},
    "/v1/unload_lora_adapter": {"lora_name": "passing"},
    "/cache/flush": {},
    "/cache/prefetch": {
        "prompt": "When the gate opens, the water arrives and the wheel turns for as long as there is some"
    },
    "/cache/reset": {},
    "/v1/snapshots": {
        "prompt": "When the gate opens, the water arrives and the wheel turns for as long as there is some"
    },
}
WITH_FIELDS = sorted(path for path, fields in BASES.items() if fields)
# A field may also be refused under the name of another one that it does not go with.
RELATED: dict[str, set[str]] = {
    "max_completion_tokens": {"max_tokens"},
    "messages": {"prompt", "session_id", "tokens"},
    "prompt": {"max_tokens", "session_id", "tokens"},
    "n": {"n"},
    "tools": {
        "prompt",
        "messages",
        "input",
    },  # the model is told of them in its prompt, which may be too long then
    "system": {"messages"},
    "instructions": {"input"},
    "tool_choice": {"tools"},
}


@dataclass(frozen=True)
class Case:
    """One request, and what the server may say to it."""

    method: str
    target: str  # path and query
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    fields: Mapping[str, Any] | None = (
        None  # what `body` says, where it is one JSON object with each key once
    )
    fault: str | None = (
        None  # the field that is wrong; an answer below 400, or one that names another field, is a finding
    )
    suspect: str | None = None  # the field that may be wrong: whatever is refused must be this one
    legal: bool = False  # nothing is wrong: only 200 will do
    odd: bool = False  # its query is none that the path knows: only a refusal will do
    pieces: int = 0  # send the body in chunks of so many bytes, without its length
    leave_after: int | None = None  # hang up after so many bytes of the answer

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    def curl(self, url: str) -> str:
        """A command for a shell that sends the same bytes."""
        words = [
            "curl",
            "-sS",
            "-i",
            "--path-as-is",
            "-X",
            self.method,
            *(["--head"] if self.method == "HEAD" else []),
        ]
        for name, value in self.headers:
            words += ["-H", f"{name}: {value}"]
        if self.pieces:
            words += ["-H", "Transfer-Encoding: chunked"]
        line = shlex.join([*words, f"{url}{self.target}"])
        if self.body is None:
            return line
        shown = "".join(
            chr(byte) if 32 <= byte < 127 and byte not in b"'\\%" else f"\\x{byte:02x}" for byte in self.body
        )
        return f"printf '{shown}' | {line} --data-binary @-"


# ------------------------------------------------------------------------------------------------- legal ones

# Values that a client may use, by field. A field that is not here gets what its type allows and is not
# promised to be taken.
LEGAL: dict[str, list[Any]] = {
    "model": [MODEL, ADAPTER],
    "prompt": [
        "When the gate",
        [[5, 6, 7], [300]],
        "naïve \U0001f600",
        [9] * 40,
        ["a", "the water arrives " * 6],
    ],
    "messages": [
        HELLO,
        [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "y"}]}],
    ],
    "n": [None, 1, 3],
    "stream": [None, False, True],
    "stream_options": [
        None,
        {"include_usage": True},
        {},
        {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True},
    ],
    "stop": [None, "e", ["the", " a"], [f"{i}\u00e9" for i in range(16)]],
    "stop_token_ids": [None, [], [5, 80, 2**31 - 1], list(range(3, 120))],
    "seed": [7, 0, -(2**63 - 1), 2**63 - 1],
    "ignore_eos": [None, True, False],
    "temperature": [None, 0, 0.7, 1e-4, 5e-324, 100],
    "top_p": [None, 0.1, 0.9, 1, 1e-300],
    "top_k": [None, -1, 0, 1, 5, 2**31 - 1],
    "min_p": [None, 0, 0.1, 1, 1e-300],
    "presence_penalty": [None, -2, 0.5, 2],
    "frequency_penalty": [None, -2, 0.5, 2],
    "repetition_penalty": [None, 1, 1.3, 0.5, 1e-300, 100],
    "max_tokens": [6, 0, 1, 13],
    "max_completion_tokens": [None],
    "cache_salt": [None, "", "a", "\x00"],
    "priority": [None, 0, -(2**31), 2**31 - 1],
    "session_id": [None, None, "s", "\x00", "\U0001f600" * 1024],
    "prompt_cache_key": [None, "k"],
    "kv_residency": [None, "exact", "scored"],
    "kv_pin_spans": [None, None, [], [[0, 1]]],
    "cache_hint": [
        None,
        {},
        {"retain_s": 0},
        {"retain_s": 86400, "priority": "high"},
        {"retain_s": 0.001, "priority": "low"},
        {"release": True},
    ],
    "user": [None, "u"],  # of answers that say it again
    "metadata": [None, {}, {"k": "v"}],
    "logit_bias": [None, {}, {"5": 100, "70": -100.0, "300": 0.5}],
    "echo": [None, True, False],
    "logprobs": [None, 0, 5, 20],
    "top_logprobs": [None, 0, 20],
    "response_format": [None, {"type": "text"}],
    # What these ask for, test_server_structured.py and test_server_tools.py try.
    **{
        key: [None]
        for key in (
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
        )
    },
}


TEXT_PARTS = [
    {"type": "text", "text": "y"},
    {"type": "text", "text": "z", "cache_control": {"type": "ephemeral"}},
]
OF_DOOR: dict[str, dict[str, list[Any]]] = {
    "/v1/responses": {
        "input": [
            "open",
            [{"role": "user", "content": [{"type": "input_text", "text": "y"}]}],
            [{"role": "user", "content": "na\u00efve"}],
        ],
        "instructions": [None, "", "x"],
        "max_output_tokens": [6, 0, 1, 13],
        "stream_options": [None, {"include_obfuscation": True}, {}],
        "tool_choice": [None, "none"],
        "text": [None, {"format": {"type": "text"}}],
    },
    "/v1/chat/completions": {
        "messages": [HELLO, [*HELLO, {"role": "assistant", "content": "It is"}]],
        "min_tokens": [None, 0, 1],
        "chat_template_kwargs": [None, {}, {"enable_thinking": False, "x": [1, "y"]}],
        "reasoning_effort": [None, "none", "high"],
        "thinking_token_budget": [None, 0, 3],
    },
    "/v1/completions": {"min_tokens": [None, 0, 1]},
    "/v1/messages": {
        "messages": [
            HELLO,
            [{"role": "user", "content": TEXT_PARTS}, {"role": "assistant", "content": "b"}, *HELLO],
        ],
        "system": [None, "x", TEXT_PARTS],
        "stop_sequences": [None, [], ["the", " a"]],
        "tool_choice": [None, {"type": "none"}],
        "thinking": [
            None,
            {"type": "adaptive"},
            {"type": "disabled"},
            {"type": "enabled", "budget_tokens": 1},
        ],
    },
}


def legal_options(path: str) -> dict[str, list[Any]]:
    """Every field of a generating route with its legal values. One that is new gets those of its type."""
    options = {}
    for field in mi.type_info(BODIES[path]).fields:
        name = field.encode_name
        own = OF_DOOR.get(path, {}).get(name)
        options[name] = own or LEGAL.get(name) or ([None, True, False] if _is_flag(field.type) else [None])
    for row in ignored.rows_of(BODIES[path].api).values():
        if isinstance(row.takes, tuple) and "." not in row.path:
            options[row.path] = [None, *row.takes]
    if path == "/v1/chat/completions":
        options["logprobs"] = [None, True, False]
    return options


def legal_case(path: str, chosen: Mapping[str, Any]) -> Case:
    """`chosen` without what its other fields rule out."""
    fields = {name: value for name, value in chosen.items() if value is not None}
    if not fields.get("stream"):
        fields.pop("stream_options", None)
    if "session_id" not in fields and "prompt_cache_key" not in fields:
        fields.pop("cache_hint", None)
    if fields.get("kv_residency") != "scored":
        fields.pop("kv_pin_spans", None)
    if path == "/v1/chat/completions" and not fields.get("logprobs"):
        fields.pop("top_logprobs", None)
    if fields.get("add_generation_prompt") or fields.get("messages", HELLO)[-1]["role"] != "assistant":
        fields.pop("continue_final_message", None)
    if fields.get("max_tokens") == 0:
        fields.pop("min_tokens", None)
    if path == "/v1/messages" and fields["max_tokens"] <= 1:
        fields.pop("thinking", None)
    return Case("POST", path, encode(fields), fields=fields, legal=True)


def _is_flag(kind: mi.Type) -> bool:
    return any(isinstance(part, mi.BoolType) for part in getattr(kind, "types", (kind,)))


def _drawn(path: str) -> st.SearchStrategy[Case]:
    choices = {name: st.sampled_from(values) for name, values in legal_options(path).items()}
    return st.fixed_dictionaries(choices).map(lambda chosen: legal_case(path, chosen))


legal_in_choices = st.sampled_from(GENERATING).flatmap(_drawn)
legal = legal_in_choices | st.sampled_from(DOORS).flatmap(_drawn)


# -------------------------------------------------------------------------------------------- one wrong field


@st.composite
def one_field(draw: st.DrawFn) -> Case:
    """A request that is right but for one field: of a wrong type, or of the right one with any value."""
    path = draw(st.sampled_from(WITH_FIELDS))
    field = draw(st.sampled_from(mi.type_info(BODIES[path]).fields))
    name = field.encode_name
    wrong = draw(st.booleans())
    value = draw(fits_not(field.type) if wrong else fits(field.type))
    fields = {**BASES[path], name: value}
    if name == "stream_options":
        fields["stream"] = True
    return Case("POST", path, encode(fields), fields=fields, fault=name if wrong else None, suspect=name)


@st.composite
def absent_or_unknown(draw: st.DrawFn) -> Case:
    """A request that lacks a required field, or has one that nobody knows."""
    path = draw(st.sampled_from(sorted(BODIES)))
    required = [field.encode_name for field in mi.type_info(BODIES[path]).fields if field.required]
    if required and draw(st.booleans()):
        name = draw(st.sampled_from(required))
        fields = {key: value for key, value in BASES[path].items() if key != name}
    else:
        characters = st.characters(
            codec="utf-8", exclude_characters="`"
        )  # the parser's own messages quote names with it
        name = draw(
            st.text(characters, min_size=1, max_size=30).filter(lambda drawn: drawn not in known(path))
        )
        fields = {**BASES[path], name: draw(st.sampled_from([1, None, "x"]))}
    return Case("POST", path, encode(fields), fields=fields, fault=name, suspect=name)


def known(path: str) -> set[str]:
    return {field.encode_name for field in mi.type_info(BODIES[path]).fields}


# ------------------------------------------------------------------------------------------------ wild bodies


@st.composite
def wild_body(draw: st.DrawFn) -> Case:
    """Several fields at once with anything in them, keys that repeat, and bodies that are cut, spoiled or no
    objects at all."""
    path = draw(st.sampled_from(sorted(BODIES)))
    names = [*sorted(known(path)), "x", "", "model"]
    items = [*BASES[path].items(), *draw(st.lists(st.tuples(st.sampled_from(names), anything), max_size=4))]
    data = encode(Pairs(tuple(items)))
    match draw(st.sampled_from(["whole", "whole", "cut", "spoiled", "tail", "other"])):
        case "cut":
            data = data[: draw(st.integers(0, len(data)))]
        case "spoiled":
            at = draw(st.integers(0, len(data) - 1))
            data = (
                data[:at]
                + draw(
                    st.sampled_from([b"\xff", b"\x00", b"\\", b'"', b"}", b"\xc0\x80", b"\xf4\x90\x80\x80"])
                )
                + data[at + 1 :]
            )
        case "tail":
            data += draw(st.sampled_from([b" ", b"\n{}", b"x", b"\x00", b",", b"}", b" " * 3000]))
        case "other":
            data = draw(
                st.sampled_from(
                    [
                        b"",
                        b" ",
                        b"\xef\xbb\xbf" + data,
                        b"[%b]" % data,
                        data.decode("latin-1").encode("utf-16"),
                        *_TEXTS,
                    ]
                )
            )
    headers = draw(st.lists(st.sampled_from(ODD_HEADERS), max_size=2, unique_by=lambda pair: pair[0].lower()))
    pieces = (
        draw(st.sampled_from([0, 0, 0, 1, 7, 4096])) if len(data) < 2000 else draw(st.sampled_from([0, 4096]))
    )
    return Case("POST", path, data, tuple(headers), pieces=pieces)


_TEXTS = [raw.text for raw in (*BROKEN, *HUGE)] + [
    b" " * (MAX_BODY_BYTES + 1),
    b'{"model":"' + b"z" * MAX_BODY_BYTES + b'"}',
    b"null",
    b"0",
    b'""',
]
ODD_HEADERS = [
    ("Content-Type", "text/plain"),
    ("Content-Type", "application/x-www-form-urlencoded"),
    ("Content-Type", "application/json; charset=utf-16"),
    ("Content-Encoding", "gzip"),
    ("Content-Encoding", ""),
    ("Accept", "text/html;q=0.1, */*;q=x"),
    ("Accept-Encoding", "br;q=1.0, gzip"),
    ("Authorization", "Bearer " + "k" * 300),
    ("Authorization", "Basic \xe9\xa0"),
    ("X-Request-Id", "a" * 3000),
    ("X-Forwarded-For", "::1, unknown"),
    ("Host", "[::1"),
    ("Host", ""),
    ("Cookie", "a=b; " * 50),
    ("Expect", "100-continue"),
    ("Upgrade", "h2c"),
    ("Range", "bytes=0-1"),
    ("If-None-Match", "*"),
]
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW", "get"]
ODD_QUERIES = (
    "\n?\n?&&\n?=\n?a\n?a=1&a=2\n?%00=%00\n?level\n?level=\n?tier=all&tier=all\n?tier=ALL\n?level=visible%00\n?\x7f\n?%ff=%fe\n"
    f"?tier=remote\n?x={'y' * 3000}\n?{'q' * 3000}\n?a[]=1;b=2\n?+=+"
).split("\n")
ODD_ENDS = [
    "",
    "/",
    "//",
    "/..",
    "/%2e%2e",
    "%00",
    "%2f",
    ";x",
    "/%ff",
    "/" + "p" * 2000,
    "/" + ADAPTER,
    "/" + MODEL,
    "/a/b",
]


@st.composite
def any_route(draw: st.DrawFn) -> Case:
    """Any method on any path, near misses included, with odd queries and headers."""
    route = draw(st.sampled_from(sorted(ROUTES)))
    names = draw(st.sampled_from([MODEL, ADAPTER, "no", "%ed%a0%80", "a/b"]))
    path = route.replace("{model:path}", names).replace("{name:path}", names)
    method = draw(st.sampled_from(sorted(ROUTES[route])) if draw(st.booleans()) else st.sampled_from(METHODS))
    known_queries = [f"{name}={value}" for name, values in QUERIES.get(path, {}).items() for value in values]
    query = draw(st.just("") | st.sampled_from([*ODD_QUERIES, *(f"?{one}" for one in known_queries)]))
    end = draw(st.just("") | st.sampled_from(ODD_ENDS)) if draw(st.booleans()) else ""
    headers = draw(st.lists(st.sampled_from(ODD_HEADERS), max_size=2, unique_by=lambda pair: pair[0].lower()))
    body = draw(st.sampled_from([None, None, b"", b"{}", encode(BASES.get(path, {}))]))
    odd = query.strip("?&") != "" and query.strip("?") not in known_queries
    return Case(method, path + end + query, body, tuple(headers), odd=odd)


# ------------------------------------------------------------------------------------------------ crowds, TCP


@st.composite
def leaving(draw: st.DrawFn) -> Case:
    """A legal request whose client hangs up before, within or after the answer."""
    case = draw(legal_in_choices)
    fields = {**case.fields, "max_tokens": draw(st.sampled_from([1, 30, 100])), "ignore_eos": True}
    return dataclasses.replace(
        case,
        body=encode(fields),
        fields=fields,
        legal=False,
        leave_after=draw(st.sampled_from([0, 1, 200, 2000])),
    )


crowd = st.lists(st.one_of(legal, leaving(), leaving(), one_field(), any_route()), min_size=2, max_size=6)


@dataclass(frozen=True)
class Bytes:
    """What is written to a connection, piece by piece, and how that ends."""

    pieces: tuple[bytes, ...]
    end: str  # "close", "reset", or "half" or "wait": the answers are read, our side closed or not

    def shell(self, host: str, port: int) -> str:
        shown = "".join(f"\\x{byte:02x}" for byte in b"".join(self.pieces))
        return f"printf '{shown}' | nc -N {host} {port}   # {self.end}"


def _head(path: str, length: str, *more: str) -> bytes:
    return "\r\n".join(
        [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {length}", *more, "", ""]
    ).encode("latin-1")


GOOD = encode(BASES["/v1/completions"])
_WHOLE = _head("/v1/completions", str(len(GOOD))) + GOOD
_LONG = encode({**BASES["/v1/completions"], "max_tokens": 100, "stream": True, "ignore_eos": True})
_CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
LINES = [
    _WHOLE,
    _head("/v1/completions", str(len(_LONG))) + _LONG,
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /live HTTP/1.0\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://other/health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /cache/flush?level=visible#x HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET  /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n: nothing\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX: \x00\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(300)) + b"\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"h" * 70_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n",  # noqa: E501
    _head("/v1/completions", "x"),
    _head("/v1/completions", "-1"),
    _head("/v1/completions", "+5") + b"12345",
    _head("/v1/completions", "1e3"),
    _head("/v1/completions", "\xb2"),
    _head("/v1/completions", "9" * 30),
    _head("/v1/completions", "9" * 5000),
    _head("/v1/completions", "5", "Content-Length: 6") + b"123456",
    _head("/v1/completions", "5", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
    _head("/v1/completions", str(len(GOOD) - 3)) + GOOD,
    _head("/v1/completions", str(len(GOOD) + 3)) + GOOD,
    _head("/tokenize", "100000", "Expect: 100-continue"),
    _CHUNKED + b"5\r\n{\"mod\r\nzz\r\n",
    _CHUNKED + b"FFFFFFFFFFFFFFFFF\r\n{",
    _CHUNKED + b'%x;ext="1"\r\n%b\r\n0\r\nTrailer: x\r\n\r\n' % (len(GOOD), GOOD),
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"PUT /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"zz\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\r\n\r\n\r\n",
    b"\x00" * 100,
    b"A" * 70_000,
]  # fmt: skip


@st.composite
def tcp(draw: st.DrawFn) -> Bytes:
    """Requests and garbage in a row on one connection, cut anywhere."""
    data = b"".join(draw(st.lists(st.sampled_from(LINES) | st.binary(max_size=20), min_size=1, max_size=4)))
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=2)))
    pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    if draw(st.integers(0, 3)) == 0:
        pieces.pop()
    return Bytes(
        tuple(piece for piece in pieces if piece), draw(st.sampled_from(["wait", "half", "close", "reset"]))
    )
