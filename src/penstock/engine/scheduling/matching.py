"""What of a waiting request is cached: on the device, and behind that under its lease in colder tiers. Owns when a lease is of use, when
another one is asked for, and what is brought nearer while it waits; holds nothing itself."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from penstock.contract import KvLedger, Match, Prefix
from penstock.engine.scheduling.residency import KeptContexts
from penstock.engine.scheduling.track import Track

_NO_MATCH = Match(0, 0, False)
_PREFETCHED = 4  # requests from the head of the line, whose cold blocks are brought nearer
# Blocks that are copied to the device in one transfer before their request is admitted. Fewer lose the rate of the link, and save less time
# than a plan takes. With more, a request that fits meanwhile would wait long for the end of its copy, and so would others' loads behind it.
_LEAST_AHEAD = 16
_MOST_AHEAD = 512


def is_ready(track: Track) -> bool:
    """Whether it can be matched now. Not while a step from before its retraction still samples for it, as its tokens are not all known; nor
    while what it had is still being saved, or a store has not answered yet."""
    if track.num_in_flight or (track.lease is not None and not track.lease.ready):
        return False
    return not track.is_deep or not _is_being_read(track)


def _is_being_read(track: Track) -> bool:
    """Whether tiers behind host memory have some of it that is not in host memory yet."""
    if track.computes or track.lease is None or track.lease.expired:
        return False
    return track.prefetch is not None or (track.may_prefetch and any(tier != "host" for tier, _ in track.lease.runs_from(0)))


def is_pending(track: Track, ledger: KvLedger) -> bool:
    """Whether what it lacks comes without its doing, and it relies on that. Keeps its keys up with its tokens."""
    if track.prefix is None or not track.request.may_match:
        return False
    if len(track.prefix.keys) < len(track.tokens) // ledger.block_tokens:  # it has generated tokens since
        track.prefix = ledger.extend_prefix(track.prefix, track.tokens)
    return not track.computes and ledger.is_pending(track.prefix.keys, track.want)


def find_match(track: Track, ledger: KvLedger, most_resident: int = 0, kept: KeptContexts | None = None) -> Match:
    """Its lease is ended, or taken once more, where that is of use. `most_resident`: blocks that a deep one may have on the device. `kept`:
    what scored ones may go on from."""
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


def _find_deep(track: Track, prefix: Prefix, ledger: KvLedger, most_resident: int, kept: KeptContexts | None) -> Match:
    keys = prefix.keys[: (len(track.tokens) - 1) // ledger.block_tokens]  # at least one token is computed
    track.continues = None
    if kept and track.request.residency is not None and not track.computes and (context := kept.find(keys)) is not None:
        num = kept.num_usable(ledger.match_deep(context.keys, 0).num_paged, len(track.tokens))
        if num:
            track.continues = context, num
            return Match(0, 0, False, num_paged=num)
    return ledger.match_deep(keys, most_resident)


def is_arriving(track: Track) -> bool:
    """Whether blocks are being copied to the device for it while it waits: it is matched when they have come. Nobody overtakes it
    meanwhile. Not where the copy is late: it goes on without."""
    if track.ahead is not None and track.ahead.settled:
        track.end_ahead()
    return track.ahead is not None and not track.ahead.overdue


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
    return min(1.0, (match.num_blocks + match.num_colder + match.num_paged) * block_tokens / len(track.tokens))


def prefetch_waiting(tracks: Iterable[Track], ledger: KvLedger) -> None:
    """`tracks` wait, whoever is next first. What the foremost have behind host memory is read into it meanwhile: once for each request,
    and of one request more in each plan, since looking takes as long as its prefix is."""
    for track in islice(tracks, _PREFETCHED):
        if track.is_deep and track.prefetch is not None and track.prefetch.settled and track.prefix is not None:
            _read_on(track, track.prefix, ledger)
        if not ledger.may_prefetch:
            return
        if track.may_prefetch and not track.computes and track.prefix is not None and track.lease is not None and track.lease.ready:
            track.may_prefetch = False
            track.prefetch = ledger.prefetch(track.prefix, track.request.id, track.lease)
            if track.prefetch is not None:
                return


def _read_on(track: Track, prefix: Prefix, ledger: KvLedger) -> None:
    """A deep request runs when all of it is in host memory, and not all is read at once: as long as some comes, there is more."""
    track.end_prefetch()
    _lease_again(track, prefix, ledger)
    runs = () if track.lease is None else track.lease.runs_from(0)
    num_read = sum(num for tier, num in runs[:1] if tier == "host")
    track.may_prefetch, track.num_read = num_read > track.num_read, num_read


def promote_ahead(track: Track, match: Match, num_spare: int, ledger: KvLedger) -> None:
    """It is next, and there is no room for all of it yet. What host memory has behind its blocks on the device is copied into free slots
    meanwhile, `num_spare` at most, where later matches find it. Its lease stays as it is."""
    if not match.num_colder or not track.may_promote_ahead or track.ahead is not None or track.prefix is None or track.lease is None:
        return
    num_host = sum(num for tier, num in track.lease.runs_from(match.num_blocks)[:1] if tier == "host")
    num_blocks = min(match.num_colder, num_host, num_spare, ledger.num_free, _MOST_AHEAD)
    if num_blocks >= _LEAST_AHEAD:
        track.ahead = ledger.promote_ahead(track.request.id, track.prefix, match.num_blocks, num_blocks)
        track.ahead_first = match.num_blocks
        track.may_promote_ahead = track.ahead is not None
