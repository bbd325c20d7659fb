"""Snapshots of conversations by name: who has which, what they pin and for how long. Owns the manifests that
this process knows, and the bound on what they pin; blocks and files are the tiers'.

A snapshot moves nothing. Its blocks are in the tiers under their keys; those in the last tier that evicts by
itself stay there until it is deleted or its time is over. What a tier has lost all the same is computed again
from the manifest's tokens.

Everything that may block happens on a lane of its own, one after the other, so the books need no lock. `step`
is the engine thread's and never blocks. What others ask waits in a bounded line for the lane: `begin_x`
returns a future, and its cancel leaves the line.
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

PINNED_SHARE = 0.5  # of the last tier's blocks: what all snapshots may pin
MAX_SNAPSHOTS = 4096
MAX_MANIFEST_BYTES = 64 << 20
_WRITE_TRIES = 3  # of a manifest: others may remove or replace what is found under its name
_LIST_AT_ONCE = 16  # snapshots of a list that are read while others wait
MOST_WAITING = 64  # questions that wait for the lane; equal ones count once
ANSWER_S = 60.0  # for the lane to come round
_NEVER = float("inf")

T = TypeVar("T")


class PinnedBlocks:
    """What snapshots pin in the last tier that evicts by itself, each block counted once, and the bound on
    it."""

    def __init__(self, cache: KvCache, tier: str, last: PinningStore, most_in_host: int | None) -> None:
        self.tier = tier
        self.last = last
        self._cache = cache
        self._most_in_host = most_in_host
        self._pins: Counter[bytes] = Counter()  # by block: how many of the snapshots that pin it
        self._pinning: dict[str, Manifest] = {}  # those that do, by id

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, id: str) -> bool:
        return id in self._pinning

    @property
    def ids(self) -> Set[str]:
        """Of those that pin, be they taken or being taken."""
        return self._pinning.keys()

    def pinned_by(self, manifest: Manifest) -> bool:
        """Whether this very one pins, and not another of its name."""
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
        """Its blocks stay from now on, those of them that are there or come there. Raises SnapshotSpace."""
        keys = manifest.block_keys
        num_new, most = sum(key not in self._pins for key in keys), self.most
        if len(self._pins) + num_new > most:
            raise SnapshotSpace(
                f"this snapshot would pin {num_new} more "
                f"blocks: "
                f"{len(self._pins)} "
                f"of "
                f"the "
                f"{self.num_slots} "
                f"in the {self.tier} tier"
                f" are pinned, and {most} may be; delete snapshots, take one of "
                f"fewer "
                f"tokens, "
                f"or "
                f"give "
                f"the "
                f"tier more room"
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
    """The stores behind an engine that have manifests. Everything may block, and raises StoreFailed where
    nothing else is said."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache

    def __iter__(self) -> Iterator[tuple[ColdTier, ManifestStore]]:
        for tier in self._cache.cold_tiers.values():
            if isinstance(tier.calls.store, ManifestStore):
                yield tier, tier.calls.store

    def shared(self) -> Iterator[tuple[ColdTier, ManifestStore]]:
        """Those that other engines use, too."""
        return ((tier, store) for tier, store in self if not tier.local)

    def write(self, manifest: Manifest, now_s: float) -> tuple[str, ...]:
        """Into every one that takes it; raises where there are some, and none has. Raises SnapshotTaken where
        another engine has the name: the store decides that, and is asked first."""
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
        """Not what another engine, or an earlier process, has put there under the same name. Never raises:
        what stays is told, and is removed when it is found to have expired."""
        for tier, store in self:
            try:
                tier.calls.say("remove a snapshot", partial(store.remove_manifest, id, pack(own)))
            except StoreFailed as error:
                log.warning("the manifest of snapshot %s stays in the %s tier: %s", id, tier.name, error)

    def delete(self, id: str) -> None:
        """Whoever put it there. Raises where one does not answer. The coldest is asked first: what others
        find is still known here."""
        for tier, store in reversed([*self]):
            tier.calls.say("remove a snapshot", partial(store.remove_manifest, id))

    def local(self) -> Iterator[tuple[ColdTier, ManifestStore]]:
        """Those of this machine, which an earlier process may have left some in."""
        return ((tier, store) for tier, store in self if tier.local)

    def shared_ids(self, tenant: bytes) -> list[str]:
        return [
            id
            for tier, store in self.shared()
            for id in tier.calls.say("list snapshots", partial(store.manifests, tenant.hex()))
        ]

    def read_shared(self, id: str) -> Manifest | None:
        """One that another engine has put into a store. Raises SnapshotRefused as well."""
        for tier, store in self.shared():
            if (manifest := self.read(tier, store, id)) is not None:
                return manifest
        return None

    def read(self, tier: ColdTier, store: ManifestStore, id: str) -> Manifest | None:
        """Checked: it is whole, its own, and of this model. Raises SnapshotRefused as well."""
        data = tier.calls.say("read a snapshot", partial(store.read_manifest, id))
        if data is None:
            return None
        manifest = unpack(data)
        if manifest.id != id:
            raise SnapshotRefused("the manifest lies under another snapshot's name")
        check_space(manifest, self._cache.scope.of())
        return manifest


