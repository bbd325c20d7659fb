"""The storage class for SGLang, without SGLang: modules of the same names stand in for it, and the signatures
of its base class are data. tests/plugins/sglang runs it inside the real one."""

from __future__ import annotations

import ctypes
import inspect
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.kv.tiers.ssd.store import SsdStore

HICACHE = json.loads((Path(__file__).parents[2] / "data" / "sglang-hicache.json").read_text())
PAGE, PLANE = 4, 4096
NAMES = [f"{number:064x}" for number in range(4)]
SOON_S = 20.0


class Indices(list[int]):
    """A tensor, as far as pools and backends use one."""

    def tolist(self) -> list[int]:
        return list(self)


class Pool:
    """Host memory in which a page's keys are contiguous, and its values, like SGLang's if page-first."""

    layout, page_size, dtype, start_layer, end_layer = "page_first", PAGE, "torch.bfloat16", 0, 7
    layer_num = target_layer_num = 8

    def __init__(self, num_blocks: int = 16, num_planes: int = 2, **more: Any) -> None:
        self.num_planes = num_planes
        self.memory = [(ctypes.c_ubyte * (num_blocks * PLANE))() for _ in range(num_planes)]
        for name, value in more.items():
            setattr(self, name, value)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        assert len(indices) % self.page_size == 0
        starts = [index // PAGE * PLANE for index in indices.tolist()[:: self.page_size]]
        found = [ctypes.addressof(memory) + start for start in starts for memory in self.memory]
        return found, [PLANE] * len(found)

    def fill(self, page: int, value: int) -> None:
        for plane, memory in enumerate(self.memory):
            ctypes.memset(ctypes.addressof(memory) + page * PLANE, value + plane, PLANE)

    def content(self, page: int) -> list[set[int]]:
        return [set(memory[page * PLANE : (page + 1) * PLANE]) for memory in self.memory]


def pages(*numbers: int) -> Indices:
    return Indices(index for number in numbers for index in range(number * PAGE, (number + 1) * PAGE))


class Tensor:
    """A whole page in memory of its own, keys first."""

    device = "cpu"

    def __init__(self, value: int = 0, num_bytes: int = 2 * PLANE, contiguous: bool = True) -> None:
        self.memory = (ctypes.c_ubyte * num_bytes)(*[value] * num_bytes)
        self._contiguous = contiguous

    def is_contiguous(self) -> bool:
        return self._contiguous

    def contiguous(self) -> Tensor:
        return self if self._contiguous else Tensor(self.memory[0], len(self.memory))

    def data_ptr(self) -> int:
        return ctypes.addressof(self.memory)

    def numel(self) -> int:
        return len(self.memory) // 2

    def element_size(self) -> int:
        return 2


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The published settings of a server; empty: there is none."""
    names = ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.hicache_storage")
    for name in (*names, "sglang.srt.runtime_context"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    found: dict[str, Any] = dict.fromkeys(HICACHE["settings"])
    found |= {"model_path": "/nowhere", "load_format": "auto", "kv_cache_dtype": "auto"}

    def published() -> dict[str, Any]:
        if not found:
            raise ValueError("not published")
        return found

    stand_ins: dict[str, Any] = sys.modules  # type: ignore[assignment]
    stand_ins["sglang"].__version__ = "0"
    stand_ins[names[-1]].HiCacheStorage = type("HiCacheStorage", (), {})
    context = SimpleNamespace(resolved_server_args_dict=published)
    stand_ins["sglang.srt.runtime_context"].get_context = lambda: context
    monkeypatch.delitem(sys.modules, "penstock.plugins.sglang", raising=False)
    yield found
    sys.modules.pop("penstock.plugins.sglang", None)


Open = Callable[..., Any]


@pytest.fixture
def open_storage(server: dict[str, Any], tmp_path: Path) -> Iterator[Open]:
    from penstock.plugins.sglang import PenstockStorage

    opened: list[Any] = []

    def open_(
        pool: Pool | None = None, options: dict[str, Any] | None = None, say: bool = True, **config: Any
    ) -> Any:
        fields: dict[str, Any] = dict.fromkeys(HICACHE["config"], 0)  # and no other field
        fields |= {name: 1 for name in fields if name.endswith("_size")} | {"is_storage_writer": True}
        fields |= {"model_name": "m", "is_mla_model": False, "tp_lcm_size": None, **config}
        extra = {"backend_name": "penstock", "module_path": "x", "class_name": "y", "interface_v1": 1}
        extra |= {"ssd_dir": str(tmp_path / "kv"), "ssd_gib": 0.01} | ({"weights_id": "w"} if say else {})
        extra = {name: value for name, value in (extra | (options or {})).items() if value is not None}
        storage = PenstockStorage(SimpleNamespace(**(fields | {"extra_config": extra})), {})
        opened.append(storage)
        pool = pool or Pool()
        storage.register_mem_pool_host(pool)
        storage.register_mem_host_pool_v2(pool, "kv")
        for tier in storage._blocks._tiers.tiers:
            assert not isinstance(store := tier.calls.store, SsdStore) or store.wait_scanned(SOON_S)
        return storage

    yield open_
    for storage in opened:
        storage.close()


def write(storage: Any, names: list[str] = NAMES) -> None:
    for page, _ in enumerate(names):
        storage.mem_pool_host.fill(page, page * 2 + 1)
    assert storage.batch_set_v1(names, pages(*range(len(names)))) == [True] * len(names)


def test_pages_go_to_the_disk_and_come_back_to_other_places(open_storage: Open) -> None:
    storage = open_storage()
    assert storage.batch_exists(NAMES) == 0 and not storage.exists(NAMES[0])
    write(storage)
    assert storage.batch_exists([*NAMES, "none", *NAMES]) == 4 and storage.exists(NAMES[3])
    assert storage.batch_get_v1([*NAMES, "none"], pages(9, 8, 7, 6, 5)) == [True] * 4 + [False]
    for page, place in enumerate((9, 8, 7, 6)):
        assert storage.mem_pool_host.content(place) == [{page * 2 + 1}, {page * 2 + 2}]
    storage.close()
    again = open_storage()
    assert again.batch_exists(NAMES) == 4, "a restart loses them"
    again.clear()
    assert again.batch_exists(NAMES) == 0


def test_an_answer_of_other_indices_than_the_pages_have_is_no(open_storage: Open) -> None:
    storage = open_storage()
    write(storage)
    for indices in (pages(1), Indices(pages(0, 1, 2, 3)[1:])):
        assert storage.batch_get_v1(NAMES, indices) == [False] * 4 == storage.batch_set_v1(NAMES, indices)


def test_pages_in_tensors_are_those_in_the_pool(open_storage: Open) -> None:
    """The interface without `interface_v1`."""
    storage = open_storage()
    write(storage)
    target = Tensor()
    assert storage.get(NAMES[1], target) is target
    assert (set(target.memory[:PLANE]), set(target.memory[PLANE:])) == ({3}, {4})
    assert storage.get("none", Tensor()) is None is storage.get(NAMES[1], Tensor(num_bytes=PLANE))
    assert storage.get(NAMES[1], Tensor(contiguous=False)) is None
    assert storage.set("a", Tensor(7)) and storage.set("b", Tensor(8, contiguous=False))
    assert not storage.set("c", Tensor(9, num_bytes=PLANE))
    uneven = [Tensor(5, num_bytes=3 * PLANE), Tensor(6, num_bytes=PLANE)]  # as many planes as two pages have
    assert not storage.batch_set(["d", "e"], uneven)
    assert storage.batch_get(NAMES[:2], uneven) == [None, None]
    assert storage.batch_set(["d", "e"], [Tensor(5), Tensor(6)])
    found = storage.batch_get([*"abxde"], [Tensor() for _ in range(5)])
    assert [one and set(one.memory) for one in found] == [{7}, {8}, None, {5}, {6}]
    assert storage.batch_get_v1(["e"], pages(9)) == [True] and storage.mem_pool_host.content(9) == [{6}, {6}]


def test_pages_are_written_with_their_place_in_the_prompt(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eviction forgets the end of a prompt first."""
    storage, depths = open_storage(), []
    tiers = storage._blocks._tiers
    write_ = tiers.write
    monkeypatch.setattr(
        tiers, "write", lambda *args, **named: (depths.extend(named["depths"]), write_(*args, **named))
    )
    storage.batch_set_v1(NAMES[:2], pages(0, 1), SimpleNamespace(prefix_keys=["a", "b", "c"]))
    assert depths == [3, 3, 4, 4]


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # what differs: in the pool, the configuration, the options
    "weights": ({}, {}, {"weights_id": "w2"}),
    "model": ({}, {"model_name": "m2"}, {}),
    "dtype": ({"dtype": "torch.uint8"}, {}, {}),
    "layout": ({"layout": "page_first_direct"}, {}, {}),
    "page size": ({"page_size": PAGE * 2}, {}, {}),
    "planes": ({"num_planes": 1}, {}, {}),
    "layers": ({"start_layer": 8, "end_layer": 15}, {}, {}),
    "tp size": ({}, {"tp_size": 2}, {}),
    "pp size": ({}, {"pp_size": 2}, {}),
    "cp size": ({}, {"attn_cp_size": 2}, {}),
}


