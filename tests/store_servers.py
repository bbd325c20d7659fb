"""Real stores for the tests that ask for one. Owns the decision to skip, loudly, where the program cannot be
had."""

from __future__ import annotations

import pytest

from tests.support.servers import ServerMissing, SlotRange, Valkey


def valkey_or_skip(
    password: str | None = None,
    tls: bool = False,
    slots: SlotRange | None = None,
    settings: tuple[str, ...] = (),
) -> Valkey:
    """A server of its own for whoever asks; close it."""
    try:
        return Valkey(password, tls, slots, settings)
    except ServerMissing as missing:
        pytest.skip(f"NO REAL VALKEY OR REDIS SERVER: {missing}")
