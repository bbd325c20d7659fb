"""Disk and shared store over HTTP: flush to what lasts, reset, statistics, metrics. Before a scripted engine
that says it has those tiers, where something must fail, and before a real one with a disk."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.stats import EngineStats
from penstock.errors import DeadlineExceeded, InvariantBroken, PenstockError, StoreFailed, TransferFailed
from penstock.figures import Histogram, Traffic
from penstock.kv.tiers.ssd.directory import DiskIo
from tests.cpu.server.served import Served, serving, until
from tests.cpu.server.tiered_server import Tiered, error_of, tiered
from tests.store_servers import valkey_or_skip
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import Valkey

TIERS = ("device", "host", "ssd", "remote")
ROUTES = (
    ("device", "host"),
    ("host", "device"),
    ("host", "ssd"),
    ("ssd", "host"),
    ("host", "remote"),
    ("remote", "host"),
)


class ColdEngine(ScriptedEngine):
    """Has the tiers it is told to have, and writes down what is asked of them."""

    def __init__(self, tiers: Sequence[str] = TIERS) -> None:
        super().__init__()
        self.asked: list[object] = []
        self.failure: PenstockError | None = None
        self._tiers = tuple(tiers)

    @property
    def tiers(self) -> tuple[str, ...]:
        return self._tiers

    def wait_flushed(self, level: str, timeout_s: float) -> None:
        self.asked.append(level)
        if self.failure is not None:
            raise self.failure

    def reset(self, tiers: Sequence[str] = TIERS) -> dict[str, int]:
        self.asked.append(tuple(tiers))
        if self.failure is not None:
            raise self.failure
        return dict.fromkeys(tiers, 3)

    def stats(self) -> EngineStats:
        traffic = Traffic(
            bytes={route: 100 * number for number, route in enumerate(ROUTES, 1)},
            seconds={("ssd", "host"): Histogram((0.1, 1.0), [2, 1, 0], 0.5)},
            in_flight=dict.fromkeys(ROUTES[:-1], 0),
            failures={("ssd", "io"): 4, ("remote", "timeout"): 5},
            skipped={"full": 1, "queue": 6, "broken": 7},
            leases_open=0,
            checksum_failures={"ssd": 8, "remote": 0},
            usable={"ssd": True, "remote": False},
        )
        blocks = {"ssd": {"used": 30, "free": 70}, "remote": {}}
        plain = super().stats()
        return dataclasses.replace(plain, traffic=traffic, kv_blocks={**plain.kv_blocks, **blocks})


@pytest.fixture
def cold() -> Iterator[Served]:
    with serving(ColdEngine()) as running:
        yield running


# ------------------------------------------------------------------------------------------------------ flush


@pytest.mark.parametrize("tiers", [("device", "host", "ssd"), ("device", "host", "remote"), TIERS])
def test_every_level_reaches_the_engine_where_a_tier_lasts(tiers: tuple[str, ...]) -> None:
    engine, levels = ColdEngine(tiers), ["captured", "visible", "persisted"]
    with serving(engine) as served:
        for level in levels:
            assert served.http.post(f"/cache/flush?level={level}").json() == {"level": level}
    assert engine.asked == levels


@pytest.mark.parametrize("tiers", [("device",), ("device", "host")])
def test_nothing_is_persisted_where_no_tier_lasts(tiers: tuple[str, ...]) -> None:
    engine = ColdEngine(tiers)
    with serving(engine) as served:
        reply = served.http.post("/cache/flush?level=persisted")
    assert (reply.status_code, error_of(reply)["param"], error_of(reply)["type"]) == (
        400,
        "level",
        "invalid_request_error",
    )
    assert "no tier of this server outlives it" in error_of(reply)["message"]
    assert engine.asked == []


@pytest.mark.parametrize(
    ("failure", "status", "code", "message"),
    [
        (StoreFailed("ssd: 3 blocks were not written"), 503, "tier_failed", "ssd: 3 blocks were not written"),
        (TransferFailed("2 blocks did not arrive"), 503, "tier_failed", "2 blocks did not arrive"),
        (DeadlineExceeded("not in time"), 504, "deadline_exceeded", "not in time"),
        (InvariantBroken("/secret/path"), 500, "internal", "internal error; the server's log says more"),
    ],
)
def test_a_flush_that_failed_says_why_and_the_server_goes_on(
    cold: Served, failure: PenstockError, status: int, code: str, message: str
) -> None:
    cold.engine.failure = failure
    reply = cold.http.post("/cache/flush?level=persisted")
    assert (reply.status_code, error_of(reply)["code"], error_of(reply)["message"]) == (status, code, message)
    cold.engine.failure = None
    assert cold.http.post("/cache/flush?level=persisted").status_code == 200


# ------------------------------------------------------------------------------------------------------ reset


@pytest.mark.parametrize(("tier", "asked"), [("ssd", ("ssd",)), ("remote", ("remote",)), ("all", TIERS)])
def test_a_cold_tier_is_reset_alone_or_with_all(cold: Served, tier: str, asked: tuple[str, ...]) -> None:
    reply = cold.http.post("/cache/reset", params={"tier": tier})
    assert reply.json() == {
        "tier": tier,
        "evicted_blocks": 3 * len(asked),
        "by_tier": dict.fromkeys(asked, 3),
    }
    assert cold.engine.asked == [asked]


# ------------------------------------------------------------------------------------------- with a real disk


def with_disk(folder: Path, **settings: Any) -> AbstractContextManager[Tiered]:
    return tiered(ssd_dir=str(folder), ssd_gib=0.01, **settings)


def forget_memory(server: Tiered) -> None:
    """What was asked before is on disk alone."""
    assert server.http.post("/cache/flush?level=persisted").json() == {"level": "persisted"}
    for tier in ("device", "host"):
        assert server.http.post(f"/cache/reset?tier={tier}").json()["evicted_blocks"] == 4


def test_a_prompt_comes_from_disk_and_the_answer_and_every_figure_say_so(tmp_path: Path) -> None:
    with with_disk(tmp_path) as server:
        cold, _ = server.ask()
        forget_memory(server)
        restored, details = server.ask()
        assert restored == cold
        assert details == {
            "cached_tokens": 64,
            "kv_source": {"device": 0, "host": 0, "ssd": 64, "remote": 0, "computed": 6},
        }
        until(lambda: not server.engine.is_transferring(), "nothing is on its way")
        seen, stats = server.scrape(), server.http.get("/cache/stats").json()
        num_bytes = 4 * server.engine.parts.arena.layout.block_bytes
        for route in ((("dst", "ssd"), ("src", "host")), (("dst", "host"), ("src", "ssd"))):
            assert seen["penstock_transfer_bytes_total", route] == num_bytes
            assert (
                seen["penstock_transfer_seconds_count", route] >= 1
                and seen["penstock_transfer_seconds_sum", route] > 0
            )
            assert seen["penstock_transfers_inflight", route] == 0
        assert seen["penstock_prompt_tokens_total", (("source", "ssd"),)] == 64
        assert seen["penstock_kv_blocks", (("state", "used"), ("tier", "ssd"))] == 4
        assert seen["penstock_tier_usable", (("tier", "ssd"),)] == 1
        assert seen["penstock_checksum_failures_total", (("tier", "ssd"),)] == 0
        disk = stats["kv_blocks"]["ssd"]
        assert disk["used"] == 4 and disk["total"] == disk["used"] + disk["free"] > 4
        assert stats["traffic"]["bytes"]["ssd to host"] == num_bytes


@pytest.mark.parametrize(
    ("tier", "left"), [("ssd", {"device": 64, "ssd": 0}), ("all", {"device": 0, "ssd": 0})]
)
def test_a_reset_forgets_the_disk(tmp_path: Path, tier: str, left: dict[str, int]) -> None:
    with with_disk(tmp_path) as server:
        server.ask()
        server.http.post("/cache/flush?level=persisted")
        evicted = server.http.post(f"/cache/reset?tier={tier}").json()["by_tier"]
        assert evicted["ssd"] == 4 and set(evicted) == (
            {"ssd"} if tier == "ssd" else {"device", "host", "ssd"}
        )
        assert server.http.get("/cache/stats").json()["kv_blocks"]["ssd"]["used"] == 0
        found = server.ask()[1]["kv_source"]
        assert {name: found[name] for name in left} == left


def test_a_disk_that_fails_is_a_503_with_its_reason_and_requests_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with with_disk(tmp_path) as server:
        monkeypatch.setattr(DiskIo, "pwritev", full)
        monkeypatch.setattr(DiskIo, "fallocate", full)
        cold, _ = server.ask()
        reply = server.http.post("/cache/flush?level=persisted")
        assert (reply.status_code, error_of(reply)["code"]) == (503, "tier_failed")
        assert "ssd" in error_of(reply)["message"].lower() and str(tmp_path) not in error_of(reply)["message"]
        assert server.ask()[0] == cold


# ------------------------------------------------------------------------------------------ with a real store

PASSWORD = "pa55word"


@pytest.fixture
def store() -> Iterator[Valkey]:
    with valkey_or_skip(password=PASSWORD) as running:
        yield running


def test_a_prompt_that_one_server_has_computed_comes_to_another_from_the_store(store: Valkey) -> None:
    with tiered(remote=store.url()) as first, tiered(remote=store.url()) as second:
        cold, _ = first.ask()
        assert first.http.post("/cache/flush?level=persisted").json() == {"level": "persisted"}
        restored, details = second.ask()
        assert restored == cold and details["kv_source"] == {
            "device": 0,
            "host": 0,
            "ssd": 0,
            "remote": 64,
            "computed": 6,
        }
        assert second.scrape()["penstock_prompt_tokens_total", (("source", "remote"),)] == 64
        assert first.http.post("/cache/reset?tier=remote").status_code == 200
        for tier in ("device", "host"):
            second.http.post(f"/cache/reset?tier={tier}")
        assert second.ask()[1]["kv_source"]["computed"] == 70, "what one has reset is gone for all"