# of the settings that it reads: those that say which weights and adapters there are
NOT_KV = {"model_path", "load_format", "enable_lora", "lora_paths"}


def space_of(storage: Any) -> bytes:
    digest: bytes = storage._blocks._format.space().digest
    return digest


@pytest.mark.parametrize("name", OTHERS)
def test_servers_that_differ_never_read_each_others_blocks(
    open_storage: Open, name: str, tmp_path: Path
) -> None:
    """Holds invariant 13: in one directory, whatever the folders of ranks are."""
    pool, config, options = OTHERS[name]
    one = open_storage()
    write(one)
    one.close()
    other = open_storage(Pool(**pool), options, **config)
    assert other.batch_exists(NAMES) == 0 and space_of(other) != space_of(one)


@pytest.mark.parametrize("kind", ["tp", "pp", "attn_cp"])
def test_ranks_never_read_each_others_blocks(open_storage: Open, kind: str, tmp_path: Path) -> None:
    # Holds invariant 13: also if one of them is given the folder of another.
    one = open_storage(**{f"{kind}_size": 2})
    write(one)
    one.close()
    [folder] = (tmp_path / "kv").iterdir()
    other = open_storage(**{f"{kind}_size": 2, f"{kind}_rank": 1})
    assert space_of(other) != space_of(one)
    other.close()
    [there] = set((tmp_path / "kv").iterdir()) - {folder}
    shutil.rmtree(there)
    folder.rename(there)
    assert open_storage(**{f"{kind}_size": 2, f"{kind}_rank": 1}).batch_exists(NAMES) == 0


