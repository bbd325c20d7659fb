"""Snapshots of conversations by name: their manifests, their pins, and when they expire. Owns the manifests
that this process knows, and the limit on pinned blocks; blocks and files belong to the tiers.

A snapshot moves nothing. Its blocks are in the tiers under their keys. In the last tier with its own eviction
they stay until the snapshot is deleted or expires. A block that is lost anyway is computed again from the
manifest's tokens.

Everything that may block runs on one lane, in order, so the books need no lock. `step` is for the engine
thread and never blocks. Calls wait in a bounded queue for the lane: `begin_x` returns a future, and
cancelling it leaves the queue.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from penstock.contract import Adapter, Snapshot, SnapshotContent, SnapshotList, SnapshotRequest
from penstock.errors import (
    DeadlineExceeded,
    InvalidRequest,
    SnapshotMissing,
    SnapshotRefused,
    SnapshotSpace,
    SnapshotTaken,
    StoreFailed,
)
from penstock.figures import SnapshotFigures
from penstock.kv.blocks.key import Tokens, tenant_of
from penstock.kv.cache import KvCache
from penstock.kv.questions import Questions, run_steps
from penstock.kv.states import KeptStates
from penstock.kv.tiers.cold import ColdTier
from penstock.kv.tiers.host import HOST, HostTier
from penstock.kv.tiers.manifest import (
    Manifest,
    check_scope,
    check_space,
    pack,
    snapshot_id,
    token_bytes,
    unpack,
    words_of,
)
from penstock.kv.tiers.store import ManifestStore, PinningStore, Written

log = logging.getLogger(__name__)

PINNED_SHARE = 0.5  # share of the last tier's blocks that all snapshots may pin
MAX_SNAPSHOTS = 4096
MAX_MANIFEST_BYTES = 64 << 20
_WRITE_TRIES = 3  # of a manifest: another engine may remove or replace the one under its name
_LIST_AT_ONCE = 16  # snapshots of a list that are read before other calls get a turn
MOST_WAITING = 64  # calls that wait for the lane; equal ones count once
ANSWER_S = 60.0  # timeout for the lane's answer
_NEVER = float("inf")

T = TypeVar("T")
KeysOf = Callable[[Manifest], Sequence[bytes]]


class PinnedBlocks:
    """Blocks that snapshots pin in the last tier with its own eviction, each counted once, and their
    limit."""

    def __init__(
        self, host: HostTier, cold: Mapping[str, ColdTier], keys_of: KeysOf, most_in_host: int | None = None
    ) -> None:
        """`keys_of`: what a snapshot pins. `most_in_host`: the limit if the last tier is host memory; None:
        the usual share."""
        self._host, self._cold = host, cold
        self._keys_of = keys_of
        self._most_in_host = most_in_host
        self._pins: Counter[bytes] = Counter()  # by block: number of snapshots that pin it
        self.pinning: dict[str, Manifest] = {}  # snapshots that pin blocks, by id, also those being taken
        # The coldest tier whose evictions Penstock decides: blocks can be pinned there for good. A shared
        # store evicts by its own rules.
        self.tier: str = HOST
        self.last: PinningStore = host
        for name, tier in cold.items():
            if isinstance(tier.calls.store, PinningStore):
                self.tier, self.last = name, tier.calls.store

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_slots(self) -> int:
        tier = self._cold.get(self.tier)
        return self._host.num_slots if tier is None else tier.usage().num_slots or 0

    @property
    def most(self) -> int:
        if self.tier == HOST and self._most_in_host is not None:
            return self._most_in_host
        return int(self.num_slots * PINNED_SHARE)

    def pin(self, manifest: Manifest) -> None:
        """Pin its blocks, those that are there and those that come later. Raises SnapshotSpace."""
        keys = self._keys_of(manifest)
        num_new, most = sum(key not in self._pins for key in keys), self.most
        if len(self._pins) + num_new > most:
            raise SnapshotSpace(
                f"this snapshot would pin {num_new} more blocks: {len(self._pins)} of the {self.num_slots} "
                f"in the {self.tier} tier are pinned, and {most} may be; delete snapshots, take one of fewer "
                f"tokens, or give the tier more room"
            )
        self.last.pin_keys(manifest.id, keys)
        self._pins.update(keys)
        self.pinning[manifest.id] = manifest

    def unpin(self, id: str) -> None:
        """Idempotent."""
        self.last.unpin_keys(id)
        if (manifest := self.pinning.pop(id, None)) is not None:
            self._pins.subtract(self._keys_of(manifest))
            self._pins = +self._pins

    def num_kept(self, manifest: Manifest) -> int:
        """Number of its leading blocks that one lasting tier has. Host memory in front of a disk does not
        count."""
        keys = self._keys_of(manifest)
        num = self.last.num_leading(keys)
        for tier in self._cold.values() if num < len(keys) else ():
            num = max(num, tier.calls.find(keys))
        return num


class PinnedPrefixes(PinnedBlocks):
    """Of a model with recurrent layers: a snapshot also pins the state that its prefix ends with."""

    def __init__(self, host: HostTier, cold: Mapping[str, ColdTier], states: KeptStates) -> None:
        super().__init__(host, cold, lambda manifest: manifest.block_keys)
        self._states = PinnedBlocks(states.cold.host, states.cold.tiers, lambda manifest: manifest.state_keys)

    def pin(self, manifest: Manifest) -> None:
        self._states.pin(manifest)
        try:
            super().pin(manifest)
        except SnapshotSpace:
            self._states.unpin(manifest.id)
            raise

    def unpin(self, id: str) -> None:
        super().unpin(id)
        self._states.unpin(id)

    def num_kept(self, manifest: Manifest) -> int:
        """Blocks behind the state do not count, nor any without it."""
        has_all = manifest.state_blocks and self._states.num_kept(manifest)
        is_there = has_all and super().num_kept(manifest) >= manifest.state_blocks
        return manifest.state_blocks if is_there else 0


def _pins(cache: KvCache, most_in_host: int | None) -> PinnedBlocks:
    if cache.states is not None:
        return PinnedPrefixes(cache.host, cache.cold_tiers, cache.states)
    return PinnedBlocks(cache.host, cache.cold_tiers, lambda manifest: manifest.block_keys, most_in_host)


class ManifestPlaces:
    """The stores of an engine that keep manifests. Every call may block, and raises StoreFailed unless its
    docstring says otherwise."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache

    def stores(self, local: bool | None = None) -> list[tuple[ColdTier, ManifestStore]]:
        """`local`: only those on this machine, in which an earlier process may have left manifests, or only
        those that other engines use, too."""
        return [
            (tier, tier.calls.store)
            for tier in self._cache.cold_tiers.values()
            if isinstance(tier.calls.store, ManifestStore) and local in (None, tier.local)
        ]

    def write(self, manifest: Manifest, now_s: float) -> tuple[str, ...]:
        """Write to every store that accepts it. Raises if there are stores and none did. Raises SnapshotTaken
        if another engine has the name: the shared store decides that, and is asked first."""
        written, failures = list[str](), list[StoreFailed]()
        for tier, store in reversed(self.stores()):
            try:
                outcome = tier.calls.say("write a snapshot", partial(_write, store, manifest, now_s))
                if outcome is Written.TAKEN:
                    raise _taken(manifest)
                if outcome is Written.FULL:
                    raise StoreFailed(f"the {tier.name} tier has no room for the manifest of a snapshot")
                written.insert(0, tier.name)
            except StoreFailed as error:
                failures.insert(0, error)
        if failures and not written:
            raise failures[0]
        return tuple(written)

    def remove(self, own: Manifest) -> None:
        """Remove our own manifest, not one that another engine or an earlier process wrote under the same
        name. Never raises: failures are logged, and the manifest is removed when it is found expired."""
        for tier, store in self.stores():
            try:
                tier.calls.say("remove a snapshot", partial(store.remove_manifest, own.id, pack(own)))
            except StoreFailed as error:
                log.warning("the manifest of snapshot %s stays in the %s tier: %s", own.id, tier.name, error)

    def delete(self, id: str) -> None:
        """Delete it, even if another engine wrote it. Raises if a store does not answer. The coldest store
        goes first: if that fails, this process still knows the snapshot."""
        for tier, store in reversed(self.stores()):
            tier.calls.say("remove a snapshot", partial(store.remove_manifest, id))

    def ids(self, local: bool, start: str = "") -> list[str]:
        return [
            id
            for tier, store in self.stores(local)
            for id in tier.calls.say("list snapshots", partial(store.manifests, start))
        ]

    def read(self, id: str, local: bool) -> tuple[Manifest, str] | None:
        """The manifest, checked, and its tier: it is complete, has this id, and is of this model. Also raises
        SnapshotRefused."""
        for tier, store in self.stores(local):
            data = tier.calls.say("read a snapshot", partial(store.read_manifest, id))
            if data is not None:
                manifest = unpack(data)
                if manifest.id != id:
                    raise SnapshotRefused("the manifest lies under another snapshot's name")
                check_space(manifest, self._cache.scope.of())
                return manifest, tier.name
        return None


