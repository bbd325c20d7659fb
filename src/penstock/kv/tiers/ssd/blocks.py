"""Blocks in runs of slots: gives each its head, checks what comes back, and tells a bad block from a bad place. Owns that judgement; which
slots, and what becomes of them, is the store's business."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import StoreFailed
from penstock.kv.tiers.envelope import pack
from penstock.kv.tiers.ssd.files import FULL, SegmentFiles
from penstock.kv.tiers.ssd.format import pack_slot, unpack_slot
from penstock.kv.tiers.ssd.runs import Run, read_run, write_run
from penstock.kv.tiers.store import Outcome

log = logging.getLogger(__name__)

_GONE = (errno.EBADF, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOTCONN)  # nothing in the place can be used
_STRIKES = 8  # calls of the system that fail one after the other, until it is the place and not a block


class Blocks(NamedTuple):
    """What a call is to write, by place."""

    keys: Sequence[bytes]
    depths: Sequence[int]
    payloads: Sequence[memoryview]
    sequence: int  # of the last place; those before it have the next ones, so that the end of a prefix counts as older


class BlockIo:
    """Reads and writes blocks of one space. Several threads use it."""

    def __init__(self, files: SegmentFiles, space: bytes) -> None:
        self._files = files
        self._space = space
        self._strikes = 0

    def read(self, run: Run, keys: Sequence[bytes], into: Sequence[memoryview]) -> dict[int, Outcome]:
        """What became of each place of `run`."""
        try:
            heads = read_run(self._files, run, [into[place] for place in run.places])
        except OSError as error:
            if len(run.places) == 1:
                self._strike(error, "read")
                return {run.places[0]: Outcome.FAILED}
        else:
            self._strikes = 0
            return {place: self._judge(heads[i : i + 1], keys[place], into[place]) for i, place in enumerate(run.places)}
        # Which of them it is shows one by one.
        return {place: outcome for single in run.split() for place, outcome in self.read(single, keys, into).items()}

    def _judge(self, sector: Sequence[memoryview], key: bytes, payload: memoryview) -> Outcome:
        """`sector` is empty where the file ended before the block did."""
        head = unpack_slot(sector[0]) if sector else None
        if head is None or (head.envelope.key, head.envelope.space) != (key, self._space) or not head.envelope.fits(payload):
            return Outcome.CORRUPT
        return Outcome.DONE

    def write(self, run: Run, blocks: Blocks) -> dict[int, Outcome]:
        """What became of each place of `run`. Where it is not DONE, anything may be in the slot."""
        heads = []
        for i, place in enumerate(run.places):
            sequence = blocks.sequence + len(blocks.keys) - 1 - place
            envelope = pack(blocks.keys[place], self._space, blocks.payloads[place], sequence)
            heads.append(pack_slot(envelope, run.head, run.first + i, blocks.depths[place]))
        try:
            write_run(self._files, run, heads, [blocks.payloads[place] for place in run.places])
        except OSError as error:
            if len(run.places) == 1:
                if error.errno not in FULL:
                    self._strike(error, "written")
                return {run.places[0]: Outcome.FULL if error.errno in FULL else Outcome.FAILED}
        else:
            self._strikes = 0
            return dict.fromkeys(run.places, Outcome.DONE)
        return {place: outcome for single in run.split() for place, outcome in self.write(single, blocks).items()}

    def forgive(self) -> None:
        """The place can be used again."""
        self._strikes = 0

    def _strike(self, error: OSError, done: str) -> None:
        """One block could not be read or written. Raises where that says something about all of them."""
        self._strikes += 1
        where = self._files.directory.path
        if error.errno in _GONE or self._strikes >= _STRIKES:
            raise StoreFailed(f"the SSD cache in {where} cannot be {done}: {error.strerror}") from error
        log.warning("SSD cache in %s: a block could not be %s: %s", where, done, error.strerror)
