"""Prompt lookup finds the longest run that was seen before, in bounded memory and time, and never a text of
another scope."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.speculation import ngram
from penstock.speculation.ngram import LEAST, MOST, NgramProposer, SharedTexts


def expected(history: Sequence[int], k: int) -> tuple[int, ...]:
    """By definition: the longest run, and of those the latest place; a repetition goes on."""
    for length in range(MOST, LEAST - 1, -1):
        run = list(history[len(history) - length :])
        for place in range(len(history) - 1, length - 1, -1):
            if len(run) == length and list(history[place - length : place]) == run:
                text = list(history)
                for n in range(k):
                    text.append(text[place + n])
                return tuple(text[len(history) :])
    return ()


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), max_size=60),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=60),
    k=st.integers(1, 6),
)
def test_the_longest_run_that_was_seen_before_is_continued(
    tokens: list[int], cuts: list[int], k: int
) -> None:
    """However the text grows: by one token or by several."""
    proposer, size = NgramProposer(), 0
    for cut in cuts:
        size = min(size + cut, len(tokens))
        assert proposer.propose(tokens[:size], k) == expected(tokens[:size], k)


def test_a_text_that_grows_beyond_its_buffer_is_still_searched_from_its_beginning() -> None:
    proposer, text = NgramProposer(), [1, 2, 3, *range(10, 500)]
    assert proposer.propose(text[:8], 1) == ()
    assert proposer.propose([*text, 1, 2], 1) == (3,)


def test_no_more_than_the_last_tokens_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "OWN_TOKENS", 20)
    proposer = NgramProposer()
    text = [100, 101, 102, 103, *range(60)]
    assert proposer.propose([*text, 100, 101], 1) == (), "too long ago"
    assert proposer.propose([*text, 100, 101, 55, 56], 1) == (57,)


def test_a_text_is_taken_in_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the length of the text before it, a step takes in the tokens that are new."""
    taken: list[int] = []

    class Counted(list[int]):
        def __getitem__(self, key: object) -> object:  # type: ignore[override]
            found = super().__getitem__(key)  # type: ignore[index]
            taken.append(len(found))  # type: ignore[arg-type]
            return found

    proposer, text = NgramProposer(), Counted()
    for n in range(500):
        text.append(n % 7)
        proposer.propose(text, 4)
    assert sum(taken) == 500 and max(taken) == 1


# ----------------------------------------------------------------------------------------------------- shared

TEXT = list(range(10, 40))


def test_nothing_crosses_scopes() -> None:
    """Holds for what is proposed, and for whether anything is."""
    shared = SharedTexts()
    NgramProposer(b"tenant-a", shared).end(TEXT)
    for other in (b"tenant-b", b"", b"tenant-", b"tenant-a "):
        assert NgramProposer(other, shared).propose([20, 21, 22], 3) == ()
    NgramProposer(b"tenant-b", shared).end([20, 21, 22, 77, 78])
    assert NgramProposer(b"tenant-b", shared).propose([5, 20, 21, 22], 3) == (77, 78)
    assert NgramProposer(b"tenant-a", shared).propose([5, 20, 21, 22], 3) == (23, 24, 25)


@settings(max_examples=100, deadline=None)
@given(
    texts=st.lists(
        st.tuples(st.sampled_from([b"a", b"b"]), st.lists(st.integers(0, 3), min_size=2, max_size=20)),
        max_size=12,
    ),
    asked=st.lists(st.integers(0, 3), min_size=2, max_size=8),
)
def test_a_scope_proposes_as_if_it_were_alone(texts: list[tuple[bytes, list[int]]], asked: list[int]) -> None:
    together, alone = SharedTexts(40), SharedTexts(40)
    for scope, text in texts:
        together.add(scope, text)
        if scope == b"a":
            alone.add(scope, text)
    assert NgramProposer(b"a", together).propose(asked, 4) == NgramProposer(b"a", alone).propose(asked, 4)


