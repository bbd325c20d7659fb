"""The paths that the server answers. Owns the table and the small routes; the generating ones are in
`generate`."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import anyio
import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock import __version__
from penstock.contract import LoadedAdapter, Prefetched, Snapshot, SnapshotRequest
from penstock.errors import InvalidRequest
from penstock.server import about, messages, metrics, schema
from penstock.server.connection import read_body
from penstock.server.faults import Hangup, Refused, json_response
from penstock.server.generate import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Generate,
    check_ids,
    check_num_tokens,
    encode_chat,
    encode_given,
    owner_of,
    prompts_of,
    while_connected,
)
from penstock.server.service import FLUSH_S, Service
from penstock.server.thinking import reasons

OPEN_PATHS = frozenset({"/health", "/live"})  # probes have no key
MAX_SHOWN_ADAPTERS = 32  # on the landing page
LASTING = frozenset({"ssd", "remote"})  # tiers whose blocks outlive the process


def make_routes(service: Service) -> list[Route]:
    small, adapters, snapshots = Small(service), Adapters(service), SnapshotRoutes(service)
    generating = {
        "completions": COMPLETIONS,
        "chat/completions": CHAT,
        "responses": RESPONSES,
        "messages": MESSAGES,
    }
    endpoints: dict[str, Any] = {
        **{f"/v1/{path}": Generate(service, kind) for path, kind in generating.items()},
        "/v1/responses/{id}": small.response,
        "/v1/messages/count_tokens": small.count_tokens,
        "/v1/models": small.models,
        "/v1/models/{model}": small.model,
        "/v1/load_lora_adapter": adapters.load,
        "/v1/unload_lora_adapter": adapters.unload,
        "/v1/snapshots": snapshots.collection,
        "/v1/snapshots/{name}": snapshots.one,
        **{
            f"/cache/{name}": getattr(small, f"cache_{name}")
            for name in ("flush", "prefetch", "reset", "stats")
        },
        **{
            f"/{name}": getattr(small, name)
            for name in ("tokenize", "detokenize", "health", "live", "metrics", "version")
        },
        "/openapi.json": small.openapi,
        "/": small.landing,
    }
    methods = {"/": "get", **{path: methods for path, (methods, _, _) in about.ROUTES.items()}}
    return [
        Route(path.replace("}", ":path}"), one, methods=methods[path].upper().split())
        for path, one in endpoints.items()
    ]


class Small:
    """Routes that answer at once."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, request: Request) -> Response:
        schema.check_query(request.query_params)
        cards = [model_card(self._service, name) for name in self._service.names]
        adapters = self._service.engine.adapters
        cards += [model_card(self._service, name, loaded) for name, loaded in adapters.items()]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        schema.check_query(request.query_params)
        name = request.path_params["model"]
        loaded = self._service.engine.adapters.get(name)
        if loaded is None:
            self._service.check_model(name)
        return json_response(model_card(self._service, name, loaded))

    async def response(self, request: Request) -> Response:
        """A kept answer: read or deleted by its id."""
        schema.check_query(request.query_params, cache_salt=schema.ANY_LABEL)
        id, owner = request.path_params["id"], owner_of(request.scope, request.query_params.get("cache_salt"))
        with self._service.side.take(1):
            if request.method == "DELETE":
                await self._service.ask("responses.delete", id, owner)
                return json_response({"id": id, "object": "response", "deleted": True})
            kept = await self._service.ask("responses.find", id, owner)
        return Response(kept.response, media_type="application/json")

    async def tokenize(self, request: Request) -> Response:
        with self._service.side.take(1):
            body, num_bytes = await self._service.body(request, schema.TokenizeBody)
            body.check()
            tokenizer, rules = self._service.engine.tokenizer, self._service.side_rules

            def reply() -> Response:
                if body.messages is not None:
                    tokens = encode_chat(tokenizer, body.messages, rules)
                else:
                    tokens = tokenizer.encode(
                        body.prompt, add_special=body.add_special_tokens, most=rules.most
                    )
                return json_response(
                    {
                        "tokens": tokens,
                        "count": len(tokens),
                        "max_model_len": self._service.engine.max_model_len,
                    }
                )

            return await self._service.compute(reply, num_bytes)

    async def count_tokens(self, request: Request) -> Response:
        with self._service.side.take(1):
            given, num_bytes = await self._service.body(request, messages.CountTokensBody, **messages.QUERIES)
            tokenizer, rules = self._service.engine.tokenizer, self._service.side_rules

            def reply() -> Response:
                body, thinks = messages.as_counted(given), reasons(self._service.config, tokenizer)
                with schema.renamed(messages.NAMES):
                    body.check()
                    return json_response(
                        {"input_tokens": len(prompts_of(tokenizer, body, rules, reasons=thinks)[0].ids)}
                    )

            return await self._service.compute(reply, num_bytes)

    async def detokenize(self, request: Request) -> Response:
        with self._service.side.take(1):
            body, num_bytes = await self._service.body(request, schema.DetokenizeBody)
            tokenizer = self._service.engine.tokenizer
            check_num_tokens(body.tokens, self._service.side_rules.most, "tokens")
            check_ids(tokenizer, body.tokens, "tokens")

            def reply() -> Response:
                return json_response({"prompt": tokenizer.decode(body.tokens, skip_special=False)})

            return await self._service.compute(reply, num_bytes)

    async def cache_reset(self, request: Request) -> Response:
        present = self._service.engine.facts.tiers
        schema.check_query(request.query_params, tier=(*present, "all"))
        await self._no_fields(request)
        tier = request.query_params.get("tier", "all")
        evicted = await self._service.ask("reset_cache", present if tier == "all" else (tier,))
        return json_response({"tier": tier, "evicted_blocks": sum(evicted.values()), "by_tier": evicted})

    async def cache_flush(self, request: Request) -> Response:
        """Answers when earlier computed blocks are saved to the requested level."""
        schema.check_query(request.query_params, level=("captured", "visible", "persisted"))
        await self._no_fields(request)
        level = request.query_params.get("level", "visible")
        if level == "persisted" and not LASTING & set(self._service.engine.facts.tiers):
            raise InvalidRequest(
                "no tier of this server outlives it (an ssd or a remote one would): nothing can be persisted",
                "level",
            )
        await self._service.ask("wait_flushed", level, FLUSH_S)
        return json_response({"level": level})

    async def cache_prefetch(self, request: Request) -> Response:
        """Answers when the prefetch has begun."""
        with self._service.side.take(1):
            body, num_bytes = await self._service.body(request, schema.PrefetchBody)
            body.check()
            begun = await self._service.compute(lambda: self._begin_prefetch(body), num_bytes)
            found = await self._service.answered("prefetch", begun)
            if found is None:
                message = (
                    "no request of this session has ended here lately, or the cache_salt is not the one "
                    "that it had"
                )
                raise Refused(404, message, param="session_id", code="session_not_found")
            return json_response({"blocks": found.num_blocks, "started": found.started})

    def _begin_prefetch(self, body: schema.PrefetchBody) -> Future[Prefetched | None]:
        """On a worker thread if the body is large."""
        engine, rules, salt = self._service.engine, self._service.prompt_rules, body.cache_salt or ""
        if body.session_id is not None:
            return engine.prefetch(session=body.session_id, cache_salt=salt)
        tokens = encode_given(engine.tokenizer, body, rules)
        with self._service.hold_model(body.model or self._service.names[0]) as adapter:
            return engine.prefetch(tokens, cache_salt=salt, adapter=adapter)

    async def cache_stats(self, request: Request) -> Response:
        schema.check_query(request.query_params)
        stats, _ = await self._service.stats()
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
                "failures": {
                    f"{tier}: {reason}": count for (tier, reason), count in traffic.failures.items()
                },
                "checksum_failures": traffic.checksum_failures,
                "usable": traffic.usable,
            }
        return json_response(content)

    async def health(self, request: Request) -> Response:
        schema.check_query(request.query_params)
        return _status("ready", self._service.not_ready())

    async def live(self, request: Request) -> Response:
        schema.check_query(request.query_params)
        return _status("live", self._service.trouble())

    async def metrics(self, request: Request) -> Response:
        schema.check_query(request.query_params)
        stats, figures = await self._service.stats()
        text = metrics.exposition(stats, figures, self._service.names[0], self._service.engine.facts.pid)
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE})

    async def version(self, request: Request) -> Response:
        schema.check_query(request.query_params)
        return json_response({"version": __version__})

    async def openapi(self, request: Request) -> Response:
        schema.check_query(request.query_params)
        return json_response(about.openapi(self._service.config.api_key is not None))

    async def landing(self, request: Request) -> Response:
        schema.check_query(request.query_params)
        return Response(
            about.landing(await self._facts()), headers=about.LANDING_HEADERS, media_type="text/html"
        )

    async def _facts(self) -> list[tuple[str, str]]:
        engine, service = self._service.engine, self._service
        trouble = service.not_ready()
        adapters = ", ".join(list(engine.adapters)[:MAX_SHOWN_ADAPTERS])
        states = {} if trouble else (await service.stats())[0].requests
        requests = ", ".join(f"{num} {state}" for state, num in states.items() if num)
        return [
            ("status", trouble or "ready"),
            ("model", ", ".join(service.names)),
            ("adapters", adapters or "none"),
            ("context", f"{engine.max_model_len} tokens"),
            ("KV tiers", ", ".join(engine.facts.tiers)),
            ("requests", requests or "none"),
            ("key", "needed" if service.config.api_key is not None else "not needed"),
        ]

    async def _no_fields(self, request: Request) -> None:
        """Fields in a body instead of the query are refused, not ignored."""
        if data := await read_body(request.scope, request.receive, self._service.config):
            schema.decode(data, schema.NoFields)


