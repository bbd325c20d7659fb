"""Who gets drafts and how many: what is known of each request stays with it, and ends with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest

from penstock.contract import Prefix, Request, SamplingParams
from penstock.engine.scheduling.drafts import Decoding
from penstock.engine.scheduling.track import Track
from penstock.speculation.drafter import _TRUSTED, LOOK_SHARE, Speculation
from penstock.speculation.length import FIRST_PLAIN_STEPS, MAX_LOSS, RETRY_STEPS, STALE_STEPS, StepCosts

COSTS = StepCosts((1, 2, 4, 8, 16, 32), (1.0, 1.01, 1.02, 1.03, 1.04, 1.05), ahead_s=0.1)


def speculation(
    max_drafts: int = 4, max_step_drafts: int = 100, on_device: bool = False, forced: bool = True
) -> Speculation:
    made = Speculation(max_drafts, max_step_drafts, COSTS, on_device)
    if forced:
        made.force = lambda most: most
    return made


def decoding(
    tokens: Sequence[int],
    id: str = "r",
    scope: bytes | None = b"",
    most: int = 100,
    num_unknown: int = 0,
    num_pending: int = 0,
) -> Decoding:
    prefix = None if scope is None else Prefix(scope, ())
    track = Track(
        Request(id, list(tokens[:1]), SamplingParams(max_tokens=1000), prefix=prefix),
        1,
        prefix,
        tokens=list(tokens),
    )
    track.num_in_flight = num_unknown
    return Decoding(track, most, num_pending)


TEXT = [10, 11, 12, 13, 14, 15, 16, 17]


def test_what_followed_before_is_proposed_up_to_what_there_is_room_for() -> None:
    one = decoding([*TEXT, 10, 11])
    assert speculation().propose([one], 0) == [(12, 13, 14, 15)]
    assert speculation(max_drafts=2).propose([one], 0) == [(12, 13)]
    assert speculation().propose([one._replace(most=1)], 0) == [(12,)]


@pytest.mark.parametrize("num_unknown", [1, 2, 3])
def test_what_is_proposed_for_tokens_that_are_being_sampled_is_left_out(num_unknown: int) -> None:
    found = speculation().propose([decoding([*TEXT, 10, 11], num_unknown=num_unknown)], 0)
    assert found == [tuple([*TEXT, 10][2 + num_unknown :][:4])]


def test_where_nothing_is_left_behind_them_nothing_is_proposed() -> None:
    """What was to stand in the place of a token that is being sampled stands nowhere else."""
    made = speculation()
    made.ended(ended(made, [10, 11, 12]))
    assert made.propose([decoding([20, 10, 11])], 0) == [(12,)]
    assert made.propose([decoding([20, 10, 11], "s", num_unknown=1)], 0) == [()]
    assert made.propose([decoding([20, 10, 11], "t", num_unknown=2)], 0) == [()]


def ended(made: Speculation, tokens: Sequence[int], id: str = "before", scope: bytes | None = b"") -> Track:
    """One that has had a proposal, and is over with these."""
    one = decoding(tokens, id, scope)
    made.propose([one], 0)
    return one.track


@pytest.mark.parametrize(
    ("theirs", "mine", "found"),
    [
        (b"a", b"a", True),
        (b"a", b"b", False),
        (None, None, False),
        (None, b"", False),
        (b"", None, False),
        (b"", b"", True),
    ],
)
def test_a_text_is_found_by_its_own_scope_and_one_without_a_scope_by_nobody(
    theirs: bytes | None, mine: bytes | None, found: bool
) -> None:
    """A request without a prefix is one that asked for no reuse: who it is of is not known."""
    made = speculation()
    made.ended(ended(made, TEXT, scope=theirs))
    assert made.propose([decoding([99, 12, 13], "mine", mine)], 0) == [(14, 15, 16, 17) if found else ()]


def test_nothing_is_kept_of_a_request_that_is_over() -> None:
    made = speculation()
    first = ended(made, TEXT)
    made.saw(first, 4, 0)
    made.ended(first)
    made.ended(first)
    assert not made._requests
    assert made._shared.num_tokens == len(TEXT), "its text is taken in once"
    never = decoding(TEXT, "never").track
    made.ended(never)
    assert made._shared.num_tokens == len(TEXT), "one for which nothing was ever proposed leaves nothing"


def test_one_whose_proposer_fails_has_no_drafts_any_more_and_others_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, one, other = speculation(), decoding([*TEXT, 10, 11], "one"), decoding([*TEXT, 12, 13], "other")
    made.propose([one, other], 0)
    failing = made._requests["one"].proposer
    calls: list[int] = []

    def fail(*_: object) -> None:
        calls.append(1)
        raise RuntimeError

    monkeypatch.setattr(failing, "propose", fail)
    for _ in range(3):
        assert made.propose([one, other], 0) == [(), (14, 15, 16, 17)]
    assert len(calls) == 1
    made.ended(one.track)
    made.ended(other.track)
    assert made._shared.num_tokens == len(TEXT) + 2, "the text of the one that failed is not handed on"


def test_of_what_the_device_has_drafted_the_number_is_known() -> None:
    made = speculation(on_device=True)
    one = decoding([*TEXT, 10, 11])
    assert made.considers([one.track])
    assert made.propose(
        [one._replace(num_pending=3), one._replace(num_pending=0), one._replace(num_pending=9)], 0
    ) == [
        (-2, -3, -4),
        (),
        (-2, -3, -4, -5),
    ]
    assert made.propose([one._replace(most=2, num_pending=3)], 0) == [(-2, -3)]
    assert made.num_ahead == 4 and not made.needs_results
    assert speculation().num_ahead == 0 and speculation().needs_results
    assert speculation(on_device=True, forced=False).num_ahead == 0, (
        "nothing is drafted where nothing is proposed"
    )


REPEATED = [*TEXT, *TEXT, *TEXT, 10, 11]


def seasoned(
    on_device: bool = False, num_steps: int = 200, max_step_drafts: int = 100, tracks: Sequence[Track] = ()
) -> Speculation:
    """It knows what plain steps take, and requests have earned something."""
    made = speculation(max_step_drafts=max_step_drafts, on_device=on_device, forced=False)
    made._clock = lambda: 0.0  # lookups take no time
    for _ in range(num_steps):
        made.considers(tracks)
        made.step_took(len(tracks), len(tracks), 1.0, 0)
    return made


def test_nothing_is_proposed_before_it_was_seen_what_it_would_have_given() -> None:
    """A request whose text does not repeat itself is asked for nothing, whatever it has earned."""
    one = decoding(list(range(100)))
    made = seasoned(tracks=[one.track])
    for _ in range(50):
        assert not made.considers([one.track])
        made.step_took(1, 1, 1.0, 0)
    assert made._requests["r"].record.tries[0] > 2, "it was looked at"


def test_a_text_that_repeats_itself_is_proposed_when_its_account_can_pay() -> None:
    one = decoding(REPEATED)
    made = seasoned(num_steps=FIRST_PLAIN_STEPS + 2, tracks=[one.track])
    num = 0
    while not made.considers([one.track]):
        made.step_took(1, 1, 1.0, 0)
        num += 1
    earned = FIRST_PLAIN_STEPS + 2 + num
    assert earned == pytest.approx(1 / MAX_LOSS, abs=3), "to read a result first takes as long again at most"
    assert made.propose([one], 0) == [(12, 13, 14, 15)]


def test_a_new_request_has_to_earn_first_what_others_want_to_spend() -> None:
    one, new = decoding(REPEATED), decoding(list(range(100)), "new")
    made = seasoned(tracks=[one.track])
    assert made.considers([one.track])
    made._num_skipped = 0
    made.step_took(1, 1, 1.0, 0)
    for _ in range(FIRST_PLAIN_STEPS):
        assert not made.considers([one.track, new.track])
        made.step_took(2, 2, 1.0, 0)
    for _ in range(20):
        assert not made.considers([one.track, new.track])
        made.step_took(2, 2, 1.0, 0)
    made.ended(new.track)
    assert made.considers([one.track]), "nobody else has to pay"


def test_beside_prompts_nothing_is_drafted() -> None:
    one = decoding(REPEATED)
    made = seasoned(tracks=[one.track])
    assert made.considers([one.track]) and made.propose([one], 16) == [()]
    device = seasoned(on_device=True, num_steps=40, tracks=[one.track])
    device._paid_at_s = 0.0
    assert device.propose([one._replace(num_pending=4)], 16) == [()] and device.num_ahead == 0


def test_beside_prompts_each_request_is_answered() -> None:
    many = [decoding(REPEATED, str(number)) for number in range(3)]
    made = seasoned(tracks=[one.track for one in many])
    assert made.propose(many, 16) == [(), (), ()]


def test_drafts_that_there_are_not_take_no_room_from_those_of_others() -> None:
    """However well those fared who have none now."""
    one, other = decoding(REPEATED), decoding(list(range(100)), "other")
    tracks = [one.track, other.track]
    made = seasoned(max_step_drafts=4, tracks=tracks)
    made._room_s = 10.0
    made._requests["r"].record.forget()
    for _ in range(50):
        made._requests["other"].record.saw(4, 4)
    assert made.propose([one, other], 0) == [(12, 13, 14, 15), ()]


def test_what_lookups_took_is_paid_for_once_though_the_step_is_read_later_by_as_much() -> None:
    one = decoding(REPEATED)
    made = seasoned(tracks=[one.track])
    assert made.considers([one.track])
    account = made._requests["r"].account
    before_s = made.books.balance_s(account, 0.0)
    made._clock = lambda: made._started_s + 0.25
    assert made.propose([one], 0) == [(12, 13, 14, 15)]
    made.step_took(1, 5, 1.0 + 0.25, 0)
    assert made.books.balance_s(account, 0.0) == pytest.approx(before_s - 0.25 + MAX_LOSS)


def test_lookups_that_come_to_nothing_wait_twice_as_long_each_time_up_to_a_bound_and_not_after_one_that_finds_something() -> (  # noqa: E501
    None
):
    one, none = decoding(REPEATED), decoding(list(range(100)), "none")
    made = seasoned(tracks=[one.track, none.track])
    made._room_s = 10.0
    for num_steps in (1, 3, 7, 15, 31, 31):
        made._requests["none"].is_promising = True
        assert made.propose([none], 0) == [()] and made._num_skipped == num_steps
    assert any(made.propose([one], 0)) and made._num_skipped == 0
    made._requests["none"].is_promising = True
    assert made.propose([none], 0) == [()] and made._num_skipped == 1


def test_each_draft_that_was_kept_has_saved_a_plain_step() -> None:
    one = decoding(REPEATED)
    made = seasoned(tracks=[one.track])
    made.saw(one.track, 4, 3)
    assert made._requests["r"].gained_s == pytest.approx(3 * made.books.plain_step_s(1))


def test_what_was_tried_in_vain_is_forgotten_after_many_steps_that_paid() -> None:
    one = decoding(REPEATED)
    made = seasoned(tracks=[one.track])
    made._retry_steps, made._num_paying = 8 * RETRY_STEPS, 0
    for number in range(_TRUSTED):
        assert made._retry_steps == 8 * RETRY_STEPS, number
        assert made.considers([one.track])
        made.saw(one.track, 4, 4)
        made.step_took(1, 5, 1.0, 0)
    assert made._retry_steps == RETRY_STEPS


def test_time_for_looking_is_a_share_of_what_steps_take_and_little_of_it_is_saved_up() -> None:
    made = speculation(forced=False)
    for number in range(1, 10):
        made.step_took(1, 1, 0.01, 0)
        assert made._look_s == pytest.approx(min(number, 8) * LOOK_SHARE * 0.01)


def test_all_drafts_of_a_step_are_bounded_and_everybody_has_some() -> None:
    many = [decoding(REPEATED, str(n)) for n in range(4)]
    tracks = [one.track for one in many]
    made = seasoned(max_step_drafts=5, tracks=tracks)
    assert made.considers(tracks)
    found = made.propose(many, 0)
    assert [len(drafts) for drafts in found] == [1, 1, 1, 1]
    assert all(drafts == (12,) for drafts in found)


@pytest.mark.parametrize("num_generated", [3, 4])
def test_a_request_is_looked_at_as_soon_as_it_has_generated_as_much_as_is_drafted(num_generated: int) -> None:
    """What it was asked is not what it says: only its own tokens show how drafts would have fared."""
    made, one = speculation(max_drafts=4), decoding([1, 2, 1, 2, 1, 2][: 1 + num_generated])
    made._look_s = 1.0
    made._look([one.track])
    assert (made._of(one.track).record.tries[0] > 0) == (num_generated == 4)


def test_lookups_that_come_to_nothing_are_paid_for_and_wait_ever_longer() -> None:
    one = decoding(REPEATED)
    made = seasoned(tracks=[one.track])
    one.track.tokens += range(900, 904)
    waits = []
    for _ in range(3):
        num = 0
        while not made.considers([one.track]):
            made.step_took(1, 1, 1.0, 0)
            num += 1
        waits.append(num)
        made._clock = lambda: made._started_s + 0.01
        before = made.books.balance_s(made._requests["r"].account, 0.0)
        assert made.propose([one], 0) == [()]
        assert made.books.balance_s(made._requests["r"].account, 0.0) == pytest.approx(before - 0.01)
        made._clock = lambda: 0.0
        made._requests["r"].is_promising = True
    assert waits[0] < waits[1] < waits[2]


def test_what_the_device_drafts_is_tried_for_one_step_until_that_was_read() -> None:
    one = decoding(TEXT)
    made = speculation(on_device=True, forced=False)
    num = 0
    while not made.considers([one.track]):
        made.step_took(1, 1, 1.0, 0)
        num += 1
    assert made.num_ahead == 4
    assert num == pytest.approx(1.25 * (0.1 + 0.03) / MAX_LOSS, abs=2)
    assert made.propose([one], 0) == [()]
    assert made.considers([one.track]) and made.num_ahead == 0, "its account cannot pay for two"
    assert made.propose([one._replace(num_pending=4)], 0) == [(-2, -3, -4, -5)]
    made.step_took(1, 1, 1.1, 4)
    assert not made.considers([one.track]) and made.num_ahead == 0
    made.saw(one.track, 4, 4)
    made.step_took(1, 5, 1.03, 0)
    assert made.considers([one.track]) and made.num_ahead == 4, "what it saved pays for more"


def test_where_the_device_has_failed_nothing_is_considered() -> None:
    one = decoding(TEXT)
    made = speculation(on_device=True, forced=False)
    made.has_failed = lambda: True
    for _ in range(100):
        assert not made.considers([one.track]) and made.num_ahead == 0
        made.step_took(1, 1, 1.0, 0)


def test_drafts_beside_prompts_are_paid_for_as_if_they_had_taken_the_most() -> None:
    one = decoding(TEXT)
    made = speculation(on_device=True, forced=False)
    while not made.considers([one.track]):
        made.step_took(1, 1, 1.0, 0)
    account = made._requests["r"].account
    before = made.books.balance_s(account, 0.0)
    made.step_had_prompts()
    assert made.books.balance_s(account, 0.0) == pytest.approx(before - 1.25 * 0.1)
    two = decoding(REPEATED)
    lookups = seasoned(tracks=[two.track])
    account = lookups._requests["r"].account
    assert lookups.considers([two.track]) and any(lookups.propose([two], 0))
    before = lookups.books.balance_s(account, 0.0)
    lookups.step_had_prompts()
    assert lookups.books.balance_s(account, 0.0) == pytest.approx(before - 1.0), (
        "to read first takes as long again at most"
    )


def test_drafts_that_the_step_before_has_made_are_paid_for_beside_prompts_and_so_are_those_of_every_request() -> (  # noqa: E501
    None
):
    many = [decoding(TEXT, str(number)) for number in range(2)]
    tracks = [one.track for one in many]
    costs = StepCosts(COSTS.sizes, COSTS.seconds, ahead_s=0.1, ahead_row_s=0.05)
    made = Speculation(4, 100, costs, on_device=True)
    while not made.considers(tracks):
        made.step_took(2, 2, 1.0, 0)
    assert made.considers(tracks) and made.num_ahead == 0, "the accounts cannot pay for two"
    account = made._requests["0"].account
    before = made.books.balance_s(account, 0.0)
    made.step_had_prompts()
    assert made.books.balance_s(account, 0.0) == pytest.approx(before - 1.25 * (0.1 + 0.05))


def test_steps_are_measured_without_drafts_now_and_then() -> None:
    one = decoding(TEXT)
    made = speculation(on_device=True, forced=False)
    spells, num = list[int](), 0
    for _ in range(3 * STALE_STEPS):
        made.considers([one.track])
        made.propose([one._replace(num_pending=4)], 0)
        num_ahead = made.num_ahead
        made.saw(one.track, 4, 4)
        made.step_took(1, 5 if num_ahead else 1, 1.1, num_ahead)
        if not num_ahead and num:
            spells.append(num)
        num = num + 1 if num_ahead else 0
    assert len(spells) >= 2 and max(spells) <= STALE_STEPS + 1


def test_what_drafting_took_when_it_did_not_pay_is_forgotten_after_a_while() -> None:
    """Else it would never be tried again: nothing that is not tried is measured."""
    made = speculation(on_device=True, forced=False)
    one = decoding(TEXT)
    for _ in range(FIRST_PLAIN_STEPS):
        made.step_took(1, 1, 1.0, 0)
    for _ in range(8):
        made.step_took(1, 1, 10.0, 4)
    assert made.books.estimate(1).extra_s == pytest.approx(9.0)
    for _ in range(RETRY_STEPS - 1):
        assert not made.considers([one.track])
    assert made.books.estimate(1).extra_s == pytest.approx(9.0)
    assert not made.considers([one.track]) and made.books.estimate(1).extra_s == COSTS.ahead_s


def test_drafts_of_the_device_that_were_rejected_are_tried_again_ever_more_seldom() -> None:
    """Texts change, and those who write them."""
    made = speculation(on_device=True, forced=False)
    one = decoding(TEXT)
    made.considers([one.track])
    for _ in range(40):
        made.step_took(1, 1, 1.0, 0)
    assert made.considers([one.track]), "it has earned what drafts may take"
    for num_steps in (RETRY_STEPS, 2 * RETRY_STEPS, 4 * RETRY_STEPS):
        for _ in range(50):
            made.saw(one.track, 4, 0)
        made.considers([one.track])
        for _ in range(num_steps - 1):
            assert not made.considers([one.track])
        assert made.considers([one.track])


def counted(made: Speculation, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For how many requests it was asked whether drafts pay."""
    asked: list[int] = []
    pays = made._pays
    monkeypatch.setattr(made, "_pays", lambda num: asked.append(num) or pays(num))
    return asked


