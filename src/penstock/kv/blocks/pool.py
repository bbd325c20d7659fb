"""The bookkeeping of one arena's slots: their owners, their keys, and the order of eviction. Owns no bytes
and never waits.

For any thread: every call takes the pool's lock, for bookkeeping only. A caller that needs several calls to
be one takes `lock` around them. A call that raises or returns None has changed nothing.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice, repeat
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.contract import Fence
from penstock.errors import ConfigError, HandleEnded, InvariantBroken, Leaked
from penstock.kv.blocks.eviction import EvictionOrder, LruOrder, PoolWant, WantedLast
from penstock.kv.blocks.handles import Handle, Hold, Pin, Reservation
from penstock.kv.blocks.slots import Run, SlotBook, SlotCounts, SlotEvent, SlotState, as_run
from penstock.observe import PoolObserver

_MAX_NAMED = 16  # handles that a Leaked message lists
_NOT_HERE = -1
_NO_SLOTS: Run = np.empty(0, np.intp)


class LastUse:
    """By lane and slot, the newest fence of the slot's former owners: until it passes they may touch the
    slot. Never waits.

    A fence does not say where on its lane it lies, so fences are numbered as they arrive. Per slot and lane
    one number is kept, that of the newest. A slot's next owner gets every fence of the lane up to that number
    that has not passed. If fences arrive in lane order, the last one covers the others. If not (a table that
    rested is released with the fence of an old step), none is lost.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._arrivals = 0
        # by lane: per slot the number of its newest fence; 0: none
        self._newest: dict[str, NDArray[np.int64]] = {}
        # by lane: fences by number, in order of arrival; passed ones are dropped when met
        self._live: dict[str, dict[int, Fence]] = {}

    def note(self, slots: Run, fence: Fence | None) -> None:
        """`fence` covers the last use of `slots` by the handle that gives them back. None: that use is
        over."""
        if fence is not None and not fence.passed():
            number = self._number(fence)
            newest = self._newest[fence.lane]
            newest[slots] = np.maximum(newest[slots], number)

    def after(self, slots: Run) -> tuple[Fence, ...]:
        """Fences that must pass before a new owner writes `slots`."""
        fences: list[Fence] = []
        for lane, live in self._live.items():
            upto = int(self._newest[lane][slots].max(initial=0)) if live else 0
            if upto >= next(iter(live), upto + 1):
                self._drop_passed(live)
                fences += [fence for number, fence in live.items() if number <= upto]
        return tuple(fences)

    def _number(self, fence: Fence) -> int:
        if fence.lane not in self._live:
            self._live[fence.lane], self._newest[fence.lane] = {}, np.zeros(self._num_slots, np.int64)
        live = self._live[fence.lane]
        for number, known in reversed(live.items()):
            if known is fence:
                return number
        self._drop_passed(live)
        self._arrivals += 1
        live[self._arrivals] = fence
        return self._arrivals

    @staticmethod
    def _drop_passed(live: dict[int, Fence]) -> None:
        for number in [number for number, fence in live.items() if fence.passed()]:
            del live[number]


class Found(NamedTuple):
    """An answer: the run of leading `keys` that was here after `num_forgets` forgets."""

    keys: Sequence[bytes]
    run: Run
    num_forgets: int

    def covers(self, keys: Sequence[bytes]) -> bool:
        """Whether `keys` begin with all of it. A key covers all tokens before it, so one comparison is
        enough."""
        num = len(self.run)
        return isinstance(keys, tuple) and 0 < num <= len(keys) and keys[num - 1] == self.keys[num - 1]


