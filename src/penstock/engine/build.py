"""The composition root: the only file that constructs across folders. Owns the choice of parts for a
device."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock import __version__
from penstock.config import GIB, Config, ExpertsConfig, ModelSource
from penstock.contract import Adapter, PromptLimits
from penstock.cores import ThreadsByLoad
from penstock.engine import sizing
from penstock.engine.adapters import AdapterStore, open_store
from penstock.engine.engine import Engine
from penstock.engine.execution import warm
from penstock.engine.execution.ahead import DraftPass, Drafts, HeadGuesser, ModelGuesser
from penstock.engine.execution.attention import Attention
from penstock.engine.execution.attention.cpu import CpuAttention
from penstock.engine.execution.attention.cpu_steady import SteadyAttention
from penstock.engine.execution.batch import Packer
from penstock.engine.execution.draws import RowDraws
from penstock.engine.execution.executor import Executor
from penstock.engine.execution.forward import Forward
from penstock.engine.execution.grammars import Grammars
from penstock.engine.execution.masks import Masks
from penstock.engine.execution.paging import PagedPass, PagedReads
from penstock.engine.execution.passes import STATES, Pass, PoisonPass, SettlePass, StatePass, StepLimits
from penstock.engine.execution.pooled import (
    ExpertMemory,
    ExpertPool,
    PooledForward,
    routed_layers,
    with_choices,
)
from penstock.engine.execution.recorded import RoutingCounts, RoutingPass
from penstock.engine.execution.rejection import FreeDraws, RejectionSampler
from penstock.engine.execution.replays import Replays, decode_sizes
from penstock.engine.execution.sampler import Rows, Sampler
from penstock.engine.execution.sampling import PromptLogprobsPass, SamplePass
from penstock.engine.execution.scoring import ContextKeys
from penstock.engine.execution.staging import Uploads
from penstock.engine.execution.state_drafts import StateDrafts
from penstock.engine.execution.states import StateSlots
from penstock.engine.execution.synthetic import SyntheticSampler
from penstock.engine.execution.target import TargetPass
from penstock.engine.execution.threads import threads_by_load
from penstock.engine.pace import ScoringCost
from penstock.engine.parts import EngineParts
from penstock.engine.recurrent import for_recurrent
from penstock.engine.routed import all_expert_bytes, for_experts, num_expert_slots
from penstock.engine.scheduling.budget import Budget, blocks_for
from penstock.engine.scheduling.residency import ResidencyChoice, num_kept_parts
from penstock.engine.scheduling.scheduler import Estimates, Scheduler
from penstock.errors import ConfigError
from penstock.experts.order import ORDERS
from penstock.experts.routing import RoutingWriter
from penstock.experts.slots import ExpertSlots
from penstock.kv.blocks.key import Scope
from penstock.kv.build import Device, KvGroup, Opened, open_cache
from penstock.kv.cache import KvCache
from penstock.kv.memory import (
    BlockLayout,
    DeviceArena,
    HostArena,
    StateLayout,
    free_bytes,
    limit_memory,
)
from penstock.kv.states import KEPT_STATES
from penstock.lanes import cuda
from penstock.lanes.cuda import make_lane, make_launcher
from penstock.lanes.lane import Lane
from penstock.lanes.launched import LaunchedLane
from penstock.models.adapters import ReadAdapter, blank_weights, read_adapter
from penstock.models.decoder import Decoder
from penstock.models.layers import SteadyLayerOps, TorchLayerOps
from penstock.models.loader import LoadedModel, ModelFacts, inspect_model, load_model
from penstock.models.lora import AdapterWeights
from penstock.models.model import LayerOps, ModelConfig, Recurrence, Split
from penstock.models.progress import Progress, silent
from penstock.models.registry import architecture_of
from penstock.models.split import need_even_heads, part_of
from penstock.observe import Observers, all_of
from penstock.ranks.followed import Followed, FollowedAdapters
from penstock.ranks.launched import check_supported
from penstock.ranks.start import Alone, Ranks, open_ranks, share_devices
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.speculation.draft import DraftModel, check_draft, draft_arena
from penstock.speculation.drafter import DeviceDrafter, NgramDrafter
from penstock.speculation.eagle import read_eagle
from penstock.speculation.head import DraftHead
from penstock.speculation.length import StepCosts
from penstock.speculation.mtp import installed_head, read_head
from penstock.speculation.shipped import check_shipped, shipped_head
from penstock.speculation.synthetic import EveryDeviceDraft, MadeUpDrafts
from penstock.trace.file import TraceFile
from penstock.trace.recorder import observers_of

log = logging.getLogger(__name__)

# Tokens of KV per fetch from host memory: a size that fused attention has a plan for, with few launches.
_CUDA_PIECE_TOKENS = 16384
_CPU_PIECE_TOKENS = 4096
_WAITING_PER_ROW = 16  # waiting requests allowed per row
_CPU_COST_SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
_UNOBSERVED = Observers()
_GUESSED_ROW = 0.05  # time of a further row relative to a one-row step, until measured


def build(
    config: Config,
    progress: Progress = silent,
    sanitizer: Sanitizer | None = None,
    observers: Observers = _UNOBSERVED,
    synthetic: bool = False,
) -> Engine:
    """An engine for `config`, ready for its first request. Raises UserError for anything that cannot work.
    `synthetic`: drafts are kept by chance, and answers are of no use; for `penstock bench drafts`."""
    sanitizer = sanitizer or _sanitizer(config)
    device = device_for(config)
    setup = _Setup(config, device, progress, sanitizer, observers, synthetic)
    if sanitizer is not None:  # the first to hear: it may refuse
        setup.observers = sanitizer.observers + setup.observers
    if device.type == "cuda":
        return _build(setup)
    # On a short-lived thread: OpenMP keeps a team for every thread that has computed. With more threads than
    # cores it puts workers to sleep between any two operations of the compute lane.
    made: Future[Engine] = Future()

    def build_apart() -> None:
        try:
            threads = threads_by_load()
            threads.wait_first_look()
            setup.threads = threads
            made.set_result(_build(setup))
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=build_apart, name="build", daemon=True).start()
    return made.result()


@dataclass(slots=True)
class _Setup:
    """What an engine is built from. `undo` closes parts if building fails: an open cache keeps its directory
    locked and its memory allocated."""

    config: Config
    device: torch.device
    progress: Progress
    sanitizer: Sanitizer | None
    observers: Observers
    synthetic: bool = False
    threads: ThreadsByLoad | None = None
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    lanes: list[Lane] = field(default_factory=list)  # made so far
    launcher: Lane | None = None  # of lanes whose work waits for what the device computes
    pool: ExpertPool | None = None
    routing: RoutingWriter | None = None
    ranks: Ranks = field(default_factory=Alone)

    def lane(self, name: str) -> Lane:
        return self._kept(make_lane(name, self.device, all_of(self.observers.lanes)))

    def step_lane(self, name: str) -> Lane:
        """For work that the engine thread submits. Where experts come and go, a thread launches it."""
        if not self.config.source.experts_in_host:
            return self.lane(name)
        observer = all_of(self.observers.lanes)
        inner = make_lane(f"{name}, launched", self.device, observer)
        launcher = self.launcher or make_launcher(inner, observer)
        lane = self._kept(LaunchedLane(name, inner, launcher, observer))
        if self.launcher is None:  # behind the first of its lanes, which close in order
            self.launcher = self._kept(launcher)
        return lane

    @property
    def look(self) -> Callable[[], None]:
        """Called before a step: the number of threads follows what other processes leave."""
        return _nothing if self.threads is None else self.threads.look

    def _kept(self, lane: Lane) -> Lane:
        self.lanes.append(lane)
        self.undo.callback(_close, lane.close)
        return lane


def _nothing() -> None:
    """On CUDA the number of threads stays as it is."""


class _Models(NamedTuple):
    """The target and what proposes for it on the device, if anything."""

    loaded: LoadedModel
    proposer: DraftHead | DraftModel | None
    group: KvGroup  # of all layers
    num_blocks: int
    read: ReadAdapter  # of an adapter, on every rank
    dropped: Callable[[str], None]  # one that was read
    experts: ExpertMemory | None = None  # None: all are on the device
    routing: RoutingCounts | None = None  # None: nothing is recorded

    @property
    def target(self) -> Decoder:
        return self.loaded.model

    @property
    def own_dims(self) -> ModelConfig | None:
        """Of the proposer, if its KV is unlike the target's."""
        return None if self.proposer is None else self.proposer.own_dims

    @property
    def dims(self) -> ModelConfig:
        """By default, sequences are no longer than the draft model's positions."""
        dims, own = self.target.config, self.own_dims
        return dims if own is None else replace(dims, context=min(dims.default_len, own.max_position))


