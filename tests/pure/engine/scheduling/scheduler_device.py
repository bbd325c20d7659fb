"""A device made of Python: what lies in every slot of every tier, and a model that is a function of the whole
token sequence.

The KV of a token is a node in the tree of all token sequences: it stands for the token and for everything
before it. So a chunk that reads a wrong block, or one that was overwritten or has not come yet, reads a wrong
node; and what a request must produce is known in advance, however it was batched, shared, promoted, retracted
or resumed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.contract import (
    TOKEN_IN_FLIGHT,
    Access,
    Chunk,
    Echo,
    FinishReason,
    Mode,
    Request,
    Sampled,
    SamplingParams,
    Start,
    StepFailure,
    StepPlan,
    StepResult,
    TokenLogprob,
    TokenScores,
)
from penstock.kv.blocks.key import Scope, prefix_keys
from tests.support.stepped import ByteArena, Cell, SteppedArena, SteppedLanes, TagArena

BLOCK = 4
LAYERS = 6  # enough for a promotion to come in two groups
VOCAB = 8
EOS = 7
_NODES = struct.Struct(f"<{BLOCK}q")
SCOPE = Scope(weights=b"w", kv_dtype="float32", layout=b"l", block_tokens=BLOCK, position_scheme="none")


def next_token(tokens: Sequence[int]) -> int:
    """The model."""
    return zlib.crc32(bytes(tokens)) % VOCAB


def generate(prompt: Sequence[int], sampling: SamplingParams) -> tuple[list[int], FinishReason, int | None]:
    """What a request produces when it is alone and nothing goes wrong."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < sampling.max_tokens:
        token = next_token(tokens)
        if token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos):
            return tokens[len(prompt) :], FinishReason.STOP, token
        tokens.append(token)
    return tokens[len(prompt) :], FinishReason.LENGTH, None


def prompt_logprobs(prompt: Sequence[int], start: int, end: int) -> tuple[TokenLogprob, ...]:
    """How likely the tokens at positions `start` to `end` were; the numbers only have to be told apart."""
    return tuple(TokenLogprob(prompt[at], -float(at), 1, ()) for at in range(start, min(end, len(prompt))))


def scores_of(echo: Echo, start: int) -> TokenScores:
    """The same as a step gives them, behind position `start`."""
    num = len(echo.tokens)
    logprobs = -np.arange(start + 1, start + 1 + num, dtype=np.float32)
    none = np.empty((num, 0), np.int32)
    return TokenScores(
        np.array(echo.tokens, np.int32), logprobs, np.ones(num, np.int32), none, none.view(np.float32)
    )


