"""What every answer of the server has to be, from docs/http-api.md. Owns the judgement of one answer; sends
nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from penstock.testing.tiny_models import tiny_tokenizer
from tests.e2e.server.fuzz_cases import DOORS, GENERATING, MAX_MODEL_LEN, RELATED, Case

MAX_ERROR_BYTES = 4096
SOURCES = {"device", "host", "ssd", "remote", "computed"}
Json = dict[str, Any]
_tokenizer = tiny_tokenizer()


@dataclass(frozen=True)
class Answer:
    """What came back. `whole` is false where the client hung up first."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    whole: bool = True


class Finding(AssertionError):
    """The server did what it must not do."""


def need(condition: object, what: str) -> None:
    if not condition:
        raise Finding(what)


def strict_json(text: bytes) -> Any:
    """JSON as the standard has it: no NaN, no key twice."""

    def constant(name: str) -> None:
        raise Finding(f"the answer has {name}, which is no JSON")

    def unique(pairs: list[tuple[str, Any]]) -> Json:
        need(len(dict(pairs)) == len(pairs), f"the answer repeats a key: {[key for key, _ in pairs]}")
        return dict(pairs)

    try:
        return json.loads(text.decode(), parse_constant=constant, object_pairs_hook=unique)
    except ValueError as error:
        raise Finding(f"the answer is no JSON: {error}: {text[:200]!r}") from None


def judge(case: Case, answer: Answer) -> None:
    """Raises Finding where the answer is not one that the case may have."""
    status = answer.status
    need(
        status in (200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 429),
        f"status {status}: {answer.body[:500]!r}",
    )
    if not answer.whole:
        return
    if case.method == "HEAD":
        need(not answer.body, "an answer to HEAD has a body")
        need(status != 200 or not case.odd, "a query that the path does not know was taken")
        return
    if status == 200:
        need(case.fault is None, f"{case.fault} is wrong, and was taken")
        need(not case.odd, "a query that the path does not know was taken")
        try:
            (_OF_PATH.get(case.path) or _nothing)(case, answer)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise Finding(f"an answer of another shape ({error!r}): {answer.body[:300]!r}") from error
        return
    error = check_error(answer)
    if (
        case.path in ("/v1/messages", "/v1/messages/count_tokens")
        and ("not valid HTTP") not in error["message"]
    ):
        need(b'"request_id"' in answer.body, "an error of another API")
    need(not case.legal or status == 429, f"a legal request is refused: {error['message']}")
    _check_named(case, status, error)
    need(
        ("allow" in answer.headers) == (status == 405),
        "405 says which methods there are, and nothing else does",
    )
    need(
        ("retry-after" in answer.headers) == (status == 429),
        "429 says when to come back, and nothing else does",
    )


def check_error(answer: Answer) -> Json:
    need(
        answer.headers.get("content-type") == "application/json",
        f"an error of type {answer.headers.get('content-type')}",
    )
    body = strict_json(answer.body)
    need(
        isinstance(body, dict) and set(body) in ({"error"}, {"type", "error", "request_id"}),
        "an error is OpenAI's or Anthropic's",
    )
    error = body["error"]
    need(
        isinstance(error, dict) and set(error) == {"message", "type", "param", "code"},
        f"an error has four keys, this one {list(error)}",
    )
    need(isinstance(error["message"], str) and error["message"], "an error has a message")
    need(isinstance(error["type"], str) and error["type"], "an error has a type")
    need(
        all(isinstance(error[key], str | None) for key in ("param", "code")),
        "param and code are text or null",
    )
    need(len(answer.body) <= MAX_ERROR_BYTES, f"an error of {len(answer.body)} bytes")
    return error


def _check_named(case: Case, status: int, error: Json) -> None:
    # what is there already, or not, is no field's fault
    if case.suspect is None or status in (408, 409, 413, 415, 429):
        return
    param = error["param"]
    allowed = {case.suspect} if case.fault else {case.suspect, *RELATED.get(case.suspect, ())}
    need(
        param is not None and any(_within(param, name) for name in allowed),
        f"{case.suspect} is refused as {param!r}: {error['message']}",
    )


