"""Moves blocks between two arenas: launches transfers off the engine thread and says when they are over. Owns their order, not their slots.

    submit (engine thread, O(1))  ->  prepare, waits, copies (launcher)  ->  bytes (lane)  ->  settle (engine thread polls)

A transfer is in flight from `submit` on, launched or not: whoever drains sees both. Transfers of one mover are launched, and so end, in
the order of their submission.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.contract import Access, Arrival, Fence, Mode
from penstock.errors import DeadlineExceeded, InvariantBroken, TransferFailed
from penstock.kv.blocks.handles import Pin
from penstock.lanes.lane import POLL_MOST_S, Lane, Ticket, look_again_s
from penstock.observe import ByteGuard, ContentObserver

Slots = NDArray[np.int64]
Layers = tuple[int, int]

_NO_SLOTS: Slots = np.empty(0, np.int64)


class Group(NamedTuple):
    """A part of a transfer that is one copy: some of its blocks, some of their layers."""

    layers: Layers
    blocks: slice = slice(None)


class Settling(Protocol):
    """Something under way, as far as it concerns who waits for it."""

    @property
    def settled(self) -> bool: ...


class Copier(Protocol):
    """Copies blocks from one arena to another; called as an op of the transfer's lane."""

    def copy(self, source_slots: Slots, dest_slots: Slots, layers: Layers) -> None:
        """Copy `layers` of each source slot into the same layers of the destination slot in the same place."""


class Transfer:
    """Blocks on their way from one arena to the other.

    Whoever makes one keeps both ends protected until `settled`, whatever becomes of the request it was made for. The launcher sets
    `arrivals` last, so that who sees them sees everything before.
    """

    def __init__(self, label: str, groups: Sequence[Group], after: Sequence[Fence] = ()) -> None:
        self.label = label
        self.groups = groups  # what lands together, in order; between them they cover every layer of every block once
        self.after = after  # the lane waits for these before it touches either end
        self.source_slots = self.dest_slots = _NO_SLOTS
        self.pins: Sequence[Pin] = ()  # on its slots of the device, from before it is submitted until its end was seen
        self.keys: Sequence[bytes] = ()  # of its first blocks, those that have one
        self.arrivals: tuple[Arrival, ...] | None = None
        self.settled = False
        self.submitted_s = 0.0
        self.first_s = 0.0  # when it was the next to end
        self.seen_s = 0.0  # when it was last seen not to be over
        self.settled_s = 0.0
        self.deadline_s = float("inf")
        self.ticket: Ticket | None = None  # of the launch, set by the mover
        self.copied: list[Ticket] = []  # by group, set by the mover
        self._num_taken = 0  # groups given out by `take_arrived`
        self._end: Fence | None = None  # behind everything that was put on the lane
        self._launched = False
        self._error: BaseException | None = None

    def prepare(self) -> bool:
        """On the launcher, before anything is enqueued: the last moment to choose slots. False: there is nothing to copy."""
        return True

    def touches(self, slots: frozenset[int] | None) -> bool:
        """Whether it may still touch one of these slots of the device; None: any."""
        return slots is None or any(not slots.isdisjoint(pin.slots) for pin in self.pins)

    @property
    def num_blocks(self) -> int:
        return len(self.source_slots)

    @property
    def overdue(self) -> bool:
        return not self.settled and time.monotonic() > self.deadline_s

    def take_arrived(self) -> Iterator[BaseException | None]:
        """For each group that is over and was not yet given out, in order: what went wrong with it."""
        arrivals = self.arrivals or ()
        while self._num_taken < len(arrivals) and arrivals[self._num_taken].fence.passed():
            self._num_taken += 1
            yield self.copied[self._num_taken - 1].error()

    def error(self) -> BaseException | None:
        if self._error is None:
            self._error = next((error for ticket in self.copied if (error := ticket.error()) is not None), None)
        return self._error

    # ------------------------------------------------------------------------------------------------------- for the mover

    def fail(self, error: BaseException) -> None:
        self._error = error

    def launched(self, end: Fence | None, arrivals: Sequence[Arrival]) -> None:
        self._end = end
        self._launched = True
        self.arrivals = tuple(arrivals)

    def over(self) -> bool:
        """Raises where its launch ended and left nothing to wait for."""
        if not self._launched and self.ticket is not None and self.ticket.done():
            self._require_launched()
        return self._launched and (self._end is None or self._end.passed())

    def wait_over(self, deadline_s: float) -> None:
        """Block until it is launched, then until it is over. Raises DeadlineExceeded, or what `over` raises; never gives up quietly."""
        if self.ticket is None:
            raise InvariantBroken(f"{self.label!r} was never submitted")
        try:
            self.ticket.wait_done(max(0.0, deadline_s - time.monotonic()))
        except DeadlineExceeded:
            raise
        except BaseException as error:  # of the launch: what it had enqueued, if anything, is behind `_end`
            self.fail(error)
        self._require_launched()
        if self._end is not None:
            self._end.wait_passed(max(0.0, deadline_s - time.monotonic()))

    def _require_launched(self) -> None:
        """Its launch is over. One that could not even say what lies on the lane is no failed copy: nobody knows when its slots are free."""
        if not self._launched:
            cause = None if self.ticket is None else self.ticket.error()
            raise InvariantBroken(f"the launch of {self.label!r} failed, and nobody knows when it ends: {cause!r}") from cause


