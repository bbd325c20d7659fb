"""The tier of vLLM beside each recorded version of vLLM: its interface, jobs, metrics, end, and what it
refuses."""

from __future__ import annotations

import inspect
import mmap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from penstock.errors import ConfigError, DeadlineExceeded
from penstock.plugins import tiers, vllm_host
from penstock.testing.stores import MemoryStore
from tests.pure.plugins.vllm_rig import SLOT_BYTES, SOON_S, VllmRig, request, vllm_key
from tests.support.fake_vllm import NEWEST, OLDEST, RECORDS, SlidingWindowSpec, config_of, fake_vllm

KEYS = [vllm_key(number) for number in range(12)]
DISK = {"ssd_gib": 0.01}


@pytest.fixture(params=sorted(RECORDS))
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def plugin(version: str) -> Iterator[ModuleType]:
    with fake_vllm(version) as module:
        yield module


@pytest.fixture
def rig(plugin: ModuleType, version: str, model: Path, tmp_path: Path) -> Iterator[VllmRig]:
    rig = VllmRig(plugin, version, model, ssd_dir=str(tmp_path / "kv"), **DISK)
    yield rig
    rig.tier.shutdown()


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """The store behind any URL."""
    blocks: dict[bytes, bytearray] = {}

    def open_store(url: str, space: Any, timeout_s: float) -> MemoryStore:
        store.__init__("remote", space=space.digest, blocks=blocks)  # type: ignore[misc]
        return store

    store = MemoryStore("remote", blocks=blocks)
    monkeypatch.setattr(tiers, "open_store", open_store)
    return store


# -------------------------------------------------------------------------------------------------- interface


def test_the_tier_has_the_methods_that_each_version_calls(plugin: ModuleType, version: str) -> None:
    tier = plugin.PenstockTier
    assert not tier.__abstractmethods__
    for name, parameters in RECORDS[version]["methods"].items():
        ours = vars(tier).get(name)
        if ours is None or name == "__init__":
            continue
        given = list(inspect.signature(getattr(ours, "__func__", ours)).parameters)[1:]
        assert given == parameters, name


def test_blocks_are_stored_found_and_loaded_beside_each_version(rig: VllmRig) -> None:
    assert rig.store(KEYS[:6]).success
    assert rig.lookup(KEYS[:7]) == [rig.results.HIT] * 6 + [rig.results.MISS]
    assert rig.load(KEYS[:6]).success


def test_a_partial_load_names_what_came_where_the_version_asks(rig: VllmRig) -> None:
    """Older versions know only whole loads: then it has failed. The request never finds the missing blocks
    again."""
    rig.store([KEYS[0], KEYS[2]])
    result = rig.load(KEYS[:3])
    assert not result.success
    if "successful_keys" in rig.record["result"]:
        assert result.successful_keys == [KEYS[0], KEYS[2]]
    assert rig.lookup([KEYS[1]]) == [rig.results.MISS]


def test_a_request_does_not_look_again_for_what_could_not_be_loaded(far: MemoryStore, model: Path) -> None:
    """Otherwise it would find and load the same bad block for ever."""
    with fake_vllm() as plugin:
        rig = VllmRig(plugin, NEWEST, model, remote="valkey://x", remote_timeout_s=SOON_S)
        hit, miss = rig.results.HIT, rig.results.MISS
        rig.store(KEYS[:2])
        far.fails.update(list(far.blocks)[:1])
        assert rig.lookup(KEYS[:2]) == [hit, hit]
        assert rig.load(KEYS[:2]).successful_keys == KEYS[1:2]
        assert rig.lookup(KEYS[:2]) == [miss, hit]
        assert rig.lookup(KEYS[:2], "another") == [hit, hit]
        rig.tier.shutdown()


def test_blocks_that_were_loaded_outlive_a_stream_of_others(model: Path, tmp_path: Path) -> None:
    """Also if the version does not tell a tier of blocks that are used."""
    with fake_vllm() as plugin:
        options = {"ssd_dir": str(tmp_path / "kv"), "ssd_gib": 40 * SLOT_BYTES / (1 << 30)}
        rig = VllmRig(plugin, NEWEST, model, **options)
        rig.store(KEYS[:4])
        assert rig.load(KEYS[:4]).success
        for first in range(100, 135, 5):
            rig.store([vllm_key(number) for number in range(first, first + 5)])
        assert rig.lookup([vllm_key(100)]) == [rig.results.MISS]
        assert rig.lookup(KEYS[:4]) == [rig.results.HIT] * 4
        rig.tier.shutdown()


