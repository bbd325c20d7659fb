"""Recorded conversations of coding agents, replayed by many users at once. Owns the figures of a replay and
their form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from penstock.bench.agents_replay import EngineReplay, Record, ServerAddress, UrlReplay
from penstock.bench.report import Column, Results, figure
from penstock.bench.run import Driver
from penstock.bench.trace_files import Asking, RecordedConversation, User, reusable
from penstock.config import Config
from penstock.contract import KvSource
from penstock.engine.engine import Engine
from penstock.errors import ConfigError
from penstock.models.progress import Progress

FIRST, LATER, ALL = "first", "later", "all"
# cached: a server that does not say where
TIERS = (*(tier for tier in KvSource.__slots__ if tier != "computed"), "cached")


def _share(tier: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: (
        f"{100 * row['source'][tier] / max(1, row['prompt_tokens']):.1f}" if row["source"].get(tier) else "-"
    )


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
        *(Column(f"% {tier}", _share(tier)) for tier in TIERS),
        *(
            figure(f"{name} {part} s", f"{name}_s.{part}", 2)
            for name in ("ttft", "latency", "waiting")
            for part in ("p50", "p95", "p99")
        ),
        *(figure(f"between tokens {part} ms", f"between_tokens_ms.{part}", 1) for part in ("p50", "p99")),
        figure("worst overtaken s", "overtaken_s", 2),
        figure("output tok/s", "tokens_per_s", 1),
        Column("failed", lambda row: f"{row['failed']}" if row["failed"] else "-"),
    )

    def __init__(self, asking: Asking, conversations: list[RecordedConversation]) -> None:
        self.settings = asking
        self._conversations = conversations

    def measure(self, engine: Engine, config: Config, progress: Progress) -> Results:
        if (longest := self.settings.longest(self._conversations)) > engine.max_model_len:
            raise ConfigError(
                f"the longest request has {longest} tokens, but the context holds {engine.max_model_len}; "
                "lower --context"
            )
        driver = Driver(engine)
        driver.wait_ready(progress)
        users = self._users(engine.tokenizer.vocab_size, progress)
        replay = EngineReplay(users, engine, driver.salt)
        seconds = replay.run(self.settings.limit_s, progress)
        stats = engine.stats()
        inside = {
            "retractions": stats.retractions,
            "steps": stats.steps,
            "blocked_s": stats.blocked_s,
            "cache": stats.cache,
        }
        return self._results(users, replay.records, seconds, config.kv.block_tokens, inside)

    def measure_url(
        self, server: ServerAddress, vocab: int, block_tokens: int, progress: Progress
    ) -> Results:
        users = self._users(vocab, progress)
        replay = UrlReplay(users, server)
        seconds = replay.run(self.settings.limit_s, progress)
        return self._results(users, replay.records, seconds, block_tokens, {})

    def _users(self, vocab: int, progress: Progress) -> list[User]:
        progress("agents: making prompts", 0, 1)
        users = self.settings.users_of(self._conversations, vocab)
        progress("agents: making prompts", 1, 1)
        return users

    def _results(
        self,
        users: Sequence[User],
        records: Sequence[Record],
        seconds: float,
        block_tokens: int,
        inside: dict[str, Any],
    ) -> Results:
        done = [record for record in records if record.done]
        failed = [
            f"the rest of {one.conversation}: its request {one.number} failed: {one.error}"
            for one in records
            if one.error
        ]
        late = overtaken(records)
        possible = dict(
            zip(done, reusable([record.ask.prompt for record in done], block_tokens), strict=True)
        )
        rows = []
        for turns in (FIRST, LATER, ALL):
            wanted = [
                record for record in records if turns == ALL or (record.number == 1) == (turns == FIRST)
            ]
            total = sum(
                turns == ALL or (number == 0) == (turns == FIRST)
                for user in users
                for number in range(len(user.asks))
            )
            worst = max((late[record] for record in wanted), default=0.0)
            rows.append(
                {"turns": turns, "requests": total, **_figures(wanted, possible), "overtaken_s": worst}
            )
        output = sum(record.generated for record in records)
        rows[-1] |= {"seconds": seconds, "output_tokens": output, "tokens_per_s": output / max(seconds, 1e-9)}
        rows[-1] |= {
            "engine": inside,
            "records": [_as_dict(record, possible.get(record)) for record in records],
        }
        return Results(rows if done else [], failed)

    def draw(self, axes: Any, rows: list[dict[str, Any]]) -> None:
        """Over time: waiting and running requests, reuse, time to first token."""
        records, seconds = rows[-1]["records"], rows[-1]["seconds"]
        crowd, reuse, ttft = axes
        for name, spans in (
            ("waiting", _spans(records, "submit_s", "start_s")),
            ("running", _spans(records, "start_s", "end_s")),
        ):
            crowd.step(*_counts(spans, seconds), where="post", label=name)
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
            ttft.plot(
                [one["submit_s"] for one in dots],
                [one["first_s"] - one["submit_s"] for one in dots],
                ".",
                markersize=4,
                label=name,
            )
        ttft.set_ylabel("s to first token")
        ttft.set_xlabel("seconds since the start (of a request: when it was sent)")
        ttft.legend(fontsize=8)


def _figures(records: Sequence[Record], possible: dict[Record, int]) -> dict[str, Any]:
    """Of finished requests."""
    done = [record for record in records if record.done]
    source: Counter[str] = Counter()
    for record in done:
        source.update(record.source or {})
    prompts = sum(len(record.ask.prompt) for record in done)
    could = sum(possible[record] for record in done)
    told = (
        sum(len(record.ask.prompt) for record in done if record.source is not None) == prompts and prompts > 0
    )
    reused = prompts - source["computed"]
    gaps = [
        (late - early) / num
        for record in done
        for (early, _), (late, num) in zip(record.token_s, record.token_s[1:], strict=False)
    ]
    return {
        "done": len(done),
        "failed": sum(record.error is not None for record in records),
        "prompt_tokens": prompts,
        "source": dict(source),
        "reused": reused / prompts if told else None,
        "reusable": could / prompts if prompts else None,
        "of_reusable": reused / could if told and could else None,
        "ttft_s": percentiles(
            [record.first_s - record.submit_s for record in done if record.first_s is not None]
        ),
        "latency_s": percentiles(
            [record.end_s - record.submit_s for record in done if record.end_s is not None]
        ),
        "waiting_s": percentiles([record.waited_s for record in done if record.waited_s is not None]),
        "between_tokens_ms": percentiles([1000 * gap for gap in gaps]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p95, p99 = (float(one) for one in np.percentile(values, [50, 95, 99]))
    return {"p50": p50, "p95": p95, "p99": p99, "max": max(values)}


def overtaken(records: Sequence[Record]) -> dict[Record, float]:
    """The worst overtaking of each request, in seconds: how much later a request arrived that got its first
    token sooner. Requests without a first token count as overtaken; requests of the same step do not."""
    never = float("inf")
    found: dict[Record, float] = {}
    latest = 0.0  # latest arrival among requests with an earlier first token
    in_order = sorted(records, key=lambda one: never if one.first_s is None else one.first_s)
    for _, together in groupby(in_order, key=lambda one: one.first_s):
        some = list(together)
        found |= {record: max(0.0, latest - record.submit_s) for record in some}
        latest = max(latest, *(record.submit_s for record in some))
    return found


def _as_dict(record: Record, possible: int | None) -> dict[str, Any]:
    start_s = None if record.waited_s is None else record.submit_s + record.waited_s
    return {
        "conversation": record.conversation,
        "number": record.number,
        "prompt_tokens": len(record.ask.prompt),
        "output_tokens": record.generated,
        "submit_s": record.submit_s,
        "start_s": start_s,
        "first_s": record.first_s,
        "end_s": record.end_s,
        "source": record.source,
        "reusable_tokens": possible,
        "error": record.error,
    }


def _spans(records: Sequence[dict[str, Any]], start: str, end: str) -> list[tuple[float, float | None]]:
    """When each was in that state. Where the server does not say when a request started, its first token
    does."""

    def at(record: dict[str, Any], name: str) -> float | None:
        found: float | None = record[name]
        return record["first_s"] if found is None and name == "start_s" else found

    return [(begun, at(record, end)) for record in records if (begun := at(record, start)) is not None]


def _counts(spans: Sequence[tuple[float, float | None]], seconds: float) -> tuple[list[float], list[int]]:
    """How many there were at each moment."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans if end is not None])
    times, counts = [0.0], [0]
    for at_s, change in changes:
        times.append(at_s)
        counts.append(counts[-1] + change)
    return [*times, seconds], [*counts, counts[-1]]
