"""The composition root: the only file that constructs across folders. Owns the choice of parts for a device."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from pathlib import Path

import torch

from penstock.config import DEVICE_EVICTIONS, GIB, Config
from penstock.engine.adapters import AdapterStore, open_store
from penstock.engine.engine import Engine, EngineParts
from penstock.engine.execution.attention import Attention
from penstock.engine.execution.attention.cpu import CpuAttention
from penstock.engine.execution.batch import Shape
from penstock.engine.execution.executor import Executor, StepLimits
from penstock.engine.execution.forward import Forward
from penstock.engine.execution.replays import cuda_buckets
from penstock.engine.execution.sampler import Noise, Sampler, gumbel_noise
from penstock.engine.execution.staging import Uploads
from penstock.engine.scheduling.budget import Budget, blocks_for
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.errors import ConfigError
from penstock.kv.blocks.eviction import EvictionOrder, make_order
from penstock.kv.blocks.key import Scope
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.cache import KvCache
from penstock.kv.memory.arena import DeviceArena, free_bytes
from penstock.kv.memory.guard import ArenaGuard
from penstock.kv.memory.host import HostArena
from penstock.kv.memory.layout import BlockLayout
from penstock.kv.tiers.behind import Behind
from penstock.kv.tiers.cold import ColdLanes, ColdLimits, ColdTier
from penstock.kv.tiers.host import HostTier
from penstock.kv.tiers.ladder import Ladder, LadderLimits
from penstock.kv.tiers.memory import HostMemory
from penstock.kv.tiers.remote import open_store as open_remote
from penstock.kv.tiers.ssd.store import open_ssd
from penstock.kv.tiers.store import BlockStore, Space
from penstock.kv.tiers.worth import PrefillRate
from penstock.kv.transfer.checked import ByteChecks
from penstock.kv.transfer.copies import make_copier
from penstock.kv.transfer.mover import Mover
from penstock.lanes import cuda
from penstock.lanes.cpu import CpuLane
from penstock.lanes.lane import Lane
from penstock.models.adapters import read_adapter
from penstock.models.layers import TorchLayerOps
from penstock.models.loader import load_model
from penstock.models.model import LayerOps, Model, ModelConfig
from penstock.models.progress import Progress, silent
from penstock.observe import LaneObserver
from penstock.sanitizer.sanitizer import Sanitizer

_CPU_KV_GIB = 1.0
_CUDA_SPARE_SHARE = 0.1  # of what is free once the weights are there: left for activations, graphs and the sampler
_CUDA_SPARE_GIB = 1.0  # at least, on top of what `_working_bytes` counts: graphs, libraries, fragmentation
_HOST_KV_GIB = 4.0
_HOST_FREE_SHARE = 0.25  # of free host memory, where that is less
_LOAD_PRIORITY = -1  # of the stream that promotions come on: somebody waits for them
_CUDA_OVERLAP_TOKENS = 1024  # shorter steps are over sooner as a replay behind the whole load than launched layer by layer
# Lanes for one cold tier: a disk wants several requests in its queue, also while some of the lanes compute checksums.
COLD_READERS = 6
COLD_WRITERS = 6
_WRITE_QUEUE_BYTES = 512 << 20
_CPU_OVERLAP_TOKENS = 64  # a copy beside a short step takes a core from it
_CUDA_CHUNK_MS = 150.0  # more than 8192 tokens of a short prompt take: the rate of prefill stays, only deep chunks get smaller
# Tokens of a chunk at least: with fewer, launching a step and reading all weights takes a good part of it.
_CUDA_MIN_CHUNK = 512
_CPU_MIN_CHUNK = 64
_WAITING_PER_ROW = 16  # requests that may wait for each one that can run


def build(config: Config, progress: Progress = silent, sanitizer: Sanitizer | None = None) -> Engine:
    """An engine for `config`, ready for its first request. Raises UserError for anything that cannot work."""
    sanitizer = sanitizer or _sanitizer(config)
    device = device_for(config)
    if device.type == "cuda":
        return _build(config, device, progress, sanitizer)
    # On a thread that ends: OpenMP keeps a team for every thread that ever computed, and with more of them than cores it puts its workers
    # to sleep between any two operations of the compute lane's.
    made: Future[Engine] = Future()

    def build_apart() -> None:
        try:
            made.set_result(_build(config, device, progress, sanitizer))
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=build_apart, name="build", daemon=True).start()
    return made.result()


def _build(config: Config, device: torch.device, progress: Progress, sanitizer: Sanitizer | None) -> Engine:
    dtype = _dtype(config, device)
    loaded = load_model(config.source, device, dtype, _layer_ops(device), progress)
    model = loaded.model
    adapters = open_store(config.lora, loaded.name, lambda directory: read_adapter(directory, model), progress)
    dims = model.config
    layout = layout_for(config, dims, device)
    num_blocks = _num_blocks(config, layout, model)
    max_model_len = _max_model_len(config, model, num_blocks)
    arena = DeviceArena(layout, num_blocks, device)
    pool = BlockPool(num_blocks, arena.name, sanitizer, _device_order(config, num_blocks))
    host_arena = HostArena(layout, _num_host_blocks(config, arena), device) if config.offload.enabled else None
    guard = ArenaGuard(*(one for one in (arena, host_arena) if one is not None)) if config.sanitize.check_bytes else None
    scope = _scope(model, layout)
    ladder = None if host_arena is None else _ladder(config, pool, (arena, host_arena), sanitizer, guard)
    if ladder is not None and host_arena is not None:
        _put_behind(ladder, config, host_arena, scope, sanitizer)
    cache = KvCache(pool, scope, config.kv.prefix_cache, ladder)
    budget = _budget(config, device, max_model_len)
    prefill = PrefillRate() if ladder is None else ladder.prefill
    limits = StepLimits(
        max_batch=budget.max_batch,
        prefill_chunk=budget.prefill_chunk,
        max_table=blocks_for(max_model_len, config.kv.block_tokens),
        block_tokens=config.kv.block_tokens,
        padding_slot=arena.padding_slot,
        arena=arena.name,
    )
    attention = _attention(arena, model)
    lane = make_lane("compute", device, sanitizer)
    executor = _executor(model, attention, lane, limits, _buckets(config, budget, device), adapters)
    executor.guard = guard
    if device.type == "cuda":
        cuda.wait_set_up(device)  # weights, arena and the sampler's state, before any lane touches them
        executor.capture_all(progress)
    parts = EngineParts(
        name=loaded.name,
        tokenizer=loaded.tokenizer,
        scheduler=Scheduler(cache, budget, dims.eos_ids, prefill),
        executor=executor,
        prefill=prefill,
        adapters=adapters,
        cache=cache,
        arena=arena,
        lanes=(lane,),
        vocab=dims.vocab,
        max_model_len=max_model_len,
        max_open=budget.max_batch * _WAITING_PER_ROW,
        seed=config.engine.seed,
        sanitizer=sanitizer,
    )
    return Engine(parts)


def _sanitizer(config: Config) -> Sanitizer | None:
    if config.sanitize.mode == "off":
        return None
    file = config.sanitize.json_file
    return Sanitizer(strict=config.sanitize.mode == "strict", json_file=None if file is None else Path(file))


def _executor(
    model: Model, attention: Attention, lane: Lane, limits: StepLimits, buckets: tuple[Shape, ...], adapters: AdapterStore
) -> Executor:
    uploads = Uploads(model.device, lane)
    sampler = Sampler(limits.max_batch, model.config.vocab, lane, uploads, _noise(model.device))
    return Executor(Forward(model, attention, sampler.last_tokens), sampler, uploads, lane, limits, buckets, adapters.weights_of)


def device_for(config: Config) -> torch.device:
    if config.source.device == "cpu" or (config.source.device == "auto" and not cuda.is_usable()):
        return torch.device("cpu")
    if not cuda.is_usable():
        raise ConfigError("--device cuda: no usable NVIDIA GPU was found (see `penstock doctor`)")
    return torch.device("cuda", 0)


def layout_for(config: Config, dims: ModelConfig, device: torch.device) -> BlockLayout:
    dtype = str(_dtype(config, device)).removeprefix("torch.")
    return BlockLayout(dims.num_layers, dims.num_kv_heads, dims.head_dim, config.kv.block_tokens, dtype)


def _dtype(config: Config, device: torch.device) -> torch.dtype:
    if config.source.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, config.source.dtype)
    return dtype


def _num_blocks(config: Config, layout: BlockLayout, model: Model) -> int:
    if config.kv.device_blocks is not None:
        return config.kv.device_blocks
    if config.kv.device_gib is not None:
        num_bytes = config.kv.device_gib * GIB
    elif model.device.type == "cuda":
        free = free_bytes(model.device)
        num_bytes = free - max(free * _CUDA_SPARE_SHARE, _working_bytes(config, model) + _CUDA_SPARE_GIB * GIB)
    else:
        num_bytes = _CPU_KV_GIB * GIB
    num_blocks = int(num_bytes) // layout.block_bytes
    if num_blocks < 2:
        size = f"{max(0.0, num_bytes) / GIB:.3f} GiB hold less than two KV blocks of {layout.block_bytes / 1024:.0f} KiB"
        raise ConfigError(f"{size}; raise --device-kv-gib")
    if config.kv.device_gib is not None:
        return num_blocks
    # A tiny model would otherwise get tens of millions of blocks: no more than can be used, and as much again thrice to remember.
    most = config.engine.max_batch * blocks_for(config.engine.max_model_len or model.config.max_position, layout.block_tokens)
    return min(num_blocks, 4 * most)


def _working_bytes(config: Config, model: Model) -> float:
    """What the largest step holds besides weights and KV: a few rows per token of its widest layer, and logits while they are sampled."""
    c = model.config
    tokens = min(_prefill_chunk(config, model.device), c.max_position) + config.engine.max_batch
    per_token = (6 * c.hidden + 2 * c.qkv_width + 3 * c.ffn) * model.dtype.itemsize
    per_logit = 40  # raw, float32, noise, sorted values and their indices, masks
    return tokens * per_token + config.engine.max_batch * c.vocab * per_logit


def _budget(config: Config, device: torch.device, max_model_len: int) -> Budget:
    engine, on_cuda = config.engine, device.type == "cuda"
    chunk_ms = engine.prefill_chunk_ms
    if chunk_ms is None:
        chunk_ms = _CUDA_CHUNK_MS if on_cuda else 0.0
    return Budget(
        max_batch=engine.max_batch,
        prefill_chunk=min(_prefill_chunk(config, device), max_model_len),
        overcommit=engine.overcommit,
        max_overtaken_s=engine.max_overtaken_s if engine.scheduling == "cost" else 0.0,
        chunk_s=chunk_ms / 1000,
        min_chunk=_CUDA_MIN_CHUNK if on_cuda else _CPU_MIN_CHUNK,
    )


def _prefill_chunk(config: Config, device: torch.device) -> int:
    return config.engine.prefill_chunk or (8192 if device.type == "cuda" else 512)


def _max_model_len(config: Config, model: Model, num_blocks: int) -> int:
    fits = num_blocks * config.kv.block_tokens
    wanted = config.engine.max_model_len
    if wanted is None:
        return min(model.config.max_position, fits)
    if wanted > model.config.max_position:
        raise ConfigError(f"--max-model-len {wanted} exceeds the {model.config.max_position} positions of the model")
    if wanted > fits:
        raise ConfigError(
            f"--max-model-len {wanted} does not fit into {num_blocks} KV blocks of {config.kv.block_tokens} tokens; raise --device-kv-gib"
        )
    return wanted


def _scope(model: Model, layout: BlockLayout) -> Scope:
    return Scope(model.digest, layout.dtype, layout.fingerprint(), layout.block_tokens, model.config.positions)


def _device_order(config: Config, num_blocks: int) -> EvictionOrder:
    """As the tiers behind it, or by recency where that would cost the engine thread too much for each block."""
    name = config.offload.eviction
    return make_order(name if name in DEVICE_EVICTIONS else "lru", num_blocks, config.kv.block_tokens)


def _ladder(
    config: Config, pool: BlockPool, arenas: tuple[DeviceArena, HostArena], sanitizer: Sanitizer | None, guard: ArenaGuard | None
) -> Ladder:
    arena, host_arena = arenas
    layout, device = arena.layout, arena.device
    order = make_order(config.offload.eviction, host_arena.num_slots, layout.block_tokens)
    host = HostTier(BlockPool(host_arena.num_slots, host_arena.name, sanitizer, order), layout.block_tokens, config.offload.lease_s)
    if device.type == "cuda":  # elsewhere every slot can be used at once
        host.withhold()
    memory = HostMemory(host_arena, host.ready)

    def mover(name: str, source: DeviceArena | HostArena, dest: DeviceArena | HostArena, priority: int) -> Mover:
        lane = make_lane(name, device, sanitizer, priority)
        copier, launcher = make_copier(source.tensor, dest.tensor, layout), make_launcher(lane, sanitizer)
        made = Mover((source.name, dest.name), copier, lane, launcher)
        if guard is not None and sanitizer is not None:
            made.checks = ByteChecks(guard, sanitizer.checksums, (0, layout.num_layers), host_arena.name, arena.name)
        return made

    movers = mover("load", host_arena, arena, _LOAD_PRIORITY), mover("save", arena, host_arena, 0)
    overlap_tokens = _CUDA_OVERLAP_TOKENS if device.type == "cuda" else _CPU_OVERLAP_TOKENS
    limits = LadderLimits(
        overlap_tokens, config.offload.load_deadline_s, config.offload.load_always, postpones=config.kv.prefix_cache, memory=memory
    )
    return Ladder(pool, host, movers, layout, limits)


def _put_behind(ladder: Ladder, config: Config, arena: HostArena, scope: Scope, sanitizer: Sanitizer | None) -> None:
    """The tiers behind host memory, hottest first: adding one is a line here and a file with its store."""
    offload, block_bytes = config.offload, arena.layout.block_bytes
    space = Space(scope.digest(), block_bytes, arena.bytes)
    stores: list[BlockStore] = []
    with contextlib.ExitStack() as undo:  # a directory stays locked for as long as its store is open
        if offload.ssd_dir is not None:
            stores.append(open_ssd(offload.ssd_dir, int(offload.ssd_gib * GIB), space, offload.eviction))
            undo.callback(stores[-1].close)
        if offload.remote is not None:
            stores.append(open_remote(offload.remote, space, offload.remote_timeout_s))
        undo.pop_all()
    if stores:
        limits = ColdLimits(queue_bytes=min(_WRITE_QUEUE_BYTES, arena.num_bytes // 4))
        tiers = [
            ColdTier(store, cold_lanes(store, sanitizer), arena.view, (arena.name, arena.layout.num_layers), limits) for store in stores
        ]
        ladder.put_behind(Behind(ladder.host, tiers, block_bytes, offload.ssd_admission if offload.ssd_dir is not None else "always"))


def cold_lanes(store: BlockStore, sanitizer: Sanitizer | None = None) -> ColdLanes:
    def lanes(what: str, num: int) -> list[Lane]:
        return [CpuLane(f"{store.name}-{what}-{number}", sanitizer) for number in range(num)]

    return ColdLanes(lanes("read", COLD_READERS), lanes("write", COLD_WRITERS), None if store.local else lanes("ask", 1)[0])


def _num_host_blocks(config: Config, arena: DeviceArena) -> int:
    block_bytes = arena.layout.block_bytes
    if config.offload.host_gib is not None:
        num_blocks = int(config.offload.host_gib * GIB) // block_bytes
        if num_blocks < 1:
            raise ConfigError(f"--kv-offload-host-gib {config.offload.host_gib:g} holds no KV block of {block_bytes / 1024:.0f} KiB")
        return num_blocks
    num_bytes = min(_HOST_KV_GIB * GIB, free_bytes(torch.device("cpu")) * _HOST_FREE_SHARE)
    # A tiny model's blocks would number millions; sixteen times the device's is more than it can forget in a while.
    return max(1, min(int(num_bytes) // block_bytes, 16 * arena.num_slots))


def make_lane(name: str, device: torch.device, observer: LaneObserver | None = None, priority: int = 0) -> Lane:
    if device.type == "cuda":
        return cuda.CudaLane(name, device, observer, priority)
    return CpuLane(name, observer, around=torch.inference_mode)


def make_launcher(lane: Lane, observer: LaneObserver | None = None) -> CpuLane:
    """Where transfers on `lane` are launched; a stream is its thread's for life."""
    around = lane.current if isinstance(lane, cuda.CudaLane) else torch.inference_mode
    return CpuLane(f"launch-{lane.name}", observer, around=around)


def _layer_ops(device: torch.device) -> LayerOps:
    if device.type == "cuda":
        from penstock.models.triton_layers import TritonLayerOps

        return TritonLayerOps()
    return TorchLayerOps()


def _attention(arena: DeviceArena, model: Model) -> Attention:
    if arena.device.type == "cuda":
        from penstock.engine.execution.attention.triton import TritonAttention

        return TritonAttention(arena.tensor, model.config, model.rope)
    return CpuAttention(arena.tensor, model.config, model.rope)


def _noise(device: torch.device) -> Noise:
    if device.type == "cuda":
        from penstock.engine.execution import triton_noise

        return triton_noise.gumbel_noise
    return gumbel_noise


def _buckets(config: Config, budget: Budget, device: torch.device) -> tuple[Shape, ...]:
    """On the CPU a recording costs nothing and padding costs work, so every batch size has its own, and prompts have none."""
    if not config.engine.capture:
        return ()
    if device.type == "cuda":
        return cuda_buckets(budget.max_batch, budget.prefill_chunk)
    return tuple(Shape(size, size, size) for size in range(1, budget.max_batch + 1))
