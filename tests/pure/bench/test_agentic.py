"""Recorded conversations: what is read, which requests are replayed, and which tokens they are made of."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from penstock.bench.trace_files import Asking, is_agentic, read_conversations, reusable, select
from penstock.errors import ConfigError

EXCERPT = Path(__file__).resolve().parents[2] / "data" / "agentic-coding-excerpt.jsonl"
SIZE = 64


def line_of(name: str, requests: list, **other) -> str:
    return json.dumps({"id": name, "parent": None, "block_tokens": SIZE, "requests": requests} | other)


def growing(name: str, lengths: list[int], **other) -> str:
    """Each prompt has all blocks of the one before; a shorter one begins like it."""
    requests, before, fresh = [], 0, 1
    for number, length in enumerate(lengths):
        shared = min(before, length // SIZE)
        new = list(range(fresh, fresh + length // SIZE - shared))
        fresh += len(new)
        requests.append([10.0 * number, length, 50, 3.0, shared, new])
        before = length // SIZE
    return line_of(name, requests, **other)


@pytest.fixture
def write(tmp_path):
    def write(*lines: str) -> Path:
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


# ----------------------------------------------------------------------------------------------------- reader


def test_prompts_are_the_first_blocks_of_the_one_before_and_then_new_ones(write):
    requests = [[0.0, 200, 9, 0, 0, [1, 2, 3]], [5.5, 260, 0, 2.5, 2, [7, 8]], [9, 130, 4, 1, 1, [9]]]
    (conversation,) = read_conversations(write(line_of("a", requests, parent="p"), ""))
    assert (conversation.id, conversation.family, conversation.block_tokens) == ("a", "p", 64)
    assert [one.blocks.tolist() for one in conversation.requests] == [[1, 2, 3], [1, 2, 7, 8], [1, 9]]
    assert [one[:4] for one in conversation.requests] == [
        (0.0, 200, 9, 0),
        (5.5, 260, 0, 2.5),
        (9, 130, 4, 1),
    ]


def test_a_packed_file_is_read_like_a_plain_one(tmp_path):
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(EXCERPT.read_bytes()))
    plain, unpacked = read_conversations(EXCERPT), read_conversations(packed)
    assert [one.id for one in plain] == [one.id for one in unpacked] and len(plain) == 11
    assert is_agentic(packed) and is_agentic(EXCERPT)


GOOD = [0.0, 128, 5, 0.0, 0, [1, 2]]
BAD = [
    ("{", "not JSON"),
    ("[]", "expected an object"),
    (line_of("", [GOOD]), "id must be text"),
    (line_of("a", [GOOD], parent=3), "parent text or null"),
    (line_of("a", [GOOD], block_tokens=0), "block_tokens must be a positive"),
    (line_of("a", [GOOD, [0.0, 128, 5, 0.0, 0]]), "request 2: expected a list of 6"),
    (line_of("a", [[float("nan"), *GOOD[1:]]]), "request 1: t and think seconds"),
    (line_of("a", [[0.0, 128.0, 5, 0.0, 0, [1, 2]]]), "whole numbers"),
    (line_of("a", [[0.0, 0, 5, 0.0, 0, []]]), "at least one token"),
    (line_of("a", [[0.0, 128, 5, 0.0, 0, [1, 1 << 63]]]), "ids of new blocks"),
    (line_of("a", [[0.0, 128, 5, 0.0, 0, 7]]), "ids of new blocks"),
    (
        line_of("a", [GOOD, [1.0, 192, 5, 0.0, 3, []]]),
        "request 2: it shares 3 blocks with the request before, which has 2",
    ),
    (line_of("a", [[0.0, 128, 5, 0.0, 0, [1]]]), "request 1: 1 blocks for 128 tokens; one stands for 64"),
]


def test_a_bad_line_is_refused_by_its_number(write):
    for line, said in BAD:
        with pytest.raises(ConfigError, match=rf"trace\.jsonl, line 3.*{said}"):
            read_conversations(write(line_of("ok", [GOOD]), "", line))


def test_a_trace_that_cannot_be_read_is_refused(tmp_path, write):
    torn = tmp_path / "torn.gz"
    torn.write_bytes(gzip.compress(EXCERPT.read_bytes())[:-2000])
    text = tmp_path / "text"
    text.write_bytes(b"\xff\xfe")
    for path in (tmp_path / "none", torn, text):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_conversations(path)
    assert not is_agentic(tmp_path / "none") and not is_agentic(text)
    with pytest.raises(ConfigError, match="two conversations with the same id"):
        read_conversations(write(line_of("a", [GOOD]), line_of("a", [GOOD])))


# ----------------------------------------------------------------------------------------------------- select


def test_requests_that_are_too_long_are_left_out_at_the_start_and_end_a_conversation_later(write):
    trace = write(
        growing("long first", [900, 950, 200, 300, 400, 800, 300]),
        growing("too few", [900, 200, 300, 900, 300]),
        growing("short", [200, 300, 400, 450, 500, 510]),
        growing("at the limit", [512, 512, 512, 513]),
    )
    chosen = select(read_conversations(trace), 3, 512, 4)
    assert {one.id: [request.num_tokens for request in one.requests] for one in chosen} == {
        "long first": [200, 300, 400],
        "short": [200, 300, 400, 450],
        "at the limit": [512, 512, 512],
    }
    with pytest.raises(ConfigError, match="no conversation with 3 requests of at most 100 tokens"):
        select(read_conversations(trace), 3, 100, 4)


def test_more_users_than_conversations_come_again_and_share_nothing(write):
    conversations = read_conversations(
        write(growing("a", [200, 300, 400]), growing("b", [200, 300, 400], parent="a"))
    )
    chosen = select(conversations, 5, 1000, 16)
    assert [one.id for one in chosen] == ["a", "b", "a#2", "b#2", "a#3"]
    assert [one.family for one in chosen] == ["a", "a", "a#2", "a#2", "a#3"]
    users = Asking("trace", subagents="shared").users_of(chosen, 50_000)
    prompts = [user.asks[0].prompt for user in users]
    assert (prompts[0][:192] == prompts[1][:192]).all() and (prompts[0] != prompts[2]).mean() > 0.99


# ----------------------------------------------------------------------------------------------------- tokens


def test_prompts_share_the_tokens_of_the_blocks_that_they_share_and_no_others(write):
    requests = [[0.0, 200, 9, 0, 0, [1, 2, 3]], [5, 264, 500, 2.0, 2, [7, 8]]]
    (user,) = Asking("trace", think=0.5).users_of(read_conversations(write(line_of("a", requests))), 50_000)
    one, two = (ask.prompt for ask in user.asks)
    assert (len(one), len(two), one.dtype) == (200, 264, np.int32)
    assert (one[:128] == two[:128]).all()
    assert (one[128:] != two[128:200]).mean() > 0.9
    assert [ask.max_tokens for ask in user.asks] == [9, 200]
    assert [ask.think_s for ask in user.asks] == [0.0, 1.0]
    (hurried,) = Asking("trace", think=0.5, max_think_s=0.25).users_of(
        read_conversations(write(line_of("a", requests))), 50_000
    )
    assert [ask.think_s for ask in hurried.asks] == [0.0, 0.25]
    assert one.min() >= 0 and one.max() < 50_000 and len(np.unique(one)) > 190, (
        "ids are spread over the vocabulary"
    )


def test_a_sub_agent_shares_its_parents_blocks_only_where_that_is_asked_for():
    chosen = select(read_conversations(EXCERPT), 10, 65536, 16)
    first = {one.id: 64 * (one.requests[0].num_tokens // 64) for one in chosen}
    both = "trace_0010.2", "trace_0010.3"
    length = min(first[name] for name in both)
    for subagents, shared in (("apart", 0), ("shared", length // 2)):
        prompts = {
            user.conversation: user.asks[0].prompt
            for user in Asking("x", subagents=subagents).users_of(chosen, 150_000)
        }
        one, two = (prompts[name][:length] for name in both)
        assert (one == two).sum() >= shared if shared else (one == two).mean() < 0.01


def test_scaled_prompts_share_the_same_blocks():
    chosen = select(read_conversations(EXCERPT), 8, 65536, 16)
    recorded = [one for conversation in chosen for one in conversation.requests]
    ids = [
        (conversation.id, block)
        for conversation in chosen
        for one in conversation.requests
        for block in one.blocks
    ]
    for scale in (1, 4, 64):
        asking = Asking("x", scale=scale)
        asks = [ask for user in asking.users_of(chosen, 50_000) for ask in user.asks]
        assert [len(ask.prompt) for ask in asks] == [
            one.num_tokens // 64 * (64 // scale) + one.num_tokens % 64 // scale for one in recorded
        ]
        assert asking.longest(chosen) == max(len(ask.prompt) + ask.max_tokens for ask in asks)
        shared = len(ids) - len(set(ids))
        assert sum(reusable([ask.prompt for ask in asks], 64 // scale)) == shared * 64 // scale
    with pytest.raises(ConfigError, match="--scale 3 does not divide"):
        Asking("x", scale=3).users_of(chosen, 512)