def test_while_drafts_do_not_pay_hardly_anything_is_asked_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, new = decoding(list(range(100))), decoding(list(range(200, 300)), "new")
    made = seasoned(tracks=[one.track])
    asked, before_s = counted(made, monkeypatch), made.books.plain_s
    for _ in range(160):
        assert not made.considers([one.track])
        made.step_took(1, 1, 0.5, 0)
    assert 20 <= len(asked) <= 21
    made.considers([one.track, new.track])
    assert asked[-1] == 2, "another request is another case"
    assert made.books.plain_s == pytest.approx(before_s + 80.0, abs=8.0), (
        "steps that nobody looked at have been earned by"
    )
    assert made.books.plain_step_s(1) == pytest.approx(0.5, abs=0.1)
    account = made._requests["new"].account
    assert account.plain_s == made.books.plain_s, "who comes has earned nothing by them"
    num = len(asked)
    made.ended(new.track)
    made.considers([one.track])
    assert len(asked) == num + 1


def test_one_long_step_of_a_rest_says_little_of_the_others() -> None:
    """The host was busy with something else: what plain steps take is learned from the others."""
    one = decoding(list(range(100)))
    made = seasoned(tracks=[one.track])
    for number in range(200):
        made.considers([one.track])
        made.step_took(1, 1, 100.0 if number % 16 == 0 else 1.0, 0)
    assert made.books.plain_step_s(1) < 1.3


