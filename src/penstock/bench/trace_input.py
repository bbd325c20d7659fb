"""What `bench trace` replays: a trace of either form, with one-off documents in it or not. Owns the order of requests; replays nothing."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from penstock.bench.agentic import Conversation, Recorded, is_agentic, read_conversations
from penstock.bench.mooncake import BLOCK_TOKENS, Trace, read_trace
from penstock.errors import ConfigError

INTERLEAVES = ("time", "turns")


def read_any(path: Path, num_requests: int | None = None, interleave: str | None = None) -> Trace:
    """A Mooncake trace in the order of its file, or conversations of agents, of which all begin at once. `interleave` says in which order
    those have their requests: by recorded times, or taking turns."""
    if is_agentic(path):
        return _agentic_trace(path, num_requests, interleave or INTERLEAVES[0])
    if interleave is not None:
        raise ConfigError("--interleave is for traces of conversations; a Mooncake trace has an order of its own")
    return read_trace(path, num_requests)


def with_scan(trace: Trace, num: int, num_blocks: int) -> Trace:
    """The same with `num` documents of `num_blocks` blocks, none of which comes back, spread evenly over it."""
    prompts = list(trace.prompts)
    for number in reversed(range(num)):
        document = [_key(b"scan", number, depth) for depth in range(num_blocks)]
        prompts.insert((2 * number + 1) * len(trace.prompts) // (2 * num), document)
    return replace(trace, prompts=prompts, num_scans=num, scan_blocks=num_blocks)


def _agentic_trace(path: Path, num_requests: int | None, interleave: str) -> Trace:
    requests: list[tuple[float, Recorded, list[bytes]]] = []
    for conversation in read_conversations(path):
        keys = _keys(conversation)
        for number, (one, its) in enumerate(zip(conversation.requests, keys, strict=True)):
            requests.append((one.at_s if interleave == "time" else number, one, its))
    requests.sort(key=lambda each: each[0])  # stable: at the same time in the order of the file
    requests = requests[:num_requests]
    if not any(keys for _, _, keys in requests):
        raise ConfigError(f"the trace {path} has no prompt with a full block of {BLOCK_TOKENS} tokens: there is nothing to keep")
    prompts, num_tokens = [keys for _, _, keys in requests], sum(one.num_tokens for _, one, _ in requests)
    return Trace(path.name, prompts, num_tokens, interleave=interleave)


def _keys(conversation: Conversation) -> list[list[bytes]]:
    """Of full blocks of Mooncake's size, each standing for its own ids and all before it. Sub-agents share their parent's."""
    step, rest = divmod(BLOCK_TOKENS, conversation.block_tokens)
    if rest or not step:
        raise ConfigError(f"{conversation.id}: blocks of {conversation.block_tokens} tokens do not make up blocks of {BLOCK_TOKENS}")
    prompts: list[list[bytes]] = []
    before: tuple[bytes, list[bytes]] = b"", []
    for one in conversation.requests:
        raw, width = one.blocks.tobytes(), step * one.blocks.itemsize
        shared = _num_shared(raw, before[0], width)
        keys = before[1][:shared]
        for depth in range(shared, len(one.blocks) // step):
            last = keys[-1] if keys else conversation.family.encode()
            keys.append(_key(last, depth, raw[depth * width : (depth + 1) * width]))
        prompts.append(keys)
        before = raw, keys
    return prompts


def _num_shared(one: bytes, other: bytes, width: int) -> int:
    """Leading pieces of `width` bytes that both have."""
    num = 0
    while (num + 1) * width <= min(len(one), len(other)) and one[num * width : (num + 1) * width] == other[num * width : (num + 1) * width]:
        num += 1
    return num


def _key(*parts: bytes | int) -> bytes:
    return blake2b(repr(parts).encode(), digest_size=16).digest()
