"""How ranks come together: rank 0 starts the others on its own machine, or meets those that torchrun started.
Owns the meeting, and what several ranks change about an engine."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

import penstock
from penstock import __version__
from penstock.config import Config
from penstock.engine.execution.ahead import Drafts, Guesser
from penstock.engine.execution.draws import Draws
from penstock.engine.execution.passes import Pass, StepLimits
from penstock.errors import ConfigError, ModelError, RankLost, TransferFailed
from penstock.kv.build import Moves
from penstock.kv.memory import BlockLayout, HostArena, StateLayout
from penstock.kv.tiers.store import BlockStore
from penstock.kv.transfer import Mover
from penstock.models.adapters import AdapterFiles, ReadAdapter
from penstock.models.model import LayerOps, ModelConfig, Split
from penstock.models.progress import Progress
from penstock.models.split import RankHeads, SplitOps
from penstock.ranks.collectives import Collectives, file_store, launched_store, process_group
from penstock.ranks.copies import LedCopier, LedMover
from penstock.ranks.launched import check_supported, launched_for
from penstock.ranks.leader import Leader, Peer
from penstock.ranks.parts import HostParts, PartedStore, kv_places, state_places
from penstock.ranks.passes import LedSteps, SharedDrafts, SharedDraws
from penstock.ranks.wire import MessageKind, RankWire, config_fields

FOLLOWER = "penstock.engine.follower"  # the module that the other ranks run
JOIN_S = 120.0  # for a process to start, and to import torch
_NONE = np.empty(0, np.int64)
_LOOPBACK = "127.0.0.1"
_CONTROL = "penstock/control"  # the name of rank 0's address in torchrun's store
Hosts = tuple[HostArena | None, HostArena | None]

# ---------------------------------------------------------------------------------------- what ranks change


class Ranks(Protocol):
    """What the number of ranks changes about an engine."""

    size: int

    def ops(self, ops: LayerOps) -> LayerOps: ...

    def adapters(self, read: ReadAdapter) -> tuple[ReadAdapter, Callable[[str], None]]:
        """`read` on every rank, and what ends the use of one that was read, by its digest."""

    def num_blocks(self, digest: bytes, num_blocks: int, progress: Progress) -> int:
        """Blocks that every rank has room for, once all have loaded the model."""

    def moves(self, dims: ModelConfig, stored: BlockLayout, states: StateLayout | None) -> Moves:
        """How blocks get to the device and back on all ranks. `dims`: of the whole model; `stored`: its
        blocks, and its kept states."""

    def wait_built(self) -> None:
        """Until every rank can run steps and copies."""

    def steps(self, limits: StepLimits, hosts: Hosts, tokens: tuple[Tensor, ...]) -> Pass | None:
        """The pass behind the sampling. `hosts`: of blocks, and of kept states. `tokens`: the device's last
        tokens, and what goes with them. From here on all ranks have the same sizes."""

    def drafts(self, guesser: Guesser, draws: Draws | None, pending: Tensor, block_tokens: int) -> Drafts:
        """What makes drafts on every rank. `draws`: on rank 0."""

    def watch(self, lost: Callable[[RankLost], None]) -> None:
        """`lost` is called once, from any thread, when a rank is lost."""

    def close(self) -> None:
        """Idempotent, bounded in time."""


class Alone:
    """One rank: nothing changes."""

    size = 1

    def moves(self, dims: ModelConfig, stored: BlockLayout, states: StateLayout | None) -> Moves:
        return Moves()

    def wait_built(self) -> None:
        pass

    def ops(self, ops: LayerOps) -> LayerOps:
        return ops

    def adapters(self, read: ReadAdapter) -> tuple[ReadAdapter, Callable[[str], None]]:
        return read, lambda digest: None

    def num_blocks(self, digest: bytes, num_blocks: int, progress: Progress) -> int:
        return num_blocks

    def steps(self, limits: StepLimits, hosts: Hosts, tokens: tuple[Tensor, ...]) -> Pass | None:
        return None

    def drafts(self, guesser: Guesser, draws: Draws | None, *given: Any) -> Drafts:
        assert draws is not None
        return Drafts(guesser, draws, *given)

    def watch(self, lost: Callable[[RankLost], None]) -> None:
        pass

    def close(self) -> None:
        pass


class Led:
    """Rank 0 of several."""

    def __init__(self, leader: Leader, together: Collectives, undo: contextlib.ExitStack) -> None:
        """`undo`: what is removed at the end."""
        self.size = together.split.size
        self._leader, self._together, self._undo = leader, together, undo
        self._shares_host = [False, False]  # of blocks, and of kept states
        leader.watch(lambda error: together.abort())

    def ops(self, ops: LayerOps) -> LayerOps:
        return SplitOps(ops, self._together.split, self._together)

    def adapters(self, read: ReadAdapter) -> tuple[ReadAdapter, Callable[[str], None]]:
        def read_everywhere(directory: Path) -> AdapterFiles:
            files = read(directory)
            try:
                self._leader.order_adapter(os.path.abspath(directory), files.digest).wait()
            except TransferFailed as error:
                self._leader.drop_adapter(files.digest)
                raise ModelError(f"{directory}: {error}") from error
            return files

        return read_everywhere, self._leader.drop_adapter

    def num_blocks(self, digest: bytes, num_blocks: int, progress: Progress) -> int:
        return self._leader.ready(digest, num_blocks, progress)

    def moves(self, dims: ModelConfig, stored: BlockLayout, states: StateLayout | None) -> Moves:
        mover = partial(_led_mover, self._leader)
        return Moves(mover, False, stored, states, partial(self._through, dims, stored, states))

    def wait_built(self) -> None:
        self._leader.wait_each()

    def _through(
        self,
        dims: ModelConfig,
        stored: BlockLayout,
        states: StateLayout | None,
        store: BlockStore,
        arena: HostArena,
    ) -> BlockStore:
        """The host memory of other ranks becomes this one's, too."""
        splits, own = [Split(rank, self.size) for rank in range(self.size)], arena.layout
        is_kv = isinstance(own, BlockLayout)
        files = [peer.files[not is_kv] for peer in self._leader.peers]
        for file in files:
            os.ftruncate(file, arena.num_bytes)
        self._shares_host[not is_kv] = True
        if isinstance(own, BlockLayout):
            places = [kv_places(stored, own, RankHeads.of(dims, split).kv) for split in splits]
            return PartedStore(store, HostParts(arena, stored.block_bytes, places, files))
        assert dims.recurrence is not None and states is not None
        places = [state_places(dims.recurrence, split) for split in splits]
        parts = HostParts(arena, states.block_bytes, places, files)
        return PartedStore(store, parts, lambda: self._leader.order_copy(1, _NONE, _NONE, (0, 0)).wait())

    def steps(self, limits: StepLimits, hosts: Hosts, tokens: tuple[Tensor, ...]) -> Pass | None:
        host_slots = [0 if host is None else host.num_slots for host in hosts]
        sizes = {"host_slots": host_slots, "shares_host": self._shares_host}
        self._leader.begin({"limits": asdict(limits), **sizes})
        return LedSteps(self._together, tokens, limits.num_ahead > 0, self._leader)

    def drafts(self, guesser: Guesser, draws: Draws | None, *given: Any) -> Drafts:
        return SharedDrafts(guesser, SharedDraws(draws, self._together), *given)

    def watch(self, lost: Callable[[RankLost], None]) -> None:
        self._leader.watch(lost)

    def close(self) -> None:
        self._leader.close()
        self._undo.close()


