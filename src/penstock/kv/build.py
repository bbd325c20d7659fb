"""Opens a cache: arenas, pools, the movers between them, and cold tiers. Owns which parts belong together;
the only place that wires storage, for the engine and for benchmarks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.config import DEVICE_EVICTIONS, GIB, Config
from penstock.errors import ConfigError
from penstock.kv.blocks.eviction import EvictionOrder, make_order
from penstock.kv.blocks.key import SCOPE_BYTES, Scope
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.cache import KvCache
from penstock.kv.events import TOKEN_BYTES, KvEvents, KvReports
from penstock.kv.memory import ArenaGuard, BlockLayout, DeviceArena, HostArena, StateLayout, free_bytes
from penstock.kv.rules import PrefixRule, rule_for
from penstock.kv.state_events import KvEventsUpToStates, StateReports
from penstock.kv.states import KEPT_STATES, ColdStates, KeptStates, states_in
from penstock.kv.tiers.cold import COLD_LANES, ColdLimits, ColdTier, cpu_lanes
from penstock.kv.tiers.host import HostTier
from penstock.kv.tiers.policy import TierLimits
from penstock.kv.tiers.reads import Costs
from penstock.kv.tiers.remote import open_store as open_remote
from penstock.kv.tiers.ssd.directory import STATES_FOLDER
from penstock.kv.tiers.ssd.store import SsdStore, open_ssd
from penstock.kv.tiers.ssd.tokens import TokenFile
from penstock.kv.tiers.store import BlockStore, Space
from penstock.kv.tiers.tiers import Tiers
from penstock.kv.transfer import ByteChecks, Mover, make_copier
from penstock.lanes.cuda import make_lane, make_launcher
from penstock.observe import Observers, PoolObserver, all_of

_HOST_KV_GIB = 4.0
_HOST_FREE_SHARE = 0.25  # of free host memory, if that is less
_STATES_GIB = 2.0  # or more, if more KV is cached
_TOKENS_PER_STATE = 8192  # docs/decisions/0051
_STATES_FREE_SHARE = 0.125
_MOST_STATES = 1 << 14  # of a tiny model
_LOAD_PRIORITY = -1  # of the stream for promotions: requests wait for them
# A shorter step ends sooner as a replay after the whole load than launched layer by layer.
_CUDA_OVERLAP_TOKENS = 1024
_CPU_OVERLAP_TOKENS = 64  # a copy beside a short step takes a core from it
_WRITE_QUEUE_BYTES = 512 << 20
_STATE_LANES = 2  # of a tier: a state is large enough for the rate of a disk
_STATES_SHARE = 4  # 1 / this of --kv-offload-ssd-gib is for states, if there are any
_UNOBSERVED = Observers()
MakeMover = Callable[..., Mover]  # with the arguments of `Mover`
_STUCK = 1.5  # a call to a shared store that takes this many times its timeout counts as stuck


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose KV lies in one block. `windows`: how many tokens each of them sees; 0, or none: all."""

    layout: BlockLayout
    windows: tuple[int, ...] = ()
    states: StateLayout | None = None  # of the recurrent layers beside them

    @property
    def rule(self) -> PrefixRule:
        return self.rule_with(None)

    def rule_with(self, states: KeptStates | None) -> PrefixRule:
        return rule_for(self.windows, self.layout.block_tokens, states)


class Moves(NamedTuple):
    """How blocks get to the device and back, and to disks and stores."""

    make_mover: MakeMover = Mover
    overlaps: bool = True  # a step may begin over the first layers of a load
    # what stores have of a block, if that is more than this process has
    stored: BlockLayout | None = None
    stored_states: StateLayout | None = None  # the same of kept states
    # a store of whole blocks, or states, as one of those in an arena
    through: Callable[[BlockStore, HostArena], BlockStore] = lambda store, arena: store


class Device(NamedTuple):
    """Where steps compute, and how many blocks are there."""

    device: torch.device
    num_blocks: int
    moves: Moves = Moves()


@dataclass(frozen=True, slots=True)
class Opened:
    """A cache with the memory that steps compute in."""

    cache: KvCache
    arena: DeviceArena
    guard: ArenaGuard | None  # set if bytes are checked
    host_arena: HostArena | None = None  # set if blocks may be paged out
    states: HostArena | None = None  # kept states of recurrent layers


