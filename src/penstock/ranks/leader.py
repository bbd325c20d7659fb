"""The other ranks, as rank 0 sees them: started or met, told what to do, watched. Owns their connections, and
their processes if it started them.

A rank that ends, or says nothing for `timeout_s`, ends the engine: the processes that are left are killed, so
that no collective waits for them, and `watch` is told why.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import Any

from penstock.contract import StepPlan
from penstock.errors import ConfigError, RankLost, TransferFailed
from penstock.kv.transfer import Layers, Slots
from penstock.models.progress import Progress
from penstock.ranks.wire import CopyOrder, MessageKind, RankMessage, RankWire, Words, step_words

log = logging.getLogger(__name__)

_BEATS = 4  # in the time after which a silent rank counts as lost
_CAUSE_S = 3.0  # in which the end of a process is seen after a collective has failed
_END_S = 5.0  # for processes to end by themselves


@dataclass(slots=True)
class Peer:
    """One other rank. `process`: None if another program started it."""

    rank: int
    wire: RankWire
    process: subprocess.Popen[bytes] | None = None
    files: tuple[int, int] = (-1, -1)  # of its host memory for blocks and for kept states, if that is shared
    answers: Queue[RankMessage] = field(default_factory=Queue)  # READY

    def __str__(self) -> str:
        return f"rank {self.rank}" + ("" if self.process is None else f" (process {self.process.pid})")

    def ending(self) -> str:
        """How it ended, if that is known."""
        if self.process is None:
            return "has closed its connection"
        try:
            code = self.process.wait(_CAUSE_S)
        except subprocess.TimeoutExpired:
            return "has closed its connection"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class Copying:
    """A copy that the other ranks were asked for, or an adapter."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._left = set(ranks)
        self._error: str | None = None
        self._over = threading.Event()
        if not ranks:
            self._over.set()

    def ended(self, rank: int, error: str) -> None:
        self._left.discard(rank)
        if error:
            self._error = f"rank {rank}: {error}"
        if not self._left:
            self._over.set()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def lost(self, error: RankLost) -> None:
        self._error = str(error)
        self._over.set()

    def wait(self) -> None:
        self._over.wait()  # a rank that does not answer is lost, which ends it
        if self._error is not None:
            raise TransferFailed(self._error)


