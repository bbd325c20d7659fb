"""A rank other than 0: launches the steps and copies that rank 0 announces, and decides nothing. Owns the
order in which it does both. It is a process: `python -m penstock.engine.follower SOCKET BLOCKS STATES`."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from penstock import __version__
from penstock.config import Config
from penstock.contract import Access, Fence, Mode
from penstock.engine.build import FollowerParts, build_follower
from penstock.engine.execution.running_step import RunningStep
from penstock.errors import ConfigError, InvariantBroken
from penstock.kv.memory import DeviceArena, HostArena
from penstock.kv.transfer import Copier, make_copier
from penstock.lanes.cuda import as_current, make_lane, make_launcher
from penstock.lanes.lane import Lane
from penstock.models.hub import fetched
from penstock.models.model import Split
from penstock.models.progress import silent
from penstock.observe import all_of
from penstock.ranks.collectives import Collectives, file_store, process_group
from penstock.ranks.copies import DIRECTIONS
from penstock.ranks.followed import Followed, tell_failed
from penstock.ranks.launched import check_supported, launched_for
from penstock.ranks.start import JOIN_S, met
from penstock.ranks.wire import CopyOrder, MessageKind, RankWire, config_fields, config_of, step_of

log = logging.getLogger(__name__)

_LOOK_S = 0.02  # between two looks at the step that runs, while rank 0 says nothing
_END_S = 5.0  # for lanes


class CopyLane:
    """One direction between the arenas. Each copy waits for all steps that were launched before it, and for
    the copies that rank 0 has heard to be over. `over` is a fence behind those of this direction."""

    def __init__(self, parts: FollowerParts, direction: str, ranks: Followed) -> None:
        assert parts.host_arena is not None
        source: DeviceArena | HostArena = parts.host_arena
        dest: DeviceArena | HostArena = parts.arena
        self._source, self._dest = (source, dest) if direction == "load" else (dest, source)
        observer = all_of(parts.observers.lanes)
        self._lane = make_lane(direction, parts.arena.device, observer)
        self._launcher = make_launcher(self._lane, observer)
        self._copier: Copier = make_copier(self._source.tensor, self._dest.tensor, parts.arena.layout)
        self._ranks = ranks
        self.over: Fence | None = None

    def submit(self, order: CopyOrder, after: Sequence[Fence]) -> None:
        self._launcher.submit(partial(self._run, order, after), label="launch a copy")

    def close(self) -> None:
        self._launcher.close(_END_S)
        self._lane.close(_END_S)

    def _run(self, order: CopyOrder, after: Sequence[Fence]) -> None:
        """On the launcher. Ends when the bytes have landed."""
        try:
            for fence in after:
                self._lane.wait(fence)
            if len(order.sources):
                self._copy(order)
            else:  # rank 0 waits for the steps alone
                self._lane.record().wait_passed()
            error = ""
        except InvariantBroken as broken:  # a defect: the engine stops
            self._ranks.failed(broken)
            return
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        self.over = self._lane.record()  # before rank 0 can reuse either end
        self._ranks.copied(order.number, error)

    def _copy(self, order: CopyOrder) -> None:
        accesses = (
            Access(self._source.name, order.sources, order.layers, Mode.READ),
            Access(self._dest.name, order.dests, order.layers, Mode.WRITE),
        )
        copy = partial(self._copier.copy, order.sources, order.dests, order.layers)
        self._lane.submit(copy, accesses, label="copy").wait_done()


class Follower:
    """Runs what rank 0 says until it says END. Like rank 0 it launches a step while the one before runs."""

    def __init__(self, parts: FollowerParts, ranks: Followed) -> None:
        self._parts, self._ranks = parts, ranks
        self._running: RunningStep | None = None
        directions = DIRECTIONS if parts.host_arena is not None else ()
        self._copies = [CopyLane(parts, direction, ranks) for direction in directions]

    @property
    def _lane(self) -> Lane:
        return self._parts.lanes[0]

    def run(self) -> None:
        with as_current(self._lane):
            while (message := self._ranks.next(None if self._running is None else _LOOK_S)) is None or (
                message.kind is not MessageKind.END
            ):
                if message is None:
                    self._look()
                elif message.kind is MessageKind.STEP:
                    for fence in self._copied():
                        self._lane.wait(fence)
                    launched = self._parts.executor.launch(step_of(message.words))
                    self._read()
                    self._running = launched
                elif message.kind is MessageKind.DROP:
                    assert self._ranks.loaded is not None
                    self._ranks.loaded.drop(message.fields["digest"])
                elif message.kind is MessageKind.COPY:
                    order = CopyOrder.of(message.words)
                    self._copies[order.direction].submit(order, (self._lane.record(), *self._copied()))
            self._read()
        self._close()

    def _copied(self) -> list[Fence]:
        """Behind the copies that are over, whose ends rank 0 may use again."""
        return [copies.over for copies in self._copies if copies.over is not None]

    def _look(self) -> None:
        """A step that failed here is known at once: the other ranks wait for its collectives."""
        if self._running is not None and self._running.fence.passed():
            self._read()

    def _read(self) -> None:
        running, self._running = self._running, None
        if running is not None and (error := running.wait_error()) is not None:
            raise error

    def _close(self) -> None:
        for copies in self._copies:
            copies.close()
        for lane in self._parts.lanes:
            lane.close(_END_S)
        for arena in (self._parts.host_arena, self._parts.states):
            if arena is not None:
                arena.close()


def check_alike(config: Config, other: Config) -> None:
    """Raises ConfigError if rank 0 has other flags. Paths of models may differ: what counts is their content,
    which is compared later."""
    own, theirs = (
        config_fields(replace(one, source=replace(one.source, model=""))) for one in (config, other)
    )
    for part, values in own.items():
        for name, value in values.items():
            if theirs[part][name] != value:
                raise ConfigError(f"rank 0 has {name}={theirs[part][name]!r}, this rank {value!r}")


def _joined(
    wire: RankWire, setup: Mapping[str, Any], store: Any, config: Config, files: tuple[int, int]
) -> Followed:
    """The channels to the other ranks."""
    split, timeout_s = Split(setup["rank"], config.ranks.size), config.ranks.timeout_s
    group = process_group(store, split, timeout_s, setup["backend"], setup["host"])
    # the end of a rank is rank 0's to explain
    return Followed(wire, Collectives(group, split, lambda: None), timeout_s, files)


def follow(
    wire: RankWire, store: Any = None, own: Config | None = None, files: tuple[int, int] = (-1, -1)
) -> None:
    """Until rank 0 ends it. `own`: the flags of this rank, if a launcher gave it some. `files`: of the host
    memory that it shares with rank 0, for blocks and for kept states."""
    setup = wire.receive().fields
    try:
        if setup["version"] != __version__:
            raise ConfigError(f"rank 0 is penstock {setup['version']}, this rank {__version__}")
        config = config_of(setup["config"])
        if own is not None:
            check_alike(own, config)
            config = replace(config, source=own.source)
        wire.send(MessageKind.READY)
        store = store or file_store(setup["store"], config.ranks.size)
        ranks = _joined(wire, setup, store, config, files)
        follower = Follower(build_follower(config, ranks), ranks)
        ranks.wait_built()
        follower.run()
        ranks.close()
    except Exception as error:
        tell_failed(wire, error)
        raise


def follow_launcher(config: Config) -> None:
    """As a rank other than 0 that a launcher has started, until rank 0 ends it."""
    check_supported(config)
    found = launched_for(config, os.environ)
    assert found is not None
    config = fetched(config, silent)
    store, wire = met(found.rank, found.size)
    follow(wire, store, config)


def main() -> None:
    """Ends without waiting for threads that are left."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them to all processes: rank 0 decides
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    code = 1
    try:
        wire = RankWire(socket.socket(fileno=int(sys.argv[1])), JOIN_S)
        wire.send(MessageKind.JOIN)
        follow(wire, files=(int(sys.argv[2]), int(sys.argv[3])))
        code = 0
    except Exception as error:
        log.warning("this rank cannot go on: %s", error)
    finally:
        logging.shutdown()
        os._exit(code)


if __name__ == "__main__":
    main()
