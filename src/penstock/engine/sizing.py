"""The arithmetic of sizes: what fits into memory, how long sequences and steps may be. Owns the defaults that
depend on the device."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.config import FEWEST_RESIDENT, GIB, Config, ModelSource
from penstock.engine.execution.batch import Shape
from penstock.engine.execution.passes import StepLimits
from penstock.engine.execution.replays import cuda_buckets, decode_sizes
from penstock.engine.execution.state_drafts import StateDrafts
from penstock.engine.scheduling.budget import Budget, blocks_for
from penstock.engine.scheduling.lengths import LOST_QUANTILE, SAVED_QUANTILE, Lengths, WrittenLengths
from penstock.errors import ConfigError
from penstock.kv.build import KvGroup
from penstock.kv.cache import KvCache
from penstock.kv.memory import BlockLayout, StateLayout, free_bytes
from penstock.models.decoder import Decoder
from penstock.models.delta_rule import CHUNK_TOKENS
from penstock.models.loader import inspect_model
from penstock.models.model import ModelConfig, Recurrence
from penstock.speculation.draft import num_draft_layers
from penstock.speculation.eagle import read_eagle_config

CPU_KV_GIB = 1.0
# share of the memory that is free after loading weights, left for activations, graphs and the sampler
_CUDA_SPARE_SHARE = 0.1
_CUDA_SPARE_GIB = 2.0  # least spare on top of `working_bytes`: graphs, libraries
# more than 8192 tokens at low depth take: prefill keeps its rate, only deep chunks get smaller
_CUDA_CHUNK_MS = 150.0
# Of all requests that decode, in one step. With 64 of them 19 ms, at which prompts still keep 95 % of their
# rate.
_CUDA_DELAY_S = 1.2
# Least tokens of a chunk: with fewer, launch overhead and reading the weights are a large share.
_CUDA_MIN_CHUNK = 512
_CPU_MIN_CHUNK = 64
_BESIDE_LONGEST = 1.25  # KV beside experts: the longest request, and some room for others
_GIVEN = "as given"
_MAX_STEP_DRAFTS = 128  # verified in one step: 4 of each of 32 requests


def layout_for(
    config: Config, dims: ModelConfig, device: torch.device, draft: ModelConfig | None = None
) -> BlockLayout:
    """`draft`: the dimensions of a proposer with dimensions of its own, if known already."""
    dtype = str(dtype_of(config, device)).removeprefix("torch.")
    num_layers = dims.num_kv_layers + (config.speculation.kind == "mtp")  # the head's own layer
    if config.speculation.kind == "eagle":
        draft = draft or eagle_dims(config, dims)
    elif config.speculation.kind == "draft":
        draft = draft or inspect_model(draft_source(config)).config
    if draft is not None:
        num_layers += num_draft_layers(dims, draft)
    return BlockLayout(num_layers, dims.num_kv_heads, dims.head_dim, config.kv.block_tokens, dtype)


def eagle_dims(config: Config, target: ModelConfig) -> ModelConfig:
    return read_eagle_config(Path(config.speculation.path or ""), target).dims


def draft_source(config: Config) -> ModelSource:
    return replace(config.source, model=config.speculation.path or "", experts_in_host=False)


def dtype_of(config: Config, device: torch.device) -> torch.dtype:
    if config.source.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, config.source.dtype)
    return dtype


def windows_of(dims: ModelConfig, draft: ModelConfig | None) -> tuple[int, ...]:
    """Of the layers in a block. `draft`: of a proposer with dimensions of its own; another one's layer has
    the window of the target's last layer."""
    of_draft = () if draft is None else draft.windows or (0,)
    return dims.windows + of_draft if dims.windows else ()


def state_layout(config: Config, dims: ModelConfig) -> StateLayout | None:
    """Of states that are kept. None: there are none, or no host memory for them."""
    if (recurrence := dims.recurrence) is None or not config.offload.enabled:
        return None
    return StateLayout(len(recurrence.layers), recurrence.num_bytes, recurrence.fingerprint())