def test_the_entry_point_registers_the_tier_once(plugin: ModuleType) -> None:
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    vllm_host.register()
    vllm_host.register()
    assert SecondaryTierFactory._registry["PenstockTier"]() is plugin.PenstockTier


def test_a_tier_learns_the_configuration_of_the_connector_that_makes_it(plugin: ModuleType) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    KVConnectorFactory.made = staticmethod(vllm_host.current_config)
    vllm_host.register()
    vllm_host.register()
    config = offloading({"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "PenstockTier"}]})
    made = KVConnectorFactory.create_connector(config=config, role=None, kv_cache_config="kv")
    assert made == (config, "kv")
    with pytest.raises(ConfigError, match="VLLM_PLUGINS"):
        vllm_host.current_config()


@pytest.mark.parametrize(
    ("extra", "refused"),
    [
        ({"secondary_tiers": [{"type": "PenstockTier"}]}, True),
        ({"spec_name": "CPUOffloadingSpec", "secondary_tiers": [{"type": "PenstockTier"}]}, True),
        ({"secondary_tiers": [{"type": "fs"}]}, False),
        ({}, False),
        (None, False),
    ],
)
def test_tiers_that_vllm_would_ignore_are_refused(extra: dict[str, Any] | None, refused: bool) -> None:
    with fake_vllm():
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.made = staticmethod(lambda: "made")
        vllm_host.register()

        def make() -> Any:
            return KVConnectorFactory.create_connector(
                config=offloading(extra), role=None, kv_cache_config="kv"
            )

        if not refused:
            assert make() == "made"
            return
        with pytest.raises(ConfigError, match="spec_name must be TieringOffloadingSpec"):
            make()


def offloading(extra: dict[str, Any] | None) -> Any:
    transfer = None if extra is None else SimpleNamespace(kv_connector_extra_config=extra)
    return SimpleNamespace(kv_transfer_config=transfer)


# ------------------------------------------------------------------------------------------------------- jobs


def test_a_lookup_in_a_shared_store_is_retried_and_never_waits(
    far: MemoryStore, model: Path, tmp_path: Path
) -> None:
    """Holds invariant 6: the scheduler's thread does not wait for another process."""
    with fake_vllm() as plugin:
        writer = VllmRig(plugin, NEWEST, model, remote="valkey://x")
        writer.store(KEYS[:3])
        writer.tier.shutdown()
        rig = VllmRig(plugin, NEWEST, model, remote="valkey://x", remote_timeout_s=SOON_S)
        far.gate.hold("find")
        first = [rig.tier.lookup(key, request("a")) for key in KEYS[:4]]
        assert first == [rig.results.RETRY] * 4
        rig.tier.on_schedule_end(None)
        far.gate.wait_came()
        assert rig.tier.lookup(KEYS[0], request("a")) is rig.results.RETRY
        far.gate.let()
        assert rig.lookup(KEYS[:4], "a") == [rig.results.HIT] * 3 + [rig.results.MISS]
        assert far.calls.count("find") == 1
        assert rig.load(KEYS[:3], "a").success
        rig.tier.on_request_finished(request("a"))
        rig.tier.shutdown()


def test_a_window_is_found_without_what_is_before_it(far: MemoryStore, model: Path) -> None:
    config = config_of(model)
    window = SimpleNamespace(layer_names=["layers.1"], kv_cache_spec=SlidingWindowSpec(block_size=16))
    config[1].kv_cache_groups.append(window)
    windowed = [vllm_key(number, group=1) for number in range(6)]
    with fake_vllm() as plugin:
        writer = VllmRig(plugin, NEWEST, model, config, remote="valkey://x")
        writer.store([*KEYS[4:6], *windowed[4:6]])
        writer.tier.shutdown()
        rig = VllmRig(plugin, NEWEST, model, config, remote="valkey://x", remote_timeout_s=SOON_S)
        hit, miss = rig.results.HIT, rig.results.MISS
        assert rig.lookup(windowed[::-1]) == [hit, hit, miss, miss, miss, miss]
        assert rig.lookup(windowed, "forward") == [miss, miss, miss, miss, hit, hit]
        assert rig.lookup(KEYS[:6]) == [miss] * 6  # a prefix
        rig.tier.shutdown()


def test_a_reset_of_vllms_caches_hides_all_earlier_blocks(rig: VllmRig) -> None:
    """vLLM resets them when weights are replaced under a running server."""
    rig.store(KEYS[:3])
    rig.tier.drain_jobs()
    assert rig.lookup(KEYS[:3]) == [rig.results.MISS] * 3
    assert rig.store(KEYS[:3]).success
    assert rig.load(KEYS[:3]).success


def test_a_drain_ends_with_the_jobs_and_not_before(far: MemoryStore, model: Path) -> None:
    """Holds invariant 10: vLLM uses the memory again after it."""
    with fake_vllm() as plugin:
        plugin._DRAIN_S = 0.01
        rig = VllmRig(plugin, NEWEST, model, remote="valkey://x", remote_timeout_s=SOON_S)
        far.gate.hold("write")
        rig.tier.submit_store(rig.job(KEYS[:2], [0, 1], request("a")))
        far.gate.wait_came()
        far.on_call = lambda call: far.calls.append(f"{call} ends")

        def let() -> None:
            far.gate.let()

        log = _call_after_warning(plugin, let)
        rig.tier.drain_jobs()
        assert log == ["warned"]
        assert "write ends" in far.calls
        assert [result.success for result in rig.tier.get_finished_jobs()] == [True]
        rig.tier.shutdown()


def _call_after_warning(plugin: ModuleType, call: Any) -> list[str]:
    seen: list[str] = []

    def warning(text: str, *given: object) -> None:
        if not seen:
            call()
        seen[:] = ["warned"]

    plugin.log = SimpleNamespace(warning=warning)
    return seen


def test_a_shutdown_with_a_call_in_flight_keeps_the_memory_and_says_so(far: MemoryStore, model: Path) -> None:
    """Holds invariant 7: vLLM unmaps the memory after a shutdown that succeeds."""
    with fake_vllm() as plugin:
        plugin._CLOSE_S = 0.01
        rig = VllmRig(plugin, NEWEST, model, remote="valkey://x", remote_timeout_s=SOON_S)
        far.gate.hold("write")
        rig.tier.submit_store(rig.job(KEYS[:2], [0, 1], request("a")))
        far.gate.wait_came()
        with pytest.raises(DeadlineExceeded):
            rig.tier.shutdown()
        plugin._CLOSE_S = SOON_S
        far.gate.let()
        rig.tier.shutdown()
        rig.view.release()
        del rig.memory
        rig.map.close()  # which raises while something sees the memory


def test_a_tier_that_cannot_be_opened_leaves_the_memory_alone(model: Path, tmp_path: Path) -> None:
    options = {"ssd_dir": str(tmp_path / "kv"), **DISK}
    with fake_vllm() as plugin:
        rig = VllmRig(plugin, NEWEST, model, **options)
        view = memoryview(memory := mmap.mmap(-1, 4 * SLOT_BYTES)).cast("B", (4, SLOT_BYTES))
        spec = SimpleNamespace(extra_config={"block_size": 16}, kv_events_config=SimpleNamespace())
        spec.kv_events_config.enable_kv_cache_events = False
        with (
            vllm_host.configured(vllm_host.Configured(*rig.config)),
            pytest.raises(ConfigError, match="is in use by") as refused,
        ):
            plugin.PenstockTier(spec, view, "PenstockTier", **options)
        view.release()
        memory.close()  # while the error is handled; raises if something sees the memory
        assert refused.value
        rig.tier.shutdown()


def test_metrics_have_the_names_that_were_declared(rig: VllmRig) -> None:
    rig.store(KEYS[:4])
    rig.load(KEYS[:3])
    declared = rig.plugin.PenstockTier.build_metric_definitions({})
    values = rig.tier.get_stats().values
    assert values["vllm:penstock_blocks_written", ("ssd",)] == 4
    assert values["vllm:penstock_blocks_read", ("ssd",)] == 3
    assert values["vllm:penstock_usable", ("ssd",)] == 1
    for name, labels in values:
        assert len(declared[name].labelnames) == len(labels)
    assert rig.tier.get_stats() is None  # not in each step
    rig.plugin._STATS_S = 0.0
    assert rig.tier.get_stats().values == {("vllm:penstock_usable", ("ssd",)): 1}  # what has changed since


def test_events_tell_what_is_on_the_disk(
    plugin: ModuleType, version: str, model: Path, tmp_path: Path
) -> None:
    """Also what has left it; a store that servers share is nobody's."""
    size = 40 * SLOT_BYTES / (1 << 30)
    options = {"ssd_dir": str(tmp_path / "kv"), "ssd_gib": size}
    rig = VllmRig(plugin, version, model, events=True, **options)
    there: set[bytes] = set()
    for first in range(0, 120, 8):
        keys = [vllm_key(number) for number in range(first, first + 8)]
        rig.store(keys)
        for event in rig.tier.take_events():
            assert event.medium is plugin.offload.Medium.STORAGE
            assert (set(event.keys) <= there) is event.removed
            there = there - set(event.keys) if event.removed else there | set(event.keys)
    found = rig.lookup([vllm_key(number) for number in range(120)])
    told = {vllm_key(number) for number in range(120) if found[number] is rig.results.HIT}
    assert there == (told if RECORDS[version]["media"] else set())
    assert 0 < len(told) < 120
    rig.tier.shutdown()


def test_events_are_not_kept_where_nothing_takes_them(rig: VllmRig) -> None:
    rig.store(KEYS[:3])
    assert list(rig.tier.take_events()) == []


# --------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ssd_dri": "/x"}, "does not know the option 'ssd_dri'"),
        ({}, "ssd_dir or remote is needed"),
        ({"ssd_dir": "x", "ssd_gib": "much"}, "ssd_gib must be a number"),
        ({"ssd_dir": "x", "ssd_gib": True}, "ssd_gib must be a number"),
        ({"ssd_dir": "x", "queue_mib": -1}, "queue_mib must be a number"),
        ({"ssd_dir": ""}, "ssd_dir must be a text"),
        ({"ssd_dir": "x", "eviction": "none"}, "eviction must be one of"),
        ({"ssd_dir": "x", "trust_adapters": "yes"}, "trust_adapters must be true or false"),
        ({"remote": "ftp://x"}, "the option remote must start with one of"),
    ],
)
def test_an_option_that_cannot_work_is_one_line(
    model: Path, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with fake_vllm() as plugin, pytest.raises(ConfigError, match=message) as refused:
        VllmRig(plugin, NEWEST, model, **options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("version", "algorithm", "works"),
    [
        (OLDEST, "sha256", False),
        (OLDEST, "sha256_cbor", False),
        (NEWEST, "sha256", True),
        (NEWEST, "sha256_cbor", True),
        (NEWEST, "xxhash", False),
    ],
)
def test_block_hashes_that_differ_in_each_process_are_refused(
    model: Path, tmp_path: Path, version: str, algorithm: str, works: bool
) -> None:
    config = config_of(model, version)
    config[0].cache_config.prefix_caching_hash_algo = algorithm
    with fake_vllm(version, hash_seed=None) as plugin:
        if works:
            VllmRig(plugin, version, model, config, ssd_dir=str(tmp_path / "kv"), **DISK).tier.shutdown()
            return
        with pytest.raises(ConfigError, match="set PYTHONHASHSEED"):
            VllmRig(plugin, version, model, config, ssd_dir=str(tmp_path / "kv"), **DISK)


def test_adapters_are_refused_unless_the_user_vouches_for_them(model: Path, tmp_path: Path) -> None:
    config = config_of(model)
    config[0].lora_config = SimpleNamespace()
    options = {"ssd_dir": str(tmp_path / "kv"), **DISK}
    with fake_vllm() as plugin:
        with pytest.raises(ConfigError, match="trust_adapters must be true with LoRA"):
            VllmRig(plugin, NEWEST, model, config, **options)
        VllmRig(plugin, NEWEST, model, config, **options, trust_adapters=True).tier.shutdown()


def test_one_configuration_serves_versions_that_do_and_do_not_take_a_module(
    plugin: ModuleType, version: str, model: Path, tmp_path: Path
) -> None:
    module = {} if version >= "0.28" else {"module_path": "penstock.plugins.vllm"}
    rig = VllmRig(plugin, version, model, ssd_dir=str(tmp_path / "kv"), **DISK, **module)
    assert rig.store(KEYS[:2]).success
    rig.tier.shutdown()


def test_each_data_parallel_rank_has_a_folder_of_its_own(model: Path, tmp_path: Path) -> None:
    options = {"ssd_dir": str(tmp_path / "kv"), **DISK}
    first, second = config_of(model), config_of(model)
    second[0].parallel_config.data_parallel_index = 1
    with fake_vllm() as plugin:
        one = VllmRig(plugin, NEWEST, model, first, **options)
        with pytest.raises(ConfigError, match="is in use by"):
            VllmRig(plugin, NEWEST, model, first, **options)
        other = VllmRig(plugin, NEWEST, model, second, **options)
        one.tier.shutdown()
        other.tier.shutdown()
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["dp-0", "dp-1"]