def model_card(service: Service, name: str, loaded: LoadedAdapter | None = None) -> dict[str, Any]:
    """The list entry of the model itself, or of the adapter that is `loaded` under the name."""
    facts, parent = service.engine.facts, None
    created, root = int(facts.started_s), facts.name
    if loaded is not None:
        created, root, parent = int(loaded.loaded_s), loaded.root, service.names[0]
    card = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "penstock",
        "root": root,
        "parent": parent,
    }
    return {**card, "max_model_len": service.engine.max_model_len}


class Adapters:
    """Both routes answer 403 unless --lora-dir names the directory that clients may load from."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._turn = anyio.CapacityLimiter(1)  # each reads and holds a whole file

    async def load(self, request: Request) -> Response:
        self._check_allowed()
        with self._service.loads.take(1):
            body, _ = await self._service.body(request, schema.LoadLoraBody)
            if body.lora_name in self._service.names:
                raise InvalidRequest(
                    f"{body.lora_name!r} is the name of the model itself; give the adapter another",
                    "lora_name",
                )
            async with self._turn:
                loaded = await self._service.ask("adapters.load_inside", body.lora_name, body.lora_path)
            return json_response(
                {**model_card(self._service, body.lora_name, loaded), "replaced": loaded.replaced}
            )

    async def unload(self, request: Request) -> Response:
        self._check_allowed()
        body, _ = await self._service.body(request, schema.UnloadLoraBody)
        async with self._turn:
            found = await self._service.ask("adapters.unload", body.lora_name)
        if not found:
            raise Refused(
                404, f"there is no adapter {body.lora_name!r} here", param="lora_name", code="model_not_found"
            )
        return json_response({"id": body.lora_name, "object": "model", "deleted": True})

    def _check_allowed(self) -> None:
        if not self._service.engine.facts.lora_root:
            message = (
                "adapters cannot be loaded or unloaded over HTTP here: the server was started without "
                "--lora-dir"
            )
            raise Refused(403, message, code="lora_loading_off")


class SnapshotRoutes:
    """A tenant is identified by its cache_salt, in the body or in the query; snapshots of other tenants do
    not exist for it."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def one(self, request: Request) -> Response:
        """Read or delete by name."""
        salt, name = self._salt(request), request.path_params["name"]
        with self._service.side.take(1):
            if request.method == "DELETE":
                await self._answer(request, "begin_delete", name, salt)
                return json_response({"id": name, "object": "snapshot", "deleted": True})
            return json_response(_snapshot_card(await self._answer(request, "begin_find", name, salt)))

    async def collection(self, request: Request) -> Response:
        if request.method == "POST":
            return await self._take(request)
        salt = self._salt(request)
        with self._service.side.take(1):
            found = await self._answer(request, "begin_all", salt)
        pinned = {"tier": found.tier, "blocks": found.pinned_blocks, "max_blocks": found.pinned_blocks_max}
        pinned = {
            **pinned,
            "bytes": found.pinned_blocks * found.block_bytes,
            "max_bytes": found.pinned_blocks_max * found.block_bytes,
        }
        data = [_snapshot_card(one) for one in found.snapshots]
        return json_response(
            {"object": "list", "data": data, "complete": found.is_complete, "pinned": pinned}
        )

    async def _take(self, request: Request) -> Response:
        """Answers when its blocks and its manifest are where they outlive the process, if there is such a
        place."""
        with self._service.side.take(1):
            body, num_bytes = await self._service.body(request, schema.SnapshotBody)
            body.check()
            asked = await self._service.compute(lambda: self._asked(body), num_bytes)
            return json_response(_snapshot_card(await self._answer(request, "begin_take", asked)))

    async def _answer(self, request: Request, name: str, *arguments: Any) -> Any:
        """Until the client hangs up: work that has not begun by then is dropped."""
        answers: list[Any] = []

        async def work() -> None:
            answers.append(await self._service.ask(f"snapshots.{name}", *arguments))

        await while_connected(request.receive, lambda: None, work)
        if not answers:
            raise Hangup
        return answers[0]

    def _asked(self, body: schema.SnapshotBody) -> SnapshotRequest:
        """On a worker thread if the body is large."""
        service, rules = self._service, self._service.prompt_rules
        given = SnapshotRequest(body.name or "", "", b"", body.tokens, body.ttl_s, body.cache_salt or "")
        if body.session_id is not None:
            return given._replace(session=body.session_id)
        tokens = encode_given(service.engine.tokenizer, body, rules)
        messages = "" if body.messages is None else msgspec.json.encode(body.messages).decode()
        with service.hold_model(body.model or service.names[0]) as adapter:
            return given._replace(prompt=_token_bytes(tokens), adapter=adapter, messages=messages)

    def _salt(self, request: Request) -> str:
        schema.check_query(request.query_params, cache_salt=schema.ANY_LABEL)
        return request.query_params.get("cache_salt", "")


def _token_bytes(tokens: list[int]) -> bytes:
    try:
        return np.asarray(tokens, np.uint32).tobytes()
    except OverflowError:
        raise InvalidRequest(
            "token ids must not be below zero, nor above all that there are", "prompt"
        ) from None


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


def _status(good: str, trouble: str | None) -> Response:
    return json_response(
        {"status": good} if trouble is None else {"status": "unavailable", "reason": trouble},
        503 if trouble else 200,
    )
