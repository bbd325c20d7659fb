"""Penstock's disk and shared store under SGLang's HiCache (`--hicache-storage-backend dynamic`). Owns the
names of SGLang's interface, and which ranks share blocks (its pages). SGLang's storage threads wait in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sglang
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.runtime_context import get_context

from penstock.errors import ConfigError
from penstock.plugins.options import TierOptions
from penstock.plugins.planes import BlockFormat, PlanarBlocks, memory_at
from penstock.plugins.tiers import open_tiers
from penstock.plugins.weights import weights_digest

LAYOUTS = ("page_first", "page_first_direct", "page_head")  # a block's planes are contiguous
_OWN = ("backend_name", "module_path", "class_name", "interface_v1")  # SGLang's own options
_KV = "kv"  # the only pool that is kept
# of a server, which change KV or how it lies
_SETTINGS = (
    "attention_backend",
    "context_length",
    "decode_attention_backend",
    "dtype",
    "json_model_override_args",
    "kv_cache_dtype",
    "prefill_attention_backend",
    "quantization",
    "quantization_param_path",
)
_FACTS = ("enable_lora", "load_format", "lora_paths", "model_path")
_CLOSE_S = 30.0


class PenstockStorage(HiCacheStorage):
    """One per rank. A block that is missing or damaged is False or None. Only the start, `clear` and `close`
    raise."""

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        given = {name: value for name, value in storage_config.extra_config.items() if name not in _OWN}
        self._options = _options_of_rank(TierOptions.of(given), storage_config)
        self._config = storage_config
        self._blocks: PlanarBlocks | None = None

    # ------------------------------------------------------------------------------------------------- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Opens the tiers: only now the size of a block is known. Raises ConfigError."""
        self.close()
        options = self._options
        format = _format_of(mem_pool_host, self._config, options)
        queue_bytes = int(options.queue_mib * (1 << 20))
        _need(queue_bytes >= format.block_bytes, "needs a queue_mib that holds one page of SGLang")
        self._blocks = PlanarBlocks(
            format, partial(open_tiers, options), options.remote_timeout_s, queue_bytes
        )
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        _need(
            str(host_pool_name) == _KV and host_pool is self.mem_pool_host,
            f"keeps KV only, and this model has a pool {host_pool_name} beside it",
        )

    # -------------------------------------------------------------------------------------------- zero copies

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        planes = self._planes(keys, host_indices)
        return self._open.read(keys, planes)

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        planes = self._planes(keys, host_indices)
        before = getattr(extra_info, "prefix_keys", None) or ()
        return self._open.write(keys, planes, len(before))

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        return self._open.leading(keys)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # ------------------------------------------------------------------------------ blocks in tensors, copied

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        targets = list(target_locations)
        done = self._open.read(keys, [plane for target in targets for plane in self._planes_of(target)])
        return [target if there else None for target, there in zip(targets, done, strict=True)]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        (block,) = self.batch_get([key], [target_location])
        return block

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        values = [value.contiguous() for value in values]  # kept while they are read
        return all(self._open.write(keys, [plane for value in values for plane in self._planes_of(value)]))

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    # --------------------------------------------------------------------------------------------------- end

    def clear(self) -> None:
        """Raises StoreFailed: SGLang must not take the blocks for forgotten."""
        self._open.clear()

    def close(self) -> None:
        if self._blocks is not None:
            self._blocks.close(_CLOSE_S)

    # ----------------------------------------------------------------------------------------------- private

    @property
    def _open(self) -> PlanarBlocks:
        if self._blocks is None:
            raise ConfigError("penstock: no host pool is registered")
        return self._blocks

    def _planes(self, keys: Sequence[str], host_indices: Any) -> list[memoryview]:
        """Empty, which no call takes, if they are not those of as many blocks."""
        if len(host_indices) != len(keys) * self.mem_pool_host.page_size:
            return []
        return _views(self.mem_pool_host, host_indices)

    def _planes_of(self, block: Any) -> list[memoryview]:
        if not block.is_contiguous() or str(block.device) != "cpu":
            return []
        return self._open.cut(memory_at(block.data_ptr(), block.numel() * block.element_size()))


def _views(pool: Any, indices: Any) -> list[memoryview]:
    addresses, sizes = pool.get_page_buffer_meta(indices)
    return [memory_at(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]


def _options_of_rank(options: TierOptions, config: Any) -> TierOptions:
    """A directory belongs to one process, so each rank has a folder in it."""
    _need(config.tp_lcm_size is None, "cannot split heads: leave out tp_lcm_size")
    _need(config.dcp_size == 1, "does not know decode context parallelism")
    if options.ssd_dir is None:
        return options
    if not config.is_storage_writer:  # another rank writes the blocks that this one reads
        _need(options.remote is not None, "needs the option remote: ranks share the KV of this model")
        return replace(options, ssd_dir=None)
    names = [f"{kind}{rank}" for kind, (rank, _) in _ranks(config).items()]
    return replace(options, ssd_dir=str(Path(options.ssd_dir) / "-".join([*names, f"dp{config.dp_rank}"])))


def _ranks(config: Any) -> dict[str, tuple[int, int]]:
    return {
        "tp": (config.tp_rank, config.tp_size),
        "pp": (config.pp_rank, config.pp_size),
        "cp": (config.attn_cp_rank, config.attn_cp_size),
    }


def _format_of(pool: Any, config: Any, options: TierOptions) -> BlockFormat:
    _need(
        pool.layout in LAYOUTS, f"needs --hicache-mem-layout {' or '.join(LAYOUTS)}, and it is {pool.layout}"
    )
    first = _views(pool, np.arange(pool.page_size))
    sizes = {plane.nbytes for plane in first}
    _need(len(sizes) == 1, "cannot keep keys and values of different sizes")
    has_draft = getattr(pool, "layer_num", None) != getattr(pool, "target_layer_num", None)
    weights, settings = _identity(options, has_draft)
    ranks = _ranks(config)
    if config.is_mla_model:  # all tensor-parallel ranks have the same blocks
        del ranks["tp"]
    return BlockFormat(
        engine="sglang",
        weights=weights,
        model=config.model_name or "",
        dtype=str(pool.dtype),
        layout=pool.layout,
        block_tokens=pool.page_size,
        num_planes=len(first),
        plane_bytes=sizes.pop(),
        layers=(pool.start_layer, pool.end_layer),
        ranks=ranks,
        settings=settings,
    )


def _identity(options: TierOptions, has_draft: bool) -> tuple[str, dict[str, str]]:
    """The weights, and the server's settings that change KV. Raises ConfigError."""
    said = options.weights_id
    hint = "needs the option weights_id, a text that is the same only for the same weights: it"
    settings = {"sglang": sglang.__version__}
    try:
        server = get_context().resolved_server_args_dict()
    except ValueError:  # no server has made this backend
        _need(said is not None, f"{hint} finds no server")
        return f"said {said}", settings
    absent = {*_SETTINGS, *_FACTS}.difference(server)
    _need(not absent, f"does not know this version of SGLang: it has no {', '.join(sorted(absent))}")
    _need(
        options.trust_adapters or not (server["enable_lora"] or server["lora_paths"]),
        "needs trust_adapters: SGLang knows an adapter by its name and path, and not by its content",
    )
    settings |= {name: str(server[name]) for name in _SETTINGS}
    if said is not None:
        return f"said {said}", settings
    path = Path(server["model_path"])
    _need(path.exists() and server["load_format"] != "dummy", f"{hint} finds no files at {path}")
    _need(not has_draft, f"{hint} keeps layers of a draft model, too")
    return weights_digest(path), settings


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(f"penstock {message}")
