"""What the passes of a step share. A step is a list of passes, in the order of their ops; each packs its
inputs, and puts its ops on the lane with the accesses that they make.

    target   the model's forward, eager or replayed       `target.py`
    state    states of requests that begin, kept states   below, `states.py`, `state_drafts.py`
    paged    layers that stream KV from host memory       `paging.py`, with `scoring.py`
    sample   sampling, masks, prompt logprobs             `sampling.py`
    draft    drafts for the next step                     `ahead.py`

A model with other layers adds a pass: a class with the methods of `Pass`, and one line in `build._executor`.
Its state is by row, as the sampler's; scheduler and cache do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from penstock.contract import MAX_LOGPROBS, Access, Chunk, Mode, StepPlan
from penstock.engine.execution.arriving import Arriving
from penstock.engine.execution.attention import Attention
from penstock.engine.execution.batch import Drafted, Packed, Shape
from penstock.engine.execution.forward import Flow
from penstock.engine.execution.masks import StepMasks
from penstock.engine.execution.replays import PROMPTS_BESIDE, Replays
from penstock.engine.execution.running_step import Outputs
from penstock.engine.execution.sampler import NUM_PARAMS, SamplePlan, packed_width
from penstock.engine.execution.state_drafts import INPUTS_OF_STATES, StateDrafts
from penstock.engine.execution.states import StateSlots
from penstock.errors import InvariantBroken
from penstock.lanes.lane import Lane, Op, Replay, Ticket
from penstock.observe import ByteGuard

# Names, in declared accesses, of device memory that steps use besides KV. The sampler's slots are rows; its
# "layers" are the last token and the state of penalties.
SAMPLER, LAST, ROW_STATE = "sampler rows", (0, 1), (0, 2)
INPUTS = "replay inputs"
GRAPHS = "memory of replays"
STATES = "states"  # by row; their layers are the recurrent ones


def only(arena: str, mode: Mode) -> Access:
    """An access to memory of one slot and one layer."""
    return Access(arena, (0,), (0, 1), mode)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Sizes that hold for the executor's life."""

    max_batch: int
    prefill_chunk: int  # prompt tokens per step
    max_table: int  # slots of the longest sequence
    block_tokens: int
    padding_slot: int
    arena: str  # name of the KV arena in declared accesses
    max_tokens: int = 0  # of one sequence
    max_paged: int = 0  # host blocks that the sequences of a step may have
    max_parts: int = 0  # parts of a context that a step may score
    max_drafts: int = 0  # drafts of all requests of a step
    max_request_drafts: int = 0  # drafts of one request
    num_ahead: int = 0  # drafts per request that the device makes after a step
    num_layers: int = 0  # layers of a block: those of the target, then those of the draft model
    target_layers: int = 0  # of these, those of the target
    state_layers: int = 0

    @property
    def max_rows(self) -> int:
        return self.max_batch + self.max_drafts

    @property
    def staging_ints(self) -> int:
        most_rows = self.max_rows + PROMPTS_BESIDE  # with the padding of a captured step
        most = Shape(self.prefill_chunk + self.max_rows, most_rows, most_rows)
        per_row = NUM_PARAMS + 2 * self.max_request_drafts
        drafted = Drafted.num_ints(most_rows, most_rows) if self.max_drafts else 0
        nexts = most.num_tokens if self.num_ahead else 0
        beyond = 1 + self.num_ahead // self.block_tokens  # table entries for drafts
        tables = beyond + self.max_batch * (self.max_table + beyond)
        return most.fixed_ints + tables + most_rows * per_row + drafted + nexts + self.max_paged

    @property
    def result_ints(self) -> int:
        drafts = (self.max_batch + 1) * (1 + self.num_ahead) if self.num_ahead else 0
        return (self.max_rows + self.prefill_chunk) * packed_width(MAX_LOGPROBS) + self.max_parts + 1 + drafts


@dataclass(slots=True)
class StepOps:
    """Ops of one step on the lane, in order: if one fails, the rest are skipped with its error."""

    lane: Lane
    arriving: Arriving  # KV that the step waits for
    last: Ticket | None = None

    def submit(self, op: Op, label: str, accesses: Sequence[Access] = ()) -> None:
        self.last = self.lane.submit(op, accesses, label=label, after=self.last)

    def replay(self, replay: Replay, accesses: Sequence[Access]) -> None:
        self.last = self.lane.replay(replay, accesses, after=self.last)

    def wait_layers(self, end: int) -> None:
        """Later ops of the lane wait for KV of layers below `end`."""
        if self.arriving.wait_on(self.lane, end):
            self.submit(self.arriving.check, "arrived")

    def newest(self) -> Ticket:
        assert self.last is not None, "nothing of the step was submitted"
        return self.last


@dataclass(slots=True)
class Step:
    """A step while it is launched: its inputs on the host, and what its ops hand on to later ones. Only they
    keep it alive, or sampling that waits for masks."""

    plan: StepPlan
    ops: StepOps
    limits: StepLimits
    bucket: Shape | None  # of a replay; None: op by op
    packed: Packed
    staged: tuple[Tensor, Access]  # the host buffer of the packed ints, and an op's access to it
    written: Access  # of an op that writes results
    outputs: Outputs
    flow: Flow
    masks: StepMasks | None = None
    params_at: int = 0  # of the sampling's parameters in the packed ints
    nexts_at: int = 0  # of the next tokens of a step with prompts, if a draft model needs them
    sampling: SamplePlan = field(init=False)
    ints: Tensor = field(init=False)  # the packed ints on the device

    def kv(self, layers: tuple[int, int]) -> tuple[Access, Access]:
        """Reads and writes of the step's tokens."""
        arena, packed = self.limits.arena, self.packed
        read = Access(arena, packed.read_slots, layers, Mode.READ)
        return read, Access(arena, packed.write_slots, layers, Mode.WRITE)

    def states(self, layers: tuple[int, int]) -> tuple[Access, ...]:
        """Reads and writes of the states of the step's requests."""
        if layers[0] == layers[1]:
            return ()
        written = Access(STATES, self.packed.row_of, layers, Mode.WRITE)
        return (written, only(INPUTS_OF_STATES, Mode.WRITE)) if self.packed.shape.has_drafts else (written,)

    def entries(self) -> Sequence[Chunk]:
        """The chunk of each sample; in a replay every chunk has one."""
        chunks: Sequence[Chunk] = self.plan.chunks
        if self.bucket is None:
            chunks = [c for c in chunks if c.num_logits]
        if self.packed.drafted is not None:
            chunks = [c for c in chunks for _ in range(max(1, c.num_logits))]
        return chunks


