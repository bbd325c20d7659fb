"""Sessions over time: whose blocks are looked at again and how often, what counts as there before, and what
stays after the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest

from penstock.contract import FinishReason, KvSource, Prefix, Request, TokenEvent
from penstock.engine import sessions as module
from penstock.errors import Overloaded
from tests.pure.engine.test_sessions import BLOCK, SAMPLING, Storage, Under, Wanted, World, keys_of, talk

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


def test_a_round_is_so_many_turns() -> None:
    world = World()
    world.ends("chat", talk(0, 2), retain_s=60)
    want, turns = world.storage.wants[0], list[int]()
    for turn in range(3 * module._LOOK_EVERY):
        before = want.num_looks
        world.sessions.step()
        turns += [turn] * (want.num_looks - before)
    assert (
        len(turns) == 3
        and [later - earlier for earlier, later in pairwise(turns)] == [module._LOOK_EVERY] * 2
    )


def test_one_that_goes_on_is_looked_at_no_more_often_than_others() -> None:
    """Each of its requests retains it anew."""
    world = World()
    for _ in range(5):
        world.ends("busy", talk(0, 2), retain_s=60)
    world.ends("quiet", talk(100, 2), retain_s=60)
    assert looks(world, 6) == {keys_of(talk(0, 2)): 3, keys_of(talk(100, 2)): 3}
    assert len(world.sessions._retentions._moving) == 2


@pytest.mark.parametrize("num_rounds", [0, 2], ids=["before its turn", "after its turn"])
def test_one_whose_time_was_over_and_that_came_back_is_looked_at_again(num_rounds: int) -> None:
    world = World()
    world.ends("chat", talk(0, 2), retain_s=5)
    world.now_s += 7
    world.run()
    assert not world.storage.wants
    looks(world, num_rounds)
    world.ends("chat", talk(0, 2), retain_s=60)
    assert looks(world, 4)[keys_of(talk(0, 2))] >= 3, "its first look may have gone to what it was"
    assert len(world.sessions._retentions._moving) == 1


def test_one_that_is_retained_no_more_leaves_the_round() -> None:
    world = World()
    for number in range(3):
        world.ends(str(number), talk(100 * number, 2), retain_s=60)
    world.ends("1", talk(100, 2), retain_s=0)
    looks(world, 3)
    assert len(world.sessions._retentions._moving) == 2


# -------------------------------------------------------------------------------------- what was there before


@pytest.mark.parametrize(
    ("source", "num_left"),
    [({"device": 8}, 2), ({"host": 8}, 2), ({"device": 4, "host": 4}, 2), ({"ssd": 8}, 0)],
)
def test_what_a_session_found_in_memory_is_not_its_own_to_release(
    source: dict[str, int], num_left: int
) -> None:
    """What came from a disk came for it."""
    world = World()
    tokens = talk(0, 5)
    prefix = Prefix(b"-" * 32, keys_of(tokens))
    request = Request("r", tokens, SAMPLING, prefix, session="chat")
    listener = world.sessions.follow(request, "", module.CacheHint(release=True), lambda event: None)
    listener(TokenEvent("r", source=KvSource(**source, computed=20 - sum(source.values()))))
    listener(TokenEvent("r", finish=FinishReason.STOP))
    world.storage.kept.update(prefix.keys)
    world.run()
    assert world.storage.kept == set(prefix.keys[:num_left])


def test_a_request_whose_kv_is_not_shared_leaves_nothing() -> None:
    world = World()
    heard: list[TokenEvent] = []
    request = Request("r", talk(0, 3), SAMPLING, None, session="chat")
    listener = world.sessions.follow(request, "", module.CacheHint(retain_s=60.0), heard.append)
    listener(TokenEvent("r", (1, 2), finish=FinishReason.LENGTH))
    world.run()
    assert (
        len(heard) == 1 and (world.figures.known, world.figures.tenants) == (0, 0) and not world.storage.wants
    )


def test_a_session_without_a_full_block_is_known_and_keeps_nothing() -> None:
    world = World()
    world.ends("chat", [1, 2], retain_s=60)
    assert (world.figures.known, world.figures.retained, world.figures.retentions_cut) == (
        1,
        0,
        0,
    ) and not world.storage.wants


def test_a_retention_of_exactly_the_bound_is_kept_whole() -> None:
    world = World(retained=10)
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


# ------------------------------------------------------------------------------------------------- prefetches


class Owned(Storage):
    """Says for whom blocks are brought up."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: list[str] = []

    def prefetch(self, prefix: Prefix, owner: str) -> Under | None:
        self.owners.append(owner)
        return super().prefetch(prefix, owner)


