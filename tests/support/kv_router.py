"""A router's books of KV events, kept by a decoder of its own: MessagePack and the schema that vLLM has, as
recorded in tests/data. Owns no socket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]

_SCHEMA = json.loads((Path(__file__).parents[1] / "data" / "vllm-kv-events.json").read_text())
_IS: dict[str, Any] = {
    "list[ExternalBlockHash]": lambda v: bool(v) and all(map(_is_hash, v)),
    "ExternalBlockHash | None": lambda v: v is None or _is_hash(v),
    "list[int]": lambda v: all(type(one) is int and 0 <= one < 1 << 32 for one in v),
    "int": lambda v: type(v) is int,
    "int | None": lambda v: v is None or type(v) is int,
    "str | None": lambda v: v is None or type(v) is str,
}


def _is_hash(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 64


def decoded(payload: bytes) -> list[dict[str, Any]]:
    """The events of a message that has the schema's form."""
    batch = msgpack.unpackb(payload)
    names = [*_SCHEMA["EventBatch"]["required"], *_SCHEMA["EventBatch"]["optional"]]
    assert names == ["ts", "events", "data_parallel_rank"] and len(batch) == len(names)
    when, events, rank = batch
    assert type(when) is float and rank == 0 and events
    for event in events:
        fields = {name: value for name, value in event.items() if name != _SCHEMA["tag"]}
        known = _SCHEMA[event[_SCHEMA["tag"]]]
        types = {**known["required"], **known["optional"]}
        assert fields.keys() >= known["required"].keys() and fields.keys() <= types.keys(), event
        assert all(_IS[types[name]](value) for name, value in fields.items()), event
        assert fields.get("medium", "GPU") in _SCHEMA["media"]
    return events


class Router:
    """`blocks`: by medium and hash, the token ids. A removal of what is not there, or a block that comes
    twice, is a defect of the sender."""

    def __init__(self) -> None:
        self.blocks: dict[str, dict[int, tuple[int, ...]]] = {}
        self.adapters: dict[int, str | None] = {}  # by hash
        self.parents: dict[int, int | None] = {}
        self.kinds: list[str] = []  # of all events
        self.next_sequence = 0

    def hear(self, sequence: int, payload: bytes) -> None:
        """A message with the next sequence number."""
        assert sequence == self.next_sequence, "a message is missing"
        self.next_sequence += 1
        for event in decoded(payload):
            self.kinds.append(event["type"])
            getattr(self, f"_{event['type']}")(event)

    def held(self, medium: str) -> set[int]:
        return set(self.blocks.get(medium, ()))

    @property
    def tokens(self) -> set[int]:
        return {token for blocks in self.blocks.values() for some in blocks.values() for token in some}

    def _BlockStored(self, event: dict[str, Any]) -> None:  # noqa: N802
        size, tokens, parent = event["block_size"], event["token_ids"], event["parent_block_hash"]
        assert len(tokens) == size * len(event["block_hashes"])
        there = self.blocks.setdefault(event["medium"], {})
        for place, one in enumerate(event["block_hashes"]):
            assert one not in there, "it is there already"
            there[one] = tuple(tokens[place * size : (place + 1) * size])
            self.adapters[one], self.parents[one] = event["lora_name"], parent
            parent = one

    def _BlockRemoved(self, event: dict[str, Any]) -> None:  # noqa: N802
        for one in event["block_hashes"]:
            del self.blocks[event["medium"]][one]

    def _AllBlocksCleared(self, event: dict[str, Any]) -> None:  # noqa: N802
        self.blocks.clear()
