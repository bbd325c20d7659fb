"""What the URL of a Mooncake store may say, and what the library's codes mean. Nothing is connected to."""

from __future__ import annotations

import contextlib

import pytest

from penstock.errors import ConfigError
from penstock.kv.tiers.remote import open_store
from penstock.kv.tiers.store import Space
from penstock_mooncake import MooncakeStore, parse_address

SPACE = Space(bytes(32), 64)


@pytest.mark.parametrize(
    "url",
    [
        "mooncake://",
        "mooncake://user:hunter2@host",
        "mooncake://host:hunter2",
        "mooncake://host/hunter2",
        "mooncake://host?protocol=hunter2",
        "mooncake://host?segment_gib=hunter2",
        "mooncake://host?segment_gib=-1",
        "mooncake://host?secret=hunter2",
        "mooncake://host?local=a&local=hunter2",
    ],
)
def test_a_url_that_cannot_work_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url, SPACE, 1.0)
    assert "--kv-offload-remote" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_url_says_master_and_options() -> None:
    address = parse_address(
        "mooncake://host:7?metadata=http://meta:1/x&protocol=rdma&device=mlx5_0&local=me&segment_gib=1.5&buffer_gib=1"
    )
    assert address == ("host", 7, "http://meta:1/x", "rdma", "mlx5_0", "me", 3 << 29, 1 << 30)
    assert parse_address("mooncake://host") == ("host", 50051, "P2PHANDSHAKE", "tcp", "", "", 0, 16 << 20)


def test_a_missing_library_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="penstock\\[mooncake\\]"):
        open_store("mooncake://host", SPACE, 1.0)


def test_each_code_of_a_write_has_its_outcome() -> None:
    """A block that another engine has written meanwhile is there, and that is all that was wanted."""
    with contextlib.closing(MooncakeStore(parse_address("mooncake://127.0.0.1:1"), SPACE, 1.0)) as store:
        codes = {0: "DONE", -705: "DONE", -200: "FULL", -1700: "FULL", -706: "FAILED", -800: "FAILED"}
        assert {code: store._written(code).name for code in codes} == codes
