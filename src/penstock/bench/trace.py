"""Hit rates of eviction policies on a trace, and the best that any could have. Owns the replay and the
report; needs no model, no engine and no torch.

A request finds the leading run of its blocks, holds them, takes slots for the rest, seals them and lets go:
the calls that the engine makes, on the same pool, one request at a time. What does not fit beside its own
prefix is computed and not kept.

The reference is Belady's rule: forget what is used again last, keep nothing that is not. It takes blocks one
by one, as if a block could be used without those before it and need not be kept while its request runs, so it
bounds every policy from above. The bound is close: a block's ancestors are used whenever it is, and earlier,
so the rule forgets none of them before it, and no hit that it counts stands on a missing prefix.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

from penstock import __version__
from penstock.bench.report import save_picture, write_json
from penstock.bench.trace_files import BLOCK_TOKENS, Trace
from penstock.kv.blocks.eviction import make_order, prefill_cost
from penstock.kv.blocks.pool import BlockPool
from penstock.models.progress import Progress

OPTIMUM = "optimum"
BOUND = f"{OPTIMUM}: Belady, an upper bound"
LADDER = 9  # capacities by default, each twice the one before, the last with room for every block
_REPORT_EVERY = 256  # requests or, for the optimum, as many blocks times a hundred


class Hits(NamedTuple):
    """Blocks found by requests."""

    blocks: int
    prefill: float | None  # work that they saved, in units of a prompt's first token; None: not known


def ladder(trace: Trace) -> list[int]:
    """Capacities from a small part of the trace's distinct blocks to all of them."""
    most = trace.num_distinct
    return sorted({max(1, -(-most >> step)) for step in range(LADDER)})


def measure(
    trace: Trace, policies: Sequence[str], capacities: Sequence[int], progress: Progress
) -> list[dict[str, Any]]:
    """A row per policy and capacity; those of the optimum come last."""
    rows = []
    whole = sum(prefill_cost(len(keys) * BLOCK_TOKENS) for keys in trace.prompts)
    whole -= trace.num_scans * prefill_cost(trace.scan_blocks * BLOCK_TOKENS)
    num_blocks = trace.num_blocks
    uses = next_uses(trace)
    for policy in (*policies, OPTIMUM):
        for capacity in capacities:
            before = time.perf_counter()
            hits = (
                best_hits(uses, capacity, progress)
                if policy == OPTIMUM
                else replay(trace, policy, capacity, progress)
            )
            rows.append(
                {
                    "policy": policy,
                    "capacity_blocks": capacity,
                    "hit_blocks": hits.blocks,
                    "hit_rate": hits.blocks / num_blocks,
                    "hit_rate_tokens": hits.blocks * BLOCK_TOKENS / trace.num_tokens,
                    "prefill_saved": None if hits.prefill is None else hits.prefill / whole,
                    "replay_s": round(time.perf_counter() - before, 3),
                }
            )
    return rows


def replay(trace: Trace, policy: str, capacity: int, progress: Progress) -> Hits:
    """The trace against a pool of `capacity` blocks."""
    pool = BlockPool(capacity, "trace", eviction=make_order(policy, capacity, BLOCK_TOKENS))
    stage, total = f"{policy}, {capacity} blocks", len(trace.prompts)
    num_hits, saved = 0, 0.0
    for number, keys in enumerate(trace.prompts):
        if number % _REPORT_EVERY == 0:
            progress(stage, number, total)
        found = _use(pool, keys)
        num_hits += found
        saved += prefill_cost(found * BLOCK_TOKENS)
    pool.check()
    pool.close()
    progress(stage, total, total)
    return Hits(num_hits, saved)


def _use(pool: BlockPool, keys: Sequence[bytes]) -> int:
    """One request comes and goes; returns how many of its blocks were there."""
    shared = pool.find(keys)
    first = len(shared)
    hold = pool.hold("request", shared)
    reservation = pool.try_reserve(min(len(keys) - first, pool.num_available), "request")
    if reservation is not None:
        slots = reservation.slots
        reservation.commit(hold)
        pool.seal(slots, keys[first : first + len(slots)], range(first, first + len(slots)))
    hold.end()
    return first


