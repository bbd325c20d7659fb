"""Ways of getting blocks between host memory and a store behind it, taking turns with whatever they are compared with. Owns the turns and
the ways of a cold tier; what they are compared with is each store's own file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from penstock.bench.cold_rig import OWNER, ColdRig
from penstock.contract import Table
from penstock.errors import InvariantBroken, StoreFailed
from penstock.kv.blocks.handles import Reservation
from penstock.kv.tiers.store import Outcome
from penstock.models.progress import Progress

WARM_UP = 0  # number of the run that is not measured, but checked byte by byte
RAW, TIER, PERSISTED = "raw", "tier", "tier, persisted"

Wait = Callable[[], None]
Beside = tuple[tuple[str, str], ...]  # directions and names of ways that come before


class ColdWay(Protocol):
    """All blocks of a rig, one way."""

    @property
    def direction(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def beside(self) -> Beside:
        """What it is compared with, the fastest of them; none: with nothing."""

    def prepare(self, spoil: bool) -> None:
        """Untimed. `spoil`: nothing of what is to arrive is there yet."""

    def launch(self) -> Wait:
        """Submit all of it; what is returned blocks until it is over, and raises what went wrong."""

    def finish(self, check: bool) -> None:
        """Untimed. `check`: every byte has arrived."""


# -------------------------------------------------------------------------------------------------------------- where to


class Room:
    """Host slots to read into, while there is need of them."""

    def __init__(self, rig: ColdRig) -> None:
        self._rig = rig
        self._reservation: Reservation | None = None

    @property
    def slots(self) -> Sequence[int]:
        if self._reservation is None:
            raise InvariantBroken("there is no room to read into")
        return self._reservation.slots

    @property
    def views(self) -> list[memoryview]:
        return [self._rig.host.view(slot) for slot in self.slots]

    def take(self, spoil: bool) -> None:
        self._reservation = self._rig.slots.take_private(len(self._rig.keys), OWNER)
        if spoil:
            for slot in self.slots:
                self._rig.host.tensor[slot].zero_()

    def give_back(self, checked_as: str | None) -> None:
        if checked_as is not None:
            self._rig.check(self.views, checked_as)
        if self._reservation is not None:
            self._rig.slots.end_handles([self._reservation])
            self._reservation = None


# -------------------------------------------------------------------------------------------------------------- the tier


class TierWrite:
    """From host slots into a store that has none of it, on the tier's lanes; over when the tier says so, or when it is safe as well."""

    def __init__(self, rig: ColdRig, direction: str, beside: Sequence[str], persist: bool = False) -> None:
        self.direction = direction
        self.name = PERSISTED if persist else TIER
        self.beside: Beside = tuple((direction, name) for name in beside)
        self._rig = rig
        self._persist = persist

    def prepare(self, spoil: bool) -> None:
        self._rig.empty_store()

    def launch(self) -> Wait:
        rig = self._rig
        slots, pin = rig.slots.pin_each(rig.keys, OWNER)
        writing = None if pin is None else rig.tier.try_write(rig.keys, rig.depths, slots, pin, (), must=True)
        if writing is None:
            raise StoreFailed(f"the {rig.tier.name} tier takes no blocks")
        sync = rig.tier.persist() if self._persist else None

        def wait() -> None:
            rig.wait_until(lambda: writing.settled and (sync is None or sync.settled))
            if sync is not None and sync.error is not None:
                raise sync.error
            _require_done(writing.outcomes, self.direction, writing.error)

        return wait

    def finish(self, check: bool) -> None:
        """What was written is checked when it is read."""


class TierRead:
    """From the store into host slots, on the tier's lanes."""

    name = TIER

    def __init__(self, rig: ColdRig, direction: str, beside: Sequence[str]) -> None:
        self.direction = direction
        self.beside: Beside = tuple((direction, name) for name in beside)
        self._rig = rig
        self._room = Room(rig)

    def prepare(self, spoil: bool) -> None:
        self._room.take(spoil)

    def launch(self) -> Wait:
        reading = self._rig.tier.read(self._rig.keys, self._room.slots, (), OWNER)

        def wait() -> None:
            self._rig.wait_until(lambda: reading.over)
            _require_done([outcome for group in reading.take_arrived() for outcome in group.outcomes], self.direction)

        return wait

    def finish(self, check: bool) -> None:
        self._room.give_back(f"{self.direction}, {self.name}" if check else None)


