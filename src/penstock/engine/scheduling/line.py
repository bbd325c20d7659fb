"""The requests that wait to run: who of them is next, what of each is cached, and what is brought nearer
meanwhile. Owns their order, and when a lease is of use; who is admitted is the scheduler's business.

A request's rank is its arrival plus what it may be overtaken for: so many seconds for every second of work
that its start takes, and never more than a bound. Whoever runs next is of the highest priority, and of these
of the least rank. So nobody is overtaken by a request of its priority that has arrived more than the bound
later, whatever the figures say, and whether they change or not.

Those that find nothing cached are a queue of their own, in order of arrival, of which only the first
competes: among each other they do not overtake. But where a long one of them begins later, so that others can
go on, short ones go ahead of it.
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

# Seconds of waiting that a second of work is worth. Whoever finds its KV on the device has its room there
# already. Whoever brings it from elsewhere makes others leave, who come back later; and what somebody
# computes who finds nothing takes memory from others for good.
_HERE_PATIENCE = 20.0
_PATIENCE = 60.0
_COLD_PATIENCE = 240.0
# Of the bound, for those that find a good part of their prompt: somebody who is in the middle of a
# conversation is not kept waiting as long as somebody who begins one.
_KNOWN_SHARE = 0.165
_GOOD_PART = 0.25
_PRIORITY_S = 1e8  # between priorities, where a number stands for both: above any time of arrival
_MOST_PRIORITY = 1000  # the same for all beyond
# of prompts that are looked at for the first time in one plan, but for one: that takes as long as they are
_NEW_TOKENS = 65_536
_NO_MATCH = Match(0, 0, False)
_PREFETCHED = 4  # requests from the head of the line, whose cold blocks are brought nearer
# Blocks that are copied to the device in one transfer before their request is admitted. Fewer lose the rate
# of the link, and save less time than a plan takes. With more, a request that fits meanwhile would wait long
# for the end of its copy, and so would others' loads behind it.
_LEAST_AHEAD = 16
_MOST_AHEAD = 512


class Line:
    """`bound_s`: how much later a request may arrive and still go first; 0: first come, first served."""

    def __init__(self, bound_s: float = 0.0) -> None:
        self.num_retracted = 0
        self._bound_s = bound_s
        self._queued: list[Track] = []  # those that find nothing, by arrival
        self._ranked: list[Track] = []  # the others, by rank
        # all of them: newcomers, then whoever was looked at longest ago
        self._to_look_at: OrderedDict[Track, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queued) + len(self._ranked)

    def __iter__(self) -> Iterator[Track]:
        """Whoever is next first. It may not be changed meanwhile."""
        queued, ranked = 0, 0
        while queued < len(self._queued) and ranked < len(self._ranked):
            first = _by_rank(self._queued[queued]) < _by_rank(self._ranked[ranked])
            yield self._queued[queued] if first else self._ranked[ranked]
            queued, ranked = queued + first, ranked + (not first)
        yield from self._queued[queued:]
        yield from self._ranked[ranked:]

    def passing(self, num_tokens: int, most: int) -> Iterator[Track]:
        """Those that may go ahead of one which begins a long conversation later, whoever is next first:
        whoever finds something, and of the first `most` that find nothing those below `num_tokens`. It may
        not be changed meanwhile."""
        short = [track for track in islice(self._queued, most) if len(track.tokens) < num_tokens]
        return merge(short, self._ranked, key=_by_rank)

    def going_on(self) -> Iterator[Track]:
        """Those in the middle of a conversation."""
        return (track for track in self._ranked if track.goes_on)

    def add(self, track: Track) -> None:
        """By its arrival, until more is known: `rank` says so."""
        track.rank = track.request.arrival_s
        track.is_ranked = True
        insort(self._ranked, track, key=_by_rank)
        self.num_retracted += track.state is State.RETRACTED
        if self._bound_s:
            self._to_look_at[track] = None
            # what is cached of it was looked up a moment ago, and is remembered
            self._to_look_at.move_to_end(track, last=False)

    def remove(self, track: Track) -> None:
        """Before its state changes."""
        self._take_out(track)
        self._to_look_at.pop(track, None)
        self.num_retracted -= track.state is State.RETRACTED

    def rank(self, track: Track, start_s: float | None, found_share: float, is_here: bool = False) -> bool:
        """`track` starts within `start_s` once it is admitted, None where that is not known, and finds so
        much of its prompt; `is_here`: most of it on the device. Says whether its place in line may have
        changed. One that ran before, and one whose cost nobody knows, keeps the place of its arrival."""
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
        """Some of those in line, others each time: those that nobody has looked at first."""
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
    """How late it runs, as one number: what requests of a lower priority want is forgotten first. `rank`: in
    place of its own."""
    return (track.rank if rank is None else rank) + _PRIORITY_S * max(
        -_MOST_PRIORITY, min(_MOST_PRIORITY, track.request.priority)
    )


# -------------------------------------------------------------------------------------- what they find cached


def is_ready(track: Track) -> bool:
    """Whether it can be matched now. Not while a step from before its retraction still samples for it, as its
    tokens are not all known; nor while what it had is still being saved, or a store has not answered yet."""
    if track.num_in_flight or (track.lease is not None and not track.lease.ready):
        return False
    return not track.is_deep or not _is_being_read(track)


def _is_being_read(track: Track) -> bool:
    """Whether tiers behind host memory have some of it that is not in host memory yet, and it is not late."""
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
    """`track` could start now with what matched. Whether it is deep, and tiers behind host memory have more
    of it, which it waits for: its lease may have expired, what was read for it may have gone again, or there
    was no room for all while others ran. They are asked once for each length of what matched, if that has
    grown."""
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
    """So many of its first blocks, as far as they can be in host memory alone."""
    return num_blocks // track.unit * track.unit


def is_pending(track: Track, ledger: KvLedger) -> bool:
    """Whether what it lacks comes without its doing, and it relies on that. Keeps its keys up with its
    tokens."""
    if track.prefix is None or not track.request.may_match:
        return False
    if len(track.prefix.keys) < len(track.tokens) // ledger.block_tokens:  # it has generated tokens since
        track.prefix = ledger.extend_prefix(track.prefix, track.tokens)
    return not track.computes and ledger.is_pending(track.prefix.keys, track.want)


def find_match(
    track: Track, ledger: KvLedger, most_resident: int = 0, kept: KeptContexts | None = None
) -> Match:
    """Its lease is ended, or taken once more, where that is of use. `most_resident`: blocks that a deep one
    may have on the device. `kept`: what scored ones may go on from."""
    if track.prefix is None or not track.request.may_match:
        return _NO_MATCH
    if track.is_deep:
        return _find_deep(track, track.prefix, ledger, most_resident, kept)
    if track.computes:
        track.end_lease()
    if track.prefetch is not None and track.prefetch.settled:  # what it brought is nearer than the lease says
        track.end_prefetch()
        _lease_again(track, track.prefix, ledger)
    match = ledger.match(track.prefix.keys, track.lease, track.want)
    if not track.computes and not match.pending and _may_lease(track, match):
        # There was no lease, or the device has lost what came before it, or it has expired: look once more.
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
        num = kept.num_usable(ledger.match_deep(context.keys, 0).num_paged, len(track.tokens))
        if num:
            track.continues = context, num
            return Match(0, 0, False, num_paged=num)
    match = ledger.match_deep(keys, most_resident)
    return match._replace(num_paged=_whole(track, match.num_paged))


def is_arriving(track: Track) -> bool:
    """Whether blocks are being copied to the device for it while it waits: it is matched when they have come.
    Nobody overtakes it meanwhile. Not where the copy is late: it goes on without."""
    if track.ahead is not None and track.ahead.settled:
        track.end_ahead()
    return track.ahead is not None and not track.ahead.overdue


def _may_lease(track: Track, match: Match) -> bool:
    """Whether colder tiers may have what the device lacks and the lease does not cover. They are asked once
    for each length of what the device has, so that a request that waits does not ask in every plan."""
    if track.prefix is None or match.num_blocks == len(track.prefix.keys):
        return False
    if track.lease is not None and track.lease.expired:
        return True  # a request may wait for longer than any lease lasts
    if match.num_blocks == track.leased_at:
        return False
    return track.lease is None or track.lease.num_from(match.num_blocks) == 0


def _lease_again(track: Track, prefix: Prefix, ledger: KvLedger) -> None:
    earlier = track.lease
    track.end_lease()
    track.lease = ledger.lease(track.request.id, prefix, earlier, track.is_deep)


def found_share(track: Track, match: Match, block_tokens: int) -> float:
    """Of what it has to have computed before it can go on, how much is there already."""
    return min(
        1.0, (match.num_blocks + match.num_colder + match.num_paged) * block_tokens / len(track.tokens)
    )


def prefetch_waiting(tracks: Iterable[Track], ledger: KvLedger, fits_host: Callable[[Track], bool]) -> None:
    """`tracks` wait, whoever is next first. What the foremost have behind host memory is read into it
    meanwhile: once for each request, and of one request more in each plan, since looking takes as long as its
    prefix is. `fits_host`: whether host memory can take all of a deep one, beside those that run."""
    is_next = True
    for track in islice(tracks, _PREFETCHED):
        if (
            track.is_deep
            and track.prefetch is not None
            and track.prefetch.settled
            and track.prefix is not None
        ):
            _read_on(track, track.prefix, ledger, fits_host(track))
        # the first one, where it waits for this alone
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
            request_id, lease = track.request.id, track.lease
            if track.is_deep:
                track.prefetch = ledger.prefetch_deep(track.prefix, request_id, lease, is_next)
            else:
                track.prefetch = ledger.prefetch(track.prefix, request_id, lease)
            if track.prefetch is not None:
                return
        is_next = False


def _read_on(track: Track, prefix: Prefix, ledger: KvLedger, fits_host: bool) -> None:
    """A deep request runs when all of it is in host memory, and not all is read at once: as long as some
    comes, there is more. Where others have the room (not `fits_host`), or have ended what was read for it,
    there may be more later."""
    was_ended = track.prefetch is not None and track.prefetch.ended
    track.end_prefetch()
    _lease_again(track, prefix, ledger)
    runs = () if track.lease is None else track.lease.runs_from(0)
    num_read = sum(num for tier, num in runs[:1] if tier == "host")
    track.may_prefetch, track.num_read = num_read > track.num_read, num_read
    if not track.may_prefetch and fits_host and not was_ended:
        track.leased_at = num_read


def promote_ahead(track: Track, match: Match, num_spare: int, ledger: KvLedger) -> None:
    """It is next, and there is no room for all of it yet. What host memory has behind its blocks on the
    device is copied into free slots meanwhile, `num_spare` at most, where later matches find it. Its lease
    stays as it is."""
    if (
        not match.num_colder
        or not track.may_promote_ahead
        or track.ahead is not None
        or track.prefix is None
        or track.lease is None
    ):
        return
    num_host = sum(num for tier, num in track.lease.runs_from(match.num_blocks)[:1] if tier == "host")
    num_blocks = min(match.num_colder, num_host, num_spare, ledger.num_free, _MOST_AHEAD)
    if num_blocks >= _LEAST_AHEAD:
        track.ahead = ledger.promote_ahead(track.request.id, track.prefix, match.num_blocks, num_blocks)
        track.ahead_first = match.num_blocks
        track.may_promote_ahead = track.ahead is not None
