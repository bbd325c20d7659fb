"""What a scored request has on the device: how its room is divided, what is chosen, and how often."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from penstock.config import KvConfig
from penstock.contract import FetchedBlocks, KeptSums, Residency, Scoring
from penstock.engine.scheduling.residency import (
    DECAY,
    Division,
    KeptContext,
    KeptContexts,
    ResidencyChoice,
    ResidentSet,
)
from penstock.errors import ConfigError, InvalidRequest, InvariantBroken


class FakeTable:
    """Implements `contract.Table`: blocks `num_paged..num_slots` are on the device, in slots of the same
    number."""

    num_fetched = 0
    sealed_keys: list[bytes] = []  # noqa: RUF012

    def __init__(self, num_slots: int, num_paged: int) -> None:
        self.num_slots, self.num_paged = num_slots, num_paged

    @property
    def paged_slots(self) -> np.ndarray:
        return np.arange(1000, 1000 + self.num_paged, dtype=np.int32)

    def slots(self, num_tokens: int) -> np.ndarray:
        return np.arange(self.num_paged, -(-num_tokens // 16), dtype=np.int32)

    def take_after(self) -> tuple[()]:
        return ()


class FakeFetched:
    def __init__(self, part: int) -> None:
        self.slots = np.arange(4, dtype=np.int32) + 10_000 + 10 * part
        self.settled, self.failed = False, False


def test_a_room_is_divided_without_a_rest_that_nobody_counts() -> None:
    for blocks, tokens in ((24, 16), (30, 16), (480, 16), (1024, 16), (6, 64), (99, 128), (60, 8)):
        try:
            division = Division.of(blocks, tokens)
        except ConfigError:
            assert blocks * tokens < 384
            continue
        parts = division.window + division.chosen + division.moving + 2
        assert (
            parts == division.num_parts == blocks // division.part_blocks
            and division.chosen >= 2
            and division.moving >= 1
        )
        assert division.part_tokens == max(64, tokens)


def test_one_part_can_always_give_way() -> None:
    division = Division.of(120, 16)
    most = division.chosen - 1
    assert len(division.pinned([(0, 64 * most)], 10_000)) == most
    with pytest.raises(InvalidRequest, match=f"take {most + 1} parts .* {most} can be pinned"):
        division.pinned([(0, 64 * most + 1)], 10_000)
    assert division.pinned([(5000, 6000)], 100) == (0,), "beyond its end there is nothing to pin"
    with pytest.raises(InvalidRequest, match=r"take 9000000000000000 parts"):
        division.pinned([(0, 64 * 9 * 10**15)], 2**63)


def resident_set(num_exact: int = 16 * 400, pins: tuple[tuple[int, int], ...] = ()) -> ResidentSet:
    return ResidentSet(Division.of(120, 16), pins, num_exact, num_exact + 1000)


def fetch_all(resident: ResidentSet, table: FakeTable, most: int = 1000) -> dict[int, FakeFetched]:
    made: dict[int, FakeFetched] = {}
    for part in resident.wanted(table)[:most]:
        made[part] = FakeFetched(part)
        resident.coming(part, made[part])
    return made


def land(resident: ResidentSet, table: FakeTable, fetched: dict[int, FakeFetched]) -> list[FetchedBlocks]:
    for one in fetched.values():
        one.settled = True
    return [*resident.take_landed(), *resident.take_surplus(table)]


def scores(**best: float) -> np.ndarray:
    found = np.zeros(90, np.float32)
    for name, score in best.items():
        found[int(name[1:])] = score
    return found


def test_a_part_that_did_not_arrive_is_not_used_and_is_wanted_again() -> None:
    resident, table = resident_set(), FakeTable(400, 368)
    fetched = fetch_all(resident, table)
    fetched[0].failed = True
    assert land(resident, table, fetched) == [fetched[0]]
    assert resident.wanted(table) == [0]
    placed = resident.place(table, 6400, 6401, may_score=False, may_read=True)
    assert placed.num_left_out == 0 and placed.paged is not None and len(placed.paged) == 368, (
        "a step without it reads all in host memory"
    )
    with pytest.raises(InvariantBroken, match="shows neither its trailing window nor host memory"):
        resident.place(table, 6400, 6401, may_score=False, may_read=False)


def test_the_last_exact_chunk_sums_up_everything_and_no_window_block_leaves_before_it_is() -> None:
    resident, table = resident_set(), FakeTable(400, 288)
    assert resident.num_making_way(table, 10, 100) == 0, "nothing is summed up"
    assert resident.place(table, 6000, 6384, True, True).scoring is None
    scoring = resident.place(table, 6384, 6400, True, True).scoring
    assert scoring == Scoring(
        4, resident.scorings._most_parts, 288, np.arange(288, 400, dtype=np.int32), True, 100
    )
    assert resident.num_making_way(table, 1, 100) == 8, "for the step and for the first part, in whole parts"
    assert resident.num_making_way(table, 0, 4 * resident.division.window) == 0, (
        "it lacks nothing, and is no larger than it has to be"
    )
    assert resident.num_making_way(FakeTable(420, 396), 50, 20) == 4, (
        "what was filled since is not summed up yet"
    )


class ChoiceWalk:
    """A resident set in random turns, beside a model of it: what was scored, what has landed, and what is on
    its way."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.division = Division.of(120, 16)
        self.pins = ((700, 800),) if seed % 2 else ()
        self.resident = ResidentSet(self.division, self.pins, 16 * 400, 16 * 900)
        self.table = FakeTable(400, 300)
        self.scores: np.ndarray = np.zeros(0, np.float32)
        self.landed: dict[int, FakeFetched] = {}
        self.coming: dict[int, FakeFetched] = {}
        self.position = 16 * 400
        self.resident.place(self.table, self.position - 1, self.position, True, True)
        self.num_summed, self.is_scored = 400, True

    def needed(self) -> list[int]:
        """Pinned parts, and those that the trailing window lacks."""
        end, num_tail = self.table.num_paged // 4, (self.table.num_slots - self.table.num_paged) // 4
        pinned = [0, *([10, 11, 12] if self.pins else [])]
        return [
            *pinned,
            *(
                part
                for part in range(end - 1, end - 1 - self.division.window + num_tail, -1)
                if part not in pinned
            ),
        ]

    @property
    def most(self) -> int:
        return max(self.division.chosen, len(self.needed()))

    def order(self) -> list[int]:
        """All parts, the most wanted first: those that every step shows, then by score, the later of two
        equal ones first."""
        first = self.needed()
        rest = [part for part in range(len(self.scores))[::-1] if part not in first]
        return [*first, *sorted(rest, key=lambda part: -self.scores[part])]

    def score(self) -> None:
        if not self.is_scored:
            return
        self.is_scored = False
        new = np.where(
            self.rng.random(self.num_summed // 4) < 0.2, self.rng.random(self.num_summed // 4), 0
        ).astype(np.float32)
        before = np.zeros_like(new)
        before[: len(self.scores)] = self.scores * np.float32(DECAY)
        self.scores = np.maximum(before, new)
        self.resident.take_scores(new)

    def fetch(self) -> None:
        wanted = self.resident.wanted(self.table)
        here = {*self.landed, *self.coming}
        room = self.most + self.division.moving - len(here)
        target = [part for part in self.order() if part < self.table.num_paged // 4][: self.most]
        assert wanted == [part for part in target if part not in here][: max(0, room)]
        for part in wanted[: self.rng.integers(0, 4)]:
            self.coming[part] = FakeFetched(part)
            self.resident.coming(part, self.coming[part])

    def land(self) -> None:
        failed = []
        for part in [part for part in self.coming if self.rng.random() < 0.5]:
            one = self.coming.pop(part)
            one.settled, one.failed = True, bool(self.rng.random() < 0.2)
            (failed.append(one) if one.failed else self.landed.__setitem__(part, one))
        assert {id(one) for one in self.resident.take_landed()} == {id(one) for one in failed}
        surplus = self.resident.take_surplus(self.table)
        assert len(surplus) == max(0, len(self.landed) - self.most)
        # Of those that are far from being wanted, any may go.
        rank = {part: min(at, 2 * self.division.num_parts) for at, part in enumerate(self.order())}
        gone = [part for part, one in self.landed.items() if any(one is other for other in surplus)]
        for part in gone:
            del self.landed[part]
        assert len(gone) == len(surplus) and min(map(rank.__getitem__, gone), default=99) >= max(
            map(rank.__getitem__, self.landed), default=0
        )

    def decode(self) -> None:
        for _ in range(self.rng.integers(1, 40)):
            self.table.num_slots = self.position // 16 + 1
            shows = all(part in self.landed for part in self.needed())
            may_score, may_read = bool(self.rng.random() < 0.7), not shows or bool(self.rng.random() < 0.9)
            placed = self.resident.place(self.table, self.position, self.position + 1, may_score, may_read)
            own = [slot for part in sorted(self.landed) for slot in self.landed[part].slots.tolist()]
            assert placed.slots.tolist() == own + self.table.slots(self.position + 1).tolist()
            left = set(range(1000, 1000 + self.table.num_paged)) - {
                1000 + 4 * part + at for part in self.landed for at in range(4)
            }
            if placed.paged is None:
                assert placed.num_left_out == len(left) and shows
            else:
                assert placed.num_left_out == 0 and set(placed.paged.tolist()) == left, (
                    "all of it is read, once"
                )
            if placed.scoring is not None:
                first = placed.scoring.first
                assert first == self.num_summed and placed.scoring.slots.tolist() == list(
                    range(first, self.position // 16)
                )
                self.num_summed = self.position // 16
                self.is_scored |= placed.scoring.num_parts > 0
            self.position += 1

    def make_way(self) -> None:
        most = int(self.rng.integers(20, 130))
        num_short, num_wanted = int(self.rng.integers(-20, 20)), 4 * len(self.resident.wanted(self.table))
        num = self.resident.num_making_way(self.table, num_short, most)
        num_ready = self.num_summed // 4 * 4 - self.table.num_paged
        assert num >= min(num_short, num_ready), "the step has room"
        num_spare = (most + num_short) // 4 * 4 - 4 * self.division.window
        assert num >= min(num_short + num_wanted, num_spare, num_ready), (
            "and so have parts that are wanted, where the window is large"
        )
        assert num < max(num_short, min(num_short + num_wanted, num_spare), 0) + 4
        assert num >= 0 and self.table.num_paged + num <= self.num_summed
        assert not num or (self.table.num_paged + num) % 4 == 0, "whole parts"
        if self.num_summed - self.table.num_paged - num > 30:
            self.table.num_paged += num


@pytest.mark.parametrize("seed", range(5))
# Holds invariant 29: each step shows pinned parts and the window, or reads all.
def test_in_any_order_of_turns_what_is_attended_to_is_what_has_landed_and_what_goes_is_wanted_least(
    seed: int,
) -> None:
    walk = ChoiceWalk(seed)
    recalls = 0
    for _ in range(300):
        getattr(walk, walk.rng.choice(["score", "fetch", "fetch", "land", "decode", "make_way"]))()
        recalls += walk.resident.scorings.num_taken > 4
    assert recalls and walk.resident.scorings.num_taken > 4 and len(walk.landed) > 4


# -------------------------------------------------------------------------------------- what may be asked for

SERVERS = KvConfig(residency="scored", pin_spans=((0, 200), (640, 700)))


def choice(kv: KvConfig = SERVERS, deep_blocks: int = 100, resident_blocks: int = 120) -> ResidencyChoice:
    return ResidencyChoice.of(deep_blocks, resident_blocks, kv)


def test_a_span_beyond_the_prompt_is_refused_and_one_of_the_servers_ends_with_the_sequence() -> None:
    """A request knows its prompt, also where it fits on the device; a server does not."""
    for num_prompt, num_more in ((1000, 1000), (1000, 1), (99, 0)):
        for span in ((num_prompt - 5, num_prompt + 1), (num_prompt, num_prompt + 64), (10**6, 10**7)):
            with pytest.raises(
                InvalidRequest,
                match=f"tokens {span[0]} to {span[1] - 1} cannot be pinned: the prompt has {num_prompt},",
            ):
                choice().for_request("scored", [(0, 5), span], num_prompt, num_more)
    assert choice().for_request("scored", [(995, 1000)], 1000, 1000) == Residency(((995, 1000),))
    beyond = choice(KvConfig(residency="scored", pin_spans=((10**6, 10**6 + 64),)))
    assert beyond.for_request(None, None, 1000, 1000) is not None


def test_a_request_says_otherwise_than_the_server() -> None:
    given, exact, deep = choice(), choice(KvConfig()), 16 * 100 + 1
    assert (
        given.for_request(None, None, deep, 0)
        == given.for_request("scored", None, deep, 0)
        == Residency(SERVERS.pin_spans)
    )
    assert (
        given.for_request(None, (), deep, 0) == given.for_request("scored", [], deep, 0) == Residency(())
    ), "it wants none pinned"
    assert given.for_request(None, [(5, 9)], deep, 0) == Residency(((5, 9),))
    assert given.for_request("exact", None, deep, 0) is None
    assert exact.for_request(None, None, deep, 0) is None and exact.for_request(
        "scored", None, deep, 0
    ) == Residency(())
    for which, asked in ((given, "exact"), (exact, None)):
        with pytest.raises(InvalidRequest, match="are for requests with kv_residency scored"):
            which.for_request(asked, (), deep, 0)  # type: ignore[arg-type]


def test_what_cannot_be_is_refused_at_the_start_where_it_is_the_default_and_by_request_where_not() -> None:
    with pytest.raises(ConfigError, match="raise --kv-resident-tokens"):
        choice(KvConfig(residency="scored"), resident_blocks=20)
    with pytest.raises(ConfigError, match=r"kv_pin_spans take .* one has to be free"):
        choice(KvConfig(residency="scored", pin_spans=((0, 64 * 25),)))
    without = choice(KvConfig(), resident_blocks=20)
    assert (
        without.for_request(None, None, 10**6, 0) is None
        and without.for_request("scored", None, 1600, 0) is None
    )
    with pytest.raises(InvalidRequest, match=r"not possible here: .* raise --kv-resident-tokens"):
        without.for_request("scored", None, 1601, 0)
    with pytest.raises(
        InvalidRequest,
        match="take 25 parts of 64 tokens, the first included, and 18 can be pinned: one has to be free",
    ):
        choice().for_request("scored", [(64, 64 * 25)], 10**6, 0)


# ---------------------------------------------------------------------------------------------- the next turn


def context(name: str, num_parts: int, num_open: int, tag: str = "") -> KeptContext:
    """The first `num_open` blocks have keys that anybody has."""
    keys = [f"{'all' if at < num_open else tag or name} {at}".encode() for at in range(4 * num_parts)]
    return KeptContext(name.encode(), keys, num_open, range(num_parts), np.zeros(num_parts, np.float32))


def kept_contexts(num_parts: int) -> KeptContexts:
    return KeptContexts(Division.of(120, 16), 4 * num_parts + 3)


def test_a_prompt_goes_on_from_the_longest_context_that_it_begins_with() -> None:
    kept = kept_contexts(20)
    for name, num_parts in (("short", 2), ("long", 3), ("other", 2)):
        assert kept.keep(context(name, num_parts, 0), None) == []
    keys = [b"-"] * 7 + [b"short"] + [b"-"] * 3 + [b"long"]
    found = [kept.find(keys[:num]) for num in (7, 8, 11, 12)]
    assert [one and one.name for one in found] == [None, b"short", b"short", b"long"]
    assert kept.find([b"long"] * 11 + [b"-"]) is None, "at another place the same key is not its own"


def test_in_any_order_places_are_apart_and_keys_are_known_as_long_as_somebody_has_them() -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        kept, alive, told = kept_contexts(12), set[bytes](), set[bytes]()
        made: list[KeptContext] = []
        for number in range(60):
            users = [one for one in made if one.num_users]
            if users and rng.random() < 0.4:
                kept.leave(users[rng.integers(len(users))])
            usable = list(kept._kept.values())
            if usable and rng.random() < 0.4:
                kept.use(usable[rng.integers(len(usable))])
            before = usable[rng.integers(len(usable))] if usable and rng.random() < 0.5 else None
            new = context(f"{seed} {number}", int(rng.integers(1, 6)), int(rng.integers(0, 5)))
            if before is not None:
                new.keys[: len(before.keys)] = before.keys[: len(new.keys)]
                new.num_open = min(new.num_open, before.num_open)
            in_use = {one.name for one in kept._kept.values() if one.num_users}
            freed = kept.keep(new, before)
            made.append(new)
            alive |= set(new.keys[new.num_open :])
            told |= set(freed)
            known = {key for one in kept._kept.values() for key in one.keys[one.num_open :]}
            assert not known & set(freed) and alive - set(freed) == known, (
                "told once, and of all that nobody has any more"
            )
            alive -= set(freed)
            assert in_use <= set(kept._kept), "what somebody goes on from stays"
            places = sorted((one.place for one in kept._kept.values()), key=lambda place: place.start)
            assert all(one.stop <= other.start for one, other in pairwise(places)) and all(
                place.stop <= 12 for place in places
            )
            assert (new.name in kept._kept) == bool(new.place)
        assert told


@pytest.mark.parametrize(
    ("num_blocks", "num_tokens", "num"),
    [(402, 6720, 400), (400, 6848, 400), (400, 6849, 0), (403, 6449, 400), (3, 50, 0)],
)
def test_whole_parts_are_used_where_the_window_takes_what_is_new(
    num_blocks: int, num_tokens: int, num: int
) -> None:
    """Seven of 30 parts are the window: 448 tokens."""
    assert Division.of(120, 16).window == 7
    assert kept_contexts(200).num_usable(num_blocks, num_tokens) == num
    assert KeptContexts(None, 400).num_usable(num_blocks, num_tokens) == 0


def continuing(
    num_known: int = 16 * 400 + 100, pins: tuple[tuple[int, int], ...] = (), num_used: int = 400
) -> ResidentSet:
    """From a context of 100 parts, of which 40, 50 and 60 were wanted most."""
    before = context("before", 100, 300)
    before.scores[[40, 50, 60]] = 3.0, 2.0, 1.0
    before.place = range(7, 107)
    return ResidentSet(Division.of(120, 16), pins, num_known, num_known + 1000, (before, num_used))


def test_it_begins_with_the_end_of_the_last_turn_and_what_that_had_chosen() -> None:
    resident, table = continuing(pins=((700, 720),)), FakeTable(400, 400)
    division = resident.division
    assert resident.num_exact == 6400 and resident.decodes(6400)
    wanted = resident.wanted(table)
    assert wanted[:3] == [0, 10, 11] and wanted[3 : 3 + division.window] == list(
        range(99, 99 - division.window, -1)
    )
    assert wanted[3 + division.window :][:3] == [40, 50, 60] and len(wanted) == division.chosen
    assert not resident.is_filling(table), "nothing is on its way yet"
    fetched = fetch_all(resident, table)
    assert resident.is_filling(table)
    last = dict([fetched.popitem()])
    land(resident, table, fetched)
    assert resident.is_filling(table) and resident.shows_needed(table), "one is still on its way"
    land(resident, table, last)
    assert not resident.is_filling(table)


def test_it_says_where_what_is_known_of_its_keys_is_with_the_first_scoring_behind_its_first_token() -> None:
    resident, table = continuing(), FakeTable(407, 400)
    for start, end in ((6400, 6450), (6450, 6500), (6500, 6501)):
        assert resident.place(table, start, end, may_score=True, may_read=True).scoring is None
    first = resident.place(table, 6501, 6502, may_score=True, may_read=True).scoring
    assert (
        first is not None
        and first.kept == KeptSums(7, 107, 100)
        and first.num_parts == 101
        and first.first == 400
    )
    resident.take_scores(np.zeros(101, np.float32))
    later = resident.place(table, 6600, 6601, may_score=True, may_read=True).scoring
    assert later is not None and later.kept is None
    shorter = (
        continuing(num_used=396)
        .place(FakeTable(407, 396), 6501, 6502, may_score=False, may_read=True)
        .scoring
    )
    assert shorter is not None and shorter.kept == KeptSums(7, 107, 99) and shorter.first == 396, (
        "also where it only sums up"
    )


def test_what_it_leaves_is_whole_parts_with_keys_and_sums_and_what_anybody_may_find_of_it() -> None:
    resident, table = resident_set(), FakeTable(450, 380)
    table.sealed_keys = [str(number).encode() for number in range(430)]
    resident.place(table, 6399, 6400, may_score=True, may_read=True)
    assert resident.num_keeping(table) == 400
    resident.take_scores(scores(p7=5.0)[:90])
    resident.place(table, 16 * 447, 16 * 447 + 1, may_score=True, may_read=True)
    assert resident.num_keeping(table) == 428, (
        "two blocks more have their keys, and belong to a part that is not whole"
    )
    left = resident.kept(b"name", table.sealed_keys[:428])
    assert (left.num_open, len(left.place), left.scores[7], len(left.scores)) == (400, 107, 5.0, 107)
    again = continuing(num_used=396)
    assert again.kept(b"name", [b""] * 404).num_open == 300, (
        "what the turn before has left under its own keys stays so"
    )
    assert continuing(num_used=296).kept(b"name", [b""] * 404).num_open == 296, (
        "what it has computed itself is its own"
    )
