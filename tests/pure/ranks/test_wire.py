"""What ranks say to each other arrives as it was said."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import Config, EngineConfig, KvConfig, LoraConfig, OffloadConfig, RanksConfig
from penstock.contract import Adapter, Chunk, Echo, Scoring, StateMove, StepPlan
from penstock.errors import InvariantBroken, RankLost
from penstock.ranks.wire import (
    CopyOrder,
    MessageKind,
    RankWire,
    config_fields,
    config_of,
    step_of,
    step_words,
)


def any_slot(move: StateMove) -> bool:
    return move != StateMove()


ids = st.integers(-8, 2**31 - 1)
slots = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(lambda found: np.array(found, np.int32))
counts = st.integers(0, 2**31 - 1)
echoes = st.builds(Echo, st.lists(ids, max_size=4).map(tuple), st.integers(0, 20))
moves = st.builds(StateMove, st.none() | counts, st.none() | counts).filter(any_slot)
digests = st.just("") | st.sampled_from([f"{number:064x}" for number in (1, 2, 1 << 255)])
SCORED = Scoring(1, 1, 0, np.zeros(0, np.int32), False, 1)
chunks = st.builds(
    Chunk,
    request_id=st.just(""),
    row=counts,
    start=counts,
    tokens=st.lists(ids, min_size=1, max_size=5).map(tuple),
    slots=slots,
    writes=st.booleans(),
    num_logits=counts,
    echo=st.none() | echoes,
    paged=st.none() | slots,
    num_unsure=counts,
    next_token=counts,
    num_left_out=counts,
    room=counts,
    adapter=st.none() | digests.map(lambda digest: Adapter("", digest)),
    scoring=st.none(),
    state=st.none() | moves,
)
plans = st.builds(
    StepPlan,
    number=counts,
    chunks=st.lists(chunks, max_size=5).map(tuple),
    num_decodes=counts,
    starts=st.just(()),
    after=st.just(()),
    loads=st.just(()),
    num_ahead=counts,
)


@settings(max_examples=50)
@given(plans)
def test_a_step_arrives_as_it_was_planned(plan: StepPlan) -> None:
    named = tuple(chunk._replace(request_id=f"row {chunk.row}") for chunk in plan.chunks)
    assert step_of(step_words(plan)) == replace(plan, chunks=named)


def test_a_step_that_other_ranks_cannot_run_is_not_announced() -> None:
    chunk = Chunk("a", 0, 0, (1,), np.zeros(1, np.int32), True, 1, scoring=SCORED)
    with pytest.raises(InvariantBroken, match="scoring"):
        step_words(StepPlan(1, (chunk,), 0))


def test_a_copy_arrives_as_it_was_ordered() -> None:
    order = CopyOrder(3, 1, (2, 5), np.array([7, 8], np.int64), np.array([1, 0], np.int64))
    found = CopyOrder.of(order.words())
    assert found[:3] == order[:3]
    assert found.sources.tolist() == [7, 8] and found.dests.tolist() == [1, 0]


def test_a_config_arrives_as_it_was_given() -> None:
    config = Config(
        kv=KvConfig(block_tokens=32, resident_tokens=1024),
        engine=EngineConfig(max_model_len=4096, capture=False),
        offload=OffloadConfig(ssd_dir="/somewhere", ssd_gib=2.5),
        lora=LoraConfig((("name", "/path"),)),
        ranks=RanksConfig(4, 2.0),
    )
    assert config_of(json.loads(json.dumps(config_fields(config)))) == config


@pytest.fixture
def wires() -> Iterator[tuple[RankWire, RankWire]]:
    ends = tuple(RankWire(one, 0.2) for one in socket.socketpair())
    yield ends[0], ends[1]
    for one in ends:
        one.close()


def test_messages_arrive_in_order_with_their_kind(wires: tuple[RankWire, RankWire]) -> None:
    ours, theirs = wires
    ours.send(MessageKind.STEP, np.arange(100_000, dtype=np.int32)[:50])
    ours.send(MessageKind.BEGIN, {"sizes": [1, 2]})
    first, second = theirs.receive(), theirs.receive()
    assert first.kind is MessageKind.STEP and first.words.tolist() == list(range(50))
    assert second.kind is MessageKind.BEGIN and second.fields == {"sizes": [1, 2]}


def test_a_silent_end_and_a_closed_one_are_told_apart(wires: tuple[RankWire, RankWire]) -> None:
    ours, theirs = wires
    with pytest.raises(TimeoutError):
        ours.receive()
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive()


def test_what_is_no_message_ends_the_connection() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(RankLost, match="no rank of this engine"):
            RankWire(ours, 0.2).receive()
    ours.close()
