"""Experts that are in host memory, and on the device as far as its slots go. Owns the slots' tensors, the
copies into them, and the order of copies and products.

    layer        compute lane   attention, router, choice
    choice       compute lane   how many tokens each expert has, to the host
    (launcher)                  waits for it; decides which experts come, and which make room
    copy         copy lane      into slots, behind the products that read their earlier experts
    experts      compute lane   products, behind the copies of these experts

The launcher is a thread of its own (`lanes.launched`), so the engine thread never waits for a choice. If a
layer hits more experts than there are slots, the last two come several times, in waves. While a layer's
products run, experts that the next layer is likely to want are copied. A wrong guess costs a copy; products
only read slots whose expert was chosen.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.contract import Access, Fence, Mode
from penstock.engine.execution.batch import Shape
from penstock.engine.execution.forward import Flow, Forward, LayerOp, Recorder
from penstock.engine.execution.recorded import RecordingOps, RoutingCounts
from penstock.engine.execution.staging import Uploads, move
from penstock.errors import InvariantBroken
from penstock.experts.order import Numbers, is_bulk
from penstock.experts.slots import NONE, POOL, ExpertSlots, Move, Wave
from penstock.figures import ExpertFigures
from penstock.kv.memory import PinnedTensors
from penstock.lanes.lane import Lane, Op, Replay, Ticket
from penstock.models.decoder import Decoder, DecoderLayer
from penstock.models.experts import RoutedLayer
from penstock.models.layers import OpsAround
from penstock.models.model import Experts, LayerOps, RoutedTokens

CHOICES = "expert choices"  # their name in declared accesses; a slot for each layer
IN_HOST = "experts in host memory"
_WHOLE = (0, 1)  # slots have no layers
_MOST_CAPTURED = 32  # tokens of a captured step: its pieces keep what each layer hands on
_GUESSED_SHARE = 4  # at most a part of all slots is filled by guesses at a time


def choice_access(row: int, mode: Mode) -> Access:
    return Access(CHOICES, (row,), _WHOLE, mode)


def routed_layers(model: Decoder) -> list[RoutedLayer]:
    """Those with experts, in order."""
    return [one for one in model.layers if isinstance(one, RoutedLayer) and one.experts is not None]


def experts_of(layer: RoutedLayer) -> Experts:
    assert layer.experts is not None
    return layer.experts


class Pending(NamedTuple):
    """The input of a layer's experts and the choice of them, in place of what they return."""

    ops: LayerOps
    x: Tensor
    experts: Experts
    chosen: RoutedTokens
    shared: Tensor | None
    guess: RoutedTokens | None  # of the next layer with experts
    terms: Tensor | None = None  # what experts returned so far


class PooledOps(OpsAround):
    """Stops at the choice: `routed` returns a `Pending`."""

    def __init__(self, ops: LayerOps, guesser: LayerOps, following: Experts | None) -> None:
        """`guesser` chooses from `following`, the next layer's router as it is applied here; None: nothing
        is guessed."""
        super().__init__(ops)
        self._guesser, self._following = guesser, following

    def routed(self, x: Tensor, experts: Experts, shared: Tensor | None = None) -> Pending:
        chosen, following = self.ops.choose(x, experts), self._following
        guess = None
        if following is not None and not is_bulk(len(x), experts.routing.top_k, experts.routing.num_experts):
            guess = self._guesser.choose(x, following)
        return Pending(self.ops, x, experts, chosen, shared, guess)


def with_choices(model: Decoder, pooled: bool, guesses: bool, counts: RoutingCounts | None) -> Decoder:
    """`model` with layers that count their choices of experts in `counts`, and, if they are `pooled`, stop at
    them."""
    layers, routed = list[DecoderLayer](model.layers), routed_layers(model)
    if not pooled and counts is None:
        return model
    for one, following in zip(routed, [*routed[1:], None], strict=True):
        ops: LayerOps = one.ops if counts is None else RecordingOps(one.ops, counts)
        if pooled:
            guess = _applied_before(following, one) if guesses and following is not None else None
            ops = PooledOps(ops, one.ops, guess)
        layers[one.index] = dataclasses.replace(one, ops=ops)
    return model.with_layers(layers)


def _applied_before(following: RoutedLayer, layer: RoutedLayer) -> Experts:
    """The router of `following` for the input of the experts of `layer`: both are the residual stream, each
    with the weight of its own norm."""
    experts, own = experts_of(following), layer.ffn_norm.float()
    ratio = torch.where(own.abs() < 1e-6, 0.0, following.ffn_norm.float() / own)
    router = (experts.router.float() * ratio).to(experts.router.dtype)
    return experts._replace(router=router.contiguous())


