"""Scores of context parts for the current queries of a scored request. Owns summaries of each request's keys
on the device, and the interface of scorers. The scheduler chooses the parts.

A step that scores runs eagerly. Its layers pass their queries here, and the streamed pieces of KV their keys:

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

# Bounds are loose, so scores are divided by this before the softmax of votes. Of the values 1 to 16, 2 finds
# nearly as much of SmolLM2's attention as choosing by the attention itself.
LOOSENESS = 2.0
_SUMS = "sums of keys"  # name in declared accesses; a slot is a row of the engine
_KEPT = "kept sums of keys"  # here a slot is a part of the kept store


class PartKeys(Protocol):
    """A scorer's summary of one request's keys."""

    def sum_up(self, layer: int, part: int, keys: Tensor) -> None:
        """Add keys [parts, tokens, kv_heads, head_dim] to the parts from number `part` on."""

    def add_scores(self, layer: int, q: Tensor, scores: Tensor) -> None:
        """Add this layer's scores of the first parts, for queries [heads, head_dim], to `scores`, which are
        zero before layer 0."""

    def values(self, num_parts: int) -> Tensor:
        """View of the summaries of the first `num_parts` parts, of equal size each."""


class Recency:
    """`lru`: later parts score higher. Reads no keys."""

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
    """`qk`: the least and greatest value of each key dimension, per part, layer and KV head. No key of a part
    scores higher than the corner of that box that the signs of the query select.

    Each head divides one vote among the parts, as its attention would if every part were one key at that
    corner. Votes of all heads and layers are added up: a head that looks far back counts as much as the
    others, and one that looks everywhere decides little.
    """

    def __init__(self, num_parts: int, arena: Tensor) -> None:
        """`arena`: gives the shape and type of the keys."""
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
    """A chunk of a step that asks for scores or for summaries of blocks."""

    request_id: str
    row: int
    scoring: Scoring
    rows: tuple[int, int]  # [first, end) of the step's tokens
    asking: int  # the token whose queries are scored: the last one that is no draft
    table_at: int  # offset of its host slots in the step's tables; -1: none
    out: Tensor | None  # host memory for its scores, if wanted


class ContextKeys:
    """Key summaries of all scored requests. Only ops of the compute lane use them."""

    def __init__(
        self, name: str, attention: Attention, lane: Lane, uploads: Uploads, num_kept: int = 0
    ) -> None:
        """`num_kept`: parts that host memory keeps for the next turns of ended requests."""
        self.lse_nats = attention.lse_nats
        self._make = SCORERS[name]
        self.arena = attention.arena
        self.uploads = uploads
        self._lane = lane
        self._known: dict[str, PartKeys] = {}
        self._width = self._make(1, self.arena).values(1).numel()  # values per part
        self._kept = torch.empty(
            num_kept * self._width, dtype=self.arena.dtype, pin_memory=self.arena.is_cuda
        )

    def forget(self, left: Sequence[tuple[str, range]]) -> None:
        """These requests have left. After all ops launched for them, their summaries are copied to the kept
        place, if they have one."""

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
        """The kept values at `place`, by layer and part in the shape of `like`."""
        kept = self._kept[place.start * self._width : place.stop * self._width]
        return kept.view(like.shape[0], len(place), *like.shape[2:])

    def for_step(
        self, chunks: Sequence[Chunk], packed: Packed, room: Callable[[str, Scoring], Tensor]
    ) -> StepScores | None:
        """`room`: allocates host memory for a request's scores. None: no chunk asks for any."""
        if not any(chunk.scoring is not None for chunk in chunks):
            return None
        streams = {paged.rows: paged.table_at for paged in packed.paged}
        asked, end = [], 0
        for chunk in chunks:
            first, end = end, end + chunk.num_tokens
            if (scoring := chunk.scoring) is not None:
                table_at = streams.get((first, end), -1) if scoring.paged else -1
                out = room(chunk.request_id, scoring) if scoring.num_parts else None
                asking = first if chunk.num_logits > 1 else end - 1
                own = chunk.request_id, chunk.row, scoring, (first, end), asking
                asked.append(_AskedScores(*own, table_at, out))
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
    """The scoring of one step: layers and pieces pass in their queries and keys."""

    def __init__(self, known: ContextKeys, asked: Sequence[_AskedScores]) -> None:
        self._known = known
        self._asked = asked
        self._slots: list[Tensor] = []  # on the device, by asking chunk
        self._scores: list[Tensor] = []  # followed by the recall
        # log-sum-exp of a layer's scores over blocks on the device, if recall is wanted
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
        """`lse` [tokens, heads], before the pieces of a layer are added."""
        self._resident = lse.clone() if any(one.scoring.recall for one in self._asked) else None

    def add_layer(self, layer: int, q: Tensor, lse: Tensor | None = None) -> None:
        """In an op of `layer`, after its writes and its streamed pieces. `q` [tokens, heads, head_dim]: its
        queries. `lse`: over all keys read."""
        if layer == 0:
            self._slots = [self._known.uploads.send(one.scoring.slots) for one in self._asked]
            self._scores = [torch.zeros(one.scoring.num_parts + 1, device=q.device) for one in self._asked]
        for one, slots, scores in zip(self._asked, self._slots, self._scores, strict=True):
            keys = self._known.keys_of(one)
            if len(slots):
                _sum_up(keys, layer, one.scoring, one.scoring.first, self._known.arena[slots, layer, 0])
            if one.scoring.num_parts:
                keys.add_scores(layer, q[one.asking], scores[:-1])
            if one.scoring.recall and lse is not None and self._resident is not None:
                more = self._resident[one.asking] - lse[one.asking]
                shares = torch.exp(more * self._known.lse_nats)
                scores[-1] += shares.mean() / self._known.num_layers

    def piece(self, layer: int, piece: PagedChunk, landed: Callable[[], Tensor]) -> Op | None:
        """The op that summarises `piece`; None if no chunk asks for it."""
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
        """After the last layer: copy scores to the host."""
        for one, scores in zip(self._asked, self._scores, strict=True):
            if one.out is not None:
                move(one.out, scores.view(torch.int32))


def _sum_up(keys: PartKeys, layer: int, scoring: Scoring, first: int, blocks: Tensor) -> None:
    """Summarise blocks `first..` of the sequence. Parts at both ends may be incomplete: their other blocks
    are added in another step."""
    if first + len(blocks) > scoring.most_parts * scoring.part_blocks:
        raise InvariantBroken(
            f"{first + len(blocks)} blocks are summed up for a request of {scoring.most_parts} parts"
        )
    for part, start, end, num_parts in _parts(first, len(blocks), scoring.part_blocks):
        keys.sum_up(layer, part, blocks[start:end].reshape(num_parts, -1, *blocks.shape[2:]))


def _parts(first: int, num_blocks: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """An incomplete part, whole parts, and an incomplete part, each as (first part, first block, end block,
    number of parts)."""
    at = 0
    while at < num_blocks:
        left = num_blocks - at
        to_end = -(first + at) % size
        num = min(left, to_end) if to_end else left // size * size or left
        yield (first + at) // size, at, at + num, max(1, num // size)
        at += num