class KeyIndex:
    """Keys of sealed slots: each key in one slot, each slot with at most one key. Knows nothing about the
    slots' owners."""

    def __init__(self, num_slots: int) -> None:
        self.key_of: list[bytes | None] = [None] * num_slots  # by slot; None: not sealed
        self.sealed = np.zeros(num_slots, np.bool_)  # it has a key
        self.slot_of: dict[bytes, int] = {}
        self._num_forgets = 0
        self._lost_at = np.zeros(num_slots, np.int64)  # the number of the forget that last took its key
        self.last = Found((), _NO_SLOTS, 0)  # the newest answer: many requests often share a prefix

    def find(self, keys: Sequence[bytes], like: Found | None = None) -> Run:
        """Slots of the longest run of leading `keys` that are here; callers must not change it. A waiting
        request asks in every plan: only keys after the last answer are looked up, and only slots forgotten
        since are rechecked. `like`: an earlier answer that the caller kept."""
        known = next((one for one in (like, self.last) if one is not None and one.covers(keys)), None)
        run, num_forgets = (_NO_SLOTS, 0) if known is None else (known.run, known.num_forgets)
        if num_forgets < self._num_forgets and len(run):
            lost = np.flatnonzero(self._lost_at[run] > num_forgets)
            run = run[: lost[0]] if lost.size else run
        num = len(run)
        if num < len(keys) and keys[num] in self.slot_of:
            slots: list[int] = []
            with suppress(KeyError):  # the first missing key ends it; the list has the keys before
                slots.extend(map(self.slot_of.__getitem__, keys[num:] if num else keys))
            run = np.concatenate((run, np.array(slots, np.intp)))
        if isinstance(keys, tuple):  # a list may change
            self.last = Found(keys, run, self._num_forgets)
        return run

    def find_last(self, keys: Sequence[bytes], num: int) -> tuple[Run, int]:
        """Of the longest prefix of `keys` whose last `num` blocks are here, the slots of these, and its
        number of blocks. No key is looked up twice, and one of `num` while none is here."""
        end = here = len(keys)  # blocks from `here` up to `end` are here
        while end:
            first = max(0, end - num)
            gap = next((place for place in range(first, here) if keys[place] not in self.slot_of), None)
            if gap is None:
                return np.array([self.slot_of[key] for key in keys[first:end]], np.intp), end
            end, here = gap, first  # a longer prefix needs the missing block
        return _NO_SLOTS, 0

    def add(self, slots: Sequence[int], keys: Sequence[bytes]) -> list[int]:
        """Give each slot its key unless another slot has the key: first writer wins. Returns the places of
        the slots that got theirs."""
        if any(map(self.key_of.__getitem__, slots)):
            raise InvariantBroken(
                f"slot {next(slot for slot in slots if self.key_of[slot])} is sealed already"
            )
        homes = map(self.slot_of.setdefault, keys, slots)
        places = [place for place, (home, slot) in enumerate(zip(homes, slots, strict=True)) if home == slot]
        for place in places:
            self.key_of[slots[place]] = keys[place]
        self.sealed[[slots[place] for place in places]] = True
        return places

    def forget(self, slots: Sequence[int]) -> list[bytes]:
        """Remove the keys of `slots`; returns them."""
        keys = []
        for slot in slots:
            key = self.key_of[slot]
            if key is None:
                raise InvariantBroken(f"slot {slot} has no key to forget")
            del self.slot_of[key]
            self.key_of[slot] = None
            keys.append(key)
        self._num_forgets += 1
        self.sealed[slots] = False
        self._lost_at[slots] = self._num_forgets
        return keys

    def check(self) -> None:
        """Raise unless both directions agree."""
        backwards = {key: slot for slot, key in enumerate(self.key_of) if key is not None}
        sealed = np.flatnonzero(self.sealed).tolist()
        if backwards != self.slot_of or sealed != [*backwards.values()]:
            raise InvariantBroken(
                f"{len(backwards)} slots have a key, {len(self.slot_of)} keys have a slot and {len(sealed)} "
                "slots are said to be sealed, and they disagree"
            )


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _locked(
    call: Callable[Concatenate[BlockPool, _P], _T],
) -> Callable[Concatenate[BlockPool, _P], _T]:
    """The call under the pool's lock."""

    def locked(self: BlockPool, /, *args: _P.args, **named: _P.kwargs) -> _T:
        with self.lock:
            return call(self, *args, **named)

    return functools.wraps(call)(locked)


