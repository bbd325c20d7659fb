"""One server per test: what one test holds or breaks is no other test's concern."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cpu.server.served import Served, serving


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as running:
        yield running
        running.engine.release()
        running.assert_idle()