class Promoted:
    """From the store to the device, through host memory, as a request's prefix comes: leased, promoted block by block, settled."""

    name = "pipelined"

    def __init__(self, rig: ColdRig, direction: str, beside: tuple[str, str]) -> None:
        self.direction = direction
        self.beside: Beside = (beside,)
        self._rig = rig
        self._table: Table | None = None

    def prepare(self, spoil: bool) -> None:
        self._rig.wait_idle()
        self._rig.cache.reset(("device", "host"))
        if spoil:
            self._rig.spoil()

    def launch(self) -> Wait:
        rig, num = self._rig, len(self._rig.keys)
        lease = rig.cache.lease(OWNER, rig.prefix)
        if lease is None:
            raise InvariantBroken(f"the {rig.tier.name} tier has nothing of what was written")
        rig.wait_until(lambda: lease.ready)
        if (found := rig.cache.match(rig.keys, lease).num_colder) != num:
            raise InvariantBroken(f"the {rig.tier.name} tier has {found} of {num} blocks that were written")
        table = self._table = rig.cache.open(OWNER, rig.prefix, 0)
        load = rig.cache.promote(table, lease, num, 1)

        def wait() -> None:
            rig.wait_until(lambda: load.settled)
            if (error := load.error()) is not None:
                raise error

        return wait

    def finish(self, check: bool) -> None:
        if self._table is not None:
            if check:
                slots = self._table.slots(len(self._rig.keys) * self._rig.layout.block_tokens).tolist()
                self._rig.check(self._rig.device_views(slots), self.direction)
            self._rig.cache.release(self._table, None)
            self._table = None
        self._rig.wait_idle()


def _require_done(outcomes: Sequence[Outcome], direction: str, why: BaseException | None = None) -> None:
    num_lost = sum(outcome is not Outcome.DONE for outcome in outcomes)
    if num_lost:
        raise StoreFailed(f"{direction}: {num_lost} of {len(outcomes)} blocks did not come across") from why


# ------------------------------------------------------------------------------------------------------------------ turns


class Timed(NamedTuple):
    submit_s: float  # of the thread that submits
    total_s: float  # from submit to over


def take_turns(rig: ColdRig, ways: Sequence[ColdWay], repeat: int, progress: Progress) -> list[dict[str, Any]]:
    """Every way once per run, in an order that turns around, so that none always comes behind the same; a row for each."""
    taken: list[list[Timed]] = [[] for _ in ways]
    stage = f"{rig.tier.name}, {len(rig.keys)} blocks"
    for run in range(1 + repeat):
        progress(stage, run, 1 + repeat)
        for number in range(len(ways)) if run % 2 == WARM_UP else reversed(range(len(ways))):
            one = _timed(ways[number], run == WARM_UP)
            if run != WARM_UP:
                taken[number].append(one)
    progress(stage, 1 + repeat, 1 + repeat)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for way, runs in zip(ways, taken, strict=True):
        row = rows[way.direction, way.name] = _row(rig, way, runs)
        if way.beside:
            fastest = max(way.beside, key=lambda name: rows[name]["gb_s"])
            row |= {"beside": ", ".join(fastest), "percent_of_raw": 100 * row["gb_s"] / rows[fastest]["gb_s"]}
    return list(rows.values())


def _timed(way: ColdWay, checked: bool) -> Timed:
    way.prepare(checked)
    started = perf_counter()
    wait = way.launch()
    submitted = perf_counter()
    wait()
    ended = perf_counter()
    way.finish(checked)
    return Timed(submitted - started, ended - started)


def _row(rig: ColdRig, way: ColdWay, runs: list[Timed]) -> dict[str, Any]:
    total_s = median(run.total_s for run in runs)
    return {
        "direction": way.direction,
        "blocks": len(rig.keys),
        "bytes": rig.num_bytes,
        "way": way.name,
        "beside": None,
        "layers": None,
        "gb_s": rig.num_bytes / total_s / 1e9,
        "percent_of_raw": 100.0,
        "total_ms": {"median": total_s * 1000, "all": [run.total_s * 1000 for run in runs]},
        "submit_ms": {"median": median(run.submit_s for run in runs) * 1000, "all": [run.submit_s * 1000 for run in runs]},
    }
