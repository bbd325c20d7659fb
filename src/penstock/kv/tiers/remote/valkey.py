"""Blocks in Valkey or Redis, a single server or a cluster, shared by all engines that name it. Owns how a block is kept there and what the
server's answers mean; connections are `valkey_links`' and the bytes on them `wire`'s.

One block is one value, its header before its bytes, under `penstock:FORMAT:SPACE:KEY`. The server forgets blocks as its own memory policy
or their time to live says: that is a miss like any other.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, StoreFailed
from penstock.kv.tiers.envelope import FORMAT, HEADER_BYTES, pack, unpack
from penstock.kv.tiers.remote.valkey_url import Address, Node, parse
from penstock.kv.tiers.remote.wire import Refusal, Wire, command, command_with_value
from penstock.kv.tiers.store import BlockStore, Outcome, Space, StoreUsage

if TYPE_CHECKING:
    from penstock.kv.tiers.remote.valkey_links import Link, Links

_FIND_KEYS = 512  # questions on their way at once
_WINDOW_BYTES = 16 << 20  # of values on their way at once: the server keeps them in memory until they are taken
_SCAN_KEYS = b"1000"

_Calls = list[tuple["Link", list[int]]]


def open_store(url: str, space: Space, timeout_s: float) -> BlockStore:
    """Connects lazily. Raises ConfigError for what can never work."""
    address = parse(url, os.environ)
    try:
        importlib.import_module("valkey")
    except ImportError:
        raise ConfigError("--kv-offload-remote valkey:// needs the client library: pip install 'penstock[remote]'") from None
    from penstock.kv.tiers.remote.valkey_links import Links

    return ValkeyStore(address, Links(address), space, timeout_s)


class ValkeyStore:
    """A `BlockStore`. Every call has connections of its own while it runs."""

    name = "remote"
    local = False

    def __init__(self, address: Address, links: Links, space: Space, timeout_s: float) -> None:
        self._address = address
        self._links = links
        self._digest = space.digest
        self._block_bytes = space.block_bytes
        self._timeout_s = timeout_s
        self._prefix = f"penstock:{FORMAT}:{space.digest.hex()}:".encode()
        self._window = max(1, _WINDOW_BYTES // (HEADER_BYTES + space.block_bytes))

    def __repr__(self) -> str:
        kind = "cluster " if self._address.cluster else ""
        return f"<ValkeyStore {kind}{', '.join(map(str, self._address.nodes))}{' with TLS' if self._address.tls else ''}>"

    # ------------------------------------------------------------------------------------------------------------------ blocks

    def find(self, keys: Sequence[bytes]) -> int:
        deadline = self._deadline()
        for first in range(0, len(keys), _FIND_KEYS):
            names = self._names(keys[first : first + _FIND_KEYS])
            found = self._ask_each(names, [command(b"EXISTS", name) for name in names], deadline)
            if not all(found):
                return first + found.index(False)
        return len(keys)

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        deadline = self._deadline()
        outcomes: list[Outcome] = []
        for first in range(0, len(keys), self._window):
            some = slice(first, first + self._window)
            outcomes += self._read_window(keys[some], into[some], deadline)
        return outcomes

    def write(self, keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]) -> list[Outcome]:
        """What is there already is not sent again, only marked as used."""
        deadline = self._deadline()
        outcomes: list[Outcome] = []
        for first in range(0, len(keys), self._window):
            some = slice(first, first + self._window)
            outcomes += self._write_window(keys[some], blocks[some], deadline)
        return outcomes

    # ------------------------------------------------------------------------------------------------------------- the whole place

    def persist(self) -> None:
        """What outlives the server is for its owner to say: it is asked for nothing here."""

    def probe(self) -> None:
        """Every node must answer: one that does not would take its share of the blocks down with it."""
        deadline = self._deadline()
        if self._address.cluster:
            self._links.forget()
        for node in self._links.nodes(deadline):
            with self._links.link(node, deadline) as link:
                link.wire.send([command(b"PING")], 1)
                if isinstance(answer := link.wire.read_answer(), Refusal):
                    self._moved_or_failed(answer)

    def reset(self) -> int:
        """As long as it takes; each exchange has the time that calls have."""
        num_gone = 0
        for node in self._links.nodes(self._deadline()):
            with self._links.link(node, self._deadline()) as link:
                num_gone += self._reset_node(link)
        return num_gone

    def usage(self) -> StoreUsage:
        """Others write and evict there, too: nobody counts but the server."""
        return StoreUsage(0)

    def close(self) -> None:
        self._links.close()

    # ------------------------------------------------------------------------------------------------------------------ inside

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s

    def _names(self, keys: Sequence[bytes]) -> list[bytes]:
        return [self._prefix + key.hex().encode() for key in keys]

    @contextlib.contextmanager
    def _calls(self, names: Sequence[bytes], deadline: float) -> Iterator[_Calls]:
        """A link to each node that has some of `names`, with their places; names that no node has are in none."""
        node_of = self._links.locator(deadline)
        places: dict[Node | None, list[int]] = {}
        with contextlib.ExitStack() as stack:
            for place, name in enumerate(names):
                places.setdefault(node_of(name), []).append(place)
            yield [(stack.enter_context(self._links.link(node, deadline)), some) for node, some in places.items() if node is not None]

    def _ask_each(self, names: Sequence[bytes], questions: Sequence[bytes], deadline: float) -> list[bool]:
        """A question about each name whose answer is 1 or 0. What is with another node by now counts as 0."""
        answers = [False] * len(names)
        with self._calls(names, deadline) as calls:
            for link, places in calls:
                link.wire.send([b"".join(questions[place] for place in places)], len(places))
            for link, places in calls:
                for place in places:
                    answer = link.wire.read_answer()
                    if isinstance(answer, Refusal):
                        self._moved_or_failed(answer)
                    answers[place] = answer == 1
        return answers

    def _read_window(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: float) -> list[Outcome]:
        names = self._names(keys)
        outcomes = [Outcome.MISSING] * len(keys)
        with self._calls(names, deadline) as calls:
            for link, places in calls:
                link.wire.send([b"".join(command(b"GET", names[place]) for place in places)], len(places))
            for link, places in calls:
                for place in places:
                    outcomes[place] = self._receive(link.wire, keys[place], into[place])
                _remove(link.wire, [names[place] for place in places if outcomes[place] is Outcome.CORRUPT])
        return outcomes

    def _receive(self, wire: Wire, key: bytes, target: memoryview) -> Outcome:
        size = wire.read_value_size()
        if size is None:
            return Outcome.MISSING
        if isinstance(size, Refusal):
            if size.word == "WRONGTYPE":  # somebody else's list or set, under our name
                return Outcome.CORRUPT
            self._moved_or_failed(size)
            return Outcome.MISSING
        if size != HEADER_BYTES + self._block_bytes:
            wire.skip(size)
            wire.end_value()
            return Outcome.CORRUPT
        header = memoryview(bytearray(HEADER_BYTES))
        wire.read_into(header)
        wire.read_into(target)
        wire.end_value()
        envelope = unpack(header)
        ours = envelope is not None and envelope.key == key and envelope.space == self._digest and envelope.fits(target)
        return Outcome.DONE if ours else Outcome.CORRUPT

    def _write_window(self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: float) -> list[Outcome]:
        names = self._names(keys)
        there = self._ask_each(names, [self._mark_used(name) for name in names], deadline)
        left = [place for place, known in enumerate(there) if not known]
        written = self._set_each([keys[place] for place in left], [blocks[place] for place in left], deadline)
        outcomes = [Outcome.DONE] * len(keys)
        for place, outcome in zip(left, written, strict=True):
            outcomes[place] = outcome
        return outcomes

    def _mark_used(self, name: bytes) -> bytes:
        """Answered with 1 where the name is there. Starts its time to live again, if there is one."""
        return command(b"TOUCH", name) if self._address.ttl_s is None else command(b"EXPIRE", name, b"%d" % self._address.ttl_s)

    def _set_each(self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: float) -> list[Outcome]:
        names = self._names(keys)
        expiry = () if self._address.ttl_s is None else (b"EX", b"%d" % self._address.ttl_s)
        outcomes = [Outcome.FAILED] * len(keys)
        with self._calls(names, deadline) as calls:
            for link, places in calls:
                for place in places:
                    header = pack(keys[place], self._digest, blocks[place])
                    before, behind = command_with_value((b"SET", names[place]), len(header) + len(blocks[place]), expiry)
                    link.wire.send([before, header, blocks[place], behind], 1)
            for link, places in calls:
                for place in places:
                    outcomes[place] = self._written(link.wire.read_answer())
        return outcomes

    def _written(self, answer: bytes | int | Refusal) -> Outcome:
        if answer == b"OK":
            return Outcome.DONE
        if not isinstance(answer, Refusal):
            raise StoreFailed("the shared store answered SET with something else")
        if answer.word == "OOM":
            return Outcome.FULL
        self._moved_or_failed(answer)
        return Outcome.FAILED

    def _moved_or_failed(self, refusal: Refusal) -> None:
        """Returns where one name is with another node by now: which one has what is asked anew next time."""
        moved = refusal.word in ("MOVED", "ASK")
        if moved and self._address.cluster:
            self._links.forget()
            return
        hint = ": it is a cluster, add ?cluster=1" if moved else ""
        raise StoreFailed(f"the shared store refuses: {refusal.word}{hint}")

    def _reset_node(self, link: Link) -> int:
        cursor, num_gone = b"", 0
        while cursor != b"0":
            link.wire.deadline = self._deadline()
            answer = link.ask(b"SCAN", cursor or b"0", b"MATCH", self._prefix + b"*", b"COUNT", _SCAN_KEYS)
            if not (isinstance(answer, list) and len(answer) == 2 and isinstance(answer[0], bytes) and isinstance(answer[1], list)):
                raise StoreFailed("the shared store answered SCAN with something else")
            cursor, names = answer
            num_gone += _remove(link.wire, names)
        return num_gone


def _remove(wire: Wire, names: Sequence[bytes]) -> int:
    """How many went. One by one, because of clusters; a server that refuses keeps them."""
    if not names:
        return 0
    wire.send([b"".join(command(b"UNLINK", name) for name in names)], len(names))
    return sum(wire.read_answer() == 1 for _ in names)
