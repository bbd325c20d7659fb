"""Prompt lookup finds the longest run that was seen before, in bounded memory and time, and never a text of another scope."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.speculation import ngram
from penstock.speculation.ngram import LENGTHS, NgramProposer, SharedTexts, TextIndex
from penstock.speculation.propose import NOTHING, POINT_MASS


def expected(history: Sequence[int], k: int) -> tuple[int, ...]:
    """By definition: the longest of LENGTHS, and of those the latest place; a repetition goes on."""
    for length in LENGTHS:
        run = list(history[len(history) - length :])
        for place in range(len(history) - 1, length - 1, -1):
            if len(run) == length and list(history[place - length : place]) == run:
                text = list(history)
                for n in range(k):
                    text.append(text[place + n])
                return tuple(text[len(history) :])
    return ()


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(0, 3), max_size=60), cuts=st.lists(st.integers(1, 5), min_size=1, max_size=60), k=st.integers(1, 6))
def test_the_longest_run_that_was_seen_before_is_continued(tokens: list[int], cuts: list[int], k: int) -> None:
    """However the text grows: by one token or by several."""
    proposer, size = NgramProposer(), 0
    for cut in cuts:
        size = min(size + cut, len(tokens))
        assert proposer.propose(tokens[:size], k).tokens == expected(tokens[:size], k)


def test_a_single_token_in_common_is_no_match() -> None:
    assert NgramProposer().propose([1, 2, 3, 1], 4) == NOTHING


def test_a_proposal_is_a_point_mass_of_at_most_as_many_tokens_as_asked_for() -> None:
    proposer = NgramProposer()
    found = proposer.propose([1, 2, 3, 4, 5, 1, 2], 2)
    assert found.tokens == (3, 4) and found.q is POINT_MASS
    assert proposer.propose([1, 2, 3, 4, 5, 1, 2], 0) == NOTHING


def test_a_repetition_goes_on_beyond_its_end() -> None:
    assert NgramProposer().propose([7, 8, 9, 7, 8, 9, 7, 8], 7).tokens == (9, 7, 8, 9, 7, 8, 9)


def test_each_token_costs_a_fixed_number_of_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the length of the text before it."""
    counted: list[int] = []
    whole = TextIndex.add

    def add(self: TextIndex, number: int, text: Sequence[int], start: int, end: int) -> None:
        counted.append(end - start)
        whole(self, number, text, start, end)

    monkeypatch.setattr(ngram.TextIndex, "add", add)
    proposer, text = NgramProposer(), []
    for n in range(500):
        text.append(n % 7)
        proposer.propose(text, 4)
    assert sum(counted) == 500 and max(counted) == 1
    assert len(proposer._index) <= 500 * len(LENGTHS)


def test_an_index_is_bounded_and_forgets_the_oldest() -> None:
    proposer = NgramProposer(max_tokens=20)
    first = [100, 101, 102, 103]
    text = [*first, *range(60)]
    proposer.propose(text, 1)
    assert len(proposer._index) == 20 * len(LENGTHS) >= len(proposer._index._places)
    assert proposer.propose([*text, 100, 101], 1) == NOTHING, "it was forgotten"
    assert proposer.propose([*text, 100, 101, 55, 56], 1).tokens == (57,)


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(0, 3), max_size=60), cuts=st.lists(st.integers(1, 9), min_size=1, max_size=20), kept=st.integers(1, 8))
@example(tokens=[1, 2, 1, 2, 1, 2, 1, 2], cuts=[8], kept=1)  # a run that is forgotten at one place and seen again at another
def test_a_bounded_index_finds_the_latest_place_of_a_run_that_it_has_not_forgotten(tokens: list[int], cuts: list[int], kept: int) -> None:
    index, size = TextIndex(kept * len(LENGTHS)), 0
    entered: list[tuple[tuple[int, ...], int]] = []  # run and the place behind it, oldest first
    for cut in cuts:
        first, size = size, min(size + cut, len(tokens))
        index.add(0, tokens, first, size)
        entered += [(tuple(tokens[at - n : at]), at) for at in range(max(first, LENGTHS[-1]), size) for n in LENGTHS if n <= at]
        entered = entered[-kept * len(LENGTHS) :]
        for end in range(len(tokens) + 1):
            runs = [tuple(tokens[end - n : end]) for n in LENGTHS if n <= end]
            wanted = next((max(at for one, at in entered if one == run) for run in runs if run in dict(entered)), None)
            found = index.longest(tokens[:end])
            assert (None if found is None else found.place) == wanted


