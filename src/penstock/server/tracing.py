"""Spans of requests for OpenTelemetry, made when a request is over from the times that its exchange has. Owns
names and attributes; only imported where `--otlp-endpoint` asks for it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock import __version__
from penstock.server.access import Exchange

CLOSE_S = 5.0  # for spans that are not sent yet, when the server stops


class TimeSpan(NamedTuple):
    """A piece of a request's time, in `time.monotonic()`."""

    name: str
    start_s: float
    end_s: float


class Tracing:
    """One span per request, with its parts as children. The client's trace goes on where it sent a
    `traceparent`."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("penstock", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def add(self, exchange: Exchange, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """The exchange is over. Spans are given to the provider, which sends them on a thread of its own."""
        epoch_s = time.time() - time.monotonic()
        context = self._parent(headers)
        # what clients make up must not become names
        method = exchange.method if exchange.method in ("GET", "POST") else "other"
        start, end = _ns(epoch_s + exchange.started_s), _ns(epoch_s + exchange.ended_s)
        span = self._tracer.start_span(
            f"{method} {exchange.route}", context, SpanKind.SERVER, _attributes(exchange), start_time=start
        )
        if exchange.error is not None or exchange.status >= 500:
            span.set_status(Status(StatusCode.ERROR, exchange.error))
        inside = set_span_in_context(span, context)
        for part in parts(exchange):
            child = self._tracer.start_span(part.name, inside, start_time=_ns(epoch_s + part.start_s))
            child.end(_ns(epoch_s + part.end_s))
        span.end(end)

    def close(self) -> None:
        """Sends what is left, for some seconds at most."""
        self._provider.force_flush(int(CLOSE_S * 1000))
        self._provider.shutdown()

    def _parent(self, headers: Iterable[tuple[bytes, bytes]]) -> Context:
        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in headers
            if name in (b"traceparent", b"tracestate")
        }
        return self._propagator.extract(carrier, Context())


def exporting(endpoint: str) -> TracerProvider:
    """Sends spans by OTLP over HTTP, in batches; what the collector does not take in time is dropped."""
    path = endpoint if endpoint.rstrip("/").endswith("/v1/traces") else f"{endpoint.rstrip('/')}/v1/traces"
    provider = TracerProvider(
        resource=Resource.create({"service.name": "penstock", "service.version": __version__})
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=path, timeout=CLOSE_S)))
    return provider


def parts(exchange: Exchange) -> Iterator[TimeSpan]:
    """How its time was spent, in order and without overlaps: looking its prompt up, in line, loading KV,
    computing the prompt, decoding."""
    if not exchange.generating or not exchange.submitted_s:
        return
    submitted = exchange.submitted_s
    if exchange.queue_s is None:  # it never had a step
        yield TimeSpan("queue", submitted, exchange.ended_s)
        return
    matched, started = submitted + exchange.matched_s, submitted + exchange.queue_s
    loading = max(matched, started - exchange.loaded_s)
    yield TimeSpan("match", submitted, matched)
    yield TimeSpan("queue", matched, loading)
    if exchange.loaded_s:
        yield TimeSpan("load", loading, started)
    first = exchange.ended_s if exchange.first_s is None else exchange.first_s
    yield TimeSpan("prefill", min(started, first), first)
    if exchange.first_s is not None:
        yield TimeSpan("decode", first, exchange.ended_s)


def _attributes(exchange: Exchange) -> dict[str, str | int | bool | tuple[str, ...]]:
    """By OpenTelemetry's conventions where it has one. No text of prompts and answers."""
    found: dict[str, str | int | bool | tuple[str, ...]] = {
        "http.request.method": exchange.method,
        "http.route": exchange.route,
        "http.response.status_code": exchange.status,
        "penstock.request_id": exchange.id,
    }
    if exchange.generating:
        found |= {
            "gen_ai.request.model": exchange.model or "",
            "gen_ai.usage.input_tokens": exchange.prompt_tokens,
            "gen_ai.usage.output_tokens": exchange.output_tokens,
            "gen_ai.response.finish_reasons": tuple(exchange.finish),
            "penstock.stream": exchange.stream,
            **{f"penstock.prompt_tokens.{source}": num for source, num in exchange.sources.items()},
        }
    return found


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