def test_a_text_that_begins_to_repeat_itself_is_noticed_within_eight_steps() -> None:
    one = decoding(list(range(100)))
    made = seasoned(tracks=[one.track])
    for _ in range(100):
        made.considers([one.track])
        made.step_took(1, 1, 1.0, 0)
    one.track.tokens += REPEATED
    assert made._num_kept == 0.0
    for _ in range(8):
        made.considers([one.track])
        made.step_took(1, 1, 1.0, 0)
    assert made._num_kept > 0.0


def test_nobody_rests_before_it_is_known_what_plain_steps_take() -> None:
    one, two = decoding(TEXT), decoding(TEXT, "two")
    made = seasoned(on_device=True, tracks=[one.track], num_steps=0)
    made._num_idle = 100
    for num in range(FIRST_PLAIN_STEPS):
        assert not made.books.is_known(2), num
        made.considers([one.track, two.track])
        made.step_took(2, 2, 1.0, 0)
    assert made.books.is_known(2)


def test_a_step_with_drafts_that_is_read_late_is_paid_for() -> None:
    """It was planned before it was found that drafts do not pay."""
    one = decoding(list(range(100)))
    made = seasoned(tracks=[one.track])
    made.considers([one.track])
    made._rest(1, 15)
    account = made._requests["r"].account
    before_s = made.books.balance_s(account, 0.0)
    made.step_took(1, 5, 3.0, 0)
    made.step_took(1, 1, 1.5, 0)
    assert made.books.balance_s(account, 0.0) == pytest.approx(before_s - 2.5 + 2 * MAX_LOSS), (
        "and so is the one that fills the pipe again"
    )