def blocks_that_fit(config: Config, layout: BlockLayout, model: Decoder) -> int:
    if config.kv.device_blocks is not None:
        return config.kv.device_blocks
    if config.kv.device_gib is not None:
        num_bytes = config.kv.device_gib * GIB
    elif model.device.type == "cuda":
        free = free_bytes(model.device)
        num_bytes = free - max(
            free * _CUDA_SPARE_SHARE,
            working_bytes(config, model.config, model.device) + _CUDA_SPARE_GIB * GIB,
        )
    else:
        num_bytes = CPU_KV_GIB * GIB
    num_blocks = int(num_bytes) // layout.block_bytes
    if num_blocks < 2:
        size = (
            f"{max(0.0, num_bytes) / GIB:.3f} GiB hold less than two KV blocks of "
            f"{layout.block_bytes / 1024:.0f} KiB"
        )
        raise ConfigError(f"{size}; raise --device-kv-gib")
    if config.kv.device_gib is not None:
        return num_blocks
    # A tiny model would otherwise get tens of millions of blocks. Take what running requests can use, and
    # three times that as cache.
    most = config.engine.max_batch * blocks_for(
        config.engine.max_model_len or model.config.default_len, layout.block_tokens
    )
    return min(num_blocks, 4 * most)


class ExpertRoom(NamedTuple):
    """What --experts-on-device auto takes, if all experts do not fit."""

    num_bytes: int
    beside: str  # what KV gets, and why


def room_for_experts(
    config: Config, free: float, dims: ModelConfig, device: torch.device
) -> ExpertRoom | None:
    """Of `free` bytes. None: any number, on a CPU."""
    if device.type != "cuda":
        return None
    spare = _CUDA_SPARE_GIB * GIB + working_bytes(config, dims, device)
    kv_bytes, why = kv_beside_experts(config, dims, layout_for(config, dims, device), free - spare)
    if why is not _GIVEN:  # KV is sized by what is left, of which it leaves a share
        spare = max(spare, kv_bytes * _CUDA_SPARE_SHARE / (1 - _CUDA_SPARE_SHARE))
    return ExpertRoom(max(0, int(free - spare - kv_bytes)), f"{kv_bytes / GIB:.2f} GiB for KV, {why}")


def kv_beside_experts(
    config: Config, dims: ModelConfig, layout: BlockLayout, room: float
) -> tuple[float, str]:
    """Bytes of `room` that KV gets before experts, and why.

    A step reads all KV of a running request, but of the experts only those that its tokens hit. So the
    longest request comes first. Requests beside it hit experts of their own, nearly as many again, so room
    for many of them is worth less than experts."""
    kv, most = config.kv, config.engine.max_batch
    if kv.device_blocks is not None:
        return kv.device_blocks * layout.block_bytes, _GIVEN
    if kv.device_gib is not None:
        return kv.device_gib * GIB, _GIVEN
    tokens = config.engine.max_model_len or dims.default_len
    tokens = min(tokens, kv.resident_tokens or tokens)
    longest = blocks_for(tokens, layout.block_tokens) * layout.block_bytes
    wanted = max(
        (room / 8, "an eighth of what is left"),
        (_BESIDE_LONGEST * longest, f"{_BESIDE_LONGEST:g} times a request of {tokens} tokens"),
    )
    limits = (room / 2, "half of what is left"), (most * longest, f"{most} requests of {tokens} tokens")
    return min(wanted, *limits)


