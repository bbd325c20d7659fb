"""Penstock under SGLang's HiCache: its factory, its controller with real threads, its host memory, its
failure injector, and the test that it ships for another backend."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageFailureInjector,
)
from sglang.srt.mem_cache.storage.mooncake_store import test_mooncake_store as shipped
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

from penstock.errors import ConfigError
from penstock.kv.tiers.ssd.store import SsdStore
from penstock.plugins.sglang import PenstockStorage
from tests.plugins.sglang.conftest import BACKEND, PAGE, SOON_S, Server, Start, make_pool
from tests.support.servers import Valkey

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "sglang-hicache.json").read_text())
PROMPT = list(range(1, 161))  # 40 pages
LAYOUTS = [
    pytest.param(layout, is_mla, id=f"{layout}-{'mla' if is_mla else 'mha'}")
    for is_mla in (False, True)
    for layout in ("page_first", "page_first_direct", "page_head")
    if not (is_mla and layout == "page_head")
]


def wait_scanned(server: Server) -> None:
    for tier in server.backend._blocks._tiers.tiers:
        if isinstance(tier.calls.store, SsdStore):
            assert tier.calls.store.wait_scanned(SOON_S)


def test_the_recorded_interface_is_the_installed_one() -> None:
    methods = {
        name: list(inspect.signature(one).parameters)[1:]
        for name, one in vars(HiCacheStorage).items()
        if inspect.isfunction(one)
    }
    fields = [field.name for field in dataclasses.fields(HiCacheStorageConfig)]
    settings = get_context().resolved_server_args_dict()
    assert {
        "settings": [name for name in RECORDED["settings"] if name in settings],
        "version": version("sglang"),
        "methods": methods,
        "config": sorted([*fields, "is_storage_writer"]),
    } == RECORDED


@pytest.mark.parametrize("interface", [1, 0], ids=["zero-copy", "copied"])
@pytest.mark.parametrize(("layout", "is_mla"), LAYOUTS)
def test_kv_that_was_backed_up_is_prefetched_bit_for_bit_also_after_a_restart(
    start: Start, tmp_path: Path, layout: str, is_mla: bool, interface: int
) -> None:
    options = {"ssd_dir": str(tmp_path / "kv"), "interface_v1": interface}
    server = start(layout, is_mla, **options)
    assert isinstance(server.backend, PenstockStorage)
    by_pointers = server.controller.page_get_func == server.controller._page_get_zero_copy
    assert by_pointers == bool(interface)
    assert server.fetch(PROMPT) == 0
    assert server.back_up(PROMPT) == len(PROMPT)
    assert server.fetch(PROMPT) == len(PROMPT)
    assert server.fetch([*PROMPT[:80], *[7] * 40]) == 80
    assert server.fetch([9, *PROMPT]) == 0
    server.close()
    # what one interface wrote, the other reads
    again = start(layout, is_mla, **options | {"interface_v1": 1 - interface})
    wait_scanned(again)
    assert again.fetch(PROMPT) == len(PROMPT)
    again.backend.clear()
    assert again.fetch(PROMPT) == 0


def test_more_pages_than_one_batch_of_sglang_come_back(start: Start, tmp_path: Path) -> None:
    server = start(ssd_dir=str(tmp_path / "kv"))
    prompt = list(range(10_000, 10_000 + 130 * PAGE - PAGE))
    assert len(prompt) == 129 * PAGE and server.pool.available_size() >= len(prompt)
    assert server.back_up(prompt) == len(prompt) == server.fetch(prompt)


@pytest.mark.parametrize("interface", [1, 0], ids=["zero-copy", "copied"])
def test_a_damaged_page_ends_the_prefix_and_nothing_is_raised(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, interface: int
) -> None:
    # Holds invariant 23.
    server = start(ssd_dir=str(tmp_path / "kv"))
    server.back_up(PROMPT)
    server.close()
    [segment] = (tmp_path / "kv").rglob("*.kv")
    data = bytearray(segment.read_bytes())
    damaged = server.kv_of(PROMPT[: 30 * PAGE]).view(torch.uint8).numpy().tobytes()
    place = bytes(data).find(damaged[: len(damaged) // 2])
    assert place > 0
    data[place + 5] ^= 1
    segment.write_bytes(data)
    again = start(ssd_dir=str(tmp_path / "kv"), interface_v1=interface)
    wait_scanned(again)
    assert again.fetch(PROMPT) == 29 * PAGE
    assert "Traceback" not in caplog.text
    assert again.back_up(PROMPT) == len(PROMPT) == again.fetch(PROMPT), "the page was not written again"


@pytest.mark.parametrize("interface", [1, 0], ids=["zero-copy", "copied"])
def test_under_the_failure_injector_only_right_kv_comes_back(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interface: int
) -> None:
    # Holds invariant 22.
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.002")
    server = start(ssd_dir=str(tmp_path / "kv"), interface_v1=interface)
    assert isinstance(server.backend, HiCacheStorageFailureInjector)
    prompts = [[number, *PROMPT[1:]] for number in range(60)]
    written = [server.back_up(prompt) for prompt in prompts]
    came = [server.fetch(prompt) for prompt in prompts]
    assert {0, len(PROMPT)} == set(written) == set(came)
    assert all(before >= after for before, after in zip(written, came, strict=True))


def test_if_every_call_fails_nothing_is_there(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(ssd_dir=str(tmp_path / "kv")).back_up(PROMPT)
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "1")
    server = start(ssd_dir=str(tmp_path / "other"))
    assert server.back_up(PROMPT) == 0 == server.fetch(PROMPT)


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    server = Valkey()
    yield server
    server.close()


def test_two_servers_share_pages_through_a_store_that_is_killed_and_comes_back(
    start: Start, valkey: Valkey
) -> None:
    # Holds invariant 22.
    url = f"valkey://127.0.0.1:{valkey.port}"
    one, two = start(remote=url), start(remote=url)
    assert one.back_up(PROMPT) == len(PROMPT) == two.fetch(PROMPT)
    assert start(remote=url, weights_id="other").fetch(PROMPT) == 0
    valkey.kill()
    other = PROMPT[::-1]
    assert two.fetch(PROMPT) == 0 == one.back_up(other)
    valkey.start()  # empty
    until = time.monotonic() + SOON_S
    while one.back_up(other) == 0:
        assert time.monotonic() < until, "the store was not tried again"
    while two.fetch(other) == 0:
        assert time.monotonic() < until, "the store was not tried again"
    assert two.fetch(other) == len(other) and two.fetch(PROMPT) == 0


def test_what_cannot_work_fails_the_attach_with_one_line(start: Start, tmp_path: Path) -> None:
    # Holds invariant 26.
    for layout, options, said in (
        ("layer_first", {}, "--hicache-mem-layout"),
        ("page_first", {"ssd_dri": "x"}, "'ssd_dri'"),
        ("page_first", {"weights_id": None}, "weights_id"),
    ):
        with pytest.raises(ConfigError, match=said):
            start(layout, ssd_dir=str(tmp_path / "kv"), **options)
    one = start(ssd_dir=str(tmp_path / "kv"))
    with pytest.raises(ConfigError):  # another server has the directory
        start(ssd_dir=str(tmp_path / "kv"))
    assert one.back_up(PROMPT) == len(PROMPT)


def test_two_ranks_agree_on_what_both_have_each_in_a_folder_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.plugins.sglang.rank"]
    places = [str(tmp_path / "rendezvous"), str(tmp_path / "kv")]
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'src'}"}
    ranks = [
        subprocess.Popen([*command, str(rank), *places], cwd=root, env=environment, stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=600)[0].decode().splitlines()[-2:] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    folders = "tp0-pp0-cp0-dp0 tp1-pp0-cp0-dp0"
    assert said == [["written 160 fetched 160", f"fetched 40 {folders}"]] * 2


CONFIGS = [(False, 0, 1), (True, 0, 1), (False, 1, 4), (True, 3, 8)]  # those of the shipped test


@pytest.mark.parametrize(("is_mla", "rank", "size"), CONFIGS)
def test_the_batch_test_that_sglang_ships_for_mooncake_passes(
    monkeypatch: pytest.MonkeyPatch, valkey: Valkey, is_mla: bool, rank: int, size: int
) -> None:
    opened: list[Any] = []

    class Store(PenstockStorage):
        """Its pool has no type and no layers, and its configuration no options."""

        def __init__(self, config: HiCacheStorageConfig) -> None:
            options = BACKEND | {"remote": f"valkey://127.0.0.1:{valkey.port}"}
            options.pop("ssd_gib")
            super().__init__(dataclasses.replace(config, extra_config=options))
            opened.append(self)

        def register_mem_pool_host(self, mem_pool_host: Any) -> None:
            mem_pool_host.dtype, mem_pool_host.start_layer, mem_pool_host.end_layer = torch.float32, 0, 0
            super().register_mem_pool_host(mem_pool_host)

    monkeypatch.setattr(shipped, "MooncakeStore", Store)
    config = shipped.make_hicache_storage_config(is_mla_model=is_mla, tp_rank=rank, tp_size=size)
    shipped.test_batch_operation(config)
    assert opened[0]._blocks.traffic().bytes["remote", "host"] > 0
    opened[0].close()


def test_the_pools_of_the_tests_are_those_of_sglang() -> None:
    assert {type(make_pool("page_first", is_mla)).__module__ for is_mla in (False, True)} == {
        "sglang.srt.mem_cache.pool_host.mha",
        "sglang.srt.mem_cache.pool_host.mla",
    }


def test_the_command_of_the_documents_is_one_that_sglang_takes(start: Start, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "plugins.md").read_text()
    [command] = re.findall(r"python -m sglang\.launch_server (.*?)\n```", page, flags=re.DOTALL)
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = parser.parse_args(shlex.split(command.replace("\\\n", " ")))
    assert (given.hicache_storage_backend, given.enable_hierarchical_cache) == ("dynamic", True)
    options = json.loads(given.hicache_storage_backend_extra_config)
    options |= {"ssd_dir": str(tmp_path / "kv"), "ssd_gib": 0.05, "weights_id": "w"}
    server = start(given.hicache_mem_layout, **options)
    assert server.back_up(PROMPT) == len(PROMPT) == server.fetch(PROMPT)
