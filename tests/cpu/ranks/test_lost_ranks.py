"""A rank that ends, hangs, fails or does not fit ends the engine, in bounded time and with its name; a copy
that fails on one rank alone is computed instead."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from penstock.config import Config, KvConfig, RanksConfig
from penstock.contract import FinishReason
from penstock.engine.follower import check_alike
from penstock.engine.loop import EngineLoop
from penstock.errors import ConfigError, RankLost
from penstock.models.progress import silent
from penstock.ranks.leader import Leader, Peer
from penstock.ranks.start import FOLLOWER
from penstock.ranks.wire import MessageKind, RankWire, config_fields
from tests.support.driving import Collected, assert_same, generate, settle_all, submit
from tests.support.ranks import build_ranks, other_ranks

FAILING_COPIES = Path(__file__).parents[2] / "support" / "failing_copies"
PROMPT = [7, 8, 9, 10] * 8
_END_S = 60.0  # far beyond what it takes


def wait_finished(request: Collected) -> None:
    by_s = time.monotonic() + _END_S
    while request.finish is None:
        assert time.monotonic() < by_s, "the request did not end"
        time.sleep(0.01)


@contextmanager
def running(size: int, timeout_s: float = 30.0) -> Iterator[EngineLoop]:
    engine = build_ranks(size, timeout_s=timeout_s)
    loop = EngineLoop(engine)
    loop.start()
    try:
        yield loop
    finally:
        loop.close(deadline_s=0.0)
    assert not other_ranks()


def a_long_request(loop: EngineLoop) -> Collected:
    """It decodes."""
    request = submit(loop._engine, PROMPT, max_tokens=1900)
    by_s = time.monotonic() + _END_S
    while not request.tokens:
        assert time.monotonic() < by_s and request.finish is None
        time.sleep(0.01)
    return request


@pytest.mark.parametrize("index", [0, 1])
def test_a_killed_rank_ends_the_engine_with_its_name(index: int) -> None:
    with running(3) as loop:
        request = a_long_request(loop)
        victim = other_ranks()[index]
        victim.send_signal(signal.SIGKILL)
        wait_finished(request)
        assert request.finish is FinishReason.ERROR and request.error is not None
        assert f"(process {victim.pid}) was ended by SIGKILL" in request.error


def test_a_stopped_rank_ends_the_engine_with_its_name() -> None:
    with running(2, timeout_s=3.0) as loop:
        request = a_long_request(loop)
        other_ranks()[0].send_signal(signal.SIGSTOP)
        wait_finished(request)
        assert request.finish is FinishReason.ERROR and request.error is not None
        assert "did not answer for 3 s" in request.error and "rank 1" in request.error


def test_an_idle_engine_notices_that_a_rank_is_gone() -> None:
    with running(2) as loop:
        other_ranks()[0].send_signal(signal.SIGKILL)
        by_s = time.monotonic() + _END_S
        while loop.failed() is None:
            assert time.monotonic() < by_s
            time.sleep(0.01)
        assert isinstance(loop.failed(), RankLost) and "rank 1" in str(loop.failed())
        assert "rank 1" in str(loop._engine.ended)


def test_closing_leaves_no_process() -> None:
    engine = build_ranks(2)
    assert len(other_ranks()) == 1
    assert generate(engine, PROMPT).tokens
    engine.close(timeout_s=20.0)
    assert not other_ranks()


def test_other_ranks_end_with_rank_0(tmp_path: Path) -> None:
    """Killed, so that it can tell nobody."""
    lines = (
        "import time",
        "from tests.support.ranks import build_ranks, other_ranks",
        "engine = build_ranks(2)",
        "print(other_ranks()[0].pid, flush=True)",
        "time.sleep(600)",
    )
    rank_0 = subprocess.Popen([sys.executable, "-c", "\n".join(lines)], stdout=subprocess.PIPE, text=True)
    assert rank_0.stdout is not None
    other = psutil.Process(int(rank_0.stdout.readline()))
    rank_0.kill()
    rank_0.wait()
    rank_0.stdout.close()
    other.wait(_END_S)


def test_a_copy_that_fails_on_one_rank_is_computed_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_FAILING_LOADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(FAILING_COPIES), os.environ.get("PYTHONPATH", ""))))
    engine = build_ranks(2, blocks=32, host_blocks=200, max_model_len=256)
    prompt = list(range(1, 121))
    first = generate(engine, prompt)
    sources = []
    for _ in range(2):
        settle_all(engine)
        engine.cache.reset(("device",))
        again = generate(engine, prompt)
        assert_same(again, first)
        assert again.source is not None
        sources.append(again.source)
    failures = engine.stats().traffic.failures if engine.stats().traffic is not None else {}
    engine.close(timeout_s=20.0)
    assert failures == {("host", "copy"): 1}
    assert sources[0].host == 0 and sources[0].computed >= 112
    assert sources[1].host >= 112


# ------------------------------------------------------------------------------------ those that do not fit


def a_peer() -> tuple[Leader, RankWire]:
    """Rank 0 over a connection whose other end is the test."""
    ours, theirs = socket.socketpair()
    return Leader([Peer(1, RankWire(ours, 5.0))], 5.0), RankWire(theirs, 5.0)


def test_a_rank_with_other_weights_is_refused() -> None:
    leader, other = a_peer()
    other.send(MessageKind.READY, {"digest": b"other".hex(), "num_blocks": 8})
    with pytest.raises(ConfigError, match="rank 1 has other weights"):
        leader.ready(b"ours", 16, silent)
    leader.close()


def test_all_ranks_have_the_blocks_that_the_smallest_has_room_for() -> None:
    leader, other = a_peer()
    other.send(MessageKind.READY, {"digest": b"ours".hex(), "num_blocks": 8})
    assert leader.ready(b"ours", 16, silent) == 8
    leader.close()


def test_a_rank_of_another_version_refuses_to_join() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", FOLLOWER, str(theirs.fileno()), "-1", "-1"]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    wire = RankWire(ours, _END_S)
    assert wire.receive().kind is MessageKind.JOIN
    wire.send(MessageKind.SETUP, {"version": "0.0.0", "config": config_fields(Config()), "rank": 1})
    message = wire.receive()
    assert message.kind is MessageKind.FAILED and "rank 0 is penstock 0.0.0" in message.fields["error"]
    assert process.wait(_END_S) == 1
    wire.close()


def test_ranks_of_a_launcher_need_the_same_flags() -> None:
    config = Config(ranks=RanksConfig(2))
    check_alike(config, replace(config, source=replace(config.source, model="/elsewhere/model")))
    with pytest.raises(ConfigError, match="block_tokens=32"):
        check_alike(config, replace(config, kv=KvConfig(block_tokens=32)))


def test_a_launched_rank_with_other_flags_ends_the_start_of_rank_0() -> None:
    """As torchrun starts them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ("--model", "tiny-llama", "--load-format", "dummy", "--device", "cpu", "--tensor-parallel", "2")
    command = [sys.executable, "-m", "penstock", "generate", "x", *flags]
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [*command, "--block-tokens", size],
            env={**common, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, size in enumerate(("16", "32"))
    ]
    said = [rank.communicate(timeout=2 * _END_S)[1] for rank in ranks]
    assert all(rank.returncode for rank in ranks)
    assert all("rank 0 has block_tokens=16, this rank 32" in text for text in said)
    assert "penstock: error: rank 1 failed" in said[0]
