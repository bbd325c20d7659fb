"""A real store for the tests of this folder. Owns its life; what is asked of it is the tests' business."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock_valkey import ValkeyStore
from tests.cpu.kv.valkey_rig import opened
from tests.store_servers import valkey_or_skip
from tests.support.servers import Valkey


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Valkey]:
    with valkey_or_skip() as server:
        yield server


@pytest.fixture
def server(shared_server: Valkey) -> Valkey:
    """Running and empty."""
    if shared_server.alive:
        shared_server.resume()  # a test that failed may have left it paused
    else:
        shared_server.start()
    shared_server.ask("FLUSHALL")
    return shared_server


@pytest.fixture
def store(server: Valkey) -> Iterator[ValkeyStore]:
    with opened(server.url()) as made:
        yield made
