"""The figures of engine and server in Prometheus' words, and some of them in vLLM's. Owns names and labels; counts nothing itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from prometheus_client import GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from penstock import __version__
from penstock.engine.stats import EngineStats
from penstock.figures import Histogram, ResidencyFigures, SessionFigures, Traffic
from penstock.server.request_figures import RequestFigures

CONTENT_TYPE = CONTENT_TYPE_LATEST


class EngineCollector(Collector):
    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Any]:
        stats = self._stats
        yield _by_label(GaugeMetricFamily, "penstock_requests", "Requests by state.", "state", stats.requests)
        sources = "Prompt tokens by where their KV came from; the sources sum to all prompt tokens."
        yield _by_label(CounterMetricFamily, "penstock_prompt_tokens", sources, "source", stats.prompt_tokens)
        yield CounterMetricFamily("penstock_generated_tokens", "Tokens generated.", value=stats.generated_tokens)
        yield from _drafts(stats.drafted, stats.accepted)
        yield _blocks(stats.kv_blocks)
        if stats.traffic is not None:
            yield from _traffic(stats.traffic)
            exposed = "Seconds that requests waited for their KV while nothing else was computed."
            yield CounterMetricFamily("penstock_load_exposed_seconds", exposed, value=stats.load_exposed_s)
        about = "Steps that read KV which deep requests have in host memory."
        yield CounterMetricFamily("penstock_host_read_steps", about, value=stats.host_steps)
        yield from _residency(stats.residency)
        yield CounterMetricFamily("penstock_retractions", "Running requests that gave up their device slots.", value=stats.retractions)
        blocked = "Seconds that the engine thread spent waiting or in cache calls."
        yield _by_label(CounterMetricFamily, "penstock_engine_blocked_seconds", blocked, "where", stats.blocked_s)
        yield from _sessions(stats.sessions)
        yield CounterMetricFamily("penstock_steps", "Forward passes.", value=stats.steps)
        if stats.sanitizer:
            found = "Findings of the race sanitizer, by kind."
            yield _by_label(CounterMetricFamily, "penstock_sanitizer_reports", found, "kind", stats.sanitizer)
        yield _histogram("penstock_resume_seconds", "Seconds from a retraction to the first step after it.", stats.resume)
        yield _histogram("penstock_ttft_seconds", "Seconds from submit to the first token.", stats.ttft)
        yield _histogram("penstock_inter_token_seconds", "Seconds between tokens of one request.", stats.inter_token)


def _drafts(drafted: Sequence[int], accepted: Sequence[int]) -> Iterator[Any]:
    """Of every place behind a request's last token. `accepted[n]` steps have kept more than n drafts."""
    if not drafted:
        return
    places = [str(place) for place in range(1, len(drafted) + 1)]
    about = "Draft tokens that were verified, by their place behind the last token."
    yield _by_label(CounterMetricFamily, "penstock_draft_tokens", about, "place", dict(zip(places, drafted, strict=True)))
    about = "Draft tokens that were kept, by their place behind the last token."
    yield _by_label(CounterMetricFamily, "penstock_accepted_draft_tokens", about, "place", dict(zip(places, accepted, strict=True)))
    num = drafted[0]
    buckets = [(str(float(kept)), num - more) for kept, more in enumerate(accepted)]
    about = "Draft tokens of one request that a step kept."
    yield HistogramMetricFamily("penstock_accepted_draft_length", about, buckets=[*buckets, ("+Inf", num)], sum_value=sum(accepted))


def _residency(figures: ResidencyFigures) -> Iterator[Any]:
    about = "Parts of 64 tokens copied from host memory for requests that attend to a part of their context."
    yield CounterMetricFamily("penstock_residency_parts_fetched", about, value=figures.parts_fetched)
    yield CounterMetricFamily("penstock_residency_rescores", "Times that the parts of such a request were scored.", value=figures.scorings)
    about = "Seconds that decode steps took longer for it."
    yield CounterMetricFamily("penstock_residency_rescore_seconds", about, value=figures.scoring_s)
    about = "Share of attention that was on the resident part of the context, in steps that read all of it."
    yield _histogram("penstock_residency_recall_mass", about, figures.recall)


def _by_label(family: Any, name: str, text: str, label: str, values: Mapping[str, float]) -> Any:
    metric = family(name, text, labels=[label])
    for key, value in values.items():
        metric.add_metric([key], value)
    return metric


