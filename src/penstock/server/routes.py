"""The paths that the server answers. Owns the table and the small routes; the generating ones are in `generate`."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.server import metrics, schema
from penstock.server.faults import json_response
from penstock.server.generate import CHAT, COMPLETIONS, Generate
from penstock.server.limits import read_body
from penstock.server.service import Service
from penstock.server.text import check_ids, encode_chat

OPEN_PATHS = frozenset({"/health", "/live"})  # probes have no key


def make_routes(service: Service) -> list[Route]:
    small = Small(service)
    return [
        Route("/v1/completions", Generate(service, COMPLETIONS), methods=["POST"]),
        Route("/v1/chat/completions", Generate(service, CHAT), methods=["POST"]),
        Route("/v1/models", small.models, methods=["GET"]),
        Route("/v1/models/{model:path}", small.model, methods=["GET"]),
        Route("/tokenize", small.tokenize, methods=["POST"]),
        Route("/detokenize", small.detokenize, methods=["POST"]),
        Route("/cache/reset", small.cache_reset, methods=["POST"]),
        Route("/cache/stats", small.cache_stats, methods=["GET"]),
        Route("/health", small.health, methods=["GET"]),
        Route("/live", small.live, methods=["GET"]),
        Route("/metrics", small.metrics, methods=["GET"]),
    ]


class Small:
    """Routes that answer at once."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._exposition = metrics.Exposition(service.engine)

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._service.check_model(request.path_params["model"])
        return json_response(self._card())

    async def tokenize(self, request: Request) -> Response:
        with self._service.side.take(1):
            body, num_bytes = await self._body(request, schema.TokenizeBody)
            body.check()
            tokenizer = self._service.engine.tokenizer

            def encode() -> list[int]:
                if body.messages is not None:
                    return encode_chat(tokenizer, body.messages)
                return tokenizer.encode(body.prompt, add_special=body.add_special_tokens)

            tokens = await self._service.compute(encode, num_bytes)
            return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": self._service.engine.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        with self._service.side.take(1):
            body, num_bytes = await self._body(request, schema.DetokenizeBody)
            tokenizer = self._service.engine.tokenizer
            check_ids(tokenizer, body.tokens, "tokens")
            text = await self._service.compute(lambda: tokenizer.decode(body.tokens, skip_special=False), num_bytes)
            return json_response({"prompt": text})

    async def cache_reset(self, request: Request) -> Response:
        schema.check_query(request.query_params, tier=("device", "all"))
        num_evicted = await self._service.reset_cache()
        return json_response({"tier": request.query_params.get("tier", "all"), "evicted_blocks": num_evicted})

    async def cache_stats(self, request: Request) -> Response:
        schema.check_query(request.query_params)
        stats = self._service.engine.stats()
        device = {"total": sum(stats.kv_blocks.values()), **stats.kv_blocks}
        content = {
            "kv_blocks": {"device": device},
            "cache": stats.cache,
            "prompt_tokens": stats.prompt_tokens,
            "retractions": stats.retractions,
        }
        return json_response(content)

    async def health(self, request: Request) -> Response:
        trouble = "the server is shutting down" if self._service.stopping else self._service.trouble()
        return _status("ready", trouble)

    async def live(self, request: Request) -> Response:
        return _status("live", self._service.trouble())

    async def metrics(self, request: Request) -> Response:
        return Response(self._exposition.text(), headers={"content-type": metrics.CONTENT_TYPE})

    async def _body(self, request: Request, kind: type[msgspec.Struct]) -> tuple[Any, int]:
        schema.check_query(request.query_params)
        data = await read_body(request.scope, request.receive, self._service.config.max_body_bytes)
        body: Any = schema.decode(data, kind)
        self._service.check_model(body.model)
        return body, len(data)

    def _card(self) -> dict[str, Any]:
        engine = self._service.engine
        return {
            "id": engine.name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "penstock",
            "max_model_len": engine.max_model_len,
        }


def _status(good: str, trouble: str | None) -> Response:
    return json_response({"status": good} if trouble is None else {"status": "unavailable", "reason": trouble}, 503 if trouble else 200)
