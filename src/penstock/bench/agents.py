"""Recorded conversations of coding agents, replayed by many users at once. Owns the figures of a replay and
their form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np

from penstock.bench.agents_replay import EngineReplay, Record, ServerAddress, UrlReplay, UserReplay
from penstock.bench.report import Column, Results, Row, figure
from penstock.bench.run import Driver
from penstock.bench.trace_files import Asking, RecordedConversation, User, reusable
from penstock.contract import KvSource
from penstock.errors import ConfigError
from penstock.models.progress import Progress

FIRST, LATER, ALL = "first", "later", "all"
# cached: a server that does not say where
TIERS = (*(tier for tier in KvSource.__slots__ if tier != "computed"), "cached")


def _share(tier: str) -> Column:
    def cell(row: Row) -> str:
        share = 100 * row["source"].get(tier, 0) / max(1, row["prompt_tokens"])
        return f"{share:.1f}" if share else "-"

    return Column(f"% {tier}", cell)


class AgentsBench:
    """Every user sends the next recorded request when the last is answered, optionally after a pause. Prompts
    are the recorded ones, not the model's output."""

    name = "agents"
    panels = 3
    columns = (
        Column("turns", lambda row: row["turns"]),
        Column("requests done", lambda row: f"{row['done']} of {row['requests']}"),
        figure("completion s", "seconds", 1),
        figure("prompt tokens", "prompt_tokens"),
        figure("% reused", "reused", 1, 100),
        figure("% reusable", "reusable", 1, 100),
        figure("% of what an infinite cache reuses", "of_reusable", 1, 100),
        *map(_share, TIERS),
        *(
            figure(f"{name} {part} s", f"{name}_s.{part}", 2)
            for name in ("ttft", "latency", "waiting")
            for part in ("p50", "p95", "p99")
        ),
        *(figure(f"between tokens {part} ms", f"between_tokens_ms.{part}", 1) for part in ("p50", "p99")),
        figure("worst overtaken s", "overtaken_s", 2),
        figure("output tok/s", "tokens_per_s", 1),
        Column("failed", lambda row: f"{row['failed'] or '-'}"),
    )

    def __init__(self, asking: Asking, conversations: list[RecordedConversation]) -> None:
        self.settings = asking
        self._conversations = conversations

    def measure(self, driver: Driver) -> Results:
        engine, longest = driver.engine, self.settings.longest(self._conversations)
        if longest > engine.max_model_len:
            raise ConfigError(
                f"the longest request has {longest} tokens, but the context holds {engine.max_model_len}; "
                "lower --context"
            )
        users = self._users(engine.tokenizer.vocab_size, driver.progress)
        replay = EngineReplay(users, engine, driver.salt)
        results = self._replayed(users, replay, driver.config.kv.block_tokens, driver.progress)
        stats = engine.stats()
        for row in results.rows[-1:]:
            row["engine"] |= {
                name: getattr(stats, name) for name in ("retractions", "steps", "blocked_s", "cache")
            }
        return results

    def measure_url(
        self, server: ServerAddress, vocab: int, block_tokens: int, progress: Progress
    ) -> Results:
        users = self._users(vocab, progress)
        return self._replayed(users, UrlReplay(users, server), block_tokens, progress)

    def _users(self, vocab: int, progress: Progress) -> list[User]:
        progress("agents: making prompts", 0, 1)
        return self.settings.users_of(self._conversations, vocab)

    def _replayed(
        self, users: Sequence[User], replay: UserReplay, block_tokens: int, progress: Progress
    ) -> Results:
        seconds = replay.run(self.settings.limit_s, progress)
        records = replay.records
        done = [record for record in records if record.done]
        prompts = [record.ask.prompt for record in done]
        possible = dict(zip(done, reusable(prompts, block_tokens), strict=True))
        late, num_asks = overtaken(records), sum(len(user.asks) for user in users)
        rows = [
            {
                "turns": turns,
                "requests": total,
                **_figures(wanted, possible),
                "overtaken_s": max((late[record] for record in wanted), default=0.0),
            }
            for turns, total, wanted in (
                (FIRST, len(users), [one for one in records if one.number == 1]),
                (LATER, num_asks - len(users), [one for one in records if one.number > 1]),
                (ALL, num_asks, records),
            )
        ]
        output = sum(record.generated for record in records)
        rows[-1] |= {
            "seconds": seconds,
            "output_tokens": output,
            "tokens_per_s": output / max(seconds, 1e-9),
            "engine": {},
            "records": [_as_dict(record, possible.get(record)) for record in records],
        }
        failed = [
            f"the rest of {one.conversation}: its request {one.number} failed: {one.error}"
            for one in records
            if one.error
        ]
        return Results(rows if done else [], failed)

    def draw(self, axes: Any, rows: list[Row]) -> None:
        """Over time: waiting and running requests, reuse, time to first token."""
        records, seconds = rows[-1]["records"], rows[-1]["seconds"]
        crowd, reuse, ttft = axes
        for name, start, end in (("waiting", "submit_s", "start_s"), ("running", "start_s", "end_s")):
            crowd.step(*_counts(records, start, end, seconds), where="post", label=name)
        crowd.set_ylabel("requests")
        crowd.legend(fontsize=8)
        told = sorted(
            (one for one in records if one["source"] and one["end_s"] is not None),
            key=lambda one: one["end_s"],
        )
        reused = np.cumsum([one["prompt_tokens"] - one["source"].get("computed", 0) for one in told])
        prompts = np.cumsum([one["prompt_tokens"] for one in told])
        reuse.plot([one["end_s"] for one in told], 100 * reused / np.maximum(prompts, 1))
        reuse.set_ylim(0, 100)
        reuse.set_ylabel("prompt tokens\nreused so far, %")
        for name, is_first in (("first turns", True), ("later turns", False)):
            dots = [one for one in records if one["first_s"] is not None and (one["number"] == 1) == is_first]
            sent = [one["submit_s"] for one in dots]
            ttft.plot(sent, [one["first_s"] - one["submit_s"] for one in dots], ".", markersize=4, label=name)
        ttft.set_ylabel("s to first token")
        ttft.set_xlabel("seconds since the start (of a request: when it was sent)")
        ttft.legend(fontsize=8)


