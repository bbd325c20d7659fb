"""What this server is and accepts, for people and for tools: the landing page and the OpenAPI description.
Owns no route."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock import __version__
from penstock.server import messages, responses, schema

# Routes with their methods, their purpose, and the type of a posted body. `/` itself is not listed.
ROUTES: Mapping[str, tuple[str, str, type[msgspec.Struct] | None]] = {
    "/v1/chat/completions": ("post", "Answer a conversation.", schema.ChatBody),
    "/v1/completions": ("post", "Continue a text.", schema.CompletionBody),
    "/v1/responses": (
        "post",
        "Answer a conversation, in the newer words of OpenAI.",
        responses.ResponsesBody,
    ),
    "/v1/responses/{id}": ("get delete", "Such an answer, while it is kept.", None),
    "/v1/messages": ("post", "Answer a conversation, in the words of Anthropic.", messages.MessagesBody),
    "/v1/messages/count_tokens": (
        "post",
        "How long the prompt of such a conversation is.",
        messages.CountTokensBody,
    ),
    "/v1/models": ("get", "The served model and its adapters.", None),
    "/v1/models/{model}": ("get", "One of them.", None),
    "/v1/load_lora_adapter": ("post", "Load an adapter.", schema.LoadLoraBody),
    "/v1/unload_lora_adapter": ("post", "Forget an adapter.", schema.UnloadLoraBody),
    "/v1/snapshots": ("get post", "Conversations whose KV stays, and one more of them.", schema.SnapshotBody),
    "/v1/snapshots/{name}": ("get delete", "One of them.", None),
    "/tokenize": ("post", "Text to token ids.", schema.TokenizeBody),
    "/detokenize": ("post", "Token ids to text.", schema.DetokenizeBody),
    "/cache/stats": ("get", "What is in the KV cache.", None),
    "/cache/prefetch": ("post", "Bring KV up from colder tiers.", schema.PrefetchBody),
    "/cache/flush": ("post", "Wait until KV is saved.", None),
    "/cache/reset": ("post", "Forget KV.", None),
    "/health": ("get", "Whether requests are taken.", None),
    "/live": ("get", "Whether the engine's loop comes round.", None),
    "/metrics": ("get", "Figures for Prometheus.", None),
    "/version": ("get", "The version of this server.", None),
    "/openapi.json": ("get", "This description.", None),
}
# The page loads nothing, and runs no scripts.
LANDING_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "x-content-type-options": "nosniff",
}
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:44rem;margin:3rem auto;padding:0 1rem}td{padding:0 "
    "1rem 0 0;vertical-align:top}"
)


def openapi(with_key: bool) -> dict[str, Any]:
    """Made from the types that requests are decoded with, so that it always matches what is accepted."""
    bodies = [body for _, _, body in ROUTES.values() if body is not None]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    by_body = dict(zip(bodies, schemas, strict=True))
    content: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": {
            path: {
                method: _operation(path, about, by_body[body] if body and method == "post" else None)
                for method in methods.split()
            }
            for path, (methods, about, body) in ROUTES.items()
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


def landing(facts: Sequence[tuple[str, str]]) -> str:
    """One page without scripts: what runs here, and links. Everything on it is escaped."""
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in facts
    )
    links = "".join(_row(path, methods, about) for path, (methods, about, _) in ROUTES.items())
    head = '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Penstock</title>'
    head += f"<style>{_STYLE}</style></head>"
    body = (
        f"<h1>Penstock "
        f"{html.escape(__version__)}</h1><table>{rows}</table><h2>Routes</h2><table>{links}</table>"
    )
    return f"{head}<body>{body}</body></html>\n"


def _row(path: str, methods: str, about: str) -> str:
    shown = html.escape(path)
    name = f'<a href="{shown}">{shown}</a>' if "get" in methods.split() and "{" not in path else shown
    return f"<tr><td>{methods.upper()}</td><td>{name}</td><td>{html.escape(about)}</td></tr>"