class SnapshotBooks:
    """Which snapshots there are, and what they pin. All calls may block and are made on one lane, except
    `figures` and `take_due`."""

    def __init__(self, cache: KvCache, most_in_host: int | None, clock: Callable[[], float]) -> None:
        self.pins = _pins(cache, most_in_host)
        self.counts: Counter[str] = Counter()  # by field of `SnapshotFigures`
        self._cache = cache
        self._clock = clock
        self._due_s = _NEVER  # when the next one expires
        self._places = ManifestPlaces(cache)
        self._known: dict[str, tuple[Manifest, tuple[str, ...]]] = {}  # by id, with the tiers that have it
        self._damaged: dict[str, str] = {}  # by id: why its manifest cannot be used
        self._unread: set[str] = set()  # ids that the disk did not return; it may by now
        self._is_listed = False  # the disk's snapshots are known

    def figures(self) -> SnapshotFigures:
        """For any thread."""
        return SnapshotFigures(
            known=len(self._known),
            pinned_blocks=len(self.pins),
            pinned_blocks_max=self.pins.most,
            damaged=len(self._damaged),
            **self.counts,
        )

    # ------------------------------------------------------------------------------------------------ on disk

    def load(self, id: str = "") -> None:
        """Learn which snapshots an earlier process left on the local disk: all when it answers the first
        time, then that one, if the disk did not return it before. Shared stores are searched when a caller
        asks for a snapshot."""
        if not all(tier.usable for tier, _ in self._places.stores(local=True)):
            return
        wanted = {id} & self._unread
        try:
            if not self._is_listed:
                wanted.update(set(self._places.ids(local=True)) - self._known.keys())
                self._is_listed = True
        except StoreFailed as error:
            log.warning("snapshots of an earlier process are not known: %s", error)
        found = [one for one in map(self._try_read, wanted) if one is not None]
        found.sort(key=lambda one: one[0].created_s)
        self._known.update((manifest.id, (manifest, (tier,))) for manifest, tier in found)
        if found:
            self.expire()  # before any pins: expired snapshots take no room
        for manifest, _ in found:
            if manifest.id in self._known:
                try:
                    self.pins.pin(manifest)
                except SnapshotSpace as error:  # the tier is smaller than it was
                    log.warning("snapshot %s no longer pins its blocks: %s", manifest.id, error)
                    self.pins.unpin(manifest.id)

    def _try_read(self, id: str) -> tuple[Manifest, str] | None:
        """None: it cannot be used or could not be read, which is noted."""
        self._unread.discard(id)
        self._damaged.pop(id, None)
        try:
            return self._places.read(id, local=True)
        except (SnapshotRefused, StoreFailed) as error:
            self._damaged[id] = str(error)
            if isinstance(error, StoreFailed):
                self._unread.add(id)
        return None

    # ------------------------------------------------------------------------------------------------- taking

    def reserve(self, asked: SnapshotRequest, tokens: Tokens) -> Manifest:
        """Pin the blocks of a new snapshot and keep its name."""
        manifest = self._manifest(asked, tokens)
        id, pinning = manifest.id, self.pins.pinning
        self.load(id)
        self.expire()
        if id in pinning or id in self._known or id in self._damaged or self._is_shared(id):
            raise _taken(manifest)
        try:
            if len(self._known.keys() | pinning.keys()) >= MAX_SNAPSHOTS:  # including those being taken
                raise SnapshotSpace(
                    f"there are {MAX_SNAPSHOTS} snapshots already, which is the most: delete some"
                )
            self.pins.pin(manifest)
        except SnapshotSpace:
            self.counts["refused"] += 1
            raise
        return manifest

    def _manifest(self, asked: SnapshotRequest, tokens: Tokens) -> Manifest:
        num = len(tokens) if asked.num_tokens is None else asked.num_tokens
        block_tokens = self._cache.block_tokens
        if num > len(tokens):
            raise InvalidRequest(
                f"tokens is {num}, and there are {len(tokens)} to take a snapshot of", "tokens"
            )
        if num < block_tokens:
            raise InvalidRequest(
                f"a snapshot needs a full block of {block_tokens} tokens, and these are {num}", "tokens"
            )
        if asked.ttl_s is not None and not 0 < asked.ttl_s < _NEVER:
            raise InvalidRequest(f"ttl_s must be above 0 and finite, got {asked.ttl_s}", "ttl_s")
        scope, now = self._cache.scope.of(asked.cache_salt, asked.adapter), self._clock()
        prefix = self._cache.prefix_of(tokens[:num], asked.cache_salt, asked.adapter)
        keys, states = () if prefix is None else prefix.keys, self._cache.states
        manifest = Manifest(
            name=asked.name,
            tenant=tenant_of(asked.cache_salt),
            space=self._cache.scope.of().digest(),
            scope=scope.digest(),
            made_with=words_of(scope),
            block_tokens=block_tokens,
            tokens=token_bytes(tokens[:num]),
            keys=b"".join(keys),
            created_s=now,
            expires_s=None if asked.ttl_s is None else now + asked.ttl_s,
            adapter="" if asked.adapter is None else asked.adapter.name,
            messages=asked.messages,
            state_blocks=0 if states is None else states.last_here(keys),
        )
        if (num_bytes := len(pack(manifest))) > MAX_MANIFEST_BYTES:
            raise SnapshotSpace(
                f"the manifest of this snapshot would have {num_bytes} bytes, and {MAX_MANIFEST_BYTES} is "
                "the most"
            )
        return manifest

    def _is_shared(self, id: str) -> bool:
        """Whether another engine has one of that name, as far as stores answer."""
        try:
            found = self._places.read(id, local=False)
        except (StoreFailed, SnapshotRefused) as error:
            return isinstance(error, SnapshotRefused)
        return found is not None and not found[0].has_expired(self._clock())

    def commit(self, manifest: Manifest) -> Snapshot:
        """Its blocks were saved: write its manifest."""
        if not self.pins.num_kept(manifest):
            raise SnapshotRefused(
                f"none of its {manifest.num_blocks} blocks is in a tier: compute it first, and take the "
                "snapshot then"
            )
        self._known[manifest.id] = manifest, self._places.write(manifest, self._clock())
        self._due_s = min(self._due_s, manifest.expires_s or _NEVER)
        self.counts["taken"] += 1
        return self._shown(manifest)

    def give_up(self, manifest: Manifest) -> None:
        """Undo an unfinished take, if it left anything. A snapshot of the same name from another engine
        stays."""
        if self.pins.pinning.get(manifest.id) is manifest:
            self._let_go(manifest)

    # ------------------------------------------------------------------------------------------------ looking

    def find(self, name: str, salt: str) -> Snapshot:
        return self._shown(self._find(name, salt))

    def open(self, name: str, salt: str, adapter: Adapter | None) -> SnapshotContent:
        manifest = self._find(name, salt)
        check_scope(manifest, self._cache.scope.of(salt, adapter))
        return SnapshotContent(manifest.tokens, manifest.messages)

    def note_opened(self, opened: Future[SnapshotContent]) -> None:
        """One caller's answer to `open` is there. Cancels come from any thread."""
        if not opened.cancelled() and opened.exception() is None:
            self.counts["continued"] += 1

    def _find(self, name: str, salt: str) -> Manifest:
        self._expire_due()
        id = snapshot_id(tenant_of(salt), name)
        self.load(id)
        if id in self._damaged and id not in self._unread:
            raise SnapshotRefused(f"snapshot {name!r} cannot be used: {self._damaged[id]}")
        manifest = self._manifest_of(id)
        if manifest is None and (id in self._unread or not self._is_listed):
            raise StoreFailed(
                f"snapshot {name!r} cannot be read: "
                f"{self._damaged.get(id, 'the disk does not say which it has')}"
            )
        if manifest is None:
            raise SnapshotMissing(
                f"there is no snapshot {name!r}, or the cache_salt is not the one that it was taken with"
            )
        return manifest

    def _manifest_of(self, id: str) -> Manifest | None:
        """None: there is none, or it has expired."""
        found = self._known.get(id) or self._places.read(id, local=False)
        return None if found is None or found[0].has_expired(self._clock()) else found[0]

    def ids(self, tenant: bytes) -> tuple[list[str], bool]:
        """Ids of all snapshots, and whether every tier answered."""
        self._expire_due()
        self.load()
        ids = [id for id, (manifest, _) in self._known.items() if manifest.tenant == tenant]
        try:
            shared = self._places.ids(local=False, start=tenant.hex())
            return ids + [id for id in shared if id not in self._known], self._is_listed
        except StoreFailed as error:
            log.warning("snapshots in a shared store are not listed: %s", error)
            return ids, False

    def shown_of(self, ids: Sequence[str]) -> tuple[list[Snapshot], bool]:
        """The usable snapshots of `ids`, and whether all could be read."""
        shown, is_complete = list[Snapshot](), True
        for id in ids:
            try:
                if (manifest := self._manifest_of(id)) is not None:
                    shown.append(self._shown(manifest))
            except SnapshotRefused as error:
                log.warning("snapshot %s in a shared store cannot be used: %s", id, error)
            except StoreFailed as error:
                log.warning("snapshot %s in a shared store is not listed: %s", id, error)
                is_complete = False
        return shown, is_complete

    def _shown(self, manifest: Manifest) -> Snapshot:
        shared = tuple(tier.name for tier, _ in self._places.stores(local=False))
        return Snapshot(
            name=manifest.name,
            num_tokens=manifest.num_tokens,
            kept_tokens=self.pins.num_kept(manifest) * manifest.block_tokens,
            num_blocks=manifest.num_blocks,
            pinned=manifest.id in self.pins.pinning,
            created_s=manifest.created_s,
            expires_s=manifest.expires_s,
            adapter=manifest.adapter,
            is_chat=bool(manifest.messages),
            tiers=self._known.get(manifest.id, (manifest, shared))[1],
        )

    # ------------------------------------------------------------------------------------------------- ending

    def delete(self, name: str, salt: str) -> None:
        id = snapshot_id(tenant_of(salt), name)
        is_unreadable = (StoreFailed,) if id in self._unread else ()
        # it exists, though damaged, here or in a shared store
        with contextlib.suppress(SnapshotRefused, *is_unreadable):
            self._find(name, salt)
        # first: if a tier does not answer, the snapshot can be deleted later
        self._places.delete(id)
        self._forget(id)
        self.counts["deleted"] += 1

    def expire(self) -> None:
        """Let expired ones go, and note when the next is due."""
        now = self._clock()
        for manifest in [manifest for manifest, _ in self._known.values() if manifest.has_expired(now)]:
            self._let_go(manifest)
            self.counts["expired"] += 1
        self._due_s = min((one.expires_s or _NEVER for one, _ in self._known.values()), default=_NEVER)

    def take_due(self) -> bool:
        """Whether one is due to expire. True once: `expire` sets the next time. For the engine thread."""
        if self._clock() < self._due_s:
            return False
        self._due_s = _NEVER
        return True

    def _expire_due(self) -> None:
        """An expired snapshot must not hide another engine's of the same name."""
        if self._clock() >= self._due_s:
            self.expire()

    def _let_go(self, own: Manifest) -> None:
        self._forget(own.id)
        self._places.remove(own)

    def _forget(self, id: str) -> None:
        self._known.pop(id, None)
        self._damaged.pop(id, None)
        self._unread.discard(id)
        self.pins.unpin(id)


