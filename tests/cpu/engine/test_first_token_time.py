"""The time to the first token begins when a request is submitted, not when the engine thread takes it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from penstock.engine import engine as engine_module
from penstock.engine import outbox as outbox_module
from penstock.engine.engine import Engine
from tests.support.driving import run_all, submit


def test_a_request_that_lies_in_the_inbox_waits_for_its_first_token(
    make_engine: Callable[..., Engine], prompts: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    now_s = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now_s, sleep=lambda seconds: None)
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "time", clock)
        patch.setattr(outbox_module, "time", clock)
        answer = submit(engine, prompts(20), max_tokens=1)
        now_s += 7.0  # nobody takes it
        run_all(engine)
    assert len(answer.tokens) == 1
    assert engine.stats().ttft.total == 7.0