def _figures(records: Sequence[Record], possible: dict[Record, int]) -> Row:
    """Of finished requests."""
    done = [record for record in records if record.done]
    source: Counter[str] = Counter()
    for record in done:
        source.update(record.source or {})
    prompts = sum(len(record.ask.prompt) for record in done)
    could = sum(possible[record] for record in done)
    reused = prompts - source["computed"] if done and all(record.source for record in done) else None
    gaps = [
        1000 * (late - early) / num for record in done for (early, _), (late, num) in pairwise(record.token_s)
    ]
    spans = {
        name: [getattr(one, end) - one.submit_s for one in done if getattr(one, end) is not None]
        for name, end in (("ttft_s", "first_s"), ("latency_s", "end_s"))
    }
    return {
        "done": len(done),
        "failed": sum(record.error is not None for record in records),
        "prompt_tokens": prompts,
        "source": dict(source),
        "reused": None if reused is None else reused / prompts,
        "reusable": could / prompts if prompts else None,
        "of_reusable": None if reused is None or not could else reused / could,
        **{name: percentiles(taken) for name, taken in spans.items()},
        "waiting_s": percentiles([record.waited_s for record in done if record.waited_s is not None]),
        "between_tokens_ms": percentiles(gaps),
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p95, p99 = np.percentile(values, [50, 95, 99]).tolist()
    return {"p50": p50, "p95": p95, "p99": p99, "max": max(values)}


def overtaken(records: Sequence[Record]) -> dict[Record, float]:
    """The worst overtaking of each request, in seconds: how much later a request arrived that got its first
    token sooner. Requests without a first token count as overtaken; requests of the same step do not."""

    def first_s(record: Record) -> float:
        return float("inf") if record.first_s is None else record.first_s

    found: dict[Record, float] = {}
    latest = 0.0  # latest arrival among requests with an earlier first token
    for _, together in groupby(sorted(records, key=first_s), key=first_s):
        some = list(together)
        found |= {record: max(0.0, latest - record.submit_s) for record in some}
        latest = max(latest, *(record.submit_s for record in some))
    return found


def _as_dict(record: Record, possible: int | None) -> Row:
    return {
        "conversation": record.conversation,
        "number": record.number,
        "prompt_tokens": len(record.ask.prompt),
        "output_tokens": record.generated,
        "submit_s": record.submit_s,
        "start_s": None if record.waited_s is None else record.submit_s + record.waited_s,
        "first_s": record.first_s,
        "end_s": record.end_s,
        "source": record.source,
        "reusable_tokens": possible,
        "error": record.error,
    }


def _counts(records: list[Row], start: str, end: str, seconds: float) -> tuple[list[float], list[int]]:
    """How many records there were at each moment between two of their times. Where a server does not say
    when a request started, its first token does."""
    times = [{"start_s": one["first_s"]} | {k: v for k, v in one.items() if v is not None} for one in records]
    begun = [one for one in times if one.get(start) is not None]
    changes = [(one[start], 1) for one in begun] + [
        (one[end], -1) for one in begun if one.get(end) is not None
    ]
    moments, steps = zip((0.0, 0), *sorted(changes), (seconds, 0), strict=True)
    return list(moments), list(accumulate(steps))
