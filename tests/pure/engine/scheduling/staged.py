"""Requests in one stage of their life, without a scheduler around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from penstock.contract import KvLedger, Prefix, Request, SamplingParams, Table
from penstock.engine.scheduling.placement import Placement
from penstock.engine.scheduling.stages import Life, RunningRequest, State, WaitingRequest

BLOCK = 4


class NoLedger:
    """What a placement needs of storage to count."""

    block_tokens = BLOCK

    def most_slots(self, num_tokens: int, step_tokens: int) -> int:
        return -(-num_tokens // BLOCK)


class NoTable:
    """Draws as many slots as it is asked for."""

    num_slots = 0


def life_of(
    prompt: Sequence[int],
    max_tokens: int = 3,
    *,
    name: str = "r",
    prefix: Prefix | None = None,
    ledger: object = None,
    **sampling: Any,
) -> Life:
    request = Request(name, list(prompt), SamplingParams(max_tokens=max_tokens, **sampling), prefix)
    placement = Placement(cast(KvLedger, ledger or NoLedger()))
    return Life(request, 1, placement, prefix, list(prompt))


def waiting_of(life: Life, state: State = State.WAITING) -> WaitingRequest:
    life.state, life.waiting = state, WaitingRequest(life)
    return life.waiting


def running_of(
    life: Life, num_cached: int = 0, num_resident: int = 0, table: object = None, row: int = 0
) -> RunningRequest:
    life.state = State.RUNNING
    given = cast(Table, table or NoTable())
    life.running = RunningRequest(life, row, given, num_resident, num_cached, ())
    return life.running