def _within(param: str, name: str) -> bool:
    """Whether `param` is the field or a place in it, as `stop[0]` or `stream_options.x`."""
    return param == name or param.startswith((f"{name}.", f"{name}["))


# ------------------------------------------------------------------------------------------------ generations


@dataclass(frozen=True)
class Choice:
    """One choice in the words that both routes and streams share."""

    text: str
    finish: str
    tokens: tuple[str, ...]
    logprobs: tuple[float | None, ...]
    # alternatives, where some were asked for; of chat without the chosen token
    tops: tuple[Mapping[str, float] | None, ...] = ()
    offsets: tuple[int, ...] = ()  # of completions


@dataclass(frozen=True)
class Generated:
    """A checked answer."""

    choices: list[Choice]
    usage: Json | None  # None: a stream that was not asked for it


def generated(case: Case, answer: Answer) -> Generated:
    """What a 200 of a generating route says, streamed or not."""
    if case.path in DOORS:
        return of_door(case, answer)
    fields = {name: value for name, value in (case.fields or {}).items() if value is not None}
    chat = case.path == "/v1/chat/completions"
    if fields.get("stream"):
        replies, usage = _events(answer, fields.get("stream_options") or {})
    else:
        need(answer.headers.get("content-type") == "application/json", "a reply that is not streamed is JSON")
        whole = strict_json(answer.body)
        replies, usage = [whole], whole.pop("usage")
    kind = ("chat.completion" if chat else "text_completion") + (
        ".chunk" if chat and fields.get("stream") else ""
    )
    parts: dict[int, list[Json]] = {}
    for reply in replies:
        need(
            set(reply) - _ids_asked(fields) == {"id", "object", "created", "model", "choices"},
            f"a reply has the keys {sorted(reply)}",
        )
        need(reply["object"] == kind, f"object {reply['object']}")
        need(reply["model"] == fields["model"], "the reply is of another model")
        need(reply["id"] == replies[0]["id"], "events of one reply have one id")
        for choice in reply["choices"]:
            parts.setdefault(choice["index"], []).append(choice)
    prompts = [] if chat else _prompts(fields["prompt"])
    num_choices = (fields.get("n") or 1) * (1 if chat else len(prompts))
    need(
        sorted(parts) == list(range(num_choices)),
        f"{num_choices} choices were asked for, these came: {sorted(parts)}",
    )
    read = _read_chat if chat else _read_completion
    choices = [read(fields, prompts, index, parts[index]) for index in range(num_choices)]
    if usage is not None:
        _check_usage(fields, None if chat else sum(map(len, prompts)), choices, usage)
    return Generated(choices, usage)


def of_door(case: Case, answer: Answer) -> Generated:
    """What a 200 of another API says, in the same words as a choice."""
    fields = {name: value for name, value in (case.fields or {}).items() if value is not None}
    if not fields.get("stream"):
        need(answer.headers.get("content-type") == "application/json", "a reply that is not streamed is JSON")
        made = strict_json(answer.body)
    else:
        need(
            answer.headers.get("content-type", "").startswith("text/event-stream"),
            "a stream is a text/event-stream",
        )
        events = []
        for event in answer.body.split(b"\n\n")[:-1]:
            name, _, data = event.partition(b"\n")
            events.append(strict_json(data.removeprefix(b"data: ")))
            need(name.decode() == f"event: {events[-1]['type']}", f"an event named {name!r}")
        made = _message(events) if case.path == "/v1/messages" else _response(events)
    need(made["model"] == fields["model"], "the reply is of another model")
    return Generated(
        [_of_message(fields, made) if case.path == "/v1/messages" else _of_response(fields, made)], None
    )


