"""Every figure of the engine under its own name: no two of them are equal here, so that none can stand in for
another."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.contract import SamplingParams, TokenEvent
from penstock.engine.stats import EngineStats
from penstock.figures import (
    ExpertFigures,
    Histogram,
    ResidencyFigures,
    SessionFigures,
    SnapshotFigures,
    Traffic,
)
from penstock.server.metrics import exposition
from penstock.server.replies import usage_of
from penstock.server.seats import RequestFigures
from penstock.text.answer import ChoiceText, Prompt, Wants
from tests.cpu.server.served import Served

BOUNDS = (0.5, 1.0)


def histogram(first: int) -> Histogram:
    """Its three counts and its sum are its own."""
    return Histogram(BOUNDS, [first, first + 1, first + 2], first + 0.25)


ROUTES = (("device", "host"), ("host", "device"), ("host", "ssd"))
STATS = EngineStats(
    requests={"waiting": 1, "loading": 2, "running": 3, "retracted": 4},
    prompt_tokens={"device": 11, "host": 12, "ssd": 13, "remote": 14, "computed": 15},
    generated_tokens=21,
    kv_blocks={"device": {"free": 31, "active": 32}, "host": {"free": 33, "idle": 34}},
    retractions=41,
    expected_tokens={"chat": 43, "poet:messages": 44},
    host_steps=43,
    blocked_s={"result": 51.5, "save": 52.5, "settle": 53.5},
    ttft=histogram(100),
    inter_token=histogram(200),
    steps=61,
    sanitizer={"race": 71},
    cache={"hits": 81, "misses": 82, "evictions": 83, "duplicate_seals": 84, "promoted": 85},
    traffic=Traffic(
        bytes={ROUTES[0]: 1001, ROUTES[1]: 1002},
        seconds={ROUTES[0]: histogram(400), ROUTES[1]: histogram(500)},
        in_flight={ROUTES[1]: 1011, ROUTES[2]: 1012},
        failures={("ssd", "read"): 1021, ("remote", "slow"): 1022},
        skipped={"full": 1031, "late": 1032},
        leases_open=1041,
        postponed=1061,
        checksum_failures={"ssd": 1051, "remote": 1052},
        usable={"ssd": True, "remote": False},
    ),
    resume=histogram(300),
    load_exposed_s=91.5,
    sessions=SessionFigures(*range(2001, 2015)),
    snapshots=SnapshotFigures(*range(3001, 3011)),
    drafted=(50, 40, 30),
    accepted=(20, 7, 0),
    residency=ResidencyFigures(4001, 4002, 4003.5, histogram(600)),
    experts=ExpertFigures(*range(5001, 5010), waited_s=5010.5),
)


class Fixed:
    """An engine that only has figures."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats

    def stats(self) -> EngineStats:
        return self._stats


def scraped(stats: EngineStats) -> dict[str, float]:
    engine: Any = Fixed(stats)
    families = text_string_to_metric_families(
        exposition(engine.stats(), RequestFigures(), "tiny", 1).decode()
    )
    return {
        " ".join(
            (sample.name.removeprefix("penstock_"), *(sample.labels[name] for name in sorted(sample.labels)))
        ): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("penstock_")
        and not sample.name.endswith("_created")
        and "model" not in sample.labels
    }


def buckets(name: str, first: int, route: str = "") -> dict[str, float]:
    """With the labels in the order of their names: dst, le, src."""
    dst, src = (f" {route.split()[1]}", f" {route.split()[0]}") if route else ("", "")
    counts = {"0.5": first, "1.0": 2 * first + 1, "+Inf": 3 * first + 3}
    found = {f"{name}_bucket{dst} {bound}{src}": float(count) for bound, count in counts.items()}
    return {**found, f"{name}_count{dst}{src}": 3.0 * first + 3, f"{name}_sum{dst}{src}": first + 0.25}


