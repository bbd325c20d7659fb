"""The figures of engine and server in Prometheus' words, and some of them in vLLM's. Owns names and labels;
counts nothing itself."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from prometheus_client import GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from penstock import __version__
from penstock.engine.stats import EngineStats
from penstock.figures import Histogram, ResidencyFigures, SessionFigures, SnapshotFigures, Traffic
from penstock.server.seats import RequestFigures

CONTENT_TYPE = CONTENT_TYPE_LATEST


class MadeFamilies(Collector):
    """Families that are made already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


Labels = str | tuple[str, ...]


def _family(
    kind: Any,
    name: str,
    text: str,
    values: Any,
    *labels: str,
    fixed: Mapping[str, str] = MappingProxyType({}),
) -> Metric:
    """A figure, or several by their labels; `fixed` ones are the same for all of them. A figure is a number
    or a histogram."""
    metric: Metric = kind(name, text, labels=[*fixed, *labels])
    by_labels: Mapping[Labels, Any] = values if labels else {(): values}
    for key, value in by_labels.items():
        found = [*fixed.values(), *((key,) if isinstance(key, str) else key)]
        if isinstance(value, Histogram):
            metric.add_metric(found, buckets=_buckets(value), sum_value=value.total)  # type: ignore[attr-defined]
        else:
            metric.add_metric(found, value)  # type: ignore[attr-defined]
    return metric


counter = partial(_family, CounterMetricFamily)
gauge = partial(_family, GaugeMetricFamily)
histogram = partial(_family, HistogramMetricFamily)


def _buckets(counted: Histogram) -> list[tuple[str, float]]:
    """Prometheus counts upwards: each bucket holds all below it."""
    return list(zip((*map(repr, counted.bounds), "+Inf"), accumulate(counted.counts), strict=True))


def _of_engine(stats: EngineStats) -> Iterator[Metric]:
    yield gauge("penstock_requests", "Requests by state.", stats.requests, "state")
    sources = "Prompt tokens by where their KV came from; the sources sum to all prompt tokens."
    yield counter("penstock_prompt_tokens", sources, stats.prompt_tokens, "source")
    yield counter("penstock_generated_tokens", "Tokens generated.", stats.generated_tokens)
    yield from _drafts(stats.drafted, stats.accepted)
    blocks = {
        (tier, state): count
        for tier, by_state in stats.kv_blocks.items()
        for state, count in by_state.items()
    }
    yield gauge("penstock_kv_blocks", "KV blocks by tier and state.", blocks, "tier", "state")
    if stats.traffic is not None:
        yield from _traffic(stats.traffic)
        exposed = "Seconds that requests waited for their KV while nothing else was computed."
        yield counter("penstock_load_exposed_seconds", exposed, stats.load_exposed_s)
    yield counter(
        "penstock_host_read_steps",
        "Steps that read KV which deep requests have in host memory.",
        stats.host_steps,
    )
    yield from _residency(stats.residency)
    yield counter(
        "penstock_retractions", "Running requests that gave up their device slots.", stats.retractions
    )
    expected = "Output tokens that a request is admitted for, by route: what most of the last ones wrote."
    yield gauge("penstock_expected_output_tokens", expected, stats.expected_tokens, "route")
    blocked = "Seconds that the engine thread spent waiting or in cache calls."
    yield counter("penstock_engine_blocked_seconds", blocked, stats.blocked_s, "where")
    yield from _sessions(stats.sessions)
    yield from _snapshots(stats.snapshots)
    yield counter("penstock_steps", "Forward passes.", stats.steps)
    if stats.sanitizer:
        yield counter(
            "penstock_sanitizer_reports", "Findings of the race sanitizer, by kind.", stats.sanitizer, "kind"
        )
    yield histogram(
        "penstock_resume_seconds", "Seconds from a retraction to the first step after it.", stats.resume
    )
    yield histogram("penstock_ttft_seconds", "Seconds from submit to the first token.", stats.ttft)
    yield histogram(
        "penstock_inter_token_seconds", "Seconds between tokens of one request.", stats.inter_token
    )


def _drafts(drafted: Sequence[int], accepted: Sequence[int]) -> Iterator[Metric]:
    """Of every place behind a request's last token. `accepted[n]` steps have kept more than n drafts."""
    if not drafted:
        return
    places, num = [str(place) for place in range(1, len(drafted) + 1)], drafted[0]
    for name, what, counts in (
        ("penstock_spec_proposed", "verified", drafted),
        ("penstock_spec_accepted", "kept", accepted),
    ):
        about = f"Draft tokens that were {what}, by their place behind the last token."
        yield counter(name, about, dict(zip(places, counts, strict=True)), "place")
    buckets = [(str(float(kept)), num - more) for kept, more in enumerate(accepted)]
    about = "Draft tokens of one request that a step kept."
    yield HistogramMetricFamily(
        "penstock_spec_accept_length", about, buckets=[*buckets, ("+Inf", num)], sum_value=sum(accepted)
    )


