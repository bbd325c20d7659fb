"""How blocks are kept in Valkey or Redis, and what the server's answers mean. Owns names, commands and their outcomes; connections are
`valkey_links`' and the bytes on them `wire`'s.

Commands are sent ahead of the answers to those before them, to each node as many as its link has on their way at once, and answered in that
order. An answer that ends the call leaves its connections with answers owed, so they are thrown away.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from penstock.errors import InvariantBroken, StoreFailed
from penstock.kv.tiers.envelope import FORMAT, HEADER_BYTES, pack, unpack
from penstock.kv.tiers.remote.valkey_links import Link, Links
from penstock.kv.tiers.remote.valkey_url import Node, ValkeyAddress
from penstock.kv.tiers.remote.wire import Refusal, Wire, command, command_with_value
from penstock.kv.tiers.store import Outcome, Space

_SCAN_KEYS = b"1000"

_Calls = list[tuple[Link, list[int]]]


class Exchange:
    """Blocks of one space, over `links`. For several threads."""

    def __init__(self, address: ValkeyAddress, links: Links, space: Space) -> None:
        self._is_cluster = address.cluster
        self._ttl_s = address.ttl_s
        self._links = links
        self._digest = space.digest
        self._value_bytes = HEADER_BYTES + space.block_bytes
        self._prefix = f"penstock:{FORMAT}:{space.digest.hex()}:".encode()

    def exist(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        names = self._names(keys)
        return self._ask_each(names, [command(b"EXISTS", name) for name in names], deadline)

    def ping(self, node: Node, deadline: float) -> None:
        with self._links.link(node, deadline) as link:
            link.wire.send([command(b"PING")], 1)
            if isinstance(answer := link.wire.read_answer(), Refusal):
                self._moved_or_failed(answer)

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

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: float) -> list[Outcome]:
        _need_whole(into, self._value_bytes - HEADER_BYTES)
        names = self._names(keys)
        outcomes = [Outcome.MISSING] * len(keys)
        with self._calls(names, deadline) as calls:
            for link, places in calls:
                _ask_for(link.wire, [names[place] for place in places[: link.at_once(self._value_bytes)]])
            for link, places in calls:
                ahead = link.at_once(self._value_bytes)
                for index, place in enumerate(places):
                    received = self._receive(link.wire, into[place])
                    _ask_for(link.wire, [names[later] for later in places[index + ahead : index + ahead + 1]])
                    if not isinstance(received, Outcome):
                        received = _checked(received, keys[place], self._digest, into[place])
                    outcomes[place] = received
                _unlink(link.wire, [names[place] for place in places if outcomes[place] is Outcome.CORRUPT])
        return outcomes

    def _receive(self, wire: Wire, target: memoryview) -> memoryview | Outcome:
        """A value's header, and the rest of it in `target`; an outcome where there is no such value."""
        size = wire.read_value_size()
        if size is None:
            return Outcome.MISSING
        if isinstance(size, Refusal):
            if size.word == "WRONGTYPE":  # somebody else's list or set, under our name
                return Outcome.CORRUPT
            self._moved_or_failed(size)
            return Outcome.MISSING
        if size != self._value_bytes:
            wire.skip(size)
            wire.end_value()
            return Outcome.CORRUPT
        header = memoryview(bytearray(HEADER_BYTES))
        wire.read_into(header)
        wire.read_into(target)
        wire.end_value()
        return header

    def write(self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: float) -> list[Outcome]:
        _need_whole(blocks, self._value_bytes - HEADER_BYTES)
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
        return command(b"TOUCH", name) if self._ttl_s is None else command(b"EXPIRE", name, b"%d" % self._ttl_s)

    def _set_each(self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: float) -> list[Outcome]:
        names = self._names(keys)
        expiry = () if self._ttl_s is None else (b"EX", b"%d" % self._ttl_s)
        outcomes = [Outcome.FAILED] * len(keys)
        with self._calls(names, deadline) as calls:
            for link, places in calls:
                ahead = link.at_once(self._value_bytes)
                for index, place in enumerate(places):
                    if index >= ahead:
                        outcomes[places[index - ahead]] = self._written(link.wire.read_answer())
                    header = pack(keys[place], self._digest, blocks[place])  # just before they are sent: both passes over one cache
                    before, behind = command_with_value((b"SET", names[place]), self._value_bytes, expiry)
                    link.wire.send([before, header, blocks[place], behind], 1)
            for link, places in calls:
                for place in places[-link.wire.num_owed :]:
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
        if moved and self._is_cluster:
            self._links.forget()
            return
        hint = ": it is a cluster, add ?cluster=1" if moved else ""
        raise StoreFailed(f"the shared store refuses: {refusal.word}{hint}")

    def reset(self, node: Node, timeout_s: float) -> int:
        """How many went from `node`. Each exchange has `timeout_s`: together they take as long as they take."""
        with self._links.link(node, time.monotonic() + timeout_s) as link:
            return self._reset_over(link, timeout_s)

    def _reset_over(self, link: Link, timeout_s: float) -> int:
        cursor, num_gone = b"", 0
        while cursor != b"0":
            link.wire.deadline = time.monotonic() + timeout_s
            answer = link.ask(b"SCAN", cursor or b"0", b"MATCH", self._prefix + b"*", b"COUNT", _SCAN_KEYS)
            if not (isinstance(answer, list) and len(answer) == 2 and isinstance(answer[0], bytes) and isinstance(answer[1], list)):
                raise StoreFailed("the shared store answered SCAN with something else")
            cursor, names = answer
            answers = _unlink(link.wire, names)
            for refusal in (answer for answer in answers if isinstance(answer, Refusal)):
                self._moved_or_failed(refusal)
            num_gone += answers.count(1)
        return num_gone

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


def _need_whole(blocks: Sequence[memoryview], block_bytes: int) -> None:
    """Bytes beyond the length that was announced would be taken for commands."""
    if any(len(view) != block_bytes or view.nbytes != block_bytes for view in blocks):
        raise InvariantBroken(f"a block is a view of {block_bytes} bytes")


def _checked(header: memoryview, key: bytes, digest: bytes, payload: memoryview) -> Outcome:
    envelope = unpack(header)
    ours = envelope is not None and envelope.key == key and envelope.space == digest and envelope.fits(payload)
    return Outcome.DONE if ours else Outcome.CORRUPT


def _ask_for(wire: Wire, names: Sequence[bytes]) -> None:
    if names:
        wire.send([b"".join(command(b"GET", name) for name in names)], len(names))


def _unlink(wire: Wire, names: Sequence[bytes]) -> list[bytes | int | Refusal]:
    """One by one, because of clusters."""
    if names:
        wire.send([b"".join(command(b"UNLINK", name) for name in names)], len(names))
    return [wire.read_answer() for _ in names]
