"""`benchmarks/store_clients.py`: what is compared with what, that bytes have arrived, and that nothing is
left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import store_clients
from penstock.bench.transfer import layout_of
from penstock.bench.transfer_ways import TransferShape
from penstock.config import Config, ModelSource, OffloadConfig
from penstock.errors import ConfigError, InvariantBroken, StoreFailed
from penstock.models.progress import silent
from penstock.testing.stores import MemoryStore
from tests.store_servers import valkey_or_skip

SHAPE = TransferShape(
    layout_of(Config(ModelSource("tiny-qwen3", "dummy", "cpu"))), torch.device("cpu"), repeat=2, seed=0
)
REMOTE = OffloadConfig(remote="valkey://elsewhere")


class FakeClient:
    """A store's client over the dictionary that the store has, too."""

    at_once = 2, 1

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values = values
        self.closed = False

    def write(self, name: str, value: bytes) -> None:
        assert name not in self.values
        self.values[name] = value

    def read(self, name: str) -> bytes | None:
        return self.values.get(name)

    def remove(self, names: Any) -> None:
        for name in names:
            del self.values[name]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    store = MemoryStore()

    def open_store(url: str, space: Any, timeout_s: float) -> MemoryStore:
        store._space = space.digest
        return store

    monkeypatch.setattr("penstock.kv.build.open_remote", open_store)
    return store


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    client = FakeClient({})
    monkeypatch.setattr(store_clients, "open_client", lambda url, at_once: client)
    return client


def test_a_store_is_measured_beside_its_own_client_and_left_empty(
    store: MemoryStore, client: FakeClient
) -> None:
    results = store_clients.measure(REMOTE, (5,), SHAPE, silent)
    write, read = "host to remote", "remote to host"
    seen = [(row["direction"], row["way"]) for row in results.rows]
    clients = [(write, "client, 1 thread"), (read, "client, 1 thread"), (read, "client, 2 threads")]
    assert seen == [clients[0], (write, "tier"), *clients[1:], (read, "tier")]
    fastest = max(results.rows[2:4], key=lambda row: row["gb_s"])
    assert results.rows[4]["beside"] == f"{read}, {fastest['way']}"
    assert results.rows[4]["percent_of_raw"] == pytest.approx(100 * results.rows[4]["gb_s"] / fastest["gb_s"])
    assert client.values == {} and store.blocks == {} and client.closed and store.closed


def test_other_bytes_than_were_written_are_noticed(
    store: MemoryStore, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "read", lambda name: bytes(len(client.values[name])))
    with pytest.raises(InvariantBroken, match="remote to host, client, 1 thread: other bytes"):
        store_clients.measure(REMOTE, (5,), SHAPE, silent)
    assert client.values == {} and store.closed


def test_a_client_that_fails_tells_none_of_its_settings(
    store: MemoryStore, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise RuntimeError("password is sekret")

    monkeypatch.setattr(client, "read", fail)
    with pytest.raises(StoreFailed, match=r"own client failed \(RuntimeError\)") as raised:
        store_clients.measure(REMOTE, (5,), SHAPE, silent)
    assert "sekret" not in repr(raised.value) and raised.value.__suppress_context__


def test_a_kind_without_a_client_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no client of ftp://"):
        store_clients.open_client("ftp://user:sekret@elsewhere", (1, 1))


def test_the_script_measures_a_real_store_and_shows_no_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, server = tmp_path / "clients.json", valkey_or_skip(password="sekret")
    try:
        sizes = ["--model", "tiny-qwen3", "--device", "cpu", "--blocks", "4", "--repeat", "1"]
        store_clients.main(
            [
                *sizes,
                "--kv-offload-remote",
                server.url(),
                "--kv-offload-remote-timeout-s",
                "10",
                "--json",
                str(file),
            ]
        )
        assert server.ask("DBSIZE") == b":0"
    finally:
        server.close()
    shown, rows = capsys.readouterr(), json.loads(file.read_text())["results"]
    assert {row["way"].split(",")[0] for row in rows} == {"client", "tier"} and "client" in shown.out
    assert "sekret" not in file.read_text() + shown.out + shown.err