class BlockPool:
    """Slots `0..num_slots`, lent out as reservations, holds and pins."""

    def __init__(
        self,
        num_slots: int,
        name: str,
        observer: PoolObserver | None = None,
        eviction: EvictionOrder | None = None,
    ) -> None:
        if num_slots < 0:
            raise ConfigError(f"pool {name!r} cannot have {num_slots} slots")
        self.name = name
        self.num_slots = num_slots
        self.lock = threading.RLock()
        self.num_evicted = 0
        self.num_duplicates = 0  # seals whose key another slot had already
        self.gone: list[bytes] | None = None  # evicted or forgotten keys; None: not collected
        self.book = SlotBook(num_slots, name, observer)
        self.index = KeyIndex(num_slots)
        self.depths = np.zeros(num_slots, np.int64)  # of sealed blocks: positions in their prefixes
        self.idle = WantedLast(LruOrder(num_slots) if eviction is None else eviction, num_slots, self.lock)
        self.last_use = LastUse(num_slots)
        # First in, first out: the slot that rests longest goes first, so that the fences of its last use have
        # had time to pass. Slots that were never used come last: their memory may not be faulted in yet.
        self._free, self._fresh = deque[int](), deque(range(num_slots))
        self._out: dict[Handle, None] | None = {}  # in order of lending; None: closed
        self._observer = observer
        if observer is not None:
            observer.opened(name, num_slots)

    # ---------------------------------------------------------------------------------------------- questions

    @property
    def counts(self) -> SlotCounts:
        with self.lock:  # a move between two states is never seen half done
            return SlotCounts(*self.book.num_in)

    @property
    def num_available(self) -> int:
        """Slots that can be reserved now: free or evictable."""
        return self.num_free + self.book.num_in[SlotState.IDLE]

    @property
    def num_free(self) -> int:
        """Slots that can be reserved without an eviction."""
        return self.book.num_in[SlotState.FREE]

    @property
    def num_unwanted(self) -> int:
        """Slots that can be reserved without evicting a wanted block."""
        return self.num_free + len(self.idle.others)

    @property
    def num_keys(self) -> int:
        return len(self.index.slot_of)

    @_locked
    def find(self, keys: Sequence[bytes], like: PoolWant | None = None) -> Run:
        """Slots of the longest run of leading `keys` that are here; neither they nor the answer may be
        changed. `like`: a want with the answer for the same keys, so that only changes since are looked
        up."""
        return self.index.find(keys, None if like is None else like.found)

    @_locked
    def find_last(self, keys: Sequence[bytes], num: int) -> tuple[Run, int]:
        """The longest prefix whose last `num` blocks are here: the slots of these, and its length."""
        return self.index.find_last(keys, num)

    @_locked
    def find_deepest(self, keys: Sequence[bytes]) -> int:
        """Length of the longest prefix of `keys` whose last block is here, whether those before it are or
        not; 0: none. For pools whose depths are such lengths."""
        sealed = self.depths[self.index.sealed]
        depths = np.unique(sealed[(sealed > 0) & (sealed <= len(keys))])[::-1].tolist()
        return next((depth for depth in depths if keys[depth - 1] in self.index.slot_of), 0)

    @_locked
    def find_each(self, keys: Sequence[bytes]) -> list[int]:
        """The slot of each key, or -1."""
        return list(map(self.index.slot_of.get, keys, repeat(_NOT_HERE)))

    @_locked
    def keys(self, slots: Iterable[int] | None = None) -> list[bytes]:
        """Keys of the sealed blocks in `slots`, or of all."""
        key_of = self.index.key_of
        found = key_of if slots is None else map(key_of.__getitem__, slots)
        return [key for key in found if key is not None]

    @_locked
    def coldest(self, num: int, drops_wants: bool = False) -> list[int]:
        """Slots of the idle blocks that are evicted next, roughly in order. `drops_wants`: as `evict(num)`
        would."""
        if drops_wants:
            self.idle.expose(num)
        return list(islice(self.idle, num))

    # ------------------------------------------------------------------------------------------------ lending

    @_locked
    def try_reserve(self, num_slots: int, owner: str) -> Reservation | None:
        """Take that many slots, evicting idle blocks if too few are free."""
        out = self.handles
        if num_slots < 0:
            raise InvariantBroken(f"{owner!r} asked pool {self.name!r} for {num_slots} slots")
        if num_slots > self.num_available:
            return None
        if num_slots > self.num_free:
            self.evict(num_slots - self.num_free)
        # sorted: neighbours are copied as one
        slots = sorted((self._free or self._fresh).popleft() for _ in range(num_slots))
        run = np.array(slots, np.intp)
        self.book.move(run, SlotEvent.RESERVE, SlotState.RESERVED, owner)
        self.book.add_holds(run)
        reservation = Reservation(owner, self, run, self.last_use.after(run))
        out[reservation] = None
        return reservation

    @_locked
    def hold(self, owner: str, shared: Sequence[int] | Run = (), num_elsewhere: int = 0) -> Hold:
        """A hold that starts with the sealed slots `shared`, which other tables may hold, too; it grows by
        `Reservation.commit`. Before them it has `num_elsewhere` places without a slot, for blocks that are
        not in this pool."""
        out, book, run = self.handles, self.book, as_run(shared)
        if len(run):
            book.require(run, SlotEvent.SHARE)
            if not self.index.sealed[run].all():
                slot = run[~self.index.sealed[run]][0]
                raise InvariantBroken(
                    f"pool {self.name!r}: {owner!r} wants to share slot {slot}, which is not sealed"
                )
            self.idle.remove(book.those_in(SlotState.IDLE, run))
            self.idle.others.hit(run)
            book.move(run, SlotEvent.SHARE, SlotState.ACTIVE, owner)
            book.add_holds(run)
        hold = Hold(owner, self, num_elsewhere)
        hold.append(run)
        out[hold] = None
        if self._observer is not None:
            self._observer.lent(self.name, hold.slots, owner)
        return hold

    @_locked
    def pin(self, slots: Sequence[int] | Run, owner: str) -> Pin:
        """Protect `slots` from eviction and reuse until the pin ends."""
        out, book, run = self.handles, self.book, np.array(slots, np.intp)
        book.require(run, SlotEvent.PIN)
        idle = book.those_in(SlotState.IDLE, run)
        self.idle.remove(idle)
        book.move(idle, SlotEvent.PIN, SlotState.PINNED, owner)
        book.pins[run] += 1
        pin = Pin(owner, self, run)
        out[pin] = None
        if self._observer is not None:
            self._observer.lent(self.name, pin.slots, owner)
        return pin

    def take_back(self, handle: Handle, fence: Fence | None) -> None:
        """For the handles: `handle` ends."""
        del self.handles[handle]
        count = self.book.pins if isinstance(handle, Pin) else self.book.holds
        self.give_back(count, handle.run, handle.owner, fence)

    def give_back(self, count: NDArray[np.int32], run: Run, owner: str, fence: Fence | None) -> None:
        """For the handles: `count`, of holds or pins, falls by one for each slot of `run`. A slot without
        either becomes idle if it is sealed, else free."""
        if self._observer is not None:
            self._observer.returned(self.name, run.tolist(), owner, fence)
        self.last_use.note(run, fence)
        count[run] -= 1
        book = self.book
        if count is book.holds:
            book.num_holds -= len(run)
        left = run[book.holds[run] == 0]
        is_pinned = book.pins[left] > 0
        is_idle = self.index.sealed[left] & ~is_pinned
        idle, free = left[is_idle], left[~(is_pinned | is_idle)]
        book.move(left[is_pinned], SlotEvent.GIVE_BACK, SlotState.PINNED, owner)
        book.move(idle, SlotEvent.GIVE_BACK, SlotState.IDLE, owner)
        book.move(free, SlotEvent.GIVE_BACK, SlotState.FREE, owner)
        # the deepest goes first: a prefix is useful without its continuation, not the other way round
        self.idle.add(idle[::-1])
        self._free.extend(free.tolist())

    # ------------------------------------------------------------------------------------------------ content

    @_locked
    def seal(
        self, slots: Sequence[int] | Run, keys: Sequence[bytes], depths: Sequence[int] | None = None
    ) -> int:
        """`slots` are full and written: give each its key. A slot whose key another slot has stays private,
        without a key. Returns how many got theirs. `depths` are the blocks' positions in their prefixes, for
        the eviction order."""
        depths = [0] * len(slots) if depths is None else depths
        if not len(slots) == len(keys) == len(depths):
            raise InvariantBroken(
                f"{len(slots)} slots cannot be sealed with {len(keys)} keys or another number of depths"
            )
        run = as_run(slots)
        self.book.require(run, SlotEvent.SEAL)
        places = self.index.add(run.tolist(), keys)
        self.num_duplicates += len(run) - len(places)
        run, keys, depths = run[places], [keys[i] for i in places], [depths[i] for i in places]
        self.depths[run] = depths
        self.idle.others.sealed(run, keys, depths)
        if self._observer is not None:
            for slot, key in zip(run.tolist(), keys, strict=True):
                self._observer.sealed(self.name, slot, key)
        return len(places)

    @_locked
    def note_hits(self, slots: Run) -> None:
        """For the eviction order: the sealed `slots` were found again and are read under a pin, not a
        hold."""
        self.idle.others.hit(slots)

    @_locked
    def want(self, slots: Run, rank: float, earlier: PoolWant | None = None) -> PoolWant:
        """Mark the sealed `slots` as wanted: they are evicted after unwanted ones, the greatest `rank` first.
        Ends by itself when nothing else is left to evict. `earlier`: the want that it replaces, for a prefix
        of the same request. If it has the same blocks and none was evicted, it is reused."""
        if earlier is not None and earlier.is_for(slots):
            earlier.rank = rank
            return earlier
        want = self.idle.want(slots, self.book.those_in(SlotState.IDLE, slots), rank)
        want.found = self.index.last if self.index.last.run is slots else None
        if earlier is not None:
            earlier.end()
        return want

    @_locked
    def evict(self, num_slots: int) -> int:
        """Evict that many idle blocks, or all if there are fewer. Returns how many."""
        slots = self.idle.pop(num_slots)
        self._lose(slots, slots)
        self.num_evicted += len(slots)
        return len(slots)

    @_locked
    def evict_these(self, slots: Sequence[int] | Run, most: int | None = None) -> int:
        """Evict those of `slots` that are idle, wanted or not; up to `most`, the last ones first. Returns how
        many."""
        idle = self.book.those_in(SlotState.IDLE, as_run(slots)).tolist()
        num = self.forget(idle if most is None else idle[max(0, len(idle) - most) :])
        self.num_evicted += num
        return num

    @_locked
    def forget(self, slots: Iterable[int]) -> int:
        """Remove the keys of `slots`. A held or pinned block stays until its handles end; its slot is free
        then. Returns how many keys were removed."""
        sealed = [slot for slot in slots if self.index.key_of[slot] is not None]
        idle = self.book.those_in(SlotState.IDLE, as_run(sealed))
        self.idle.remove(idle)
        self.idle.lost(sealed)
        self._lose(sealed, idle.tolist())
        return len(sealed)

    def _lose(self, slots: Sequence[int], idle: Sequence[int]) -> None:
        """`slots` have lost their keys; the `idle` ones among them become free."""
        if not slots:
            return
        self.book.move(as_run(idle), SlotEvent.EVICT, SlotState.FREE, self.name)
        keys = self.index.forget(slots)
        if self.gone is not None:
            self.gone += keys
        self._free.extend(idle)
        if self._observer is not None:
            for slot, key in zip(slots, keys, strict=True):
                self._observer.evicted(self.name, slot, key)

    # ---------------------------------------------------------------------------------------------------- end

    @_locked
    def check(self) -> None:
        """Recount everything from the open handles, and raise if the running books differ."""
        out = list(self._out or ())
        pins = Counter(slot for handle in out if isinstance(handle, Pin) for slot in handle.slots)
        holds = Counter(slot for handle in out if not isinstance(handle, Pin) for slot in handle.slots)
        reserved = {slot for handle in out if isinstance(handle, Reservation) for slot in handle.slots}
        in_state: dict[SlotState, list[int]] = {state: [] for state in SlotState}
        for slot, state in enumerate(map(SlotState, self.book.state.tolist())):
            in_state[state].append(slot)
            noted = (state, int(self.book.holds[slot]), int(self.book.pins[slot]))
            sealed = self.index.key_of[slot] is not None
            counted = (_state(slot in reserved, holds[slot], pins[slot], sealed), holds[slot], pins[slot])
            if noted != counted:
                raise InvariantBroken(
                    f"slot {slot} of pool {self.name!r}: booked (state, holds, pins) {noted}, counted "
                    f"{counted}"
                )
        if self.counts != SlotCounts(*map(len, in_state.values())) or self.book.num_holds != holds.total():
            raise InvariantBroken(f"pool {self.name!r}: {self.counts} is not what a recount gives")
        if (
            sorted([*self._free, *self._fresh]) != in_state[SlotState.FREE]
            or sorted(self.idle) != in_state[SlotState.IDLE]
        ):
            raise InvariantBroken(
                f"pool {self.name!r}: the orders of free and idle slots do not hold exactly those"
            )
        self.index.check()

    @_locked
    def close(self) -> None:
        """Idempotent. Raises Leaked, and stays open, while a handle is open."""
        named = [str(handle) for handle in list(self._out or ())[:_MAX_NAMED]]
        if self._observer is not None:
            self._observer.closed(self.name, named)
        if self._out:
            more = f", and {len(self._out) - len(named)} more" if len(self._out) > len(named) else ""
            raise Leaked(
                f"pool {self.name!r} was closed with {len(self._out)} handles out: {', '.join(named)}{more}"
            )
        self._out = None

    @property
    def handles(self) -> dict[Handle, None]:
        """The open handles, in order of lending."""
        if self._out is None:
            raise HandleEnded(f"pool {self.name!r} is closed")
        return self._out


