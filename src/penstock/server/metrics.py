"""The figures of engine and server in Prometheus' words, and some of them in vLLM's. Owns names and labels;
counts nothing itself."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

from prometheus_client import GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from penstock import __version__
from penstock.engine.stats import EngineStats
from penstock.figures import Histogram
from penstock.server.seats import RequestFigures

CONTENT_TYPE = CONTENT_TYPE_LATEST
_KINDS: Mapping[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}

# Each line: kind, name, the figure, its labels, and what it is. A figure is a number, a histogram, or several
# of them by their labels.
_ENGINE = """
gauge penstock_requests stats.requests state: Requests by state.
counter penstock_prompt_tokens stats.prompt_tokens source: \
Prompt tokens by where their KV came from; the sources sum to all prompt tokens.
counter penstock_generated_tokens stats.generated_tokens: Tokens generated.
gauge penstock_kv_blocks blocks tier state: \
KV blocks by tier and state; tiers whose name ends in states have those of hybrid models.
counter penstock_host_read_steps stats.host_steps: \
Steps that read KV which deep requests have in host memory.
counter penstock_residency_parts_fetched stats.residency.parts_fetched: \
Parts of 64 tokens copied from host memory for requests that attend to a part of their context.
counter penstock_residency_rescores stats.residency.scorings: \
Times that the parts of such a request were scored.
counter penstock_residency_rescore_seconds stats.residency.scoring_s: \
Seconds that decode steps took longer for it.
histogram penstock_residency_recall_mass stats.residency.recall: \
Share of attention that was on the resident part of the context, in steps that read all of it.
counter penstock_retractions stats.retractions: Running requests that gave up their device slots.
gauge penstock_expected_output_tokens stats.expected_tokens route: \
Output tokens that a request is admitted for, by route: what most of the last ones wrote.
counter penstock_engine_blocked_seconds stats.blocked_s where: \
Seconds that the engine thread spent waiting or in cache calls.
gauge penstock_sessions sessions state: Conversations that are known, and those whose KV is retained.
gauge penstock_retained_blocks stats.sessions.retained_blocks: KV blocks of retained sessions.
gauge penstock_session_tenants tenants state: Tenants that have sessions, and that retain some.
counter penstock_retentions_cut stats.sessions.retentions_cut: \
Sessions whose KV is no longer retained before its time, for want of room.
counter penstock_sessions_released stats.sessions.releases: Sessions whose clients gave up their KV.
counter penstock_released_blocks stats.sessions.released_blocks: Copies of KV blocks forgotten by that.
counter penstock_prefetches prefetches state: Prefetches that clients asked for.
gauge penstock_snapshots snapshots state: Snapshots by state.
gauge penstock_snapshot_calls_waiting stats.snapshots.waiting: Calls about snapshots that wait for a tier.
gauge penstock_snapshot_pinned_blocks stats.snapshots.pinned_blocks: \
KV blocks that snapshots pin in the last tier.
gauge penstock_snapshot_pinned_blocks_max stats.snapshots.pinned_blocks_max: \
KV blocks that snapshots may pin there.
counter penstock_snapshot_events snapshot_events event: What became of snapshots.
counter penstock_steps stats.steps: Forward passes.
histogram penstock_resume_seconds stats.resume: Seconds from a retraction to the first step after it.
histogram penstock_ttft_seconds stats.ttft: Seconds from submit to the first token.
histogram penstock_inter_token_seconds stats.inter_token: Seconds between tokens of one request.
"""
_TRAFFIC = """
counter penstock_load_exposed_seconds stats.load_exposed_s: \
Seconds that requests waited for their KV while nothing else was computed.
counter penstock_transfer_bytes moved src dst: Bytes moved between tiers.
histogram penstock_transfer_seconds stats.traffic.seconds src dst: \
Seconds from submitting a transfer to seeing it over.
gauge penstock_transfers_inflight flying src dst: Transfers submitted and not yet seen over.
counter penstock_transfer_failures stats.traffic.failures tier reason: Transfers that did not arrive.
counter penstock_checksum_failures stats.traffic.checksum_failures tier: \
Blocks that were read and were not what had been written: they are missing from then on.
gauge penstock_tier_usable stats.traffic.usable tier: \
1 while a tier is asked for blocks, 0 while it is fenced off.
counter penstock_saves_skipped stats.traffic.skipped reason: Blocks that were not saved.
counter penstock_saves_postponed stats.traffic.postponed: \
Blocks that stayed on the device alone while host memory was full.
gauge penstock_leases_open stats.traffic.leases_open: Prefixes in colder tiers kept for requests in line.
"""
_EVENTS = """
counter penstock_kv_events stats.kv_events.made type: Events about KV blocks that were published, by type.
counter penstock_kv_events_dropped stats.kv_events.dropped: \
Changes of KV blocks for which the queue of events had no room: all is published anew after that.
"""
# Of a model whose experts come and go.
_EXPERTS = """
gauge penstock_expert_slots stats.experts.num_slots: Experts that the device has room for.
gauge penstock_experts stats.experts.num_experts: Experts of all layers.
counter penstock_experts_wanted wanted found: \
Experts that a layer's tokens hit, by whether they were on the device or on their way to it.
counter penstock_experts_guessed stats.experts.guessed: Experts copied before a layer wanted them.
counter penstock_experts_guesses_used stats.experts.guesses_used: Of these, wanted before they left.
counter penstock_experts_foreseen stats.experts.foreseen: \
Wanted experts that the router chose one layer before.
counter penstock_experts_foreseeable stats.experts.foreseeable: \
Wanted experts of layers whose router was applied before.
counter penstock_expert_copy_bytes stats.experts.copied_bytes: Bytes of experts copied to the device.
counter penstock_expert_wait_seconds stats.experts.waited_s: \
Seconds that steps waited for copies of experts that they wanted and the device did not have.
"""
# Of every place after a request's last token, while drafts are verified.
_DRAFTS = """
counter penstock_spec_proposed proposed place: \
Draft tokens that were verified, by their place behind the last token.
counter penstock_spec_accepted accepted place: \
Draft tokens that were kept, by their place behind the last token.
histogram penstock_spec_accept_length kept: Draft tokens of one request that a step kept.
"""
_SANITIZER = """
counter penstock_sanitizer_reports stats.sanitizer kind: Findings of the race sanitizer, by kind.
"""
# Requests as their clients saw them.
_REQUESTS = """
counter penstock_http_requests answered path status: HTTP requests answered.
counter penstock_finished ended reason: Generations by how they ended.
histogram penstock_e2e_seconds figures.e2e: Seconds from a generating request to the end of its answer.
histogram penstock_queue_seconds figures.queue: Seconds that requests waited for their first step.
histogram penstock_prompt_length_tokens figures.prompt_tokens: Prompt tokens of one request.
histogram penstock_output_length_tokens figures.output_tokens: Generated tokens of one request.
"""
_BUILD = """
gauge penstock_build_info build version model: 1, by the version that runs and the model that it serves.
"""
# Under the names that dashboards and autoscalers of vLLM read. The text of each is where it comes from.
_VLLM = """
gauge vllm:num_requests_running running: penstock_requests, running and loading
gauge vllm:num_requests_waiting waiting: penstock_requests, waiting and retracted
gauge vllm:kv_cache_usage_perc usage: penstock_kv_blocks of the device, neither free nor idle; 1 is all
counter vllm:prompt_tokens prompts: penstock_prompt_tokens_total
counter vllm:generation_tokens stats.generated_tokens: penstock_generated_tokens_total
counter vllm:num_preemptions stats.retractions: penstock_retractions_total
counter vllm:prefix_cache_queries prompts: penstock_prompt_tokens_total
counter vllm:prefix_cache_hits cached: penstock_prompt_tokens_total, all but computed
counter vllm:request_success finished finished_reason: penstock_finished_total
histogram vllm:time_to_first_token_seconds stats.ttft: penstock_ttft_seconds
histogram vllm:inter_token_latency_seconds stats.inter_token: penstock_inter_token_seconds
histogram vllm:time_per_output_token_seconds stats.inter_token: penstock_inter_token_seconds
histogram vllm:e2e_request_latency_seconds figures.e2e: penstock_e2e_seconds
histogram vllm:request_queue_time_seconds figures.queue: penstock_queue_seconds
histogram vllm:request_prompt_tokens figures.prompt_tokens: penstock_prompt_length_tokens
histogram vllm:request_generation_tokens figures.output_tokens: penstock_output_length_tokens
"""
# Each table, and the labels that all of its lines have.
TABLES: Mapping[str, tuple[str, ...]] = {
    "engine": (_ENGINE,),
    "offload": (_TRAFFIC,),
    "drafts": (_DRAFTS,),
    "events": (_EVENTS,),
    "experts": (_EXPERTS,),
    "sanitizer": (_SANITIZER,),
    "requests": (_REQUESTS, "model"),
    "build": (_BUILD,),
    "vLLM": (_VLLM, "model_name", "engine"),
}
_FIXED = {"engine": "0"}  # the others are the model


class MadeFamilies(Collector):
    """Families that are made already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _families(table: str, figures: SimpleNamespace, fixed: Mapping[str, str]) -> Iterator[Metric]:
    """Of a table; `fixed` labels are the same for all of them."""
    for kind, name, path, labels, about in described(table):
        metric = _KINDS[kind](name, about, labels=[*fixed, *labels])
        values = attrgetter(path)(figures)
        for key, value in (values if labels else {(): values}).items():
            found = [*fixed.values(), *((key,) if isinstance(key, str) else key)]
            if isinstance(value, Histogram):
                metric.add_metric(found, buckets=_buckets(value), sum_value=value.total)
            else:
                metric.add_metric(found, value)
        yield metric