class Snapshots:
    """Calls about snapshots, for any thread; see the module. `begin_x` never blocks."""

    def __init__(
        self, cache: KvCache, most_in_host: int | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._cache = cache
        self._clock = clock
        self._books = SnapshotBooks(cache, most_in_host, lambda: self._clock())
        # None: there is only the device, which requests need
        self._questions = Questions("snapshots", MOST_WAITING) if cache.host.num_slots else None
        self._listed: Future[None] | None = None
        if self._questions is not None:
            self._questions.run(self._books.load)
            self._listed = self._questions.begin(lambda: None)

    def wait_listed(self, timeout_s: float) -> None:
        """Block until the snapshots that an earlier process left on the disk pin their blocks. Before that,
        writes may evict these. A disk that does not answer is given up."""
        if self._listed is not None:
            wait([self._listed], timeout_s)

    def taking(
        self, asked: SnapshotRequest, tokens: Tokens, save: Callable[[Sequence[bytes]], Future[None]]
    ) -> Generator[Future[Any], Any, Snapshot]:
        """The steps of taking a snapshot of the cached KV of `tokens`, for `run_steps`. `save` is called on
        the lane with the keys of its blocks; its future ends when the computed blocks have reached the tiers.
        The snapshot is taken as a whole, or not at all."""
        reserved: list[Manifest] = []

        def reserve() -> Manifest:
            reserved.append(self._books.reserve(asked, tokens))  # also if the caller has gone meanwhile
            return reserved[0]

        try:
            manifest = yield self._begin(reserve)
            yield save(manifest.block_keys)
            taken: Snapshot = yield self._begin(partial(self._books.commit, manifest), goes_on=True)
            return taken
        except BaseException:
            if reserved and self._questions is not None:
                self._questions.run(partial(self._books.give_up, reserved[0]))
            raise

    def begin_all(self, cache_salt: str = "") -> Future[SnapshotList]:
        """The snapshots of one tenant, read a few at a time, so that other calls are answered meanwhile."""
        return run_steps(self._listing(tenant_of(cache_salt)))

    def _listing(self, tenant: bytes) -> Generator[Future[Any], Any, SnapshotList]:
        ids, is_complete = yield self._begin(partial(self._books.ids, tenant))
        shown: list[Snapshot] = []
        for first in range(0, len(ids), _LIST_AT_ONCE):
            some = ids[first : first + _LIST_AT_ONCE]
            more, all_read = yield self._begin(partial(self._books.shown_of, some), goes_on=True)
            shown, is_complete = shown + more, is_complete and all_read
        shown.sort(key=lambda one: one.created_s)
        pins, block_bytes = self._books.pins, self._cache.saves.layout.block_bytes
        return SnapshotList(shown, pins.tier, len(pins), pins.most, block_bytes, is_complete)

    def begin_find(self, name: str, cache_salt: str = "") -> Future[Snapshot]:
        """Raises SnapshotMissing, SnapshotRefused."""
        return self._begin(partial(self._books.find, name, cache_salt))

    def begin_open(
        self, name: str, cache_salt: str = "", adapter: Adapter | None = None
    ) -> Future[SnapshotContent]:
        """The content that a request with that adapter continues. Raises SnapshotMissing, or SnapshotRefused
        if it is of another model."""
        which = name, cache_salt, adapter
        future = self._begin(partial(self._books.open, *which), same=which)
        future.add_done_callback(self._books.note_opened)
        return future

    def begin_delete(self, name: str, cache_salt: str = "") -> Future[None]:
        """Also deletes one that cannot be used. Raises SnapshotMissing."""
        return self._begin(partial(self._books.delete, name, cache_salt))

    def all(self, cache_salt: str = "") -> SnapshotList:
        """Blocks, like the next two."""
        return wait_answered(self.begin_all(cache_salt), ANSWER_S)

    def open(self, name: str, cache_salt: str = "", adapter: Adapter | None = None) -> SnapshotContent:
        return wait_answered(self.begin_open(name, cache_salt, adapter), ANSWER_S)

    def delete(self, name: str, cache_salt: str = "") -> None:
        wait_answered(self.begin_delete(name, cache_salt), ANSWER_S)

    def figures(self) -> SnapshotFigures:
        waiting = 0 if self._questions is None else self._questions.num_waiting
        return replace(self._books.figures(), waiting=waiting)

    def _begin(self, work: Callable[[], T], same: Hashable = None, goes_on: bool = False) -> Future[T]:
        if self._questions is None:
            raise SnapshotRefused(
                "snapshots need a tier behind the device: this server runs without --kv-offload"
            )
        return self._questions.begin(work, same, goes_on)

    # -------------------------------------------------------------------------------------- the engine thread

    def step(self) -> None:
        """Let expired snapshots go. Never blocks."""
        if self._books.take_due() and self._questions is not None:
            self._questions.run(self._books.expire)

    def close(self, timeout_s: float | None) -> None:
        """Finishes the call that runs, and fails the waiting ones; then nothing is pinned. Idempotent. Raises
        DeadlineExceeded."""
        if self._questions is not None:
            self._questions.close(timeout_s)
        for id in list(self._books.pins.pinning):
            self._books.pins.unpin(id)


def wait_answered(future: Future[T], timeout_s: float) -> T:
    """Block until it is over. On timeout, cancels it and raises DeadlineExceeded."""
    try:
        return future.result(timeout_s)
    except TimeoutError:
        if future.done():  # the call itself raised it
            raise
        future.cancel()
        raise DeadlineExceeded(
            f"a tier did not answer about snapshots within {timeout_s:g} s; it continues in the background"
        ) from None


def _taken(manifest: Manifest) -> SnapshotTaken:
    return SnapshotTaken(
        f"there is a snapshot {manifest.name!r} already: delete it first, or choose another name"
    )


def _write(store: ManifestStore, manifest: Manifest, now_s: float) -> Written:
    """TAKEN: another manifest of that name is there. An expired one is replaced."""
    data, left_s = pack(manifest), None if manifest.expires_s is None else manifest.expires_s - now_s
    instead_of = None
    for _ in range(_WRITE_TRIES):
        outcome = store.write_manifest(manifest.id, data, left_s, instead_of)
        if outcome is not Written.TAKEN:
            return outcome
        instead_of = store.read_manifest(manifest.id)
        if instead_of == data:  # the answer to an earlier try was lost
            return Written.DONE
        if instead_of is not None and not _is_over(instead_of, now_s):
            break
    return Written.TAKEN


def _is_over(data: bytes, now_s: float) -> bool:
    """A damaged manifest keeps its name until it is deleted."""
    try:
        return unpack(data).has_expired(now_s)
    except SnapshotRefused:
        return False