def test_who_takes_the_place_of_another_has_an_account_at_once() -> None:
    one, new = decoding(list(range(100))), decoding(list(range(200, 300)), "new")
    made = seasoned(on_device=True, num_steps=0)
    made.considers([one.track])
    made._rest(1, 15)
    made.ended(one.track)
    made.considers([new.track])
    assert "new" in made._requests


def test_drafts_that_are_under_way_are_verified_before_anybody_rests() -> None:
    one = decoding(TEXT)
    made = seasoned(on_device=True, num_steps=0)
    while not made.considers([one.track]):
        made.step_took(1, 1, 1.0, 0)
    for _ in range(50):
        made.saw(one.track, 4, 0)
    assert made.considers([one.track]), "the device has made some"
    assert not made.considers([one.track])
    account = made._requests["r"].account
    before_s = made.books.balance_s(account, 0.0)
    made.step_had_prompts()
    assert made.books.balance_s(account, 0.0) == before_s, "nothing is drafted any more"


def steps_until(made: Speculation, happens: Callable[[bool], bool]) -> tuple[int, int]:
    """Plain steps of one request until `happens`, which is told whether drafts are considered, and how often
    it was worked out whether they pay."""
    one, asked, pays = decoding(TEXT), list[int](), made._pays
    made._pays = lambda num: asked.append(num) or pays(num)  # type: ignore[method-assign, func-returns-value]
    for number in range(1000):
        one.track.num_planned = one.track.num_followed = number
        considered = made.considers([one.track])
        if happens(considered):
            return number, len(asked)
        if made.leaves_out:
            one.track.blank_to = number
        made.step_took(1, 1, 1.0, 0)
    raise AssertionError("it never happens")


