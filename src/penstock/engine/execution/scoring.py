"""What parts of a scored request's context are worth to its current queries. Owns what is known of each
request's keys, on the device, and the interface by which ways to score differ; which parts are chosen is the
scheduler's business.

A step that scores runs eagerly. Its layers leave their queries here, and so do the pieces of KV that stream
past them:

    last chunk of the prompt    every block is summed up: those on the device where they lie, those in host
                                memory as they stream in
    a decode step now and then  blocks that have been filled since are summed up, and all parts scored
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.contract import Access, Chunk, Mode, Scoring
from penstock.engine.execution.attention import Attention
from penstock.engine.execution.batch import Packed, PagedChunk
from penstock.engine.execution.staging import Uploads, move
from penstock.errors import InvariantBroken
from penstock.lanes.lane import Lane, Op

# Bounds are loose: what is certain by them is not. Of 1 to 16, by which scores are divided before votes are,
# 2 finds nearly as much of SmolLM2's attention as choosing by the attention itself.
LOOSENESS = 2.0
_SUMS = "sums of keys"  # as they are called in declared accesses: a slot is a row of the engine's
_KEPT = "kept sums of keys"  # here it is a part of the room for them


class PartKeys(Protocol):
    """One way to score: what it keeps of one request's keys."""

    def sum_up(self, layer: int, part: int, keys: Tensor) -> None:
        """Of the parts from number `part` on, some more keys: [parts, tokens, kv_heads, head_dim]."""

    def add_scores(self, layer: int, q: Tensor, scores: Tensor) -> None:
        """Add what this layer's queries [heads, head_dim] say about the first parts to their `scores`, which
        are zero before layer 0."""

    def values(self, num_parts: int) -> Tensor:
        """View of what is kept of the first so many parts: as many values of each."""


class Recency:
    """`lru`: the later a part, the better. Looks at nothing."""

    def __init__(self, num_parts: int, arena: Tensor) -> None:
        pass

    def sum_up(self, layer: int, part: int, keys: Tensor) -> None:
        pass

    def values(self, num_parts: int) -> Tensor:
        return torch.empty(0, num_parts)

    def add_scores(self, layer: int, q: Tensor, scores: Tensor) -> None:
        if layer == 0:
            torch.arange(1, len(scores) + 1, out=scores)


class KeyBounds:
    """`qk`: per part, layer and KV head the least and the greatest of each value of the keys. No key of a
    part scores higher with a query than the corner of that box which the query's signs choose.

    Each head divides one vote among the parts, as its attention would if every part had one key, and that in
    the corner. Votes of all heads and layers are added up: a head that looks far back is not lost among those
    that do not, and one that looks everywhere decides little.
    """

    def __init__(self, num_parts: int, arena: Tensor) -> None:
        """`arena`: of the shape and type of whose keys they are."""
        _, num_layers, _, _, num_kv_heads, head_dim = arena.shape
        self._bounds = arena.new_empty(num_layers, num_parts, num_kv_heads, 2, head_dim)
        self._bounds[..., 0, :] = float("inf")
        self._bounds[..., 1, :] = float("-inf")

    def sum_up(self, layer: int, part: int, keys: Tensor) -> None:
        low, high = self._bounds[layer, part : part + len(keys)].unbind(2)
        low.copy_(torch.minimum(low, keys.amin(1)))
        high.copy_(torch.maximum(high, keys.amax(1)))

    def values(self, num_parts: int) -> Tensor:
        return self._bounds[:, :num_parts]

    def add_scores(self, layer: int, q: Tensor, scores: Tensor) -> None:
        bounds = self._bounds[layer, : len(scores)]
        num_kv_heads, width = bounds.shape[1], 2 * bounds.shape[3]
        queries = torch.cat((q.clamp(max=0), q.clamp(min=0)), dim=-1).view(num_kv_heads, -1, width)
        best = torch.bmm(queries, bounds.flatten(2).permute(1, 2, 0)).float()  # [kv_heads, group, parts]
        scores += torch.softmax(best * (q.shape[-1] ** -0.5 / LOOSENESS), dim=-1).sum((0, 1))