def _blocks(by_tier: dict[str, dict[str, int]]) -> GaugeMetricFamily:
    metric = GaugeMetricFamily("penstock_kv_blocks", "KV blocks by tier and state.", labels=["tier", "state"])
    for tier, by_state in by_tier.items():
        for state, count in by_state.items():
            metric.add_metric([tier, state], count)
    return metric


def _traffic(traffic: Traffic) -> Iterator[Any]:
    route = ("src", "dst")
    moved = CounterMetricFamily("penstock_transfer_bytes", "Bytes moved between tiers.", labels=route)
    taken = HistogramMetricFamily("penstock_transfer_seconds", "Seconds from submitting a transfer to seeing it over.", labels=route)
    flying = GaugeMetricFamily("penstock_transfers_inflight", "Transfers submitted and not yet seen over.", labels=route)
    for pair in {**traffic.in_flight, **traffic.bytes}:
        flying.add_metric(pair, traffic.in_flight.get(pair, 0))
        moved.add_metric(pair, traffic.bytes.get(pair, 0))
        if (histogram := traffic.seconds.get(pair)) is not None:
            taken.add_metric(pair, buckets=_buckets(histogram), sum_value=histogram.total)
    failed = CounterMetricFamily("penstock_transfer_failures", "Transfers that did not arrive.", labels=["tier", "reason"])
    for pair, count in traffic.failures.items():
        failed.add_metric(pair, count)
    damaged = "Blocks that were read and were not what had been written: they are missing from then on."
    usable = "1 while a tier is asked for blocks, 0 while it is fenced off."
    skipped = "Blocks that were not saved."
    yield from (moved, taken, flying, failed)
    yield _by_label(CounterMetricFamily, "penstock_checksum_failures", damaged, "tier", traffic.checksum_failures)
    yield _by_label(GaugeMetricFamily, "penstock_tier_usable", usable, "tier", traffic.usable)
    yield _by_label(CounterMetricFamily, "penstock_saves_skipped", skipped, "reason", traffic.skipped)
    postponed = "Blocks that stayed on the device alone while host memory was full."
    yield CounterMetricFamily("penstock_saves_postponed", postponed, value=traffic.postponed)
    yield GaugeMetricFamily("penstock_leases_open", "Prefixes in colder tiers kept for requests in line.", value=traffic.leases_open)