def open_cache(
    config: Config, group: KvGroup, scope: Scope, at: Device, observers: Observers = _UNOBSERVED
) -> Opened:
    """The blocks of the device, and the tiers that `config` names."""
    (device, num_blocks, moves), layout = at, group.layout
    arena = DeviceArena(layout, num_blocks, device)
    reports = KvReports() if config.kv.events else None
    if reports is not None:
        observers += Observers(pools=(reports,))
    pool = BlockPool(num_blocks, arena.name, all_of(observers.pools), _device_order(config, num_blocks))
    host_arena = HostArena(layout, num_host_blocks(config, arena), device) if config.offload.enabled else None
    guard = (
        ArenaGuard(*(one for one in (arena, host_arena) if one is not None))
        if config.sanitize.check_bytes
        else None
    )
    if host_arena is None:
        events = None if reports is None else KvEvents(reports, layout.block_tokens)
        return Opened(KvCache(pool, scope, config.kv.prefix_cache, None, group.rule, events), arena, guard)
    checks = None
    if guard is not None and (contents := all_of(observers.contents)) is not None:
        checks = ByteChecks(guard, contents, (0, layout.num_layers), host_arena.name, arena.name)
    num_cached = (num_blocks + host_arena.num_slots) * layout.block_tokens
    state_arena = _state_arena(config, group, device, num_cached)
    # may raise; before anything runs
    stored = replace(group, layout=moves.stored or layout, states=moves.stored_states or group.states)
    stores, state_stores = _open_both(config, scope, stored, reports)
    host = _open_host(config, host_arena, device, observers)
    movers = make_movers(arena, host_arena, observers, checks, moves.make_mover)
    parts = [moves.through(one, host_arena) for one in stores]
    cold = [open_cold(one, host_arena, _limits_of(one, host_arena, config), observers) for one in parts]
    tiers = Tiers.of(pool, host, cold, movers, layout, _limits(config, at))
    events = None if reports is None else _open_events(reports, group, stores)
    states = None
    if state_arena is not None:
        state_stores = [moves.through(one, state_arena) for one in state_stores]
        states = _open_states(config, state_stores, state_arena, tiers.loads.costs, observers)
    cache = KvCache(pool, scope, config.kv.prefix_cache, tiers, group.rule_with(states), events)
    return Opened(cache, arena, guard, host_arena, state_arena)


def _state_arena(config: Config, group: KvGroup, device: torch.device, num_cached: int) -> HostArena | None:
    if group.states is None:
        return None
    return HostArena(group.states, num_states(config, group.states, num_cached), device, KEPT_STATES)