def working_bytes(config: Config, dims: ModelConfig, device: torch.device) -> float:
    """Memory of the largest step besides weights and KV: a few rows per token of its widest layer, and logits
    during sampling."""
    c, item_bytes = dims, dtype_of(config, device).itemsize
    tokens = min(prefill_chunk_of(config, device), c.max_position) + config.engine.max_batch
    per_token = (6 * c.hidden + 2 * c.qkv_width + c.mlp_values) * item_bytes
    if config.speculation.kind == "eagle":  # three states, side by side, and normalised
        per_token += 9 * c.hidden * item_bytes
    # raw, float32, noise, sorted values and their indices, masks; grammar masks, and masked logits: 52. The
    # allocator keeps as much again in pieces that fit nothing later (2.4 GiB for 256 rows of 248,320 logits).
    per_logit = 100
    num_drafts = most_step_drafts(config)
    states = state_bytes(c.recurrence, config.engine.max_batch, num_drafts)
    if c.recurrence is not None:  # float32 copies of what goes in and comes out, by token
        per_token += 4 * (4 * c.recurrence.qkv_width + 6 * c.recurrence.out_width)
        layer_bytes = c.recurrence.num_bytes // len(c.recurrence.layers)
        per_token += layer_bytes // CHUNK_TOKENS  # the state before each chunk
        states += num_replayed(config, device, num_drafts) * c.vocab * item_bytes
    return tokens * per_token + (config.engine.max_batch + num_drafts) * c.vocab * per_logit + states


def num_replayed(config: Config, device: torch.device, num_drafts: int) -> int:
    """Rows whose logits captured steps with recurrent layers hold, each its own. Other models have room for
    them in the spare share, of which states leave nothing."""
    num_rows = config.engine.max_batch + num_drafts
    if num_drafts:  # decode steps alone, with and without drafts
        return 2 * sum(decode_sizes(num_rows))
    return sum(shape.num_samples for shape in cuda_buckets(num_rows, prefill_chunk_of(config, device)))


def state_bytes(dims: Recurrence | None, num_rows: int, num_drafts: int = 0) -> int:
    if dims is None:
        return 0
    inputs = StateDrafts.num_bytes(dims, num_rows + num_drafts) if num_drafts else 0
    return (num_rows + 1) * dims.num_bytes + inputs


def most_step_drafts(config: Config) -> int:
    return min(_MAX_STEP_DRAFTS, config.speculation.drafts * config.engine.max_batch)


def prefill_chunk_of(config: Config, device: torch.device) -> int:
    return config.engine.prefill_chunk or (8192 if device.type == "cuda" else 512)


def buckets_for(config: Config, limits: StepLimits, device: torch.device) -> tuple[Shape, ...]:
    """On the CPU a capture is free and padding costs work, so every batch size has its own capture, and
    prompts have none."""
    if not config.engine.capture:
        return ()
    if device.type == "cuda":
        return cuda_buckets(limits.max_rows, limits.prefill_chunk)
    return tuple(Shape(size, size, size) for size in range(1, limits.max_rows + 1))


def budget_for(config: Config, device: torch.device, max_model_len: int) -> Budget:
    engine, on_cuda = config.engine, device.type == "cuda"
    chunk_ms, delay_s = engine.prefill_chunk_ms, 0.0
    if chunk_ms is None:
        chunk_ms, delay_s = (_CUDA_CHUNK_MS, _CUDA_DELAY_S) if on_cuda else (0.0, 0.0)
    return Budget(
        max_batch=engine.max_batch,
        prefill_chunk=min(prefill_chunk_of(config, device), max_model_len),
        overcommit=engine.overcommit,
        max_overtaken_s=engine.max_overtaken_s if engine.scheduling == "cost" else 0.0,
        chunk_s=chunk_ms / 1000,
        delay_s=delay_s,
        min_chunk=_CUDA_MIN_CHUNK if on_cuda else _CPU_MIN_CHUNK,
        state_every=config.offload.state_every or 0,
    )


