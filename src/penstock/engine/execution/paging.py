"""The pass of layers whose KV is partly in host memory. Owns the few device buffers that it is streamed
through, one layer of one piece at a time, and their order: attention waits for the copy into a buffer, and
the next copy waits for that attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from penstock.contract import Access, Fence, Mode
from penstock.engine.execution.attention import Attention
from penstock.engine.execution.batch import PagedChunk
from penstock.engine.execution.forward import Forward
from penstock.engine.execution.passes import Pass, Step
from penstock.engine.execution.scoring import ContextKeys
from penstock.kv.memory import HostArena
from penstock.lanes.lane import Lane, Ticket

NUM_BUFFERS = 3  # one is read, one is being filled, and one is next: the lanes rarely wait for each other
_BUFFERS = "pieces of paged KV"  # their name in declared accesses


class PagedReads:
    """Fetches `piece_tokens` at a time."""

    def __init__(self, host: HostArena, attention: Attention, lane: Lane, piece_tokens: int) -> None:
        block_tokens = attention.arena.shape[3]
        self.lane = lane
        self._host = host
        self._attention = attention
        self._piece_blocks = max(1, piece_tokens // block_tokens)
        shape = NUM_BUFFERS, 2, self._piece_blocks * block_tokens, *attention.arena.shape[4:]
        self._buffers = attention.arena.new_empty(shape)
        self._free: list[Fence | None] = [None] * NUM_BUFFERS
        self._turn = 0

    def pieces(self, chunks: tuple[PagedChunk, ...]) -> Iterator[PagedChunk]:
        for rows, slots, table_at in chunks:
            for first in range(0, len(slots), self._piece_blocks):
                yield PagedChunk(rows, slots[first : first + self._piece_blocks], table_at + first)

    def fetch(self, layer: int, piece: PagedChunk, tables: Callable[[], Tensor], compute: Lane) -> Fetched:
        """Launch the copy of one layer of `piece`, and make `compute` wait for it."""
        self._turn = (self._turn + 1) % NUM_BUFFERS
        turn = self._turn
        buffer = self._buffers[turn, :, : len(piece.slots) * self._attention.arena.shape[3]]
        if (fence := self._free[turn]) is not None:
            self.lane.wait(fence)
        accesses = (
            Access(self._host.name, piece.slots, (layer, layer + 1), Mode.READ),
            Access(_BUFFERS, (turn,), (0, 1), Mode.WRITE),
        )

        def copy() -> None:
            self._attention.fetch(layer, self._host.tensor, tables(), piece.table_at, buffer)

        ticket = self.lane.submit(copy, accesses, label=f"fetch layer {layer}")
        compute.wait(self.lane.record())
        return Fetched(self._free, turn, buffer, ticket)


class Fetched(NamedTuple):
    """A buffer being filled."""

    free: list[Fence | None]  # by buffer: fence after which it may be filled again
    turn: int
    buffer: Tensor
    ticket: Ticket

    @property
    def access(self) -> Access:
        return Access(_BUFFERS, (self.turn,), (0, 1), Mode.READ)

    def landed(self) -> Tensor:
        """For ops after the copy's fence; raises the copy's error."""
        if (error := self.ticket.error()) is not None:
            raise error
        return self.buffer

    def read_until(self, fence: Fence) -> None:
        """The buffer may be filled again when `fence` has passed."""
        self.free[self.turn] = fence


class PagedPass(Pass):
    """Layers that attend to blocks on the device first, then to pieces that stream in from host memory; and
    the scores of contexts."""

    def __init__(self, reads: PagedReads, forward: Forward, scores: ContextKeys) -> None:
        self.reads, self.scores = reads, scores
        self._forward = forward
        self.lane = reads.lane

    def pack(self, step: Step) -> None:
        if step.bucket is None:
            step.flow.scores = self.scores.for_step(
                step.plan.chunks, step.packed, step.outputs.room_for_parts
            )

    def submit_layer(self, step: Step, layer: int) -> None:
        """In place of the target's own op."""
        forward, flow, ops = self._forward, step.flow, step.ops
        scores, layers = flow.scores, (layer, layer + 1)
        kv = step.kv(layers)
        ops.submit(partial(forward.attend_resident, flow, layer), f"layer {layer}", kv)
        for piece in self.reads.pieces(step.packed.paged):
            fetched = self.reads.fetch(layer, piece, lambda: flow.bound_inputs().tables, ops.lane)
            add_piece = partial(forward.add_piece, flow, piece.rows, fetched.landed)
            ops.submit(add_piece, f"piece of layer {layer}", [fetched.access])
            if scores is not None and (add := scores.piece(layer, piece, fetched.landed)) is not None:
                ops.submit(add, f"sums of layer {layer}", [fetched.access, *scores.accesses(layers)])
            fetched.read_until(ops.lane.record())
        # scoring reads keys in the arena
        scored = () if scores is None else (*scores.accesses(layers), kv[0])
        ops.submit(partial(forward.finish, flow, layer), f"rest of layer {layer}", scored)

    def submit(self, step: Step) -> None:
        """After the target's pass."""
        if (scores := step.flow.scores) is not None:
            step.ops.submit(scores.finish, "part scores", [step.written])

    def forget(self, left: Sequence[tuple[str, range]]) -> None:
        self.scores.forget(left)