class _Sizes(NamedTuple):
    """Limits of the scheduler, of steps and of sequences."""

    max_model_len: int
    budget: Budget
    residency: ResidencyChoice
    limits: StepLimits


def _build(setup: _Setup) -> Engine:
    with setup.undo:
        trace = _trace(setup)
        _join(setup)
        models = _models(setup)
        if trace is not None:
            setup.observers += observers_of(trace, models.group.layout.block_bytes)
        engine = _assemble(setup, models, trace)
        setup.undo.pop_all()
    return engine


def _join(setup: _Setup) -> None:
    """Start the other ranks, or meet them: they load the model at the same time."""
    config, num_devices = setup.config, cuda.num_devices() if setup.device.type == "cuda" else 0
    if share_devices(config, num_devices):  # gloo moves tensors by the host, which no capture can hold
        log.warning(
            "%d GPUs for %d ranks: they share them, and steps are not captured",
            num_devices,
            config.ranks.size,
        )
        config = setup.config = replace(config, engine=replace(config.engine, capture=False))
    setup.ranks = open_ranks(config, num_devices, setup.progress)
    setup.undo.callback(_close, setup.ranks.close)


def _trace(setup: _Setup) -> TraceFile | None:
    """Before weights are read, since it may be refused."""
    config, device = setup.config.trace, setup.device.type
    if config.file is None:
        return None
    note = "ops show when they were launched, transfers until their end was seen" if device == "cuda" else ""
    about = {"penstock": __version__, "model": setup.config.source.model, "device": device, "note": note}
    trace = TraceFile(config.file, config.most_mib << 20, about)
    setup.undo.callback(trace.close)
    return trace


