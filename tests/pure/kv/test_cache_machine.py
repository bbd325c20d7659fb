"""The cache against a naive reference that knows blocks by their tokens, in any order of calls.

The reference never hashes: a block's identity is its tenant and all tokens up to its end. It predicts every
match exactly.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from penstock.contract import Match, Prefix
from penstock.kv.blocks.handles import Pin
from penstock.kv.blocks.key import Scope
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.slots import SlotCounts
from penstock.kv.cache import KvCache
from penstock.kv.table import BlockTable
from tests.pure.kv.kv_fakes import FakeFence, FakeLane

NUM_SLOTS = 10
BLOCK = 2
SCOPE = Scope(weights=b"w", kv_dtype="float32", layout=b"l", block_tokens=BLOCK, position_scheme="rope")

Content = tuple[str, tuple[int, ...]]  # tenant, all tokens up to the end of the block

salts = st.sampled_from(["", "tenant"])
prompts = st.lists(st.integers(0, 1), max_size=9)
index = st.integers(0, 1000)


@dataclass(eq=False)
class Block:
    """A block of the reference; it is in use while it has users, and cached while it has content."""

    num_holders: int = 0
    num_pins: int = 0
    content: Content | None = None


@dataclass(eq=False)
class Request:
    table: BlockTable
    salt: str | None  # None: reuse is off
    tokens: list[int]
    num_prompt_blocks: int
    num_keyed: int
    blocks: list[Block] = field(default_factory=list)

    def content(self, block: int) -> Content:
        return (self.salt or "", tuple(self.tokens[: (block + 1) * BLOCK]))

    @property
    def announced(self) -> list[Content]:
        return (
            []
            if self.salt is None
            else [self.content(block) for block in range(self.num_keyed, self.num_prompt_blocks)]
        )


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = KvCache(BlockPool(NUM_SLOTS, "device"), SCOPE)
        self.cached: dict[Content, Block] = {}
        self.idle: list[Block] = []
        self.requests: list[Request] = []
        self.pins: list[tuple[Pin, list[Block]]] = []
        self.cache.saves.pins = lambda: {pin for pin, _ in self.pins}  # type: ignore[method-assign]  # as if saves had them
        self.asked: list[tuple[list[int], str]] = []
        # one object for each that was asked for, as a waiting request has it
        self.prefixes: dict[Content, Prefix] = {}
        self.compute = FakeLane("compute")
        self.last_use: dict[int, list[FakeFence]] = {slot: [] for slot in range(NUM_SLOTS)}

    # ------------------------------------------------------------------------------------------ the reference

    def in_use(self) -> set[Block]:
        return {block for request in self.requests for block in request.blocks} | {
            block for _, blocks in self.pins for block in blocks
        }

    def num_free(self) -> int:
        return NUM_SLOTS - len(self.in_use()) - len(self.idle)

    def expected_match(self, tokens: list[int], salt: str) -> Match:
        found: list[Block] = []
        contents = [(salt, tuple(tokens[: (block + 1) * BLOCK])) for block in range(len(tokens) // BLOCK)]
        for content in contents:
            if content not in self.cached:
                break
            found.append(self.cached[content])
        pending = len(found) < len(contents) and any(
            contents[len(found)] in request.announced for request in self.requests
        )
        return Match(len(found), len([block for block in found if block in self.idle]), pending)

    def settle(self, blocks: list[Block]) -> None:
        """Nobody uses them any more, or somebody still does."""
        for block in reversed(blocks):
            if not block.num_holders and not block.num_pins and block.content is not None:
                self.idle.append(block)

    def forget(self, num: int) -> None:
        for _ in range(num):
            del self.cached[self.idle.pop(0).content]

    # -------------------------------------------------------------------------------------------------- rules

    @rule(tokens=prompts, salt=salts, reuse=st.booleans(), take=st.integers(0, 9))
    def open(self, tokens: list[int], salt: str, reuse: bool, take: int) -> None:
        prefix = self.cache.prefix_of(tokens, salt) if reuse else None
        keys = prefix.keys if prefix is not None else ()
        match = self.cache.match(keys)
        assert match == (self.expected_match(tokens, salt) if reuse else Match(0, 0, False))
        num = min(take, match.num_blocks) if take else match.num_blocks
        table = self.cache.open(f"request-{len(self.asked)}", prefix, num)
        request = Request(table, salt if reuse else None, list(tokens), len(keys), num)
        for block in range(num):
            known = self.cached[request.content(block)]
            known.num_holders += 1
            request.blocks.append(known)
            self.idle = [other for other in self.idle if other is not known]
        self.requests.append(request)
        self.asked = [*self.asked[-3:], (request.tokens, salt)]

    @precondition(lambda self: self.requests)
    @rule(which=index, num=st.integers(0, 5))
    def extend(self, which: int, num: int) -> None:
        request = self.requests[which % len(self.requests)]
        fits = num <= self.num_free() + len(self.idle)
        assert request.table.try_extend(num) == fits
        if fits:
            self.forget(max(0, num - self.num_free()))
            request.blocks += [Block(num_holders=1) for _ in range(num)]
            self.check_fences(request.table, num)

    def check_fences(self, table: BlockTable, num: int) -> None:
        after = table.take_after()
        drawn = table.slots(table.num_slots * BLOCK)[table.num_slots - num :].tolist()
        for fence in [fence for slot in drawn for fence in self.last_use[slot] if not fence.passed()]:
            assert any(given.number >= fence.number for given in after)

    @precondition(lambda self: self.requests)
    @rule(which=index, generated=st.lists(st.integers(0, 1), max_size=4), held_back=st.integers(0, 3))
    def compute_and_seal(self, which: int, generated: list[int], held_back: int) -> None:
        request = self.requests[which % len(self.requests)]
        request.tokens += generated
        num_computed = max(0, min(len(request.tokens), len(request.blocks) * BLOCK) - held_back)
        request.table.seal(request.tokens, num_computed, None)
        if request.salt is None:
            return
        for block in range(request.num_keyed, num_computed // BLOCK):
            content = request.content(block)
            if content not in self.cached:
                request.blocks[block].content = content
                self.cached[content] = request.blocks[block]
            request.num_keyed = block + 1

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=2, max_size=8), salt=salts, num_prompt=st.integers(0, 8)
    )
    def come_and_go(self, tokens: list[int], salt: str, num_prompt: int) -> None:
        """A whole request in one move, so that idle blocks are never rare."""
        self.open(tokens[:num_prompt], salt, True, 0)
        last = len(self.requests) - 1
        self.extend(last, max(0, -(-len(tokens) // BLOCK) - len(self.requests[last].blocks)))
        self.compute_and_seal(last, tokens[num_prompt:], 0)
        self.release(last)

    @precondition(lambda self: self.requests)
    @rule(which=index)
    def release(self, which: int) -> None:
        request = self.requests.pop(which % len(self.requests))
        fence = self.compute.record()
        for slot in request.table.slots(request.table.num_slots * BLOCK).tolist():
            self.last_use[slot].append(fence)
        request.table.release(fence)
        for block in request.blocks:
            block.num_holders -= 1
        self.settle(request.blocks)

    @rule(num=st.integers(0, 3))
    def steps_finish(self, num: int) -> None:
        self.compute.num_passed = min(self.compute.num_passed + num, self.compute.num_recorded)

    @precondition(lambda self: any(request.blocks for request in self.requests))
    @rule(which=index, first=index, num=st.integers(1, 3))
    def pin(self, which: int, first: int, num: int) -> None:
        some = [request for request in self.requests if request.blocks]
        request = some[which % len(some)]
        start = first % len(request.blocks)
        blocks = request.blocks[start : start + num]
        slots = request.table.slots(len(request.blocks) * BLOCK)[start : start + num]
        for block in blocks:
            block.num_pins += 1
        self.pins.append((self.cache._pool.pin(slots, "transfer"), blocks))

    @precondition(lambda self: self.pins)
    @rule(which=index)
    def unpin(self, which: int) -> None:
        pin, blocks = self.pins.pop(which % len(self.pins))
        pin.end()
        for block in blocks:
            block.num_pins -= 1
        self.settle(blocks)

    @rule()
    def reset(self) -> None:
        assert self.cache.reset().forgotten == {"device": len(self.idle)}
        self.forget(len(self.idle))

    @rule(tokens=prompts, salt=salts)
    def match(self, tokens: list[int], salt: str) -> None:
        assert self.cache.match(self.cache.prefix_of(tokens, salt).keys) == self.expected_match(tokens, salt)

    # --------------------------------------------------------------------------------------------- invariants

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        in_use = self.in_use()
        pinned = {block for block in in_use if not block.num_holders}
        counts = self.cache.stats().slots["device"]
        assert counts == SlotCounts(
            self.num_free(), 0, len(in_use) - len(pinned), len(pinned), len(self.idle)
        )
        assert sum(counts) == NUM_SLOTS == self.cache.num_blocks
        assert self.cache.num_available == counts.free + counts.idle

    @invariant()
    def the_books_add_up(self) -> None:
        self.cache.check()
        stats = self.cache.stats()
        assert stats.num_tables == len(self.requests)
        assert stats.num_keys == len(self.cached)
        announced = Counter(content for request in self.requests for content in request.announced)
        tables = self.cache._tables.announcing
        assert len({key for table in tables for key in table.prefix.keys[table.num_keyed :]}) == len(
            announced
        )
        assert len(self.cache._tables.announcing) == sum(bool(request.announced) for request in self.requests)

    @invariant()
    def every_recent_prompt_matches_as_predicted(self) -> None:
        for tokens, salt in self.asked:
            assert self.cache.match(self.cache.prefix_of(tokens, salt).keys) == self.expected_match(
                tokens, salt
            )
            prefix = self.cache.prefix_of(tokens, salt)
            self.prefixes.setdefault((salt, tuple(tokens)), prefix)
        for (salt, known), prefix in self.prefixes.items():
            expected = self.expected_match(list(known), salt)
            assert self.cache.is_pending(prefix.keys) == expected.pending
            assert self.cache.match(prefix.keys) == expected, (
                "what is remembered of a prefix is not what is there"
            )

    def teardown(self) -> None:
        for request in self.requests:
            request.table.release(None)
        for pin, _ in self.pins:
            pin.end()
        self.cache.check()
        assert self.cache.num_available == NUM_SLOTS
        assert not self.cache._tables.announcing
        self.cache.close()


CacheMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestCacheAgainstItsReference = CacheMachine.TestCase
