"""Session hints over HTTP: how they are checked and handed on, before a scripted engine; what becomes of a
session's KV, before a real one with tiers, under the sanitizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from penstock.contract import CacheHint, Prefetched
from penstock.server.service import PATIENCE
from tests.cpu.server.served import MODEL, Served, until
from tests.cpu.server.tiered_server import PROMPT, Tiered, error_of, tiered

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
OTHER = [9 + 7 * i % 450 for i in range(70)]


@pytest.fixture
def server() -> Iterator[Tiered]:
    with tiered() as running:
        yield running


def sessions(server: Tiered | Served) -> dict[str, int]:
    found: dict[str, int] = server.http.get("/cache/stats").json()["sessions"]
    return found


# ----------------------------------------------------------------------------------------------------- fields


def test_prompt_cache_key_names_a_session_unless_session_id_does(served: Served) -> None:
    client = served.client()
    client.completions.create(
        model=MODEL,
        prompt="x",
        max_tokens=1,
        extra_body={"prompt_cache_key": "k", "cache_hint": {"release": True}},
    )
    client.chat.completions.create(**CHAT, prompt_cache_key="k", extra_body={"session_id": "s"})
    assert served.engine.hinted == [(0, "k", CacheHint(release=True)), (0, "s", None)]


# ----------------------------------------------------------------------------------------------- what is kept


def wait_figures(server: Tiered, **wanted: int) -> None:
    """A session's record is made in the turn in which its request ends, which may be a moment after the
    answer."""
    until(lambda: {name: sessions(server)[name] for name in wanted} == wanted, f"{wanted}")


def test_a_session_is_known_with_what_its_last_request_generated(server: Tiered) -> None:
    server.ask(max_tokens=30, extra_body={"ignore_eos": True, "session_id": "agent"})
    # 70 tokens and 29 that were fed back
    wait_figures(server, known=1, known_blocks=6, tenants=1, retained=0)
    _, again = server.ask(extra_body={"ignore_eos": True, "session_id": "agent"})
    assert again["kv_source"]["device"] == 64
    wait_figures(server, known=1, known_blocks=4, tenants=1, retained=0)


def test_a_retained_session_shows_in_the_figures_until_it_is_given_up(server: Tiered) -> None:
    server.ask(extra_body={"ignore_eos": True, "prompt_cache_key": "agent", "cache_hint": {"retain_s": 3600}})
    server.ask(
        extra_body={
            "ignore_eos": True,
            "session_id": "agent",
            "cache_salt": "x",
            "cache_hint": {"retain_s": 3600},
        }
    )
    wait_figures(
        server, retained=2, retained_blocks=8, retaining_tenants=2, retained_blocks_max=(256 + 64) // 2
    )
    metrics = server.scrape()
    assert metrics["penstock_sessions", (("state", "retained"),)] == 2
    assert metrics["penstock_retained_blocks", ()] == 8
    server.ask(extra_body={"ignore_eos": True, "session_id": "agent", "cache_hint": {"retain_s": 0}})
    wait_figures(server, known=2, retained=1, retained_blocks=4)


def test_a_released_session_is_gone_from_device_and_host(server: Tiered) -> None:
    session = {"ignore_eos": True, "session_id": "agent"}
    server.ask(extra_body=session)
    server.ask(OTHER)
    _, again = server.ask(extra_body={**session, "cache_hint": {"release": True}})
    assert again["cached_tokens"] == 64
    wait_figures(server, released_blocks=8)  # four, on the device and in host memory
    assert (sessions(server)["known"], sessions(server)["releases"]) == (0, 1)
    assert server.ask(OTHER)[1]["kv_source"]["device"] == 64
    assert server.ask()[1]["kv_source"]["computed"] == 70


# --------------------------------------------------------------------------------------------------- prefetch


@pytest.mark.parametrize("body", [{"session_id": "other"}, {"session_id": "agent", "cache_salt": "other"}])
def test_a_session_that_nobody_knows_is_a_404(server: Tiered, body: dict[str, str]) -> None:
    server.ask(extra_body={"ignore_eos": True, "session_id": "agent", "cache_salt": "mine"})
    reply = server.http.post("/cache/prefetch", json=body)
    found = error_of(reply)
    assert (reply.status_code, found["param"], found["code"]) == (404, "session_id", "session_not_found")


def test_an_engine_that_does_not_come_round_is_a_504_and_nobody_does_it_later(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PATIENCE, "kv.prefetch", (0.05, "late"))
    pending: Future[Prefetched | None] = Future()
    monkeypatch.setattr(served.engine, "prefetch", lambda *prompt, **options: pending)
    assert served.http.post("/cache/prefetch", json={"prompt": "x"}).status_code == 504
    until(pending.cancelled, "it is given up there")


@pytest.mark.parametrize("body", [{"session_id": "agent"}, {"prompt": PROMPT}], ids=["session", "prompt"])
def test_a_prefetch_brings_blocks_from_the_disk_into_host_memory(
    tmp_path: Path, body: dict[str, Any]
) -> None:
    with tiered(ssd_dir=str(tmp_path / "ssd"), ssd_gib=0.05) as server:
        server.ask(extra_body={"ignore_eos": True, "session_id": "agent"})
        assert server.http.post("/cache/flush?level=persisted").status_code == 200
        server.forget_the_device()
        assert server.http.post("/cache/reset?tier=host").status_code == 200
        assert server.http.post("/cache/prefetch", json=body).json() == {"blocks": 4, "started": True}
        wait_figures(server, prefetches_finished=1)
        assert server.ask()[1]["kv_source"] == {"device": 0, "host": 64, "ssd": 0, "remote": 0, "computed": 6}


PREFETCHES = {
    "session": ({"session_id": "agent"}, {"session": "agent"}),
    "prompt": ({"prompt": "ab"}, {"prompt": [97, 98]}),
    "ids": ({"prompt": [5, 6]}, {"prompt": [5, 6]}),
    "chat": ({"messages": CHAT["messages"]}, {}),
}


def test_what_is_to_be_prefetched_reaches_the_engine_with_its_salt(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def prefetch(prompt: list[int] | None = None, **options: Any) -> Future[Prefetched | None]:
        asked.append({"prompt": None if prompt is None else list(prompt), **options})
        done: Future[Prefetched | None] = Future()
        done.set_result(Prefetched(3, True))
        return done

    monkeypatch.setattr(served.engine, "prefetch", prefetch)
    for (body, handed), salt in itertools.product(PREFETCHES.values(), (None, "", "mine")):
        reply = served.http.post("/cache/prefetch", json={**body, "cache_salt": salt})
        assert (reply.status_code, reply.json()) == (200, {"blocks": 3, "started": True})
        one = asked.pop()
        assert one["cache_salt"] == (salt or "") and one.get("adapter") is None
        assert {name: one[name] for name in handed} == handed
        assert bool(one["session"]) == ("session" in handed) == (one["prompt"] is None)