def _sessions(figures: SessionFigures) -> Iterator[Any]:
    counted = {"known": figures.known, "retained": figures.retained}
    yield _by_label(
        GaugeMetricFamily, "penstock_sessions", "Conversations that are known, and those whose KV is retained.", "state", counted
    )
    yield GaugeMetricFamily("penstock_retained_blocks", "KV blocks of retained sessions.", value=figures.retained_blocks)
    tenants = {"known": figures.tenants, "retaining": figures.retaining_tenants}
    yield _by_label(GaugeMetricFamily, "penstock_session_tenants", "Tenants that have sessions, and that retain some.", "state", tenants)
    cut = "Sessions whose KV is no longer retained before its time, for want of room."
    yield CounterMetricFamily("penstock_retentions_cut", cut, value=figures.retentions_cut)
    yield CounterMetricFamily("penstock_sessions_released", "Sessions whose clients gave up their KV.", value=figures.releases)
    yield CounterMetricFamily("penstock_released_blocks", "Copies of KV blocks forgotten by that.", value=figures.released_blocks)
    asked = {"started": figures.prefetches_started, "finished": figures.prefetches_finished, "refused": figures.prefetches_refused}
    yield _by_label(CounterMetricFamily, "penstock_prefetches", "Prefetches that clients asked for.", "state", asked)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Prometheus counts upwards: each bucket holds all below it."""
    bounds: Iterable[str] = (*map(repr, histogram.bounds), "+Inf")
    return list(zip(bounds, accumulate(histogram.counts), strict=True))


def _histogram(name: str, text: str, histogram: Histogram, labels: Mapping[str, str] = MappingProxyType({})) -> HistogramMetricFamily:
    metric = HistogramMetricFamily(name, text, labels=list(labels))
    metric.add_metric(list(labels.values()), buckets=_buckets(histogram), sum_value=histogram.total)
    return metric


class RequestCollector(Collector):
    """Requests as their clients saw them, and what of all figures has a name in vLLM."""

    def __init__(self, stats: EngineStats, figures: RequestFigures, model: str) -> None:
        self._stats = stats
        self._figures = figures
        self._model = model

    def collect(self) -> Iterator[Any]:
        figures, model = self._figures, {"model": self._model}
        build = "1, by the version that runs and the model that it serves."
        yield _labelled(GaugeMetricFamily, "penstock_build_info", build, {"version": __version__, **model}, 1)
        answered = CounterMetricFamily("penstock_http_requests", "HTTP requests answered.", labels=["model", "path", "status"])
        for (path, status), num in sorted(figures.by_status.items()):
            answered.add_metric([self._model, path, status], num)
        yield answered
        finished = CounterMetricFamily("penstock_finished", "Generations by how they ended.", labels=["model", "reason"])
        for reason, num in sorted(figures.by_finish.items()):
            finished.add_metric([self._model, reason], num)
        yield finished
        yield _histogram("penstock_e2e_seconds", "Seconds from a generating request to the end of its answer.", figures.e2e, model)
        yield _histogram("penstock_queue_seconds", "Seconds that requests waited for their first step.", figures.queue, model)
        yield _histogram("penstock_prompt_length_tokens", "Prompt tokens of one request.", figures.prompt_tokens, model)
        yield _histogram("penstock_output_length_tokens", "Generated tokens of one request.", figures.output_tokens, model)
        yield from _vllm(self._stats, figures, {"model_name": self._model, "engine": "0"})


def _vllm(stats: EngineStats, figures: RequestFigures, labels: dict[str, str]) -> Iterator[Any]:
    """Under the names that dashboards and autoscalers of vLLM read. The text of each is where it comes from."""
    device = stats.kv_blocks.get("device", {})
    total = sum(device.values())
    free = device.get("free", 0) + device.get("idle", 0)  # idle blocks are a cache: they give way to whoever needs room
    waiting = sum(stats.requests.get(state, 0) for state in ("waiting", "retracted"))
    running = sum(stats.requests.get(state, 0) for state in ("running", "loading"))
    prompts = sum(stats.prompt_tokens.values())
    for name, source, gauge in (
        ("num_requests_running", "penstock_requests, running and loading", running),
        ("num_requests_waiting", "penstock_requests, waiting and retracted", waiting),
        ("kv_cache_usage_perc", "penstock_kv_blocks of the device, neither free nor idle; 1 is all", 1 - free / total if total else 0.0),
    ):
        yield _labelled(GaugeMetricFamily, f"vllm:{name}", source, labels, gauge)
    for name, source, count in (
        ("prompt_tokens", "penstock_prompt_tokens_total", prompts),
        ("generation_tokens", "penstock_generated_tokens_total", stats.generated_tokens),
        ("num_preemptions", "penstock_retractions_total", stats.retractions),
        ("prefix_cache_queries", "penstock_prompt_tokens_total", prompts),
        ("prefix_cache_hits", "penstock_prompt_tokens_total, all but computed", prompts - stats.prompt_tokens.get("computed", 0)),
    ):
        yield _labelled(CounterMetricFamily, f"vllm:{name}", source, labels, count)
    finished = CounterMetricFamily("vllm:request_success", "penstock_finished_total", labels=[*labels, "finished_reason"])
    for reason in ("stop", "length"):
        finished.add_metric([*labels.values(), reason], figures.by_finish[reason])
    yield finished
    for name, source, histogram in (
        ("time_to_first_token_seconds", "penstock_ttft_seconds", stats.ttft),
        ("inter_token_latency_seconds", "penstock_inter_token_seconds", stats.inter_token),
        ("time_per_output_token_seconds", "penstock_inter_token_seconds", stats.inter_token),
        ("e2e_request_latency_seconds", "penstock_e2e_seconds", figures.e2e),
        ("request_queue_time_seconds", "penstock_queue_seconds", figures.queue),
        ("request_prompt_tokens", "penstock_prompt_length_tokens", figures.prompt_tokens),
        ("request_generation_tokens", "penstock_output_length_tokens", figures.output_tokens),
    ):
        yield _histogram(f"vllm:{name}", source, histogram, labels)


def _labelled(family: Any, name: str, text: str, labels: dict[str, str], value: float) -> Any:
    metric = family(name, text, labels=list(labels))
    metric.add_metric(list(labels.values()), value)
    return metric


def exposition(stats: EngineStats, figures: RequestFigures, model: str, engine_pid: int | None = None) -> bytes:
    """What GET /metrics answers: one snapshot, so that its figures belong together. Figures of the process are those of the engine's,
    whichever process answers."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(stats))
    registry.register(RequestCollector(stats, figures, model))
    PlatformCollector(registry=registry)
    if engine_pid is None:
        GCCollector(registry=registry)
    ProcessCollector(pid=lambda: "self" if engine_pid is None else engine_pid, registry=registry)
    return generate_latest(registry)