SCORERS: Mapping[str, Callable[[int, Tensor], PartKeys]] = {"qk": KeyBounds, "lru": Recency}


class _AskedScores(NamedTuple):
    """A chunk of a step that asks for scores, or for blocks to be summed up."""

    request_id: str
    row: int
    scoring: Scoring
    rows: tuple[int, int]  # [first, end) of the step's tokens
    table_at: int  # where the slots of what streams in for it begin among the step's tables; -1: nothing does
    out: Tensor | None  # on the host, where its scores are wanted


class ContextKeys:
    """What is known of all scored requests. Ops of the compute lane alone touch it."""

    def __init__(
        self, name: str, attention: Attention, lane: Lane, uploads: Uploads, num_kept: int = 0
    ) -> None:
        """`num_kept`: parts for which there is room in host memory, for requests that go on where others have
        ended."""
        self.lse_nats = attention.lse_nats
        self._make = SCORERS[name]
        self.arena = attention.arena
        self.uploads = uploads
        self._lane = lane
        self._known: dict[str, PartKeys] = {}
        self._width = self._make(1, self.arena).values(1).numel()  # of a part
        self._kept = torch.empty(
            num_kept * self._width, dtype=self.arena.dtype, pin_memory=self.arena.is_cuda
        )

    def forget(self, left: Sequence[tuple[str, range]]) -> None:
        """These requests have left: behind all that was launched for them. What is known of their keys is
        kept in its place, if it has one."""

        def forget() -> None:
            for request_id, place in left:
                known = self._known.pop(request_id, None)
                if known is not None and place:
                    values = known.values(len(place))
                    self._in(place, values).copy_(values, non_blocking=True)

        places = [part for _, place in left for part in place]
        accesses = [Access(_KEPT, places, (0, self.num_layers), Mode.WRITE)] if places else []
        self._lane.submit(forget, label="forget scores", accesses=accesses)

    def _in(self, place: range, like: Tensor) -> Tensor:
        """What is kept there, by layer and part as `like` has it."""
        kept = self._kept[place.start * self._width : place.stop * self._width]
        return kept.view(like.shape[0], len(place), *like.shape[2:])

    def for_step(
        self, chunks: Sequence[Chunk], packed: Packed, room: Callable[[str, Scoring], Tensor]
    ) -> StepScores | None:
        """`room`: host memory for what a request asks for. None: no chunk asks."""
        if not any(chunk.scoring is not None for chunk in chunks):
            return None
        streams = {paged.rows: paged.table_at for paged in packed.paged}
        asked, end = [], 0
        for chunk in chunks:
            first, end = end, end + chunk.num_tokens
            if (scoring := chunk.scoring) is not None:
                table_at = streams.get((first, end), -1) if scoring.paged else -1
                out = room(chunk.request_id, scoring) if scoring.num_parts else None
                asked.append(_AskedScores(chunk.request_id, chunk.row, scoring, (first, end), table_at, out))
        return StepScores(self, asked)

    @property
    def num_layers(self) -> int:
        return self.arena.shape[1]

    def keys_of(self, asked: _AskedScores) -> PartKeys:
        known = self._known.get(asked.request_id)
        if known is None:
            known = self._known[asked.request_id] = self._make(asked.scoring.most_parts, self.arena)
            if (kept := asked.scoring.kept) is not None:
                values = known.values(kept.num_used)
                values.copy_(
                    self._in(range(kept.first, kept.end), values)[:, : kept.num_used], non_blocking=True
                )
        return known


