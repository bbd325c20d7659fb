"""The routes that load and unload adapters. Owns that one comes after another; names, files and weights are the engine's."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from penstock.contract import LoadedAdapter
from penstock.errors import InvalidRequest
from penstock.server import schema
from penstock.server.faults import Refused, json_response
from penstock.server.service import Service


class Adapters:
    """Both routes answer 403 unless the server was told which directory clients may load from."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._turn = anyio.CapacityLimiter(1)  # each reads and holds a whole file; the threads for prompts are others

    async def load(self, request: Request) -> Response:
        self._check_allowed()
        with self._service.loads.take(1):
            body, _ = await self._service.body(request, schema.LoadLoraBody)
            if body.lora_name in self._service.names:
                raise InvalidRequest(f"{body.lora_name!r} is the name of the model itself; give the adapter another", "lora_name")
            store = self._service.engine.adapters
            loaded = await anyio.to_thread.run_sync(store.load_inside, body.lora_name, body.lora_path, limiter=self._turn)
            return json_response({**adapter_card(self._service, loaded), "replaced": loaded.replaced})

    async def unload(self, request: Request) -> Response:
        self._check_allowed()
        body, _ = await self._service.body(request, schema.UnloadLoraBody)
        if not await anyio.to_thread.run_sync(self._service.engine.adapters.unload, body.lora_name, limiter=self._turn):
            raise Refused(404, f"there is no adapter {body.lora_name!r} here", param="lora_name", code="model_not_found")
        return json_response({"id": body.lora_name, "object": "model", "deleted": True})

    def _check_allowed(self) -> None:
        if self._service.engine.adapters.root is None:
            message = "adapters cannot be loaded or unloaded over HTTP here: the server was started without --lora-dir"
            raise Refused(403, message, code="lora_loading_off")


def adapter_card(service: Service, loaded: LoadedAdapter) -> dict[str, Any]:
    """As it is listed among the models."""
    return {
        "id": loaded.adapter.name,
        "object": "model",
        "created": int(loaded.loaded_s),
        "owned_by": "penstock",
        "root": loaded.root,
        "parent": service.names[0],
        "max_model_len": service.engine.max_model_len,
    }