class ByteChecks:
    """What checked mode adds to the transfers between the device and one colder tier, on their lanes: destinations are spoiled before they
    are written, blocks get a number that tells their bytes, and what leaves the device is compared with what comes back.

    A slot is spoiled when its new owner is about to write it, on the owner's lane, and not when it is given back: only the owner knows, and
    has waited for, the fences of those who had it before.
    """

    def __init__(self, guard: ByteGuard, contents: ContentObserver, layers: Layers, tier: str = "host", device: str = "device") -> None:
        self._guard = guard
        self._contents = contents
        self._layers = layers
        self._tier = tier
        self._device = device

    def before(self, transfer: Transfer, lane: Lane, dest: str) -> None:
        """Behind the transfer's waits, before its first copy."""
        slots = transfer.dest_slots
        access = Access(dest, slots, self._layers, Mode.WRITE)
        lane.submit(lambda: self._guard.poison(dest, slots.tolist()), [access], label=f"poison for {transfer.label}")
        if dest == self._tier:  # told before the copy can be found
            self._compare(transfer, lane, demotes=True)

    def after(self, transfer: Transfer, lane: Lane, dest: str) -> None:
        """Behind its last copy."""
        if dest == self._device:
            self._compare(transfer, lane, demotes=False)

    def _compare(self, transfer: Transfer, lane: Lane, demotes: bool) -> None:
        on_device, in_tier = (transfer.source_slots, transfer.dest_slots) if demotes else (transfer.dest_slots, transfer.source_slots)
        keys = tuple(transfer.keys)

        def compare() -> None:
            if transfer.error() is None:
                tell = self._contents.demoted if demotes else self._contents.promoted
                digests = self._guard.digests(self._device, on_device[: len(keys)].tolist())
                for slot, key, digest in zip(in_tier.tolist(), keys, digests, strict=False):
                    tell(self._tier, slot, key, digest)

        # Not the rest: in a block without a key its request may be writing again, layer by layer as they come.
        access = Access(self._device, on_device[: len(keys)], self._layers, Mode.READ)
        lane.submit(compare, [access], label=f"digests of {transfer.label}")