def _residency(figures: ResidencyFigures) -> Iterator[Metric]:
    about = "Parts of 64 tokens copied from host memory for requests that attend to a part of their context."
    yield counter("penstock_residency_parts_fetched", about, figures.parts_fetched)
    yield counter(
        "penstock_residency_rescores", "Times that the parts of such a request were scored.", figures.scorings
    )
    yield counter(
        "penstock_residency_rescore_seconds",
        "Seconds that decode steps took longer for it.",
        figures.scoring_s,
    )
    about = "Share of attention that was on the resident part of the context, in steps that read all of it."
    yield histogram("penstock_residency_recall_mass", about, figures.recall)


def _traffic(traffic: Traffic) -> Iterator[Metric]:
    route = ("src", "dst")
    pairs = {**traffic.in_flight, **traffic.bytes}
    moved = {pair: traffic.bytes.get(pair, 0) for pair in pairs}
    flying = {pair: traffic.in_flight.get(pair, 0) for pair in pairs}
    yield counter("penstock_transfer_bytes", "Bytes moved between tiers.", moved, *route)
    yield histogram(
        "penstock_transfer_seconds",
        "Seconds from submitting a transfer to seeing it over.",
        traffic.seconds,
        *route,
    )
    yield gauge("penstock_transfers_inflight", "Transfers submitted and not yet seen over.", flying, *route)
    yield counter(
        "penstock_transfer_failures", "Transfers that did not arrive.", traffic.failures, "tier", "reason"
    )
    damaged = "Blocks that were read and were not what had been written: they are missing from then on."
    yield counter("penstock_checksum_failures", damaged, traffic.checksum_failures, "tier")
    yield gauge(
        "penstock_tier_usable",
        "1 while a tier is asked for blocks, 0 while it is fenced off.",
        traffic.usable,
        "tier",
    )
    yield counter("penstock_saves_skipped", "Blocks that were not saved.", traffic.skipped, "reason")
    yield counter(
        "penstock_saves_postponed",
        "Blocks that stayed on the device alone while host memory was full.",
        traffic.postponed,
    )
    yield gauge(
        "penstock_leases_open", "Prefixes in colder tiers kept for requests in line.", traffic.leases_open
    )


def _sessions(figures: SessionFigures) -> Iterator[Metric]:
    counted = {"known": figures.known, "retained": figures.retained}
    yield gauge(
        "penstock_sessions", "Conversations that are known, and those whose KV is retained.", counted, "state"
    )
    yield gauge("penstock_retained_blocks", "KV blocks of retained sessions.", figures.retained_blocks)
    tenants = {"known": figures.tenants, "retaining": figures.retaining_tenants}
    yield gauge(
        "penstock_session_tenants", "Tenants that have sessions, and that retain some.", tenants, "state"
    )
    cut = "Sessions whose KV is no longer retained before its time, for want of room."
    yield counter("penstock_retentions_cut", cut, figures.retentions_cut)
    yield counter("penstock_sessions_released", "Sessions whose clients gave up their KV.", figures.releases)
    yield counter(
        "penstock_released_blocks", "Copies of KV blocks forgotten by that.", figures.released_blocks
    )
    asked = {
        "started": figures.prefetches_started,
        "finished": figures.prefetches_finished,
        "refused": figures.prefetches_refused,
    }
    yield counter("penstock_prefetches", "Prefetches that clients asked for.", asked, "state")


def _snapshots(figures: SnapshotFigures) -> Iterator[Metric]:
    yield gauge(
        "penstock_snapshots",
        "Snapshots by state.",
        {"known": figures.known, "damaged": figures.damaged},
        "state",
    )
    yield gauge(
        "penstock_snapshot_calls_waiting", "Calls about snapshots that wait for a tier.", figures.waiting
    )
    yield gauge(
        "penstock_snapshot_pinned_blocks",
        "KV blocks that snapshots pin in the last tier.",
        figures.pinned_blocks,
    )
    yield gauge(
        "penstock_snapshot_pinned_blocks_max",
        "KV blocks that snapshots may pin there.",
        figures.pinned_blocks_max,
    )
    asked = {name: getattr(figures, name) for name in ("taken", "continued", "deleted", "expired", "refused")}
    yield counter("penstock_snapshot_events", "What became of snapshots.", asked, "event")


