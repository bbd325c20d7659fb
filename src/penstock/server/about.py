"""What this server is and accepts, for people and for tools: the landing page and the OpenAPI description.
Owns no route."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from penstock import __version__
from penstock.server import messages, responses, schema

# Path, methods, the name of its endpoint, and what it does.
_TABLE = """
/v1/chat/completions post chat: Answer a conversation.
/v1/completions post completions: Continue a text.
/v1/responses post responses: Answer a conversation, in the newer words of OpenAI.
/v1/responses/{id} get delete response: Such an answer, while it is kept.
/v1/messages post messages: Answer a conversation, in the words of Anthropic.
/v1/messages/count_tokens post count_tokens: How long the prompt of such a conversation is.
/v1/models get models: The served model and its adapters.
/v1/models/{model} get model: One of them.
/v1/load_lora_adapter post load_lora: Load an adapter.
/v1/unload_lora_adapter post unload_lora: Forget an adapter.
/v1/snapshots get post snapshots: Conversations whose KV stays, and one more of them.
/v1/snapshots/{name} get delete snapshot: One of them.
/tokenize post tokenize: Text to token ids.
/detokenize post detokenize: Token ids to text.
/cache/stats get cache_stats: What is in the KV cache.
/cache/prefetch post cache_prefetch: Bring KV up from colder tiers.
/cache/flush post cache_flush: Wait until KV is saved.
/cache/reset post cache_reset: Forget KV.
/kv_event_sources get kv_event_sources: Where events about KV blocks are published.
/get_server_info get server_info: What a router asks of a worker.
/page/page.css get view_file: The style of the page at /.
/page/page.js get view_file: Its script.
/page/example.txt get view_file: A text to ask about.
/page/events get view_events: What the page shows, as server-sent events.
/page/requests/{id} get view_request: The life of a recent request.
/health get health: Whether requests are taken.
/live get live: Whether the engine's loop comes round.
/metrics get metrics: Figures for Prometheus.
/version get version: The version of this server.
/openapi.json get openapi: This description.
/ get landing: The page, for browsers; for others what runs here, and links.
"""
_BODIES: Mapping[str, type[msgspec.Struct]] = {
    "chat": schema.ChatBody,
    "completions": schema.CompletionBody,
    "responses": responses.ResponsesBody,
    "messages": messages.MessagesBody,
    "count_tokens": messages.CountTokensBody,
    "load_lora": schema.LoadLoraBody,
    "unload_lora": schema.UnloadLoraBody,
    "snapshots": schema.SnapshotBody,
    "tokenize": schema.TokenizeBody,
    "detokenize": schema.DetokenizeBody,
    "cache_prefetch": schema.PrefetchBody,
}


class PathRow(NamedTuple):
    methods: tuple[str, ...]
    name: str
    about: str
    body: type[msgspec.Struct] | None  # of a post


def _rows() -> Iterator[tuple[str, PathRow]]:
    for line in _TABLE.strip().splitlines():
        head, _, about = line.partition(": ")
        path, *methods, name = head.split()
        yield path, PathRow(tuple(methods), name, about, _BODIES.get(name))


PATHS: Mapping[str, PathRow] = dict(_rows())
ROUTES = {path: row for path, row in PATHS.items() if path != "/"}  # that are described
# The page loads nothing, and runs no scripts.
LANDING_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "x-content-type-options": "nosniff",
    "vary": "accept",
}
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:44rem;margin:3rem auto;padding:0 1rem}td{padding:0 "
    "1rem 0 0;vertical-align:top}"
)


def openapi(with_key: bool) -> dict[str, Any]:
    """Made from the types that requests are decoded with, so that it always matches what is accepted."""
    bodies = [row.body for row in ROUTES.values() if row.body is not None]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    by_body = dict(zip(bodies, schemas, strict=True))
    content: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": {
            path: {
                method: _operation(
                    path, row.about, by_body[row.body] if row.body and method == "post" else None
                )
                for method in row.methods
            }
            for path, row in ROUTES.items()
        },
        "components": {"schemas": components},
    }
    if with_key:
        content["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        content["security"] = [{"key": []}]
    return content


def _operation(path: str, about: str, body: Any) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": about,
        "responses": {"200": {"description": "done"}, "4XX": {"description": "refused"}},
    }
    for name in re.findall(r"{(\w+)}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation


def landing(facts: Mapping[str, str]) -> str:
    """One page without scripts: what runs here, and links. Everything on it is escaped."""
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in facts.items()
    )
    links = "".join(_row(path, row) for path, row in ROUTES.items())
    head = '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Penstock</title>'
    head += f"<style>{_STYLE}</style></head>"
    body = (
        f"<h1>Penstock "
        f"{html.escape(__version__)}</h1><table>{rows}</table><h2>Routes</h2><table>{links}</table>"
    )
    return f"{head}<body>{body}</body></html>\n"


def _row(path: str, row: PathRow) -> str:
    shown, methods = html.escape(path), " ".join(row.methods).upper()
    name = f'<a href="{shown}">{shown}</a>' if "get" in row.methods and "{" not in path else shown
    return f"<tr><td>{methods}</td><td>{name}</td><td>{html.escape(row.about)}</td></tr>"
