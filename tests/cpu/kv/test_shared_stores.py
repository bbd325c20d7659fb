"""What shared stores have in common: they are found by their URL's scheme, their hosts exist, and calls of
client libraries end by their deadline."""

from __future__ import annotations

import importlib
import logging
import socket
import sys
import threading
import time
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import ConfigError, StoreFailed
from penstock.kv.tiers import remote
from penstock.kv.tiers.remote import KINDS, Requests, open_store, schemes
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


# --------------------------------------------------------------------------------------------------- plug-ins


def installed(monkeypatch: pytest.MonkeyPatch, **entries: str) -> None:
    def found(group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == "penstock.stores"
        return [EntryPoint(one, value, group) for one, value in entries.items() if name in (None, one)]

    monkeypatch.setattr(remote, "entry_points", found)


def test_every_kind_of_this_project_is_installed_here() -> None:
    """Otherwise the tests of stores say nothing: `make setup-dev` installs them."""
    for scheme, kind in KINDS.items():
        (entry,) = importlib.metadata.entry_points(group=remote.GROUP, name=scheme)
        assert entry.load() is importlib.import_module(f"penstock_{kind}").open_store


def test_a_scheme_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    for scheme, kind in KINDS.items():
        with pytest.raises(ConfigError) as refused:
            open_store(f"{scheme}://:hunter2@host", SPACE, 1.0)
        assert str(refused.value) == (
            f"--kv-offload-remote {scheme}:// needs the package penstock-{kind}: "
            f"pip install 'penstock[{kind}]'"
        )


def test_a_package_whose_library_is_missing_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "penstock_s3", raising=False)
    with pytest.raises(ConfigError, match=r"s3:// cannot be used: .*obstore"):
        open_store("s3://bucket", SPACE, 1.0)


def test_a_store_of_another_package_is_found_and_an_unknown_scheme_names_those_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch, mine="stores_of_mine:open_store")
    monkeypatch.setitem(sys.modules, "stores_of_mine", SimpleNamespace(open_store=lambda *given: given))
    assert schemes() == [*KINDS, "mine"]
    assert open_store("mine://host", SPACE, 1.0) == ("mine://host", SPACE, 1.0)
    for url in ("hunter2://host", "hunter2", ""):
        with pytest.raises(ConfigError, match=r"must start with one of valkey://, .*, mine://$") as refused:
            open_store(url, SPACE, 1.0)
        assert "hunter2" not in str(refused.value)


# --------------------------------------------------------------------------------------------------- requests


def failure(error: Exception) -> StoreFailed:
    return StoreFailed(type(error).__name__)


def test_requests_that_have_not_begun_by_the_deadline_never_do() -> None:
    requests, gate, ran = Requests(0.1, 1, failure), threading.Event(), []

    def work(number: int) -> None:
        assert gate.wait(60.0)
        ran.append(number)

    with pytest.raises(StoreFailed, match="within"):
        requests.each(work, range(3), time.monotonic())
    gate.set()
    requests._threads.shutdown(wait=True)
    assert ran in ([], [0]), "the others were left out"


def test_requests_that_are_closed_have_no_threads_and_drop_what_waits() -> None:
    requests, gate, begun, ran = Requests(60.0, 1, failure), threading.Event(), threading.Event(), []

    def work(number: int) -> None:
        ran.append(number)
        begun.set()
        assert gate.wait(60.0)

    running = [requests._threads.submit(work, number) for number in range(3)]
    assert begun.wait(60.0)
    requests.close()  # does not wait for what runs
    assert [future.cancelled() for future in running] == [False, True, True]
    gate.set()
    for thread in requests._threads._threads:
        thread.join(60.0)
        assert not thread.is_alive()
    assert ran == [0]
    with pytest.raises(StoreFailed, match="closed"):
        requests.one(work, 4)


def test_errors_of_some_requests_are_answers_and_of_all_a_failure() -> None:
    requests = Requests(60.0, 2, failure)

    def divide(number: int) -> float:
        return 1 / number

    one, error = requests.each(divide, [1, 0], time.monotonic() + 60.0)
    assert one == 1 and isinstance(error, ZeroDivisionError)
    with pytest.raises(StoreFailed, match="ZeroDivisionError"):
        requests.each(divide, [0, 0], time.monotonic() + 60.0)
    requests.close()