def _of_requests(figures: RequestFigures, model: str) -> Iterator[Metric]:
    """Requests as their clients saw them."""
    fixed = {"model": model}
    build = "1, by the version that runs and the model that it serves."
    yield gauge("penstock_build_info", build, 1, fixed={"version": __version__, **fixed})
    answered, ended = dict(sorted(figures.by_status.items())), dict(sorted(figures.by_finish.items()))
    yield counter(
        "penstock_http_requests", "HTTP requests answered.", answered, "path", "status", fixed=fixed
    )
    yield counter("penstock_finished", "Generations by how they ended.", ended, "reason", fixed=fixed)
    yield histogram(
        "penstock_e2e_seconds",
        "Seconds from a generating request to the end of its answer.",
        figures.e2e,
        fixed=fixed,
    )
    yield histogram(
        "penstock_queue_seconds",
        "Seconds that requests waited for their first step.",
        figures.queue,
        fixed=fixed,
    )
    yield histogram(
        "penstock_prompt_length_tokens", "Prompt tokens of one request.", figures.prompt_tokens, fixed=fixed
    )
    yield histogram(
        "penstock_output_length_tokens",
        "Generated tokens of one request.",
        figures.output_tokens,
        fixed=fixed,
    )


def _vllm(stats: EngineStats, figures: RequestFigures, labels: dict[str, str]) -> Iterator[Metric]:
    """Under the names that dashboards and autoscalers of vLLM read. The text of each is where it comes
    from."""
    device = stats.kv_blocks.get("device", {})
    total = sum(device.values())
    # idle blocks are a cache and can be evicted for any request
    free = device.get("free", 0) + device.get("idle", 0)
    waiting = sum(stats.requests.get(state, 0) for state in ("waiting", "retracted"))
    running = sum(stats.requests.get(state, 0) for state in ("running", "loading"))
    prompts = sum(stats.prompt_tokens.values())
    for name, source, now in (
        ("num_requests_running", "penstock_requests, running and loading", running),
        ("num_requests_waiting", "penstock_requests, waiting and retracted", waiting),
        (
            "kv_cache_usage_perc",
            "penstock_kv_blocks of the device, neither free nor idle; 1 is all",
            1 - free / total if total else 0.0,
        ),
    ):
        yield gauge(f"vllm:{name}", source, now, fixed=labels)
    for name, source, count in (
        ("prompt_tokens", "penstock_prompt_tokens_total", prompts),
        ("generation_tokens", "penstock_generated_tokens_total", stats.generated_tokens),
        ("num_preemptions", "penstock_retractions_total", stats.retractions),
        ("prefix_cache_queries", "penstock_prompt_tokens_total", prompts),
        (
            "prefix_cache_hits",
            "penstock_prompt_tokens_total, all but computed",
            prompts - stats.prompt_tokens.get("computed", 0),
        ),
    ):
        yield counter(f"vllm:{name}", source, count, fixed=labels)
    finished = {reason: figures.by_finish.get(reason, 0) for reason in ("stop", "length")}
    yield counter(
        "vllm:request_success", "penstock_finished_total", finished, "finished_reason", fixed=labels
    )
    for name, source, counted in (
        ("time_to_first_token_seconds", "penstock_ttft_seconds", stats.ttft),
        ("inter_token_latency_seconds", "penstock_inter_token_seconds", stats.inter_token),
        ("time_per_output_token_seconds", "penstock_inter_token_seconds", stats.inter_token),
        ("e2e_request_latency_seconds", "penstock_e2e_seconds", figures.e2e),
        ("request_queue_time_seconds", "penstock_queue_seconds", figures.queue),
        ("request_prompt_tokens", "penstock_prompt_length_tokens", figures.prompt_tokens),
        ("request_generation_tokens", "penstock_output_length_tokens", figures.output_tokens),
    ):
        yield histogram(f"vllm:{name}", source, counted, fixed=labels)


def exposition(stats: EngineStats, figures: RequestFigures, model: str, engine_pid: int) -> bytes:
    """The body of GET /metrics: one snapshot, so that its figures belong together. Process figures are the
    engine's, even if a front process answers."""
    registry = CollectorRegistry(auto_describe=False)
    vllm = _vllm(stats, figures, {"model_name": model, "engine": "0"})
    registry.register(MadeFamilies([*_of_engine(stats), *_of_requests(figures, model), *vllm]))
    PlatformCollector(registry=registry)
    if engine_pid == os.getpid():
        GCCollector(registry=registry)
    ProcessCollector(pid=lambda: engine_pid, registry=registry)
    return generate_latest(registry)