def _assemble(setup: _Setup, models: _Models, trace: TraceFile | None) -> Engine:
    config, loaded = setup.config, models.loaded
    adapters = open_store(config.lora, loaded.name, models.read, setup.progress, models.dropped)
    storage = _storage(setup, models)
    sizes = _sizes(setup, models, storage)
    cache, budget, dims, scoring = storage.cache, sizes.budget, models.dims, ScoringCost()
    grammars = Grammars(loaded.tokenizer, dims.vocab, sorted(dims.eos_ids))
    executor = _executor(setup, models, storage, sizes, grammars, adapters)
    _capture(setup, executor)
    setup.ranks.wait_built()
    speculation = _speculation(setup, sizes.limits, executor)
    estimates = Estimates(cache.prefill, sizing.lengths_for(config), lambda: scoring.tau)
    scheduler = Scheduler(cache, budget, dims.eos_ids, speculation, estimates)
    return Engine(
        EngineParts(
            name=loaded.name,
            weights=loaded.weights,
            tokenizer=loaded.tokenizer,
            scheduler=scheduler,
            executor=executor,
            adapters=adapters,
            cache=cache,
            arena=storage.arena,
            lanes=tuple(setup.lanes),
            limits=_prompt_limits(cache, sizes.max_model_len, dims.vocab),
            max_open=budget.max_batch * _WAITING_PER_ROW,
            seed=config.engine.seed,
            sampling=loaded.sampling,
            grammars=grammars,
            residency=sizes.residency,
            resident_tokens=(budget.deep_blocks or models.num_blocks) * cache.block_tokens,
            scoring=scoring,
            observers=setup.observers,
            trace=trace,
            experts=setup.pool,
            routing=setup.routing,
            sanitizer=setup.sanitizer,
            speculation=speculation,
            threads=setup.threads,
            ranks=setup.ranks,
        )
    )


def _capture(setup: _Setup, executor: Executor) -> None:
    if setup.device.type == "cuda":
        cuda.wait_set_up(setup.device)  # weights, arena and the sampler's state, before any lane touches them
        warm.capture_all(executor, setup.progress)


def _prompt_limits(cache: KvCache, max_model_len: int, vocab: int) -> PromptLimits:
    kv_tokens = max(cache.num_blocks, cache.num_pageable) * cache.block_tokens
    if not cache.keeps_all:  # blocks leave the device
        kv_tokens = max(kv_tokens, max_model_len)
    return PromptLimits(max_model_len, vocab, kv_tokens)


def _models(setup: _Setup) -> _Models:
    config, device = setup.config, setup.device
    _check_deterministic(config, device)
    config = setup.config = _with_experts(setup)
    loaded = _load(setup, config.source, config.source.deterministic)
    config = setup.config = for_recurrent(config, loaded.model.config)
    proposer = _head(config, loaded) or _draft(setup, loaded)
    experts, routing = _expert_memory(setup, loaded.model), _routing_counts(setup, loaded)
    own_dims = None if proposer is None else proposer.own_dims
    layout = sizing.layout_for(config, loaded.model.config, device, own_dims)
    group = KvGroup(
        layout,
        sizing.windows_of(loaded.model.config, own_dims),
        sizing.state_layout(config, loaded.model.config),
    )
    num_blocks = sizing.blocks_that_fit(config, layout, loaded.model)
    adapters = setup.ranks.adapters(lambda path: read_adapter(path, loaded.model, loaded.dims))
    num_blocks = setup.ranks.num_blocks(loaded.model.digest, num_blocks, setup.progress)
    model = with_choices(loaded.model, experts is not None, config.experts.guesses, routing)
    models = _Models(replace(loaded, model=model), proposer, group, num_blocks, *adapters, experts, routing)
    # raises before memory is allocated
    sizing.longest_sequence(
        config, models.dims, models.num_blocks, whole=sizing.holds_all(group, models.num_blocks)
    )
    return models


def _with_experts(setup: _Setup) -> Config:
    """Before weights are read: where they are depends on it."""
    config, device = setup.config, setup.device
    if (gib := config.source.device_memory_gib) is not None:
        if device.type != "cuda":
            raise ConfigError(f"--device-memory-gib {gib:g} needs --device cuda")
        limit_memory(device, int(gib * GIB))
    if config.experts == ExpertsConfig():
        return config
    return _as_routed(config, inspect_model(config.source, config.engine.max_model_len), device)


def _as_routed(config: Config, facts: ModelFacts, device: torch.device) -> Config:
    dtype, room = sizing.dtype_of(config, device), None
    if config.experts.on_device is not None:
        rest = facts.num_parameters * dtype.itemsize - all_expert_bytes(facts.config, dtype)
        if config.speculation.kind == "draft":
            draft = inspect_model(sizing.draft_source(config), config.engine.max_model_len)
            rest += draft.num_parameters * dtype.itemsize
        room = sizing.room_for_experts(config, free_bytes(device) - rest, facts.config, device)
    return for_experts(config, facts.config, dtype, room)