def _state(reserved: bool, num_holds: int, num_pins: int, sealed: bool) -> SlotState:
    if num_holds:
        return SlotState.RESERVED if reserved else SlotState.ACTIVE
    if num_pins:
        return SlotState.PINNED
    return SlotState.IDLE if sealed else SlotState.FREE


class PinnedKeys:
    """Blocks of a pool that must stay, by key, whether they are here yet or not. `protect` keeps slots from
    eviction and returns a function that ends that. The caller holds the pool's lock."""

    def __init__(self, pool: BlockPool, protect: Callable[[Run], Callable[[], None]]) -> None:
        self._pool = pool
        self._protect = protect
        self._keys: dict[str, frozenset[bytes]] = {}  # by owner
        self.num_owners: Counter[bytes] = Counter()  # by key; if it is empty, `landed` has nothing to do
        self._ends: list[Callable[[], None]] = []  # end the protection of blocks that are here

    def __contains__(self, key: bytes) -> bool:
        return key in self.num_owners

    def pin(self, owner: str, keys: Iterable[bytes]) -> None:
        """Protect `keys` from eviction until `unpin`, including those that land later. Idempotent."""
        if owner not in self._keys:
            self._keys[owner] = frozenset(keys)
            self.num_owners.update(self._keys[owner])
            self.landed(self._keys[owner])

    def unpin(self, owner: str) -> None:
        """Blocks that other owners pin, too, stay. Idempotent."""
        self.num_owners -= Counter(self._keys.pop(owner, ()))  # drops keys that have no owner left
        ended, self._ends = self._ends, []
        self.landed(self.num_owners)
        for end in ended:
            end()

    def landed(self, keys: Iterable[bytes]) -> None:
        """These keys were just sealed: protect the pinned ones among them."""
        found = self._pool.find_each([key for key in keys if key in self.num_owners])
        slots = [slot for slot in found if slot != _NOT_HERE]
        if slots:
            self._ends.append(self._protect(as_run(slots)))