def with_deep(budget: Budget, config: Config, num_blocks: int) -> Budget:
    """Deep sequences get half of the device, or the configured size, so that other requests fit beside
    them."""
    resident = config.kv.resident_tokens
    if resident is None:
        return replace(
            budget,
            deep_blocks=num_blocks,
            resident_blocks=min(num_blocks, max(FEWEST_RESIDENT, num_blocks // 2)),
        )
    num = min(num_blocks, resident // config.kv.block_tokens)
    return replace(budget, deep_blocks=num, resident_blocks=num)


def lengths_for(config: Config) -> Lengths:
    """Without offloading a retracted request is computed again, so more blocks are promised to each."""
    if config.engine.admission == "lifetime":
        return Lengths()
    return WrittenLengths(SAVED_QUANTILE if config.offload.enabled else LOST_QUANTILE)


def may_be_paged(config: Config, max_model_len: int, num_blocks: int) -> bool:
    """True if a sequence may be longer than its share of the device."""
    resident = config.kv.resident_tokens
    return max_model_len > (num_blocks * config.kv.block_tokens if resident is None else resident)


def holds_all(group: KvGroup, num_blocks: int) -> bool:
    """False if a sequence of any length fits: blocks leave the device when no later token sees them."""
    rule = group.rule
    return rule.keeps_all or rule.most_slots(sys.maxsize, group.layout.block_tokens) > num_blocks


def fitting_chunk(cache: KvCache, chunk: int, max_model_len: int) -> int:
    """Prompt tokens per step: at most `chunk`, and so few that a sequence fits."""
    size = cache.block_tokens
    while chunk > size and cache.most_slots(max_model_len, chunk) > cache.num_blocks:
        chunk = max(size, (chunk - 1) // size * size)
    return chunk


def longest_sequence(
    config: Config, dims: ModelConfig, num_blocks: int, num_pageable: int | None = None, whole: bool = True
) -> int:
    """`num_pageable`: host blocks for a paged-out sequence, if known. `whole`: all of one has to fit."""
    size, wanted, resident = config.kv.block_tokens, config.engine.max_model_len, config.kv.resident_tokens
    offloads, unpaged = config.offload.enabled and config.kv.prefix_cache, why_unpaged(dims)
    if resident is not None and (unpaged or not offloads):
        why = unpaged or "paging needs --kv-offload and a prefix cache"
        raise ConfigError(f"--kv-resident-tokens {resident}: {why}")
    # longest possible sequence, in tokens: on the device, or in host memory if its device share is limited
    fits = takes = num_blocks * size if whole else dims.max_position
    if resident is not None and num_pageable is not None:
        takes = min(fits, max(resident // size, num_pageable) * size)
    if wanted is None:
        return min(dims.default_len, takes)
    held = f"host memory takes {(num_pageable or 0) * size} tokens of it; raise --kv-offload-host-gib"
    is_over, too_long = wanted > fits, f" does not fit into {num_blocks} KV blocks of {size} tokens"
    raising = f"{too_long}; raise --device-kv-gib"
    lacks_host = num_pageable is not None and blocks_for(wanted, size) > num_pageable
    for is_refused, why in (
        (wanted > dims.max_position, f" exceeds the {dims.max_position} positions of the model"),
        (
            takes < wanted <= fits,
            f" exceeds --kv-resident-tokens {resident}, and cannot be paged out: {held}",
        ),
        (is_over and unpaged, f"{raising}: {unpaged}"),
        (
            is_over and not offloads,
            f"{raising}, or let it be paged out with --kv-offload and a prefix cache",
        ),
        (
            is_over and num_blocks < FEWEST_RESIDENT,
            f"{raising}: a paged-out sequence needs {FEWEST_RESIDENT} device blocks",
        ),
        (is_over and lacks_host, f"{too_long}, nor can it be paged out: {held}"),
    ):
        if is_refused:
            raise ConfigError(f"--max-model-len {wanted}{why}")
    return wanted


def why_unpaged(dims: ModelConfig) -> str:
    """Empty: a sequence may be partly in host memory."""
    return "a model with sliding windows is not paged out" if any(dims.windows) else ""