class Snapshots:
    """See the module. `most_in_host`: blocks that may be pinned where host memory is the last tier; None: the
    usual share."""

    def __init__(
        self, cache: KvCache, most_in_host: int | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._cache = cache
        self._clock = clock
        self._places = ManifestPlaces(cache)
        self._known: dict[str, tuple[Manifest, tuple[str, ...]]] = {}  # by id, with the tiers that have it
        self._damaged: dict[str, str] = {}  # by id: why its manifest cannot be used
        self._unread: set[str] = set()  # ids of those that the disk did not give out: it may by now
        self._is_listed = False  # what the disk has is known
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
        """Of the KV of `tokens`, as far as it is cached. `save` is called on the lane with the keys of its
        blocks; its future ends when what was computed of them has reached the tiers. All of it is there then,
        or nothing is."""
        return run_steps(self.taking(asked, tokens, save))

    def taking(
        self, asked: SnapshotRequest, tokens: Tokens, save: Callable[[Sequence[bytes]], Future[None]]
    ) -> Generator[Future[Any], Any, Snapshot]:
        """The steps of `begin_take_of`."""
        reserved: list[Manifest] = []

        def reserve() -> Manifest:
            manifest = self._manifest(asked, tokens)
            self._reserve(manifest)
            reserved.append(manifest)  # also where the caller has gone meanwhile
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
        """Those of one tenant. Read some at a time, so that others are answered meanwhile."""
        return run_steps(self._listing(tenant_of(cache_salt)))

    def begin_find(self, name: str, cache_salt: str = "") -> Future[Snapshot]:
        """Raises SnapshotMissing, SnapshotRefused."""
        return self._begin(lambda: self._shown(self._find(name, cache_salt)))

    def begin_open(
        self, name: str, cache_salt: str = "", adapter: Adapter | None = None
    ) -> Future[SnapshotContent]:
        """What a request of that adapter goes on from. Raises SnapshotMissing; SnapshotRefused where it is
        not of the same model."""
        future = self._begin(partial(self._open, name, cache_salt, adapter), same=(name, cache_salt, adapter))
        future.add_done_callback(self._count_continued)
        return future

    def begin_delete(self, name: str, cache_salt: str = "") -> Future[None]:
        """Also one that cannot be used. Raises SnapshotMissing."""
        return self._begin(partial(self._delete, name, cache_salt))

    def all(self, cache_salt: str = "") -> SnapshotList:
        """Blocks, as do the next three."""
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
        """On the lane, where it was opened."""
        if not opened.cancelled() and opened.exception() is None:
            self._counts["continued"] += 1

    # -------------------------------------------------------------------------------------- the engine thread

    def step(self) -> None:
        """Have what has expired let go. Never blocks."""
        if self._clock() >= self._due_s and self._lane is not None:
            self._due_s = _NEVER  # once: the lane says when the next is due
            self._lane.submit(self._expire, label="expire snapshots")

    def close(self, timeout_s: float | None) -> None:
        """What the lane is at ends first, what waits is told; nothing is pinned then. Idempotent. Raises
        DeadlineExceeded."""
        if self._questions is not None:
            self._questions.close()
        if self._lane is not None:
            self._lane.close(timeout_s)
        if self._pinned is not None:
            self._pinned.unpin_all()

    # -------------------------------------------------------------------------------------------- on the lane

    def _load(self) -> None:
        """What an earlier process has left on the local disk, as far as it answers; what is in shared stores
        is looked up when somebody asks for it."""
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
        self._expire()  # before any pins: what is over takes no room from what is not
        for manifest, _ in found:
            if manifest.id in self._known:
                self._try_pin(manifest)

    def _try_read(self, tier: ColdTier, store: ManifestStore, id: str) -> Manifest | None:
        """None: it cannot be used, or could not be read, which is noted."""
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
        """Somebody asks for that one, or for all: a disk that did not answer before may do so now."""
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
            if len(self._known.keys() | pins.ids) >= MAX_SNAPSHOTS:  # with those that are being taken
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
                f"none of its {manifest.num_blocks} blocks is "
                f"in "
                f"a "
                f"tier: "
                f"compute "
                f"it "
                f"first, and take the snapshot then"
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
                f"snapshot "
                f"{name!r} "
                f"cannot "
                f"be "
                f"read: "
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
        """Of all that there are, and whether every tier has said which it has."""
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
        """Those of `ids` that can be used, and whether all could be read."""
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
        # it is there, be it damaged, here or in a shared store
        with contextlib.suppress(SnapshotRefused, *is_unreadable):
            self._find(name, salt)
        # before anything is let go: where a tier does not answer, it can be deleted later
        self._places.delete(id)
        self._forget(id)
        self._counts["deleted"] += 1

    def _let_go(self, id: str, own: Manifest) -> None:
        """Its blocks may go, and its manifest does, as `ManifestPlaces.remove` says."""
        self._forget(id)
        self._places.remove(id, own)

    def _forget(self, id: str) -> None:
        self._known.pop(id, None)
        self._damaged.pop(id, None)
        self._unread.discard(id)
        self._own_pins.unpin(id)

    def _give_up(self, manifest: Manifest) -> None:
        """What its taking has left, which may be nothing; one of the same name that is somebody else's
        stays."""
        if self._own_pins.pinned_by(manifest):
            self._let_go(manifest.id, manifest)

    def _expire_due(self) -> None:
        """Nobody who asks finds one whose time is over in place of another engine's of the same name."""
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
        """How many of its first blocks one tier has that keeps them, as far as they say. Host memory in front
        of a disk does not."""
        keys = manifest.block_keys
        num = self._own_pins.last.num_leading(keys)
        for tier in self._cache.cold_tiers.values() if num < len(keys) else ():
            num = max(num, tier.calls.find(keys))
        return num

    @property
    def _own_pins(self) -> PinnedBlocks:
        """On the lane, which is there where they are."""
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
                f"the manifest of this snapshot "
                f"would "
                f"have "
                f"{num_bytes} "
                f"bytes, "
                f"and "
                f"{MAX_MANIFEST_BYTES} is the most"
            )
        return manifest


