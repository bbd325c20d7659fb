"""SGLang's own classes on a CPU: a controller with its threads over host memory with real layouts. Only its
device pool stands in for one, since pages move between host memory and storage alone."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

# torchvision's operators need the torch that it was built for; here it must only be importable
_OPERATORS = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor x) -> Tensor")

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import (  # noqa: E402
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import PoolName  # noqa: E402
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController  # noqa: E402
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402

PAGE = 4
LAYERS = 3
TOKENS = 512  # of host memory
SOON_S = 60.0
BACKEND = {
    "backend_name": "penstock",
    "module_path": "penstock.plugins.sglang",
    "class_name": "PenstockStorage",
    "interface_v1": 1,
    "ssd_gib": 0.05,
    "weights_id": "w",
}


def _pointers(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def make_pool(layout: str, is_mla: bool = False) -> Any:
    cpu, more = torch.device("cpu"), {"pin_memory": False, "device": "cpu", "device_capacity_tokens": TOKENS}
    more |= {"start_layer": 0, "end_layer": LAYERS - 1}
    if is_mla:
        rows = tuple(torch.zeros(TOKENS, 1, 24, dtype=torch.bfloat16) for _ in range(LAYERS))
        info = MLABufferInfo(
            buffers=rows,
            data_ptrs=_pointers(rows),
            page_size=PAGE,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            kv_cache_dim=24,
            dtype=torch.bfloat16,
            device=cpu,
            device_layer_num=LAYERS,
            layer_indices=tuple(range(LAYERS)),
        )
        return MLATokenToKVPoolHost(info, 1.0, 0, PAGE, layout, target_layer_num=LAYERS, **more)
    keys = tuple(torch.zeros(TOKENS, 2, 8, dtype=torch.float16) for _ in range(LAYERS))
    values = tuple(torch.zeros_like(key) for key in keys)
    buffers = KVBuffers(
        k=keys,
        v=values,
        k_data_ptrs=_pointers(keys),
        v_data_ptrs=_pointers(values),
        layout=KVBufferLayout.NHD,
    )
    shape = {"page_size": PAGE, "head_num": 2, "head_dim": 8, "v_head_dim": 8}
    info = MHABufferInfo(buffers=buffers, dtype=torch.float16, device=cpu, **shape)
    return MHATokenToKVPoolHost(info, 1.0, 0, PAGE, layout, **more)


class Server:
    """One rank: a host pool and the controller over it, as the scheduler drives them."""

    def __init__(self, pool: Any, options: dict[str, Any], ranks: Any = None) -> None:
        """`ranks`: the process group of the others."""
        self.pool = pool
        device = SimpleNamespace(
            device="cpu", layer_num=LAYERS, register_layer_transfer_counter=lambda counter: None
        )
        allocator = SimpleNamespace(get_kvcache=lambda: device)
        entry = PoolEntry(PoolName.KV, pool, device, lambda layer: layer, is_primary_index_anchor=True)
        group = HostPoolGroup([entry])
        self.controller = HybridCacheController(
            allocator, group, PAGE, ranks, threading.Event(), io_backend="kernel"
        )
        self.controller.attach_storage_backend(
            "dynamic",
            prefetch_threshold=1,
            model_name="m",
            storage_backend_extra_config=BACKEND | options,
            host_pools=group.entries,
        )
        self._requests = itertools.count()

    @property
    def backend(self) -> Any:
        return self.controller.storage_backend

    def page(self, index: int) -> torch.Tensor:
        """The content of the page at a token's index, as SGLang itself reads it."""
        return self.pool.get_data_page(index, flat=True).clone()

    def back_up(self, tokens: list[int]) -> int:
        """Write the KV of a prompt, which follows from its tokens. Returns how many tokens were written."""
        indices = self.pool.alloc(len(tokens))
        assert indices is not None
        for start in range(0, len(tokens), PAGE):
            self.pool.set_from_flat_data_page(int(indices[start]), self.kv_of(tokens[: start + PAGE]))
        hashes = get_storage_hash_str(tokens, None, page_size=PAGE)
        self.controller.write_storage(indices, tokens, hash_value=hashes)
        done = self.controller.ack_backup_queue.get(timeout=SOON_S)
        self.pool.free(indices)
        return int(done.completed_tokens)

    def fetch(self, tokens: list[int]) -> int:
        """Prefetch a prompt. Returns how many tokens came; each is checked."""
        operation = self.controller.prefetch(CacheRequestHandle(str(next(self._requests)), 0), tokens)
        assert self.controller.prefetch_hit_queue.get(timeout=SOON_S) is operation
        if operation.storage_hit_count == 0:
            return 0
        indices = operation.host_indices = self.pool.alloc(operation.storage_hit_count)
        self.controller.prefetch_buffer.put(operation)
        came = 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=SOON_S)
            if ack.completed_req:
                break
            came = came if ack.completed_tokens is None else ack.completed_tokens
        for start in range(0, came, PAGE):
            expected = self.kv_of(tokens[: start + PAGE])
            assert torch.equal(self.page(int(indices[start])), expected), "wrong KV served"
        self.pool.free(indices)
        return came

    def kv_of(self, tokens: list[int]) -> torch.Tensor:
        page = self.pool.get_dummy_flat_data_page()
        generator = torch.Generator().manual_seed(hash(tuple(tokens)) % 2**31)
        return torch.randint(-99, 99, page.shape, generator=generator).to(page.dtype)

    def close(self) -> None:
        self.controller.detach_storage_backend()
        with pytest.raises(queue.Empty):
            self.controller.ack_backup_queue.get_nowait()


@contextlib.contextmanager
def published() -> Iterator[None]:
    """The settings of a server."""
    settings = get_context().override_server_args(enable_hierarchical_cache=True)
    settings.install()
    yield
    settings.restore()


def in_parallel(rank: int, size: int) -> contextlib.AbstractContextManager[Any]:
    """The place of this process among those of tensor parallelism."""
    alone = {"pp_rank": 0, "pp_size": 1, "attn_dcp_rank": 0, "attn_dcp_size": 1, "attn_dp_rank": 0}
    return get_parallel().override(
        tp_rank=rank, tp_size=size, attn_tp_rank=rank, attn_tp_size=size, moe_tp_size=size, **alone
    )


@pytest.fixture(scope="session", autouse=True)
def _in_a_server() -> Iterator[None]:
    with published(), in_parallel(0, 1):
        yield


Start = Callable[..., Server]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Server] = []

    def build(layout: str = "page_first", is_mla: bool = False, **options: Any) -> Server:
        started.append(Server(make_pool(layout, is_mla), options))
        return started[-1]

    yield build
    for server in started:
        server.close()
