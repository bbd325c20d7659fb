"""Who gets drafts: while drafting is on and where it goes off, and what prompt lookup learns for nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from penstock.contract import Prefix
from penstock.engine.scheduling.drafts import Decoding
from penstock.engine.scheduling.stages import RunningRequest
from penstock.speculation.drafter import DeviceDrafter, NgramDrafter
from penstock.speculation.length import StepCosts
from penstock.speculation.ngram import NgramProposer
from tests.pure.engine.scheduling.staged import life_of, running_of

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# a step of 1 ms, in which rows cost little and making drafts a third of it
COSTS = StepCosts(SIZES, tuple(1e-3 + 5e-6 * size for size in SIZES), 3e-4)
DEAR = StepCosts(SIZES, tuple(1e-3 * size for size in SIZES), 3e-4)


def track_of(name: str, tokens: Sequence[int] = (7,), scope: bytes | None = b"s") -> RunningRequest:
    prefix = None if scope is None else Prefix(scope, ())
    return running_of(life_of(tokens, 10**6, name=name, prefix=prefix))


# ------------------------------------------------------------------------------------------------- the device


class Run:
    """Decode steps of requests whose drafts are kept with a probability."""

    def __init__(self, costs: StepCosts = COSTS, num_requests: int = 1, failed: bool = False) -> None:
        self.failed = failed
        self.drafter = DeviceDrafter(4, 64, costs, lambda: self.failed)
        self.rng, self.costs, self.num = random.Random(1), costs, num_requests
        self.tracks = list[RunningRequest]()
        self.num_tokens, self.seconds = 0, 0.0
        self.num_made = 0  # steps that made drafts
        self.renew()

    def renew(self) -> None:
        """All requests end, and others start."""
        for track in self.tracks:
            self.drafter.ended(track.life)
        self.tracks = [track_of(f"{self.seconds} {n}") for n in range(self.num)]
        for track in self.tracks:
            self.drafter.started(track.life)

    def go(self, num_steps: int, rate: float) -> None:
        for _ in range(num_steps):
            drafts = self._proposed()
            self.num_made += self.drafter.num_ahead > 0
            num_rows = self.num
            for track in self.tracks:
                track.num_pending = self.drafter.num_ahead
                num = len(drafts.get(track, ()))
                kept = next((at for at in range(num) if self.rng.random() >= rate), num)
                num_rows += num
                self.num_tokens += 1 + kept
                if num:
                    self.drafter.saw(track.life, num, kept)
            making = self.costs.making(self.num) if self.drafter.num_ahead else 0.0
            self.seconds += self.costs.of(num_rows) + making

    def _proposed(self) -> dict[RunningRequest, tuple[int, ...]]:
        if not self.drafter.considers(self.num):
            return {}
        wanted = [one for one in self.tracks if self.drafter.wants(one)]
        asked = [Decoding(one.life, 4, one.num_pending) for one in wanted]
        return dict(zip(wanted, self.drafter.propose(asked, self.num) if asked else (), strict=True))

    @property
    def gain(self) -> float:
        """Tokens per second over those of plain decoding."""
        return self.num_tokens / self.seconds * self.costs.of(self.num) / self.num


def test_drafts_that_are_kept_are_made_from_the_first_step_on_and_pay() -> None:
    run = Run()
    run.go(200, 0.9)
    assert run.num_made == 200 and run.gain > 2


@pytest.mark.parametrize("num_requests", [1, 8, 32])
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_drafts_that_are_not_kept_cost_little_of_a_run(rate: float, num_requests: int) -> None:
    run = Run(num_requests=num_requests)
    for _ in range(4):
        run.go(128 if num_requests > 1 else 1024, rate)
        run.renew()
    assert run.gain >= 0.97


def test_where_rows_are_dear_drafting_is_off() -> None:
    run = Run(DEAR, 8)
    run.go(300, 0.9)
    assert run.num_made < 8 and run.drafter.num_ahead == 0


def test_requests_that_ran_while_it_went_off_are_undrafted_and_later_ones_are_drafted() -> None:
    run = Run()
    run.go(600, 0.0)
    num_made = run.num_made
    run.go(300, 0.9)
    assert run.num_made == num_made, "it is on again, but no request is drafted"
    assert run.drafter.num_ahead == 0 and not run.drafter.wants(run.tracks[0])
    run.renew()
    run.go(300, 0.9)
    assert run.num_made > num_made + 200


def test_it_is_tried_again_ever_more_seldom() -> None:
    run, begun, was_made = Run(), list[int](), False
    for step in range(6000):
        before = run.num_made
        run.go(1, 0.0)
        if run.num_made > before and not was_made:
            begun.append(step)
        was_made = run.num_made > before
        if not was_made:
            run.renew()
    pauses = [after - before for before, after in pairwise(begun)]
    assert len(pauses) > 2 and all(2 * one > other > 1.5 * one for one, other in pairwise(pauses))


def test_a_request_whose_drafts_fail_has_none_verified_and_others_have() -> None:
    drafter = DeviceDrafter(4, 64, StepCosts((1, 2, 3, 64), (1.0, 1.3, 1.5, 20.0)), lambda: False)
    good, bad = track_of("good"), track_of("bad")
    for track in (good, bad):
        drafter.started(track.life)
    for _ in range(30):
        drafter.saw(good.life, 4, 4)
        drafter.saw(bad.life, 4, 0)
    drafts = drafter.propose([Decoding(good.life, 4, 4), Decoding(bad.life, 4, 4)], 2)
    assert len(drafts[0]) > 0 and drafts[0][0] == -2 and drafts[1] == ()


def test_where_the_device_has_failed_nothing_is_made_or_proposed() -> None:
    run = Run()
    run.go(10, 0.9)
    run.failed = True
    assert run.drafter.num_ahead == 0 and not run.drafter.considers(1)


# ----------------------------------------------------------------------------------------------------- lookup


def lookup(costs: StepCosts = COSTS) -> NgramDrafter:
    return NgramDrafter(8, 64, costs)


def proposed(drafter: NgramDrafter, track: RunningRequest, most: int = 8) -> tuple[int, ...]:
    if not drafter.considers(1) or not drafter.wants(track):
        return ()
    return drafter.propose([Decoding(track.life, most)], 1)[0]


def said(drafter: NgramDrafter, track: RunningRequest, text: Sequence[int]) -> list[int]:
    """Decode `text`, each result read before the next step; returns the drafts of each step."""
    nums, at = list[int](), 0
    while at < len(text):
        drafts = proposed(drafter, track, min(8, len(text) - at - 1))
        kept = next((n for n, token in enumerate(drafts) if token != text[at + n]), len(drafts))
        track.life.tokens += text[at : at + kept + 1]
        at += kept + 1
        nums.append(len(drafts))
    return nums


def test_a_text_that_copies_has_drafts_at_once_and_needs_few_steps() -> None:
    drafter, page = lookup(), list(range(100, 300))
    track = track_of("r", [*page, 7])
    drafter.started(track.life)
    nums = said(drafter, track, page)
    assert any(nums[:4]) and len(nums) < 50


@pytest.mark.parametrize("num_before", [1, 40, 300])
def test_a_text_that_begins_to_copy_has_drafts_within_sixteen_tokens(num_before: int) -> None:
    """Also after many tokens that did not copy, and proposals that failed."""
    drafter, page, rng = lookup(), list(range(100, 300)), random.Random(num_before)
    track = track_of("r", [*page, 7])
    drafter.started(track.life)
    said(drafter, track, [rng.randrange(12) for _ in range(num_before)])
    nums = said(drafter, track, page)
    assert any(nums[:16]) and len(nums) < 70


def test_a_text_that_does_not_copy_is_seldom_looked_up_and_has_hardly_any_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter, rng, num_looks, propose = lookup(), random.Random(3), list[int](), NgramProposer.propose
    monkeypatch.setattr(
        NgramProposer, "propose", lambda self, history, k: num_looks.append(k) or propose(self, history, k)
    )
    track = track_of("r", [rng.randrange(40) for _ in range(400)])
    drafter.started(track.life)
    nums = said(drafter, track, [rng.randrange(40) for _ in range(800)])
    assert len(num_looks) < 800 / 7 and sum(map(bool, nums)) < 24


@pytest.mark.parametrize("num_unknown", [0, 1, 3])
def test_what_is_proposed_for_tokens_that_are_being_sampled_is_left_out(num_unknown: int) -> None:
    drafter, track = lookup(), track_of("r", [*range(1, 12), 1, 2, 3])
    drafter.started(track.life)
    track.life.num_in_flight = num_unknown
    drafts = proposed(drafter, track, 4)
    assert drafts == tuple(range(4 + num_unknown, 4 + num_unknown + len(drafts))) != ()


@pytest.mark.parametrize(("scope", "finds"), [(b"s", True), (b"t", False), (None, False)])
def test_a_text_is_found_by_its_own_scope_and_one_without_a_scope_by_nobody(
    scope: bytes | None, finds: bool
) -> None:
    drafter, text = lookup(), list(range(50))
    before = track_of("before", text, scope)
    drafter.started(before.life)
    drafter.ended(before.life)
    track = track_of("r", text[:10], b"s")
    drafter.started(track.life)
    assert bool(proposed(drafter, track)) == finds


def test_one_whose_proposer_fails_has_no_drafts_any_more_and_others_have(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drafter, text, propose = lookup(), [1, 2, 3, 4, 5, 1, 2, 3], NgramProposer.propose
    tracks = [track_of(name, text) for name in ("bad", "good")]
    for track in tracks:
        drafter.started(track.life)
    bad = drafter._requests["bad"].proposer

    def fail(self: NgramProposer, history: Sequence[int], k: int) -> tuple[int, ...]:
        if self is bad:
            raise RuntimeError("no idea")
        return propose(self, history, k)

    monkeypatch.setattr(NgramProposer, "propose", fail)
    drafts = drafter.propose([Decoding(track.life, 8) for track in tracks], 2)
    assert drafts[0] == () and drafts[1][:2] == (4, 5) and "nothing more is proposed" in caplog.text
    assert not drafter.wants(tracks[0])


def test_all_drafts_of_a_step_are_bounded_and_those_that_there_are_not_take_no_room() -> None:
    drafter, text = NgramDrafter(8, 10, COSTS), list(range(100, 120))
    tracks = [track_of(str(n), [*text, 7, *text[:4]]) for n in range(4)] + [track_of("none", range(9))]
    for track in tracks:
        drafter.started(track.life)
    nums = list(map(len, drafter.propose([Decoding(track.life, 8) for track in tracks], 5)))
    assert sum(nums) == 10 and all(nums[:4]) and nums[4] == 0
    for track in tracks:
        drafter.ended(track.life)
    assert not drafter._requests, "nothing is kept of what is over"
