"""Who gets drafts and how many: what is known of each request stays with it, and ends with it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.contract import Prefix, Request, SamplingParams
from penstock.engine.scheduling.drafts import Decoding
from penstock.engine.scheduling.track import Track
from penstock.speculation.drafter import Speculation
from penstock.speculation.length import LOOK_STEPS, SETTLING_STEPS, StepCosts

COSTS = StepCosts((1, 2, 4, 8, 16, 32), (1.0, 1.01, 1.02, 1.03, 1.04, 1.05))


def speculation(max_drafts: int = 4, max_step_drafts: int = 100, on_device: bool = False, forced: bool = True) -> Speculation:
    made = Speculation(max_drafts, max_step_drafts, COSTS, on_device)
    if forced:
        made.force = lambda most: most
    return made


def decoding(
    tokens: Sequence[int], id: str = "r", scope: bytes | None = b"", most: int = 100, num_unknown: int = 0, num_pending: int = 0
) -> Decoding:
    prefix = None if scope is None else Prefix(scope, ())
    track = Track(Request(id, list(tokens[:1]), SamplingParams(max_tokens=1000), prefix=prefix), 1, prefix, tokens=list(tokens))
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
    [(b"a", b"a", True), (b"a", b"b", False), (None, None, False), (None, b"", False), (b"", None, False), (b"", b"", True)],
)
def test_a_text_is_found_by_its_own_scope_and_one_without_a_scope_by_nobody(theirs: bytes | None, mine: bytes | None, found: bool) -> None:
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


def test_one_whose_proposer_fails_has_no_drafts_any_more_and_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert made.propose([one._replace(num_pending=3), one._replace(num_pending=0), one._replace(num_pending=9)], 0) == [
        (-2, -3, -4),
        (),
        (-2, -3, -4, -5),
    ]
    assert made.propose([one._replace(most=2, num_pending=3)], 0) == [(-2, -3)]
    assert made.num_ahead == 4 and not made.needs_results
    assert speculation().num_ahead == 0 and speculation().needs_results
    assert speculation(on_device=True, forced=False).num_ahead == 0, "nothing is drafted where nothing is proposed"


def test_all_drafts_of_a_step_are_bounded() -> None:
    made = speculation(max_step_drafts=5, forced=False)
    on(made, 4)
    found = made.propose([decoding([*TEXT, 10, 11], str(n)) for n in range(4)], 0)
    assert 0 < sum(map(len, found)) <= 5
    assert all(drafts == (12, 13, 14, 15)[: len(drafts)] for drafts in found)


def on(made: Speculation, num_requests: int) -> None:
    """Until it is looked at whether proposing pays with so many requests."""
    for _ in range(LOOK_STEPS + SETTLING_STEPS):
        made.propose([decoding([7], f"first {n}") for n in range(num_requests)], 0)
        made.step_took(num_requests, 1.0, num_requests)
    assert made._trial.is_on


def test_whether_it_pays_is_found_out_for_each_number_of_requests() -> None:
    made = speculation(forced=False)
    on(made, 2)
    two = [decoding([*TEXT, 10, 11], str(n)) for n in range(2)]
    assert all(made.propose(two, 0))
    assert made.propose(two[:1], 0) == [()] and made.propose([*two, *two], 0) == [()] * 4, "others were not looked at"
    assert all(made.propose(two, 0))


def test_an_account_has_what_a_step_took_and_what_plain_decoding_would_have() -> None:
    made = speculation(forced=False)
    on(made, 1)
    one = decoding([*TEXT, 10, 11])
    (drafts,) = made.propose([one], 0)
    account = made._requests["r"].account
    plain, step = made.costs.of(1), made.costs.of(1 + len(drafts))
    assert len(drafts) == 4 and (account.plain_s, account.spent_s) == (plain, step)
    made.saw(one.track, 4, 3)
    assert (account.plain_s, account.spent_s) == (pytest.approx(4 * plain), step)
    assert account.tries.tolist() == [1.0] * 4 and account.hits.tolist() == [1.0, 1.0, 1.0, 0.0]


def test_a_request_that_gets_no_drafts_pays_its_share_of_the_step_all_the_same() -> None:
    made = speculation(forced=False)
    on(made, 2)
    with_drafts, without = decoding([*TEXT, 10, 11], "a"), decoding([1, 2, 3], "b")
    found = made.propose([with_drafts, without], 16)
    account = made._requests["b"].account
    assert account.plain_s == made.costs.of(18) and account.spent_s == made.costs.of(18 + sum(map(len, found)))


def test_a_measured_step_changes_what_its_own_size_costs() -> None:
    made = speculation()
    before = made.costs.seconds
    made.step_took(3, 2.02, 3)
    assert made.costs.seconds == (*before[:2], pytest.approx(0.8 * 1.02 + 0.2 * 2.02), *before[3:])
    made.step_took(33, 9.0, 33)
    assert made.costs.seconds[3:] == before[3:], "no size is as large"
