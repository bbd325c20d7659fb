"""Real vLLM servers with Penstock's disk and a real Valkey under them: the same tokens whatever happens to
either, and hits by vLLM's own metrics. Takes minutes: `make plugins`."""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.plugins.environments import VLLM, python_of
from tests.plugins.vllm_server import BLOCK_TOKENS, VllmServer, write_model
from tests.store_servers import valkey_or_skip
from tests.support.servers import Valkey

NUM_PROMPTS = 12
PROMPT_TOKENS = 400
FULL_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
SOON_S = 120.0
PATIENT = {"remote_timeout_s": 30.0}

pytestmark = pytest.mark.skipif(
    not python_of(VLLM).exists(), reason="NO VLLM IS INSTALLED HERE: make plugins installs it"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with valkey_or_skip() as server:
        yield server


def prompts(seed: int, num: int = NUM_PROMPTS) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 512) for _ in range(PROMPT_TOKENS)] for _ in range(num)]


def answers(server: VllmServer, asked: list[list[int]]) -> list[list[int]]:
    return [server.answer(prompt) for prompt in asked]


# A request is answered before its last figures are reported: tests wait for those.
def wait_for(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.05)


def tell_times(path: Path) -> None:
    for name, seconds in json.loads(path.read_text()).items():
        ordered = sorted(seconds)
        p99 = ordered[int(0.99 * (len(ordered) - 1))]
        print(
            f"{name}: {len(ordered)} calls, median {statistics.median(ordered) * 1e6:.0f} us, "
            f"p99 {p99 * 1e6:.0f} us, most {ordered[-1] * 1e6:.0f} us"
        )


def flip_bits(folder: Path) -> int:
    """In the middle of every block that one of the files holds. Returns how many."""
    num = 0
    for file in folder.rglob("*.kv"):
        with file.open("r+b") as opened:
            size = file.stat().st_size
            for at in range(24 << 10, size, 36 << 10):  # a slot is a block of 32 KiB and its head
                opened.seek(at)
                byte = opened.read(1)
                opened.seek(at)
                opened.write(bytes([byte[0] ^ 64]))
                num += 1
    return num


def kill_during_stores(server: VllmServer, asked: list[list[int]]) -> None:
    """With -9, while it computes `asked` and stores their blocks."""
    written = server.metric("penstock_blocks_written_total")

    def load() -> None:
        with contextlib.suppress(httpx.HTTPError):  # it was killed
            answers(server, asked)

    client = threading.Thread(target=load)
    client.start()
    wait_for(
        lambda: server.metric("penstock_blocks_written_total") > written + 5 * FULL_BLOCKS,
        "nothing was written",
    )
    server.kill()
    client.join(SOON_S)
    assert not client.is_alive()


def test_prompts_return_from_disk_with_the_same_tokens(model: Path, tmp_path: Path) -> None:
    """After eviction, after a kill -9 in the middle of stores, and after the disk was damaged."""
    tier = {"ssd_dir": str(tmp_path / "kv"), "ssd_gib": 0.1}
    asked = prompts(1)
    with VllmServer(model, tmp_path, tier) as server:
        server.wait_ready()
        reference = answers(server, asked)
        assert len({tuple(answer) for answer in reference}) > NUM_PROMPTS // 2  # they tell prompts apart
        assert server.metric("penstock_blocks_read_total") == 0
        assert answers(server, asked) == reference
        wait_for(
            lambda: (
                server.answer(asked[-1]) == reference[-1]
                and server.metric("penstock_blocks_read_total", place="ssd") >= FULL_BLOCKS * 8
            ),
            "nothing came from the disk",
        )
        assert server.metric("prompt_tokens_cached_by_source_total", source="disk") >= FULL_BLOCKS * 8 * 32
        kill_during_stores(server, prompts(2, num=100))

    times = tmp_path / "times.json"
    with VllmServer(model, tmp_path, tier, {"PENSTOCK_TEST_TIMES": str(times)}) as server:
        server.wait_ready()
        assert answers(server, asked) == reference
        assert server.metric("prompt_tokens_cached_by_source_total", source="disk") > 0
        assert server.metric("penstock_blocks_damaged_total") == 0
        assert answers(server, asked) == reference
        assert flip_bits(tmp_path / "kv") > NUM_PROMPTS * FULL_BLOCKS
        assert answers(server, asked) == reference
        wait_for(
            lambda: (
                server.answer(asked[0]) == reference[0]
                and server.metric("penstock_blocks_damaged_total", place="ssd") > NUM_PROMPTS
            ),
            "no damage was noticed",
        )
        assert answers(server, asked) == reference
        server.stop()
        assert "Failed to shut down secondary tier" not in server.log
    tell_times(times)


def test_two_servers_share_a_store_whatever_happens_to_it(
    model: Path, tmp_path: Path, valkey: Valkey
) -> None:
    """Emptied and full."""
    tier = {"remote": valkey.url(), **PATIENT}
    asked = prompts(3)
    with VllmServer(model, tmp_path, tier) as one, VllmServer(model, tmp_path, tier) as other:
        one.wait_ready()
        other.wait_ready()
        reference = answers(one, asked)
        wait_for(
            lambda: int(valkey.ask("DBSIZE").lstrip(b":")) >= NUM_PROMPTS * FULL_BLOCKS, "not all is stored"
        )
        assert answers(other, asked) == reference
        wait_for(
            lambda: (
                other.answer(asked[-1]) == reference[-1]
                and other.metric("penstock_blocks_read_total", place="remote") >= NUM_PROMPTS * FULL_BLOCKS
            ),
            "the other server computed what is in the store",
        )

        valkey.ask("FLUSHALL")
        assert answers(other, asked) == reference
        valkey.ask("CONFIG", "SET", "maxmemory", "2mb")
        assert answers(one, prompts(4)) == answers(other, prompts(4))
        wait_for(
            lambda: (
                bool(one.answer(asked[0])) and one.metric("penstock_blocks_skipped_total", reason="full") > 0
            ),
            "the store was not full",
        )
        valkey.ask("CONFIG", "SET", "maxmemory", "0")
        assert answers(one, asked) == reference


def test_a_store_that_is_paused_costs_one_timeout(model: Path, tmp_path: Path) -> None:
    asked = prompts(5)
    with (
        valkey_or_skip() as server,
        VllmServer(model, tmp_path, {"remote": server.url(), "remote_timeout_s": 2.0}) as host,
    ):
        host.wait_ready()
        reference = answers(host, asked)
        server.pause()
        try:
            assert answers(host, asked) == reference
            assert answers(host, prompts(6)) != []
            wait_for(
                lambda: (
                    host.answer(asked[0]) == reference[0]
                    and host.metric("penstock_usable", place="remote") == 0
                ),
                "the store still counts as usable",
            )
        finally:
            server.resume()
        wait_for(
            lambda: (
                host.answer(asked[0]) == reference[0] and host.metric("penstock_usable", place="remote") == 1
            ),
            "the store did not come back",
        )
        assert answers(host, asked) == reference


def test_a_plug_in_that_is_not_loaded_is_one_clear_line(model: Path, tmp_path: Path) -> None:
    tier = {"ssd_dir": str(tmp_path / "kv")}
    with VllmServer(model, tmp_path, tier, {"VLLM_PLUGINS": "none"}) as server:
        assert "VLLM_PLUGINS must be unset or include penstock" in server.wait_ended()