def _routing_counts(setup: _Setup, loaded: LoadedModel) -> RoutingCounts | None:
    config, routing = setup.config.experts, loaded.model.config.routing
    if config.record is None or routing is None:
        return None
    layers = [one.index for one in routed_layers(loaded.model)]
    about = {"experts": routing.num_experts, "top_k": routing.top_k, "layers": layers}
    setup.routing = RoutingWriter(config.record, {"model": loaded.name, **about})
    setup.undo.callback(_close, setup.routing.close)
    return RoutingCounts(tuple(layers), routing.num_experts, loaded.model.device)


def _expert_memory(setup: _Setup, model: Decoder) -> ExpertMemory | None:
    """After all weights are read, and before KV is sized: it takes what is left."""
    config, device = setup.config, setup.device
    if not config.source.experts_in_host:
        return None
    free = free_bytes(device)
    room = sizing.room_for_experts(config, free, model.config, device)
    num_slots = num_expert_slots(config, model.config, model.dtype, room, free)
    memory = ExpertMemory(model, num_slots)
    setup.undo.callback(_close, memory.close)
    return memory


def _storage(setup: _Setup, models: _Models) -> Opened:
    digest = b"" if models.proposer is None else models.proposer.digest
    stored = sizing.layout_for(setup.config, models.loaded.dims, setup.device, models.own_dims)
    scope = _scope(models.target, stored, digest)
    states = sizing.state_layout(setup.config, models.loaded.dims)
    moves = setup.ranks.moves(models.loaded.dims, stored, states)
    at = Device(setup.device, models.num_blocks, moves)
    storage = open_cache(setup.config, models.group, scope, at, setup.observers)
    setup.undo.callback(_close, storage.cache.close)
    return storage


def _sizes(setup: _Setup, models: _Models, storage: Opened) -> _Sizes:
    config, dims, num_blocks, cache = setup.config, models.dims, models.num_blocks, storage.cache
    block_tokens, drafts = config.kv.block_tokens, config.speculation.drafts
    holds_all = sizing.holds_all(models.group, num_blocks)
    max_model_len = sizing.longest_sequence(config, dims, num_blocks, cache.num_pageable, holds_all)
    budget = sizing.budget_for(config, setup.device, max_model_len)
    if not holds_all:
        budget = replace(
            budget, prefill_chunk=sizing.fitting_chunk(cache, budget.prefill_chunk, max_model_len)
        )
    if storage.host_arena is not None and not any(dims.windows):
        budget = sizing.with_deep(budget, config, num_blocks)
    may_be_paged = holds_all and sizing.may_be_paged(config, max_model_len, num_blocks)
    residency = _residency(setup, budget, may_be_paged)
    division = residency.division
    limits = StepLimits(
        max_batch=budget.max_batch,
        prefill_chunk=budget.prefill_chunk,
        max_table=min(num_blocks, blocks_for(max_model_len, block_tokens)),
        block_tokens=block_tokens,
        padding_slot=storage.arena.padding_slot,
        arena=storage.arena.name,
        max_tokens=max_model_len,
        max_paged=cache.num_pageable if may_be_paged else 0,
        max_parts=0 if division is None else blocks_for(max_model_len, division.part_tokens),
        max_drafts=sizing.most_step_drafts(config),
        max_request_drafts=drafts,
        num_ahead=0 if models.proposer is None else drafts,
        num_layers=models.group.layout.num_layers,
        target_layers=dims.num_kv_layers,
        state_layers=0 if dims.recurrence is None else len(dims.recurrence.layers),
    )
    return _Sizes(max_model_len, replace(budget, division=division), residency, limits)


def _residency(setup: _Setup, budget: Budget, may_be_paged: bool) -> ResidencyChoice:
    if may_be_paged and setup.config.source.deterministic:
        raise ConfigError(
            "--deterministic: every sequence has to fit on the device; raise --device-kv-gib, or lower "
            "--max-model-len"
        )
    deep_blocks = budget.deep_blocks if may_be_paged else 0
    residency = ResidencyChoice.of(deep_blocks, budget.resident_blocks, setup.config.kv)
    if setup.ranks.size > 1:
        residency = replace(residency, division=None, refusal="the model is on several ranks")
    return residency