class Leader:
    """Called from the engine thread, from lanes and launchers. Nothing here waits for another rank, except at
    the start, in `Copying.wait` and in `close`."""

    def __init__(self, peers: Sequence[Peer], timeout_s: float) -> None:
        self.peers = peers
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._lost: RankLost | None = None
        self._is_lost, self._closing = threading.Event(), threading.Event()
        self._watchers = list[Callable[[RankLost], None]]()
        self._copies = dict[int, Copying]()
        self._num_copies = 0
        for peer in peers:
            peer.wire.set_timeout(timeout_s)
            threading.Thread(target=self._listen, args=(peer,), name=str(peer), daemon=True).start()
        threading.Thread(target=self._beat, name="rank-beats", daemon=True).start()

    # ------------------------------------------------------------------------------------------------ start

    def setup(self, common: Mapping[str, Any]) -> None:
        for peer in self.peers:
            self._send(peer, MessageKind.SETUP, {**common, "rank": peer.rank})

    def ready(self, digest: bytes, num_blocks: int, progress: Progress) -> int:
        """Wait until every rank has loaded the same model. Returns the number of blocks that all have room
        for."""
        for done, peer in enumerate(self.peers):
            progress("waiting for other ranks", done, len(self.peers))
            found = self._answer(peer).fields
            if found["digest"] != digest.hex():
                raise ConfigError(f"{peer} has other weights under the name of this model")
            num_blocks = min(num_blocks, int(found["num_blocks"]))
        progress("waiting for other ranks", len(self.peers), len(self.peers))
        return num_blocks

    def begin(self, sizes: dict[str, Any]) -> None:
        for peer in self.peers:
            self._send(peer, MessageKind.BEGIN, sizes)

    def wait_each(self) -> None:
        """Until every rank has said that it is ready for what comes next. Raises RankLost."""
        for peer in self.peers:
            self._answer(peer)

    def _answer(self, peer: Peer) -> RankMessage:
        while True:
            try:
                return peer.answers.get(timeout=0.1)
            except Empty:
                if self._lost is not None:
                    raise self._lost from None

    # ---------------------------------------------------------------------------------------- while running

    def announce(self, plan: StepPlan) -> None:
        words = step_words(plan)
        for peer in self.peers:
            self._send(peer, MessageKind.STEP, words)

    def order_copy(self, direction: int, source_slots: Slots, dest_slots: Slots, layers: Layers) -> Copying:
        def words(number: int) -> Words:
            return CopyOrder(number, direction, layers, source_slots, dest_slots).words()

        return self._ordered(MessageKind.COPY, words)

    def order_adapter(self, directory: str, digest: str) -> Copying:
        """They read the same adapter from the same directory."""
        asked = {"directory": directory, "digest": digest}
        return self._ordered(MessageKind.ADAPTER, lambda number: {"number": number, **asked})

    def drop_adapter(self, digest: str) -> None:
        """After the last step that needs it, once for each order."""
        with contextlib.suppress(RankLost):
            for peer in self.peers:
                self._send(peer, MessageKind.DROP, {"digest": digest})

    def _ordered(self, kind: MessageKind, payload: Callable[[int], Words | Mapping[str, Any]]) -> Copying:
        copying = Copying([peer.rank for peer in self.peers])
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._num_copies = number = (self._num_copies + 1) % (1 << 31)
            self._copies[number] = copying
        message = payload(number)
        for peer in self.peers:
            self._send(peer, kind, message)
        return copying

    def watch(self, lost: Callable[[RankLost], None]) -> None:
        """`lost` is called once, from another thread."""
        with self._lock:
            self._watchers.append(lost)
            error = self._lost
        if error is not None:
            lost(error)

    def why(self) -> RankLost | None:
        """Why a collective failed: it may fail before the end of a process is seen."""
        self._is_lost.wait(_CAUSE_S)
        return self._lost

    def lose(self, error: RankLost) -> None:
        with self._lock:
            if self._lost is not None or self._closing.is_set():
                return
            self._lost = error
            copies, watchers = list(self._copies.values()), list(self._watchers)
        self._is_lost.set()
        log.error("%s", error)
        self._kill()
        for copying in copies:
            copying.lost(error)
        for watcher in watchers:
            watcher(error)

    # -------------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Idempotent. Bounded in time; what does not end by itself is killed."""
        with self._lock:
            self._closing.set()
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.wire.send(MessageKind.END)
        by_s = time.monotonic() + _END_S
        for peer in self.peers:
            if peer.process is not None:
                try:
                    peer.process.wait(max(0.0, by_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    log.warning("%s did not end, and is killed", peer)
        self._kill()

    def _kill(self) -> None:
        for peer in self.peers:
            if peer.process is not None and peer.process.poll() is None:
                peer.process.kill()
            peer.wire.close()
        for peer in self.peers:
            if peer.process is not None:
                peer.process.wait()

    # --------------------------------------------------------------------------------------------- watching

    def _send(self, peer: Peer, kind: MessageKind, payload: Any) -> None:
        if self._lost is not None:
            raise self._lost
        try:
            peer.wire.send(kind, payload)
        except (OSError, EOFError) as error:
            self._gone(peer, error)
            raise self._lost or RankLost(f"{peer} is closed") from error

    def _listen(self, peer: Peer) -> None:
        """On a thread of the peer's own."""
        try:
            while True:
                message = peer.wire.receive()
                if message.kind is MessageKind.READY:
                    peer.answers.put(message)
                elif message.kind is MessageKind.COPIED:
                    self._copied(peer, message)
                elif message.kind is MessageKind.FAILED:
                    found = message.fields
                    if found["is_other"]:  # it waited for a rank that is gone: that one is to be named
                        self._is_lost.wait(_CAUSE_S)
                    self.lose(RankLost(f"{peer} failed: {found['error']}"))
        except Exception as error:
            self._gone(peer, error)

    def _copied(self, peer: Peer, message: RankMessage) -> None:
        found = message.fields
        with self._lock:
            copying = self._copies[found["number"]]
            copying.ended(peer.rank, found["error"])
            if copying.is_over:
                del self._copies[found["number"]]

    def _gone(self, peer: Peer, error: BaseException) -> None:
        if self._lost is not None or self._closing.is_set():
            return
        if isinstance(error, TimeoutError):
            self.lose(RankLost(f"{peer} did not answer for {self._timeout_s:g} s"))
        else:
            self.lose(RankLost(f"{peer} {peer.ending()}"))

    def _beat(self) -> None:
        while not self._closing.wait(self._timeout_s / _BEATS) and self._lost is None:
            for peer in self.peers:
                try:
                    peer.wire.send(MessageKind.BEAT)
                except (OSError, EOFError) as error:
                    self._gone(peer, error)
