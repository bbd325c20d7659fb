"""Sequences of whose KV only a part is on the device, beside the same with all of it there. Owns what the
turns of a conversation show, and the rate of the link in the same run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from penstock.bench.report import Column, Results, Row, draw_points, figure
from penstock.bench.run import Driver, Reader
from penstock.config import ResidencyName
from penstock.engine.build import device_for
from penstock.lanes.cuda import make_lane

NEXT_TOKENS = 64  # that each later turn brings
LINK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class DeepBench:
    """One conversation at a time: a prompt of `lengths` tokens, an answer of `tokens`, and a short second
    turn. With scored residency, two further turns attend only to the part on the device; the second continues
    what the first left."""

    lengths: tuple[int, ...]
    tokens: int
    seed: int

    name = "deep"
    columns = (
        Column("mode", lambda row: str(row["mode"])),
        figure("resident", "resident"),
        figure("tokens", "length"),
        figure("prefill s", "prefill_s", 2),
        figure("decode ms", "decode_ms", 2),
        figure("link alone ms", "link_ms", 2),
        figure("next TTFT s", "next_s", 3),
        figure("least s", "least_s", 3),
        figure("restored %", "restored", 1, 100),
        figure("link GB/s", "link_gb_s", 1),
    )

    def tokens_of(self, length: int) -> int:
        """Of a conversation whose first prompt has `length` tokens."""
        return length + 3 * (self.tokens + NEXT_TOKENS) + 2

    def measure(self, driver: Driver) -> Results:
        results = Results([], [])
        engine, link = driver.engine, _link_bytes_s(device_for(driver.config))
        resident = engine.parts.resident_tokens
        for done, length in enumerate(self.lengths):
            driver.progress(f"deep, {resident} tokens resident", done, len(self.lengths))
            if self.tokens_of(length) <= engine.max_model_len:
                results.rows.extend(self._rows(driver, length, link))
            else:
                results.skipped.append(
                    f"{length} tokens, {resident} resident: they exceed the context of {engine.max_model_len}"
                )
        return results

    def _rows(self, driver: Driver, length: int, link: float | None) -> list[Row]:
        driver.reset_cache()
        cache, resident = driver.engine.cache, driver.engine.parts.resident_tokens
        sizes = length, *(NEXT_TOKENS,) * 3
        prompt, *more = (driver.prompts(1, num, self.seed, num, n)[0] for n, num in enumerate(sizes))
        first, decode_ms, second = self._two_turns(driver, prompt, more[0], "exact")
        is_deep = length + self.tokens > resident
        token_s = cache.saves.layout.block_bytes / cache.block_tokens / link if link and is_deep else None
        row = {
            "mode": "exact" if is_deep else "full",
            "resident": resident if is_deep else length,
            "length": length,
            "prefill_s": first.ttft_s,
            "decode_ms": decode_ms,
            "link_ms": token_s and token_s * max(0, length - resident) * 1000,
            "next_s": second.ttft_s,
            "least_s": token_s and token_s * length,
            "restored": _restored(second, prompt),
            "link_gb_s": link and link / 1e9,
        }
        if not is_deep or driver.config.kv.residency != "scored":
            return [row]
        driver.flush()
        prompt += second.tokens + more[1]
        _, decode_ms, fourth = self._two_turns(driver, prompt, more[2], "scored")
        scored = {
            "mode": "scored",
            "prefill_s": None,
            "decode_ms": decode_ms,
            "link_ms": None,
            "next_s": fourth.ttft_s,
            "least_s": token_s and token_s * resident + self._new_s(driver, resident),
            "restored": _restored(fourth, prompt),
        }
        return [row, row | scored]

    def _two_turns(
        self, driver: Driver, prompt: list[int], more: list[int], mode: ResidencyName
    ) -> tuple[Reader, float, Reader]:
        """An answer to `prompt`, its time per token, and a short answer when `more` was said, too; `prompt`
        has it all then."""
        first = driver.submit(prompt, self.tokens, mode)
        ends_s = [turn.end_s for turn in driver.run_all() if turn.num_tokens]
        decode_ms = median(later - earlier for earlier, later in pairwise(ends_s)) * 1000
        driver.flush()
        prompt += first.tokens + more
        second = driver.submit(prompt, 2, mode)
        driver.run_all()
        return first, decode_ms, second

    def _new_s(self, driver: Driver, resident: int) -> float:
        """What the tokens of a short turn take behind as many as are resident, all on the device."""
        sizes = resident - 2 * NEXT_TOKENS, NEXT_TOKENS
        prompt, new = (driver.prompts(1, num, self.seed, num, 4 + n)[0] for n, num in enumerate(sizes))
        driver.submit(prompt, 1, "exact")
        driver.run_all()
        again = driver.submit(prompt + new, 1, "exact")
        driver.run_all()
        return again.ttft_s

    def draw(self, axes: Any, rows: list[Row]) -> None:
        shown = {
            "all on the device": ("full", "decode_ms"),
            "paged out": ("exact", "decode_ms"),
            "scored": ("scored", "decode_ms"),
            "the link alone": ("exact", "link_ms"),
        }
        points = [
            (name, f"{row['length']:,}", row[field])
            for row in sorted(rows, key=lambda row: row["length"])
            for name, (mode, field) in shown.items()
            if row["mode"] == mode and row[field]
        ]
        draw_points(axes, points, "tokens of the sequence", "ms per token of one request", log=True)


def _restored(reader: Reader, prompt: list[int]) -> float | None:
    return None if reader.source is None else 1 - reader.source.computed / len(prompt)


def _link_bytes_s(device: torch.device) -> float | None:
    """Of one plain copy from pinned memory, the best of three."""
    if device.type != "cuda":
        return None
    source, dest = (
        torch.zeros(LINK_BYTES, dtype=torch.uint8, pin_memory=True),
        torch.empty(LINK_BYTES, dtype=torch.uint8, device=device),
    )
    lane = make_lane("bench-link", device)
    taken = []
    for _ in range(4):
        started = time.perf_counter()
        lane.submit(lambda: dest.copy_(source, non_blocking=True), label="copy")
        lane.drain()
        taken.append(time.perf_counter() - started)
    lane.close()
    return LINK_BYTES / min(taken[1:])
