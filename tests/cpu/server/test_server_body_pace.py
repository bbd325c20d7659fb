"""How long a body may take, and in which words a client may say that it is not compressed."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from penstock.config import ServerConfig
from penstock.server.connection import read_body
from penstock.server.faults import Refused
from tests.cpu.server.served import Served, completion


class _ClockedLoop(asyncio.SelectorEventLoop):
    """Its time passes only when a test says so."""

    now_s = 1000.0

    def time(self) -> float:
        return self.now_s


def test_a_body_has_one_deadline_however_many_pieces_it_comes_in() -> None:
    """Each piece comes well within the time for all of them."""
    loop = _ClockedLoop()
    num_pieces = 0

    async def receive() -> Message:
        nonlocal num_pieces
        num_pieces += 1
        loop.now_s += 0.4
        await asyncio.sleep(0)  # whatever is due by now happens
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x", "more_body": num_pieces < 20}

    scope = {"type": "http", "headers": []}
    try:
        with pytest.raises(Refused) as refusal:
            loop.run_until_complete(read_body(scope, receive, ServerConfig(read_timeout_s=1.0)))
    finally:
        loop.close()
    assert refusal.value.status == 408
    assert num_pieces == 3


@pytest.mark.parametrize("coding", ["identity", "Identity", "IDENTITY"])
def test_a_body_that_is_said_not_to_be_compressed_is_taken(served: Served, coding: str) -> None:
    """Names of codings have no case in HTTP."""
    answer = served.http.post(
        "/v1/completions", json=completion(max_tokens=1), headers={"content-encoding": coding}
    )
    assert answer.status_code == 200