def never_rests(made: Speculation) -> Speculation:
    made._rest = lambda num_requests, num_steps: None  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize("ahead_s", [0.3, 0.7, 1.1, 1.5])
def test_while_drafts_are_not_earned_it_is_seldom_asked_and_they_come_when_they_are(ahead_s: float) -> None:
    costs = dataclasses.replace(COSTS, ahead_s=ahead_s)
    begins, asked = steps_until(Speculation(4, 100, costs, True), lambda considered: considered)
    expected, always = steps_until(
        never_rests(Speculation(4, 100, costs, True)), lambda considered: considered
    )
    assert begins == expected and asked <= FIRST_PLAIN_STEPS + 2 + begins // 10 < always


def test_passes_begin_when_they_are_due_though_nothing_is_asked_before() -> None:
    """They cost more than is earned: they begin some tokens before drafts do."""
    costs = dataclasses.replace(COSTS, ahead_s=1.2, follow_s=0.04)
    of = lambda: Speculation(4, 100, costs, True)  # noqa: E731
    passed = of()
    begins, asked = steps_until(passed, lambda considered: passed.books.is_known(1) and not passed.leaves_out)
    every = never_rests(of())
    expected, _ = steps_until(every, lambda considered: every.books.is_known(1) and not every.leaves_out)
    assert begins == expected > 64 and asked < begins // 4
    drafts, _ = steps_until(of(), lambda considered: considered)
    assert drafts == steps_until(never_rests(of()), lambda considered: considered)[0] > begins


