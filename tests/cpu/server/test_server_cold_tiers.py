"""Disk and shared store over HTTP: flush to what lasts, reset, statistics, metrics. Before a scripted engine
that says it has those tiers, where something must fail, and before a real one with a disk."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from penstock.kv.tiers.ssd.directory import DiskIo
from tests.cpu.server.served import until
from tests.cpu.server.tiered_server import Tiered, error_of, tiered
from tests.store_servers import valkey_or_skip
from tests.support.servers import Valkey

# ------------------------------------------------------------------------------------------------------ flush


# ------------------------------------------------------------------------------------------------------ reset


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
