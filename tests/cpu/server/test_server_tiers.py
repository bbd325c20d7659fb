"""The cache over HTTP, before a real engine with a host tier: flush, reset, statistics, metrics, and where a
prompt's KV came from."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.cpu.server.served import DEADLINE_S, until
from tests.cpu.server.tiered_server import MODEL, NUM_HOST, Tiered, error_of, tiered
from tests.support.gates import gates


@pytest.fixture
def server() -> Iterator[Tiered]:
    with tiered() as running:
        yield running


# ------------------------------------------------------------------------------------------------------ usage


def test_usage_tells_device_host_and_computed_tokens_apart(server: Tiered) -> None:
    cold, first = server.ask()
    assert first == {
        "cached_tokens": 0,
        "kv_source": {"device": 0, "host": 0, "ssd": 0, "remote": 0, "computed": 70},
    }
    again, second = server.ask()
    assert second == {
        "cached_tokens": 64,
        "kv_source": {"device": 64, "host": 0, "ssd": 0, "remote": 0, "computed": 6},
    }
    server.forget_the_device()
    restored, third = server.ask()
    assert third == {
        "cached_tokens": 64,
        "kv_source": {"device": 0, "host": 64, "ssd": 0, "remote": 0, "computed": 6},
    }
    assert cold == again == restored


def test_echo_with_logprobs_computes_its_prompt_though_the_host_has_it(server: Tiered) -> None:
    server.ask()
    server.forget_the_device()
    _, echoed = server.ask(echo=True, logprobs=1)
    assert echoed["kv_source"]["computed"] == 70
    until(lambda: server.scrape()["penstock_leases_open", ()] == 0, "no lease is left")


# ------------------------------------------------------------------------------------------------------ flush


@pytest.mark.parametrize("level", ["captured", "visible"])
def test_a_flush_answers_when_saves_are_as_far_as_asked_for(server: Tiered, level: str) -> None:
    _, demotions = gates(server.engine)
    demotions.hold()
    server.ask()
    answered: list[httpx.Response] = []
    waiting = threading.Thread(
        target=lambda: answered.append(server.http.post(f"/cache/flush?level={level}"))
    )
    waiting.start()
    until(
        lambda: server.scrape()["penstock_transfers_inflight", (("dst", "host"), ("src", "device"))] == 1,
        "the save is under way",
    )
    assert not answered
    demotions.let()
    waiting.join(DEADLINE_S)
    assert answered[0].json() == {"level": level}
    assert server.http.get("/cache/stats").json()["kv_blocks"]["host"]["idle"] == 4


def test_a_flush_that_does_not_end_in_time_is_a_504_and_the_save_goes_on(
    server: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.server.routes.FLUSH_S", 0.05)
    _, demotions = gates(server.engine)
    demotions.hold()
    server.ask()
    reply = server.http.post("/cache/flush")
    assert (reply.status_code, error_of(reply)["code"]) == (504, "deadline_exceeded")
    demotions.let()
    until(
        lambda: server.http.get("/cache/stats").json()["kv_blocks"]["host"]["idle"] == 4,
        "the save has landed",
    )


def test_what_cannot_be_flushed_or_reset_is_refused_and_nothing_is_lost(server: Tiered) -> None:
    server.ask()
    for path, param in (
        ("/cache/flush?level=persisted", "level"),
        ("/cache/flush?level=visible&level=captured", "level"),
        ("/cache/flush?tier=host", "tier"),
        ("/cache/reset?tier=ssd", "tier"),
        ("/cache/reset?level=host", "level"),
    ):
        reply = server.http.post(path)
        found = error_of(reply)
        assert (reply.status_code, found["type"], found["param"]) == (400, "invalid_request_error", param)
    assert server.ask()[1]["kv_source"]["device"] == 64


# ------------------------------------------------------------------------------------------------------ reset


@pytest.mark.parametrize(
    ("tier", "evicted", "source"),
    [
        ("device", {"device": 4}, {"device": 0, "host": 64}),
        ("host", {"host": 4}, {"device": 64, "host": 0}),
        ("all", {"device": 4, "host": 4}, {"device": 0, "host": 0}),
    ],
)
def test_a_reset_forgets_the_tier_that_it_names_and_no_other(
    server: Tiered, tier: str, evicted: dict[str, int], source: dict[str, int]
) -> None:
    server.ask()
    server.http.post("/cache/flush")
    answer = server.http.post("/cache/reset", params={"tier": tier}).json()
    assert answer == {"tier": tier, "evicted_blocks": sum(evicted.values()), "by_tier": evicted}
    found = server.ask()[1]["kv_source"]
    assert {name: found[name] for name in source} == source


# ------------------------------------------------------------------------------------- statistics and metrics


def test_statistics_tell_the_tiers_apart_and_each_adds_up(server: Tiered) -> None:
    server.ask()
    server.forget_the_device()
    server.ask()
    until(lambda: not server.engine.is_transferring(), "nothing is on its way")
    stats = server.http.get("/cache/stats").json()
    assert set(stats["kv_blocks"]) == {"device", "host"}
    for tier, total in (("device", 256), ("host", NUM_HOST)):
        states = stats["kv_blocks"][tier]
        assert states.pop("total") == total == sum(states.values())
    assert stats["prompt_tokens"] == {"device": 0, "host": 64, "ssd": 0, "remote": 0, "computed": 76}
    assert stats["cache"]["promoted"] == 4
    num_bytes = 4 * server.engine.parts.arena.layout.block_bytes
    assert stats["traffic"]["bytes"] == {"device to host": num_bytes, "host to device": num_bytes}
    assert stats["traffic"]["leases_open"] == 0


def test_transfers_in_flight_and_loading_requests_are_seen_while_they_last(server: Tiered) -> None:
    server.ask()
    server.forget_the_device()
    promotions, _ = gates(server.engine)
    promotions.hold()
    body = {"model": MODEL, "prompt": [9] * 20, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    # while it runs, nobody else's load is waited for in a step
    with server.http.stream("POST", "/v1/completions", json=body) as other:
        lines = other.iter_lines()  # the stream ends with it
        next(lines)
        waiting = threading.Thread(target=server.ask)
        waiting.start()
        until(lambda: server.scrape()["penstock_requests", (("state", "loading"),)] == 1, "it is loading")
        assert server.scrape()["penstock_transfers_inflight", (("dst", "device"), ("src", "host"))] == 1
        promotions.let()
        waiting.join(DEADLINE_S)
    assert server.scrape()["penstock_transfers_inflight", (("dst", "device"), ("src", "host"))] == 0


def test_failures_and_skipped_saves_are_counted_and_change_no_answer() -> None:
    # with one, the device keeps what host memory has no room for
    with tiered(host_blocks=2, prefix_cache=False) as server:
        cold, _ = server.ask()
        server.forget_the_device()
        assert server.scrape()["penstock_saves_skipped_total", (("reason", "full"),)] == 2
        promotions, _ = gates(server.engine)
        promotions.fail_next = 1
        again, details = server.ask()
        assert again == cold and details["kv_source"]["computed"] == 70
        assert (
            server.scrape()["penstock_transfer_failures_total", (("reason", "copy"), ("tier", "host"))] == 1
        )