class StepScores:
    """One step's share of it: layers and pieces leave here what they have."""

    def __init__(self, known: ContextKeys, asked: Sequence[_AskedScores]) -> None:
        self._known = known
        self._asked = asked
        self._slots: list[Tensor] = []  # of the device, by chunk that asks
        self._scores: list[Tensor] = []  # with the share behind them
        # log-sum-exp of a layer's scores over what is on the device, where recall is asked for
        self._resident: Tensor | None = None

    def accesses(self, layers: tuple[int, int]) -> list[Access]:
        accesses = [Access(_SUMS, (one.row,), layers, Mode.WRITE) for one in self._asked]
        kept = (
            [part for one in self._asked if one.scoring.kept for part in range(*one.scoring.kept[:2])]
            if layers[0] == 0
            else []
        )
        return [*accesses, Access(_KEPT, kept, (0, self._known.num_layers), Mode.READ)] if kept else accesses

    def note_resident(self, lse: Tensor) -> None:
        """[tokens, heads], before the pieces of a layer are added to it."""
        self._resident = lse.clone() if any(one.scoring.recall for one in self._asked) else None

    def add_layer(self, layer: int, q: Tensor, lse: Tensor | None = None) -> None:
        """In an op of `layer`, behind its writes and the pieces that stream past it. `q` [tokens, heads,
        head_dim] are its queries, `lse` is over all that was read."""
        if layer == 0:
            self._slots = [self._known.uploads.send(one.scoring.slots) for one in self._asked]
            self._scores = [torch.zeros(one.scoring.num_parts + 1, device=q.device) for one in self._asked]
        for one, slots, scores in zip(self._asked, self._slots, self._scores, strict=True):
            keys = self._known.keys_of(one)
            if len(slots):
                _sum_up(keys, layer, one.scoring, one.scoring.first, self._known.arena[slots, layer, 0])
            last = one.rows[1] - 1
            if one.scoring.num_parts:
                keys.add_scores(layer, q[last], scores[:-1])
            if one.scoring.recall and lse is not None and self._resident is not None:
                shares = torch.exp((self._resident[last] - lse[last]) * self._known.lse_nats)
                scores[-1] += shares.mean() / self._known.num_layers

    def piece(self, layer: int, piece: PagedChunk, landed: Callable[[], Tensor]) -> Op | None:
        """The op that sums up `piece`; None where nobody asks for it."""
        one = next((one for one in self._asked if one.rows == piece.rows and one.table_at >= 0), None)
        if one is None:
            return None
        asked = one

        def add() -> None:
            keys = landed()[0]
            blocks = keys.view(len(piece.slots), -1, *keys.shape[1:])
            _sum_up(self._known.keys_of(asked), layer, asked.scoring, piece.table_at - asked.table_at, blocks)

        return add

    def finish(self) -> None:
        """Behind the last layer: scores go to the host."""
        for one, scores in zip(self._asked, self._scores, strict=True):
            if one.out is not None:
                move(one.out, scores.view(torch.int32))


def _sum_up(keys: PartKeys, layer: int, scoring: Scoring, first: int, blocks: Tensor) -> None:
    """Blocks `first..` of the sequence, of which parts at both ends may be incomplete: the rest of them comes
    at another time."""
    if first + len(blocks) > scoring.most_parts * scoring.part_blocks:
        raise InvariantBroken(
            f"{first + len(blocks)} blocks are summed up for a request of {scoring.most_parts} parts"
        )
    for part, start, end, num_parts in _parts(first, len(blocks), scoring.part_blocks):
        keys.sum_up(layer, part, blocks[start:end].reshape(num_parts, -1, *blocks.shape[2:]))


def _parts(first: int, num_blocks: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """A part that is cut, whole ones, and another that is cut: number of the first part, blocks from and to,
    number of parts."""
    at = 0
    while at < num_blocks:
        left = num_blocks - at
        to_end = -(first + at) % size
        num = min(left, to_end) if to_end else left // size * size or left
        yield (first + at) // size, at, at + num, max(1, num // size)
        at += num
