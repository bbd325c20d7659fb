"""The fleet of a test; it is killed afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.routers.fleet import ENVIRONMENTS, Fleet


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    if not ENVIRONMENTS.is_dir():
        pytest.skip("no routers are installed: make routers")
    one = Fleet()
    try:
        yield one
    finally:
        one.close()
