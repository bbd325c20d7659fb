"""Transfers under the sanitizer, which is silent about ours on every schedule tried."""

from __future__ import annotations

import random

import pytest

from penstock.kv.blocks.pool import BlockPool
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.testing.sequencer import Failure, Program, Sequencer, run_on
from tests.pure.kv import test_transfer_races as races
from tests.pure.kv import watched_transfers as watched

SEEDS = 12  # random schedules of each program, besides the default one

PROGRAMS: tuple[Program, ...] = (
    races.promote_into_slots_that_a_step_still_reads,
    races.reuse_slots_while_they_are_demoted,
    races.read_what_is_being_promoted,
    races.replay_what_is_being_promoted,
    races.flush_between_submit_and_launch,
    watched.demote_behind_a_step_that_nobody_has_read,
    watched.give_slots_to_another_while_they_are_demoted,
    watched.a_demotion_that_fails_and_is_made_again,
    watched.a_demotion_that_could_not_be_submitted,
    watched.close_while_a_demotion_is_in_flight,
    watched.demote_what_the_host_has_already,
    watched.overwrite_what_was_flushed,
    watched.overwrite_what_was_flushed_before_it_was_submitted,
    watched.overwrite_where_a_promotion_was_flushed,
    watched.promote_into_the_slots_of_a_cancelled_request,
    watched.cancel_during_a_promotion,
    watched.a_promotion_that_nobody_waits_for_any_longer,
    watched.share_what_was_promoted_for_another,
    watched.a_promotion_that_fails_and_is_computed_instead,
    watched.a_promotion_of_which_only_the_first_copy_could_be_launched,
    watched.promote_what_was_claimed_under_pressure,
    watched.promote_what_was_wanted_under_pressure,
    watched.a_lease_whose_time_ends_during_its_promotion,
    watched.a_lease_whose_time_ends_before_it_is_used,
    watched.a_promotion_that_could_not_be_submitted,
    watched.move_what_the_device_has_alone,
    watched.draw_what_is_left_while_blocks_are_moved,
    watched.share_what_is_being_moved,
    watched.a_move_that_fails,
    watched.a_move_that_could_not_be_submitted,
    watched.reset_and_close_while_blocks_are_moved,
    watched.retract_behind_a_step_that_still_writes,
    watched.retract_behind_two_demotions,
    watched.a_retraction_that_could_not_be_submitted,
    watched.cancel_during_a_retraction,
    watched.a_retraction_that_fails,
)


def sanitized(
    program: Program, monkeypatch: pytest.MonkeyPatch, seed: int | None
) -> tuple[list[str], Failure | None]:
    """What the sanitizer says to one run, and how the run failed if it did. `seed` None: the default
    schedule."""
    sanitizer = Sanitizer()
    monkeypatch.setattr(races, "BlockPool", lambda num_slots, name: BlockPool(num_slots, name, sanitizer))

    def to_the_end(sequencer: Sequencer) -> None:
        try:
            program(sequencer)
        finally:  # what was asked for before it failed still happens
            sequencer.run_all()

    _, failure = run_on(
        Sequencer(rng=None if seed is None else random.Random(seed), observer=sanitizer), to_the_end
    )
    return [str(report) for report in sanitizer.reports], failure


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_sanitizer_is_silent_about(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (None, *range(SEEDS)):
        said, failure = sanitized(program, monkeypatch, seed)
        assert not said, f"the sanitizer reports, with seed {seed}:\n" + "\n".join(said)
        assert failure is None, f"with seed {seed}: {failure}"