def _led_mover(leader: Leader, arenas: Any, copier: Any, lane: Any, *more: Any) -> Mover:
    return LedMover(arenas, LedCopier(copier, lane.name, leader), lane, *more)


# -------------------------------------------------------------------------------------------------- meeting


def open_ranks(config: Config, num_devices: int, progress: Progress) -> Ranks:
    """On rank 0, before the model is loaded. `num_devices`: GPUs that are used; 0: the CPU."""
    check_supported(config)
    size = config.ranks.size
    if size == 1:
        return Alone()
    progress("starting other ranks", 0, size - 1)
    with contextlib.ExitStack() as undo:
        launched = launched_for(config, os.environ)
        if launched is not None and launched.rank:
            raise ConfigError(
                f"rank {launched.rank} of a launcher runs a command of penstock, as rank 0 does"
            )
        is_met = launched is not None
        if is_met and (config.offload.ssd_dir is not None or config.offload.remote is not None):
            raise ConfigError(
                "--kv-offload-ssd-dir and --kv-offload-remote need ranks that share memory with rank 0: "
                "leave torchrun out"
            )
        store, peers, where = _meet(config, undo) if is_met else _start(config, num_devices, undo)
        host = None if is_met else _LOOPBACK
        backend = "nccl" if num_devices >= size or (is_met and num_devices) else "gloo"
        common = {
            "version": __version__,
            "config": config_fields(config),
            "backend": backend,
            "host": host,
            "store": where,
        }
        leader = Leader(peers, config.ranks.timeout_s)
        undo.callback(leader.close)
        leader.setup(common)
        split = Split(0, size)
        leader.wait_each()  # those that do not fit have said so by then
        try:
            group = process_group(store, split, config.ranks.timeout_s, backend, host)
        except RuntimeError as error:
            raise leader.why() or RankLost(f"the ranks could not be connected: {error}") from error
        progress("starting other ranks", size - 1, size - 1)
        return Led(leader, Collectives(group, split, leader.why), undo.pop_all())