def wait_answered(future: Future[T], timeout_s: float) -> T:
    """Block until it is over. Raises DeadlineExceeded, and cancels it."""
    try:
        return future.result(timeout_s)
    except TimeoutError:
        if future.done():  # it has ended so
            raise
        future.cancel()
        raise DeadlineExceeded(
            f"a tier did not answer about snapshots within {timeout_s:g} s; what is under way goes on"
        ) from None


def _taken(manifest: Manifest) -> SnapshotTaken:
    return SnapshotTaken(
        f"there is a snapshot {manifest.name!r} already: delete it first, or choose another name"
    )


def _last_evicting(cache: KvCache) -> tuple[str, PinningStore] | None:
    """The coldest tier whose evictions are ours: there blocks can be pinned for good. None: there is only the
    device, which requests need for themselves. A shared store forgets by rules of its own."""
    for name, tier in reversed(cache.cold_tiers.items()):
        if isinstance(tier.calls.store, PinningStore):
            return name, tier.calls.store
    return (HOST, cache.host) if cache.host.num_slots else None


def _write(store: ManifestStore, manifest: Manifest, now_s: float) -> Written:
    """TAKEN: another one of that name is there. One whose time is over is replaced."""
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
    """A damaged one keeps its name until it is deleted."""
    try:
        return unpack(data).has_expired(now_s)
    except SnapshotRefused:
        return False
