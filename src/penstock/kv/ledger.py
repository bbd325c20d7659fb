"""The scheduler's door to KV storage: matches prefixes, opens tables and makes room. Owns the device pool and
the open tables, no bytes. Operations on an open table are in `kv/table.py`.

All calls come from the engine thread and never block; `prefix_of` and `lease` may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from penstock import contract
from penstock.contract import Adapter, Lease, Match, Prefix
from penstock.errors import ConfigError, InvariantBroken
from penstock.kv.blocks.eviction import PoolWant
from penstock.kv.blocks.key import Scope, Tokens, prefix_keys, token_bytes
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.events import KvEvents
from penstock.kv.rules import PrefixRule, WholePrefix
from penstock.kv.states import KeptStates
from penstock.kv.table import BlockTable, OpenTables
from penstock.kv.tiers.host import HostLease, Part
from penstock.kv.tiers.reads import Fetch, ToRead
from penstock.kv.tiers.tiers import Tiers

_HOST_SPARE_SHARE = 8  # 1 / this of the host slots is never promised to deep requests


class Ledger:
    """Implements `contract.KvLedger`, which documents its calls, over one device pool and `tiers`. `rule`
    says which blocks a request needs; None: all. `events`: the pools of all tiers report to it.

    `prefix_cache` off: no device block gets a key, so none is found there, and every prefix comes from a
    colder tier. Without one, nothing is reused.
    """

    def __init__(
        self,
        pool: BlockPool,
        scope: Scope,
        prefix_cache: bool = True,
        tiers: Tiers | None = None,
        rule: PrefixRule | None = None,
        events: KvEvents | None = None,
    ) -> None:
        if not pool.num_slots:
            raise ConfigError(f"pool {pool.name!r} needs at least one slot")
        tiers = Tiers.none(pool, scope.block_tokens) if tiers is None else tiers
        self.scope = scope
        self.block_tokens = scope.block_tokens
        self.host, self.writeback, self.saves, self.loads = (
            tiers.host,
            tiers.writeback,
            tiers.saves,
            tiers.loads,
        )
        self.cold_tiers = self.writeback.cold  # tiers colder than host memory, hottest first
        # speed of prompt computation: loading is weighed against it, and chunks are sized by it
        self.prefill = self.loads.costs.prefill
        self.num_blocks = pool.num_slots
        self.rule = WholePrefix(scope.block_tokens) if rule is None else rule
        # The rest of host memory is left to other requests.
        num_host = self.host.num_slots if prefix_cache and self.rule.keeps_all else 0
        self.num_pageable = num_host - num_host // _HOST_SPARE_SHARE
        self._pool = pool
        self._plain_digest = scope.of().digest()  # of requests without salt and adapter
        self.events = events
        self._reports = reports = None if events is None else events.reports
        if reports is not None:
            reports.make_public(self._plain_digest)
        self._tables = OpenTables(pool, tiers, self.rule, scope.block_tokens, prefix_cache, reports)

    # ---------------------------------------------------------------------------------------------- questions

    @property
    def keeps_all(self) -> bool:
        return self.rule.keeps_all

    @property
    def states(self) -> KeptStates | None:
        return self.rule.states

    def most_slots(self, num_tokens: int, step_tokens: int) -> int:
        return self.rule.most_slots(num_tokens, step_tokens)

    @property
    def num_available(self) -> int:
        return self.rule.num_available(self._pool)

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_settling(self) -> int:
        """Slots that will be free soon. Excludes late transfers and those queued after one."""
        if self.saves.mover.is_late():
            return self.loads.num_abandoned(late=False)
        return max(0, self._pool.counts.pinned - self.loads.num_abandoned(late=True))

    @property
    def num_leaving(self) -> int:
        return 0 if self.rule.keeps_all else self._pool.counts.pinned

    def prefix_of(self, tokens: Tokens, salt: str = "", adapter: Adapter | None = None) -> Prefix | None:
        """The identity under which the KV of `tokens` is shared. None if nothing is shared."""
        if not self._tables.shares:
            return None
        digest = self.scope.of(salt, adapter).digest() if salt or adapter is not None else self._plain_digest
        keys = prefix_keys(tokens, self.block_tokens, digest)
        if self._reports is not None:
            if adapter is not None and not salt:
                self._reports.make_public(digest, adapter.name)
            self._reports.tell(digest, None, keys, token_bytes(tokens))
        return Prefix(digest, keys)

    def extend_prefix(self, prefix: Prefix, tokens: Sequence[int]) -> Prefix:
        keys, more = prefix.keys, tokens[len(prefix.keys) * self.block_tokens :]
        last = keys[-1] if keys else None
        new = prefix_keys(more, self.block_tokens, prefix.scope, last)
        if self._reports is not None:
            self._reports.tell(prefix.scope, last, new, token_bytes(more))
        return Prefix(prefix.scope, (*keys, *new))

    def match(
        self,
        keys: Sequence[bytes],
        lease: Lease | None = None,
        want: contract.Want | None = None,
        most_resident: int | None = None,
    ) -> Match:
        """Holds nothing, so it is valid until the next call that draws slots. Blocks of `lease` may be
        evicted until they are claimed."""
        rule, pool = self.rule, self._pool
        found = rule.find(pool, keys, want if isinstance(want, PoolWant) else None)
        if most_resident is not None:
            num_paged = rule.num_usable(keys, self.host.num_leading(keys))
            if num_paged < found.num_blocks <= most_resident:
                return Match(found.num_blocks, rule.num_taken(pool, found.slots), False)
            return Match(0, 0, False, num_paged=num_paged)
        pending = self.is_pending(keys, want)
        if isinstance(lease, HostLease) and not pending:
            lease.refresh()
            lease.grow()
            found = rule.with_lease(found, pool, keys, lease, self.loads)
        num_taken = rule.num_taken(pool, found.slots)
        return Match(
            found.num_blocks,
            num_taken,
            pending,
            found.num_colder,
            num_gone=found.first,
            num_here=found.num_here,
            num_known=found.num_known,
        )

    def is_pending(self, keys: Sequence[bytes], want: contract.Want | None = None) -> bool:
        """Cheap also for a long prefix that was asked for before."""
        like = want if isinstance(want, PoolWant) else None
        num = self.rule.find(self._pool, keys, like).num_blocks if self._tables.reuses else len(keys)
        if num == len(keys):
            return False
        # Waiting pays if another request computes the next key, or if it is being promoted and is not late. A
        # key covers all tokens before it, so its block number is the same in every prefix.
        if self.rule.is_announced(num, keys, self._tables.announces):
            return True
        return bool(self.loads.in_flight) and self.rule.is_coming(num, keys, self.loads)

    def start_s(self, num_tokens: int, match: Match) -> float | None:
        if not self.host.num_slots:
            return None
        # paged-out blocks are read over the same link
        num_colder = match.num_colder + match.num_paged
        num_left = max(1, num_tokens - (match.num_blocks + num_colder) * self.block_tokens)
        compute_s = self.prefill.seconds(num_left, num_tokens - num_left / 2)
        load_s = (
            self.loads.costs.link.seconds(num_colder * self.saves.layout.block_bytes) if num_colder else 0.0
        )
        return None if compute_s is None else compute_s + (load_s or 0.0)

    # ------------------------------------------------------------------------------------------- colder tiers

    def lease(
        self, owner: str, prefix: Prefix, earlier: Lease | None = None, whole: bool = False
    ) -> Lease | None:
        """Only looks at the device; its blocks may be evicted before the request is planned."""
        if not self.host.num_slots:
            return None
        num = 0 if whole else self.rule.first_colder(self._pool, prefix.keys, self.host)
        if num == len(prefix.keys):
            return None
        return self.loads.lease(prefix.keys, owner, num, _parts_of(earlier))

    @property
    def may_prefetch(self) -> bool:
        return self.loads.reader.may_fetch

    def prefetch(
        self,
        prefix: Prefix,
        owner: str,
        lease: Lease | None = None,
        whole: bool = False,
        is_next: bool = False,
    ) -> Fetch | None:
        """It ends when all blocks have landed, when one fails, by a reset, or at its deadline."""
        parts = _parts_of(lease)
        if lease is not None and not lease.expired and not any(part.finding.num for part in parts):
            return None  # cold tiers answered recently that they have none of its blocks
        if not (is_next or self.may_prefetch):
            return None
        known = lease if isinstance(lease, HostLease) else None
        if lease is None and self.states is not None:
            self.states.prefetch(prefix.keys)
        wanted = ToRead(0, prefix.keys) if whole else self.rule.to_read(self._pool, prefix.keys, known)
        if wanted.first == len(wanted.keys):
            return None
        return self.loads.reader.fetch(owner, wanted, self.loads.deadline_s, parts, is_next)

    # --------------------------------------------------------------------------------------------------- room

    def want(
        self, keys: Sequence[bytes], rank: float, earlier: contract.Want | None = None
    ) -> PoolWant | None:
        if not self._tables.reuses:
            return None
        like = earlier if isinstance(earlier, PoolWant) else None
        return self._pool.want(self.rule.to_want(self._pool, tuple(keys), like), rank, like)

    def make_room(self, num_blocks: int, floor: int, num_more: int = 0) -> bool:
        return self.saves.make_room(num_blocks, floor, self._tables.give_way, num_more)

    def free_up(self, num_blocks: int) -> None:
        """Evicts only blocks that host memory has."""
        num_short = num_blocks - self._pool.num_free
        if num_short > 0:
            self._pool.evict(self.saves.num_safe(num_short))

    # ------------------------------------------------------------------------------------------------- tables

    @overload
    def open(
        self, owner: str, prefix: Prefix | None, num_blocks: int, num_paged: None = None, num_gone: int = 0
    ) -> BlockTable: ...

    @overload
    def open(
        self,
        owner: str,
        prefix: Prefix | None,
        num_blocks: int,
        num_paged: int | None = None,
        num_gone: int = 0,
    ) -> BlockTable | None: ...

    def open(
        self,
        owner: str,
        prefix: Prefix | None,
        num_blocks: int,
        num_paged: int | None = None,
        num_gone: int = 0,
    ) -> BlockTable | None:
        keys: Sequence[bytes] = () if prefix is None else prefix.keys
        slots, pin = self._pool.find(keys[num_gone:])[: num_blocks - num_gone], None
        if len(slots) != num_blocks - num_gone:
            raise InvariantBroken(
                f"{owner!r} opens a table with {num_blocks - num_gone} cached blocks, of which {len(slots)} "
                "are here"
            )
        if num_paged:
            pin = self.host.pin_run(keys[:num_paged], owner)
            if pin is None:
                return None
            if len(pin.run) < num_paged:
                pin.end()
                return None
        hold = self._pool.hold(owner, slots, num_paged or num_gone)
        return self._tables.add(hold, prefix, num_blocks or num_paged or 0, num_paged is not None, pin)

    def forget_closed(self, keys: Sequence[bytes]) -> None:
        self._tables.forget_unshared(keys)
        self._tables.unname(keys)


def _parts_of(lease: Lease | None) -> Sequence[Part]:
    """The findings of cold tiers about its blocks."""
    return lease.parts if isinstance(lease, HostLease) else ()