@pytest.mark.parametrize("name", sorted(set(HICACHE["settings"]) - NOT_KV))
def test_settings_of_a_server_that_change_kv_make_other_blocks(
    open_storage: Open, server: dict[str, Any], name: str
) -> None:
    # Holds invariant 13.
    one = open_storage()
    one.close()
    server[name] = "another"
    assert space_of(open_storage()) != space_of(one)


def test_another_version_of_sglang_finds_nothing(open_storage: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    # Holds invariant 13: what a version puts where is not known to the next.
    one = open_storage()
    one.close()
    monkeypatch.setattr(sys.modules["sglang"], "__version__", "1", raising=False)
    assert space_of(open_storage()) != space_of(one)


def test_the_content_of_the_weights_is_the_identity_if_nothing_is_said(
    open_storage: Open, server: dict[str, Any], tmp_path: Path
) -> None:
    # Holds invariant 13.
    server["model_path"] = str(tmp_path / "model")
    spaces = []
    for content in (b"one", b"two", b"one"):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "model.safetensors").write_bytes(content)
        storage = open_storage(say=False)
        spaces.append(space_of(storage))
        storage.close()
    assert spaces[0] == spaces[2] != spaces[1]


def test_ranks_that_hold_the_same_pages_have_one_name_for_them(open_storage: Open) -> None:
    """Such ranks are those of tensor parallelism, if keys and values are compressed in one (MLA)."""
    one = open_storage(Pool(num_planes=1), is_mla_model=True, tp_size=2)
    two = open_storage(
        Pool(num_planes=1),
        {"remote": "valkey://127.0.0.1:1"},
        is_mla_model=True,
        tp_rank=1,
        tp_size=2,
        is_storage_writer=False,
    )
    assert space_of(one) == space_of(two)
    assert [tier.name for tier in two._blocks._tiers.tiers] == ["remote"]  # its disk would stay empty


