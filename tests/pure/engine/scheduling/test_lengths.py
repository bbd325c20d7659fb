"""What requests are expected to write, by what others have written."""

from __future__ import annotations

from typing import Any

from penstock.contract import Adapter, FinishReason, Request, SamplingParams
from penstock.engine.scheduling.lengths import LEAST, LOST_QUANTILE, WrittenLengths

CONTEXT = 100_000


def a_request(route: str = "chat", adapter: Adapter | None = None, **sampling: Any) -> Request:
    params = SamplingParams(**{"max_tokens": CONTEXT, **sampling})
    return Request("r", [1], params, route=route, adapter=adapter)


def after(*lengths: int, finish: FinishReason = FinishReason.STOP, **asked: Any) -> WrittenLengths:
    written = WrittenLengths()
    for num_tokens in lengths:
        written.saw(a_request(**asked), num_tokens, finish)
    return written


def test_before_anything_was_seen_most_answers_are_expected_to_be_short() -> None:
    assert WrittenLengths().expected(a_request(), 0) == 384
    assert WrittenLengths(LOST_QUANTILE).expected(a_request(), 0) == 512, "where it would be computed again"


def test_seven_in_ten_of_the_last_answers_were_no_longer_than_what_is_expected() -> None:
    assert after(*range(1000, 1256)).expected(a_request(), 0) == 1179


def test_of_a_request_that_nothing_ends_all_is_expected() -> None:
    written = after(*[50] * 300)
    assert written.expected(a_request(ignore_eos=True), 0) == CONTEXT
    assert written.expected(a_request(ignore_eos=True, stop=("END",)), 0) == LEAST
    assert written.expected(a_request(ignore_eos=True, stop_token_ids=frozenset({3})), 0) == LEAST


def test_routes_and_adapters_are_told_apart() -> None:
    poet = Adapter("poet", "digest")
    written = after(*[2000] * 300)
    assert written.expected(a_request(), 0) == 2000
    assert written.expected(a_request("messages"), 0) == written.expected(a_request(adapter=poet), 0) == 384
    written.saw(a_request(adapter=poet), 9, FinishReason.STOP)
    assert written.by_route() == {"chat": 2000, "poet:chat": 384}


def test_the_routes_used_longest_ago_are_forgotten() -> None:
    written = WrittenLengths()
    for number in range(1000):
        written.saw(a_request(f"route {number}"), 100, FinishReason.STOP)
    assert len(written.by_route()) == 64


def test_a_request_that_has_written_much_is_expected_to_be_among_the_longer_ones() -> None:
    written = after(*[100] * 240, *[3000] * 16)
    assert [written.expected(a_request(), num) for num in (0, 50, 101, 2999)] == [100, 114, 3000, 3063]


def test_a_request_that_has_written_more_than_all_others_is_expected_to_write_as_much_again() -> None:
    written = after(*[100] * 256)
    assert [written.expected(a_request(), num) for num in (100, 400, 3000)] == [200, 800, 6000]
    assert written.expected(a_request(max_tokens=700), 400) == 700


def test_each_expectation_is_above_what_is_written_until_all_is() -> None:
    written, request = after(*range(1, 200)), a_request(max_tokens=900)
    assert all(written.expected(request, num) > num for num in range(900))


def test_what_was_cut_off_counts_only_where_it_is_longer_than_expected() -> None:
    short = after(*[16] * 256, finish=FinishReason.LENGTH, max_tokens=16)
    assert short.expected(a_request(), 0) == 384, "how long they would have been is not known"
    assert after(*[4000] * 256, finish=FinishReason.LENGTH, max_tokens=4000).expected(a_request(), 0) == 4000


def test_a_hang_up_ends_an_answer_and_an_error_says_nothing() -> None:
    assert after(*[300] * 256, finish=FinishReason.CANCELLED).expected(a_request(), 0) == 300
    failed, silent = after(*[300] * 256, finish=FinishReason.ERROR), after(*[0] * 256)
    for nothing in (failed, silent, after(*[300] * 256, ignore_eos=True)):
        assert nothing.expected(a_request(), 0) == 384
