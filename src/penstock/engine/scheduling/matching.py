"""What of a waiting request is cached: on the device, and behind that under its lease in colder tiers. Owns when a lease is of use, when
another one is asked for, and when the coldest of it is read ahead; holds nothing itself."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.contract import KvLedger, Lease, Match, Prefix
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
    return not track.computes and ledger.is_pending(track.prefix.keys)


def find_match(track: Track, ledger: KvLedger) -> Match:
    """Its lease is ended, or taken once more, where that is of use."""
    if track.prefix is None or not track.request.may_match:
        return _NO_MATCH
    if track.computes:
        track.end_lease()
        track.may_lease = False
    if track.prefetch is not None and track.prefetch.settled:  # what it brought is nearer than the lease says
        track.end_prefetch()
        _lease_again(track, track.prefix, ledger)
    match = ledger.match(track.prefix.keys, track.lease)
    if track.may_lease and not match.pending and match.num_blocks < len(track.prefix.keys) and not _covers(track.lease, match.num_blocks):
        # There was no lease, or the device has lost what came before it, or it has expired: look once more.
        track.may_lease = False
        _lease_again(track, track.prefix, ledger)
        match = ledger.match(track.prefix.keys, track.lease)
    return match


def prefetch_waiting(tracks: Sequence[Track], ledger: KvLedger) -> None:
    """`tracks` wait, the first of them first. What the foremost have behind host memory is read into it meanwhile: once for each request,
    and of one request more in each plan, since looking takes as long as its prefix is."""
    for track in tracks[:_PREFETCHED]:
        if not ledger.may_prefetch:
            return
        if track.may_prefetch and not track.computes and track.prefix is not None and track.lease is not None and track.lease.ready:
            track.may_prefetch = False
            track.prefetch = ledger.prefetch(track.prefix, track.request.id, track.lease)
            if track.prefetch is not None:
                return


def _lease_again(track: Track, prefix: Prefix, ledger: KvLedger) -> None:
    earlier = track.lease
    track.end_lease()
    track.lease = ledger.lease(track.request.id, prefix, earlier)


def _covers(lease: Lease | None, block: int) -> bool:
    return lease is not None and lease.num_from(block) > 0