class Pass:
    """Part of every step. Methods that a pass does not need do nothing."""

    is_late = False  # True: its ops come with the sampling, which may have to wait for masks
    attentions: Sequence[Attention] = ()  # to be warmed

    def begin(self, plan: StepPlan, ops: StepOps) -> None:
        """Ops before the step's own, as for requests that take a row."""

    def pack(self, step: Step) -> None:
        """Append inputs to the staged ints. Host work only: the step before may still be running."""

    def submit(self, step: Step) -> None:
        """The pass's ops, with their accesses and waits."""

    def capture(self, bucket: Shape) -> None:
        """Capture what replays of this shape need."""

    def forget(self, left: Sequence[tuple[str, range]]) -> None:
        """Scored requests that left, and the ranges of their key bounds that are kept."""


class PoisonPass(Pass):
    """Poisons blocks that a step is the first to write: no request may use their old content."""

    def __init__(self, guard: ByteGuard, limits: StepLimits) -> None:
        self._guard, self._limits = guard, limits

    def begin(self, plan: StepPlan, ops: StepOps) -> None:
        arena, block = self._limits.arena, self._limits.block_tokens
        slots = [
            int(slot)
            for chunk in plan.chunks
            if chunk.writes
            for slot in chunk.slots[-(-chunk.start // block) - chunk.num_elsewhere :]
        ]
        if slots:
            access = Access(arena, slots, (0, self._limits.num_layers), Mode.WRITE)
            ops.submit(lambda: self._guard.poison(arena, slots), "poison", [access])


class StatePass(Pass):
    """What happens to states besides the layers: a request begins with a clear one or with a kept one, and
    after a chunk that ends at a boundary its state is kept."""

    def __init__(self, rows: StateSlots, kept: StateSlots | None) -> None:
        """`kept`: in host memory; None: no state is kept."""
        self._rows, self._kept = rows, kept

    def begin(self, plan: StepPlan, ops: StepOps) -> None:
        rows = [chunk.row for chunk in plan.chunks if chunk.start == 0]
        if rows:
            ops.submit(lambda: self._rows.clear(rows), "clear states", [self._rows.access(rows, Mode.WRITE)])
        begins = [(one.state.begins, one.row) for one in plan.chunks if one.state is not None]
        self._copy(ops, "begin states", (self._kept, self._rows), begins)

    def submit(self, step: Step) -> None:
        if not step.packed.shape.has_drafts:
            self.keep(step)

    def keep(self, step: Step) -> None:
        """After the step has advanced all states."""
        ends = [(one.row, one.state.ends) for one in step.plan.chunks if one.state is not None]
        self._copy(step.ops, "keep states", (self._rows, self._kept), ends)

    def _copy(
        self,
        ops: StepOps,
        label: str,
        memory: tuple[StateSlots | None, StateSlots | None],
        moves: Sequence[tuple[int | None, int | None]],
    ) -> None:
        """Of each move, a slot of the first memory to a slot of the second; None: nothing moves."""
        source, dest = memory
        pairs = [(a, b) for a, b in moves if a is not None and b is not None]
        if not pairs:
            return
        if source is None or dest is None:
            raise InvariantBroken("a step moves a state, but none are kept")
        read, written = ([pair[end] for pair in pairs] for end in (0, 1))
        accesses = source.access(read, Mode.READ), dest.access(written, Mode.WRITE)
        ops.submit(partial(source.copy_to, dest, pairs), label, accesses)


class SettlePass(Pass):
    """After a step with drafts: states are advanced by the accepted tokens, and those at boundaries kept."""

    is_late = True

    def __init__(self, states: StatePass, drafts: StateDrafts, replays: Replays) -> None:
        self._states, self._drafts, self._replays = states, drafts, replays

    def submit(self, step: Step) -> None:
        if not step.packed.shape.has_drafts:
            return
        rows, layers = step.packed.row_of, (0, step.limits.state_layers)
        accesses = (
            Access(STATES, rows, layers, Mode.WRITE),
            Access(SAMPLER, rows, LAST, Mode.READ),
            only(INPUTS_OF_STATES, Mode.READ),
            only(INPUTS, Mode.READ),
        )
        if step.bucket is not None and self._drafts.is_cuda:
            step.ops.replay(self._captured(step.bucket), (*accesses, only(GRAPHS, Mode.WRITE)))
        else:
            step.ops.submit(lambda: self._drafts.settle(step.flow.bound_inputs()), "settle states", accesses)
        self._states.keep(step)

    def capture(self, bucket: Shape) -> None:
        if bucket.has_drafts:
            self._captured(bucket)

    def _captured(self, bucket: Shape) -> Replay:
        def run(flow: Flow, tensors: tuple[Tensor, ...]) -> None:
            self._drafts.settle(flow.bound_inputs())

        return self._replays.get_pass(bucket, "settle", lambda size: (), run).replay