def share_devices(config: Config, num_devices: int) -> bool:
    """Whether this machine has fewer GPUs than the ranks that it starts."""
    return 0 < num_devices < config.ranks.size and launched_for(config, os.environ) is None


def _start(config: Config, num_devices: int, undo: contextlib.ExitStack) -> tuple[Any, list[Peer], str]:
    """Processes of this machine. Their sockets have no names, so that no other process can connect."""
    size = config.ranks.size
    directory = tempfile.mkdtemp(prefix="penstock-ranks-")  # of this user alone
    undo.callback(shutil.rmtree, directory, ignore_errors=True)
    peers = [_spawned(rank, num_devices, undo) for rank in range(1, size)]
    for peer in peers:
        _joined(peer)
    where = os.path.join(directory, "store")
    return file_store(where, size), peers, where


def visible_device(rank: int, num_devices: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which a process sees the GPU of its rank alone, as its first one."""
    if not num_devices:
        return {}
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = visible if visible != [""] else [str(device) for device in range(num_devices)]
    return {"CUDA_VISIBLE_DEVICES": names[rank % len(names)]}


def _spawned(rank: int, num_devices: int, undo: contextlib.ExitStack) -> Peer:
    ours, theirs = socket.socketpair()
    # of blocks, and of kept states; their sizes are set when they are known
    files = os.memfd_create("penstock-host-kv"), os.memfd_create("penstock-host-states")
    for file in files:
        undo.callback(os.close, file)
    # the same source as here, however this process has found it
    paths = filter(None, (str(Path(penstock.__file__).parents[1]), os.environ.get("PYTHONPATH")))
    environ = {**os.environ, **visible_device(rank, num_devices, os.environ)}
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-m", FOLLOWER, *map(str, (theirs.fileno(), *files))]
    with theirs:
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno(), *files], env=environ, stdin=subprocess.DEVNULL, stdout=2
        )
    undo.callback(_end, process)
    return Peer(rank, RankWire(ours, JOIN_S), process, files)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def _joined(peer: Peer) -> None:
    """Wait until it has started."""
    try:
        message = peer.wire.receive()
    except TimeoutError:
        raise RankLost(f"{peer} did not start within {JOIN_S:g} s") from None
    except (OSError, EOFError):
        raise RankLost(f"{peer} {peer.ending()} before it had started") from None
    if message.kind is not MessageKind.JOIN:
        raise RankLost(f"{peer} said {message.kind.name} before it had joined")


def _meet(config: Config, undo: contextlib.ExitStack) -> tuple[Any, list[Peer], str]:
    """Ranks that torchrun started. They find this one by the store of torchrun, and show the token that is
    there."""
    size, token = config.ranks.size, secrets.token_hex(16)
    store = launched_store(0, size)
    host = os.environ["MASTER_ADDR"]
    with socket.create_server((host, 0)) as listener:
        listener.settimeout(JOIN_S)
        address = {"host": host, "port": listener.getsockname()[1], "token": token}
        store.set(_CONTROL, json.dumps(address))
        peers = dict[int, Peer]()
        while len(peers) < size - 1:
            try:
                wire = RankWire(listener.accept()[0], JOIN_S)
            except TimeoutError:
                missing = sorted(set(range(1, size)) - set(peers))
                raise RankLost(f"ranks {missing} did not join within {JOIN_S:g} s") from None
            undo.callback(wire.close)
            rank = _rank_of(wire, token)
            if 0 < rank < size:
                peers[rank] = Peer(rank, wire)
    return store, [peers[rank] for rank in sorted(peers)], ""


def _rank_of(wire: RankWire, token: str) -> int:
    """0: what has connected is no rank of this engine."""
    try:
        found = wire.receive().fields
        is_ours = hmac.compare_digest(str(found.get("token", "")), token)
        return int(found["rank"]) if is_ours else 0
    except (OSError, EOFError, RankLost, ValueError, KeyError):
        return 0


def met(rank: int, size: int) -> tuple[Any, RankWire]:
    """On a rank that torchrun started: its store, and the connection to rank 0."""
    store = launched_store(rank, size)
    address = json.loads(store.get(_CONTROL))
    wire = RankWire(socket.create_connection((address["host"], address["port"]), JOIN_S), JOIN_S)
    wire.send(MessageKind.JOIN, {"rank": rank, "token": address["token"]})
    return store, wire