def _limits_of(store: BlockStore, arena: HostArena, config: Config) -> ColdLimits:
    queue = ColdLimits(queue_bytes=min(_WRITE_QUEUE_BYTES, arena.num_bytes // 4))
    stuck_s = max(queue.stuck_s, _STUCK * config.offload.remote_timeout_s)  # not before a call is overdue
    return queue if store.local else replace(queue, stuck_s=stuck_s)


def _open_states(
    config: Config, stores: Sequence[BlockStore], arena: HostArena, costs: Costs, observers: Observers
) -> KeptStates:
    pool = BlockPool(arena.num_slots, KEPT_STATES, all_of(observers.pools))
    host = HostTier(pool, config.kv.block_tokens, config.offload.lease_s)
    if arena.device.type == "cuda":  # elsewhere every slot can be used at once
        host.withhold()
        host.prepare(arena)
    cold = [
        open_cold(states_in(store), arena, _limits_of(store, arena, config), observers, _STATE_LANES)
        for store in stores
    ]
    return KeptStates(pool, ColdStates(host, cold, costs.limits, costs))


def _open_events(reports: KvReports, group: KvGroup, stores: Sequence[BlockStore]) -> KvEvents:
    disk = next((store for store in stores if isinstance(store, SsdStore)), None)
    kept = None if disk is None else TokenFile(disk, group.layout.block_tokens * TOKEN_BYTES)
    made = KvEvents if group.states is None else KvEventsUpToStates
    return made(reports, group.layout.block_tokens, kept)


def num_states(config: Config, layout: StateLayout, num_cached: int) -> int:
    """Slots of host memory for kept states. `num_cached`: tokens of which device and host memory have KV."""
    gib = config.offload.states_gib
    if gib is None:
        gib = max(_STATES_GIB, num_cached // _TOKENS_PER_STATE * layout.block_bytes / GIB)
        gib = min(gib, free_bytes(torch.device("cpu")) / GIB * _STATES_FREE_SHARE)
    num = int(gib * GIB) // layout.block_bytes
    if num < 1:
        size = f"{layout.block_bytes / (1 << 20):.1f} MiB"
        raise ConfigError(f"--kv-offload-states-gib {gib:g} holds no state of {size}")
    return min(num, _MOST_STATES)


def num_host_blocks(config: Config, arena: DeviceArena) -> int:
    block_bytes = arena.layout.block_bytes
    if config.offload.host_gib is not None:
        num_blocks = int(config.offload.host_gib * GIB) // block_bytes
        if num_blocks < 1:
            raise ConfigError(
                f"--kv-offload-host-gib {config.offload.host_gib:g} holds no KV block of "
                f"{block_bytes / 1024:.0f} KiB"
            )
        return num_blocks
    num_bytes = min(_HOST_KV_GIB * GIB, free_bytes(torch.device("cpu")) * _HOST_FREE_SHARE)
    # A tiny model would have millions of blocks; sixteen times the device's number is enough.
    return max(1, min(int(num_bytes) // block_bytes, 16 * arena.num_slots))


def _device_order(config: Config, num_blocks: int) -> EvictionOrder:
    """The policy of the colder tiers, or by recency if that policy costs the engine thread too much per
    block."""
    name = config.offload.eviction
    return make_order(name if name in DEVICE_EVICTIONS else "lru", num_blocks, config.kv.block_tokens)


def _open_host(config: Config, arena: HostArena, device: torch.device, observers: Observers) -> HostTier:
    order = make_order(config.offload.eviction, arena.num_slots, config.kv.block_tokens)
    host = HostTier(
        BlockPool(arena.num_slots, arena.name, all_of(observers.pools), order),
        config.kv.block_tokens,
        config.offload.lease_s,
    )
    if device.type == "cuda":  # elsewhere every slot can be used at once
        host.withhold()
    host.prepare(arena)
    return host


def _limits(config: Config, at: Device) -> TierLimits:
    offload = config.offload
    overlap_tokens = _CUDA_OVERLAP_TOKENS if at.device.type == "cuda" else _CPU_OVERLAP_TOKENS
    if not at.moves.overlaps:
        overlap_tokens = sys.maxsize
    admission = offload.ssd_admission if offload.ssd_dir is not None else "always"
    return TierLimits(
        overlap_tokens, offload.load_deadline_s, offload.load_always, config.kv.prefix_cache, admission
    )


def make_movers(
    arena: DeviceArena,
    host_arena: HostArena,
    observers: Observers = _UNOBSERVED,
    checks: ByteChecks | None = None,
    make_mover: MakeMover = Mover,
) -> tuple[Mover, Mover]:
    """From host memory to the device, and back."""
    observer, transfers = all_of(observers.lanes), all_of(observers.transfers)

    def mover(
        name: str, source: DeviceArena | HostArena, dest: DeviceArena | HostArena, priority: int
    ) -> Mover:
        lane = make_lane(name, arena.device, observer, priority)
        copier = make_copier(source.tensor, dest.tensor, arena.layout)
        ends, launcher = (source.name, dest.name), make_launcher(lane, observer)
        return make_mover(ends, copier, lane, launcher, checks, transfers)

    return mover("load", host_arena, arena, _LOAD_PRIORITY), mover("save", arena, host_arena, 0)


def _open_both(
    config: Config, scope: Scope, group: KvGroup, reports: KvReports | None
) -> tuple[Sequence[BlockStore], Sequence[BlockStore]]:
    """The stores of blocks, and those of states, if there are any: a space of its own in each store, with
    1 / `_STATES_SHARE` of the disk."""
    digest, disk, states = scope.digest(), config.offload, group.states
    if states is None:
        space = Space(digest, group.layout.block_bytes)
        return _open_stores(config, space, disk.ssd_dir, disk.ssd_gib, reports), ()
    of_states = blake2b(states.fingerprint, key=digest, digest_size=SCOPE_BYTES).digest()
    state_gib = disk.ssd_gib / _STATES_SHARE
    folder = None if disk.ssd_dir is None else str(Path(disk.ssd_dir) / STATES_FOLDER)
    with contextlib.ExitStack() as undo:
        spaces = Space(digest, group.layout.block_bytes), Space(of_states, states.block_bytes)
        blocks = _open_stores(config, spaces[0], disk.ssd_dir, disk.ssd_gib - state_gib, reports)
        for store in blocks:
            undo.callback(store.close)
        state_reports = None if reports is None else StateReports(reports)
        found = blocks, _open_stores(config, spaces[1], folder, state_gib, state_reports)
        undo.pop_all()
    return found


def _open_stores(
    config: Config, space: Space, ssd_dir: str | None, ssd_gib: float, observer: PoolObserver | None
) -> Sequence[BlockStore]:
    """Stores colder than host memory, hottest first. To add one, write a line here and a file with its
    store. `observer`: of blocks that only this process can reach."""
    offload, stores = config.offload, list[BlockStore]()
    with contextlib.ExitStack() as undo:  # a directory stays locked while its store is open
        if ssd_dir is not None:
            num_bytes = int(ssd_gib * GIB)
            stores.append(open_ssd(ssd_dir, num_bytes, space, offload.eviction, None, observer))
            undo.callback(stores[-1].close)
        if offload.remote is not None:
            stores.append(open_remote(offload.remote, space, offload.remote_timeout_s))
        undo.pop_all()
    return stores


def open_cold(
    store: BlockStore,
    arena: HostArena,
    limits: ColdLimits | None = None,
    observers: Observers = _UNOBSERVED,
    num_lanes: int = COLD_LANES,
) -> ColdTier:
    """`store` on its own lanes, behind the host memory of `arena`. `num_lanes`: for reads, and as many for
    writes."""
    lanes = cpu_lanes(store, all_of(observers.lanes), all_of(observers.transfers), num_lanes)
    return ColdTier(store, lanes, arena.view, (arena.name, arena.layout.num_layers), limits or ColdLimits())
