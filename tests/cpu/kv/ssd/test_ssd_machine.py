"""The SSD store against a dictionary: whatever is done in whatever order, it never serves what was not
written, keeps its bound, and loses nothing without a reason."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.config import EVICTIONS
from penstock.kv.tiers.ssd.segments import slot_bytes
from penstock.kv.tiers.ssd.survey import inspect, verify
from penstock.kv.tiers.store import Outcome
from tests.cpu.kv.ssd.ssd_rig import (
    BLOCK_BYTES,
    QuickDisk,
    abandon,
    max_bytes_for,
    num_bytes_in,
    open_at,
    read,
    segment_paths,
    those_in,
    write,
)

DONE = Outcome.DONE
NUMBERS = st.lists(st.integers(0, 50), min_size=1, max_size=8)
SIZES = st.sampled_from([3, 12, 30])


class SsdMachine(RuleBasedStateMachine):
    """`there` is what the store must have, unless it is evicted; `torn` what may turn out to be damaged on
    reading."""

    @initialize(num_slots=SIZES, eviction=st.sampled_from(EVICTIONS))
    def begin(self, num_slots: int, eviction) -> None:  # type: ignore[no-untyped-def]
        self.path = Path(tempfile.mkdtemp(prefix="penstock-ssd-"))
        self.num_slots, self.eviction = num_slots, eviction
        self.written: set[int] = set()  # ever, and not forgotten by a reset since
        self.damaged = False
        self._open()

    def _open(self) -> None:
        self.store = open_at(self.path, self.num_slots, io=QuickDisk(), eviction=self.eviction)

    @rule(numbers=NUMBERS)
    def write(self, numbers: list[int]) -> None:
        had = those_in(self.store, numbers)
        outcomes = write(self.store, *numbers)
        assert set(outcomes) <= {DONE, Outcome.FULL}
        new = set(numbers) - had
        num_slots = self.store.usage().num_slots or 0
        assert outcomes.count(DONE) == len(numbers) or len(new) > num_slots, (
            "there is room for as many as there are slots"
        )
        self.written |= {number for number, outcome in zip(numbers, outcomes, strict=True) if outcome is DONE}

    @rule(numbers=NUMBERS)
    def read(self, numbers: list[int]) -> None:
        here = those_in(self.store, numbers)
        outcomes = read(self.store, *numbers)
        for number, outcome in zip(numbers, outcomes, strict=True):
            if number not in here:
                assert outcome is Outcome.MISSING
            elif not self.damaged:
                assert outcome is DONE
            else:
                assert outcome in (DONE, Outcome.CORRUPT)

    @rule()
    def persist(self) -> None:
        self.store.persist()

    @rule()
    def reset(self) -> None:
        before = len(those_in(self.store, range(51)))
        assert self.store.reset() == before
        self.written = set()

    @rule(killed=st.booleans())
    def restart(self, killed: bool) -> None:
        before = those_in(self.store, range(51))
        (abandon if killed else lambda store: store.close())(self.store)
        self._open()
        after = those_in(self.store, range(51))
        assert self.damaged or before <= after, "nothing gets lost between two lives"

    @rule(num_slots=SIZES)
    def resize(self, num_slots: int) -> None:
        self.store.close()
        self.num_slots = num_slots
        self._open()

    @rule(seed=st.integers(0, 1 << 30))
    def flip_bits(self, seed: int) -> None:
        rng = random.Random(seed)
        for file in segment_paths(self.path):
            image = bytearray(file.read_bytes())
            for _ in range(3):
                image[rng.randrange(len(image))] ^= 1 << rng.randrange(8)
            with file.open("r+b") as opened:
                opened.write(image)
        self.damaged = True

    @rule(seed=st.integers(0, 1 << 30))
    def survey(self, seed: int) -> None:
        self.store.close()
        if segment_paths(self.path):
            found, checked = inspect(self.path), verify(self.path, lambda done, total: None)
            assert found.num_blocks >= checked.num_blocks and (
                self.damaged or not (checked.torn or checked.corrupt or checked.damaged)
            )
        self._open()

    @invariant()
    def only_what_was_written_is_found(self) -> None:
        assert those_in(self.store, range(51)) <= self.written
        assert self.store.usage().num_used <= (self.store.usage().num_slots or 0)
        self.store._now.index.check()

    @invariant()
    def the_bound_holds(self) -> None:
        assert num_bytes_in(self.path) <= max_bytes_for(self.num_slots)
        assert max_bytes_for(self.num_slots) // slot_bytes(BLOCK_BYTES) >= (self.store.usage().num_slots or 0)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.path)


SsdMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
TestSsdStoreAgainstADictionary = SsdMachine.TestCase
