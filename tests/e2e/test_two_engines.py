"""Two engine processes on one real store: what one has computed, the other restores, with the same tokens."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.testing.sanitized import build_sanitized, check_silent
from tests.e2e.troubled import FULL_BLOCKS, PROMPT_TOKENS, prompt
from tests.support.driving import generate, tiny_config, wait_scanned
from tests.support.servers import Mooncake, ServerMissing, Valkey, mooncake_environment

TESTS = Path(__file__).resolve().parents[1]
NUMBERS = (0, 1, 2)


class EngineProcess:
    """One that answers questions; ends with `with`."""

    def __init__(self, url: str, environment: Mapping[str, str], model: str = "tiny-qwen3") -> None:
        path = os.pathsep.join([str(TESTS.parent), str(TESTS.parent / "src")])
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "e2e" / "engine_process.py"), url, model],
            env={**os.environ, **environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine ended with {self.process.wait()}"
        return line

    def wait_ready(self) -> None:
        assert self._line() == "ready\n"

    def ask(self, *numbers: int) -> tuple[list[list[int]], list[dict[str, int]]]:
        """Tokens and sources, by prompt."""
        self.begin(*numbers)
        answers: list[tuple[list[int], dict[str, int]]] = json.loads(self._line())
        return [tokens for tokens, _ in answers], [source for _, source in answers]

    def begin(self, *numbers: int) -> None:
        """Ask, and do not wait for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(numbers) + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60.0)  # it closes what it has
        self.kill()


@pytest.fixture(scope="module")
def alone() -> Iterator[list[list[int]]]:
    """The tokens of an engine without tiers, of `NUMBERS` and one more."""
    engine, _ = build_sanitized(tiny_config())
    yield [generate(engine, prompt(number), max_tokens=4).tokens for number in (*NUMBERS, 3)]
    engine.close(20.0)


@pytest.fixture(params=["valkey", "mooncake"])
def store(request: pytest.FixtureRequest) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Its URL, and what a process needs to reach it."""
    try:
        environment = mooncake_environment() if request.param == "mooncake" else {}
        server: Any = Mooncake() if request.param == "mooncake" else Valkey()
    except ServerMissing as missing:
        pytest.skip(f"NO REAL {request.param.upper()}: {missing}")
    with server:
        yield server.url(), environment


def source(remote: int) -> dict[str, int]:
    return {"device": 0, "host": 0, "ssd": 0, "remote": remote, "computed": PROMPT_TOKENS - remote}


def asked(engine: EngineProcess, *numbers: int) -> tuple[list[list[int]], list[dict[str, int]]]:
    """What it answers, and from where: what was read ahead into host memory while a request waited counts as
    the store's."""
    tokens, sources = engine.ask(*numbers)
    return tokens, [{**one, "remote": one["remote"] + one["host"], "host": 0} for one in sources]


def test_what_one_process_has_computed_another_restores_also_after_the_first_was_killed(
    store: tuple[str, Mapping[str, str]], alone: list[list[int]]
) -> None:
    with EngineProcess(*store) as first, EngineProcess(*store) as second:
        first.wait_ready()
        second.wait_ready()
        assert first.ask(*NUMBERS) == (alone[:3], [source(0)] * 3)
        assert asked(second, *NUMBERS) == (alone[:3], [source(FULL_BLOCKS)] * 3)
        assert second.ask(3) == (alone[3:], [source(0)])
        assert asked(first, 3, *NUMBERS) == ([alone[3], *alone[:3]], [source(FULL_BLOCKS)] * 4), (
            "and the other way round"
        )
        first.kill()
        assert asked(second, *NUMBERS) == (alone[:3], [source(FULL_BLOCKS)] * 3)


def test_a_hybrid_model_continues_in_another_process_by_states_in_the_store(
    store: tuple[str, Mapping[str, str]],
) -> None:
    alone = hybrid_alone()
    with EngineProcess(*store, "tiny-qwen3.5") as first, EngineProcess(*store, "tiny-qwen3.5") as second:
        first.wait_ready()
        second.wait_ready()
        assert first.ask(*NUMBERS) == (alone, [source(0)] * 3)
        assert asked(second, *NUMBERS) == (alone, [source(FULL_BLOCKS)] * 3)
        first.kill()
        assert asked(second, *NUMBERS) == (alone, [source(FULL_BLOCKS)] * 3)


def hybrid_alone() -> list[list[int]]:
    engine, _ = build_sanitized(tiny_config("tiny-qwen3.5"))
    found = [generate(engine, prompt(number), max_tokens=4).tokens for number in NUMBERS]
    engine.close(20.0)
    return found


def test_a_hybrid_model_continues_from_disk_after_a_kill_in_the_middle_of_its_work(tmp_path: Path) -> None:
    """What was persisted before is there, blocks and states, with the same tokens."""
    alone, folder = hybrid_alone(), str(tmp_path / "ssd")
    with EngineProcess(folder, {}, "tiny-qwen3.5") as first:
        first.wait_ready()
        assert first.ask(*NUMBERS) == (alone, [source(0)] * 3)
        first.begin(*range(10, 40))
        first.kill()
    engine, sanitizer = build_sanitized(
        tiny_config("tiny-qwen3.5", host_blocks=256, ssd_dir=folder, ssd_gib=0.05)
    )
    wait_scanned(engine)
    assert engine.cache.states is not None
    assert engine.cache.states.cold.tiers["ssd states"].calls.store.wrapped.wait_scanned(60.0)  # type: ignore[attr-defined]
    for number, tokens in zip(NUMBERS, alone, strict=True):
        found = generate(engine, prompt(number), max_tokens=4)
        assert found.tokens == tokens and found.source is not None
        assert found.source.computed == PROMPT_TOKENS - FULL_BLOCKS
    engine.close(20.0)
    check_silent(sanitizer)
