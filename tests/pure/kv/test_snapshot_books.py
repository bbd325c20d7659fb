"""Snapshots of two engines over a shared store, without engines: whose names there are, what they pin, where
their manifests lie, whatever is taken, deleted, expired, restarted or down, in any order."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import numpy as np
import pytest

from penstock.contract import Adapter, Snapshot, SnapshotRequest
from penstock.errors import (
    InvalidRequest,
    SnapshotMissing,
    SnapshotRefused,
    SnapshotSpace,
    SnapshotTaken,
    StoreFailed,
)
from penstock.kv import snapshots as module
from penstock.kv.blocks.key import tenant_of
from penstock.kv.questions import run_steps
from penstock.kv.snapshots import Snapshots
from penstock.kv.tiers.manifest import snapshot_id, unpack
from penstock.kv.tiers.store import Written
from penstock.testing.stores import HandClock, MemoryStore
from tests.pure.kv.stacked_rig import Stacked
from tests.pure.kv.storage_rig import BLOCK

NUM_HOST = 24  # of which snapshots may pin a half
TALK = np.arange(100, 100 + 10 * BLOCK, dtype=np.uint32)


def take_of(
    registry: Snapshots, asked: SnapshotRequest, tokens: np.ndarray, wait_saved: Callable[[], None]
) -> Snapshot:
    """`wait_saved` runs while it waits for its blocks to be saved."""
    reached, saved = Future[None](), Future[None]()

    def save(keys: Sequence[bytes]) -> Future[None]:
        reached.set_result(None)
        return saved

    taking = run_steps(registry.taking(asked, tokens, save))
    wait([reached, taking], 60.0, FIRST_COMPLETED)
    if reached.done():
        try:
            wait_saved()
            saved.set_result(None)
        except BaseException as error:
            saved.set_exception(error)
    return taking.result(60.0)


class Machine:
    """An engine's storage, and what it knows of snapshots. Its disk outlives a restart; the shared store is
    not its own."""

    def __init__(self, clock: HandClock, shared: dict[str, bytes]) -> None:
        self.clock, self.shared = clock, shared
        self.on_disk: dict[str, bytes] = {}
        self.told: list[tuple[str, str, float | None]] = []  # tier, id, and how long its manifest is of use
        self.failing: set[str] = set()  # tiers that take no manifest
        self.start()

    def start(self) -> None:
        self.rig = Stacked("ssd", "remote", num_host=NUM_HOST)
        for name, kept in (("ssd", self.on_disk), ("remote", self.shared)):
            store = self.rig.stores[name]
            store.kept_manifests = kept
            self._watch(store)
            for salt in ("", "b"):
                for talk in (TALK, TALK + 50):
                    store.blocks.update(dict.fromkeys(self.keys(talk, salt), bytearray()))
        self.registry = Snapshots(self.rig.cache, clock=self.clock)
        self.registry._begin(lambda: None).result(60.0)  # what was on disk is known

    def _watch(self, store: MemoryStore) -> None:
        inner = store.write_manifest

        def write(
            id: str, data: bytes, expires_in_s: float | None, instead_of: bytes | None = None
        ) -> Written:
            if store.name in self.failing:
                raise StoreFailed("no")
            self.told.append((store.name, id, expires_in_s))
            return inner(id, data, expires_in_s, instead_of)

        store.write_manifest = write  # type: ignore[method-assign]

    def keys(self, tokens: np.ndarray, salt: str = "") -> set[bytes]:
        prefix = self.rig.cache.prefix_of(tokens, salt)
        return set() if prefix is None else set(prefix.keys)

    def take(self, name: str, tokens: np.ndarray = TALK, salt: str = "", **fields: Any) -> Any:
        return take_of(
            self.registry, SnapshotRequest(name, prompt=b"-", cache_salt=salt, **fields), tokens, lambda: None
        )

    def find(self, name: str) -> Snapshot:
        return self.registry.begin_find(name).result(60.0)

    def heal(self) -> None:
        """Its stores answer, and it looks."""
        for name, tier in self.rig.tiers.items():
            self.rig.stores[name].raises = None
            self.rig.clock.advance(10_000.0)
            if tier.calls.breaker.try_probe():
                tier.calls.probe()

    def step(self) -> None:
        """A turn of the engine, and what it has others do."""
        self.registry.step()
        self.registry._begin(lambda: None).result(60.0)

    @property
    def num_pinned(self) -> int:
        return self.registry.figures().pinned_blocks

    def restart(self) -> None:
        self.close()
        self.start()

    def close(self) -> None:
        self.registry.close(30.0)
        assert self.num_pinned == 0 and not self.rig.host.pool.counts.pinned


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def machines(clock: HandClock) -> Iterator[tuple[Machine, Machine]]:
    shared: dict[str, bytes] = {}
    both = Machine(clock, shared), Machine(clock, shared)
    yield both
    for machine in both:
        machine.close()


def names(machine: Machine, salt: str = "") -> list[str]:
    return [one.name for one in machine.registry.all(salt).snapshots]


# ---------------------------------------------------------------------------------------------- one at a time


def test_a_name_is_taken_from_the_first_moment(machines: tuple[Machine, Machine]) -> None:
    """Also while it is being saved, and nobody else knows of it."""
    here, _ = machines
    seen: list[type] = []

    def again() -> None:
        with pytest.raises(SnapshotTaken) as found:
            here.take("talk", TALK[: 2 * BLOCK])
        seen.append(found.type)
        with pytest.raises(SnapshotMissing):
            here.find("talk")

    take_of(here.registry, SnapshotRequest("talk", prompt=b"-"), TALK, again)
    assert seen == [SnapshotTaken] and here.find("talk").num_blocks == 10 and here.num_pinned == 10


# Holds invariant 20: a snapshot that is being taken can be cancelled in every state.
@pytest.mark.parametrize("state", ["waiting", "reserving", "saving", "writing"])
def test_a_cancel_in_any_state_leaves_neither_pins_nor_a_name_nor_a_manifest(
    machines: tuple[Machine, Machine], state: str
) -> None:
    here, there = machines
    reached, go_on, saved = threading.Event(), threading.Event(), Future[None]()
    stops_at = {"reserving": "read_manifest", "writing": "write_manifest"}.get(state)

    def look(call: str) -> None:
        if call == stops_at:
            here.rig.stores["remote"].on_call = lambda call: None
            reached.set()
            assert go_on.wait(60.0)

    def save(keys: Sequence[bytes]) -> Future[None]:
        if state == "saving":
            reached.set()
        else:
            saved.set_result(None)
        return saved

    here.rig.stores["remote"].on_call = look
    if state == "waiting":
        before = here.registry._begin(lambda: (reached.set(), go_on.wait(60.0)))
    taking = run_steps(here.registry.taking(SnapshotRequest("talk", prompt=b"-"), TALK, save))
    assert reached.wait(60.0) and taking.cancel()
    if state == "waiting":
        assert here.registry.figures().waiting == 0 and not before.done(), (
            "it has left the line, and the lane is still busy"
        )
    go_on.set()
    assert names(here) == names(there) == [] and here.num_pinned == 0 and not here.on_disk and not here.shared
    here.take("talk")
    assert here.num_pinned == 10


def test_a_long_list_lets_others_through(machines: tuple[Machine, Machine]) -> None:
    here, there = machines
    for number in range(40):
        there.take(f"talk-{number}", TALK[:BLOCK])
    reads = 0
    found: list[Future[Any]] = []

    def look(call: str) -> None:
        nonlocal reads
        reads += call == "read_manifest"
        if reads == 5 and not found:
            found.append(here.registry.begin_open("talk-3"))
            found[0].add_done_callback(lambda _: found.append(Future()) if reads < 40 else None)

    here.rig.stores["remote"].on_call = look
    assert len(here.registry.all().snapshots) == 40
    assert found[0].result(60.0).tokens and len(found) == 2, "it was answered before the list was whole"


def test_one_store_that_takes_a_manifest_is_enough(machines: tuple[Machine, Machine]) -> None:
    here, _ = machines
    for name, failing in (("one", {"remote"}), ("two", {"ssd"}), ("three", {"ssd", "remote"})):
        here.failing = failing
        if name == "three":
            with pytest.raises(StoreFailed):
                here.take(name)
        else:
            assert {*here.take(name).tiers, *failing} == {"ssd", "remote"}
        here.heal()
    assert names(here) == ["one", "two"] and here.num_pinned == 10
    here.restart()
    assert here.registry.figures().known == 1 and names(here) == ["one", "two"]


def test_what_is_pinned_is_counted_once_and_up_to_the_very_bound(machines: tuple[Machine, Machine]) -> None:
    here, _ = machines
    here.take("ten")
    here.take("five", TALK[: 5 * BLOCK])
    other = TALK + 50
    with pytest.raises(
        SnapshotSpace,
        match="would pin 3 more blocks: 10 of the 24 in the host tier are pinned, and 12 may be",
    ):
        here.take("three", other[: 3 * BLOCK])
    here.take("two", other[: 2 * BLOCK])
    assert here.num_pinned == 12 and here.registry.figures().refused == 1
    here.registry.delete("ten", "")
    assert here.num_pinned == 7, "the five that another one has stay"
    here.registry.delete("five", "")
    here.registry.delete("two", "")
    assert here.num_pinned == 0


def test_those_that_are_being_taken_count(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _ = machines
    monkeypatch.setattr(module, "MAX_SNAPSHOTS", 2)
    here.take("a", TALK[:BLOCK])

    def another() -> None:
        with pytest.raises(SnapshotSpace, match="2 snapshots already"):
            here.take("c", TALK[:BLOCK])

    take_of(here.registry, SnapshotRequest("b", prompt=b"-"), TALK, another)
    assert here.registry.figures().known == 2


def test_a_damaged_one_keeps_its_name_until_it_is_deleted(machines: tuple[Machine, Machine]) -> None:
    here, there = machines
    here.take("talk")
    id = snapshot_id(tenant_of(""), "talk")
    here.on_disk[id] = here.on_disk[id][:-1]
    del here.shared[id]
    here.restart()
    assert here.registry.figures().damaged == 1 and here.num_pinned == 0
    for refused in (
        lambda: here.find("talk"),
        lambda: here.registry.open("talk", "", None),
    ):
        with pytest.raises(SnapshotRefused, match="truncated"):
            refused()
    with pytest.raises(SnapshotTaken):
        here.take("talk")
    here.registry.delete("talk", "")
    assert not here.on_disk and here.registry.figures().damaged == 0
    here.take("talk")
    there.take("other")


def test_one_that_is_damaged_in_a_shared_store_hides_no_other_and_can_be_deleted(
    machines: tuple[Machine, Machine],
) -> None:
    """Whose name is taken is told to delete it: that has to be possible, from whichever engine."""
    here, there = machines
    for name in ("broken", "whole"):
        there.take(name)
    id = snapshot_id(tenant_of(""), "broken")
    here.shared[id] = here.shared[id][:-1]
    assert names(here) == ["whole"]
    with pytest.raises(SnapshotRefused, match="truncated"):
        here.find("broken")
    with pytest.raises(SnapshotTaken):
        here.take("broken")
    with pytest.raises(SnapshotMissing):
        here.registry.delete("broken", "b")
    here.registry.delete("broken", "")
    assert id not in here.shared and here.registry.figures().deleted == 1
    here.take("broken")
    assert sorted(names(here)) == ["broken", "whole"]


@pytest.mark.parametrize("call", ["manifests", "read_manifest"])
def test_what_a_disk_did_not_give_out_at_start_is_there_when_it_answers(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """One call that fails fences the disk off, so that those after it fail, too: that says nothing about
    their manifests."""
    here, _ = machines
    here.failing.add("remote")
    for name in ("one", "two"):
        here.take(name)
    inner = getattr(MemoryStore, call)
    times = iter([True])

    def failing(store: MemoryStore, *asked: str) -> Any:
        if store.name == "ssd" and next(times, False):
            raise StoreFailed("the disk is away")
        return inner(store, *asked)

    monkeypatch.setattr(MemoryStore, call, failing)
    here.restart()
    for name in ("one", "two"):
        with pytest.raises(StoreFailed, match=f"snapshot '{name}' cannot be read"):
            here.registry.begin_find(name, "").result(60.0)
    assert here.registry.all("").is_complete == (call == "read_manifest")
    here.clock.advance(1.0)
    with pytest.raises(StoreFailed if call == "manifests" else SnapshotTaken):
        here.take("one")  # which leaves what the disk has under that name
    here.heal()
    for name in ("one", "two"):
        found = here.registry.begin_find(name, "").result(60.0)
        assert found.tiers == ("ssd",) and found.pinned and found.kept_tokens == 10 * BLOCK
    assert sorted(names(here)) == ["one", "two"] and here.num_pinned == 10
    figures = here.registry.figures()
    assert (figures.known, figures.damaged) == (2, 0)
    with pytest.raises(SnapshotTaken):
        here.take("one")


def test_time_that_passed_between_two_lives_counts(
    machines: tuple[Machine, Machine], clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has expired meanwhile takes no room from what has not."""
    here, _ = machines
    here.take("short", ttl_s=10.0)
    clock.advance(1.0)
    here.take("long", (TALK + 50)[: 2 * BLOCK], ttl_s=100.0)
    here.shared.clear()
    clock.advance(20.0)
    monkeypatch.setattr(module, "PINNED_SHARE", 10 / NUM_HOST)
    here.restart()
    assert names(here) == ["long"] and here.find("long").pinned and here.num_pinned == 2
    clock.advance(80.0)
    here.step()
    assert names(here) == [] and not here.on_disk