def _executor(
    setup: _Setup,
    models: _Models,
    storage: Opened,
    sizes: _Sizes,
    grammars: Grammars,
    adapters: AdapterStore,
) -> Executor:
    """The passes of a step. One for other layers is one more in the list."""
    limits, guard = sizes.limits, storage.guard
    target, dims, lane = models.target, models.dims, setup.step_lane("compute")
    uploads = Uploads(setup.device, lane)
    draws, sampler, rows = _sampling(setup, models, limits, lane, uploads)
    masks = Masks(grammars, limits.max_rows, lane)
    part = _target_part(storage.arena, target, models.own_dims)
    attention = _attention(*part, target.rope, target.config.num_kv_layers, setup.config.source.deterministic)
    drafts = _drafts(setup, models, (storage.arena, attention), (draws, sampler.pending))
    states = _states(dims.recurrence, limits, storage.states, sampler.rejected)
    parts = (target, attention, sampler.pending, setup.look, drafts, (states.slots, states.drafts))
    pool = _expert_pool(setup, models, lane)
    forward = Forward(*parts) if pool is None else PooledForward(pool, *parts)
    replays = _replays(setup, limits, forward, lambda: sampler.pending, lane)
    num_kept = num_kept_parts(sizes.residency.division, storage.cache.num_pageable)
    paged = _paged(setup, limits, storage.host_arena, forward, (lane, uploads, num_kept))
    target_pass = TargetPass(forward, replays, sampler.rejected, paged)
    state_pass = None if states.slots is None else StatePass(states.slots, states.kept)
    passes: list[Pass | None] = [
        None if guard is None else PoisonPass(guard, limits),
        target_pass,
        _routing_pass(setup, models, lane),
        state_pass,
        paged,
        PromptLogprobsPass(target, uploads),
        SamplePass(sampler, rows, masks, uploads, replays),
        setup.ranks.steps(limits, (storage.host_arena, storage.states), (sampler.pending, sampler.rejected)),
        None if state_pass is None or not states.drafts else SettlePass(state_pass, states.drafts, replays),
        None if drafts is None else DraftPass(drafts, rows, replays, masks),
    ]
    present = tuple(filter(None, passes))
    return Executor(lane, limits, present, target_pass, masks, _weights_of(adapters, target))


def _drafts(
    setup: _Setup,
    models: _Models,
    memory: tuple[DeviceArena, Attention],
    given: tuple[RowDraws | None, Tensor],
) -> Drafts | None:
    """`given`: how they are drawn, and where they go."""
    if models.proposer is None:
        return None
    arena, attention = memory
    guesser = _guesser(models.proposer, arena.tensor, attention, models.target.config)
    return setup.ranks.drafts(guesser, *given, arena.layout.block_tokens)


class FollowerParts(NamedTuple):
    """What a rank other than 0 runs on: no books, and nothing that chooses tokens."""

    executor: Executor
    lanes: Sequence[Lane]  # the first computes
    arena: DeviceArena
    host_arena: HostArena | None
    states: HostArena | None  # kept states of recurrent layers
    observers: Observers


def build_follower(config: Config, ranks: Followed) -> FollowerParts:
    """Its sizes are those of rank 0."""
    sanitizer = _sanitizer(replace(config, sanitize=replace(config.sanitize, json_file=None)))
    observers = _UNOBSERVED if sanitizer is None else sanitizer.observers
    setup = _Setup(config, device_for(config), silent, sanitizer, observers, ranks=ranks)
    if setup.device.type == "cpu":
        setup.threads = threads_by_load()
        setup.threads.wait_first_look()
    models = _models(setup)
    group, (num_blocks, num_states) = models.group, ranks.host_slots
    host = _follower_host(setup, group.layout, num_blocks, ranks.host_files[0], "host")
    states = None
    if group.states is not None:
        states = _follower_host(setup, group.states, num_states, ranks.host_files[1], KEPT_STATES)
    arena = DeviceArena(group.layout, models.num_blocks, setup.device)
    executor = _follower_executor(setup, ranks, models, (arena, host, states))
    _capture(setup, executor)
    return FollowerParts(executor, setup.lanes, arena, host, states, observers)


def _follower_host(
    setup: _Setup, layout: BlockLayout | StateLayout, num_slots: int, file: int, name: str
) -> HostArena | None:
    if not num_slots:
        return None
    arena = HostArena(layout, num_slots, setup.device, name, file)
    arena.prepare(lambda slots: None, lambda done, total: None, lambda: False)
    return arena


def _follower_executor(
    setup: _Setup,
    ranks: Followed,
    models: _Models,
    arenas: tuple[DeviceArena, HostArena | None, HostArena | None],
) -> Executor:
    """The passes that have collectives, and those of states."""
    arena, host_arena, kept = arenas
    limits, target, lane = ranks.limits, models.target, setup.lane("compute")
    uploads = Uploads(setup.device, lane)
    assert limits is not None and ranks.loaded is not None
    pending = torch.zeros(
        (limits.max_batch + 1, 1 + limits.num_ahead), dtype=torch.int32, device=setup.device
    )
    rejected = torch.zeros(limits.max_batch + 1, dtype=torch.int32, device=setup.device)
    part = _target_part(arena, target, models.own_dims)
    attention = _attention(*part, target.rope, target.config.num_kv_layers)
    drafts = _drafts(setup, models, (arena, attention), (None, pending))
    states = _states(target.config.recurrence, limits, kept, rejected)
    forward = Forward(target, attention, pending, setup.look, drafts, (states.slots, states.drafts))
    replays = _replays(setup, limits, forward, lambda: pending, lane)
    paged = _paged(setup, limits, host_arena, forward, (lane, uploads, 0))
    target_pass = TargetPass(forward, replays, rejected, paged)
    state_pass = None if states.slots is None else StatePass(states.slots, states.kept)
    tokenizer, dims = models.loaded.tokenizer, target.config
    masks = Masks(Grammars(tokenizer, dims.vocab, sorted(dims.eos_ids)), limits.max_batch, lane)
    rows = Rows(limits.max_batch, frozenset(), dims.vocab, False)
    passes: list[Pass | None] = [
        target_pass,
        state_pass,
        paged,
        PromptLogprobsPass(target, uploads),
        ranks.steps(limits, None, (pending, rejected)),
        None if state_pass is None or not states.drafts else SettlePass(state_pass, states.drafts, replays),
        None if drafts is None else DraftPass(drafts, rows, replays, masks),
    ]
    present = tuple(one for one in passes if one is not None)
    return Executor(lane, limits, present, target_pass, masks, _weights_of(ranks.loaded, target))