def test_the_longer_match_wins_and_of_equals_the_requests_own() -> None:
    shared = SharedTexts()
    shared.add(b"a", [1, 2, 3, 4, 50, 51])
    proposer = NgramProposer(b"a", shared)
    assert proposer.propose([3, 4, 60, 1, 2, 3, 4], 2) == (50, 51), "four tokens in common, against two"
    assert NgramProposer(b"a", shared).propose([1, 2, 3, 4, 70, 1, 2, 3, 4], 2) == (70, 1)


def test_runs_are_compared_up_to_their_most_and_no_further() -> None:
    run = list(range(100, 104 + MOST))
    assert NgramProposer().propose([*run, 1, *run[-MOST:], 2, *run], 1) == (2,), (
        "as long as can be, and later"
    )
    assert NgramProposer().propose([*run[-MOST:], 1, *run[1 - MOST :], 2, *run], 1) == (1,), (
        "longer by one token"
    )
    shared = SharedTexts()
    shared.add(b"a", [*run, 3])
    assert NgramProposer(b"a", shared).propose([*run[-MOST:], 1, *run], 1) == (1,), "as long, and its own"


def num_kept(shared: SharedTexts, scope: bytes = b"a") -> int:
    return int((shared.of(scope) >= 0).sum())


def test_a_scope_keeps_a_bounded_number_of_tokens_and_the_newest() -> None:
    shared = SharedTexts(tokens_per_scope=50)
    for n in range(20):
        shared.add(b"a", [n * 100 + i for i in range(20)])
    assert num_kept(shared) <= 50
    assert NgramProposer(b"a", shared).propose([1901, 1902], 1) == (1903,)
    assert NgramProposer(b"a", shared).propose([101, 102], 1) == ()
    assert len(shared.of(b"a")) <= 51
    shared.add(b"a", list(range(10_000, 10_200)))
    assert num_kept(shared) == 50
    assert NgramProposer(b"a", shared).propose([10_197, 10_198], 1) == (10_199,)


def test_a_bounded_number_of_scopes_is_kept() -> None:
    shared = SharedTexts(max_scopes=2)
    for scope in (b"a", b"b", b"c"):
        shared.add(scope, TEXT)
    assert [bool(NgramProposer(scope, shared).propose([20, 21], 1)) for scope in (b"a", b"b", b"c")] == [
        False,
        True,
        True,
    ]
    shared.add(b"d", TEXT)
    assert [bool(NgramProposer(scope, shared).propose([20, 21], 1)) for scope in (b"b", b"c", b"d")] == [
        False,
        True,
        True,
    ], "b came before c"
    shared.of(b"c")
    shared.add(b"e", TEXT)
    assert NgramProposer(b"c", shared).propose([20, 21], 1) == (22,), (
        "whoever asks is used, as whoever adds is"
    )


def test_of_a_long_request_the_end_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "OWN_TOKENS", 20)
    shared = SharedTexts()
    NgramProposer(b"a", shared).end(list(range(60)))
    assert num_kept(shared) == 20
    assert NgramProposer(b"a", shared).propose([57, 58], 1) == (59,)


def test_nothing_is_proposed_across_the_end_of_a_text() -> None:
    shared = SharedTexts()
    shared.add(b"a", [1, 2, 3, 4])
    shared.add(b"a", [5, 6, 7, 8])
    assert NgramProposer(b"a", shared).propose([9, 2, 3], 5) == (4,)
    assert NgramProposer(b"a", shared).propose([9, 3, 4], 5) == (), "nothing followed it"
    assert NgramProposer(b"a", shared).propose([3, 4, 5, 6], 2) == (7, 8), "two tokens in common, not four"
    assert int(np.max(shared.of(b"a"))) == 8


def test_where_the_latest_text_ends_with_the_run_an_earlier_one_is_continued() -> None:
    shared = SharedTexts()
    for text in ([1, 2, 3, 4, 9], [7, 2, 3, 4]):
        shared.add(b"mine", text)
    assert NgramProposer(b"mine", shared).propose([5, 3, 4], 2) == (9,)