def _message(events: list[Json]) -> Json:
    need(
        [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"],
        f"a stream ends with {events[-2:]}",
    )
    texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    begun = [event["index"] for event in events if event["type"] == "content_block_start"]
    ended = [event["index"] for event in events if event["type"] == "content_block_stop"]
    need(begun == ended == [0], f"blocks begin {begun} and end {ended}")
    return {
        **events[0]["message"],
        "content": [{"type": "text", "text": "".join(texts)}],
        **events[-2]["delta"],
        "usage": events[-2]["usage"],
    }


def _of_message(fields: Json, made: Json) -> Choice:
    need(
        set(made) == {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"},
        f"a message has {list(made)}",
    )
    (block,) = made["content"]
    need(made["usage"]["output_tokens"] <= fields["max_tokens"], f"usage {made['usage']}")
    need(
        (made["stop_sequence"] is None) == (made["stop_reason"] != "stop_sequence"),
        "a sequence goes with its reason",
    )
    for one in fields.get("stop_sequences") or []:
        need(one not in block["text"], f"{one!r} is in {block['text']!r}")
    return Choice(block["text"], made["stop_reason"], (), ())


def _response(events: list[Json]) -> Json:
    need([event["sequence_number"] for event in events] == list(range(len(events))), "events are numbered")
    made = events[-1]["response"]
    need(
        events[-1]["type"] in ("response.completed", "response.incomplete"),
        f"a stream ends with {events[-1]['type']}",
    )
    texts = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    need(texts == made["output"][0]["content"][0]["text"], "the deltas are not the text")
    return dict(made)


def _of_response(fields: Json, made: Json) -> Choice:
    (item,) = made["output"]
    need(
        made["object"] == "response" and item["status"] == made["status"],
        f"status {made['status']} and {item['status']}",
    )
    need(
        fields.get("max_output_tokens") is None
        or made["usage"]["output_tokens"] <= fields["max_output_tokens"],
        f"usage {made['usage']}",
    )
    return Choice(item["content"][0]["text"], made["status"], (), ())


def _events(answer: Answer, options: Json) -> tuple[list[Json], Json | None]:
    need(
        answer.headers.get("content-type", "").startswith("text/event-stream"),
        "a stream is a text/event-stream",
    )
    need(
        answer.body.endswith(b"data: [DONE]\n\n"),
        f"a stream ends with [DONE], this one with {answer.body[-80:]!r}",
    )
    events = answer.body.split(b"\n\n")[:-2]
    need(
        all(event.startswith(b"data: ") and b"\n" not in event for event in events),
        "an event is one line of data",
    )
    replies = [strict_json(event.removeprefix(b"data: ")) for event in events]
    need(not any("error" in reply for reply in replies), f"a stream ended with an error: {replies[-1]}")
    usage = None
    if options.get("include_usage"):
        need(replies[-1]["choices"] == [], "the event with the usage has no choices")
        usage = replies.pop().pop("usage")
    if options.get("include_usage") or options.get("continuous_usage_stats"):
        everywhere = bool(options.get("continuous_usage_stats"))
        need(
            all((reply.pop("usage") is not None) == everywhere for reply in replies),
            "usage is where it was asked for, else null",
        )
    if options.get("include_obfuscation"):
        need(all(isinstance(reply.pop("obfuscation"), str) for reply in replies), "every chunk is padded")
    return replies, usage


def _prompts(prompt: Any) -> list[list[int]]:
    """Token ids of each prompt, by a tokenizer of our own."""
    items = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    return [_tokenizer.encode(item).ids if isinstance(item, str) else item for item in items]


def _ids_asked(fields: Json) -> set[str]:
    """Keys that are there besides."""
    ids = {"token_ids", "prompt_token_ids"} if fields.get("return_token_ids") else set()
    return ids | {"prompt_logprobs"} if fields.get("prompt_logprobs") is not None else ids


def _read_completion(fields: Json, prompts: Sequence[list[int]], index: int, parts: list[Json]) -> Choice:
    keys = {"index", "text", "logprobs", "finish_reason"}
    need(all(set(part) - _ids_asked(fields) == keys for part in parts), "a choice has four keys")
    text = "".join(part["text"] for part in parts)
    ids = prompts[index // (fields.get("n") or 1)]
    asked = fields.get("logprobs")
    tokens, logprobs, alternatives, offsets = [], [], [], []
    for part in parts:
        scores = part["logprobs"]
        need(
            (scores is None) == (asked is None),
            "logprobs are there where they were asked for, and nowhere else",
        )
        if scores is not None:
            need(
                set(scores) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"},
                "logprobs have four keys",
            )
            tops = scores["top_logprobs"]
            need((tops is None) == (asked == 0), "alternatives are there where some were asked for")
            columns = [
                scores["tokens"],
                scores["token_logprobs"],
                scores["text_offset"],
                *([] if tops is None else [tops]),
            ]
            need(
                len(set(map(len, columns))) == 1, f"logprobs of different lengths: {list(map(len, columns))}"
            )
            tokens += scores["tokens"]
            logprobs += scores["token_logprobs"]
            offsets += scores["text_offset"]
            alternatives += tops or []
            for token, logprob, top in zip(
                scores["tokens"], scores["token_logprobs"], tops or [], strict=False
            ):
                _check_top(token, logprob, top, asked)
    first = bool(fields.get("echo")) and asked is not None
    need(
        all(_is_logprob(value) or (value is None and first and at == 0) for at, value in enumerate(logprobs)),
        f"logprobs {logprobs}",
    )
    need(
        offsets == sorted(offsets) and all(0 <= offset <= len(text) for offset in offsets),
        f"offsets {offsets} in {len(text)} characters",
    )
    made = text
    if fields.get("echo"):
        shown = _tokenizer.decode(ids, skip_special_tokens=False)
        need(text.startswith(shown), f"the echo of {shown!r} begins {text[: len(shown)]!r}")
        made = text[len(shown) :]
        need(asked is None or len(tokens) >= len(ids), "an echo with logprobs has those of its prompt")
    _check_stops(fields, made)
    return Choice(text, _finish(parts), tuple(tokens), tuple(logprobs), tuple(alternatives), tuple(offsets))


def _check_top(token: str, logprob: float | None, top: Any, asked: int) -> None:
    if logprob is None:
        need(top is None, "a token without a logprob has no alternatives")
        return
    need(
        isinstance(top, dict) and asked <= len(top) <= asked + 1,
        f"{asked} alternatives were asked for, these came: {top}",
    )
    need(
        top.get(token) == logprob and all(map(_is_logprob, top.values())),
        f"{token!r} of {logprob} among {top}",
    )


def _read_chat(fields: Json, prompts: Sequence[list[int]], index: int, parts: list[Json]) -> Choice:
    streamed = bool(fields.get("stream"))
    keys = {"index", "delta" if streamed else "message", "logprobs", "finish_reason"}
    need(
        all(set(part) - _ids_asked(fields) == keys for part in parts), f"a choice has the keys {sorted(keys)}"
    )
    said = [part["delta" if streamed else "message"] for part in parts]
    need(
        said[0]["role"] == "assistant" and not any("role" in one for one in said[1:]), "the role is said once"
    )
    text = "".join(one.get("content", "") for one in said)
    tokens, logprobs, alternatives = [], [], []
    for number, part in enumerate(parts):
        scores = part["logprobs"]
        opening = streamed and number == 0
        need(
            (scores is None) == (opening or not fields.get("logprobs")),
            "logprobs are there where they were asked for, and nowhere else",
        )
        for entry in [] if scores is None else scores["content"]:
            tops = entry["top_logprobs"]
            need(len(tops) == (fields.get("top_logprobs") or 0), f"{len(tops)} alternatives came")
            for one in (entry, *tops):
                need(_is_logprob(one["logprob"]), f"logprob {one['logprob']}")
                named = (
                    bytes(one["bytes"]).decode(errors="replace")
                    if not fields.get("return_tokens_as_token_ids")
                    else one["token"]
                )
                need(named == one["token"], f"{one['token']!r} is not {one['bytes']}")
            need(
                [one["logprob"] for one in tops] == sorted((one["logprob"] for one in tops), reverse=True),
                "alternatives, likeliest first",
            )
            tokens.append(_label(entry))
            logprobs.append(entry["logprob"])
            alternatives.append({_label(one): one["logprob"] for one in tops})
    _check_stops(fields, text)
    return Choice(text, _finish(parts), tuple(tokens), tuple(logprobs), tuple(alternatives))


def _label(entry: Json) -> str:
    """A token of chat under the name that completions give it, which no other token has."""
    data = bytes(entry["bytes"])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finish(parts: list[Json]) -> str:
    finishes = [part["finish_reason"] for part in parts]
    need(
        finishes[-1] in ("stop", "length") and not any(finishes[:-1]),
        f"a choice ends once, at its end: {finishes}",
    )
    return str(finishes[-1])


def _check_stops(fields: Json, text: str) -> None:
    stop = fields.get("stop") or []
    if fields.get("include_stop_str_in_output") or fields.get("min_tokens"):
        return
    for one in [stop] if isinstance(stop, str) else stop:
        need(one not in text, f"the stop string {one!r} is in {text!r}")


def _is_logprob(value: object) -> bool:
    return isinstance(value, float | int) and math.isfinite(value) and -9999 <= value <= 1e-6


def _check_usage(fields: Json, num_prompt: int | None, choices: Sequence[Choice], usage: Json) -> None:
    need(
        set(usage) == {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"},
        f"usage has the keys {list(usage)}",
    )
    prompt, made, details = usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]
    sources = details["kv_source"]
    need(num_prompt in (None, prompt), f"{num_prompt} prompt tokens, said to be {prompt}")
    need(usage["total_tokens"] == prompt + made, f"usage does not add up: {usage}")
    need(set(sources) == SOURCES and all(count >= 0 for count in sources.values()), f"sources {sources}")
    need(sum(sources.values()) == prompt, f"sources {sources} of {prompt} tokens")
    need(
        details["cached_tokens"] == prompt - sources["computed"] and sources["computed"] >= 1,
        f"cached {details}",
    )
    need(
        not (fields.get("echo") and fields.get("logprobs") is not None) or sources["computed"] == prompt,
        "a scored prompt is computed",
    )
    limit = fields.get("max_tokens")
    if limit is not None:
        need(made <= limit * len(choices), f"{made} tokens for {len(choices)} choices of {limit} at most")
        need(
            any(choice.finish == "stop" for choice in choices) or made == limit * len(choices),
            f"{made} tokens, all ended by length {limit}",
        )


def same(one: Sequence[Choice], other: Sequence[Choice]) -> None:
    """Two answers to one question: equal, but for the last digits of scores."""
    need(len(one) == len(other), "different numbers of choices")
    for a, b in zip(one, other, strict=True):
        need(
            (a.text, a.finish, a.tokens) == (b.text, b.finish, b.tokens), f"the same request gave {a} and {b}"
        )
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            need(
                (x is None) == (y is None) and (x is None or abs(x - y) < 2e-3),
                f"the same request scored {x} and {y}",
            )


# ----------------------------------------------------------------------------------------------- other routes


def _plain(check: Callable[[Case, Any], object]) -> Callable[[Case, Answer], None]:
    def judged(case: Case, answer: Answer) -> None:
        need(answer.headers.get("content-type") == "application/json", "an answer is JSON")
        need(check(case, strict_json(answer.body)), f"an answer of another shape: {answer.body[:300]!r}")

    return judged


def _file(kind: str) -> Callable[[Case, Answer], None]:
    return lambda case, answer: need(answer.headers["content-type"] == kind, "a file of another kind")


def _is_card(card: Json) -> bool:
    return (
        set(card) == {"id", "object", "created", "owned_by", "root", "parent", "max_model_len"}
        and card["max_model_len"] == MAX_MODEL_LEN
    )


def _loaded(case: Case, reply: Json) -> bool:
    return isinstance(reply.pop("replaced"), bool) and _is_card(reply)


def _counted(case: Case, reply: Json) -> bool:
    fields = case.fields or {}
    if isinstance(fields.get("prompt"), str):
        need(
            reply["tokens"] == _tokenizer.encode(fields["prompt"]).ids, "another tokenizer gives other tokens"
        )
    return reply["count"] == len(reply["tokens"]) and reply["max_model_len"] == MAX_MODEL_LEN


def _written(case: Case, reply: Json) -> bool:
    tokens = (case.fields or {}).get("tokens")
    return tokens is None or reply == {"prompt": _tokenizer.decode(tokens, skip_special_tokens=False)}


def _blocks(case: Case, reply: Json) -> bool:
    return all(
        states["total"] == sum(n for name, n in states.items() if name != "total")
        for states in reply["kv_blocks"].values()
    )


def _exposition(case: Case, answer: Answer) -> None:
    need(bool(list(text_string_to_metric_families(answer.body.decode()))), "no metrics")
    need(not re.search(rb" (nan|-?inf)$", answer.body, re.I | re.M), "a metric is no number")


def _nothing(case: Case, answer: Answer) -> None:
    need(case.path.startswith(("/v1/models/", "/v1/snapshots/")), f"nothing is said to be at {case.path}")
    need(_is_card(strict_json(answer.body)), "a model is listed as a card")


_OF_PATH: dict[str, Callable[[Case, Answer], object]] = {
    **dict.fromkeys(GENERATING, lambda case, answer: generated(case, answer) if case.fields else None),
    **dict.fromkeys(DOORS, lambda case, answer: of_door(case, answer) if case.legal else None),
    "/v1/messages/count_tokens": _plain(
        lambda case, reply: set(reply) == {"input_tokens"} and reply["input_tokens"] > 0
    ),
    "/v1/models": _plain(lambda case, reply: reply["object"] == "list" and all(map(_is_card, reply["data"]))),
    "/v1/load_lora_adapter": _plain(_loaded),
    "/v1/unload_lora_adapter": _plain(
        lambda case, reply: set(reply) == {"id", "object", "deleted"} and reply["deleted"] is True
    ),
    "/tokenize": _plain(_counted),
    "/detokenize": _plain(_written),
    "/cache/flush": _plain(lambda case, reply: set(reply) == {"level"}),
    "/cache/reset": _plain(
        lambda case, reply: (
            reply["evicted_blocks"] == sum(reply["by_tier"].values()) and set(reply) > {"tier"}
        )
    ),
    "/cache/prefetch": _plain(
        lambda case, reply: set(reply) == {"blocks", "started"} and reply["started"] >= (reply["blocks"] > 0)
    ),
    "/cache/stats": _plain(_blocks),
    "/v1/snapshots": _plain(
        lambda case, reply: reply["object"] in ("list", "snapshot") and ("pinned" in reply)
    ),
    "/health": _plain(lambda case, reply: reply == {"status": "ready"}),
    "/live": _plain(lambda case, reply: reply == {"status": "live"}),
    "/metrics": _exposition,
    "/version": _plain(lambda case, reply: set(reply) == {"version"}),
    "/kv_event_sources": _plain(lambda case, reply: reply == []),
    "/get_server_info": _plain(lambda case, reply: reply["max_model_len"] == MAX_MODEL_LEN),
    "/openapi.json": _plain(lambda case, reply: "/v1/completions" in reply["paths"]),
    "/page/page.css": _file("text/css; charset=utf-8"),
    "/page/page.js": _file("text/javascript; charset=utf-8"),
    "/page/example.txt": _file("text/plain; charset=utf-8"),
    "/": lambda case, answer: need(answer.body.startswith(b"<!doctype html>"), "the landing page is HTML"),
}