def test_what_is_decoded_is_left_out_while_drafts_do_not_pay_and_drafts_wait_until_enough_is_not() -> None:
    made = speculation(on_device=True, forced=False)
    one = decoding(TEXT)
    made.considers([one.track])
    for _ in range(40):
        made.step_took(1, 1, 1.0, 0)
    assert made.considers([one.track]) and not made.leaves_out
    for _ in range(50):
        made.saw(one.track, 4, 0)
    made.considers([one.track])
    assert made.leaves_out
    one.track.blank_to = 1000
    for _ in range(RETRY_STEPS):
        made.considers([one.track])
    for one.track.num_planned in range(1000, 1064):
        assert not made.considers([one.track]) and not made.leaves_out, "what comes now is in its KV"
        made.step_took(1, 1, 1.0, 0)
    one.track.num_planned = 1064
    assert made.considers([one.track])


def followed(
    costs: StepCosts, num_tokens: int, made: Speculation | None = None
) -> tuple[list[bool], list[int]]:
    """One request by itself: for each of its tokens whether it is passed over, and those at which drafts are
    made. A pass is over a block, and takes what the table says. A token that is left out stays so."""
    made = made or Speculation(4, 100, costs, on_device=True)
    one, passed, made_at = decoding(TEXT), list[bool](), list[int]()
    for num in range(1, num_tokens + 1):
        one.track.num_planned = num
        made.considers([one.track])
        passed.append(not made.leaves_out)
        if made.num_ahead:
            made_at.append(num)
        ends_block = num % 16 == 0
        if ends_block and made.leaves_out:
            one.track.blank_to = num
        catches_up = ends_block and not made.leaves_out and not made.num_ahead
        made.step_took(
            1,
            1,
            1.0 + 16 * costs.follow_s * catches_up + 0.1 * bool(made.num_ahead),
            made.num_ahead,
            catches_up,
        )
    made.ended(one.track)
    return passed, made_at


