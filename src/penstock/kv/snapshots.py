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
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence, Set
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from penstock.contract import Adapter, Snapshot, SnapshotContent, SnapshotList, SnapshotRequest
from penstock.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LaneClosed,
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
from penstock.kv.tiers.cold import ColdTier
from penstock.kv.tiers.host import HOST
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
from penstock.lanes.cpu import CpuLane

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


class PinnedBlocks:
    """Blocks that snapshots pin in the last tier with its own eviction, each counted once, and their
    limit."""

    def __init__(self, cache: KvCache, tier: str, last: PinningStore, most_in_host: int | None) -> None:
        self.tier = tier
        self.last = last
        self._cache = cache
        self._most_in_host = most_in_host
        self._pins: Counter[bytes] = Counter()  # by block: number of snapshots that pin it
        self._pinning: dict[str, Manifest] = {}  # snapshots that pin blocks, by id

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, id: str) -> bool:
        return id in self._pinning

    @property
    def ids(self) -> Set[str]:
        """Ids of snapshots that pin blocks, including those being taken."""
        return self._pinning.keys()

    def pinned_by(self, manifest: Manifest) -> bool:
        """Whether this manifest pins blocks, not another one of the same name."""
        return self._pinning.get(manifest.id) is manifest

    @property
    def num_slots(self) -> int:
        tier = self._cache.cold_tiers.get(self.tier)
        return self._cache.host.num_slots if tier is None else tier.usage().num_slots or 0

    @property
    def most(self) -> int:
        if self.tier not in self._cache.cold_tiers and self._most_in_host is not None:
            return self._most_in_host
        return int(self.num_slots * PINNED_SHARE)

    def pin(self, manifest: Manifest) -> None:
        """Pin its blocks, those that are there and those that come later. Raises SnapshotSpace."""
        keys = manifest.block_keys
        num_new, most = sum(key not in self._pins for key in keys), self.most
        if len(self._pins) + num_new > most:
            raise SnapshotSpace(
                f"this snapshot would pin {num_new} more blocks: {len(self._pins)} of the {self.num_slots} "
                f"in the {self.tier} tier are pinned, and {most} may be; delete snapshots, take one of fewer "
                f"tokens, or give the tier more room"
            )
        self.last.pin_keys(manifest.id, keys)
        self._pins.update(keys)
        self._pinning[manifest.id] = manifest

    def unpin(self, id: str) -> None:
        """Idempotent."""
        self.last.unpin_keys(id)
        if (manifest := self._pinning.pop(id, None)) is not None:
            self._pins.subtract(manifest.block_keys)
            self._pins = +self._pins

    def unpin_all(self) -> None:
        for id in list(self._pinning):
            self.unpin(id)