@dataclass
class Row:
    """What the device knows of the request that runs on a row."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    broken: bool = False  # a step of it failed: what it computes is garbage
    state: int = 0  # of recurrent layers: the node of the last token that ran through it


class Device:
    """Runs steps in the order it is given them. What lies in a block of one tier is, for every layer, a node
    per token."""

    def __init__(self, num_slots: int, num_host: int = 1, host_bytes: bool = False) -> None:
        """`host_bytes`: host memory is to be seen as bytes, for stores behind it."""
        self._num_garbage = 0
        self.arena = TagArena("device", num_slots, LAYERS, self._garbage)
        cell = Cell(_NODES.size, lambda nodes: _NODES.pack(*nodes), _NODES.unpack, self._garbage)
        tags = TagArena("host", num_host, LAYERS, self._garbage)
        self.host: SteppedArena = ByteArena("host", num_host, LAYERS, cell) if host_bytes else tags
        self.lanes = SteppedLanes(self.arena, self.host)
        self.has_states = False  # some layers are recurrent
        # all that may run: a plan says of them what a real device has to know, and no more
        self.requests: dict[str, Request] = {}
        self._rows: dict[int, Row] = {}
        self.kept_states: dict[int, int] = {}  # by slot
        self._nodes: dict[tuple[int, int], int] = {}
        self._paths: dict[int, tuple[int, ...]] = {0: ()}
        self._right: dict[object, bytes] = {}  # contents whose key was checked

    def _garbage(self) -> tuple[int, ...]:
        self._num_garbage += BLOCK
        return tuple(range(-self._num_garbage, BLOCK - self._num_garbage))

    def run(self, plan: StepPlan) -> StepResult:
        for start in plan.starts:
            self._start(start)
        sampled: list[Sampled] = []
        scored: list[tuple[str, TokenScores]] = []
        for chunk in plan.chunks:
            row = self._rows[chunk.row]
            assert row.request.id == chunk.request_id, "the row belongs to another request"
            if row.broken:
                self._scribble(chunk)
                sampled.append(Sampled(chunk.request_id, (0,)))
                continue
            self._compute(chunk, row)
            self._advance(chunk, row)
            if chunk.echo is not None:
                scored.append((chunk.request_id, scores_of(chunk.echo, chunk.start)))
            if chunk.num_logits:
                sampled.append(self._sample(chunk, row))
        return StepResult(plan.number, tuple(sampled), tuple(scored))

    def fail(self, plan: StepPlan, error: Exception) -> StepResult:
        """The step fails half way: what it should have written is garbage, and its rows are lost."""
        for start in plan.starts:
            self._start(start)
        for chunk in plan.chunks:
            self._rows[chunk.row].broken = True
            if chunk.state is not None and chunk.state.ends is not None:
                self.kept_states[chunk.state.ends] = -1
            self._scribble(chunk)
        return StepResult(plan.number, (), error=StepFailure.of(error))

    def check_sealed(self, arena: SteppedArena, slot: int, key: bytes) -> None:
        """What a key promises is what lies in its slot, in every layer."""
        for cell in arena.read([slot], (0, LAYERS))[0]:
            if self._right.get(cell) == key:
                continue
            assert isinstance(cell, tuple)
            tokens = self._paths.get(cell[-1])
            assert tokens is not None, f"slot {slot} of {arena.name} has a key and holds garbage"
            right = tokens and prefix_keys(tokens, BLOCK, SCOPE.digest())[-1:] == (key,)
            assert right, f"slot {slot} of {arena.name} has the key of other tokens"
            ends = range(len(tokens) - BLOCK + 1, len(tokens) + 1)
            assert [self._paths.get(node) for node in cell] == [tokens[:end] for end in ends]
            self._right[cell] = key

    def _start(self, start: Start) -> None:
        request = self.requests[start.request_id]
        row = self._rows[start.row] = Row(request)
        assert start.sampling == request.sampling
        for token in (*request.prompt, *start.output):
            self._append(row, token)

    def _append(self, row: Row, token: int) -> None:
        parent = row.nodes[-1] if row.nodes else 0
        node = self._nodes.setdefault((parent, token), len(self._nodes) + 1)
        self._paths[node] = (*self._paths[parent], token)
        row.nodes.append(node)
        row.tokens.append(token)

    def _compute(self, chunk: Chunk, row: Row) -> None:
        for at, token in enumerate(chunk.tokens, chunk.start):
            assert token in (row.tokens[at], TOKEN_IN_FLIGHT)
        slots, paged = chunk.slots.tolist(), [] if chunk.paged is None else chunk.paged.tolist()
        self.lanes.touch(Access("device", slots, (0, LAYERS), Mode.READ), f"a step of {chunk.request_id}")
        self.lanes.touch(Access("host", paged, (0, LAYERS), Mode.READ), f"a step of {chunk.request_id}")
        if chunk.writes:
            self._write(chunk, row.nodes[chunk.start : chunk.kv_len])
        for block, cells in enumerate(
            [*self.host.read(paged, (0, LAYERS)), *(self.arena.cells[slot] for slot in slots)],
            chunk.num_left_out,
        ):
            wanted = tuple(row.nodes[block * BLOCK : min((block + 1) * BLOCK, chunk.kv_len)])
            for cell in cells:
                assert isinstance(cell, tuple)
                assert cell[: len(wanted)] == wanted, (
                    f"{chunk.request_id} reads wrong tokens in block {block}"
                )

    def _advance(self, chunk: Chunk, row: Row) -> None:
        """Its tokens run through the state of its row."""
        if chunk.start == 0:
            row.state = 0
        if chunk.state is not None and chunk.state.begins is not None:
            row.state = self.kept_states[chunk.state.begins]
        before = row.nodes[chunk.start - 1] if chunk.start else 0
        assert row.state == before or not self.has_states, f"{chunk.request_id} has the state of other tokens"
        row.state = row.nodes[chunk.kv_len - 1]
        if chunk.state is not None and chunk.state.ends is not None:
            self.kept_states[chunk.state.ends] = row.state

    def check_kept(self, slot: int, key: bytes) -> None:
        """What a key promises is the state in its slot."""
        tokens = self._paths.get(self.kept_states[slot])
        assert tokens and len(tokens) % BLOCK == 0, "a state is kept where no block ends"
        assert prefix_keys(tokens, BLOCK, SCOPE.digest())[-1] == key, "a state has the key of other tokens"

    def _write(self, chunk: Chunk, nodes: Sequence[int]) -> None:
        slots = chunk.slots.tolist()
        written = slots[chunk.start // BLOCK - chunk.num_elsewhere :]
        self.lanes.touch(Access("device", written, (0, LAYERS), Mode.WRITE), f"a step of {chunk.request_id}")
        for at, node in enumerate(nodes, chunk.start):
            cells = self.arena.cells[slots[at // BLOCK - chunk.num_elsewhere]]
            for layer, cell in enumerate(cells):
                assert isinstance(cell, tuple)
                cells[layer] = (*cell[: at % BLOCK], node, *cell[at % BLOCK + 1 :])

    def _sample(self, chunk: Chunk, row: Row) -> Sampled:
        assert chunk.kv_len == len(row.tokens)
        token = next_token(row.tokens)
        wanted = row.request.sampling.logprobs is not None
        self._append(row, token)
        return Sampled(chunk.request_id, (token,), (TokenLogprob(token, -1.0, 1, ()),) if wanted else None)

    def _scribble(self, chunk: Chunk) -> None:
        if chunk.writes:
            self._write(chunk, [node for _ in chunk.tokens for node in self._garbage()[:1]])
