"""Sequences of whose KV only a part is on the device, beside the same with all of it there. Owns what the
turns of a conversation show, and the rate of the link in the same run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from penstock.bench.report import Column, Results, draw_bars, figure
from penstock.bench.run import Driver, Reader, Stepped, random_prompts
from penstock.config import Config, ResidencyName
from penstock.engine.build import device_for
from penstock.engine.engine import Engine
from penstock.lanes.cuda import make_lane
from penstock.models.progress import Progress

NEXT_TOKENS = 64  # that each later turn brings
LINK_BYTES = 1 << 30
STAGE = "deep"


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

    def measure(self, engine: Engine, config: Config, progress: Progress) -> Results:
        results = Results([], [])
        driver = Driver(engine)
        driver.wait_ready(progress)
        link = _link_bytes_s(device_for(config))
        resident = engine.resident_tokens
        for done, length in enumerate(self.lengths):
            progress(f"{STAGE}, {resident} tokens resident", done, len(self.lengths))
            if self.tokens_of(length) > engine.max_model_len:
                results.skipped.append(
                    f"{length} tokens, {resident} resident: they exceed the context of {engine.max_model_len}"
                )
            else:
                results.rows.extend(
                    self._rows(driver, length, resident, link, config.kv.residency == "scored")
                )
        progress(f"{STAGE}, {resident} tokens resident", len(self.lengths), len(self.lengths))
        return results

    def _rows(
        self, driver: Driver, length: int, resident: int, link: float | None, may_score: bool
    ) -> list[dict[str, Any]]:
        driver.reset_cache()
        vocab = driver.engine.tokenizer.vocab_size
        sizes = length, *(NEXT_TOKENS,) * 3
        prompt, *more = (random_prompts(1, num, vocab, (self.seed, num, n))[0] for n, num in enumerate(sizes))
        first, decode_ms, second = self._two_turns(driver, prompt, more[0], "exact")
        is_deep = length + self.tokens > resident
        token_bytes = driver.engine.cache.saves.layout.block_bytes / driver.engine.cache.block_tokens
        num_bytes = token_bytes * max(0, length - resident)
        row = {
            "mode": "exact" if is_deep else "full",
            "resident": resident if is_deep else length,
            "length": length,
            "prefill_s": first.ttft_s,
            "decode_ms": decode_ms,
            "link_ms": num_bytes / link * 1000 if link and is_deep else None,
            "next_s": second.ttft_s,
            "least_s": token_bytes * length / link if link and is_deep else None,
            "restored": _restored(second, prompt),
            "link_gb_s": None if link is None else link / 1e9,
        }
        if not (is_deep and may_score):
            return [row]
        driver.flush()
        prompt += second.tokens + more[1]
        _, decode_ms, fourth = self._two_turns(driver, prompt, more[2], "scored")
        least_s = token_bytes * resident / link + self._new_s(driver, resident) if link else None
        scored = {
            "mode": "scored",
            "prefill_s": None,
            "decode_ms": decode_ms,
            "link_ms": None,
            "least_s": least_s,
        }
        return [row, row | scored | {"next_s": fourth.ttft_s, "restored": _restored(fourth, prompt)}]

    def _two_turns(
        self, driver: Driver, prompt: list[int], more: list[int], mode: ResidencyName
    ) -> tuple[Reader, float, Reader]:
        """An answer to `prompt`, its time per token, and a short answer when `more` was said, too; `prompt`
        has it all then."""
        first = driver.submit(prompt, self.tokens, mode)
        decode_ms = _decode_ms(driver.run_all())
        driver.flush()
        prompt += first.tokens + more
        second = driver.submit(prompt, 2, mode)
        driver.run_all()
        return first, decode_ms, second

    def _new_s(self, driver: Driver, resident: int) -> float:
        """What the tokens of a short turn take behind as many as are resident, all on the device."""
        vocab, num = driver.engine.tokenizer.vocab_size, resident - 2 * NEXT_TOKENS
        prompt, new = (
            random_prompts(1, size, vocab, (self.seed, size, 4 + n))[0]
            for n, size in enumerate((num, NEXT_TOKENS))
        )
        driver.submit(prompt, 1, "exact")
        driver.run_all()
        again = driver.submit(prompt + new, 1, "exact")
        driver.run_all()
        return again.ttft_s

    def draw(self, axes: Any, rows: list[dict[str, Any]]) -> None:
        groups = sorted({row["length"] for row in rows})
        bars = {}
        for name, mode, field in (
            ("all on the device", "full", "decode_ms"),
            ("paged out", "exact", "decode_ms"),
            ("scored", "scored", "decode_ms"),
            ("the link alone", "exact", "link_ms"),
        ):
            known = {row["length"]: row[field] or None for row in rows if row["mode"] == mode}
            if any(known.values()):
                bars[name] = [known.get(group) for group in groups]
        draw_bars(axes, [f"{group:,}" for group in groups], bars, "%.1f")
        axes.set_yscale("log")
        axes.set_xlabel("tokens of the sequence")
        axes.set_ylabel("ms per token of one request")


def _decode_ms(turns: list[Stepped]) -> float:
    ends_s = [turn.end_s for turn in turns if turn.num_tokens]
    return median(later - earlier for earlier, later in pairwise(ends_s)) * 1000


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