def test_each_rank_has_a_folder_and_no_other_process_has_the_same(open_storage: Open, tmp_path: Path) -> None:
    sizes = {"tp_size": 2, "pp_size": 2}
    for tp, pp, dp in itertools.product(range(2), repeat=3):
        open_storage(tp_rank=tp, pp_rank=pp, dp_rank=dp, **sizes)
    assert len({folder.name for folder in (tmp_path / "kv").iterdir()}) == 8
    with pytest.raises(ConfigError, match="in use by process"):
        open_storage(**sizes)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "layer_first": ({"layout": "layer_first"}, {}, {}, "--hicache-mem-layout page_first"),
    "split heads": ({}, {"tp_lcm_size": 4}, {}, "tp_lcm_size"),
    "dcp": ({}, {"dcp_size": 2}, {}, "decode context"),
    "no tier": ({}, {}, {"ssd_dir": None}, "ssd_dir or remote"),
    "a mistyped option": ({}, {}, {"ssd_dri": "/x"}, "'ssd_dri'"),
    "mla without a store": ({}, {"is_storage_writer": False}, {}, "needs the option remote"),
    "a small queue": ({}, {}, {"queue_mib": 0.001}, "queue_mib"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_refused_at_start(open_storage: Open, name: str, tmp_path: Path) -> None:
    # Holds invariant 26.
    pool, config, options, said = REFUSED[name]
    with pytest.raises(ConfigError, match=said) as refused:
        open_storage(Pool(**pool), options, **config)
    assert "\n" not in str(refused.value) and str(refused.value).startswith("penstock")
    assert not (tmp_path / "kv").exists()


def test_sizes_and_pools_that_it_cannot_keep_are_refused(open_storage: Open) -> None:
    # Holds invariant 26.
    uneven = Pool()
    meta = uneven.get_page_buffer_meta
    uneven.get_page_buffer_meta = lambda indices: (meta(indices)[0], [PLANE, PLANE // 2])  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="different sizes"):
        open_storage(uneven)
    storage = open_storage()
    for pool, name in ((storage.mem_pool_host, "mamba"), (Pool(), "kv")):
        with pytest.raises(ConfigError, match=f"a pool {name}"):
            storage.register_mem_host_pool_v2(pool, name)


def test_adapters_and_unknown_weights_are_refused(
    open_storage: Open, server: dict[str, Any], tmp_path: Path
) -> None:
    # Holds invariant 26: SGLang tells neither what an adapter holds, nor what the weights are.
    with pytest.raises(ConfigError, match=r"weights_id.*finds no files"):
        open_storage(say=False)
    server["model_path"] = str(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"w")
    open_storage(say=False).close()
    with pytest.raises(ConfigError, match=r"weights_id.*draft"):
        open_storage(Pool(target_layer_num=7), say=False)
    server["load_format"] = "dummy"
    with pytest.raises(ConfigError, match=r"weights_id.*finds no files"):
        open_storage(say=False)
    for name, value in (("enable_lora", True), ("lora_paths", ["a=/b"])):
        server[name] = value
        with pytest.raises(ConfigError, match="trust_adapters"):
            open_storage()
        server[name] = None
    del server["kv_cache_dtype"]
    with pytest.raises(ConfigError, match="this version of SGLang: it has no kv_cache_dtype"):
        open_storage()
    server["kv_cache_dtype"] = "auto"
    server["lora_paths"] = ["a=/b"]
    open_storage(options={"trust_adapters": True}).close()
    server.clear()
    with pytest.raises(ConfigError, match=r"weights_id.*finds no server"):
        open_storage(say=False)
    open_storage()


def test_its_methods_take_what_those_of_sglang_take(open_storage: Open) -> None:
    """`make plugins` compares the recorded signatures with the installed SGLang."""
    from penstock.plugins.sglang import PenstockStorage

    own = {name: one for name, one in vars(PenstockStorage).items() if name in HICACHE["methods"]}
    assert {"batch_get_v1", "batch_set_v1", "batch_exists", "get", "set", "exists", "clear"} <= own.keys()
    for name, method in own.items():
        assert list(inspect.signature(method).parameters)[1:] == HICACHE["methods"][name]
