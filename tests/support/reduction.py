"""Every schedule of a program, up to the order of steps that commute. Owns which steps commute; the sequencer
runs schedules.

Two items on different lanes commute unless they touch the same bytes and one of them writes. An item touches
what it declares; one that declares nothing is taken to touch everything. The program and launchers declare
nothing, so they never commute with each other, nor with such an item. They commute with an item that declares
its accesses, unless they poll whether it is over.

The search is dynamic partial-order reduction with sleep sets: a run shows which of its steps could have come
in the other order and do not commute, and only for these the other order is tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.contract import Access, Mode
from penstock.testing.sequencer import HOST, Decision, Failure, Program, Sequencer, run_on, shrink


class _Pruned(BaseException):
    """Every possible next step was tried before, in an order that commutes with this one."""


@dataclass(slots=True)
class _Node:
    """One decision of the current run: the choices tried from here, and those that must be tried."""

    decision: Decision
    asleep: dict[str, Decision]  # tried before, and independent of everything since
    tried: dict[str, Decision] = field(default_factory=dict)
    wanted: set[str] = field(default_factory=set)

    def next_choice(self) -> str | None:
        left = self.wanted - self.tried.keys() - self.asleep.keys()
        return min(left, default=None)


class _Guided(Sequencer):
    """Follows `path`, takes `choice` at its end, and then chooses threads that are not asleep."""

    def __init__(self, path: Sequence[_Node], choice: str | None) -> None:
        super().__init__()
        self.sleeping: list[dict[str, Decision]] = [node.asleep for node in path]  # at each decision
        self._path = [node.decision.chosen for node in path[:-1]] + ([] if choice is None else [choice])
        self._tried = path[-1].tried if path else {}

    def code(self) -> frozenset[str]:
        return frozenset({HOST, *(name for name, lane in self._lanes.items() if lane.is_launcher)})

    def _choose(self, number: int, options: tuple[str, ...], default: str) -> str:
        if number < len(self._path):
            return self._path[number]
        asleep = self._asleep(number)
        self.sleeping.append(asleep)
        awake = [name for name in options if name not in asleep]
        if not awake:
            raise _Pruned
        return default if default in awake else awake[0]

    def _asleep(self, number: int) -> dict[str, Decision]:
        if number == 0:
            return {}
        before, last, code = self.sleeping[number - 1], self.decisions[number - 1], self.code()
        if number == len(self._path):
            before = {**before, **self._tried}
        return {name: step for name, step in before.items() if not _depend(step, last, code)}


def explore_all(program: Program, max_runs: int = 20_000) -> tuple[int, Failure | None]:
    """Returns the number of runs, including cut ones, and the first failure, shrunk."""
    path: list[_Node] = []
    choice: str | None = None
    for num_runs in range(1, max_runs + 1):
        sequencer = _Guided(path, choice)
        with suppress(_Pruned):
            failure = run_on(sequencer, program)[1]
            if failure is not None:
                return num_runs, shrink(program, failure)
        path = _extended(path, sequencer)
        _want_reversals(path, sequencer.code())
        while path and (choice := path[-1].next_choice()) is None:
            path.pop()
            if path:
                path[-1].tried[path[-1].decision.chosen] = path[-1].decision
        if not path:
            return num_runs, None
    return max_runs, None


def _extended(path: list[_Node], sequencer: _Guided) -> list[_Node]:
    """The nodes of the last run: those that it followed, the last of them with its new choice, and those that
    it added."""
    nodes = path[: len(sequencer.decisions)]
    for node, decision in zip(nodes, sequencer.decisions, strict=False):
        node.decision = decision
    for decision, asleep in zip(
        sequencer.decisions[len(nodes) :], sequencer.sleeping[len(nodes) :], strict=False
    ):
        nodes.append(_Node(decision, asleep))
    if nodes:
        nodes[-1].tried[nodes[-1].decision.chosen] = nodes[-1].decision
    return nodes


def _want_reversals(path: Sequence[_Node], code: frozenset[str]) -> None:
    """For each pair of steps that do not commute, with nothing between that keeps their order: try the later
    one, or what leads to it, first."""
    steps = [node.decision for node in path]
    # by step: the steps before it in every order that commutes with this one, as bits
    before: list[int] = []
    for later, step in enumerate(steps):
        known = 0
        for earlier in range(later - 1, -1, -1):
            if known >> earlier & 1:
                continue
            enables = _enables(steps[earlier], step)
            if enables or _depend(steps[earlier], step, code):
                if not enables and steps[earlier].chosen != step.chosen:
                    leading = [k for k in range(earlier + 1, later) if known >> k & 1]
                    first = [k for k in leading if not any(before[k] >> other & 1 for other in leading)] or [
                        later
                    ]
                    _want(path[earlier], [steps[k].chosen for k in first])
                known |= before[earlier] | 1 << earlier
        before.append(known)


def _want(node: _Node, first: Sequence[str]) -> None:
    """Begin here with one of `first`, each of which leads to the other order."""
    if not (node.wanted | node.tried.keys()).intersection(first):
        possible = [name for name in first if name in node.decision.options]
        node.wanted.update(possible[:1] or node.decision.options)


# -------------------------------------------------------------------------------------------------- commuting


def _enables(first: Decision, second: Decision) -> bool:
    """Whether `second` could not begin before `first` was over."""
    a, b = first.effects, second.effects
    return (b.begun is not None and b.begun in a.submitted) or (
        a.finished is not None and a.finished in b.after
    )


def _depend(first: Decision, second: Decision, code: frozenset[str]) -> bool:
    if first.chosen == second.chosen:
        return True
    a, b = first.effects, second.effects
    if a.finished in b.looked_at or b.finished in a.looked_at:
        return True
    a_code, b_code = first.chosen in code, second.chosen in code
    if (a_code or a.may_touch_anything) and (b_code or b.may_touch_anything):
        return True
    if (a.may_touch_anything and b.accesses) or (b.may_touch_anything and a.accesses):
        return True
    return _conflict(a.accesses, b.accesses)


def _conflict(some: Iterable[Access], others: Sequence[Access]) -> bool:
    return any(
        Mode.WRITE in (a.mode, b.mode)
        and a.arena == b.arena
        and a.layers[0] < b.layers[1]
        and b.layers[0] < a.layers[1]
        and not set(map(int, a.slots)).isdisjoint(map(int, b.slots))
        for a in some
        for b in others
    )