DEAR = StepCosts((1, 2, 4, 8, 16, 32), (1.0, 1.01, 1.02, 1.03, 1.04, 1.05), ahead_s=1.0, follow_s=0.03)


def test_what_is_decoded_is_passed_over_from_the_beginning_where_that_costs_little() -> None:
    passed, made_at = followed(COSTS, 100)
    assert all(passed[FIRST_PLAIN_STEPS:]) and made_at[0] == pytest.approx(
        1.25 * (0.1 + 0.03) / MAX_LOSS, abs=2
    )


def test_passes_that_cost_more_than_is_earned_begin_as_late_as_drafts_allow_and_are_paid_for() -> None:
    """Drafts have to wait for what they take themselves, and for the passes over the last 64 tokens before
    them."""
    passed, made_at = followed(DEAR, 300)
    due = 1.25 * (1.0 + 0.03 + 64 * 0.03) / MAX_LOSS
    assert made_at[0] == pytest.approx(due, abs=5)
    first = passed.index(True)
    assert made_at[0] - 64 - 16 <= first <= made_at[0] - 64 + 1 and all(passed[first : made_at[0]])


def test_where_requests_end_before_they_can_pay_for_drafts_what_they_say_is_left_out() -> None:
    made = Speculation(4, 100, DEAR, on_device=True)
    for _ in range(20):
        passed, made_at = followed(DEAR, 80, made)
        assert not any(passed) and not made_at
    passed, made_at = followed(DEAR, 300, made)
    assert any(passed) and made_at, "one that lives longer is not"


