"""Scored residency over HTTP: fields that reach the engine, answers that say what they are, and figures,
before a real engine."""

from __future__ import annotations

from penstock.server.messages import usage_of as messages_usage
from tests.cpu.server.tiered_server import MODEL, Tiered, error_of, tiered

LONG = [7 + 3 * i % 450 for i in range(900)]
DEEP = {"blocks": 64, "host_blocks": 128, "max_model_len": 1200, "resident_tokens": 448}


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
    # a stream has no status yet when it is refused
    body = {"model": MODEL, "prompt": LONG, "max_tokens": 4, "stream": True}
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


def test_other_shapes_of_usage_say_it_too() -> None:
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 1, "kv_residency": "scored"},
    }
    assert messages_usage(usage)["kv_residency"] == "scored"
