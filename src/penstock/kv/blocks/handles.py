"""What somebody has out of a pool: one handle per run of slots, which ends exactly once, and one request's table, which is a hold with a
chain of keys. Owns the runs, not the bookkeeping behind them; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.contract import Fence, Prefix
from penstock.errors import HandleEnded, InvariantBroken
from penstock.kv.blocks.key import block_key
from penstock.kv.blocks.slots import Run, as_list, as_run

_FIRST_ROOM = 16  # slots that a new hold has room for
_NO_SLOT = -1


class Lender(Protocol):
    """The pool as its handles see it."""

    def take_back(self, handle: Handle, fence: Fence | None) -> None: ...

    def commit(self, reservation: Reservation, hold: Hold) -> None: ...

    def split(self, reservation: Reservation, num_slots: int) -> Reservation: ...

    def drop_first(self, hold: Hold, num_slots: int, fence: Fence | None) -> None: ...


class Handle:
    """Slots that are out on behalf of `owner`."""

    kind: ClassVar[str] = "handle"
    __slots__ = ("_lender", "_run", "ended", "owner")

    def __init__(self, owner: str, lender: Lender, run: Run) -> None:
        self.owner = owner
        self.ended = False
        self._lender = lender
        self._run = run

    @property
    def run(self) -> Run:
        """Its slots as the pool's books take them."""
        return self._run

    @property
    def slots(self) -> Sequence[int]:
        return as_list(self.run)

    def require_open(self) -> None:
        if self.ended:
            raise HandleEnded(f"{self} has ended")

    def __str__(self) -> str:
        return f"{self.kind} of {self.owner!r} ({len(self.run)} slots)"

    def end(self, fence: Fence | None = None) -> None:
        """The slots go back; `fence` covers their last use by whoever had them, where that has not been seen to be over."""
        self.require_open()
        self._lender.take_back(self, fence)
        self.ended = True


class Reservation(Handle):
    """Slots taken for something that may still fail. Ends by `commit` or by `rollback`.

    Whoever writes into the slots does so after all fences in `after`.
    """

    kind = "reservation"
    __slots__ = ("after",)

    def __init__(self, owner: str, lender: Lender, run: Run, after: tuple[Fence, ...]) -> None:
        super().__init__(owner, lender, run)
        self.after = after

    def commit(self, hold: Hold) -> None:
        """The slots go to the end of `hold`."""
        self.require_open()
        self._lender.commit(self, hold)
        self.ended = True

    def split(self, num_slots: int) -> Reservation:
        """The first `num_slots` as a reservation of their own; this one has the others from now on."""
        self.require_open()
        first = self._lender.split(self, num_slots)
        self._run = self._run[num_slots:]
        return first

    rollback = Handle.end


class Pin(Handle):
    """A transfer's protection of slots, whatever becomes of the requests that use them."""

    kind = "pin"
    __slots__ = ()

    @property
    def array(self) -> NDArray[np.int32]:
        return np.asarray(self._run, np.int32)


class RunPin(Pin):
    """A transfer's protection of consecutive slots of one hold. Costs nothing while the hold is open, since nobody can take its slots;
    when the hold ends first, the pool books the pin slot by slot."""

    __slots__ = ("first", "hold", "num_slots")

    def __init__(self, owner: str, lender: Lender, hold: Hold, first: int, num_slots: int) -> None:
        super().__init__(owner, lender, [])
        self.hold = hold
        self.num_slots = num_slots
        self.first = first

    @property
    def run(self) -> Run:
        return as_run(self.array)

    @property
    def array(self) -> NDArray[np.int32]:
        return self.hold.first(self.first + self.num_slots)[self.first :]


class Hold(Handle):
    """The slots of one table, in token order, as kernels read them. It grows at its end and may give back its first ones. What it has
    shown never changes, so that a step may keep a view of it while the next one is prepared."""

    kind = "hold"
    __slots__ = ("_buffer", "_shown", "num_dropped", "num_slots", "run_pins")

    def __init__(self, owner: str, lender: Lender, num_dropped: int = 0) -> None:
        """`num_dropped`: places at its beginning that never have a slot."""
        super().__init__(owner, lender, [])
        self.num_slots = self.num_dropped = num_dropped  # the former counts places, those without a slot included
        self.run_pins: set[RunPin] = set()  # transfers that use some of its slots
        self._make_room(num_dropped + _FIRST_ROOM)
        self._buffer[:num_dropped] = _NO_SLOT

    @property
    def run(self) -> Run:
        return as_run(self._shown[self.num_dropped : self.num_slots])

    def first(self, num: int) -> NDArray[np.int32]:
        """Read-only view of the first `num`; what the first `num_dropped` of them say means nothing."""
        if not 0 <= num <= self.num_slots:
            raise InvariantBroken(f"{num} slots were asked of the {self}")
        return self._shown[:num]

    def append(self, slots: Run) -> None:
        """For the pool, which counts them as held."""
        end = self.num_slots + len(slots)
        if end > self._buffer.size:
            self._make_room(max(end, 2 * self._buffer.size), self.first(self.num_slots))
        self._buffer[self.num_slots : end] = slots
        self.num_slots = end

    def drop_first(self, num: int, fence: Fence | None = None) -> None:
        """Give back the first `num` that it still has; no transfer uses them. `fence` covers their last use by this holder."""
        self.require_open()
        self._lender.drop_first(self, num, fence)
        self.num_dropped += num

    def _make_room(self, size: int, held: NDArray[np.int32] | None = None) -> None:
        """A launcher reads a pinned run while its table grows: it sees the old room or the new one with all that was held."""
        buffer = np.empty(size, np.int32)
        if held is not None:
            buffer[: held.size] = held
        shown = buffer.view()
        shown.flags.writeable = False
        self._buffer, self._shown = buffer, shown


