"""The bookkeeping of one arena's slots: their owners, their keys, and the order of eviction. Owns no bytes
and never waits.

One thread changes a pool: the engine's, or the one that holds its owner's lock. Any thread may `find`; the
answer may be out of date when it arrives. A call that raises or returns None has changed nothing.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.contract import Fence
from penstock.errors import ConfigError, HandleEnded, InvariantBroken, Leaked
from penstock.kv.blocks.eviction import EvictionOrder, LruOrder, PoolWant, WantedLast
from penstock.kv.blocks.handles import Handle, Hold, Pin, Reservation, RunPin
from penstock.kv.blocks.slots import PerSlot, Run, SlotBook, SlotCounts, SlotEvent, SlotState, as_list, as_run
from penstock.observe import PoolObserver

_MAX_NAMED = 16  # handles that a Leaked message lists
_REMEMBERED = 128  # answers, at least; a plan looks at half as many waiting requests


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
        self._newest: dict[str, PerSlot] = {}  # by lane: per slot the number of its newest fence; 0: none
        # by lane: fences by number, in order of arrival; passed ones are dropped when met
        self._live: dict[str, dict[int, Fence]] = {}

    def note(self, slots: Run, fence: Fence | None) -> None:
        """`fence` covers the last use of `slots` by the handle that gives them back. None: that use is
        over."""
        if fence is None or fence.passed():
            return
        number = self._number(fence)
        newest = self._newest[fence.lane]
        if isinstance(slots, np.ndarray):
            newest.array[slots] = np.maximum(newest.array[slots], number)
        else:
            newest.set([slot for slot in slots if newest.at[slot] < number], number)

    def after(self, slots: Run) -> tuple[Fence, ...]:
        """Fences that must pass before a new owner writes `slots`."""
        fences: list[Fence] = []
        for lane, live in self._live.items():
            newest, upto = self._newest[lane], 0
            if live and isinstance(slots, np.ndarray):
                upto = int(newest.array[slots].max(initial=0))
            elif live:
                upto = max(map(newest.at.__getitem__, slots), default=0)
            if upto >= next(iter(live), upto + 1):
                self._drop_passed(live)
                fences += [fence for number, fence in live.items() if number <= upto]
        return tuple(fences)

    def _number(self, fence: Fence) -> int:
        if fence.lane not in self._live:
            self._live[fence.lane], self._newest[fence.lane] = {}, PerSlot("q", self._num_slots)
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

    keys: tuple[bytes, ...]
    run: Run
    num_forgets: int


class KeyIndex:
    """Keys of sealed slots: each key in one slot, each slot with at most one key. Knows nothing about the
    slots' owners."""

    def __init__(self, num_slots: int) -> None:
        self.key_of: list[bytes | None] = [None] * num_slots  # by slot; None: not sealed
        self.sealed = PerSlot("B", num_slots)  # 1: it has a key
        self.slot_of: dict[bytes, int] = {}
        self._num_forgets = 0
        self._lost_at = PerSlot("q", num_slots)  # the number of the forget that last took its key
        # by id() of the keys; the answer keeps them alive, so the id stays theirs
        self._found: dict[int, Found] = {}
        self._found_before: dict[int, Found] = {}
        # the newest answer about a tuple of keys: many requests often share a prefix
        self.last = Found((), [], 0)

    def __len__(self) -> int:
        return len(self.slot_of)

    def find(self, keys: Sequence[bytes], like: Found | None = None) -> Run:
        """Slots of the longest run of leading `keys` that are here; callers must not change it. A waiting
        request asks in every plan. For the same tuple, only keys after the last answer are looked up, and
        only slots forgotten since are rechecked. A key covers all tokens before it: if two tuples have the
        same key in the same place, an answer up to there holds for both. `like`: an earlier answer that the
        caller kept; ignored if it is about other keys."""
        # first: another thread may be changing the index
        num_forgets = self._num_forgets
        known = (
            self._found.get(id(keys))
            or self._found_before.get(id(keys))
            or _as_far_as(like, keys)
            or _as_far_as(self.last, keys)
        )
        run: Run = []
        if known is not None:
            run = known.run if known.num_forgets == num_forgets else self._still_here(known)
        num = len(run)
        if num < len(keys) and keys[num] in self.slot_of:
            run = self._extended(run, keys[num:] if num else keys)
        if isinstance(keys, tuple):
            same = known is not None and known.run is run and known.num_forgets == num_forgets
            found = (
                known if known is not None and same and known.keys is keys else Found(keys, run, num_forgets)
            )
            # In two halves, of which the older is dropped as a whole: another thread cannot spoil any step of
            # that.
            if len(self._found) >= _REMEMBERED and id(keys) not in self._found:
                self._found, self._found_before = {}, self._found
            self._found[id(keys)] = self.last = found
        return run

    def _extended(self, run: Run, keys: Sequence[bytes]) -> Run:
        slots: list[int] = []
        with suppress(KeyError):  # the first missing key ends it; the list has the keys before
            slots.extend(map(self.slot_of.__getitem__, keys))
        if isinstance(run, np.ndarray):
            return np.concatenate((run, np.array(slots, np.intp)))
        return as_run([*run, *slots] if run else slots)

    def _still_here(self, known: Found) -> Run:
        """Its run, up to the first slot that has lost its key since."""
        run = known.run
        if isinstance(run, np.ndarray):
            lost = np.flatnonzero(self._lost_at.array[run] > known.num_forgets)
            return as_run(run[: lost[0]]) if lost.size else run
        lost_at = self._lost_at.at
        end = next((place for place, slot in enumerate(run) if lost_at[slot] > known.num_forgets), None)
        return run if end is None else run[:end]

    def add(self, slots: Sequence[int], keys: Sequence[bytes]) -> list[int]:
        """Give each slot its key unless another slot has the key: first writer wins. Returns the slots that
        got theirs."""
        if any(map(self.key_of.__getitem__, slots)):
            raise InvariantBroken(
                f"slot {next(slot for slot in slots if self.key_of[slot])} is sealed already"
            )
        homes = list(map(self.slot_of.setdefault, keys, slots))
        taken, given = list(slots), keys
        if homes != taken:
            places = [place for place, slot in enumerate(slots) if homes[place] == slot]
            taken, given = [slots[place] for place in places], [keys[place] for place in places]
        key_of = self.key_of
        for slot, key in zip(taken, given, strict=True):
            key_of[slot] = key
        self.sealed.set(as_run(taken), 1)
        return taken

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
        run = as_run(slots)
        self.sealed.set(run, 0)
        self._lost_at.set(run, self._num_forgets + 1)
        # After the change: a thread that looks meanwhile has seen an old state.
        self._num_forgets += 1
        return keys

    def check(self) -> None:
        """Raise unless both directions agree."""
        backwards = [(key, slot) for slot, key in enumerate(self.key_of) if key is not None]
        if len(backwards) != len(self.slot_of) or dict(backwards) != self.slot_of:
            raise InvariantBroken(
                f"{len(backwards)} slots have a key and {len(self.slot_of)} keys have a slot, and they "
                "disagree"
            )
        if [slot for _, slot in backwards] != [slot for slot, sealed in enumerate(self.sealed.at) if sealed]:
            raise InvariantBroken(
                f"{len(backwards)} slots have a key, and they are not the {sum(self.sealed.at)} that are "
                "said to be sealed"
            )