def test_every_figure_is_shown_under_its_own_name() -> None:
    assert scraped(STATS) == {
        **{f"requests {state}": num for state, num in STATS.requests.items()},
        **{f"prompt_tokens_total {source}": num for source, num in STATS.prompt_tokens.items()},
        "generated_tokens_total": 21,
        "kv_blocks free device": 31,
        "kv_blocks active device": 32,
        "kv_blocks free host": 33,
        "kv_blocks idle host": 34,
        "retractions_total": 41,
        "expected_output_tokens chat": 43,
        "expected_output_tokens poet:messages": 44,
        "host_read_steps_total": 43,
        **{f"engine_blocked_seconds_total {where}": seconds for where, seconds in STATS.blocked_s.items()},
        "steps_total": 61,
        "sanitizer_reports_total race": 71,
        "load_exposed_seconds_total": 91.5,
        "sessions known": 2001,
        "sessions retained": 2004,
        "retained_blocks": 2005,
        "session_tenants known": 2003,
        "session_tenants retaining": 2007,
        "retentions_cut_total": 2008,
        "sessions_released_total": 2009,
        "released_blocks_total": 2010,
        "prefetches_total started": 2012,
        "prefetches_total finished": 2013,
        "prefetches_total refused": 2014,
        "spec_proposed_total 1": 50,
        "spec_proposed_total 2": 40,
        "spec_proposed_total 3": 30,
        "spec_accepted_total 1": 20,
        "spec_accepted_total 2": 7,
        "spec_accepted_total 3": 0,
        "spec_accept_length_bucket 0.0": 30,
        "spec_accept_length_bucket 1.0": 43,
        "spec_accept_length_bucket 2.0": 50,
        "spec_accept_length_bucket +Inf": 50,
        "spec_accept_length_count": 50,
        "spec_accept_length_sum": 27,
        "residency_parts_fetched_total": 4001,
        "residency_rescores_total": 4002,
        "residency_rescore_seconds_total": 4003.5,
        **buckets("residency_recall_mass", 600),
        "snapshots known": 3001,
        "snapshots damaged": 3004,
        "snapshot_calls_waiting": 3010,
        "snapshot_pinned_blocks": 3002,
        "snapshot_pinned_blocks_max": 3003,
        "snapshot_events_total taken": 3005,
        "snapshot_events_total continued": 3006,
        "snapshot_events_total deleted": 3007,
        "snapshot_events_total expired": 3008,
        "snapshot_events_total refused": 3009,
        "transfer_bytes_total host device": 1001,
        "transfer_bytes_total device host": 1002,
        "transfer_bytes_total ssd host": 0,
        "transfers_inflight host device": 0,
        "transfers_inflight device host": 1011,
        "transfers_inflight ssd host": 1012,
        "transfer_failures_total read ssd": 1021,
        "transfer_failures_total slow remote": 1022,
        "saves_skipped_total full": 1031,
        "saves_skipped_total late": 1032,
        "saves_postponed_total": 1061,
        "leases_open": 1041,
        "checksum_failures_total ssd": 1051,
        "checksum_failures_total remote": 1052,
        "tier_usable ssd": 1,
        "tier_usable remote": 0,
        "expert_slots": 5001,
        "experts": 5002,
        "experts_wanted_total yes": 5003,
        "experts_wanted_total no": 5004,
        "experts_guessed_total": 5005,
        "experts_guesses_used_total": 5006,
        "experts_foreseen_total": 5007,
        "experts_foreseeable_total": 5008,
        "expert_copy_bytes_total": 5009,
        "expert_wait_seconds_total": 5010.5,
        **buckets("ttft_seconds", 100),
        **buckets("inter_token_seconds", 200),
        **buckets("resume_seconds", 300),
        **buckets("transfer_seconds", 400, "device host"),
        **buckets("transfer_seconds", 500, "host device"),
    }


def test_the_statistics_of_the_cache_are_those_of_the_engine(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.engine, "stats", lambda: STATS)
    assert served.http.get("/cache/stats").json() == {
        "kv_blocks": {
            "device": {"total": 63, "free": 31, "active": 32},
            "host": {"total": 67, "free": 33, "idle": 34},
        },
        "cache": STATS.cache,
        "prompt_tokens": STATS.prompt_tokens,
        "retractions": 41,
        "expected_output_tokens": {"chat": 43, "poet:messages": 44},
        "sessions": {
            "known": 2001,
            "known_blocks": 2002,
            "tenants": 2003,
            "retained": 2004,
            "retained_blocks": 2005,
            "retained_blocks_max": 2006,
            "retaining_tenants": 2007,
            "retentions_cut": 2008,
            "releases": 2009,
            "released_blocks": 2010,
            "prefetches_under_way": 2011,
            "prefetches_started": 2012,
            "prefetches_finished": 2013,
            "prefetches_refused": 2014,
        },
        "snapshots": {
            "known": 3001,
            "pinned_blocks": 3002,
            "pinned_blocks_max": 3003,
            "damaged": 3004,
            "taken": 3005,
            "continued": 3006,
            "deleted": 3007,
            "expired": 3008,
            "refused": 3009,
            "waiting": 3010,
        },
        "traffic": {
            "bytes": {"device to host": 1001, "host to device": 1002},
            "skipped_saves": {"full": 1031, "late": 1032},
            "leases_open": 1041,
            "failures": {"ssd: read": 1021, "remote: slow": 1022},
            "checksum_failures": {"ssd": 1051, "remote": 1052},
            "usable": {"ssd": True, "remote": False},
        },
    }


def test_usage_adds_up_what_was_proposed_for_each_choice_and_kept(served: Served) -> None:
    """Nothing is said where nothing was proposed."""
    tokenizer = served.engine.tokenizer
    prompt = Prompt([1, 2], "ab", (0, 1))
    choices = [ChoiceText(tokenizer, SamplingParams(max_tokens=9), (), prompt, Wants()) for _ in range(2)]
    assert "completion_tokens_details" not in usage_of([prompt], choices, 2)
    for choice, drafted, accepted in ((choices[0], 4, 1), (choices[1], 3, 3), (choices[0], 2, 2)):
        choice.feed([TokenEvent("r", (5,) * (accepted + 1), drafted=drafted, accepted=accepted)])
    assert usage_of([prompt], choices, 2)["completion_tokens_details"] == {
        "draft_tokens": 9,
        "accepted_draft_tokens": 6,
    }