class Mover:
    """One direction between two arenas. `submit` and `settle` are the engine thread's; launching happens on `launcher`, a CPU lane,
    because a long run of launches behind an unresolved fence blocks whoever makes them."""

    def __init__(self, arenas: tuple[str, str], copier: Copier, lane: Lane, launcher: Lane) -> None:
        self.wake: Callable[[], None] = lambda: None  # called on the launcher when a transfer can be waited for on the device
        self.checks: ByteChecks | None = None  # in checked mode
        self.lane = lane
        self._source, self._dest = arenas
        self.copier = copier
        self._launcher = launcher
        self._flying: deque[Transfer] = deque()
        self._last_settled_s = 0.0

    def __len__(self) -> int:
        """Transfers that have not been seen to be over."""
        return len(self._flying)

    @property
    def num_blocks(self) -> int:
        return sum(transfer.num_blocks for transfer in self._flying)

    def is_late(self) -> bool:
        """Whether the transfer that is next to end is overdue."""
        return bool(self._flying) and self._flying[0].overdue

    def submit(self, transfer: Transfer) -> None:
        """Hand it over; returns at once. If this raises, nothing of it will ever run."""
        transfer.submitted_s = time.monotonic()
        transfer.ticket = self._launcher.submit(lambda: self._launch(transfer), label=f"launch {transfer.label}")
        self._flying.append(transfer)

    def settle(self) -> list[Transfer]:
        """Those that are over since the last call, oldest first; never blocks."""
        over: list[Transfer] = []
        if not self._flying:
            return over
        now = time.monotonic()
        while self._flying and self._flying[0].over():
            transfer = self._flying.popleft()
            transfer.settled, transfer.settled_s = True, now
            transfer.first_s = max(transfer.submitted_s, self._last_settled_s)
            self._last_settled_s = now
            over.append(transfer)
        if self._flying:
            self._flying[0].seen_s = now
        return over

    def look_again_s(self) -> float:
        """How long nobody need call `settle`, unless `wake` was called: while the launcher is at work, looking would only take the
        interpreter from it."""
        first = self.first()
        if first is None or first.arrivals is None:
            return POLL_MOST_S
        return look_again_s(time.monotonic() - max(first.submitted_s, self._last_settled_s))

    def first(self) -> Transfer | None:
        """The one that is next to end."""
        return self._flying[0] if self._flying else None

    def in_flight(self) -> tuple[Transfer, ...]:
        return tuple(self._flying)

    def drain(self, timeout_s: float, concerned: Callable[[Transfer], bool] = lambda transfer: True) -> None:
        """Block until every transfer in flight that is `concerned` is over: also those that are not launched yet. The next `settle`
        finds them."""
        deadline_s = time.monotonic() + timeout_s
        for transfer in self.in_flight():
            if concerned(transfer):
                transfer.wait_over(deadline_s)

    def close(self, timeout_s: float | None) -> None:
        self._launcher.close(timeout_s)
        self.lane.close(timeout_s)

    # ------------------------------------------------------------------------------------------------------ on the launcher

    def _launch(self, transfer: Transfer) -> None:
        arrivals: list[Arrival] = []
        try:
            if transfer.prepare():
                self._enqueue(transfer, arrivals)
        except BaseException as error:  # of any kind: what was not copied has not landed
            transfer.fail(error)
        finally:
            # Whatever went wrong, what is on the lane already ends before either side is given back.
            transfer.launched(self.lane.record() if transfer.num_blocks else None, arrivals)
            self.wake()

    def _enqueue(self, transfer: Transfer, arrivals: list[Arrival]) -> None:
        source, dest = transfer.source_slots, transfer.dest_slots
        if len(source) != len(dest):
            raise InvariantBroken(f"{transfer.label!r} has {len(source)} sources and {len(dest)} destinations")
        for fence in transfer.after:
            self.lane.wait(fence)
        if self.checks is not None:
            self.checks.before(transfer, self.lane, self._dest)
        last: Ticket | None = None
        for group in transfer.groups:
            layers, blocks = group
            accesses = (Access(self._source, source[blocks], layers, Mode.READ), Access(self._dest, dest[blocks], layers, Mode.WRITE))
            last = self.lane.submit(partial(self._copy, transfer, group), accesses, label=transfer.label, after=last)
            transfer.copied.append(last)
            if self.checks is not None and group is transfer.groups[-1]:  # before the last arrival: who waits for that finds all of it over
                self.checks.after(transfer, self.lane, self._dest)
            arrivals.append(Arrival(layers, self.lane.record()))

    def _copy(self, transfer: Transfer, group: Group) -> None:
        try:
            self.copier.copy(transfer.source_slots[group.blocks], transfer.dest_slots[group.blocks], group.layers)
        except InvariantBroken:
            raise
        except Exception as error:
            raise TransferFailed(f"{transfer.label}: {error}") from error


class NoMover(Mover):
    """To or from a tier that holds nothing: nothing is ever in flight, and there are no lanes."""

    def __init__(self) -> None:
        self._flying = deque()
        self._last_settled_s = 0.0

    def submit(self, transfer: Transfer) -> None:
        raise InvariantBroken(f"{transfer.label!r} was submitted, and there is nowhere to move to")

    def close(self, timeout_s: float | None) -> None:
        pass