def _as_far_as(found: Found | None, keys: Sequence[bytes]) -> Found | None:
    """`found` if `keys` begin with all of it: a caller may pass an answer about other keys by mistake."""
    if found is None or not isinstance(keys, tuple):
        return None
    num = len(found.run)
    return found if 0 < num <= len(keys) and keys[num - 1] == found.keys[num - 1] else None


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
        self.num_evicted = 0
        self.num_duplicates = 0  # seals whose key another slot had already
        # evicted or forgotten keys; None: not collected
        self.gone: list[bytes] | None = None
        self._observer = observer
        if observer is not None:
            observer.opened(name, num_slots)
        self._book = SlotBook(num_slots, name, observer)
        self._index = KeyIndex(num_slots)
        # First in, first out: the slot that rests longest goes first, so that the fences of its last use have
        # had time to pass.
        self._free: deque[int] = deque()  # used before, longest ago first
        # never used; they come last, since their memory may not be faulted in yet
        self._fresh = deque(range(num_slots))
        self._order = LruOrder(num_slots) if eviction is None else eviction
        self._idle = WantedLast(self._order, num_slots)
        self._depths = array("q", bytes(8 * num_slots))  # of sealed blocks: positions in their prefixes
        self._last_use = LastUse(num_slots)
        self._out: dict[Handle, None] | None = {}  # in order of lending; None: closed

    # ---------------------------------------------------------------------------------------------- questions

    @property
    def counts(self) -> SlotCounts:
        return SlotCounts(*self._book.num_in)

    @property
    def num_available(self) -> int:
        """Slots that can be reserved now: free or evictable."""
        return self._book.num_in[SlotState.FREE] + self._book.num_in[SlotState.IDLE]

    @property
    def num_free(self) -> int:
        """Slots that can be reserved without an eviction."""
        return self._book.num_in[SlotState.FREE]

    @property
    def num_unwanted(self) -> int:
        """Slots that can be reserved without evicting a wanted block."""
        return self.num_free + len(self._order)

    @property
    def num_keys(self) -> int:
        return len(self._index)

    def find(self, keys: Sequence[bytes], like: PoolWant | None = None) -> Run:
        """Slots of the longest run of leading `keys` that are here; neither they nor the answer may be
        changed. `like`: a want with the answer for the same keys, so that only changes since are looked
        up."""
        return self._index.find(keys, None if like is None else like.found)

    def want_found(self, keys: tuple[bytes, ...], rank: float, earlier: PoolWant | None = None) -> PoolWant:
        """Want the longest run of leading `keys` that are here, in place of `earlier`."""
        want = self.want(self.find(keys, earlier), rank, earlier)
        if want is not earlier:
            want.found = self._index.last if keys else None
        return want

    def find_each(self, keys: Sequence[bytes]) -> list[int]:
        """The slot of each key, or -1."""
        return list(map(self._index.slot_of.get, keys, repeat(-1)))

    def keys(self) -> list[bytes]:
        """Keys of all sealed blocks."""
        return [key for key in self._index.key_of if key is not None]

    def coldest(self, num: int) -> list[bytes]:
        """Keys of the idle blocks that are evicted next, roughly in order."""
        return [key for slot in islice(self._idle, num) if (key := self._index.key_of[slot]) is not None]

    def coldest_slots(self, num: int) -> list[int]:
        """Slots that `evict(num)` would take now, roughly in order. Drops wants as `evict` does."""
        self._idle.expose(num)
        return list(islice(self._idle, num))

    def keys_of(self, slots: Sequence[int]) -> list[bytes]:
        """Keys of sealed slots."""
        return [key for slot in slots if (key := self._index.key_of[slot]) is not None]

    def depths_of(self, slots: Sequence[int]) -> list[int]:
        """Positions of their blocks in their prefixes, as given at sealing."""
        return [self._depths[slot] for slot in slots]

    def last_use(self, slots: Run) -> tuple[Fence, ...]:
        """Fences of former owners of `slots` that have not passed."""
        return self._last_use.after(slots)

    def pins(self) -> list[Pin]:
        """The open pins."""
        return [handle for handle in self._out or () if isinstance(handle, Pin)]

    def is_held(self, slot: int) -> bool:
        """Whether a table holds it; pins do not count."""
        return self._book.holds.at[slot] > 0

    def num_idle_of(self, slots: Run) -> int:
        return len(self._book.those_in(SlotState.IDLE, slots))

    # ------------------------------------------------------------------------------------------------ lending

    def try_reserve(self, num_slots: int, owner: str) -> Reservation | None:
        """Take that many slots, evicting idle blocks if too few are free."""
        out = self._handles
        if num_slots < 0:
            raise InvariantBroken(f"{owner!r} asked pool {self.name!r} for {num_slots} slots")
        if num_slots > self.num_available:
            return None
        free, fresh = self._free, self._fresh
        if num_slots > len(free) + len(fresh):
            self.evict(num_slots - len(free) - len(fresh))
        slots = [(free or fresh).popleft() for _ in range(num_slots)]
        slots.sort()  # neighbours are copied as one
        run = as_run(slots)
        self._book.move(run, SlotEvent.RESERVE, SlotState.RESERVED, owner)
        self._book.holds.add(run, 1)
        reservation = Reservation(owner, self, run, self._last_use.after(run))
        out[reservation] = None
        return reservation

    def commit(self, reservation: Reservation, hold: Hold) -> None:
        """For `Reservation.commit`."""
        hold.require_open()
        if hold not in self._handles:
            raise InvariantBroken(f"the {hold} is not out of pool {self.name!r}")
        self._book.move(reservation.run, SlotEvent.COMMIT, SlotState.ACTIVE, hold.owner)
        hold.append(reservation.run)
        del self._handles[reservation]

    def split(self, reservation: Reservation, num_slots: int) -> Reservation:
        """For `Reservation.split`."""
        if reservation not in self._handles or not 0 < num_slots < len(reservation.run):
            raise InvariantBroken(
                f"pool {self.name!r}: {num_slots} slots of the {reservation} are not to be had"
            )
        first = Reservation(reservation.owner, self, reservation.run[:num_slots], reservation.after)
        self._handles[first] = None
        return first

    def hold(self, owner: str, shared: Sequence[int] | Run = (), num_elsewhere: int = 0) -> Hold:
        """A hold that starts with the sealed slots `shared`, which other tables may hold, too; it grows by
        `Reservation.commit`. Before them it has `num_elsewhere` places without a slot, for blocks that are
        not in this pool."""
        out, book, run = self._handles, self._book, as_run(shared)
        if len(run):
            book.require(run, SlotEvent.SHARE)
            if not self._index.sealed.all(run):
                slot = next(slot for slot in shared if not self._index.sealed.at[slot])
                raise InvariantBroken(
                    f"pool {self.name!r}: {owner!r} wants to share slot {slot}, which is not sealed"
                )
            self._idle.remove(book.those_in(SlotState.IDLE, run))
            self._order.hit(run)
            book.move(run, SlotEvent.SHARE, SlotState.ACTIVE, owner)
            book.holds.add(run, 1)
        hold = Hold(owner, self, num_elsewhere)
        hold.append(run)
        out[hold] = None
        if self._observer is not None:
            self._observer.lent(self.name, hold.slots, owner)
        return hold

    def pin(self, slots: Sequence[int] | Run, owner: str) -> Pin:
        """Protect `slots` from eviction and reuse until the pin ends."""
        out, book = self._handles, self._book
        run = as_run(slots if isinstance(slots, np.ndarray) else list(slots))
        book.require(run, SlotEvent.PIN)
        idle = book.those_in(SlotState.IDLE, run)
        self._idle.remove(idle)
        book.move(idle, SlotEvent.PIN, SlotState.PINNED, owner)
        book.pins.add(run, 1)
        pin = Pin(owner, self, run)
        out[pin] = None
        if self._observer is not None:
            self._observer.lent(self.name, pin.slots, owner)
        return pin

    def pin_run(self, hold: Hold, first: int, num_slots: int, owner: str) -> RunPin:
        """Protect slots `first..first + num_slots` of `hold` beyond its end. Constant cost."""
        hold.require_open()
        if hold not in self._handles or not 0 <= first <= first + num_slots <= hold.num_slots:
            raise InvariantBroken(
                f"pool {self.name!r}: {owner!r} pins slots {first} to {first + num_slots} of the {hold}"
            )
        pin = RunPin(owner, self, hold, first, num_slots)
        hold.run_pins.add(pin)
        self._handles[pin] = None
        return pin

    def take_back(self, handle: Handle, fence: Fence | None) -> None:
        """For the handles: `handle` ends. A slot without holds and pins becomes idle if it is sealed, else
        free."""
        if self._observer is not None:
            self._observer.returned(self.name, handle.slots, handle.owner, fence)
        if isinstance(handle, RunPin) and not handle.hold.ended:
            del self._handles[handle]
            handle.hold.run_pins.remove(handle)
            self._last_use.note(handle.run if fence is not None else [], fence)
            return
        book, run = self._book, handle.run
        del self._handles[handle]
        if isinstance(handle, Hold):
            for pin in handle.run_pins:
                book.pins.add(pin.run, 1)
        self._last_use.note(run, fence)
        (book.pins if isinstance(handle, Pin) else book.holds).add(run, -1)
        self._settle_unused(run, handle.owner)

    def drop_first(self, hold: Hold, num_slots: int, fence: Fence | None) -> None:
        """For `Hold.drop_first`."""
        end = hold.num_dropped + num_slots
        if (
            hold not in self._handles
            or num_slots < 0
            or end > hold.num_slots
            or any(pin.first < end for pin in hold.run_pins)
        ):
            raise InvariantBroken(
                f"pool {self.name!r}: the first {num_slots} slots of the {hold} cannot be given back"
            )
        run = as_run(hold.first(end)[hold.num_dropped :])
        if self._observer is not None:
            self._observer.returned(self.name, as_list(run), hold.owner, fence)
        self._last_use.note(run, fence)
        self._book.holds.add(run, -1)
        self._settle_unused(run, hold.owner)

    def _settle_unused(self, run: Run, owner: str) -> None:
        """Slots of `run` without a hold change their state."""
        book = self._book
        pinned, idle, free = book.those_not_held(run, self._index.sealed)
        book.move(pinned, SlotEvent.GIVE_BACK, SlotState.PINNED, owner)
        book.move(idle, SlotEvent.GIVE_BACK, SlotState.IDLE, owner)
        book.move(free, SlotEvent.GIVE_BACK, SlotState.FREE, owner)
        # the deepest goes first: a prefix is useful without its continuation, not the other way round
        self._idle.add(idle[::-1])
        self._free.extend(as_list(free))

    # ------------------------------------------------------------------------------------------------ content

    def seal(
        self,
        slots: Sequence[int] | NDArray[np.int32],
        keys: Sequence[bytes],
        depths: Sequence[int] | None = None,
    ) -> int:
        """`slots` are full and written: give each its key. A slot whose key another slot has stays private,
        without a key. Returns how many got theirs. `depths` are the blocks' positions in their prefixes, for
        the eviction order."""
        if len(slots) != len(keys) or (depths is not None and len(depths) != len(keys)):
            raise InvariantBroken(
                f"{len(slots)} slots cannot be sealed with {len(keys)} keys or another number of depths"
            )
        self._book.require(as_run(slots), SlotEvent.SEAL)
        taken = self._index.add(as_list(slots), keys)
        depths = [0] * len(slots) if depths is None else depths
        if len(taken) < len(slots):
            kept = set(taken)
            places = [place for place, slot in enumerate(as_list(slots)) if slot in kept]
            keys, depths = [keys[place] for place in places], [depths[place] for place in places]
            self.num_duplicates += len(slots) - len(taken)
        for slot, depth in zip(taken, depths, strict=True):
            self._depths[slot] = depth
        self._order.sealed(taken, keys, depths)
        if self._observer is not None:
            for slot, key in zip(taken, keys, strict=True):
                self._observer.sealed(self.name, slot, key)
        return len(taken)

    def note_hits(self, slots: Run) -> None:
        """For the eviction order: the sealed `slots` were found again and are read under a pin, not a
        hold."""
        self._order.hit(slots)

    def want(self, slots: Run, rank: float, earlier: PoolWant | None = None) -> PoolWant:
        """Mark the sealed `slots` as wanted: they are evicted after unwanted ones, the greatest `rank` first.
        Ends by `end_want`, or when nothing else is left to evict. `earlier`: the want that it replaces, for
        the same blocks. If both have the same number of blocks and none was evicted, `earlier` is reused."""
        if earlier is not None and earlier.num_blocks == len(slots) and self.protects(earlier):
            earlier.rank = rank
            return earlier
        want = self._idle.want(slots, self._book.those_in(SlotState.IDLE, slots), rank)
        if earlier is not None:
            self.end_want(earlier)
        return want

    def end_want(self, want: PoolWant) -> None:
        """Idempotent."""
        self._idle.end(want)

    def protects(self, want: PoolWant) -> bool:
        """Whether it still protects all its blocks: it has neither ended nor been dropped, and none was
        evicted."""
        return want in self._idle and not self._idle.gone(want).any()

    def gone_of(self, want: PoolWant) -> NDArray[np.bool_]:
        """Which of its slots have lost the wanted block."""
        return self._idle.gone(want)

    def evict(self, num_slots: int) -> int:
        """Evict that many idle blocks, or all if there are fewer. Returns how many."""
        slots = self._idle.pop(num_slots)
        self._lose(slots, slots)
        self.num_evicted += len(slots)
        return len(slots)

    def evict_these(self, slots: Sequence[int]) -> int:
        """Evict those of `slots` that are idle, wanted or not. Returns how many."""
        idle = self._book.those_in(SlotState.IDLE, as_run(slots))
        self.num_evicted += len(idle)
        return self.forget(as_list(idle))

    def forget_idle(self, slots: Sequence[int], most: int) -> int:
        """Evict up to `most` of `slots` that are idle, wanted or not, the last ones first. Returns how
        many."""
        idle = as_list(self._book.those_in(SlotState.IDLE, as_run(slots)))
        return self.forget(idle[max(0, len(idle) - most) :])

    def forget(self, slots: Sequence[int]) -> int:
        """Remove the keys of `slots`. A held or pinned block stays until its handles end; its slot is free
        then. Returns how many keys were removed."""
        sealed = [slot for slot in slots if self._index.sealed.at[slot]]
        idle = self._book.those_in(SlotState.IDLE, as_run(sealed))
        self._idle.remove(idle)
        self._idle.lost(sealed)
        self._lose(sealed, as_list(idle))
        return len(sealed)

    def _lose(self, slots: list[int], idle: list[int]) -> None:
        """`slots` have lost their keys; the `idle` ones among them become free."""
        self._book.move(as_run(idle), SlotEvent.EVICT, SlotState.FREE, self.name)
        keys = self._index.forget(slots)
        if self.gone is not None:
            self.gone += keys
        self._free.extend(idle)
        if self._observer is not None:
            for slot, key in zip(slots, keys, strict=True):
                self._observer.evicted(self.name, slot, key)

    # ---------------------------------------------------------------------------------------------------- end

    def check(self) -> None:
        """Recount everything from the open handles, and raise if the running books differ."""
        out = list(self._out or ())
        booked = (
            handle
            for handle in out
            if isinstance(handle, Pin) and not (isinstance(handle, RunPin) and not handle.hold.ended)
        )
        pins = Counter(slot for handle in booked for slot in handle.slots)
        holds = Counter(slot for handle in out if not isinstance(handle, Pin) for slot in handle.slots)
        reserved = {slot for handle in out if isinstance(handle, Reservation) for slot in handle.slots}
        for slot, state in enumerate(self._book.state.at):
            noted = (SlotState(state), self._book.holds.at[slot], self._book.pins.at[slot])
            sealed = self._index.key_of[slot] is not None
            counted = (_state(slot in reserved, holds[slot], pins[slot], sealed), holds[slot], pins[slot])
            if noted != counted:
                raise InvariantBroken(
                    f"slot {slot} of pool {self.name!r}: booked (state, holds, pins) {noted}, counted "
                    f"{counted}"
                )
        in_state = {
            state: [slot for slot, found in enumerate(self._book.state.at) if found == state]
            for state in SlotState
        }
        if self.counts != SlotCounts(*(len(in_state[state]) for state in SlotState)):
            raise InvariantBroken(f"pool {self.name!r}: {self.counts} is not what a recount gives")
        if (
            sorted([*self._free, *self._fresh]) != in_state[SlotState.FREE]
            or sorted(self._idle) != in_state[SlotState.IDLE]
        ):
            raise InvariantBroken(
                f"pool {self.name!r}: the orders of free and idle slots do not hold exactly those"
            )
        self._index.check()

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
    def _handles(self) -> dict[Handle, None]:
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
        for key in self._keys.pop(owner, frozenset()):
            self.num_owners[key] -= 1
            if not self.num_owners[key]:
                del self.num_owners[key]
        ended, self._ends = self._ends, []
        self.landed(list(self.num_owners))
        for end in ended:
            end()

    def landed(self, keys: Iterable[bytes]) -> None:
        """These keys were just sealed: protect the pinned ones among them."""
        slots = [
            slot
            for slot in self._pool.find_each([key for key in keys if key in self.num_owners])
            if slot >= 0
        ]
        if slots:
            self._ends.append(self._protect(as_run(slots)))