class ExpertMemory:
    """All experts in host memory, and the slots on the device."""

    def __init__(self, model: Decoder, num_slots: int) -> None:
        self.device = model.device
        self.hosted = [(experts_of(one).gate_up, experts_of(one).down) for one in routed_layers(model)]
        self.slots = tuple(_like(stack, num_slots, self.device) for stack in self.hosted[0])
        self.num_slots = num_slots
        self.expert_bytes = sum(stack[0].numel() * stack.element_size() for stack in self.hosted[0])
        self.num_experts = len(self.hosted[0][0])
        self.top_k = experts_of(routed_layers(model)[0]).routing.top_k
        self._pinned = PinnedTensors([stack for both in self.hosted for stack in both], self.device)

    def close(self) -> None:
        """After the lanes."""
        self._pinned.close()

    def copy(self, moves: Sequence[Move]) -> None:
        """An op of the copy lane."""
        for number, slot in moves:
            layer, expert = divmod(number, self.num_experts)
            for source, dest in zip(self.hosted[layer], self.slots, strict=True):
                dest[slot].copy_(source[expert], non_blocking=True)


def _like(stack: Tensor, num: int, device: torch.device) -> Tensor:
    """Room for so many matrices, laid out as in `stack`. Zeros: steps are captured before an expert has come,
    and what they compute then must be finite, since it goes to the padding block."""
    if stack[0].is_contiguous():
        return torch.zeros(num, *stack.shape[1:], dtype=stack.dtype, device=device)
    _, rows, width = stack.shape
    return torch.zeros(num, width, rows, dtype=stack.dtype, device=device).mT


@dataclass(slots=True, eq=False)
class _Flight:
    """Copies that were submitted together, and the fence behind them."""

    moves: tuple[Move, ...]
    ticket: Ticket = field(init=False)
    fence: Fence = field(init=False)
    copied_s: float = 0.0  # monotonic; on a GPU when they were launched

    def run(self, memory: ExpertMemory) -> None:
        """An op of the copy lane."""
        memory.copy(self.moves)
        self.copied_s = time.monotonic()

    def check(self) -> None:
        """Raises the error of the copies."""
        if (error := self.ticket.error()) is not None:
            raise error


