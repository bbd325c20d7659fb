"""The queue of requests that wait to run. Owns their order, what is cached of each, and when a lease is
useful. The scheduler decides which request is admitted.

A request's rank is its arrival time plus an allowance: some seconds for every second of work that its start
takes, up to a bound. The next request has the highest priority and, within it, the lowest rank. So a request
is never overtaken by one of its priority that arrived more than the bound later, even if the estimates are
wrong or change.

Requests that find nothing cached form a queue of their own, in order of arrival. Only its first request
competes: they do not overtake each other. One exception: if a long one is deferred so that running
conversations can continue, short ones pass it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import islice

from penstock.contract import KvLedger, Match, Prefix
from penstock.engine.scheduling.residency import KeptContexts
from penstock.engine.scheduling.track import State, Track

# Seconds of waiting that a second of work is worth. A request whose KV is on the device needs no new room for
# it. A request that loads its KV from colder tiers pushes out others that come back later. A request that
# finds nothing takes memory from others for good.
_HERE_PATIENCE = 20.0
_PATIENCE = 60.0
_COLD_PATIENCE = 240.0
# Share of the bound for requests that find a good part of their prompt: a conversation under way waits less
# than a new one.
_KNOWN_SHARE = 0.165
_GOOD_PART = 0.25
# distance of two priorities where one number holds priority and rank; above any arrival time
_PRIORITY_S = 1e8
_MOST_PRIORITY = 1000  # larger values are clamped
# prompt tokens that one plan matches for the first time, checked before each request: the time grows with the
# prompt
_NEW_TOKENS = 65_536
_NO_MATCH = Match(0, 0, False)
_PREFETCHED = 4  # requests at the head of the line whose cold blocks are prefetched


class Line:
    """`bound_s`: how much later a request may arrive and still go first; 0: first come, first served."""

    def __init__(self, bound_s: float = 0.0) -> None:
        self.num_retracted = 0
        self._bound_s = bound_s
        self._queued: list[Track] = []  # requests that find nothing cached, by arrival
        self._ranked: list[Track] = []  # all other requests, by rank
        # all requests: new ones first, then those whose match is oldest
        self._to_look_at: OrderedDict[Track, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queued) + len(self._ranked)

    def __iter__(self) -> Iterator[Track]:
        """In order, next request first. Do not change the line while iterating."""
        queued, ranked = 0, 0
        while queued < len(self._queued) and ranked < len(self._ranked):
            first = _by_rank(self._queued[queued]) < _by_rank(self._ranked[ranked])
            yield self._queued[queued] if first else self._ranked[ranked]
            queued, ranked = queued + first, ranked + (not first)
        yield from self._queued[queued:]
        yield from self._ranked[ranked:]

    def passing(self, num_tokens: int, most: int) -> Iterator[Track]:
        """Requests that may pass a deferred long conversation, next one first: those that find something
        cached and, of the first `most` that find nothing, those shorter than `num_tokens`. Do not change the
        line while iterating."""
        short = [track for track in islice(self._queued, most) if len(track.tokens) < num_tokens]
        return merge(short, self._ranked, key=_by_rank)

    def going_on(self) -> Iterator[Track]:
        """Requests that continue a conversation."""
        return (track for track in self._ranked if track.goes_on)

    def add(self, track: Track) -> None:
        """Ranked by arrival until `rank` is called."""
        track.rank = track.request.arrival_s
        track.is_ranked = True
        insort(self._ranked, track, key=_by_rank)
        self.num_retracted += track.state is State.RETRACTED
        if self._bound_s:
            self._to_look_at[track] = None
            # it was just matched, and the result is cached
            self._to_look_at.move_to_end(track, last=False)

    def remove(self, track: Track) -> None:
        """Call it before the request's state changes."""
        self._take_out(track)
        self._to_look_at.pop(track, None)
        self.num_retracted -= track.state is State.RETRACTED

    def rank(self, track: Track, start_s: float | None, found_share: float, is_here: bool = False) -> bool:
        """Set the rank of `track`. `start_s`: seconds that its start takes once admitted, None if unknown.
        `found_share`: share of its prompt that is cached. `is_here`: most of that is on the device. Returns
        True if its place may have changed. A retracted request and one of unknown cost are ranked by
        arrival."""
        known = self._bound_s > 0 and start_s is not None and track.state is not State.RETRACTED
        offset_s = 0.0
        track.goes_on = found_share >= _GOOD_PART or track.state is State.RETRACTED
        if known and start_s is not None:
            most_s = self._bound_s * (1.0 - (1.0 - _KNOWN_SHARE) * min(1.0, found_share / _GOOD_PART))
            patience = _COLD_PATIENCE if not found_share else _HERE_PATIENCE if is_here else _PATIENCE
            offset_s = min(most_s, patience * start_s)
        rank, is_ranked = track.request.arrival_s + offset_s, found_share > 0 or not known
        if rank == track.rank and is_ranked == track.is_ranked:
            return False
        self._take_out(track)
        track.rank, track.is_ranked = rank, is_ranked
        if is_ranked:
            insort(self._ranked, track, key=_by_rank)
        else:
            insort(self._queued, track, key=_by_arrival)
        return True

    def look_again(self, most: int) -> list[Track]:
        """The requests to match again now, in rotation; unmatched ones first."""
        tracks: list[Track] = []
        num_new = 0
        for track in islice(self._to_look_at, most):
            if track.want is None:
                if num_new >= _NEW_TOKENS:
                    break
                num_new += len(track.tokens)
            tracks.append(track)
        for track in tracks:
            self._to_look_at.move_to_end(track)
        return tracks

    def _take_out(self, track: Track) -> None:
        line, key = (self._ranked, _by_rank) if track.is_ranked else (self._queued, _by_arrival)
        place = bisect_left(line, key(track), key=key)
        del line[place]


