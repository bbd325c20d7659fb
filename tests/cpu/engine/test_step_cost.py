"""What the engine thread does in a decode step: so much for each request, however many there are. Counted in
lines of Python, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import penstock
from penstock.config import Config
from penstock.engine.build import build
from penstock.engine.engine import Engine
from tests.cpu.engine.test_mtp_engine import model_of, with_head, write_random_head
from tests.support.driving import run_all, submit, tiny_config
from tests.support.forced import forced

PACKAGE = str(Path(penstock.__file__).parent) + "/"
NUM_STEPS = 40  # two blocks and a half
MOST_LINES = 170  # of a plain step, for each request


def lines_of(run: Callable[[], object]) -> int:
    """Of this package, on this thread."""
    num = 0

    def see(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal num
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        num += event == "line"
        return see

    before = sys.gettrace()
    sys.settrace(see)
    try:
        run()
    finally:
        sys.settrace(before)
    return num


def lines_per_step(config: Config, num_requests: int) -> float:
    engine: Engine = build(config)
    if engine.parts.speculation is not None:
        forced(engine, is_on=False)
    for n in range(num_requests):
        submit(engine, [1 + n, 2, 3, 4], max_tokens=NUM_STEPS + 24)
    for _ in range(8):
        engine.step()
    assert engine.stats().requests["running"] == num_requests
    num = lines_of(lambda: [engine.step() for _ in range(NUM_STEPS)])
    run_all(engine)
    engine.close(timeout_s=20.0)
    return num / NUM_STEPS


@pytest.mark.parametrize("has_head", [False, True], ids=["plain", "head"])
def test_a_decode_step_costs_each_request_the_same_however_many_there_are(
    has_head: bool, tmp_path: Path
) -> None:
    config = tiny_config(blocks=512, max_batch=64, prefill_chunk=512)
    if has_head:
        target = build(config)
        config = with_head(config, write_random_head(tmp_path / "head", model_of(target)))
        target.close(timeout_s=20.0)
    few, some, many = (lines_per_step(config, num) for num in (4, 24, 64))
    of_one = (some - few) / 20
    assert (many - some) / 40 <= 1.05 * of_one, "each of many costs what each of few does"
    assert has_head or of_one <= MOST_LINES