class Landing(Protocol):
    """The copy of a fetched run."""

    @property
    def settled(self) -> bool: ...

    def error(self) -> BaseException | None: ...


class FetchedRun:
    """Implements `contract.FetchedBlocks`: slots of its own, which nobody else sees, and the copy that fills them."""

    __slots__ = ("hold", "load")

    def __init__(self, hold: Hold, load: Landing) -> None:
        self.hold = hold
        self.load = load

    @property
    def slots(self) -> NDArray[np.int32]:
        return self.hold.first(self.hold.num_slots)

    @property
    def settled(self) -> bool:
        return self.load.settled

    @property
    def failed(self) -> bool:
        return self.load.error() is not None


class BlockTable:
    """Grows while the request runs; blocks `0..num_keyed` have been sealed, by this request or by whoever computed them first."""

    __slots__ = (
        *("_after", "block_tokens", "fetched", "hold", "is_deep", "num_alone", "num_fetched", "num_kept", "num_shared", "own_scope"),
        *("owner", "paged_pins", "paged_slots", "prefix", "sealed_keys"),
    )

    def __init__(self, hold: Hold, block_tokens: int, prefix: Prefix | None, num_matched: int) -> None:
        self.hold = hold
        self.owner = hold.owner
        self.block_tokens = block_tokens
        self.prefix = prefix  # None: its blocks never get a key
        self.sealed_keys = [] if prefix is None else list(prefix.keys[:num_matched])
        self.num_alone = 0  # of its first blocks, those that host memory was told to forget
        self.is_deep = False  # only its last blocks are on the device, and those before them in host memory
        self.paged_pins: list[Pin] = []  # of host memory, in token order
        self.fetched: set[FetchedRun] = set()
        self.num_fetched = 0  # blocks in those
        self.own_scope: bytes | None = None  # under which its blocks from number `num_shared` on get their keys; None: there are none
        self.num_shared = 0
        self.num_kept = 0  # of its first blocks, those that are not forgotten with it though they are under that scope
        # Where in host memory its first blocks are, which it does not have on the device. Replaced as a whole, never changed.
        self.paged_slots: NDArray[np.int32] = np.empty(0, np.int32)
        self._after: tuple[Fence, ...] = ()

    @property
    def num_paged(self) -> int:
        return self.hold.num_dropped

    def add_paged(self, pin: Pin) -> None:
        """The next of its first blocks are in host memory, under `pin`."""
        self.paged_pins.append(pin)
        self.paged_slots = np.concatenate((self.paged_slots, pin.array))

    @property
    def num_slots(self) -> int:
        return self.hold.num_slots

    @property
    def num_keyed(self) -> int:
        return len(self.sealed_keys)

    @property
    def is_announcing(self) -> bool:
        """Whether it is going to seal keys of its prompt."""
        return self.prefix is not None and self.num_keyed < len(self.prefix.keys)

    def announces(self, number: int, key: bytes) -> bool:
        """Whether block `number` of its prompt has `key`, and is yet to be sealed."""
        return self.prefix is not None and self.num_keyed <= number < len(self.prefix.keys) and self.prefix.keys[number] == key

    def slots(self, num_tokens: int) -> NDArray[np.int32]:
        """Read-only view of the slots of its first ceil(num_tokens / block_tokens) blocks, without those that were paged out; its content
        never changes."""
        self.hold.require_open()
        return self.hold.first(-(-num_tokens // self.block_tokens))[self.hold.num_dropped :]

    def next_keys(self, tokens: Sequence[int], num_full: int) -> list[bytes]:
        """Keys of blocks `num_keyed..num_full`: the prompt's are known, those of generated tokens continue the chain."""
        if self.prefix is None or len(tokens) < num_full * self.block_tokens:
            raise InvariantBroken(f"table of {self.owner!r} has no keys for {num_full} blocks of {len(tokens)} tokens")
        keys = list(self.prefix.keys[self.num_keyed : num_full])
        last = keys[-1] if keys else self.sealed_keys[-1] if self.sealed_keys else None
        for block in range(self.num_keyed + len(keys), num_full):
            scope = self.prefix.scope if self.own_scope is None or block < self.num_shared else self.own_scope
            last = block_key(last, tokens[block * self.block_tokens : (block + 1) * self.block_tokens], scope)
            keys.append(last)
        return keys

    def add_after(self, fences: tuple[Fence, ...]) -> None:
        """Slots were drawn that may not be written before `fences`."""
        if fences:
            known = [fence for fence in self._after if not fence.passed()]
            self._after = (*known, *(fence for fence in fences if all(fence is not other for other in known)))

    def take_after(self) -> tuple[Fence, ...]:
        """What the next step that writes into this table waits for, on its lane; handed out once."""
        after, self._after = self._after, ()
        return after