def _by_rank(track: Track) -> tuple[int, float, int]:
    return track.request.priority, track.rank, track.order


def _by_arrival(track: Track) -> tuple[int, float, int]:
    return track.request.priority, track.request.arrival_s, track.order


def want_rank(track: Track, rank: float | None = None) -> float:
    """Priority and rank as one number: blocks wanted by the highest number are evicted first. `rank` replaces
    the request's own rank."""
    return (track.rank if rank is None else rank) + _PRIORITY_S * max(
        -_MOST_PRIORITY, min(_MOST_PRIORITY, track.request.priority)
    )


# -------------------------------------------------------------------------------------- what they find cached


def is_ready(track: Track) -> bool:
    """True if it can be matched now. False while a step from before its retraction still samples for it (its
    tokens are not all known), while its KV is being saved, or while a store has not answered."""
    if track.num_in_flight or (track.lease is not None and not track.lease.ready):
        return False
    return not track.is_deep or not _is_being_read(track)


def _is_being_read(track: Track) -> bool:
    """True if colder tiers have blocks of it that are not in host memory yet, and the read is not late."""
    if track.computes:
        return False
    if track.prefetch is not None:
        return not track.prefetch.overdue
    return (
        track.may_prefetch
        and track.lease is not None
        and any(tier != "host" for tier, _ in track.lease.runs_from(0))
    )


