"""What of a waiting request is cached: on the device, and behind that under its lease in colder tiers. Owns when a lease is of use, when
another one is asked for, and when the coldest of it is read ahead; holds nothing itself."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from penstock.contract import KvLedger, Match, Prefix
from penstock.engine.scheduling.track import Track

_NO_MATCH = Match(0, 0, False)
_PREFETCHED = 4  # requests from the head of the line, whose cold blocks are brought nearer


def is_ready(track: Track) -> bool:
    """Whether it can be matched now. Not while a step from before its retraction still samples for it, as its tokens are not all known; nor
    while what it had is still being saved, or a store has not answered yet."""
    return not track.num_in_flight and (track.lease is None or track.lease.ready)


def is_pending(track: Track, ledger: KvLedger) -> bool:
    """Whether what it lacks comes without its doing, and it relies on that. Keeps its keys up with its tokens."""
    if track.prefix is None or not track.request.may_match:
        return False
    if len(track.prefix.keys) < len(track.tokens) // ledger.block_tokens:  # it has generated tokens since
        track.prefix = ledger.extend_prefix(track.prefix, track.tokens)
    return not track.computes and ledger.is_pending(track.prefix.keys, track.want)


def find_match(track: Track, ledger: KvLedger) -> Match:
    """Its lease is ended, or taken once more, where that is of use."""
    if track.prefix is None or not track.request.may_match:
        return _NO_MATCH
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


def _may_lease(track: Track, match: Match) -> bool:
    """Whether colder tiers may have what the device lacks and the lease does not cover. They are asked once for each length of what the
    device has, so that a request that waits does not ask in every plan."""
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
    track.lease = ledger.lease(track.request.id, prefix, earlier)


def found_share(track: Track, match: Match, block_tokens: int) -> float:
    """Of what it has to have computed before it can go on, how much is there already."""
    return min(1.0, (match.num_blocks + match.num_colder) * block_tokens / len(track.tokens))


def prefetch_waiting(tracks: Iterable[Track], ledger: KvLedger) -> None:
    """`tracks` wait, whoever is next first. What the foremost have behind host memory is read into it meanwhile: once for each request,
    and of one request more in each plan, since looking takes as long as its prefix is."""
    for track in islice(tracks, _PREFETCHED):
        if not ledger.may_prefetch:
            return
        if track.may_prefetch and not track.computes and track.prefix is not None and track.lease is not None and track.lease.ready:
            track.may_prefetch = False
            track.prefetch = ledger.prefetch(track.prefix, track.request.id, track.lease)
            if track.prefetch is not None:
                return