def next_uses(trace: Trace) -> list[int]:
    """For each use of a block, in order, the index of its next use; the number of uses if there is none."""
    keys = [key for prompt in trace.prompts for key in prompt]
    never = len(keys)
    following: dict[bytes, int] = {}
    uses = [never] * never
    for place in range(never - 1, -1, -1):
        uses[place] = following.get(keys[place], never)
        following[keys[place]] = place
    return uses


def best_hits(uses: Sequence[int], capacity: int, progress: Progress) -> Hits:
    """Hits of Belady's rule. A block that is kept is known by the place of its next use: the furthest of
    those is the largest."""
    never, every = len(uses), _REPORT_EVERY * 100
    kept: set[int] = set()
    furthest: list[int] = []  # negated; places that have come stay at the bottom and are never taken out
    num_hits = 0
    for place, next_use in enumerate(uses):
        if place % every == 0:
            progress(f"{OPTIMUM}, {capacity} blocks", place, never)
        if place in kept:
            kept.remove(place)
            num_hits += 1
        if next_use < never:
            kept.add(next_use)
            heappush(furthest, -next_use)
            if len(kept) > capacity:
                kept.remove(-heappop(furthest))
    progress(f"{OPTIMUM}, {capacity} blocks", never, never)
    return Hits(num_hits, None)


# ----------------------------------------------------------------------------------------------------- report


@dataclass(frozen=True, slots=True)
class TraceReport:
    """The rows of `measure`, and their setting."""

    trace: Trace
    rows: list[dict[str, Any]]

    @property
    def title(self) -> str:
        trace = self.trace
        scan = (
            (f" and {trace.num_scans} one-off documents of {trace.scan_blocks} blocks")
            if trace.num_scans
            else ""
        )
        return (
            f"penstock bench trace: {trace.name}, {trace.num_requests} requests{scan}, blocks of "
            f"{BLOCK_TOKENS} tokens"
        )

    @property
    def policies(self) -> list[str]:
        """In the order measured; the optimum is the last."""
        return list(dict.fromkeys(row["policy"] for row in self.rows))

    def line(self, policy: str, figure: str) -> dict[int, float | None]:
        """By capacity."""
        return {row["capacity_blocks"]: row[figure] for row in self.rows if row["policy"] == policy}

    def tables(self) -> dict[str, tuple[list[str], list[list[str]]]]:
        """Titles and lines by heading: blocks found, and work saved, for which no bound is known."""
        return {
            f"{self.title}\nblocks found, % ({BOUND})": self._table(self.policies, "hit_rate"),
            "prefill work saved, %": self._table(self.policies[:-1], "prefill_saved"),
        }

    def _table(self, policies: list[str], figure: str) -> tuple[list[str], list[list[str]]]:
        lines = [self.line(policy, figure) for policy in policies]
        cells = [[str(capacity), *(_percent(line[capacity]) for line in lines)] for capacity in lines[0]]
        return ["capacity, blocks", *policies], cells

    def write(self, path: Path) -> None:
        trace = self.trace
        of = {
            "file": trace.name,
            "requests": trace.num_requests,
            "tokens": trace.num_tokens,
            "block_tokens": BLOCK_TOKENS,
            "blocks": trace.num_blocks,
            "distinct_blocks": trace.num_distinct,
            **({"interleave": trace.interleave} if trace.interleave is not None else {}),
            **({"scans": trace.num_scans, "scan_blocks": trace.scan_blocks} if trace.num_scans else {}),
        }
        write_json(
            path,
            "trace",
            {"penstock": __version__, "python": platform.python_version(), "trace": of, "results": self.rows},
        )

    def draw(self, path: Path) -> None:
        save_picture(path, self.title, self._draw_lines)

    def _draw_lines(self, axes: Any) -> None:
        for policy in self.policies:
            line = sorted(self.line(policy, "hit_rate").items())
            style = (
                {"linestyle": "--", "color": "black", "label": BOUND}
                if policy == OPTIMUM
                else {"marker": "o", "label": policy}
            )
            axes.plot(
                [capacity for capacity, _ in line],
                [100 * (share or 0.0) for _, share in line],
                markersize=4,
                **style,
            )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xticks([capacity for capacity, _ in line])
        axes.minorticks_off()
        axes.tick_params(axis="x", labelsize=8)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(f"capacity in blocks of {BLOCK_TOKENS} tokens")
        axes.set_ylabel("blocks found, %")
        axes.legend(fontsize=8)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
