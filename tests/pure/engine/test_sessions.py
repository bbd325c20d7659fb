"""What is known of conversations, over a storage of plain sets and a clock that the tests move: who keeps
what, for how long, and who gives way where there is not room for all."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract import (
    CacheHint,
    FinishReason,
    KvSource,
    Prefix,
    Request,
    SamplingParams,
    TokenEvent,
    Weight,
)
from penstock.engine import sessions as module
from penstock.engine.sessions import SessionLimits, Sessions, session_ids
from penstock.errors import Overloaded
from penstock.kv.blocks.key import prefix_keys

BLOCK = 4
SAMPLING = SamplingParams(max_tokens=8)


@dataclass(eq=False)
class Wanted:
    prefix: Prefix
    rank: float
    storage: Storage
    num_looks: int = 0

    def look_again(self) -> None:
        assert self in self.storage.wants, "it has ended"
        self.num_looks += 1

    def end(self) -> None:
        self.storage.wants.remove(self)  # raises where it has ended


@dataclass
class Under:
    """Something under way, which a test settles."""

    num_blocks: int = 0
    settled: bool = False


@dataclass(eq=False)
class Storage:
    """Blocks are there once they are in `kept`; `held` are those that a table has."""

    block_tokens: int = BLOCK
    wants: list[Wanted] = field(default_factory=list)
    kept: set[bytes] = field(default_factory=set)
    held: set[bytes] = field(default_factory=set)
    cold: set[bytes] = field(default_factory=set)
    save: Under | None = None
    fetches: list[Under] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)  # of fetches
    forgets: list[int] = field(default_factory=list)  # how many keys each call named

    def submit_saves(self) -> Under | None:
        return self.save

    def retain(self, prefix: Prefix, rank: float) -> Wanted:
        self.wants.append(Wanted(prefix, rank, self))
        return self.wants[-1]

    def forget(self, keys: Sequence[bytes]) -> int:
        self.forgets.append(len(keys))
        gone = self.kept.intersection(keys) - self.held
        self.kept -= gone
        return len(gone)

    def prefetch(self, prefix: Prefix, owner: str) -> Under | None:
        num = len(self.cold.intersection(prefix.keys))
        if not num:
            return None
        self.fetches.append(Under(num))
        self.owners.append(owner)
        return self.fetches[-1]


class World:
    def __init__(self, retained: int = 100, **limits: int) -> None:
        self.now_s = 1000.0
        self.storage = Storage()
        self.sessions = Sessions(self.storage, SessionLimits(retained, **limits), lambda: self.now_s)
        self.num_requests = 0

    def ends(
        self,
        session: str,
        tokens: Sequence[int],
        salt: str = "",
        *,
        found: int = 0,
        generated: Sequence[int] = (),
        finish: FinishReason = FinishReason.LENGTH,
        **hint: object,
    ) -> list[TokenEvent]:
        """A request of `session` comes and ends; returns what its listener got."""
        heard: list[TokenEvent] = []
        scope = salt.encode().ljust(32, b"-")
        prefix = Prefix(scope, prefix_keys(tokens, BLOCK, scope))
        self.num_requests += 1
        request = Request(f"r{self.num_requests}", tokens, SAMPLING, prefix, session=session)
        listener = self.sessions.follow(request, salt, CacheHint(**hint) if hint else None, heard.append)
        listener(TokenEvent(request.id, source=KvSource(device=found, computed=len(tokens) - found)))
        listener(TokenEvent(request.id, tuple(generated), finish=finish))
        self.storage.kept.update(prefix_keys([*tokens, *generated], BLOCK, scope))
        self.sessions.step()
        return heard

    def run(self) -> None:
        while self.sessions.step():
            pass

    @property
    def figures(self):
        return self.sessions.figures()


def talk(start: int, num_blocks: int) -> list[int]:
    return [start + i for i in range(num_blocks * BLOCK)]


def keys_of(tokens: Sequence[int], salt: str = "") -> tuple[bytes, ...]:
    return prefix_keys(tokens, BLOCK, salt.encode().ljust(32, b"-"))


# ---------------------------------------------------------------------------------------------------- records


@pytest.mark.parametrize(
    ("finish", "num_blocks"),
    [(FinishReason.STOP, 3), (FinishReason.LENGTH, 2), (FinishReason.CANCELLED, 2)],
    ids=["the token behind the last was computed", "the last token was never fed back", "nobody knows"],
)
def test_generated_tokens_whose_kv_is_computed_belong_to_the_session(
    finish: FinishReason, num_blocks: int
) -> None:
    world = World()
    world.ends("chat", talk(0, 2), generated=[1, 2, 3, 4], finish=finish, retain_s=60)
    assert world.storage.wants[0].prefix.keys == keys_of([*talk(0, 2), 1, 2, 3, 4])[:num_blocks]


def test_a_session_goes_as_far_as_its_client_has_seen_and_no_later_request_is_cut() -> None:
    world = World()
    sessions, prompt = world.sessions, talk(0, 2)

    def content() -> list[int]:
        found = sessions.content_of("", "agent")
        assert found is not None
        return list(array("I", found.tokens))

    world.ends("agent", prompt, generated=[7, 8, 9], finish=FinishReason.CANCELLED)
    sessions.note_seen("r1", 2)
    sessions.note_seen("another", 0)
    assert content() == [*prompt, 7, 8]
    world.ends("agent", [*prompt, 5], generated=[7, 8, 9])
    sessions.note_seen("r1", 0)
    assert content() == [*prompt, 5, 7, 8, 9]
    sessions.note_seen("r2", 0)
    assert content() == [*prompt, 5]


def test_the_same_name_under_another_salt_is_another_session() -> None:
    world = World()
    world.ends("chat", talk(0, 2), "a")
    world.ends("chat", talk(0, 2), "b")
    assert (world.figures.known, world.figures.tenants) == (2, 2)
    assert session_ids("a", "bc") != session_ids("ab", "c")


def test_of_too_many_sessions_the_oldest_of_the_tenant_that_has_most_is_forgotten() -> None:
    world = World(sessions=4)
    world.ends("old", talk(0, 9), "few")  # the oldest of all, and the longest
    for number in range(6):
        world.ends(f"flood {number}", talk(100 * number, 1), "many")
    assert world.figures.known == 4
    assert world.sessions.prefetch("few", "old") is not None
    assert [world.sessions.prefetch("many", f"flood {n}") is not None for n in range(6)] == [False] * 3 + [
        True
    ] * 3


def test_of_too_many_known_blocks_the_tenant_with_most_of_them_gives_way() -> None:
    world = World(known_blocks=20)
    for number, tenant in enumerate(("one", "two", "two", "two")):
        world.ends(str(number), talk(100 * number, 6), tenant)
    assert (world.figures.known_blocks, world.figures.known) == (18, 3)
    assert world.sessions.prefetch("two", "1") is None
    assert world.sessions.prefetch("one", "0") is not None


# -------------------------------------------------------------------------------------------------- retention


def test_what_is_retained_is_wanted_until_its_time_is_over_and_no_longer() -> None:
    world = World()
    world.now_s += 0.5
    world.ends("chat", talk(0, 3), retain_s=60)
    assert world.figures.retained_blocks == 3
    assert [want.prefix.keys for want in world.storage.wants] == [keys_of(talk(0, 3))]
    world.now_s += 59.75
    world.run()
    assert world.storage.wants
    world.now_s += 0.75  # the second in which it ends is over
    world.run()
    assert not world.storage.wants
    assert (world.figures.retained, world.figures.retained_blocks, world.figures.known) == (0, 0, 1)


def test_a_further_request_keeps_what_was_said_and_the_time_starts_anew() -> None:
    world = World()
    world.ends("chat", talk(0, 3), retain_s=60)
    world.now_s += 50
    world.ends("chat", talk(0, 5))
    assert [len(want.prefix.keys) for want in world.storage.wants] == [5]
    world.now_s += 50
    world.run()
    assert world.figures.retained_blocks == 5
    world.ends("chat", talk(0, 5), retain_s=5)
    world.now_s += 7
    world.run()
    assert not world.storage.wants, "a shorter time counts"
    world.ends("chat", talk(0, 5), retain_s=0)
    assert world.figures.retained_blocks == 0


def test_over_the_bound_the_lightest_and_then_the_oldest_of_the_tenant_loses_its_retention() -> None:
    world = World(retained=10)
    world.ends("heavy", talk(0, 4), retain_s=60, weight=Weight.HIGH)
    world.ends("old", talk(100, 3), retain_s=60)
    world.ends("light", talk(200, 3), retain_s=60, weight=Weight.LOW)
    world.ends("new", talk(300, 3), retain_s=60)
    kept = [len(want.prefix.keys) for want in world.storage.wants]
    assert sorted(kept) == [3, 3, 4]
    assert keys_of(talk(200, 3)) not in [want.prefix.keys for want in world.storage.wants]
    world.ends("newer", talk(400, 3), retain_s=60)
    assert keys_of(talk(100, 3)) not in [want.prefix.keys for want in world.storage.wants]
    assert (world.figures.retained_blocks, world.figures.retentions_cut) == (10, 2)


@dataclass(frozen=True)
class Turn:
    tenant: int
    session: int
    num_blocks: int
    retain_s: float | None
    weight: Weight | None
    release: bool
    wait_s: float


TURNS = st.builds(
    Turn,
    st.integers(0, 3),
    st.integers(0, 5),
    st.integers(0, 9),
    st.sampled_from([None, 0.0, 1.0, 30.0, 1000.0]),
    st.sampled_from([None, *Weight]),
    st.booleans(),
    st.sampled_from([0.0, 0.4, 3.0, 40.0]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(TURNS, max_size=60), st.integers(1, 25), st.integers(1, 8))
def test_all_bounds_hold_after_every_turn_and_nothing_is_left_at_the_end(
    turns: list[Turn], most: int, num_sessions: int
) -> None:
    world = World(retained=most, sessions=num_sessions, known_blocks=40)
    for turn in turns:
        take(world, turn)
        figures, now = world.figures, retained_by_tenant(world)
        assert figures.retained_blocks == sum(now.values()) <= most
        assert figures.retained == len(world.storage.wants) <= figures.known <= num_sessions
        assert figures.known_blocks <= 40
        assert len(now) == figures.retaining_tenants <= figures.tenants
        world.now_s += turn.wait_s
        world.run()
    world.sessions.close()
    assert not world.storage.wants
    assert world.figures.known == world.figures.tenants == world.figures.retained_blocks == 0
    assert not world.sessions._marks


@settings(max_examples=150, deadline=None)
@given(st.lists(TURNS, max_size=60), st.integers(9, 40))
def test_who_retains_no_more_than_an_equal_share_loses_nothing_to_others(
    turns: list[Turn], most: int
) -> None:
    world = World(retained=most)
    for turn in turns:
        before = retained_by_tenant(world)
        take(world, turn)
        now = retained_by_tenant(world)
        share = most / len(before.keys() | {f"t{turn.tenant}"})
        for name, num in before.items():
            assert name == f"t{turn.tenant}" or num > share or now[name] == num
        world.now_s += turn.wait_s
        world.run()


def take(world: World, turn: Turn) -> None:
    tokens = talk(10_000 * turn.tenant + 100 * turn.session, turn.num_blocks)
    release = turn.release and not turn.retain_s
    world.ends(
        str(turn.session),
        tokens,
        f"t{turn.tenant}",
        retain_s=turn.retain_s,
        weight=turn.weight,
        release=release,
    )


def retained_by_tenant(world: World) -> Counter[str]:
    by_tenant: Counter[str] = Counter()
    for want in world.storage.wants:
        by_tenant[want.prefix.scope.rstrip(b"-").decode()] += len(want.prefix.keys)
    return by_tenant


# ---------------------------------------------------------------------------------------------------- release


def test_a_long_release_is_done_in_slices_and_the_end_goes_first() -> None:
    world = World()
    tokens = talk(0, 1100)
    world.ends("chat", tokens, release=True)
    assert world.storage.kept == set(keys_of(tokens)[: 1100 - 512])
    world.run()
    assert not world.storage.kept
    assert world.storage.forgets == [512, 512, 76]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 6), st.booleans()), max_size=20)
)
def test_a_release_never_takes_a_block_of_another_known_session(
    requests: list[tuple[int, int, int, bool]],
) -> None:
    """Sessions share a beginning of any length and go on for themselves."""
    world = World()
    last: dict[int, list[int]] = {}
    for session, num_common, num_own, release in requests:
        tokens = [*talk(0, num_common), *talk(1000 * (session + 1), num_own)]
        found = next(
            (n for n, key in enumerate(keys_of(tokens)) if key not in world.storage.kept),
            num_common + num_own,
        )
        world.ends(str(session), tokens, found=found * BLOCK, release=release)
        world.run()
        last.pop(session, None)
        if not release:
            last[session] = tokens
        for one in last.values():
            assert world.storage.kept.issuperset(keys_of(one))


# --------------------------------------------------------------------------------------------------- prefetch


def test_a_prefetch_finds_a_session_by_its_name_and_a_prompt_by_its_prefix() -> None:
    world = World()
    world.ends("chat", talk(0, 6))
    world.storage.cold.update(keys_of(talk(0, 6))[2:])
    assert world.sessions.prefetch("", "chat") == (4, True)
    assert world.sessions.prefetch("", Prefix(b"", keys_of(talk(0, 3)))) == (1, True)
    assert world.sessions.prefetch("", Prefix(b"", keys_of(talk(700, 3)))) == (0, False)
    assert world.sessions.prefetch("", Prefix(b"", ())) == (0, False)
    assert world.sessions.prefetch("", "other") is None
    assert world.sessions.prefetch("salt", "chat") is None
    assert (world.figures.prefetches_under_way, world.figures.prefetches_started) == (2, 2)
    world.storage.fetches[0].settled = True
    world.run()
    assert (world.figures.prefetches_under_way, world.figures.prefetches_finished) == (1, 1)


def test_prefetches_under_way_are_bounded_and_one_tenant_leaves_places_for_others() -> None:
    world = World(prefetches=16)
    world.storage.cold.update(keys_of(talk(0, 2)))
    wanted = Prefix(b"", keys_of(talk(0, 2)))

    def start_all(salt: str) -> int:
        for num in range(20):
            try:
                world.sessions.prefetch(salt, wanted)
            except Overloaded:
                return num
        raise AssertionError("there is no bound")

    assert [start_all(salt) for salt in "abcdefg"] == [8, 4, 2, 1, 1, 0, 0]
    assert (world.figures.prefetches_under_way, world.figures.prefetches_refused) == (16, 7)
    assert len(set(world.storage.owners)) == 16, "each has an owner of its own"
    for fetch in world.storage.fetches:
        fetch.settled = True
    world.run()
    assert world.figures.tenants == 0
    assert start_all("z") == 8


# ------------------------------------------------------------------------------------------ looked at in turn


def looks(world: World, num_rounds: int) -> Counter[tuple[bytes, ...]]:
    """How often each of those retained is looked at in so many rounds."""
    before = {want: want.num_looks for want in world.storage.wants}
    for _ in range(num_rounds * module._LOOK_EVERY):
        world.sessions.step()
    return Counter({want.prefix.keys: want.num_looks - before.get(want, 0) for want in world.storage.wants})


def test_those_retained_are_looked_at_in_turn_one_in_a_round() -> None:
    world = World()
    for number in range(3):
        world.ends(str(number), talk(100 * number, 2), retain_s=60)
    assert looks(world, 6) == {keys_of(talk(100 * number, 2)): 2 for number in range(3)}


# -------------------------------------------------------------------------------------- what was there before


@pytest.mark.parametrize(
    ("source", "num_left"),
    [({"device": 8}, 2), ({"host": 8}, 2), ({"device": 4, "host": 4}, 2), ({"ssd": 8}, 0), (None, 5)],
)
def test_what_a_session_found_in_memory_is_not_its_own_to_release(
    source: dict[str, int] | None, num_left: int
) -> None:
    """What came from a disk came for it. None: it was cancelled before that was known, so all stays."""
    world = World()
    tokens = talk(0, 5)
    prefix = Prefix(b"-" * 32, keys_of(tokens))
    request = Request("r", tokens, SAMPLING, prefix, session="chat")
    listener = world.sessions.follow(request, "", module.CacheHint(release=True), lambda event: None)
    if source is not None:
        listener(TokenEvent("r", source=KvSource(**source, computed=20 - sum(source.values()))))
    listener(TokenEvent("r", finish=FinishReason.CANCELLED if source is None else FinishReason.STOP))
    world.storage.kept.update(prefix.keys)
    world.run()
    assert world.storage.kept == set(prefix.keys[:num_left])


def test_a_request_whose_kv_is_not_shared_leaves_nothing() -> None:
    world = World()
    heard: list[TokenEvent] = []
    request = Request("r", talk(0, 3), SAMPLING, None, session="chat")
    listener = world.sessions.follow(request, "", module.CacheHint(retain_s=60.0), heard.append)
    listener(TokenEvent("r", (1, 2), finish=FinishReason.LENGTH))
    world.ends("", talk(0, 3))  # nor one without a session
    world.run()
    assert len(heard) == 1 and not world.storage.wants
    assert (world.figures.known, world.figures.tenants) == (0, 0)


def test_a_retention_of_exactly_the_bound_is_kept_whole_and_a_longer_one_pushes_nothing_out() -> None:
    world = World(retained=10)
    world.ends("small", talk(0, 4), retain_s=60)
    world.ends("huge", talk(100, 11), retain_s=60)
    assert [len(want.prefix.keys) for want in world.storage.wants] == [4]
    assert world.figures.retentions_cut == 1
    world = World(retained=10)
    world.ends("none", [1, 2], retain_s=60)
    world.ends("all", talk(0, 10), retain_s=60)
    assert (world.figures.retained_blocks, world.figures.retentions_cut) == (10, 0)
    world.ends("one more", talk(100, 1), retain_s=60)
    assert (world.figures.retained_blocks, world.figures.retentions_cut) == (1, 1)


# ---------------------------------------------------------------------------------------------------- the end


def test_after_a_close_nothing_is_forgotten_released_or_taken_in() -> None:
    world = World()
    world.storage.save = Under()
    world.ends("released", talk(0, 3), release=True)  # waits for the save
    late = world.sessions.follow(
        Request("r", talk(50, 2), SAMPLING, Prefix(b"-" * 32, ()), session="late"),
        "",
        None,
        lambda event: None,
    )
    late(TokenEvent("r", finish=FinishReason.STOP))
    world.sessions.close()
    world.storage.save.settled = True
    assert not world.sessions.step()
    assert len(world.storage.kept) == 3 and world.figures.known == world.figures.released_blocks == 0
    world.sessions.close()


def test_a_release_that_waits_is_nothing_that_is_due() -> None:
    """A loop that was told so would turn for as long as the save takes."""
    world = World()
    world.storage.save = Under()
    world.ends("chat", talk(0, 6), release=True)
    assert not world.sessions.step()
    world.storage.save.settled = True
    assert world.sessions.step(), "the next slice, though it has nothing left"
    assert not world.sessions.step() and not world.storage.kept