class ExpertPool:
    """Brings the experts that a layer's tokens have chosen. Called by the launcher alone, but for
    `figures` and `seconds_waited`."""

    def __init__(
        self, memory: ExpertMemory, slots: ExpertSlots, copies: Lane, inner: Lane, guesses: bool
    ) -> None:
        self.top_k = memory.top_k
        # of captured pieces: the slot of each expert
        shape = slots.num_layers, slots.num_experts
        self.places = torch.zeros(shape, dtype=torch.int32, device=memory.device)
        self.memory, self._slots, self._copies, self._inner = memory, slots, copies, inner
        self._guesses = guesses
        self._uploads = Uploads(memory.device, inner)
        pinned = memory.device.type == "cuda"
        counts = slots.num_layers, 2, slots.num_experts
        self._counts = torch.empty(counts, dtype=torch.int32, pin_memory=pinned)
        self._flights: deque[_Flight] = deque()
        self._landing: dict[int, _Flight] = {}  # by slot
        self._guessed: set[int] = set()  # slots that no layer has wanted since
        self._wanted: tuple[_Flight, float] | None = None  # copies that a layer waits for, and since when
        self._last_guess: Numbers = np.empty(0, np.int64)  # experts of the next layer
        self.counts = ExpertFigures(num_slots=memory.num_slots, num_experts=len(slots.slot_of))

    def figures(self) -> ExpertFigures:
        """A snapshot; from any thread."""
        return dataclasses.replace(self.counts)

    def seconds_waited(self) -> float:
        """Of all steps so far, for experts; from any thread."""
        return self.counts.waited_s

    def launch(self, layer: LayerWork, after: Ticket | None) -> Ticket:
        """The rest of a layer: its products, once its choice is known."""
        self._settle()
        row, num_experts = layer.row, self._slots.num_experts
        num_tokens, wanted, likely = self._wait_choice(layer, after)
        bulk = is_bulk(num_tokens, self.top_k, num_experts)
        if row == 0:
            self._slots.order.begin()
        if not bulk:
            self._slots.order.used(row * num_experts + wanted)
        self._book_guess(wanted)
        if row + 1 == self._slots.num_layers or not self._guesses:  # the next step may be of another kind
            likely = likely[:0]
        elif bulk:
            likely = np.arange(num_experts)
        self._last_guess = likely[:0] if bulk else likely
        try:
            return self._launch_waves(layer, wanted, (likely, bulk), after)
        except BaseException:
            self._copies.drain()
            self._inner.drain()
            self._slots.abandon()
            raise

    def _launch_waves(
        self, layer: LayerWork, wanted: Numbers, guess: tuple[Numbers, bool], after: Ticket | None
    ) -> Ticket:
        last, is_last = after, False
        while not is_last:
            wave = self._slots.bring(layer.row, wanted)
            is_last = len(wave.experts) == len(wanted)
            self._book(wave)
            flights = self._bring(wave)
            guessed = self._prefetch(layer.row + 1, *guess) if is_last else ()
            last = self._submit(layer, wave, flights, is_last, last)
            self._slots.give_back(wave.slots, self._inner.record())
            self._give_back_guessed(guessed)
            if not is_last:
                wanted = np.setdiff1d(wanted, wave.experts, assume_unique=True)
        assert last is not None
        return last

    def close(self) -> None:
        """After the lanes."""
        self._slots.close()
        self.memory.close()

    # ------------------------------------------------------------------------------------------- the choice

    def _wait_choice(self, layer: LayerWork, after: Ticket | None) -> tuple[int, Numbers, Numbers]:
        """Tokens of the step, the experts that they have, and those that the next layer is likely to want.
        Blocks until the layer's op is over; raises its error."""
        read = layer.submit_choice(self._inner, after)
        point = self._inner.record()
        if self._wanted is not None:  # those of the layer before, whose products come first
            flight, since_s = self._wanted
            flight.fence.wait_passed()
            end_s = time.monotonic() if self.memory.device.type == "cuda" else flight.copied_s
            self.counts.waited_s += max(0.0, end_s - since_s)
            self._wanted = None
        point.wait_passed()
        if (error := read.error()) is not None:
            raise error
        self._inner.touch((choice_access(layer.row, Mode.READ),), label="choice")
        chosen, guessed = self._counts[layer.row].numpy().copy()
        return int(chosen.sum()) // self.top_k, np.flatnonzero(chosen), np.flatnonzero(guessed)

    def count(self, row: int, pending: Pending, is_real: Tensor | None) -> None:
        """An op: how many tokens each expert has, to the host. `is_real` [T]: tokens that are no padding."""
        both = torch.zeros(2, self._slots.num_experts, dtype=torch.int32, device=pending.x.device)
        for counts, tokens in zip(both, (pending.chosen, pending.guess), strict=True):
            if tokens is not None:
                ids = tokens.ids.long()
                ones = torch.ones_like(ids) if is_real is None else is_real[:, None].expand_as(ids)
                counts.scatter_add_(0, ids.flatten(), ones.flatten().int())
        move(self._counts[row], both)

    # --------------------------------------------------------------------------------------------- copies

    def _bring(self, wave: Wave) -> list[_Flight]:
        """Submit what is missing; all copies, also earlier ones, that the wave has to wait for."""
        if wave.moves:
            flight = self._copy(wave.moves, "copy")
            self._wanted = flight, time.monotonic()
        return list(
            dict.fromkeys(self._landing[slot] for slot in wave.slots.tolist() if slot in self._landing)
        )

    def _prefetch(self, layer: int, likely: Numbers, bulk: bool) -> tuple[Move, ...]:
        most = self._slots.num_slots if bulk else max(1, self._slots.num_slots // _GUESSED_SHARE)
        moves = self._slots.prefetch(layer, likely, most) if len(likely) else ()
        if moves:
            self._copy(moves, "prefetch")
            self.counts.guessed += len(moves)
            self._guessed.update(move.slot for move in moves)
        return moves

    def _give_back_guessed(self, moves: tuple[Move, ...]) -> None:
        if moves:
            slots = np.array([move.slot for move in moves], np.int64)
            self._slots.give_back(slots, self._landing[moves[0].slot].fence)

    def _copy(self, moves: tuple[Move, ...], label: str) -> _Flight:
        """Behind the last work on each of the slots."""
        into = [move.slot for move in moves]
        for fence in self._slots.fences_of(into):
            self._copies.wait(fence)
        accesses = (
            Access(IN_HOST, [move.expert for move in moves], _WHOLE, Mode.READ),
            Access(POOL, into, _WHOLE, Mode.WRITE),
        )
        flight = _Flight(moves)
        run = partial(flight.run, self.memory)
        flight.ticket = self._copies.submit(run, accesses, label=f"{label} of experts")
        flight.fence = self._copies.record()
        self._flights.append(flight)
        self._landing |= dict.fromkeys(into, flight)
        self._guessed.difference_update(into)
        self.counts.copied_bytes += len(moves) * self.memory.expert_bytes
        return flight

    def _settle(self) -> None:
        """Forget copies that are over. Those that failed have brought nothing."""
        while self._flights and self._flights[0].fence.passed():
            flight = self._flights.popleft()
            if flight.ticket.error() is not None:
                self._slots.lose(flight.moves)
            for one in flight.moves:
                if self._landing.get(one.slot) is flight:
                    del self._landing[one.slot]

    # -------------------------------------------------------------------------------------------- products

    def _submit(
        self, layer: LayerWork, wave: Wave, flights: list[_Flight], is_last: bool, after: Ticket | None
    ) -> Ticket:
        if flights:  # in the order of the copy lane
            self._inner.wait(max((one.fence for one in flights), key=lambda fence: fence.number))
        places = np.full(self._slots.num_experts, NONE, np.int32)
        places[wave.experts] = wave.slots

        def landed() -> Tensor:
            for flight in flights:
                flight.check()
            return self._uploads.send(places)

        products = Products(landed, Access(POOL, wave.slots, _WHOLE, Mode.READ), is_last)
        return layer.submit_products(self._inner, products, after)

    def add(self, pending: Pending, slots: Tensor) -> None:
        """An op: the products of the experts that are in `slots`."""
        gate_up, down = self.memory.slots
        here = pending.experts._replace(gate_up=gate_up, down=down, slots=slots)
        assert pending.terms is not None
        pending.ops.add_terms(pending.x, here, pending.chosen, pending.terms)

    # ------------------------------------------------------------------------------------------------ counts

    def _book_guess(self, wanted: Numbers) -> None:
        if len(self._last_guess):
            self.counts.foreseeable += len(wanted)
            self.counts.foreseen += len(np.intersect1d(wanted, self._last_guess, assume_unique=True))

    def _book(self, wave: Wave) -> None:
        num_hit = len(wave.experts) - len(wave.moves)
        self.counts.missed += len(wave.moves)
        self.counts.hit += num_hit
        used = self._guessed.intersection(wave.slots[:num_hit].tolist())
        self.counts.guesses_used += len(used)
        self._guessed -= used


class Products(NamedTuple):
    """The products of one wave, as work on the lane behind their copies."""

    landed: Callable[[], Tensor]  # in an op: the slot of each expert; raises the error of a copy
    access: Access
    is_last: bool  # the layer's sum comes behind them


class LayerWork(Protocol):
    """How the experts of one layer get on the inner lane."""

    row: int  # among the layers with experts

    def submit_choice(self, inner: Lane, after: Ticket | None) -> Ticket:
        """Its choice is on the host when this is over."""

    def submit_products(self, inner: Lane, products: Products, after: Ticket | None) -> Ticket: ...


class ExpertsWork:
    """The experts of one layer, op by op; and the ops that captured pieces are made of."""

    def __init__(self, pool: ExpertPool, flow: Flow, row: int) -> None:
        self.pool, self.flow, self.row = pool, flow, row
        self.pending: Pending | None = None
        # what else the layer hands on: a piece may run several times
        self._kept: tuple[Tensor | None, tuple[Tensor, ...]] = None, ()

    def __call__(self) -> None:
        raise InvariantBroken("the experts of a layer are launched in parts")

    def launch(self, inner: Lane, after: Ticket | None) -> Ticket:
        return self.pool.launch(self, after)

    def submit_choice(self, inner: Lane, after: Ticket | None) -> Ticket:
        access = choice_access(self.row, Mode.WRITE)
        return inner.submit(self.read_choice, (access,), label="choice", after=after)

    def submit_products(self, inner: Lane, products: Products, after: Ticket | None) -> Ticket:
        def add() -> None:
            self.add(products)
            if products.is_last:
                self.finish()
                self.pending = None

        return inner.submit(add, (products.access,), label=f"experts {self.row}", after=after)

    # --------------------------------------------------------------------------------------------------- ops

    def read_choice(self, padding_row: int | None = None) -> None:
        """`padding_row`: of a captured step, whose padding is no request's. Terms of its experts that are in
        no slot stay zero."""
        pending, flow = self.flow.hidden, self.flow
        if not isinstance(pending, Pending):
            raise InvariantBroken("the experts of a layer run, and it has no choice of them")
        is_real = None if padding_row is None else flow.bound_inputs().rows != padding_row
        self.pool.count(self.row, pending, is_real)
        terms = pending.ops.terms(pending.x, pending.experts, pending.shared is not None)
        self.pending = pending._replace(terms=terms if is_real is None else terms.zero_())
        self._kept = flow.residual, flow.tapped

    def add(self, products: Products) -> None:
        assert self.pending is not None
        self.pool.add(self.pending, products.landed().int())

    def finish(self) -> None:
        pending = self.pending
        assert pending is not None and pending.terms is not None
        self.flow.residual, self.flow.tapped = self._kept
        self.flow.hidden = pending.ops.summed(pending.terms, pending.chosen, pending.experts, pending.shared)


class CapturedExperts:
    """The experts of one layer between two captured pieces of a step: the first ends with the choice, the
    second begins with the last products."""

    def __init__(self, work: ExpertsWork, piece: Replay, reads: tuple[Access, ...]) -> None:
        """`piece`: the second; `reads`: its accesses but for slots."""
        self._work, self._piece, self._accesses = work, piece, reads
        self.row = work.row

    def submit_choice(self, inner: Lane, after: Ticket | None) -> Ticket:
        assert after is not None
        return after

    def submit_products(self, inner: Lane, products: Products, after: Ticket | None) -> Ticket:
        work = self._work
        if not products.is_last:
            add = partial(work.add, products)
            return inner.submit(add, (products.access,), label=f"experts {self.row}", after=after)
        room = work.pool.places[self.row]
        placed = inner.submit(lambda: room.copy_(products.landed()), label="places", after=after)
        return inner.replay(self._piece, (products.access, *self._accesses), after=placed)


class StepInPieces:
    """A captured step whose replay stops at every choice of experts."""

    def __init__(self, first: Replay, layers: Sequence[CapturedExperts], pool: ExpertPool) -> None:
        self._first, self._layers, self._pool = first, layers, pool

    def __call__(self) -> None:
        raise InvariantBroken("a step in pieces is launched in parts")

    def launch(self, inner: Lane, after: Ticket | None) -> Ticket:
        last = inner.replay(self._first, (choice_access(0, Mode.WRITE),), after=after)
        for layer in self._layers:
            last = self._pool.launch(layer, last)
        return last


class PooledForward(Forward):
    """The pass of a model whose experts come and go: each layer with experts is two pieces of work."""

    def __init__(self, pool: ExpertPool, *parts: Any) -> None:
        """`parts`: what `Forward` takes."""
        super().__init__(*parts)
        self._pool = pool
        self._rows = {f"layer {one.index}": row for row, one in enumerate(routed_layers(self.model))}

    def captures(self, shape: Shape) -> bool:
        """Prompts spend their time in products and copies, and large batches hit nearly all experts."""
        return shape.is_decode and shape.num_tokens <= _MOST_CAPTURED and super().captures(shape)

    def ops(self, flow: Flow, is_decode: bool = False) -> list[LayerOp]:
        found: list[LayerOp] = []
        for one in super().ops(flow, is_decode):
            found.append(one)
            if (row := self._rows.get(one.label)) is not None:
                work = ExpertsWork(self._pool, flow, row)
                found.append(LayerOp(work, (one.layers[1], one.layers[1]), f"experts {row}"))
        return found

    def recorded(self, label: str, ops: Sequence[tuple[str, Op]], recorder: Recorder) -> Replay:
        """A piece is run once before the next is recorded: that one's kernels run, too, over what it has
        left."""
        pieces: list[list[tuple[str, Op]]] = [[]]
        works = list[ExpertsWork]()
        for name, op in ops:
            if not isinstance(op, ExpertsWork):
                pieces[-1].append((name, op))
                continue
            pieces[-1].append(("choice", partial(op.read_choice, recorder.padding_row)))
            pieces.append([(name, partial(self._finish, op))])
            works.append(op)
        made = [recorder.piece(f"{label}, piece {number}", one) for number, one in enumerate(pieces)]
        layers = [
            CapturedExperts(work, piece, (choice_access(work.row + 1, Mode.WRITE),) if more else ())
            for work, piece, more in zip(works, made[1:], [*works[1:], None], strict=True)
        ]
        return Replay(label, StepInPieces(made[0], layers, self._pool))

    def _finish(self, work: ExpertsWork) -> None:
        assert work.pending is not None
        self._pool.add(work.pending, self._pool.places[work.row])
        work.finish()
