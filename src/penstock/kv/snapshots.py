"""Snapshots of conversations by name: who has which, what they pin and for how long. Owns the manifests that this process knows, and the
bound on what they pin; blocks and files are the tiers'.

A snapshot moves nothing. Its blocks are in the tiers under their keys; those in the last tier that evicts by itself stay there until it is
deleted or its time is over. What a tier has lost all the same is computed again from the manifest's tokens.

Everything that may block happens on a lane of its own, one after the other, so the books need no lock. `step` is the engine thread's and
never blocks; whoever else calls waits for the lane.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import TypeVar

from penstock.contract import Adapter, Snapshot, SnapshotContent, SnapshotList, SnapshotRequest
from penstock.errors import (
    DeadlineExceeded,
    EngineClosed,
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
from penstock.kv.tiers.cold import ColdTier
from penstock.kv.tiers.manifest import Manifest, check_scope, check_space, pack, snapshot_id, token_bytes, unpack, words_of
from penstock.kv.tiers.store import ManifestStore, PinningStore
from penstock.lanes.cpu import CpuLane

log = logging.getLogger(__name__)

PINNED_SHARE = 0.5  # of the last tier's blocks: what all snapshots may pin
MAX_SNAPSHOTS = 4096
MAX_MANIFEST_BYTES = 64 << 20
_ANSWER_S = 60.0  # for the lane to come round
_NEVER = float("inf")

T = TypeVar("T")


class Snapshots:
    """See the module. `most_in_host`: blocks that may be pinned where host memory is the last tier; None: the usual share."""

    def __init__(self, cache: KvCache, most_in_host: int | None = None, clock: Callable[[], float] = time.time) -> None:
        self._cache = cache
        self._most_in_host = most_in_host
        self._clock = clock
        self._last: tuple[str, PinningStore] | None = cache.last_evicting
        self._known: dict[str, Manifest] = {}  # by id
        self._tiers: dict[str, tuple[str, ...]] = {}  # by id: which have its manifest
        self._pins: Counter[bytes] = Counter()  # by block: how many of the snapshots that pin it
        self._pinning: set[str] = set()  # ids of those that do
        self._damaged: dict[str, str] = {}  # by id: why its manifest cannot be used
        self._due_s = _NEVER  # when the next one expires
        self._counts: Counter[str] = Counter()
        self._lane = None if self._last is None else CpuLane("snapshots")
        if self._lane is not None:
            self._lane.submit(self._load, label="load snapshots")

    # ---------------------------------------------------------------------------------------------------------- from any thread

    def take(self, asked: SnapshotRequest, tokens: Tokens, wait_saved: Callable[[], None]) -> Snapshot:
        """Of the KV of `tokens`, as far as it is cached. `wait_saved` blocks until what was computed has reached the tiers. All of it is
        there then, or nothing is."""
        manifest = self._manifest(asked, tokens)
        self._ask(partial(self._reserve, manifest))
        try:
            wait_saved()
            return self._ask(partial(self._commit, manifest))
        except BaseException:
            if self._lane is not None:
                try:
                    self._lane.submit(partial(self._drop, manifest), label="give up a snapshot")
                except LaneClosed:
                    log.debug("a snapshot was given up after the engine had closed")
            raise

    def all(self, salt: str) -> SnapshotList:
        return self._ask(partial(self._all, tenant_of(salt)))

    def find(self, name: str, salt: str) -> Snapshot:
        return self._ask(lambda: self._shown(self._find(name, salt)))

    def open(self, name: str, salt: str, adapter: Adapter | None) -> SnapshotContent:
        """What a request of that adapter goes on from. Raises SnapshotRefused where it is not of the same model."""
        manifest = self._ask(partial(self._find, name, salt))
        check_scope(manifest, self._cache.scope_of(salt, adapter))
        self._counts["continued"] += 1
        return SnapshotContent(manifest.tokens, manifest.messages)

    def delete(self, name: str, salt: str) -> None:
        """Also one that cannot be used."""
        self._ask(partial(self._delete, name, salt))

    def figures(self) -> SnapshotFigures:
        counts = self._counts
        return SnapshotFigures(
            known=len(self._known),
            pinned_blocks=len(self._pins),
            pinned_blocks_max=self._most_pinned(),
            damaged=len(self._damaged),
            taken=counts["taken"],
            continued=counts["continued"],
            deleted=counts["deleted"],
            expired=counts["expired"],
            refused=counts["refused"],
        )

    # -------------------------------------------------------------------------------------------------------- the engine thread

    def step(self) -> None:
        """Have what has expired let go. Never blocks."""
        if self._clock() >= self._due_s and self._lane is not None:
            self._due_s = _NEVER  # once: the lane says when the next is due
            self._lane.submit(self._expire, label="expire snapshots")

    def close(self, timeout_s: float | None) -> None:
        """What is under way ends first; nothing is pinned then. Idempotent. Raises DeadlineExceeded."""
        if self._lane is not None:
            self._lane.close(timeout_s)
        for id in list(self._pinning):
            self._unpin(id)

    # --------------------------------------------------------------------------------------------------------------- on the lane

    def _load(self) -> None:
        """What an earlier process has left on the local disk; what is in shared stores is looked up when somebody asks for it."""
        for tier, store in self._stores():
            if not tier.local:
                continue
            try:
                ids = tier.calls.say("list snapshots", store.manifests)
            except StoreFailed as error:
                log.warning("snapshots in the %s tier are not known: %s", tier.name, error)
                continue
            found = [manifest for id in ids if (manifest := self._try_read(tier, store, id)) is not None]
            for manifest in sorted(found, key=lambda one: one.created_s):
                self._adopt(manifest, tier.name)
        self._expire()

    def _try_read(self, tier: ColdTier, store: ManifestStore, id: str) -> Manifest | None:
        try:
            data = tier.calls.say("read a snapshot", partial(store.read_manifest, id))
            return None if data is None else self._checked(id, data)
        except (SnapshotRefused, StoreFailed) as error:
            self._damaged[id] = str(error)
            return None

    def _checked(self, id: str, data: bytes) -> Manifest:
        """Raises SnapshotRefused."""
        manifest = unpack(data)
        if manifest.id != id:
            raise SnapshotRefused("the manifest lies under another snapshot's name")
        check_space(manifest, self._cache.scope_of())
        return manifest

    def _adopt(self, manifest: Manifest, tier: str) -> None:
        """Where it does not fit any more, in a smaller tier, it is known and pins nothing."""
        self._known[manifest.id] = manifest
        self._tiers[manifest.id] = (tier,)
        try:
            self._pin(manifest)
        except SnapshotSpace as error:
            log.warning("snapshot %s no longer pins its blocks: %s", manifest.id, error)
            if self._last is not None:
                self._last[1].unpin_keys(manifest.id)

    def _reserve(self, manifest: Manifest) -> None:
        id = manifest.id
        self._expire()
        if id in self._pinning or id in self._known or id in self._damaged or self._is_shared(id):
            raise SnapshotTaken(f"there is a snapshot {manifest.name!r} already: delete it first, or choose another name")
        if len(self._known) >= MAX_SNAPSHOTS:
            raise SnapshotSpace(f"there are {MAX_SNAPSHOTS} snapshots already, which is the most: delete some")
        self._pin(manifest)

    def _pin(self, manifest: Manifest) -> None:
        """Its blocks stay in the last tier from now on, those of them that are there or come there. Raises SnapshotSpace."""
        name, last = self._last_tier()
        keys = manifest.block_keys
        num_new, most = sum(key not in self._pins for key in keys), self._most_pinned()
        if len(self._pins) + num_new > most:
            self._counts["refused"] += 1
            raise SnapshotSpace(
                f"this snapshot would pin {num_new} more blocks: {len(self._pins)} of the {self._num_slots()} in the {name} tier"
                f" are pinned, and {most} may be; delete snapshots, take one of fewer tokens, or give the tier more room"
            )
        last.pin_keys(manifest.id, keys)
        self._pins.update(keys)
        self._pinning.add(manifest.id)

    def _commit(self, manifest: Manifest) -> Snapshot:
        self._last_tier()[1].pin_keys(manifest.id, manifest.block_keys)  # in host memory, also what has come since
        if not self._num_kept(manifest):
            raise SnapshotRefused(f"none of its {manifest.num_blocks} blocks is in a tier: compute it first, and take the snapshot then")
        self._tiers[manifest.id] = self._write(manifest)
        self._known[manifest.id] = manifest
        self._due_s = min(self._due_s, manifest.expires_s or _NEVER)
        self._counts["taken"] += 1
        return self._shown(manifest)

    def _write(self, manifest: Manifest) -> tuple[str, ...]:
        """Into every tier that can have it; raises StoreFailed where there are some, and none has taken it."""
        written, failures = list[str](), list[StoreFailed]()
        data, left_s = pack(manifest), None if manifest.expires_s is None else manifest.expires_s - self._clock()
        for tier, store in self._stores():
            try:
                tier.calls.say("write a snapshot", partial(store.write_manifest, manifest.id, data, left_s))
                written.append(tier.name)
            except StoreFailed as error:
                failures.append(error)
        if failures and not written:
            raise failures[0]
        return tuple(written)

    def _find(self, name: str, salt: str) -> Manifest:
        id = snapshot_id(tenant_of(salt), name)
        if id in self._damaged:
            raise SnapshotRefused(f"snapshot {name!r} cannot be used: {self._damaged[id]}")
        manifest = self._known.get(id) or self._read_shared(id)
        if manifest is None or manifest.has_expired(self._clock()):
            raise SnapshotMissing(f"there is no snapshot {name!r}, or the cache_salt is not the one that it was taken with")
        return manifest

    def _is_shared(self, id: str) -> bool:
        """Whether another engine has one of that name, as far as stores answer."""
        try:
            manifest = self._read_shared(id)
        except (StoreFailed, SnapshotRefused) as error:
            return isinstance(error, SnapshotRefused)
        return manifest is not None and not manifest.has_expired(self._clock())

    def _read_shared(self, id: str) -> Manifest | None:
        """One that another engine has put into a store."""
        for tier, store in self._shared_stores():
            data = tier.calls.say("read a snapshot", partial(store.read_manifest, id))
            if data is not None:
                return self._checked(id, data)
        return None

    def _all(self, tenant: bytes) -> SnapshotList:
        ids = [id for id, manifest in self._known.items() if manifest.tenant == tenant]
        found = [self._known[id] for id in ids]
        for tier, store in self._shared_stores():
            for id in tier.calls.say("list snapshots", partial(store.manifests, tenant.hex())):
                try:
                    shared = self._read_shared(id) if id not in self._known else None
                except SnapshotRefused as error:
                    log.warning("snapshot %s in the %s tier cannot be used: %s", id, tier.name, error)
                    continue
                found += [] if shared is None else [shared]
        now = self._clock()
        shown = [self._shown(one) for one in sorted(found, key=lambda one: one.created_s) if not one.has_expired(now)]
        name, block_bytes = self._last_tier()[0], self._cache.saves.layout.block_bytes
        return SnapshotList(shown, name, len(self._pins), self._most_pinned(), block_bytes)

    def _delete(self, name: str, salt: str) -> None:
        id = snapshot_id(tenant_of(salt), name)
        if id not in self._damaged:
            self._drop(self._find(name, salt))
        else:
            self._remove(id)
            del self._damaged[id]
        self._counts["deleted"] += 1

    def _drop(self, manifest: Manifest) -> None:
        """Its blocks may go, and its manifest does."""
        self._known.pop(manifest.id, None)
        self._unpin(manifest.id, manifest)
        self._remove(manifest.id)
        self._tiers.pop(manifest.id, None)

    def _remove(self, id: str) -> None:
        for tier, store in self._stores():
            try:
                tier.calls.say("remove a snapshot", partial(store.remove_manifest, id))
            except StoreFailed as error:
                log.warning("the manifest of snapshot %s stays in the %s tier: %s", id, tier.name, error)

    def _unpin(self, id: str, manifest: Manifest | None = None) -> None:
        manifest = manifest or self._known.get(id)
        if id in self._pinning and self._last is not None:
            self._pinning.discard(id)
            self._last[1].unpin_keys(id)
            if manifest is not None:
                self._pins.subtract(manifest.block_keys)
                self._pins = +self._pins

    def _expire(self) -> None:
        now = self._clock()
        for manifest in [one for one in self._known.values() if one.has_expired(now)]:
            self._drop(manifest)
            self._counts["expired"] += 1
        self._due_s = min((one.expires_s for one in self._known.values() if one.expires_s is not None), default=_NEVER)

    # ------------------------------------------------------------------------------------------------------------------ inside

    def _manifest(self, asked: SnapshotRequest, tokens: Tokens) -> Manifest:
        scope = self._cache.scope_of(asked.cache_salt, asked.adapter)
        num = len(tokens) if asked.num_tokens is None else asked.num_tokens
        block_tokens = self._cache.block_tokens
        if num > len(tokens):
            raise InvalidRequest(f"tokens is {num}, and there are {len(tokens)} to take a snapshot of", "tokens")
        if num < block_tokens:
            raise InvalidRequest(f"a snapshot needs a full block of {block_tokens} tokens, and these are {num}", "tokens")
        prefix = self._cache.prefix_of(tokens[:num], asked.cache_salt, asked.adapter)
        now = self._clock()
        manifest = Manifest(
            name=asked.name,
            tenant=tenant_of(asked.cache_salt),
            space=self._cache.scope_of().digest(),
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
            raise SnapshotSpace(f"the manifest of this snapshot would have {num_bytes} bytes, and {MAX_MANIFEST_BYTES} is the most")
        return manifest

    def _shown(self, manifest: Manifest) -> Snapshot:
        return Snapshot(
            name=manifest.name,
            num_tokens=manifest.num_tokens,
            kept_tokens=self._num_kept(manifest) * manifest.block_tokens,
            num_blocks=manifest.num_blocks,
            pinned=manifest.id in self._pinning,
            created_s=manifest.created_s,
            expires_s=manifest.expires_s,
            adapter=manifest.adapter,
            is_chat=bool(manifest.messages),
            tiers=self._tiers[manifest.id] if manifest.id in self._known else tuple(tier.name for tier, _ in self._shared_stores()),
        )

    def _num_kept(self, manifest: Manifest) -> int:
        """How many of its first blocks one tier has, as far as they say."""
        keys = manifest.block_keys
        num = max(self._cache.loads.host.num_leading(keys), self._last_tier()[1].num_leading(keys))
        for tier, _ in self._shared_stores() if num < len(keys) else ():
            num = max(num, tier.calls.find(keys))
        return num

    def _stores(self) -> Iterator[tuple[ColdTier, ManifestStore]]:
        for tier in self._cache.cold_tiers.values():
            if isinstance(tier.calls.store, ManifestStore):
                yield tier, tier.calls.store

    def _shared_stores(self) -> Iterator[tuple[ColdTier, ManifestStore]]:
        return ((tier, store) for tier, store in self._stores() if not tier.local)

    def _last_tier(self) -> tuple[str, PinningStore]:
        if self._last is None:
            raise SnapshotRefused("snapshots need a tier behind the device: this server runs without --kv-offload")
        return self._last

    def _num_slots(self) -> int:
        if self._last is None:
            return 0
        name = self._last[0]
        tier = self._cache.cold_tiers.get(name)
        return self._cache.loads.host.num_slots if tier is None else tier.usage().num_slots or 0

    def _most_pinned(self) -> int:
        if self._last is not None and self._last[0] not in self._cache.cold_tiers and self._most_in_host is not None:
            return self._most_in_host
        return int(self._num_slots() * PINNED_SHARE)

    def _ask(self, work: Callable[[], T]) -> T:
        """Block until the lane has done it."""
        self._last_tier()
        assert self._lane is not None
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        try:
            self._lane.submit(run, label="snapshots")
            return done.result(_ANSWER_S)
        except LaneClosed:
            raise EngineClosed("the engine is closed") from None
        except FutureTimeout:
            raise DeadlineExceeded(f"a tier did not answer about snapshots within {_ANSWER_S:g} s; what is under way goes on") from None
