"""The paths that the server answers. Owns the small routes; the table of all paths is in `about`, and the
generating routes are in `generate`."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock import __version__
from penstock.contract import LoadedAdapter, Prefetched, Snapshot, SnapshotRequest
from penstock.errors import InvalidRequest
from penstock.server import about, messages, metrics, schema, view
from penstock.server.connection import read_body, while_connected
from penstock.server.faults import Hangup, Refused, json_response
from penstock.server.generate import (
    KINDS,
    Generate,
    check_ids,
    check_num_tokens,
    encode_chat,
    encode_given,
    owner_of,
    prompts_of,
)
from penstock.server.service import FLUSH_S, Service
from penstock.server.thinking import reasons
from penstock.server.viewers import ViewerStream

OPEN_PATHS = frozenset({"/health", "/live"})  # probes have no key
MAX_SHOWN_ADAPTERS = 32  # on the landing page
LASTING = frozenset({"ssd", "remote"})  # tiers whose blocks outlive the process
# a tenant is identified by its cache_salt, in the body or in the query
_OWNED = {name: {"cache_salt": schema.ANY_LABEL} for name in ("response", "snapshot", "snapshots")}
QUERIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    **_OWNED,
    "messages": messages.QUERIES,
    "count_tokens": messages.QUERIES,
    "cache_flush": {"level": ("captured", "visible", "persisted")},
    "cache_reset": {"tier": ("device", "host", "ssd", "remote", "all")},  # those that are there
}
# routes that take a seat before the body is read: what waits in memory is bounded
SEATED = frozenset({"tokenize", "count_tokens", "detokenize", "cache_prefetch", *_OWNED})


def make_routes(service: Service) -> list[Route]:
    def endpoint(route: about.PathRow) -> Any:
        if route.name in KINDS:
            return Generate(service, route.name)
        if route.name == "view_events":
            return ViewerStream(service.viewers)
        found: Callable[[Service, Request], Awaitable[Response]] = globals()[f"on_{route.name}"]

        async def answer(request: Request) -> Response:
            if request.method != "POST":  # the query of a POST is checked with its body
                schema.check_query(request.query_params, **QUERIES.get(route.name, {}))
            with service.side.take(1) if route.name in SEATED else contextlib.nullcontext():
                return await found(service, request)

        return answer

    return [
        Route(path.replace("}", ":path}"), endpoint(route), methods=[name.upper() for name in route.methods])
        for path, route in about.PATHS.items()
        if service.config.has_viewers or not route.name.startswith("view_")
    ]


# -------------------------------------------------------------------------------------------------- the model


async def on_models(service: Service, request: Request) -> Response:
    loaded = {**dict.fromkeys(service.names), **service.engine.adapters}
    return json_response({"object": "list", "data": [model_card(service, *one) for one in loaded.items()]})


async def on_model(service: Service, request: Request) -> Response:
    name = request.path_params["model"]
    service.check_model(name)
    return json_response(model_card(service, name, service.engine.adapters.get(name)))


def model_card(service: Service, name: str, loaded: LoadedAdapter | None = None) -> dict[str, Any]:
    """The list entry of the model itself, or of the adapter that is `loaded` under the name."""
    facts = service.engine.facts
    return {
        "id": name,
        "object": "model",
        "created": int(facts.started_s if loaded is None else loaded.loaded_s),
        "owned_by": "penstock",
        "root": facts.name if loaded is None else loaded.root,
        "parent": None if loaded is None else service.names[0],
        "max_model_len": service.engine.max_model_len,
    }


async def on_load_lora(service: Service, request: Request) -> Response:
    _check_lora(service)
    with service.loads.take(1):
        body, _ = await service.body(request, schema.LoadLoraBody)
        name = body.lora_name
        if name in service.names:
            message = f"{name!r} is the name of the model itself; give the adapter another"
            raise InvalidRequest(message, "lora_name")
        async with service.loading:
            loaded = await service.ask("adapters.load_inside", name, body.lora_path)
        return json_response({**model_card(service, name, loaded), "replaced": loaded.replaced})


async def on_unload_lora(service: Service, request: Request) -> Response:
    _check_lora(service)
    body, _ = await service.body(request, schema.UnloadLoraBody)
    async with service.loading:
        found = await service.ask("adapters.unload", body.lora_name)
    if not found:
        message = f"there is no adapter {body.lora_name!r} here"
        raise Refused(404, message, param="lora_name", code="model_not_found")
    return json_response({"id": body.lora_name, "object": "model", "deleted": True})


def _check_lora(service: Service) -> None:
    """Both routes answer 403 unless --lora-dir names the directory that clients may load from."""
    if not service.engine.facts.lora_root:
        message = (
            "adapters cannot be loaded or unloaded over HTTP here: the server was started without --lora-dir"
        )
        raise Refused(403, message, code="lora_loading_off")


# ------------------------------------------------------------------------------------------------------ texts


async def on_response(service: Service, request: Request) -> Response:
    """A kept answer: read or deleted by its id."""
    id, owner = request.path_params["id"], owner_of(request.scope, request.query_params.get("cache_salt"))
    if request.method == "DELETE":
        await service.ask("responses.delete", id, owner)
        return json_response({"id": id, "object": "response", "deleted": True})
    kept = await service.ask("responses.find", id, owner)
    return Response(kept.response, media_type="application/json")


async def on_tokenize(service: Service, request: Request) -> Response:
    body, num_bytes = await service.body(request, schema.TokenizeBody)
    body.check()
    tokenizer, rules = service.engine.tokenizer, service.side_rules

    def reply() -> Response:
        if body.messages is not None:
            tokens = encode_chat(tokenizer, body.messages, rules)
        else:
            tokens = tokenizer.encode(body.prompt, add_special=body.add_special_tokens, most=rules.most)
        most = service.engine.max_model_len
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": most})

    return await service.compute(reply, num_bytes)


async def on_count_tokens(service: Service, request: Request) -> Response:
    given, num_bytes = await service.body(request, messages.CountTokensBody, **QUERIES["count_tokens"])
    tokenizer, rules = service.engine.tokenizer, service.side_rules

    def reply() -> Response:
        body, thinks = messages.as_counted(given), reasons(service.config, tokenizer)
        with schema.renamed(messages.NAMES):
            body.check()
            (prompt,) = prompts_of(tokenizer, body, rules, reasons=thinks)
        return json_response({"input_tokens": len(prompt.ids)})

    return await service.compute(reply, num_bytes)


async def on_detokenize(service: Service, request: Request) -> Response:
    body, num_bytes = await service.body(request, schema.DetokenizeBody)
    tokenizer = service.engine.tokenizer
    check_num_tokens(body.tokens, service.side_rules.most, "tokens")
    check_ids(tokenizer, body.tokens, "tokens")

    def reply() -> Response:
        return json_response({"prompt": tokenizer.decode(body.tokens, skip_special=False)})

    return await service.compute(reply, num_bytes)


# -------------------------------------------------------------------------------------------------- the cache


async def on_cache_reset(service: Service, request: Request) -> Response:
    present = service.engine.facts.tiers
    schema.check_query(request.query_params, tier=(*present, "all"))
    await _no_fields(service, request)
    tier = request.query_params.get("tier", "all")
    evicted = await service.ask("kv.reset", present if tier == "all" else (tier,))
    return json_response({"tier": tier, "evicted_blocks": sum(evicted.values()), "by_tier": evicted})


async def on_cache_flush(service: Service, request: Request) -> Response:
    """Answers when earlier computed blocks are saved to the requested level."""
    schema.check_query(request.query_params, **QUERIES["cache_flush"])
    await _no_fields(service, request)
    level = request.query_params.get("level", "visible")
    if level == "persisted" and not LASTING & set(service.engine.facts.tiers):
        message = (
            "no tier of this server outlives it (an ssd or a remote one would): nothing can be persisted"
        )
        raise InvalidRequest(message, "level")
    await service.ask("kv.wait_flushed", level, FLUSH_S)
    return json_response({"level": level})


async def _no_fields(service: Service, request: Request) -> None:
    """Fields in a body instead of the query are refused, not ignored."""
    if data := await read_body(request.scope, request.receive, service.config):
        schema.decode(data, schema.NoFields)


async def on_cache_prefetch(service: Service, request: Request) -> Response:
    """Answers when the prefetch has begun."""
    body, num_bytes = await service.body(request, schema.PrefetchBody)
    body.check()
    begun = await service.compute(partial(_begin_prefetch, service, body), num_bytes)
    found = await service.answered("kv.prefetch", begun)
    if found is None:
        why = "or the cache_salt is not the one that it had"
        message = f"no request of this session has ended here lately, {why}"
        raise Refused(404, message, param="session_id", code="session_not_found")
    return json_response({"blocks": found.num_blocks, "started": found.started})


def _begin_prefetch(service: Service, body: schema.PrefetchBody) -> Future[Prefetched | None]:
    """On a worker thread if the body is large."""
    engine, salt = service.engine, body.cache_salt or ""
    if body.session_id is not None:
        return engine.prefetch(session=body.session_id, cache_salt=salt)
    tokens = encode_given(engine.tokenizer, body, service.prompt_rules)
    with service.hold_model(body.model or service.names[0]) as adapter:
        return engine.prefetch(tokens, cache_salt=salt, adapter=adapter)


async def on_cache_stats(service: Service, request: Request) -> Response:
    stats, _ = await service.stats()
    content: dict[str, Any] = {
        "kv_blocks": {
            tier: {"total": sum(states.values()), **states}
            for tier, states in stats.kv_blocks.items()
            if states
        },
        "cache": stats.cache,
        "prompt_tokens": stats.prompt_tokens,
        "retractions": stats.retractions,
        "expected_output_tokens": stats.expected_tokens,
        "sessions": asdict(stats.sessions),
        "snapshots": asdict(stats.snapshots),
    }
    if (traffic := stats.traffic) is not None:
        content["traffic"] = {
            "bytes": {f"{source} to {dest}": count for (source, dest), count in traffic.bytes.items()},
            "skipped_saves": traffic.skipped,
            "leases_open": traffic.leases_open,
            "failures": {f"{tier}: {reason}": count for (tier, reason), count in traffic.failures.items()},
            "checksum_failures": traffic.checksum_failures,
            "usable": traffic.usable,
        }
    return json_response(content)


# ------------------------------------------------------------------------------------------------- the server


async def on_health(service: Service, request: Request) -> Response:
    return _status("ready", service.not_ready())


async def on_live(service: Service, request: Request) -> Response:
    return _status("live", service.trouble())


def _status(good: str, trouble: str | None) -> Response:
    if trouble is None:
        return json_response({"status": good})
    return json_response({"status": "unavailable", "reason": trouble}, 503)


async def on_metrics(service: Service, request: Request) -> Response:
    stats, figures = await service.stats()
    text = metrics.exposition(stats, figures, service.names[0], service.engine.facts.pid)
    return Response(text, headers={"content-type": metrics.CONTENT_TYPE})


async def on_kv_event_sources(service: Service, request: Request) -> Response:
    """As vLLM answers: a list, which is empty if there are no events."""
    config = service.config
    source = {
        "data_parallel_rank": 0,
        "endpoint": config.kv_events,
        "replay_endpoint": config.kv_events_replay,
        "topic": config.kv_events_topic,
    }
    return json_response([] if config.kv_events is None else [source])


async def on_server_info(service: Service, request: Request) -> Response:
    facts = service.engine.facts
    info = {
        "version": __version__,
        "model_path": facts.name,
        "served_model_name": service.names[0],
        "block_size": facts.block_tokens,
        "max_model_len": service.engine.max_model_len,
        "dp_size": 1,
        "tp_size": 1,
    }
    return json_response(info)


async def on_version(service: Service, request: Request) -> Response:
    return json_response({"version": __version__})


async def on_openapi(service: Service, request: Request) -> Response:
    return json_response(about.openapi(service.config.api_key is not None))


async def on_landing(service: Service, request: Request) -> Response:
    if service.config.has_viewers and view.is_browser(request.scope):
        return view.file_response("/")
    engine, trouble = service.engine, service.not_ready()
    states = {} if trouble else (await service.stats())[0].requests
    shown = about.landing(
        {
            "status": trouble or "ready",
            "model": ", ".join(service.names),
            "adapters": ", ".join(list(engine.adapters)[:MAX_SHOWN_ADAPTERS]) or "none",
            "context": f"{engine.max_model_len} tokens",
            "KV tiers": ", ".join(engine.facts.tiers),
            "requests": ", ".join(f"{num} {state}" for state, num in states.items() if num) or "none",
            "key": "needed" if service.config.api_key is not None else "not needed",
        }
    )
    return Response(shown, headers=about.LANDING_HEADERS, media_type="text/html")


# ---------------------------------------------------------------------------------------------- the page


async def on_view_file(service: Service, request: Request) -> Response:
    return view.file_response(request.url.path)


async def on_view_request(service: Service, request: Request) -> Response:
    request_id = request.path_params["id"]
    if (life := await service.ask("lives.find", request_id)) is None:
        message = f"request {request_id!r} is not among the recent ones of this server"
        raise Refused(404, message, code="request_not_found")
    return json_response(life)


# -------------------------------------------------------------------------------------------------- snapshots


async def on_snapshot(service: Service, request: Request) -> Response:
    """Read or delete by name. Snapshots of other tenants do not exist for it."""
    salt, name = _salt(request), request.path_params["name"]
    if request.method == "DELETE":
        await _answer(service, request, "begin_delete", name, salt)
        return json_response({"id": name, "object": "snapshot", "deleted": True})
    return json_response(_snapshot_card(await _answer(service, request, "begin_find", name, salt)))


async def on_snapshots(service: Service, request: Request) -> Response:
    """A list of them. A new one is answered when its blocks and its manifest are where they outlive the
    process, if there is such a place."""
    if request.method == "POST":
        body, num_bytes = await service.body(request, schema.SnapshotBody)
        body.check()
        asked = await service.compute(partial(_asked, service, body), num_bytes)
        return json_response(_snapshot_card(await _answer(service, request, "begin_take", asked)))
    salt = _salt(request)
    found = await _answer(service, request, "begin_all", salt)
    pinned = {
        "tier": found.tier,
        "blocks": found.pinned_blocks,
        "max_blocks": found.pinned_blocks_max,
        "bytes": found.pinned_blocks * found.block_bytes,
        "max_bytes": found.pinned_blocks_max * found.block_bytes,
    }
    data = [_snapshot_card(one) for one in found.snapshots]
    return json_response({"object": "list", "data": data, "complete": found.is_complete, "pinned": pinned})


async def _answer(service: Service, request: Request, name: str, *arguments: Any) -> Any:
    """Until the client hangs up: work that has not begun by then is dropped."""
    answers: list[Any] = []

    async def work() -> None:
        answers.append(await service.ask(f"snapshots.{name}", *arguments))

    await while_connected(request.receive, lambda: None, work)
    if not answers:
        raise Hangup
    return answers[0]


def _asked(service: Service, body: schema.SnapshotBody) -> SnapshotRequest:
    """On a worker thread if the body is large."""
    given = SnapshotRequest(body.name or "", "", b"", body.tokens, body.ttl_s, body.cache_salt or "")
    if body.session_id is not None:
        return given._replace(session=body.session_id)
    tokens = encode_given(service.engine.tokenizer, body, service.prompt_rules)
    messages = "" if body.messages is None else msgspec.json.encode(body.messages).decode()
    try:
        prompt = np.asarray(tokens, np.uint32).tobytes()
    except OverflowError:
        message = "token ids must not be below zero, nor above all that there are"
        raise InvalidRequest(message, "prompt") from None
    with service.hold_model(body.model or service.names[0]) as adapter:
        return given._replace(prompt=prompt, adapter=adapter, messages=messages)


def _salt(request: Request) -> str:
    return request.query_params.get("cache_salt", "")


def _snapshot_card(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "id": snapshot.name,
        "object": "snapshot",
        "created": int(snapshot.created_s),
        "expires_at": None if snapshot.expires_s is None else int(snapshot.expires_s),
        "tokens": snapshot.num_tokens,
        "cached_tokens": snapshot.kept_tokens,
        "blocks": snapshot.num_blocks,
        "pinned": snapshot.pinned,
        "adapter": snapshot.adapter or None,
        "chat": snapshot.is_chat,
        "stored_in": list(snapshot.tiers),
    }