@pytest.mark.parametrize(
    "fields",
    [
        {"ttl_s": 0.0},
        {"ttl_s": -1.0},
        {"ttl_s": float("inf")},
        {"ttl_s": float("nan")},
        *({"num_tokens": n} for n in (-5, 0, 3, 41)),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_before_anything_is_pinned(
    machines: tuple[Machine, Machine], fields: dict[str, Any]
) -> None:
    here, _ = machines
    with pytest.raises(InvalidRequest) as found:
        here.take("talk", **fields)
    assert found.value.param in ("ttl_s", "tokens")
    assert names(here) == [] and here.num_pinned == 0 and not here.told


def test_where_the_tier_is_smaller_than_it_was_the_oldest_pin_and_the_others_keep_their_names(
    machines: tuple[Machine, Machine], clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _ = machines
    here.failing.add("remote")
    with monkeypatch.context() as patch:
        patch.setattr(module, "PINNED_SHARE", 1.0)
        for name, talk in (("first", TALK), ("second", TALK + 50)):
            here.take(name, talk)
            clock.advance(1.0)
        here.close()
    here.on_disk = dict(reversed(here.on_disk.items()))
    here.start()
    assert [(one.name, one.pinned) for one in here.registry.all("").snapshots] == [
        ("first", True),
        ("second", False),
    ]
    with pytest.raises(SnapshotTaken):
        here.take("second", TALK)


@pytest.mark.parametrize("away", [False, True])
def test_a_name_that_another_engine_takes_meanwhile_is_its_own(
    machines: tuple[Machine, Machine], away: bool
) -> None:
    """Also where the store did not answer when this one began."""
    here, there = machines
    if away:
        there.take("talk", (TALK + 50)[: 2 * BLOCK])
        here.rig.stores["remote"].die()

    def meanwhile() -> None:
        if away:
            here.heal()
        else:
            there.take("talk", (TALK + 50)[: 2 * BLOCK])

    with pytest.raises(SnapshotTaken):
        take_of(here.registry, SnapshotRequest("talk", prompt=b"-"), TALK, meanwhile)
    assert here.find("talk").num_blocks == 2 and names(here) == names(there) == ["talk"]
    assert here.num_pinned == 0 and not here.on_disk


@pytest.mark.parametrize("ttl_s", [None, 5.0])
def test_one_that_another_engine_writes_at_the_last_moment_is_not_written_over(
    machines: tuple[Machine, Machine], clock: HandClock, ttl_s: float | None
) -> None:
    """Also where it is written in the place of one whose time is over."""
    here, there = machines
    if ttl_s is not None:
        there.take("talk", ttl_s=ttl_s)
        clock.advance(ttl_s)
    store, calls = here.rig.stores["remote"], list[str]()

    def look(call: str) -> None:
        calls.append(call)
        if call == "write_manifest" and calls.count(call) == (1 if ttl_s is None else 2):
            there.take("talk", (TALK + 50)[: 2 * BLOCK])

    store.on_call = look
    with pytest.raises(SnapshotTaken):
        here.take("talk")
    assert here.find("talk").num_blocks == there.find("talk").num_blocks == 2
    assert here.num_pinned == 0 and not here.on_disk and there.num_pinned == 2


def test_one_whose_time_is_over_hides_no_other_of_its_name(
    machines: tuple[Machine, Machine], clock: HandClock
) -> None:
    """Before an engine has let it go: whether it is listed, asked for, or its name is taken again."""
    here, there = machines
    for name, ttl_s in (("listed", 5.0), ("found", 10.0), ("taken", 15.0)):
        here.take(name, ttl_s=ttl_s)
    clock.advance(5.0)
    there.take("listed", TALK[: 2 * BLOCK])
    assert "listed" in names(here)
    clock.advance(5.0)
    there.take("found", TALK[: 2 * BLOCK])
    assert here.find("found").num_blocks == 2
    clock.advance(5.0)
    here.take("taken", TALK[: 2 * BLOCK])
    assert here.find("taken").num_blocks == 2


def test_one_whose_time_is_over_is_removed_only_while_it_is_there(
    machines: tuple[Machine, Machine], clock: HandClock
) -> None:
    """Another engine takes the name after this one has seen that its own is over, and before it is
    removed."""
    here, there = machines
    here.take("talk", ttl_s=5.0)
    clock.advance(5.0)
    store = here.rig.stores["remote"]

    def look(call: str) -> None:
        if call == "remove_manifest":
            store.on_call = lambda call: None
            there.take("talk", (TALK + 50)[: 2 * BLOCK])

    store.on_call = look
    here.step()
    assert names(here) == names(there) == ["talk"] and here.find("talk").num_blocks == 2


def test_what_is_continued_is_counted_where_it_may_be(machines: tuple[Machine, Machine]) -> None:
    here, _ = machines
    here.take("talk", TALK[: 3 * BLOCK + 1], num_tokens=2 * BLOCK + 1, messages="[]")
    content = here.registry.open("talk", "", None)
    assert (
        np.frombuffer(content.tokens, np.uint32).tolist() == TALK[: 2 * BLOCK + 1].tolist()
        and content.messages == "[]"
    )
    with pytest.raises(SnapshotRefused, match="adapter"):
        here.registry.open("talk", "", Adapter("a", "abc"))
    with pytest.raises(SnapshotMissing):
        here.registry.open("talk", "b", None)
    assert here.registry.figures().continued == 1 and here.num_pinned == 2


# ----------------------------------------------------------------------------------------------- in any order


class Walk:
    """Two machines, beside a model: which snapshots each knows, what the shared store has, and whether it
    answers."""

    def __init__(self, seed: int) -> None:
        self.rng, self.clock = random.Random(seed), HandClock()
        self.shared: dict[str, bytes] = {}
        self.machines = [Machine(self.clock, self.shared) for _ in range(2)]
        # by name and salt: tokens, and when it expires
        self.known: list[dict[tuple[str, str], tuple[int, int, float | None]]] = [{}, {}]
        self.disks: list[dict[tuple[str, str], tuple[int, int, float | None]]] = [{}, {}]
        self.remote: dict[tuple[str, str], tuple[int, int, float | None]] = {}
        self.is_down = [False, False]

    def living(
        self, some: dict[Any, tuple[int, int, float | None]]
    ) -> dict[Any, tuple[int, int, float | None]]:
        return {which: one for which, one in some.items() if one[2] is None or self.clock() < one[2]}

    def tokens(self, one: tuple[int, int, float | None]) -> np.ndarray:
        return (TALK + one[0])[: one[1]]

    def pinned(self, at: int) -> set[bytes]:
        machine = self.machines[at]
        return set[bytes]().union(
            *(machine.keys(self.tokens(one), salt) for (_, salt), one in self.known[at].items())
        )

    def take(self, at: int, which: tuple[str, str]) -> None:
        ttl_s = self.rng.choice([None, 30.0, 300.0])
        one = (
            self.rng.choice([0, 50]),
            self.rng.randrange(BLOCK, 8 * BLOCK),
            None if ttl_s is None else self.clock() + ttl_s,
        )
        self.known[at] = self.living(self.known[at])
        self.disks[at] = self.living(self.disks[at])
        is_taken = which in self.known[at] or (not self.is_down[at] and which in self.living(self.remote))
        fits = len(self.pinned(at) | self.machines[at].keys(self.tokens(one), which[1])) <= NUM_HOST // 2
        expected = SnapshotTaken if is_taken else None if fits else SnapshotSpace
        with contextlib.nullcontext() if expected is None else pytest.raises(expected):
            self.machines[at].take(which[0], self.tokens(one), which[1], ttl_s=ttl_s)
            self.known[at][which] = self.disks[at][which] = one
            if not self.is_down[at]:
                self.remote[which] = one

    def delete(self, at: int, which: tuple[str, str]) -> None:
        found = self.known[at].get(which)
        is_known = found is not None and which in self.living(self.known[at])
        is_shared = found is None and which in self.living(self.remote)
        error = None if is_known or (is_shared and not self.is_down[at]) else SnapshotMissing
        if self.is_down[at]:
            error = StoreFailed  # and it is as it was
        with contextlib.nullcontext() if error is None else pytest.raises(error):
            self.machines[at].registry.delete(*which)
            self.known[at].pop(which, None)
            self.disks[at].pop(which, None)
            self.remote.pop(which, None)

    def later(self, at: int, which: tuple[str, str]) -> None:
        self.clock.advance(self.rng.choice([1.0, 40.0]))
        for number, machine in enumerate(self.machines):
            gone = {
                which: one
                for which, one in self.known[number].items()
                if which not in self.living(self.known[number])
            }
            self.known[number], self.disks[number] = (
                self.living(self.known[number]),
                self.living(self.disks[number]),
            )
            if not self.is_down[number]:
                self.remote = {which: one for which, one in self.remote.items() if gone.get(which) != one}
            machine.step()

    def down(self, at: int, which: tuple[str, str]) -> None:
        self.is_down[at] = True
        self.machines[at].rig.stores["remote"].die()

    def up(self, at: int, which: tuple[str, str]) -> None:
        self.is_down[at] = False
        self.machines[at].heal()

    def restart(self, at: int, which: tuple[str, str]) -> None:
        self.machines[at].restart()
        self.known[at] = dict(self.disks[at])
        self.is_down[at] = False

    def check(self) -> None:
        for at, machine in enumerate(self.machines):
            figures = machine.registry.figures()
            assert figures.known == len(self.known[at]) and figures.damaged == 0
            assert figures.pinned_blocks == len(self.pinned(at)) <= NUM_HOST // 2
            assert len(machine.on_disk) == len(self.disks[at]) and len(self.shared) == len(self.remote)
            for salt in ("", "b"):
                expected = {
                    **({} if self.is_down[at] else self.living(self.remote)),
                    **self.living(self.known[at]),
                }
                listed = machine.registry.all(salt)
                found = listed.snapshots
                assert listed.is_complete == (not self.is_down[at])
                assert sorted(one.name for one in found) == sorted(
                    name for name, of in expected if of == salt
                )
                for one in found:
                    there = expected[one.name, salt]
                    assert (one.num_tokens, one.expires_s, one.pinned) == (
                        there[1],
                        there[2],
                        (one.name, salt) in self.known[at],
                    )
                    assert one.kept_tokens == there[1] // BLOCK * BLOCK


@pytest.mark.parametrize("seed", range(6))
def test_in_any_order_names_pins_and_manifests_are_those_of_the_model(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(60):
        what = walk.rng.choice(
            ["take", "take", "take", "take", "delete", "delete", "later", "down", "up", "up", "restart"]
        )
        getattr(walk, what)(walk.rng.randrange(2), (f"s{walk.rng.randrange(4)}", walk.rng.choice(["", "b"])))
        walk.check()
    for machine in walk.machines:
        machine.close()


@pytest.mark.parametrize("ttl_s", [None, 50.0])
def test_a_store_is_told_how_long_a_manifest_is_of_use_not_until_when(
    machines: tuple[Machine, Machine], clock: HandClock, ttl_s: float | None
) -> None:
    here, _ = machines
    id = snapshot_id(tenant_of(""), "talk")
    here.take("talk", ttl_s=ttl_s)
    assert here.told == [("remote", id, ttl_s), ("ssd", id, ttl_s)]
    assert unpack(here.on_disk[id]).expires_s == (None if ttl_s is None else clock() + ttl_s)


def test_what_tiers_have_lost_of_one_is_told(machines: tuple[Machine, Machine]) -> None:
    here, _ = machines
    assert here.take("talk").kept_tokens == 10 * BLOCK
    prefix = here.rig.cache.prefix_of(TALK)
    assert prefix is not None
    for store in here.rig.stores.values():
        store.lose(*prefix.keys[6:])
    assert here.find("talk").kept_tokens == 6 * BLOCK