def test_a_pass_over_what_was_decoded_before_is_paid_for_and_says_nothing_of_plain_steps_nor_of_drafts() -> (
    None
):
    one = decoding(TEXT)
    made = seasoned(on_device=True, num_steps=20, tracks=[one.track])
    account, before = made._requests["r"].account, made.books.estimate(1)
    had_s = made.books.balance_s(account, 0.0)
    made.step_took(1, 1, 1.5, 0, True)
    assert made.books.balance_s(account, 0.0) == pytest.approx(had_s + MAX_LOSS - 0.5)
    assert made.books.estimate(1) == before and not made.books.is_drafting
    made._rest(1, 15)
    made.step_took(1, 1, 1.5, 0, True)
    assert made.books.balance_s(account, 0.0) == pytest.approx(had_s + 2 * MAX_LOSS - 1.0), (
        "also while nothing is asked"
    )
    made.step_took(1, 1, 1.125, 4)
    made.step_took(1, 1, 1.0, 0)
    assert made.books.estimate(1).extra_s == pytest.approx(0.125), "nor does it count as theirs later"


def test_what_is_decoded_is_left_out_as_soon_as_drafts_are_found_not_to_pay() -> None:
    """Before this request had any: those of others have failed."""
    made, one = speculation(on_device=True, forced=False), decoding(TEXT)
    for _ in range(FIRST_PLAIN_STEPS + 1):
        assert not made.considers([one.track])
        made.step_took(1, 1, 1.0, 0)
    assert not made.leaves_out
    for _ in range(50):
        made._pool.saw(4, 0)
    made.saw(one.track, 4, 0)
    assert not made.considers([one.track]) and made.leaves_out


def test_what_is_decoded_is_passed_over_as_soon_as_accounts_can_pay_for_all() -> None:
    """Drafts of another request have saved more than was thought, or one that could not pay has left."""
    made, one = Speculation(4, 100, DEAR, on_device=True), decoding(TEXT)
    for one.track.num_planned in range(1, 30):
        made.considers([one.track])
        made.step_took(1, 1, 1.0, 0)
    assert made.leaves_out
    for _ in range(3):
        made.saw(one.track, 4, 4)
    made.considers([one.track])
    assert not made.leaves_out


def test_lookups_need_no_kv_and_leave_nothing_out() -> None:
    made = seasoned(tracks=[decoding(TEXT).track])
    assert not made.considers([decoding(TEXT).track]) and not made.leaves_out