def reads_first(track: Track, match: Match, ledger: KvLedger) -> bool:
    """`track` could start now with its match. True if it is deep and waits because colder tiers have more of
    it: its lease may have expired, blocks read for it may have been evicted, or there was no room for all of
    them. The tiers are asked once for each longer match."""
    num_found, num_usable = (
        match.num_blocks + match.num_paged,
        _whole(track, (len(track.tokens) - 1) // ledger.block_tokens),
    )
    if not track.is_deep or track.computes or track.continues is not None or track.prefetch is not None:
        return False
    if track.prefix is None or not track.request.may_match or not track.leased_at < num_found < num_usable:
        return False
    track.leased_at = num_found
    _lease_again(track, track.prefix, ledger)
    track.may_prefetch, track.num_read = True, match.num_paged
    return track.lease is not None and (
        not track.lease.ready or _whole(track, track.lease.num_from(0)) > num_found
    )


def _whole(track: Track, num_blocks: int) -> int:
    """`num_blocks` rounded down to the unit in which its blocks are paged out."""
    return num_blocks // track.unit * track.unit


def is_pending(track: Track, ledger: KvLedger) -> bool:
    """True if another request or a transfer will produce the blocks it lacks, and it waits for them. Also
    extends its keys to its newest tokens."""
    if track.prefix is None or not track.request.may_match:
        return False
    if len(track.prefix.keys) < len(track.tokens) // ledger.block_tokens:  # it has generated tokens since
        track.prefix = ledger.extend_prefix(track.prefix, track.tokens)
    return not track.computes and ledger.is_pending(track.prefix.keys, track.want)


def find_match(
    track: Track, ledger: KvLedger, most_resident: int = 0, kept: KeptContexts | None = None
) -> Match:
    """Ends or renews its lease if that helps. `most_resident`: blocks that a deep request may have on the
    device. `kept`: contexts that scored requests may continue."""
    if track.prefix is None or not track.request.may_match:
        return _NO_MATCH
    if track.is_deep:
        return _find_deep(track, track.prefix, ledger, most_resident, kept)
    if track.computes:
        track.end_lease()
    # its blocks are now in a hotter tier than the lease says
    if track.prefetch is not None and track.prefetch.settled:
        track.end_prefetch()
        _lease_again(track, track.prefix, ledger)
    match = ledger.match(track.prefix.keys, track.lease, track.want)
    if not track.computes and not match.pending and _may_lease(track, match):
        # There was no lease, the device lost the blocks before it, or it has expired: ask again.
        track.leased_at = match.num_blocks
        _lease_again(track, track.prefix, ledger)
        match = ledger.match(track.prefix.keys, track.lease, track.want)
    return match


def _find_deep(
    track: Track, prefix: Prefix, ledger: KvLedger, most_resident: int, kept: KeptContexts | None
) -> Match:
    keys = prefix.keys[: (len(track.tokens) - 1) // ledger.block_tokens]  # at least one token is computed
    track.continues = None
    if (
        kept
        and track.request.residency is not None
        and not track.computes
        and (context := kept.find(keys)) is not None
    ):
        num = kept.num_usable(ledger.match(context.keys, most_resident=0).num_paged, len(track.tokens))
        if num:
            track.continues = context, num
            return Match(0, 0, False, num_paged=num)
    match = ledger.match(keys, most_resident=most_resident)
    return match._replace(num_paged=_whole(track, match.num_paged))


def _may_lease(track: Track, match: Match) -> bool:
    """True if colder tiers may have blocks that neither the device nor the lease covers. They are asked once
    for each length of the device's match, so a waiting request does not ask in every plan."""
    if track.prefix is None or match.num_blocks == len(track.prefix.keys):
        return False
    if track.lease is not None and track.lease.expired:
        return True  # a request may wait longer than its lease lasts
    if match.num_blocks == track.leased_at:
        return False
    return track.lease is None or track.lease.num_from(match.num_blocks) == 0


def _lease_again(track: Track, prefix: Prefix, ledger: KvLedger) -> None:
    earlier = track.lease
    track.end_lease()
    track.lease = ledger.lease(track.request.id, prefix, earlier, track.is_deep)


def found_share(track: Track, match: Match, block_tokens: int) -> float:
    """Share of its tokens whose KV is already cached."""
    return min(
        1.0, (match.num_blocks + match.num_colder + match.num_paged) * block_tokens / len(track.tokens)
    )


def prefetch_waiting(tracks: Iterable[Track], ledger: KvLedger, fits_host: Callable[[Track], bool]) -> None:
    """`tracks` wait, next one first. Reads the cold blocks of the first ones into host memory: once per
    request, and for one more request in each plan, since a lookup takes time in proportion to the prefix.
    `fits_host`: whether host memory has room for all of a deep request beside the running ones."""
    is_next = True
    for track in islice(tracks, _PREFETCHED):
        if (
            track.is_deep
            and track.prefetch is not None
            and track.prefetch.settled
            and track.prefix is not None
        ):
            _read_on(track, track.prefix, ledger, fits_host(track))
        # True only for the first request, if this read is all that it waits for
        is_next = is_next and track.is_deep and fits_host(track)
        if not is_next and not ledger.may_prefetch:
            return
        if (
            track.may_prefetch
            and not track.computes
            and track.prefix is not None
            and track.lease is not None
            and track.lease.ready
        ):
            track.may_prefetch = False
            track.prefetch = ledger.prefetch(
                track.prefix, track.request.id, track.lease, whole=track.is_deep, is_next=is_next
            )
            if track.prefetch is not None:
                return
        is_next = False


def _read_on(track: Track, prefix: Prefix, ledger: KvLedger, fits_host: bool) -> None:
    """A deep request runs once all of it is in host memory, and one read may bring only a part. As long as
    reads bring something, there may be more. If host memory had no room (not `fits_host`), or the read was
    ended early, it is tried again later."""
    was_ended = track.prefetch is not None and track.prefetch.ended
    track.end_prefetch()
    _lease_again(track, prefix, ledger)
    runs = () if track.lease is None else track.lease.runs_from(0)
    num_read = sum(num for tier, num in runs[:1] if tier == "host")
    track.may_prefetch, track.num_read = num_read > track.num_read, num_read
    if not track.may_prefetch and fits_host and not was_ended:
        track.leased_at = num_read
