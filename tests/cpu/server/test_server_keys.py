"""Requests that show more than one key: which of them would count is nobody's guess."""

from __future__ import annotations

import pytest

from tests.cpu.server.served import serving

KEY = "right"


@pytest.mark.parametrize("shown", [(KEY, "wrong"), ("wrong", KEY), (KEY, KEY)])
def test_of_two_keys_none_counts(shown: tuple[str, str]) -> None:
    """A proxy that checks the first and a server that checks the last would let anybody in."""
    with serving(api_key=KEY) as served:
        several = [("authorization", f"Bearer {key}") for key in shown]
        assert served.http.get("/v1/models", headers=several).status_code == 401
        assert served.http.get("/v1/models", headers=several[:1]).status_code == (
            200 if shown[0] == KEY else 401
        )
