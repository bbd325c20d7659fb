"""Routes about snapshots, and what a request that continues from one is given. Owns shapes and names; snapshots are the engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from penstock.contract import Snapshot, SnapshotContent, SnapshotRequest
from penstock.errors import InvalidRequest
from penstock.server import schema
from penstock.server.faults import json_response
from penstock.server.schema import ChatBody, CompletionBody, SnapshotBody
from penstock.server.text import Prompt, Rules, chat_prompts, continued_prompts, encode_given

if TYPE_CHECKING:
    from penstock.models.tokenizer import TextCodec
    from penstock.server.service import Service

_messages = msgspec.json.Decoder(list[schema.Message])


class SnapshotRoutes:
    """A tenant is known by its cache_salt, in the body or in the query: what another one has is not there for it."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def collection(self, request: Request) -> Response:
        return await (self._take(request) if request.method == "POST" else self._all(request))

    async def one(self, request: Request) -> Response:
        """Read or deleted by its name."""
        salt, name = self._salt(request), request.path_params["name"]
        with self._service.side.take(1):
            if request.method == "DELETE":
                await self._service.on_snapshots(lambda snapshots: snapshots.delete(name, salt))
                return json_response({"id": name, "object": "snapshot", "deleted": True})
            return json_response(_card(await self._service.on_snapshots(lambda snapshots: snapshots.find(name, salt))))

    async def _all(self, request: Request) -> Response:
        salt = self._salt(request)
        with self._service.side.take(1):
            found = await self._service.on_snapshots(lambda snapshots: snapshots.all(salt))
        pinned = {"tier": found.tier, "blocks": found.pinned_blocks, "max_blocks": found.pinned_blocks_max}
        pinned = {**pinned, "bytes": found.pinned_blocks * found.block_bytes, "max_bytes": found.pinned_blocks_max * found.block_bytes}
        data = [_card(one) for one in found.snapshots]
        return json_response({"object": "list", "data": data, "complete": found.is_complete, "pinned": pinned})

    async def _take(self, request: Request) -> Response:
        """Answers when its blocks and its manifest are where they outlive the process, where they can."""
        with self._service.side.take(1):
            body, num_bytes = await self._service.body(request, SnapshotBody)
            body.check()
            asked = await self._service.compute(lambda: self._asked(body), num_bytes)
            return json_response(_card(await self._service.on_snapshots(lambda snapshots: snapshots.take(asked))))

    def _asked(self, body: SnapshotBody) -> SnapshotRequest:
        """On a worker thread where the body is large."""
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
        raise InvalidRequest("token ids must not be below zero, nor above all that there are", "prompt") from None


def _card(snapshot: Snapshot) -> dict[str, Any]:
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


# ---------------------------------------------------------------------------------------------------------- continuing from one


def prompts_after(content: SnapshotContent, tokenizer: TextCodec, body: CompletionBody | ChatBody, rules: Rules) -> list[Prompt]:
    """Of a text: the snapshot's tokens, then those of each prompt. Of a conversation: its messages, then the request's, written by the
    template as one. So the prompt is the one that somebody would send who sends everything, whatever the template puts where."""
    if isinstance(body, CompletionBody):
        return continued_prompts(tokenizer, body, rules, np.frombuffer(content.tokens, np.uint32).tolist())
    if not content.messages:
        message = "this snapshot was not taken of messages, so a conversation cannot be continued from it: use /v1/completions"
        raise InvalidRequest(message, "snapshot")
    whole = msgspec.structs.replace(body, messages=[*_messages.decode(content.messages), *body.messages])
    return chat_prompts(tokenizer, whole, rules)
