"""What listeners are told, and what is counted with it."""

from __future__ import annotations

import pytest

from penstock.contract import FinishReason, Sampled
from penstock.engine.scheduling.events import Events, SchedulerCounts
from tests.pure.engine.scheduling.staged import life_of

STOP = 99


@pytest.mark.parametrize(
    ("sampled", "kept", "num_accepted", "finish"),
    [
        ((1, 2, 3, 4), (1, 2, 3, 4), 3, None),
        ((1,), (1,), 0, None),
        ((1, STOP, 3, 4), (1,), 2, FinishReason.STOP),
        ((1, 2, 3, STOP), (1, 2, 3), 3, FinishReason.STOP),
        ((STOP, 2, 3, 4), (), 1, FinishReason.STOP),
        ((STOP,), (), 0, FinishReason.STOP),
        ((1, 2, 3, 4, 5), (1, 2, 3, 4), 4, FinishReason.LENGTH),
        ((1, 2, 3, 4, 5, 6), (1, 2, 3, 4), 4, FinishReason.LENGTH),
    ],
)
def test_accepted_are_the_drafts_that_an_answer_has(
    sampled: tuple[int, ...], kept: tuple[int, ...], num_accepted: int, finish: FinishReason | None
) -> None:
    """The token that ends it may be one of them; those behind it were chosen by the model, too, and nobody
    gets them."""
    counts = SchedulerCounts()
    life = life_of([7], 4 if finish is FinishReason.LENGTH else 9)
    event = Events((STOP,), counts).of_tokens(life, Sampled("r", sampled), num_drafts=5)
    assert (event.tokens, event.drafted, event.accepted, event.finish) == (kept, 5, num_accepted, finish)
    assert (
        counts.accepted_by_place == [1] * num_accepted + [0] * (5 - num_accepted)
        and counts.drafted_by_place == [1] * 5
    )


@pytest.mark.parametrize("finish", [FinishReason.CANCELLED, FinishReason.ERROR])
def test_a_request_that_ends_before_its_first_token_has_no_source_and_counts_nowhere(
    finish: FinishReason,
) -> None:
    counts = SchedulerCounts()
    event = Events((STOP,), counts).of_end(life_of([7, 8]), finish)
    assert (event.finish, event.source, event.prompt_logprobs) == (finish, None, None)
    assert not any(counts.prompt_tokens.values())
