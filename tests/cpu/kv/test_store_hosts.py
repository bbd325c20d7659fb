"""Hosts of shared stores at start: a name that does not exist is refused, everything else is a store that may
come."""

from __future__ import annotations

import logging
import socket
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.kv.tiers.remote import open_store
from penstock.kv.tiers.store import Space

SPACE = Space(bytes(16), 64)
URLS = [
    "valkey://:hunter2@gone:6379",
    "rediss://gone",
    "valkey://gone:1,gone:2?cluster=1",
    "s3://bucket/x?endpoint=http://gone:1",
]


def answering(monkeypatch: pytest.MonkeyPatch, **errors: int) -> None:
    def look_up(host: str, *_: Any, **__: Any) -> list[Any]:
        if host in errors:
            raise socket.gaierror(errors[host], "no answer to that name")
        return [object()]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@pytest.mark.parametrize("url", URLS)
def test_a_name_that_does_not_exist_is_refused_in_one_line_without_the_url(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, gone=socket.EAI_NONAME)
    with pytest.raises(
        ConfigError,
        match=r"^--kv-offload-remote cannot work: .* cannot be resolved \(no answer to that name\)$",
    ) as refused:
        open_store(url, SPACE, 1.0)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("url", URLS)
def test_names_that_cannot_be_looked_up_now_are_a_warning(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answering(monkeypatch, gone=socket.EAI_AGAIN)
    with caplog.at_level(logging.WARNING):
        open_store(url, SPACE, 1.0).close()
    (record,) = caplog.records
    assert "cannot be resolved now" in record.getMessage() and "hunter2" not in record.getMessage()


def test_one_node_of_several_that_is_not_known_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answering(monkeypatch, gone=socket.EAI_NONAME)
    with caplog.at_level(logging.WARNING):
        open_store("valkey://here:1,gone:2?cluster=1", SPACE, 1.0).close()
    assert "1 of its 2 hosts" in caplog.text


def test_a_store_that_is_down_starts_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        open_store("valkey://127.0.0.1:1", SPACE, 1.0).close()
    assert not caplog.records
