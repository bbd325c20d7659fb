"""KV that streams past a step: every piece is what lies in host memory, whoever is late, and what failed is
not read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.contract import Access, Mode
from penstock.engine.execution.batch import PagedChunk
from penstock.engine.execution.paging import NUM_BUFFERS, PagedReads
from penstock.lanes.cpu import CpuLane

LAYERS, TOKENS, HEADS, WIDTH, SLOTS = 2, 4, 1, 2, 32


class Streaming:
    """`PagedReads` over two real lanes, with an attention that copies blocks whose values say where they are
    from."""

    def __init__(self, piece_tokens: int = 2 * TOKENS) -> None:
        self.compute, self.fetching = CpuLane("compute"), CpuLane("paged")
        self.tables = torch.arange(100) % SLOTS  # slots, as they were uploaded
        shape = SLOTS, LAYERS, 2, TOKENS, HEADS, WIDTH
        host: Any = SimpleNamespace(
            name="host", tensor=torch.arange(int(np.prod(shape)), dtype=torch.float32).view(shape)
        )
        self.host = host
        self.error: Exception | None = None
        attention: Any = SimpleNamespace(
            arena=torch.zeros(1, LAYERS, 2, TOKENS, HEADS, WIDTH), fetch=self._fetch
        )
        self.reads = PagedReads(host, attention, self.fetching, piece_tokens)
        self.found: list[torch.Tensor] = []
        self.behind_reads: list[Any] = []

    def _fetch(
        self, layer: int, host: torch.Tensor, tables: torch.Tensor, table_at: int, buffer: torch.Tensor
    ) -> None:
        if self.error is not None:
            raise self.error
        slots = tables[table_at : table_at + buffer.shape[1] // TOKENS]
        buffer.copy_(host[slots, layer].transpose(0, 1).flatten(1, 2))

    def stream(self, layer: int, piece: PagedChunk) -> Any:
        """As a step does it: fetched, read, and free again behind that."""
        fetched = self.reads.fetch(layer, piece, lambda: self.tables, self.compute)
        ticket = self.compute.submit(
            lambda: self.found.append(fetched.landed().clone()), [fetched.access], label="attention"
        )
        self.behind_reads.append(self.compute.record())
        fetched.read_until(self.behind_reads[-1])
        return ticket

    def wait_read(self) -> None:
        self.compute.record().wait_passed(60.0)

    def watch_waits(self) -> list[tuple[str, Any]]:
        """What lanes are told to wait for from now on, and what they are given to do, in order."""
        seen: list[tuple[str, Any]] = []
        for lane in (self.fetching, self.compute):
            wait, submit = lane.wait, lane.submit
            lane.wait = lambda fence, lane=lane, wait=wait: (
                seen.append((f"{lane.name} waits", fence)),
                wait(fence),
            )[1]  # type: ignore

            def noted(op: Any, *rest: Any, lane: CpuLane = lane, submit: Any = submit, **more: Any) -> Any:
                seen.append((f"{lane.name} does", None))
                return submit(op, *rest, **more)

            lane.submit = noted  # type: ignore[assignment]
        return seen

    def expected(self, layer: int, piece: PagedChunk) -> torch.Tensor:
        return self.host.tensor[piece.slots.tolist(), layer].transpose(0, 1).flatten(1, 2)

    def close(self) -> None:
        self.compute.close(30.0)
        self.fetching.close(30.0)


@pytest.fixture
def streaming() -> Iterator[Streaming]:
    made = Streaming()
    yield made
    made.close()


def chunks() -> tuple[PagedChunk, ...]:
    """Their slots stand in the step's tables, one behind the other."""
    return PagedChunk((0, 3), np.arange(7, 12, dtype=np.int32), 7), PagedChunk(
        (3, 4), np.arange(20, 22, dtype=np.int32), 20
    )


