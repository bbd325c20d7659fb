"""An engine on its own thread whose tiers get into trouble, and the real things that trouble can be had from:
a small file system, a network of its own for a store. Owns each of them; what must hold is the tests'
business."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config import Config
from penstock.contract import FinishReason, SamplingParams, Submission, TokenEvent
from penstock.engine.loop import EngineLoop
from penstock.figures import Traffic
from penstock.kv.tiers.policy import PrefillRate
from penstock.testing.sanitized import build_sanitized, check_silent
from tests.support.driving import Collected, tiny_config
from tests.support.servers import Program, Server, ServerMissing, find_program

LIMIT_S = 60.0  # by when everything has ended, on the slowest of machines
PROMPT_TOKENS = 100
FULL_BLOCKS = 96  # tokens of them


def prompt(number: int) -> list[int]:
    return np.random.default_rng(number).integers(1, 500, PROMPT_TOKENS).tolist()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {LIMIT_S} s: {what}"
        time.sleep(0.002)


class Unmeasured(PrefillRate):
    """Nobody knows how long computing takes, so that a store is waited for as long as for an unknown model: a
    tiny one would compute before a busy machine has asked."""

    def seconds(self, num_tokens: int, depth: float) -> None:
        return None


class Troubled:
    """An engine that runs. Every wait has a limit."""

    def __init__(self, config: Config) -> None:
        self.engine, self._sanitizer = build_sanitized(config)
        cache = self.engine.cache
        cache.loads.costs.prefill = Unmeasured()
        self._loop = EngineLoop(self.engine)
        self._loop.start()

    def ask(self, *numbers: int) -> list[Collected]:
        """Answers to these prompts, all at once."""
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        over = threading.Semaphore(0)
        found = []
        for number in numbers:
            collected = Collected()

            def listen(event: TokenEvent, collected: Collected = collected) -> None:
                collected.events.append(event)
                if event.finish is not None:
                    over.release()

            self.engine.submit(Submission(prompt(number), params), listen)
            found.append(collected)
        for _ in numbers:
            assert over.acquire(timeout=LIMIT_S), f"a request hangs: {self.engine.stats().requests}"
        assert all(one.finish is FinishReason.LENGTH for one in found), [one.error for one in found]
        return found

    def store(self, tier: str) -> Any:
        return self.engine.cache.cold_tiers[tier].calls.store

    @property
    def traffic(self) -> Traffic:
        traffic = self.engine.stats().traffic
        assert traffic is not None
        return traffic

    def num_failures(self, tier: str) -> int:
        return sum(num for (name, _), num in self.traffic.failures.items() if name == tier)

    def usable(self, tier: str) -> bool:
        return self.traffic.usable[tier]

    def persist(self) -> None:
        self.engine.kv.wait_flushed("persisted", LIMIT_S)

    def forget(self) -> None:
        """Device and host memory; what is on its way there or from there has come to an end."""
        until(lambda: not self.engine.is_transferring(), "nothing is on its way")
        self.engine.kv.reset(("device", "host"))

    def close(self) -> None:
        self._loop.close(LIMIT_S)
        assert self._loop.failed() is None
        check_silent(self._sanitizer)


@contextlib.contextmanager
def troubled(**settings: Any) -> Iterator[Troubled]:
    """A tiny model; room for all that the tests ask for in host memory."""
    running = Troubled(tiny_config(**{"host_blocks": 256, **settings}))
    try:
        yield running
    finally:
        running.close()


# ---------------------------------------------------------------------------------------------- real troubles


@contextlib.contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[Path]:
    """A real file system of that size."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=700", "tmpfs", str(path)]
    mounted = (
        subprocess.run(command, capture_output=True, text=True, check=False)
        if shutil.which("mount")
        else None
    )
    if mounted is None or mounted.returncode:
        pytest.skip(
            "NO FULL DISK: no file system can be mounted here: "
            f"{mounted.stderr.strip() if mounted else 'no mount'}"
        )
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServerMissing(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Apart(Server):
    """A Valkey or Redis server in a network of its own, which one cable leads to. The cable can be cut in two
    ways."""

    def __init__(self) -> None:
        if shutil.which("ip") is None:
            raise ServerMissing("no program to make networks with: ip")
        self._valkey = find_program("valkey", ("valkey-server", "redis-server"))
        super().__init__(Program(Path(shutil.which("ip") or ""), self._valkey.library_dirs))
        number = os.getpid() % (1 << 14)
        self._space, self._cable = f"penstock-{number}", f"pk{number}"
        net = (198 << 24) + (18 << 16) + 4 * number  # a range that is for tests alone
        self.here, self.there = (".".join(map(str, (net + i).to_bytes(4, "big"))) for i in (1, 2))
        try:
            self._lay_cable()
            self._start()
        except BaseException:
            self.close()
            raise

    def _lay_cable(self) -> None:
        _ip("netns", "add", self._space)
        _ip("link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", self._space)
        _ip("addr", "add", f"{self.here}/30", "dev", self._cable)
        _ip("link", "set", self._cable, "up")
        _ip("-n", self._space, "addr", "add", f"{self.there}/30", "dev", "eth0")
        _ip("-n", self._space, "link", "set", "eth0", "up")

    def _start(self) -> None:
        settings = [
            "--bind",
            self.there,
            "--port",
            "6379",
            "--save",
            "",
            "--appendonly",
            "no",
            "--protected-mode",
            "no",
        ]
        self.spawn(
            ["netns", "exec", self._space, str(self._valkey.path), *settings, "--dir", str(self.folder)]
        )
        until(lambda: not self.alive or "eady to accept" in self.log_tail(), "the server starts")
        if not self.alive:
            raise ServerMissing(f"it does not start in a network of its own: {self.log_tail()}")

    @property
    def url(self) -> str:
        return f"valkey://{self.there}:6379"

    def pull_the_cable(self) -> None:
        """The link is down."""
        _ip("-n", self._space, "link", "set", "eth0", "down")

    def plug_it_in(self) -> None:
        _ip("-n", self._space, "link", "set", "eth0", "up")

    def swallow_answers(self) -> None:
        """The link is up, and no answer ever comes: nothing is refused, nothing is reset."""
        _ip("-n", self._space, "route", "add", "blackhole", f"{self.here}/32")

    def let_answers_through(self) -> None:
        _ip("-n", self._space, "route", "del", "blackhole", f"{self.here}/32")

    def close(self) -> None:
        super().close()
        for words in (("link", "del", self._cable), ("netns", "del", self._space)):
            with contextlib.suppress(ServerMissing):
                _ip(*words)


def apart_or_skip() -> Apart:
    try:
        return Apart()
    except ServerMissing as missing:
        pytest.skip(f"NO NETWORK TO CUT: {missing}")


def tokens_of(found: Sequence[Collected]) -> list[list[int]]:
    return [one.tokens for one in found]


def by_source(found: Sequence[Collected], source: str) -> list[int]:
    return [getattr(one.source, source) for one in found]
