"""Scored residency over HTTP: fields that reach the engine, answers that say what they are, and figures,
before a real engine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.contract import KvSource, SamplingParams, Submission, TokenEvent
from penstock.server import boundary
from penstock.server.messages import usage_of as messages_usage
from tests.cpu.server.served import MODEL as SCRIPTED
from tests.cpu.server.served import Served, completion
from tests.cpu.server.tiered_server import MODEL, Tiered, error_of, tiered

LONG = [7 + 3 * i % 450 for i in range(900)]
DEEP = {"blocks": 64, "host_blocks": 128, "max_model_len": 1200, "resident_tokens": 448}


def test_its_fields_reach_the_engine_from_every_route(served: Served) -> None:
    """Holds invariant 26: no route takes a field and ignores it."""
    fields = {"kv_residency": "scored", "kv_pin_spans": [[0, 64], [100, 200]]}
    text = "x" * 200
    turn = [{"role": "user", "content": text}]
    bodies = {
        "/v1/completions": {"prompt": text, "max_tokens": 1},
        "/v1/chat/completions": {"messages": turn, "max_tokens": 1},
        "/v1/responses": {"input": text, "max_output_tokens": 1},
        "/v1/messages": {"messages": turn, "max_tokens": 1},
    }
    for path, body in bodies.items():
        for given in (fields, {}):
            assert served.http.post(path, json={"model": SCRIPTED, **body, **given}).status_code == 200
    said = [(name, spans and [tuple(span) for span in spans]) for name, spans in served.engine.resident]
    assert said == [("scored", [(0, 64), (100, 200)]), (None, None)] * 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"kv_residency": "sparse"}, "kv_residency"),
        ({"kv_residency": "scored", "kv_pin_spans": [[1, 2, 3]]}, "kv_pin_spans"),
        ({"kv_residency": "scored", "kv_pin_spans": [[-1, 2]]}, "kv_pin_spans"),
        ({"kv_residency": "scored", "kv_pin_spans": [[0, 1]] * 65}, "kv_pin_spans"),
    ],
)
def test_what_makes_no_sense_is_refused(served: Served, fields: dict[str, Any], param: str) -> None:
    reply = served.http.post("/v1/completions", json=completion(max_tokens=1, **fields))
    assert reply.status_code == 400 and param in str(error_of(reply))


def test_an_answer_says_that_it_is_scored() -> None:
    with tiered(**DEEP) as server:
        _, exact = server.ask(LONG, max_tokens=40)
        assert "kv_residency" not in exact
        fields = {"ignore_eos": True, "kv_residency": "scored"}
        _, scored = server.ask(LONG, max_tokens=40, extra_body=fields)
        assert scored["kv_residency"] == "scored"
        # it goes on from what the one before has left
        _, short = server.ask(LONG, max_tokens=1, extra_body=fields)
        assert short["kv_residency"] == "scored"
        _, fits = server.ask(LONG[:100], max_tokens=40, extra_body=fields)
        assert "kv_residency" not in fits, "it has all of its context"
        figures = server.scrape()
        assert figures["penstock_residency_rescores_total", ()] >= 1
        assert figures["penstock_residency_parts_fetched_total", ()] >= 1
        check_refusals(server)


def check_refusals(server: Tiered) -> None:
    body = {"model": MODEL, "prompt": LONG, "max_tokens": 4}
    for fields, said in (
        ({"kv_pin_spans": [[0, 5]]}, "kv_residency scored"),
        ({"kv_residency": "scored", "kv_pin_spans": [[0, 800]]}, "one has to be free"),
        (
            {"kv_residency": "scored", "kv_pin_spans": [[890, 901]]},
            "tokens 890 to 900 cannot be pinned: the prompt has 900",
        ),
        ({"kv_residency": "scored", "kv_pin_spans": [[5000, 6000]]}, "the prompt has 900"),
        ({"kv_residency": "scored", "kv_pin_spans": [[0, 9]], "prompt": LONG[:8]}, "the prompt has 8"),
    ):
        reply = server.http.post("/v1/completions", json={**body, **fields})
        assert reply.status_code == 400 and said in error_of(reply)["message"]


def test_it_is_said_across_processes() -> None:
    event = TokenEvent("r", (1,), source=KvSource(computed=5), scored=True)
    assert boundary.SentEvent.of(3, event).made("r") == event
    sent = boundary.Submit(1, Submission([7], SamplingParams(), "r", residency="scored", pins=[(0, 64)]))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=boundary.Submit) == sent


def test_other_shapes_of_usage_say_it_too() -> None:
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 1, "kv_residency": "scored"},
    }
    assert messages_usage(usage)["kv_residency"] == "scored"