def _sampling(
    setup: _Setup, models: _Models, limits: StepLimits, lane: Lane, uploads: Uploads
) -> tuple[RowDraws, Sampler, Rows]:
    """How drafts are drawn on the device, and how tokens are."""
    dims, num_rows, most = models.dims, limits.max_batch + 1, limits.num_ahead
    given = limits.max_batch, dims.vocab, lane, uploads, most, dims.eos_ids
    rejects = setup.config.speculation.sampling == "rejection" and limits.max_drafts > 0
    rows = Rows(limits.max_batch, frozenset(dims.eos_ids), models.target.config.vocab, rejects)
    if not rejects:
        kind = SyntheticSampler if setup.synthetic else Sampler
        return RowDraws(num_rows, dims.vocab, uploads), kind(*given), rows
    draft_vocab = dims.vocab
    if isinstance(models.proposer, DraftHead) and models.proposer.vocab is not None:
        draft_vocab = len(models.proposer.vocab)
    free = FreeDraws(num_rows, dims.vocab, uploads, max(1, most), draft_vocab if most else 1)
    return free, RejectionSampler(*given, draws=free if most else None), rows


def _replays(
    setup: _Setup, limits: StepLimits, forward: Forward, pending: Callable[[], Tensor], lane: Lane
) -> Replays:
    """`pending`: the last tokens, wherever they are by now."""
    packer = Packer(limits.block_tokens, limits.padding_slot, limits.max_batch, limits.num_ahead)
    inputs = torch.zeros(limits.staging_ints, dtype=torch.int32, device=setup.device)
    buckets = tuple(filter(forward.captures, sizing.buckets_for(setup.config, limits, setup.device)))
    if forward.state_drafts is not None:
        buckets += tuple(replace(one, has_drafts=True) for one in buckets if one.num_tokens > 1)
    return Replays(lane, forward, packer, inputs, buckets, lambda: (pending(), *forward.tensors))


def _expert_pool(setup: _Setup, models: _Models, lane: Lane) -> ExpertPool | None:
    """None: all experts are on the device."""
    memory, config, dims = models.experts, setup.config.experts, models.target.config.routing
    if memory is None or dims is None or not isinstance(lane, LaunchedLane):
        return None
    order = ORDERS[config.order](len(memory.hosted) * dims.num_experts)
    observer = all_of(setup.observers.pools)
    slots = ExpertSlots(memory.num_slots, len(memory.hosted), dims.num_experts, order, observer)
    setup.pool = ExpertPool(memory, slots, setup.lane("experts"), lane.inner, config.guesses)
    return setup.pool


def _routing_pass(setup: _Setup, models: _Models, lane: Lane) -> RoutingPass | None:
    if models.routing is None or setup.routing is None:
        return None
    made = RoutingPass(models.routing, setup.routing, lane)
    setup.observers += Observers(steps=(made,))
    return made


class _States(NamedTuple):
    """Of the rows and a row of padding, kept ones, and what steps with drafts need. None: there are none."""

    slots: StateSlots | None = None
    kept: StateSlots | None = None
    drafts: StateDrafts | None = None