class ManifestPlaces:
    """The stores of an engine that keep manifests. Every call may block, and raises StoreFailed unless its
    docstring says otherwise."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache

    def __iter__(self) -> Iterator[tuple[ColdTier, ManifestStore]]:
        for tier in self._cache.cold_tiers.values():
            if isinstance(tier.calls.store, ManifestStore):
                yield tier, tier.calls.store

    def shared(self) -> Iterator[tuple[ColdTier, ManifestStore]]:
        """Stores that other engines use, too."""
        return ((tier, store) for tier, store in self if not tier.local)

    def write(self, manifest: Manifest, now_s: float) -> tuple[str, ...]:
        """Write to every store that accepts it. Raises if there are stores and none did. Raises SnapshotTaken
        if another engine has the name: the shared store decides that, and is asked first."""
        written, failures = list[str](), list[StoreFailed]()
        for tier, store in reversed([*self]):
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

    def remove(self, id: str, own: Manifest) -> None:
        """Remove our own manifest, not one that another engine or an earlier process wrote under the same
        name. Never raises: failures are logged, and the manifest is removed when it is found expired."""
        for tier, store in self:
            try:
                tier.calls.say("remove a snapshot", partial(store.remove_manifest, id, pack(own)))
            except StoreFailed as error:
                log.warning("the manifest of snapshot %s stays in the %s tier: %s", id, tier.name, error)

    def delete(self, id: str) -> None:
        """Delete it, even if another engine wrote it. Raises if a store does not answer. The coldest store
        goes first: if that fails, this process still knows the snapshot."""
        for tier, store in reversed([*self]):
            tier.calls.say("remove a snapshot", partial(store.remove_manifest, id))

    def local(self) -> Iterator[tuple[ColdTier, ManifestStore]]:
        """Stores on this machine, in which an earlier process may have left manifests."""
        return ((tier, store) for tier, store in self if tier.local)

    def shared_ids(self, tenant: bytes) -> list[str]:
        return [
            id
            for tier, store in self.shared()
            for id in tier.calls.say("list snapshots", partial(store.manifests, tenant.hex()))
        ]

    def read_shared(self, id: str) -> Manifest | None:
        """A manifest that another engine wrote. Also raises SnapshotRefused."""
        for tier, store in self.shared():
            if (manifest := self.read(tier, store, id)) is not None:
                return manifest
        return None

    def read(self, tier: ColdTier, store: ManifestStore, id: str) -> Manifest | None:
        """Checked: it is complete, has this id, and is of this model. Also raises SnapshotRefused."""
        data = tier.calls.say("read a snapshot", partial(store.read_manifest, id))
        if data is None:
            return None
        manifest = unpack(data)
        if manifest.id != id:
            raise SnapshotRefused("the manifest lies under another snapshot's name")
        check_space(manifest, self._cache.scope.of())
        return manifest


class Snapshots:
    """See the module. `most_in_host`: limit of pinned blocks if host memory is the last tier; None: the usual
    share."""

    def __init__(
        self, cache: KvCache, most_in_host: int | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._cache = cache
        self._clock = clock
        self._places = ManifestPlaces(cache)
        self._known: dict[str, tuple[Manifest, tuple[str, ...]]] = {}  # by id, with the tiers that have it
        self._damaged: dict[str, str] = {}  # by id: why its manifest cannot be used
        self._unread: set[str] = set()  # ids that the disk did not return; it may by now
        self._is_listed = False  # the disk's snapshots are known
        self._due_s = _NEVER  # when the next one expires
        self._counts: Counter[str] = Counter()
        last = _last_evicting(cache)
        self._pinned = None if last is None else PinnedBlocks(cache, *last, most_in_host)
        self._lane = None if last is None else CpuLane("snapshots")
        self._questions = None if self._lane is None else Questions(self._lane, MOST_WAITING)
        if self._lane is not None:
            self._lane.submit(self._load, label="load snapshots")

    # ---------------------------------------------------------------------------------------- from any thread

    def begin_take_of(
        self, asked: SnapshotRequest, tokens: Tokens, save: Callable[[Sequence[bytes]], Future[None]]
    ) -> Future[Snapshot]:
        """Take a snapshot of the cached KV of `tokens`. `save` is called on the lane with the keys of its
        blocks; its future ends when the computed blocks have reached the tiers. The snapshot is taken as a
        whole, or not at all."""
        return run_steps(self.taking(asked, tokens, save))

    def taking(
        self, asked: SnapshotRequest, tokens: Tokens, save: Callable[[Sequence[bytes]], Future[None]]
    ) -> Generator[Future[Any], Any, Snapshot]:
        """The steps of `begin_take_of`."""
        reserved: list[Manifest] = []

        def reserve() -> Manifest:
            manifest = self._manifest(asked, tokens)
            self._reserve(manifest)
            reserved.append(manifest)  # also if the caller has gone meanwhile
            return manifest

        try:
            manifest = yield self._begin(reserve)
            yield save(manifest.block_keys)
            taken: Snapshot = yield self._begin(partial(self._commit, manifest), goes_on=True)
            return taken
        except BaseException:
            for manifest in reserved:
                self._begin_give_up(manifest)
            raise

    def begin_all(self, cache_salt: str = "") -> Future[SnapshotList]:
        """The snapshots of one tenant, read a few at a time, so that other calls are answered meanwhile."""
        return run_steps(self._listing(tenant_of(cache_salt)))

    def begin_find(self, name: str, cache_salt: str = "") -> Future[Snapshot]:
        """Raises SnapshotMissing, SnapshotRefused."""
        return self._begin(lambda: self._shown(self._find(name, cache_salt)))

    def begin_open(
        self, name: str, cache_salt: str = "", adapter: Adapter | None = None
    ) -> Future[SnapshotContent]:
        """The content that a request with that adapter continues. Raises SnapshotMissing, or SnapshotRefused
        if it is of another model."""
        future = self._begin(partial(self._open, name, cache_salt, adapter), same=(name, cache_salt, adapter))
        future.add_done_callback(self._count_continued)
        return future

    def begin_delete(self, name: str, cache_salt: str = "") -> Future[None]:
        """Also deletes one that cannot be used. Raises SnapshotMissing."""
        return self._begin(partial(self._delete, name, cache_salt))

    def all(self, cache_salt: str = "") -> SnapshotList:
        """Blocks, like the next three."""
        return wait_answered(self.begin_all(cache_salt), ANSWER_S)

    def find(self, name: str, cache_salt: str = "") -> Snapshot:
        return wait_answered(self.begin_find(name, cache_salt), ANSWER_S)

    def open(self, name: str, cache_salt: str = "", adapter: Adapter | None = None) -> SnapshotContent:
        return wait_answered(self.begin_open(name, cache_salt, adapter), ANSWER_S)

    def delete(self, name: str, cache_salt: str = "") -> None:
        wait_answered(self.begin_delete(name, cache_salt), ANSWER_S)

    def figures(self) -> SnapshotFigures:
        pinned, counts = self._pinned, self._counts
        return SnapshotFigures(
            known=len(self._known),
            pinned_blocks=0 if pinned is None else len(pinned),
            pinned_blocks_max=0 if pinned is None else pinned.most,
            damaged=len(self._damaged),
            taken=counts["taken"],
            continued=counts["continued"],
            deleted=counts["deleted"],
            expired=counts["expired"],
            refused=counts["refused"],
            waiting=0 if self._questions is None else self._questions.num_waiting,
        )

    def _begin(self, work: Callable[[], T], same: Hashable = None, goes_on: bool = False) -> Future[T]:
        if self._questions is None:
            raise SnapshotRefused(
                "snapshots need a tier behind the device: this server runs without --kv-offload"
            )
        return self._questions.begin(work, same, goes_on)

    def _begin_give_up(self, manifest: Manifest) -> None:
        assert self._lane is not None
        try:
            self._lane.submit(partial(self._give_up, manifest), label="give up a snapshot")
        except LaneClosed:
            log.debug("a snapshot was given up after the engine had closed")

    def _count_continued(self, opened: Future[SnapshotContent]) -> None:
        """On the lane, after it was opened."""
        if not opened.cancelled() and opened.exception() is None:
            self._counts["continued"] += 1

    # -------------------------------------------------------------------------------------- the engine thread

    def step(self) -> None:
        """Let expired snapshots go. Never blocks."""
        if self._clock() >= self._due_s and self._lane is not None:
            self._due_s = _NEVER  # once: the lane sets the next time
            self._lane.submit(self._expire, label="expire snapshots")

    def close(self, timeout_s: float | None) -> None:
        """Finishes the call that runs, and fails the waiting ones; then nothing is pinned. Idempotent. Raises
        DeadlineExceeded."""
        if self._questions is not None:
            self._questions.close()
        if self._lane is not None:
            self._lane.close(timeout_s)
        if self._pinned is not None:
            self._pinned.unpin_all()

    # -------------------------------------------------------------------------------------------- on the lane

    def _load(self) -> None:
        """Snapshots that an earlier process left on the local disk, if it answers. Shared stores are searched
        when a caller asks for a snapshot."""
        found: list[tuple[Manifest, str]] = []
        try:
            listed = [
                (tier, store, id)
                for tier, store in self._places.local()
                for id in tier.calls.say("list snapshots", store.manifests)
            ]
            self._is_listed = True
        except StoreFailed as error:
            log.warning("snapshots of an earlier process are not known: %s", error)
            listed = []
        for tier, store, id in listed:
            if id not in self._known and (manifest := self._try_read(tier, store, id)) is not None:
                found.append((manifest, tier.name))
        found.sort(key=lambda one: one[0].created_s)
        self._known.update((manifest.id, (manifest, (name,))) for manifest, name in found)
        self._expire()  # before any pins: expired snapshots take no room
        for manifest, _ in found:
            if manifest.id in self._known:
                self._try_pin(manifest)

    def _try_read(self, tier: ColdTier, store: ManifestStore, id: str) -> Manifest | None:
        """None: it cannot be used or could not be read, which is noted."""
        self._unread.discard(id)
        self._damaged.pop(id, None)
        try:
            return self._places.read(tier, store, id)
        except SnapshotRefused as error:
            self._damaged[id] = str(error)
        except StoreFailed as error:
            self._damaged[id] = str(error)
            self._unread.add(id)
        return None

    def _try_pin(self, manifest: Manifest) -> None:
        try:
            self._own_pins.pin(manifest)
        except SnapshotSpace as error:  # the tier is smaller than it was
            log.warning("snapshot %s no longer pins its blocks: %s", manifest.id, error)
            self._own_pins.unpin(manifest.id)

    def _look_again(self, id: str = "") -> None:
        """A caller asks for that one, or for all: a disk that did not answer before may do so now."""
        if all(tier.usable for tier, _ in self._places.local()):
            if not self._is_listed:
                self._load()
            for tier, store in self._places.local() if id in self._unread else ():
                if (manifest := self._try_read(tier, store, id)) is not None:
                    self._known[id] = manifest, (tier.name,)
                    self._try_pin(manifest)
                    self._expire()

    def _reserve(self, manifest: Manifest) -> None:
        id, pins = manifest.id, self._own_pins
        self._look_again(id)
        self._expire()
        if id in pins or id in self._known or id in self._damaged or self._is_shared(id):
            raise _taken(manifest)
        try:
            if len(self._known.keys() | pins.ids) >= MAX_SNAPSHOTS:  # including those being taken
                raise SnapshotSpace(
                    f"there are {MAX_SNAPSHOTS} snapshots already, which is the most: delete some"
                )
            pins.pin(manifest)
        except SnapshotSpace:
            self._counts["refused"] += 1
            raise

    def _is_shared(self, id: str) -> bool:
        """Whether another engine has one of that name, as far as stores answer."""
        try:
            manifest = self._places.read_shared(id)
        except (StoreFailed, SnapshotRefused) as error:
            return isinstance(error, SnapshotRefused)
        return manifest is not None and not manifest.has_expired(self._clock())

    def _commit(self, manifest: Manifest) -> Snapshot:
        if not self._num_kept(manifest):
            raise SnapshotRefused(
                f"none of its {manifest.num_blocks} blocks is in a tier: compute it first, and take the "
                "snapshot then"
            )
        self._known[manifest.id] = manifest, self._places.write(manifest, self._clock())
        self._due_s = min(self._due_s, manifest.expires_s or _NEVER)
        self._counts["taken"] += 1
        return self._shown(manifest)

    def _find(self, name: str, salt: str) -> Manifest:
        self._expire_due()
        id = snapshot_id(tenant_of(salt), name)
        self._look_again(id)
        if id in self._damaged and id not in self._unread:
            raise SnapshotRefused(f"snapshot {name!r} cannot be used: {self._damaged[id]}")
        manifest = self._known[id][0] if id in self._known else self._places.read_shared(id)
        if manifest is None and (id in self._unread or not self._is_listed):
            raise StoreFailed(
                f"snapshot {name!r} cannot be read: "
                f"{self._damaged.get(id, 'the disk does not say which it has')}"
            )
        if manifest is None or manifest.has_expired(self._clock()):
            raise SnapshotMissing(
                f"there is no snapshot {name!r}, or the cache_salt is not the one that it was taken with"
            )
        return manifest

    def _open(self, name: str, salt: str, adapter: Adapter | None) -> SnapshotContent:
        manifest = self._find(name, salt)
        check_scope(manifest, self._cache.scope.of(salt, adapter))
        return SnapshotContent(manifest.tokens, manifest.messages)

    def _listing(self, tenant: bytes) -> Generator[Future[Any], Any, SnapshotList]:
        """The steps of `begin_all`."""
        ids, is_complete = yield self._begin(partial(self._ids, tenant))
        shown: list[Snapshot] = []
        for first in range(0, len(ids), _LIST_AT_ONCE):
            some, all_read = yield self._begin(
                partial(self._shown_of, ids[first : first + _LIST_AT_ONCE]), goes_on=True
            )
            shown, is_complete = shown + some, is_complete and all_read
        shown.sort(key=lambda one: one.created_s)
        pins = self._own_pins
        return SnapshotList(
            shown, pins.tier, len(pins), pins.most, self._cache.saves.layout.block_bytes, is_complete
        )

    def _ids(self, tenant: bytes) -> tuple[list[str], bool]:
        """Ids of all snapshots, and whether every tier answered."""
        self._expire_due()
        self._look_again()
        ids = [id for id, (manifest, _) in self._known.items() if manifest.tenant == tenant]
        try:
            return [
                *ids,
                *(id for id in self._places.shared_ids(tenant) if id not in self._known),
            ], self._is_listed
        except StoreFailed as error:
            log.warning("snapshots in a shared store are not listed: %s", error)
            return ids, False

    def _shown_of(self, ids: Sequence[str]) -> tuple[list[Snapshot], bool]:
        """The usable snapshots of `ids`, and whether all could be read."""
        shown, is_complete, now = list[Snapshot](), True, self._clock()
        for id in ids:
            try:
                manifest = self._known[id][0] if id in self._known else self._places.read_shared(id)
                if manifest is not None and not manifest.has_expired(now):
                    shown.append(self._shown(manifest))
            except SnapshotRefused as error:
                log.warning("snapshot %s in a shared store cannot be used: %s", id, error)
            except StoreFailed as error:
                log.warning("snapshot %s in a shared store is not listed: %s", id, error)
                is_complete = False
        return shown, is_complete

    def _delete(self, name: str, salt: str) -> None:
        id = snapshot_id(tenant_of(salt), name)
        is_unreadable = (StoreFailed,) if id in self._unread else ()
        # it exists, though damaged, here or in a shared store
        with contextlib.suppress(SnapshotRefused, *is_unreadable):
            self._find(name, salt)
        # first: if a tier does not answer, the snapshot can be deleted later
        self._places.delete(id)
        self._forget(id)
        self._counts["deleted"] += 1

    def _let_go(self, id: str, own: Manifest) -> None:
        """Unpin its blocks and remove its manifest, as `ManifestPlaces.remove` does."""
        self._forget(id)
        self._places.remove(id, own)

    def _forget(self, id: str) -> None:
        self._known.pop(id, None)
        self._damaged.pop(id, None)
        self._unread.discard(id)
        self._own_pins.unpin(id)

    def _give_up(self, manifest: Manifest) -> None:
        """Undo an unfinished take, if it left anything. A snapshot of the same name from another engine
        stays."""
        if self._own_pins.pinned_by(manifest):
            self._let_go(manifest.id, manifest)

    def _expire_due(self) -> None:
        """An expired snapshot must not hide another engine's of the same name."""
        if self._clock() >= self._due_s:
            self._expire()

    def _expire(self) -> None:
        now = self._clock()
        for manifest in [manifest for manifest, _ in self._known.values() if manifest.has_expired(now)]:
            self._let_go(manifest.id, manifest)
            self._counts["expired"] += 1
        self._due_s = min(
            (one.expires_s for one, _ in self._known.values() if one.expires_s is not None), default=_NEVER
        )

    def _shown(self, manifest: Manifest) -> Snapshot:
        _, tiers = self._known.get(manifest.id, (None, tuple(tier.name for tier, _ in self._places.shared())))
        return Snapshot(
            name=manifest.name,
            num_tokens=manifest.num_tokens,
            kept_tokens=self._num_kept(manifest) * manifest.block_tokens,
            num_blocks=manifest.num_blocks,
            pinned=manifest.id in self._own_pins,
            created_s=manifest.created_s,
            expires_s=manifest.expires_s,
            adapter=manifest.adapter,
            is_chat=bool(manifest.messages),
            tiers=tiers,
        )

    def _num_kept(self, manifest: Manifest) -> int:
        """Number of its leading blocks that one lasting tier has. Host memory in front of a disk does not
        count."""
        keys = manifest.block_keys
        num = self._own_pins.last.num_leading(keys)
        for tier in self._cache.cold_tiers.values() if num < len(keys) else ():
            num = max(num, tier.calls.find(keys))
        return num

    @property
    def _own_pins(self) -> PinnedBlocks:
        """On the lane, which exists if there are pins."""
        assert self._pinned is not None
        return self._pinned

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
        manifest = Manifest(
            name=asked.name,
            tenant=tenant_of(asked.cache_salt),
            space=self._cache.scope.of().digest(),
            scope=scope.digest(),
            made_with=words_of(scope),
            block_tokens=block_tokens,
            tokens=token_bytes(tokens[:num]),
            keys=b"" if prefix is None else b"".join(prefix.keys),
            created_s=now,
            expires_s=None if asked.ttl_s is None else now + asked.ttl_s,
            adapter="" if asked.adapter is None else asked.adapter.name,
            messages=asked.messages,
        )
        if (num_bytes := len(pack(manifest))) > MAX_MANIFEST_BYTES:
            raise SnapshotSpace(
                f"the manifest of this snapshot would have {num_bytes} bytes, and {MAX_MANIFEST_BYTES} is "
                "the most"
            )
        return manifest


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


def _last_evicting(cache: KvCache) -> tuple[str, PinningStore] | None:
    """The coldest tier whose evictions Penstock decides: blocks can be pinned there for good. None: there is
    only the device, which requests need. A shared store evicts by its own rules."""
    for name, tier in reversed(cache.cold_tiers.items()):
        if isinstance(tier.calls.store, PinningStore):
            return name, tier.calls.store
    return (HOST, cache.host) if cache.host.num_slots else None


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
