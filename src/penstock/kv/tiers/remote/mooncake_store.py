"""A `BlockStore` in a Mooncake store, shared by all engines that name its master. Owns names, deadlines and what the library's codes mean;
the library itself runs in a process of its own (`mooncake_program`), which `mooncake_client` starts, asks and kills.

One block is one value, its header before its bytes, under `penstock:FORMAT:SPACE:KEY`, in the memory of whichever nodes lend some to the
store. The master forgets blocks when that is full, and those of a node that is gone.

Values pass through memory shared with that process: one copy more than into the host slot itself, for which host slots are never in the
library's hands. It lets every machine that can reach its port read and write what is registered with it, and may touch a buffer after the
call that named it has failed; so a block is checked where it lies in its slot, after that copy.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.errors import StoreFailed
from penstock.kv.tiers.envelope import FORMAT, HEADER_BYTES
from penstock.kv.tiers.remote.mooncake_client import Clients, MooncakeClient
from penstock.kv.tiers.remote.values import fill, place
from penstock.kv.tiers.store import Outcome, Space, StoreUsage

if TYPE_CHECKING:
    from penstock.kv.tiers.remote.mooncake import MooncakeAddress

log = logging.getLogger(__name__)

_RESET_S = 60.0  # the master looks at every name it knows

# The library's codes, as far as they mean something special to us. Those of the master as a whole are a range.
_NO_ROOM = (-200, -1700)  # no memory to be had; the tenant's share is used up
_BAD_LENGTH = -600  # or another argument that it did not like
_ABSENT = (-703, -704, -707)  # being written; not there; forgotten while it was read
_THERE_ALREADY = -705
_MASTER = range(-1099, -899)  # it does not answer, or not yet


class MooncakeStore:
    """Every call ends within `timeout_s`; `reset` alone may take as long as the master needs."""

    name = "remote"
    local = False

    def __init__(self, address: MooncakeAddress, space: Space, timeout_s: float) -> None:
        self._address = address
        self._space = space
        self._timeout_s = timeout_s
        self._prefix = f"penstock:{FORMAT}:{space.digest.hex()}:"
        self._value_bytes = HEADER_BYTES + space.block_bytes
        self._clients = Clients(address, self._value_bytes, timeout_s)
        self._told_full = False

    def __repr__(self) -> str:
        return f"<MooncakeStore {self._address.host}:{self._address.port} over {self._address.protocol}>"

    # ---------------------------------------------------------------------------------------------------------------- blocks

    def find(self, keys: Sequence[bytes]) -> int:
        if not keys:
            return 0
        until = self._until()
        codes = _checked(self._clients.connected(until).ask("exist", self._names(keys), until))
        return next((place for place, code in enumerate(codes) if code != 1), len(keys))

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        until = self._until()
        client = self._clients.connected(until)
        codes: list[int] = []
        outcomes: list[Outcome] = []
        for some in _runs(len(keys), client.lane_values):
            with client.lane(until) as lane:
                answer = lane.exchange("read", self._names(keys[some]), until)
                outcomes += map(self._placed, answer, lane.values, keys[some], into[some])
            codes += answer
        self._settle(client, keys, _checked(codes), outcomes, until)
        return _some_worked(outcomes)

    def _settle(self, client: MooncakeClient, keys: Sequence[bytes], codes: Sequence[int], outcomes: list[Outcome], until: float) -> None:
        """What the library refuses to read may be too long; what is wrong is removed."""
        refused = [place for place, code in enumerate(codes) if code == _BAD_LENGTH]
        if refused:
            lengths = client.ask("size", self._names([keys[place] for place in refused]), until)
            for place, length in zip(refused, _checked(lengths), strict=True):
                outcomes[place] = Outcome.CORRUPT if length > self._value_bytes else Outcome.FAILED
        bad = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.CORRUPT]
        if bad:
            with contextlib.suppress(StoreFailed):  # it stays, and the next one to read it tries again
                client.ask("remove", self._names(bad), until)

    def _placed(self, code: int, value: memoryview, key: bytes, slot: memoryview) -> Outcome:
        """`code`: the length, or why there is none."""
        if code in _ABSENT:
            return Outcome.MISSING
        if code < 0:
            return Outcome.FAILED
        return place(value[:code], key, self._space.digest, slot)

    def write(self, keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]) -> list[Outcome]:
        """What is there already is left as it is."""
        until = self._until()
        client = self._clients.connected(until)
        codes: list[int] = []
        for some in _runs(len(keys), client.lane_values):
            with client.lane(until) as lane:
                for value, key, block in zip(lane.values, keys[some], blocks[some], strict=False):
                    fill(value, key, self._space.digest, block)
                codes += lane.exchange("write", self._names(keys[some]), until)
        return _some_worked([self._written(code) for code in _checked(codes)])

    def _written(self, code: int) -> Outcome:
        if code in _NO_ROOM:
            if not self._told_full:
                log.warning("the Mooncake store has no room: no node lends it memory, or not enough")
                self._told_full = True
            return Outcome.FULL
        return Outcome.DONE if code in (0, _THERE_ALREADY) else Outcome.FAILED

    # ------------------------------------------------------------------------------------------------------------- the whole

    def persist(self) -> None:
        """It outlives this engine in the memory of others; more is not to be had."""

    def probe(self) -> None:
        """The master must answer; which nodes do is seen when blocks of theirs are asked for."""
        until = self._until()
        _checked(self._clients.connected(until).ask("exist", [f"{self._prefix}probe"], until))

    def reset(self) -> int:
        client = self._clients.connected(self._until())
        return _checked(client.ask("clear", [f"^{self._prefix}.*"], time.monotonic() + _RESET_S))[0]

    def usage(self) -> StoreUsage:
        """Others write there, too, and the master forgets: nobody counts but it."""
        return StoreUsage(0)

    def close(self) -> None:
        self._clients.close()

    # ---------------------------------------------------------------------------------------------------------------- inside

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]

    def _until(self) -> float:
        return time.monotonic() + self._timeout_s


def _checked(codes: Sequence[int]) -> list[int]:
    """Raises StoreFailed where the master, and not something about one block, is the trouble."""
    for code in codes:
        if code in _MASTER:
            raise StoreFailed(f"Mooncake's master did not answer ({code})")
    return list(codes)


def _some_worked(outcomes: list[Outcome]) -> list[Outcome]:
    """Where every single block failed it is the store that did."""
    if outcomes and all(outcome is Outcome.FAILED for outcome in outcomes):
        raise StoreFailed("Mooncake could not move any of the blocks: their nodes do not answer")
    return outcomes


def _runs(num: int, at_once: int) -> Iterator[slice]:
    for first in range(0, num, at_once):
        yield slice(first, min(num, first + at_once))