def _states(dims: Recurrence | None, limits: StepLimits, kept: HostArena | None, rejected: Tensor) -> _States:
    if dims is None:
        return _States()
    num_rows, device = limits.max_batch, rejected.device
    needed, free = sizing.state_bytes(dims, num_rows, limits.max_drafts), free_bytes(device)
    if needed > free:
        raise ConfigError(
            f"--max-batch {num_rows}: the states of so many requests take {needed / GIB:.1f} GiB, and "
            f"{free / GIB:.1f} GiB of {device.type} memory are free"
        )
    slots = StateSlots(STATES, dims, torch.zeros(num_rows + 1, dims.num_bytes // 4, device=device))
    drafts = StateDrafts(slots, limits.max_rows, rejected) if limits.max_drafts else None
    return _States(slots, None if kept is None else StateSlots(kept.name, dims, kept.tensor), drafts)


def _paged(
    setup: _Setup,
    limits: StepLimits,
    host_arena: HostArena | None,
    forward: Forward,
    keys: tuple[Lane, Uploads, int],
) -> PagedPass | None:
    """None: every sequence fits on the device. `keys`: the last arguments of `ContextKeys`."""
    if not limits.max_paged or host_arena is None:
        return None
    attention, kv = forward.attention, setup.config.kv
    piece_tokens = _CUDA_PIECE_TOKENS if setup.device.type == "cuda" else _CPU_PIECE_TOKENS
    piece_tokens = min(piece_tokens, limits.max_tokens)
    reads = PagedReads(host_arena, attention, setup.step_lane("page"), piece_tokens)
    return PagedPass(reads, forward, ContextKeys(kv.scorer, attention, *keys))


def _weights_of(
    adapters: AdapterStore | FollowedAdapters, model: Decoder
) -> Callable[[Adapter], AdapterWeights]:
    """Steps that warm up run with an adapter that is in no store."""
    blank = functools.cache(lambda: blank_weights(model.config, model.dtype, model.device))
    return lambda adapter: adapters.weights_of(adapter) if adapter.digest else blank()


def _close(close: Callable[[], None]) -> None:
    """Close a part after building failed; only log its errors, since the first error is raised."""
    try:
        close()
    except Exception:
        log.exception("a part of the engine could not be closed after building failed")


def check_ahead(config: Config) -> None:
    """Raises the errors of `build` about memory or positions that are known before weights are read."""
    check_supported(config)
    if config.source.load_format == "dummy":
        return
    device = device_for(config)
    _check_deterministic(config, device)
    facts = inspect_model(config.source, config.engine.max_model_len)
    config = for_recurrent(_as_routed(config, facts, device), facts.config)
    num_parameters, names = facts.num_parameters, facts.name
    split, on_cuda = Split(0, config.ranks.size), device.type == "cuda"
    dims, draft_dims = part_of(facts.config, split), _dims_of_head(config, facts.config)
    if config.speculation.kind == "draft":
        draft = inspect_model(sizing.draft_source(config), config.engine.max_model_len)
        draft_dims = draft.config
        num_parameters, names = (
            num_parameters + draft.num_parameters,
            (f"{facts.name} and of its draft model {draft.name}"),
        )
    dtype, free = sizing.dtype_of(config, device), free_bytes(device)
    needed = num_parameters * dtype.itemsize // (split.size if on_cuda else 1)
    if config.source.experts_in_host and on_cuda:
        every = all_expert_bytes(facts.config, dtype)
        needed -= every - (config.experts.wanted_bytes(every) or 0)
    if needed > free:
        size = f"the weights of {names} take {needed / GIB:.1f} GiB"
        raise ConfigError(f"{size}, and {free / GIB:.1f} GiB of {device.type} memory are free")
    draft_part = None if draft_dims is None else part_of(draft_dims, split)
    layout = sizing.layout_for(config, dims, device, draft_part)
    num_blocks = _num_blocks_ahead(config, layout, (free, needed), on_cuda)
    group = KvGroup(layout, sizing.windows_of(facts.config, draft_dims))
    sizing.longest_sequence(config, facts.config, num_blocks, whole=sizing.holds_all(group, num_blocks))


def _num_blocks_ahead(config: Config, layout: BlockLayout, memory: tuple[int, int], on_cuda: bool) -> int:
    """KV blocks at most. `memory`: free, and needed for weights."""
    (free, needed), kv, given = memory, config.kv, config.kv.device_blocks
    if kv.device_gib is not None:
        given = int(kv.device_gib * GIB) // layout.block_bytes
    if given is not None and given * layout.block_bytes > free - needed:
        size = (
            f"{given} KV blocks take {given * layout.block_bytes / GIB:.1f} GiB and the weights "
            f"{needed / GIB:.1f}"
        )
        where = "cuda" if on_cuda else "cpu"
        raise ConfigError(
            f"{size}, and {free / GIB:.1f} GiB of {where} memory are free; lower --device-kv-gib"
        )
    room = free - needed if on_cuda else int(sizing.CPU_KV_GIB * GIB)  # the default, at most
    return room // layout.block_bytes if given is None else given


def _dims_of_head(config: Config, target: ModelConfig) -> ModelConfig | None:
    """Those of a head with dimensions of its own. Raises ModelError if a head does not fit; reads no
    tensor."""
    directory, ships = Path(config.source.model).expanduser(), architecture_of(target).ships_heads
    if config.speculation.proposer == "mtp" and ships and directory.is_dir():
        check_shipped(directory, target)
    return sizing.eagle_dims(config, target) if config.speculation.kind == "eagle" else None


def _check_deterministic(config: Config, device: torch.device) -> None:
    """Refuses options whose matrix products or attention are not deterministic."""
    if not config.source.deterministic:
        return
    if device.type != "cpu" or sizing.dtype_of(config, device) != torch.float32:
        raise ConfigError("--deterministic needs --device cpu and --dtype float32")
    if config.lora.adapters or config.lora.dir is not None:
        raise ConfigError("--deterministic: adapters are not covered; leave --lora and --lora-dir out")
    if config.speculation.kind in ("mtp", "eagle", "draft"):
        raise ConfigError(f"--deterministic: --speculate {config.speculation.kind} is not covered; ngram is")
    if config.kv.resident_tokens is not None:
        raise ConfigError(
            "--deterministic: every sequence has to fit on the device; leave --kv-resident-tokens out"
        )


def _sanitizer(config: Config) -> Sanitizer | None:
    if config.sanitize.mode == "off":
        return None
    file = config.sanitize.json_file
    return Sanitizer(strict=config.sanitize.mode == "strict", json_file=None if file is None else Path(file))


def device_for(config: Config) -> torch.device:
    if config.source.device == "cpu" or (config.source.device == "auto" and not cuda.is_usable()):
        return torch.device("cpu")
    if not cuda.is_usable():
        raise ConfigError("--device cuda: no usable NVIDIA GPU was found (see `penstock doctor`)")
    return torch.device("cuda", 0)


def _head(config: Config, loaded: LoadedModel) -> DraftHead | None:
    """Raises for a bad head before memory is allocated."""
    kind, path, model = config.speculation.kind, config.speculation.path, loaded.model
    name = model.config.architecture
    if kind in ("mtp", "eagle") and not architecture_of(model.config).takes_heads:
        raise ConfigError(f"--speculate {kind} is not supported for models of type {name}")
    if kind == "eagle":
        return read_eagle(Path(path or ""), model, loaded.dims)
    if kind != "mtp":
        return None
    if architecture_of(model.config).ships_heads:
        return shipped_head(loaded, path)
    return installed_head(model, loaded.dims) if path is None else read_head(Path(path), model, loaded.dims)


def _load(setup: _Setup, source: ModelSource, deterministic: bool = False) -> LoadedModel:
    config, device = setup.config, setup.device
    ops = setup.ranks.ops(_layer_ops(device, deterministic))
    return load_model(
        source, device, sizing.dtype_of(config, device), ops, setup.progress, config.engine.max_model_len
    )


def _draft(setup: _Setup, loaded: LoadedModel) -> DraftModel | None:
    """A smaller model that proposes, checked before memory is allocated."""
    config, target = setup.config, loaded.model
    if config.speculation.kind != "draft":
        return None
    draft = _load(setup, sizing.draft_source(config))
    need_even_heads(draft.dims, draft.model.ops.split, "a draft model")
    most = config.engine.max_model_len or 0
    check_draft(draft.model, draft.tokenizer, target, loaded.tokenizer, most)
    return DraftModel(draft.model, target.config.vocab)


def _scope(model: Decoder, layout: BlockLayout, proposer: bytes = b"") -> Scope:
    """`proposer`: the digest of a draft model or head with layers of its own in every block."""
    digest = (
        hashlib.blake2b(model.digest + proposer, digest_size=len(model.digest)).digest()
        if proposer
        else model.digest
    )
    return Scope(digest, layout.dtype, layout.fingerprint(), layout.block_tokens, model.config.positions)


def _layer_ops(device: torch.device, deterministic: bool = False) -> LayerOps:
    if device.type == "cuda":
        from penstock.models.triton_layers import TritonLayerOps

        return TritonLayerOps()
    return SteadyLayerOps() if deterministic else TorchLayerOps()


def _target_part(
    arena: DeviceArena, model: Decoder, own_dims: ModelConfig | None
) -> tuple[Tensor, ModelConfig]:
    """The arena part that the target's attention reads, and its dimensions. Without `own_dims`, a head's
    layer has the shape of the target's last layer and uses the same attention."""
    dims = model.config
    if own_dims is not None:
        return arena.tensor[:, : dims.num_kv_layers], replace(dims, num_layers=dims.num_kv_layers)
    if arena.layout.num_layers != dims.num_layers:  # a head's layer, or layers without KV
        dims = replace(dims, num_layers=arena.layout.num_layers, windows=dims.windows + dims.windows[-1:])
    return arena.tensor, dims


def _attention(
    arena: Tensor, dims: ModelConfig, rope: Tensor, blank_from: int, deterministic: bool = False
) -> Attention:
    if arena.device.type == "cuda":
        from penstock.engine.execution.attention.triton import TritonAttention

        return TritonAttention(arena, dims, rope, blank_from)
    return (SteadyAttention if deterministic else CpuAttention)(arena, dims, rope, blank_from)


def _guesser(
    proposer: DraftHead | DraftModel, arena: Tensor, attention: Attention, target: ModelConfig
) -> HeadGuesser | ModelGuesser:
    """With dimensions of its own it has an attention of its own over its part of the arena, otherwise the
    target's."""
    own = proposer.own_dims
    if own is not None:
        attention = _attention(draft_arena(arena, target, own), own, proposer.rope, 0)
    if isinstance(proposer, DraftHead):
        return HeadGuesser(proposer, attention)
    return ModelGuesser(proposer, attention)


def _speculation(
    setup: _Setup, limits: StepLimits, executor: Executor
) -> DeviceDrafter | NgramDrafter | None:
    """Starts with guessed step costs: those of a machine limited by memory, not by arithmetic."""
    speculation = setup.config.speculation
    if speculation.proposer is None:
        return None
    sizes = decode_sizes(limits.max_rows) if setup.device.type == "cuda" else _CPU_COST_SIZES
    sizes = (*(size for size in sizes if size < limits.max_rows), limits.max_rows)
    costs = StepCosts(sizes, tuple(0.01 * (1 + size * _GUESSED_ROW) for size in sizes))
    most = speculation.drafts, limits.max_drafts
    drafting = [one.drafts for one in executor.passes if isinstance(one, DraftPass)]
    if drafting:
        on_device = EveryDeviceDraft if setup.synthetic else DeviceDrafter
        return on_device(*most, costs, lambda: drafting[0].failed)
    return (MadeUpDrafts if setup.synthetic else NgramDrafter)(*most, costs)
