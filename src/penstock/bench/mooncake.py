"""Reads a Mooncake trace: one request per line, its prompt as ids of blocks of 512 tokens. Owns the format; replays nothing.

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, ...]}

An id stands for the content of its block and of all before it, as a key does here. Only full blocks have a key, so the id of a prompt's
unfinished last block is left out. Times and output lengths are not used.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TypeGuard

from penstock.errors import ConfigError

BLOCK_TOKENS = 512
UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError)  # what reading a file may raise, packed or not
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Trace:
    """The prompts of one file, in order, as keys of full blocks. One-off documents among them are no part of its figures."""

    name: str
    prompts: list[list[bytes]]
    num_tokens: int  # of recorded prompts, unfinished blocks included
    num_scans: int = 0  # one-off documents among the prompts, of `scan_blocks` blocks each
    scan_blocks: int = 0
    interleave: str | None = None  # how conversations were put in order; None: there are none, and the order is the file's

    @property
    def num_requests(self) -> int:
        return len(self.prompts) - self.num_scans

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.prompts)) - self.num_scans * self.scan_blocks

    @property
    def num_distinct(self) -> int:
        return len({key for keys in self.prompts for key in keys}) - self.num_scans * self.scan_blocks


def read_trace(path: Path, num_requests: int | None = None) -> Trace:
    """The first `num_requests` of them, or all."""
    prompts: list[list[bytes]] = []
    num_tokens = 0
    keys: dict[int, bytes] = {}
    try:
        for number, line in numbered_lines(path):
            if len(prompts) == num_requests:
                break
            length, ids = _parse(line, f"{path}, line {number}")
            num_tokens += length
            prompts.append([keys.setdefault(i, _key(i)) for i in ids[: length // BLOCK_TOKENS]])
    except UNREADABLE as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from None
    if not any(prompts):
        raise ConfigError(f"the trace {path} has no prompt with a full block of {BLOCK_TOKENS} tokens: there is nothing to keep")
    return Trace(path.name, prompts, num_tokens)


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Those of a file, packed by gzip or not, that are not empty. Raises one of UNREADABLE."""
    with path.open("rb") as raw:
        packed = raw.peek(len(_GZIP))[: len(_GZIP)] == _GZIP
        for number, line in enumerate(gzip.GzipFile(fileobj=raw) if packed else raw, 1):
            if line.strip():
                yield number, line.decode("utf-8")


def _key(block: int) -> bytes:
    return blake2b(str(block).encode(), digest_size=16).digest()


def _parse(line: str, where: str) -> tuple[int, list[int]]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: expected an object with input_length and hash_ids")
    length, ids = fields.get("input_length"), fields.get("hash_ids")
    if not is_whole(length) or not isinstance(ids, list) or not all(map(is_whole, ids)):
        raise ConfigError(f"{where}: input_length must be a whole number and hash_ids a list of them, none negative")
    if len(ids) != -(-length // BLOCK_TOKENS):
        raise ConfigError(f"{where}: {len(ids)} hash_ids for an input_length of {length}; one stands for {BLOCK_TOKENS} tokens")
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{where}: hash_ids names a block twice; an id stands for its block and all before it")
    return length, ids


def is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