def test_a_run_with_the_same_hash_is_not_taken_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "hash", lambda run: 0, raising=False)
    assert NgramProposer().propose([1, 2, 3, 4, 5, 6], 2) == NOTHING


# ------------------------------------------------------------------------------------------------------------------- shared

TEXT = list(range(10, 40))


def test_a_recent_request_of_the_same_scope_is_continued() -> None:
    shared = SharedTexts()
    NgramProposer("a", shared).end(TEXT)
    assert NgramProposer("a", shared).propose([99, 20, 21, 22], 3).tokens == (23, 24, 25)


def test_nothing_crosses_scopes() -> None:
    """Holds for what is proposed, and for whether anything is."""
    shared = SharedTexts()
    NgramProposer("tenant-a", shared).end(TEXT)
    for other in ("tenant-b", "", "tenant-", "tenant-a "):
        assert NgramProposer(other, shared).propose([20, 21, 22], 3) == NOTHING
    NgramProposer("tenant-b", shared).end([20, 21, 22, 77, 78])
    assert NgramProposer("tenant-b", shared).propose([5, 20, 21, 22], 3).tokens == (77, 78)
    assert NgramProposer("tenant-a", shared).propose([5, 20, 21, 22], 3).tokens == (23, 24, 25)


@settings(max_examples=100, deadline=None)
@given(
    texts=st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 3), min_size=2, max_size=20)), max_size=12),
    asked=st.lists(st.integers(0, 3), min_size=2, max_size=8),
)
def test_a_scope_proposes_as_if_it_were_alone(texts: list[tuple[str, list[int]]], asked: list[int]) -> None:
    together, alone = SharedTexts(40), SharedTexts(40)
    for scope, text in texts:
        together.add(scope, text)
        if scope == "a":
            alone.add(scope, text)
    assert NgramProposer("a", together).propose(asked, 4) == NgramProposer("a", alone).propose(asked, 4)


def test_the_longer_match_wins_and_of_equals_the_requests_own() -> None:
    shared = SharedTexts()
    shared.add("a", [1, 2, 3, 4, 50, 51])
    proposer = NgramProposer("a", shared)
    assert proposer.propose([3, 4, 60, 1, 2, 3, 4], 2).tokens == (50, 51), "four tokens in common, against two"
    assert NgramProposer("a", shared).propose([1, 2, 3, 4, 70, 1, 2, 3, 4], 2).tokens == (70, 1)


def test_a_scope_keeps_a_bounded_number_of_tokens_and_the_newest() -> None:
    shared = SharedTexts(tokens_per_scope=50)
    for n in range(20):
        shared.add("a", [n * 100 + i for i in range(20)])
    assert shared.num_tokens <= 50
    assert NgramProposer("a", shared).propose([1901, 1902], 1).tokens == (1903,)
    assert NgramProposer("a", shared).propose([101, 102], 1) == NOTHING
    index = shared._scopes["a"].index
    assert len(index) <= 50 * len(LENGTHS) and len(index._places) <= len(index)
    shared.add("a", range(10_000, 10_200))
    assert shared.num_tokens == 50
    assert NgramProposer("a", shared).propose([10_197, 10_198], 1).tokens == (10_199,)


def test_a_bounded_number_of_scopes_is_kept_and_one_can_be_forgotten() -> None:
    shared = SharedTexts(max_scopes=2)
    for scope in "abc":
        shared.add(scope, TEXT)
    assert [bool(NgramProposer(scope, shared).propose([20, 21], 1).tokens) for scope in "abc"] == [False, True, True]
    shared.add("d", TEXT)
    assert [bool(NgramProposer(scope, shared).propose([20, 21], 1).tokens) for scope in "bcd"] == [False, True, True], "b came before c"
    shared.longest("c", [20, 21])
    shared.add("e", TEXT)
    assert NgramProposer("c", shared).propose([20, 21], 1).tokens == (22,), "whoever asks is used, as whoever adds is"
    shared.add("b", TEXT)
    shared.forget("b")
    assert NgramProposer("b", shared).propose([20, 21], 1) == NOTHING