def _buckets(counted: Histogram) -> list[tuple[str, float]]:
    """Prometheus counts upwards: each bucket holds all below it."""
    return list(zip((*map(repr, counted.bounds), "+Inf"), accumulate(counted.counts), strict=True))


class Described(NamedTuple):
    """One line of a table."""

    kind: str
    name: str  # without the _total that Prometheus puts behind a counter's
    figure: str
    labels: tuple[str, ...]
    about: str


def described(table: str) -> Iterator[Described]:
    for line in table.strip().splitlines():
        head, _, about = line.partition(": ")
        kind, name, figure, *labels = head.split()
        yield Described(kind, name, figure, tuple(labels), about)


def _kept(stats: EngineStats) -> Histogram:
    """Drafts that a step kept. `accepted[n]` steps have kept more than n."""
    num = stats.drafted[0] if stats.drafted else 0
    upwards = [0, *(num - more for more in stats.accepted), num]
    counts = [above - below for below, above in pairwise(upwards)]
    bounds = tuple(map(float, range(len(stats.accepted))))
    return Histogram(bounds, counts, sum(stats.accepted))


def _figures(stats: EngineStats, figures: RequestFigures, model: str) -> SimpleNamespace:
    """What the tables name."""
    device, sessions, snapshots = stats.kv_blocks.get("device", {}), stats.sessions, stats.snapshots
    total = sum(device.values())
    # idle blocks are a cache and can be evicted for any request
    free = device.get("free", 0) + device.get("idle", 0)
    prompts = sum(stats.prompt_tokens.values())
    traffic = stats.traffic
    flying, moved = ({}, {}) if traffic is None else (traffic.in_flight, traffic.bytes)
    events = ("taken", "continued", "deleted", "expired", "refused")

    def num(*states: str) -> int:
        return sum(stats.requests.get(state, 0) for state in states)

    return SimpleNamespace(
        stats=stats,
        figures=figures,
        blocks={(tier, state): n for tier, some in stats.kv_blocks.items() for state, n in some.items()},
        sessions={"known": sessions.known, "retained": sessions.retained},
        tenants={"known": sessions.tenants, "retaining": sessions.retaining_tenants},
        prefetches={
            name: getattr(sessions, f"prefetches_{name}") for name in ("started", "finished", "refused")
        },
        snapshots={"known": snapshots.known, "damaged": snapshots.damaged},
        snapshot_events={name: getattr(snapshots, name) for name in events},
        moved={**dict.fromkeys(flying, 0), **moved},
        flying={**dict.fromkeys(moved, 0), **flying},
        answered=dict(sorted(figures.by_status.items())),
        ended=dict(sorted(figures.by_finish.items())),
        running=num("running", "loading"),
        waiting=num("waiting", "retracted"),
        build={(__version__, model): 1},
        proposed={str(place): count for place, count in enumerate(stats.drafted, 1)},
        accepted={str(place): count for place, count in enumerate(stats.accepted, 1)},
        kept=_kept(stats),
        usage=1 - free / total if total else 0.0,
        wanted={} if stats.experts is None else {"yes": stats.experts.hit, "no": stats.experts.missed},
        prompts=prompts,
        cached=prompts - stats.prompt_tokens.get("computed", 0),
        finished={reason: figures.by_finish.get(reason, 0) for reason in ("stop", "length")},
    )


def exposition(stats: EngineStats, figures: RequestFigures, model: str, engine_pid: int) -> bytes:
    """The body of GET /metrics: one snapshot, so that its figures belong together. Process figures are the
    engine's, even if a front process answers."""
    registry, shown = CollectorRegistry(auto_describe=False), _figures(stats, figures, model)
    there = {"offload": stats.traffic is not None, "sanitizer": stats.sanitizer, "drafts": stats.drafted}
    there |= {"events": stats.kv_events is not None, "experts": stats.experts is not None}
    made = [
        family
        for name, (table, *labels) in TABLES.items()
        if there.get(name, True)
        for family in _families(table, shown, {label: _FIXED.get(label, model) for label in labels})
    ]
    registry.register(MadeFamilies(made))
    PlatformCollector(registry=registry)
    if engine_pid == os.getpid():
        GCCollector(registry=registry)
    ProcessCollector(pid=lambda: engine_pid, registry=registry)
    return generate_latest(registry)
