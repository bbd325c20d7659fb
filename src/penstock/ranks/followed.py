"""Rank 0, as the other ranks see it. Owns the connection to it and the queue of its messages.

If rank 0 ends, or says nothing for a time, this process ends at once: nothing that it has is of use alone.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from torch import Tensor

from penstock.contract import Adapter
from penstock.engine.execution.ahead import Drafts, Guesser
from penstock.engine.execution.passes import Pass, StepLimits
from penstock.errors import ModelError, RankLost
from penstock.kv.build import Moves
from penstock.kv.memory import BlockLayout
from penstock.models.adapters import ReadAdapter
from penstock.models.lora import AdapterWeights
from penstock.models.model import LayerOps, ModelConfig
from penstock.models.progress import Progress
from penstock.models.split import SplitOps
from penstock.ranks.collectives import Collectives
from penstock.ranks.passes import FollowedSteps, SharedDrafts, SharedDraws
from penstock.ranks.wire import MessageKind, RankMessage, RankWire

log = logging.getLogger(__name__)

_BEATS = 4  # in the time after which a silent rank counts as lost


def tell_failed(wire: RankWire, error: BaseException) -> None:
    """A rank that only waited for another one does not name it: rank 0 knows more."""
    text, is_other = f"{type(error).__name__}: {error}", isinstance(error, RankLost)
    wire.send(MessageKind.FAILED, {"error": text, "is_other": is_other})


class FollowedAdapters:
    """The adapters that rank 0 has loaded, by digest, from its order until it drops them as often. `load` is
    for any thread."""

    def __init__(self, read: ReadAdapter) -> None:
        self._read, self._lock = read, threading.Lock()
        self._weights = dict[str, AdapterWeights]()
        self._num_orders = Counter[str]()

    def load(self, directory: str, digest: str) -> None:
        with self._lock:
            self._num_orders[digest] += 1
        files = self._read(Path(directory))
        if files.digest != digest:
            raise ModelError("the adapter there is another one than on rank 0")
        with self._lock:
            self._weights.setdefault(digest, files.weights)

    def drop(self, digest: str) -> None:
        with self._lock:
            self._num_orders[digest] -= 1
            if not self._num_orders[digest]:
                del self._num_orders[digest]
                self._weights.pop(digest, None)

    def weights_of(self, adapter: Adapter) -> AdapterWeights:
        return self._weights[adapter.digest]


class Followed:
    """`Ranks` on a rank that is not 0. `next` is for one thread, `copied` for any."""

    def __init__(
        self, wire: RankWire, together: Collectives, timeout_s: float, files: tuple[int, int]
    ) -> None:
        """`files`: of the host memory that rank 0 may want to share; -1: none."""
        self.size = together.split.size
        self.together = together
        self.limits: StepLimits | None = None  # set by `num_blocks`, as is the next one
        self.host_slots = [0, 0]  # for blocks, and for kept states
        self.host_files = list(files)  # -1: host memory is for this rank alone
        self.loaded: FollowedAdapters | None = None  # set by `adapters`
        self._wire, self._timeout_s = wire, timeout_s
        self._messages = Queue[RankMessage]()
        self._over = threading.Event()
        wire.set_timeout(timeout_s)
        threading.Thread(target=self._listen, name="rank 0", daemon=True).start()
        threading.Thread(target=self._beat, name="rank-beats", daemon=True).start()

    # ------------------------------------------------------------------------------------------- as `Ranks`

    def ops(self, ops: LayerOps) -> LayerOps:
        return SplitOps(ops, self.together.split, self.together)

    def adapters(self, read: ReadAdapter) -> tuple[ReadAdapter, Callable[[str], None]]:
        """From now on this rank can read those that rank 0 orders."""
        self.loaded = FollowedAdapters(read)
        return read, self.loaded.drop

    def num_blocks(self, digest: bytes, num_blocks: int, progress: Progress) -> int:
        """Waits until rank 0 has chosen all sizes."""
        self._wire.send(MessageKind.READY, {"digest": digest.hex(), "num_blocks": num_blocks})
        while (message := self._messages.get()).kind is MessageKind.DROP:
            pass  # of one that was refused: rank 0 is about to end
        if message.kind is MessageKind.END:  # rank 0 could not be built, and says why
            raise SystemExit(1)
        if message.kind is not MessageKind.BEGIN:
            raise RankLost(f"rank 0 sent {message.kind.name} before the sizes of steps")
        found = message.fields
        self.limits, self.host_slots = StepLimits(**found["limits"]), found["host_slots"]
        shared = zip(self.host_files, found["shares_host"], strict=True)
        self.host_files = [file if is_shared else -1 for file, is_shared in shared]
        return self.limits.padding_slot  # the slot behind all others

    def steps(self, limits: StepLimits, hosts: object, tokens: tuple[Tensor, ...]) -> Pass:
        return FollowedSteps(self.together, tokens, limits.num_ahead > 0)

    def drafts(self, guesser: Guesser, draws: object, *given: Any) -> Drafts:
        return SharedDrafts(guesser, SharedDraws(None, self.together), *given)

    def moves(self, dims: ModelConfig, stored: BlockLayout, states: object) -> Moves:
        return Moves()

    def wait_built(self) -> None:
        """Tells rank 0 that this one is."""
        self._wire.send(MessageKind.READY)

    def watch(self, lost: Callable[[RankLost], None]) -> None:
        """A lost rank 0 ends this process."""

    def close(self) -> None:
        self._over.set()
        self._wire.close()

    # --------------------------------------------------------------------------------------------- messages

    def next(self, timeout_s: float | None) -> RankMessage | None:
        """Block until rank 0 says something. None: it did not within `timeout_s`."""
        try:
            return self._messages.get(timeout=timeout_s)
        except Empty:
            return None

    def copied(self, number: int, error: str) -> None:
        self._wire.send(MessageKind.COPIED, {"number": number, "error": error})

    def failed(self, error: BaseException) -> None:
        """This rank cannot go on."""
        tell_failed(self._wire, error)

    def _listen(self) -> None:
        try:
            while True:
                message = self._wire.receive()
                if message.kind is MessageKind.ADAPTER:  # reading files holds up no step
                    threading.Thread(target=self._load, args=(message,), name="adapter", daemon=True).start()
                elif message.kind is not MessageKind.BEAT:
                    self._messages.put(message)
                if message.kind is MessageKind.END:
                    return
        except TimeoutError:
            self._end(f"rank 0 did not answer for {self._timeout_s:g} s")
        except Exception:
            self._end("rank 0 has ended")

    def _load(self, message: RankMessage) -> None:
        asked, error = message.fields, ""
        assert self.loaded is not None  # it was there before this rank was ready
        try:
            self.loaded.load(asked["directory"], asked["digest"])
        except Exception as raised:
            error = str(raised)
        self.copied(asked["number"], error)

    def _beat(self) -> None:
        while not self._over.wait(self._timeout_s / _BEATS):
            try:
                self._wire.send(MessageKind.BEAT)
            except OSError:
                self._end("rank 0 has ended")

    def _end(self, why: str) -> None:
        if not self._over.is_set():
            log.warning("%s, and so does this rank", why)
            logging.shutdown()
            os._exit(1)
