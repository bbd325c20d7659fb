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
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

from penstock import __version__
from penstock.bench.report import Row, save_picture, write_json
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
) -> list[Row]:
    """A row per policy and capacity; those of the optimum come last."""
    rows = []
    whole = sum(prefill_cost(len(keys) * BLOCK_TOKENS) for keys in trace.prompts)
    whole -= trace.num_scans * prefill_cost(trace.scan_blocks * BLOCK_TOKENS)
    num_blocks, uses = trace.num_blocks, next_uses(trace)
    for policy in (*policies, OPTIMUM):
        for capacity in capacities:
            before = time.perf_counter()
            if policy == OPTIMUM:
                num, saved = best_hits(uses, capacity, progress)
            else:
                num, saved = replay(trace, policy, capacity, progress)
            rows.append(
                {
                    "policy": policy,
                    "capacity_blocks": capacity,
                    "hit_blocks": num,
                    "hit_rate": num / num_blocks,
                    "hit_rate_tokens": num * BLOCK_TOKENS / trace.num_tokens,
                    "prefill_saved": None if saved is None else saved / whole,
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
    """For each use of a block, in order, the index of its next use."""
    return following_uses([key for prompt in trace.prompts for key in prompt])


def following_uses(keys: Sequence[Hashable]) -> list[int]:
    """For each use of a key, the index of its next use; the number of uses if there is none."""
    never = len(keys)
    following: dict[Hashable, int] = {}
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
    rows: list[Row]

    @property
    def title(self) -> str:
        trace, scan = self.trace, ""
        if trace.num_scans:
            scan = f" and {trace.num_scans} one-off documents of {trace.scan_blocks} blocks"
        return (
            f"penstock bench trace: {trace.name}, {trace.num_requests} requests{scan}, blocks of "
            f"{BLOCK_TOKENS} tokens"
        )

    def percents(self, figure: str) -> dict[str, dict[int, float | None]]:
        """By policy, in the order measured, and capacity. The optimum is the last."""
        lines: dict[str, dict[int, float | None]] = {}
        for row in self.rows:
            share = row[figure]
            line = lines.setdefault(row["policy"], {})
            line[row["capacity_blocks"]] = None if share is None else 100 * share
        return lines

    def tables(self) -> dict[str, tuple[list[str], list[list[str]]]]:
        """Titles and lines by heading: blocks found, and work saved, for which no bound is known."""
        tables = {}
        for heading, figure in (
            (f"{self.title}\nblocks found, % ({BOUND})", "hit_rate"),
            ("prefill work saved, %", "prefill_saved"),
        ):
            lines = self.percents(figure)
            if figure == "prefill_saved":
                del lines[OPTIMUM]
            titles, *columns = ["capacity, blocks", *lines], *lines.values()
            tables[heading] = (
                titles,
                [[str(capacity), *(f"{line[capacity]:.1f}" for line in columns)] for capacity in columns[0]],
            )
        return tables

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
        lines = self.percents("hit_rate")
        for policy, line in lines.items():
            style: Row = {"marker": "o", "label": policy}
            if policy == OPTIMUM:
                style = {"linestyle": "--", "color": "black", "label": BOUND}
            axes.plot(*zip(*sorted(line.items()), strict=True), markersize=4, **style)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xticks(sorted(lines[OPTIMUM]))
        axes.minorticks_off()
        axes.tick_params(axis="x", labelsize=8)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(f"capacity in blocks of {BLOCK_TOKENS} tokens")
        axes.set_ylabel("blocks found, %")
        axes.legend(fontsize=8)