def test_two_prefetches_have_two_owners_and_one_that_finds_nothing_leaves_no_tenant() -> None:
    world = World(prefetches=8)
    world.storage = storage = Owned()
    world.sessions = module.Sessions(storage, module.SessionLimits(100, prefetches=4), lambda: world.now_s)
    storage.cold.update(keys_of(talk(0, 2)))
    assert world.sessions.prefetch("a", Prefix(b"", keys_of(talk(900, 2)))) == (0, False)
    assert world.figures.tenants == 0
    assert world.sessions.prefetch("a", Prefix(b"", ())) == (0, False) and len(storage.owners) == 1, (
        "there is nothing to ask for"
    )
    for _ in range(2):
        assert world.sessions.prefetch("a", Prefix(b"", keys_of(talk(0, 2)))) == (2, True)
    assert len(set(storage.owners[-2:])) == 2
    with pytest.raises(Overloaded, match="2 prefetches of this tenant run, 2 in all"):
        world.sessions.prefetch("a", Prefix(b"", keys_of(talk(0, 2))))
    assert world.sessions.prefetch("b", Prefix(b"", keys_of(talk(0, 2)))) == (2, True)
    assert (world.figures.tenants, world.figures.prefetches_refused, world.figures.prefetches_under_way) == (
        2,
        1,
        3,
    )
    storage.fetches[0].settled = storage.fetches[2].settled = True
    world.run()
    assert (world.figures.tenants, world.figures.prefetches_under_way, world.figures.prefetches_finished) == (
        1,
        1,
        2,
    )


def test_a_tenant_with_a_prefetch_under_way_is_kept_when_its_last_session_goes() -> None:
    """Else the place that it has would never be its own again."""
    world = World(prefetches=4)
    world.ends("chat", talk(0, 2), "a")
    world.storage.cold.update(keys_of(talk(0, 2), "a"))
    assert world.sessions.prefetch("a", "chat") == (2, True)
    world.ends("chat", talk(0, 2), "a", release=True)
    assert (world.figures.known, world.figures.tenants) == (0, 1)
    world.storage.fetches[0].settled = True
    world.run()
    assert world.figures.tenants == 0


def test_all_ends_are_taken_in_before_a_session_is_looked_up() -> None:
    world = World()
    for number in range(3 * module._ENDS_AT_ONCE):
        request = Request(str(number), [1] * BLOCK, SAMPLING, Prefix(b"s" * 32, ()), session=str(number))
        world.sessions.follow(request, "", None, lambda event: None)(
            TokenEvent("x", finish=FinishReason.STOP)
        )
    assert world.sessions.prefetch("", str(3 * module._ENDS_AT_ONCE - 1)) == (0, False)


def test_figures_name_every_count() -> None:
    """Each of them another number, so that no two can be mixed up."""
    world = World(retained=30, prefetches=32)
    for number in range(7):
        world.ends(f"known {number}", talk(1000 * number, 2), f"t{number % 4}")
    for number in range(2):
        world.ends(f"kept {number}", talk(20_000 + 100 * number, 5 + number), "t0", retain_s=60)
    world.ends("huge", talk(30_000, 31), "t1", retain_s=60)
    for number in range(3):
        world.ends(f"gone {number}", talk(40_000 + 100 * number, 4), "t2", release=True)
    world.run()
    world.storage.cold.update(keys_of(talk(0, 2)))
    wanted: Sequence[bytes] = keys_of(talk(0, 2))
    refused = 0
    for _ in range(20):
        try:
            world.sessions.prefetch("t3", Prefix(b"", wanted))
        except Overloaded:
            refused += 1
    for fetch in world.storage.fetches[:6]:
        fetch.settled = True
    world.run()
    assert world.figures == module.SessionFigures(
        known=10,
        known_blocks=7 * 2 + 5 + 6 + 31,
        tenants=4,
        retained=2,
        retained_blocks=11,
        retained_blocks_max=30,
        retaining_tenants=1,
        retentions_cut=1,
        releases=3,
        released_blocks=12,
        prefetches_under_way=10,
        prefetches_started=16,
        prefetches_finished=6,
        prefetches_refused=refused,
    )
    assert refused == 4


def test_a_want_is_ended_before_another_takes_its_place() -> None:
    """Both at once would count the blocks of one session twice."""
    world = World()
    most: list[int] = []
    retain = world.storage.retain

    def counted(prefix: Prefix, rank: float) -> Wanted:
        made = retain(prefix, rank)
        most.append(len(world.storage.wants))
        return made

    world.storage.retain = counted  # type: ignore[method-assign]
    for num in range(1, 4):
        world.ends("chat", talk(0, num), retain_s=60)
    assert most == [1, 1, 1]


def test_tenants_are_in_order_after_every_change() -> None:
    """Whoever has most comes first, and those with nothing are not among them."""
    largest, numbers = module._Largest(), Random(7)
    tenants = [module._Tenant(bytes([number])) for number in range(24)]
    for _ in range(600):
        tenant = numbers.choice(tenants)
        num = 0 if numbers.random() < 0.4 else numbers.randrange(1, 100)
        largest.note(tenant, num)
        found = {one.id: number for number, _, one in largest._ordered}
        assert (tenant.id in found) == bool(num) and len(largest) == len(found) and largest._nums == found
        assert list(found.values()) == sorted(found.values()) and (
            not found or found[largest.first().id] == max(found.values())
        )