def test_pieces_are_all_blocks_of_all_chunks_in_order_with_their_places(streaming: Streaming) -> None:
    found = [(piece.rows, piece.slots.tolist(), piece.table_at) for piece in streaming.reads.pieces(chunks())]
    assert found == [((0, 3), [7, 8], 7), ((0, 3), [9, 10], 9), ((0, 3), [11], 11), ((3, 4), [20, 21], 20)]
    small = Streaming(piece_tokens=1)
    assert [piece.slots.tolist() for piece in small.reads.pieces(chunks()[1:])] == [[20], [21]], (
        "a block at least"
    )
    small.close()


@pytest.mark.parametrize("late", ["compute", "paged"])
def test_whoever_is_late_every_piece_is_read_as_it_is_in_host_memory(streaming: Streaming, late: str) -> None:
    gate, lane = threading.Event(), {"compute": streaming.compute, "paged": streaming.fetching}[late]
    lane.submit(lambda: gate.wait(60.0) and None, label="late")
    wanted = []
    for layer in range(LAYERS):
        for piece in streaming.reads.pieces(chunks()):
            streaming.stream(layer, piece)
            wanted.append(streaming.expected(layer, piece))
    gate.set()
    streaming.wait_read()
    assert len(wanted) > 2 * NUM_BUFFERS and all(
        torch.equal(a, b) for a, b in zip(streaming.found, wanted, strict=True)
    )


def test_a_buffer_is_filled_behind_whoever_reads_it_and_read_behind_the_copy_that_fills_it(
    streaming: Streaming,
) -> None:
    """Whatever the lanes happen to do: each is told what to wait for before it is told what to do."""
    (piece, *_) = streaming.reads.pieces(chunks())
    seen = streaming.watch_waits()
    for number in range(2 * NUM_BUFFERS + 1):
        seen.clear()
        streaming.stream(0, piece)
        steps, fences = zip(*seen, strict=True)
        own = ["paged waits"] if number >= NUM_BUFFERS else []
        assert list(steps) == [*own, "paged does", "compute waits", "compute does"]
        if own:
            assert fences[0] is streaming.behind_reads[number - NUM_BUFFERS], (
                "the read of what is in the same buffer"
            )
        copied = fences[len(own) + 1]
        streaming.wait_read()
        assert (
            copied.lane == "paged" and copied.passed() and copied.number == streaming.fetching.record().number
        ), "the copy just begun"


def test_a_piece_whose_copy_failed_is_not_read_and_the_next_one_is(streaming: Streaming) -> None:
    first, second, *_ = streaming.reads.pieces(chunks())
    streaming.stream(0, first)
    streaming.wait_read()
    streaming.error = OSError("no")
    failed = streaming.stream(0, second)
    streaming.wait_read()
    assert failed.error() is streaming.error and len(streaming.found) == 1
    streaming.error = None
    assert streaming.stream(0, second).error() is None
    streaming.wait_read()
    assert torch.equal(streaming.found[1], streaming.expected(0, second))


def test_what_is_read_and_written_is_declared(streaming: Streaming) -> None:
    declared: list[tuple[Access, ...]] = []
    submit = streaming.fetching.submit

    def noted(op: Any, accesses: Any = (), **rest: Any) -> Any:
        declared.append(tuple(accesses))
        return submit(op, accesses, **rest)

    streaming.fetching.submit = noted  # type: ignore[method-assign]
    turns = []
    for piece in streaming.reads.pieces(chunks()):
        fetched = streaming.reads.fetch(1, piece, lambda: streaming.tables, streaming.compute)
        ((host, buffer),) = declared
        assert host.mode is Mode.READ and host.layers == (1, 2) and list(host.slots) == piece.slots.tolist()
        assert buffer.mode is Mode.WRITE and fetched.access == buffer._replace(mode=Mode.READ)
        turns.append(tuple(buffer.slots))
        declared.clear()
    assert len(set(turns)) == NUM_BUFFERS and turns[0] == turns[NUM_BUFFERS]
