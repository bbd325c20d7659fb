"""Inspects, verifies or clears the directory of an SSD cache without an engine. Each of the three holds the
directory's lock, so that none runs beside an engine.

Slots whose head does not describe a block count as empty: they were never written, or forgotten. A block is
torn if its head is valid and its payload does not match it: a crash during a write leaves that, and so does a
flipped bit in the payload. It is corrupt if the head itself is damaged. Neither is ever served.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import SnapshotRefused, StoreFailed
from penstock.kv.tiers.manifest import unpack as unpack_manifest
from penstock.kv.tiers.ssd.directory import (
    SECTOR_BYTES,
    STATES_FOLDER,
    Directory,
    open_directory,
    usable,
)
from penstock.kv.tiers.ssd.segments import (
    SegmentHead,
    SlotHead,
    read_head,
    read_slots,
    segment_bytes,
    slot_bytes,
    unpack_slot,
)

Progress = Callable[[int, int], None]  # slots or files done, and in all

_READ_BYTES = 8 << 20


@dataclass(slots=True)
class SpaceSurvey:
    """Blocks of one space. Sequences are times of writing, in nanoseconds since 1970, if the clock was
    right."""

    num_blocks: int = 0
    num_bytes: int = 0  # of payload
    oldest: int = 0
    newest: int = 0

    def add(self, head: SlotHead) -> None:
        sequence = head.envelope.sequence
        self.oldest = min(self.oldest, sequence) if self.num_blocks else sequence
        self.newest = max(self.newest, sequence)
        self.num_blocks += 1
        self.num_bytes += head.envelope.num_bytes


@dataclass(slots=True)
class SnapshotSurvey:
    """One manifest. If it cannot be used, `damage` says why, and the rest is what could be read of it."""

    file: str
    name: str = ""
    space: str = ""  # digest, in hex
    num_tokens: int = 0
    num_blocks: int = 0
    num_found: int = 0  # leading blocks that are here
    created_s: float = 0.0
    expires_s: float | None = None
    damage: str = ""


@dataclass(slots=True)
class Survey:
    """The findings. `num_good` is None if payloads were not read."""

    directory: Path
    num_segments: int = 0
    num_slots: int = 0
    file_bytes: int = 0
    spaces: dict[str, SpaceSurvey] = field(default_factory=dict)  # by digest, in hex
    num_older: int = 0  # blocks of which there is also a newer copy
    # files without a readable head, or shorter than it says
    damaged: list[str] = field(default_factory=list)
    num_good: int | None = None
    corrupt: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    snapshots: list[SnapshotSurvey] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return sum(space.num_blocks for space in self.spaces.values())

    def take_in(self, states: Survey) -> None:
        """The findings in the folder of states, which are blocks of a space of their own."""
        self.num_segments += states.num_segments
        self.num_slots += states.num_slots
        self.file_bytes += states.file_bytes
        self.spaces |= states.spaces
        self.num_older += states.num_older
        if self.num_good is not None:
            self.num_good += states.num_good or 0
        damage = (self.damaged, states.damaged), (self.corrupt, states.corrupt), (self.torn, states.torn)
        for own, found in damage:
            own += [f"{STATES_FOLDER}/{line}" for line in found]


def inspect(directory: str | Path, progress: Progress = lambda done, total: None) -> Survey:
    """Heads only. Raises ConfigError if there is no cache, or an engine uses it."""
    return _of_both(directory, lambda opened: _Surveyor(opened, progress, payloads=False).survey())


def verify(directory: str | Path, progress: Progress) -> Survey:
    """Every byte of every block. Raises ConfigError if there is no cache, or an engine uses it."""
    return _of_both(directory, lambda opened: _Surveyor(opened, progress, payloads=True).survey())


def clear(directory: str | Path, progress: Progress) -> Survey:
    """Remove all files of the cache, of every space; other files in the directory stay. Returns what there
    was, in files and bytes."""
    return _of_both(directory, lambda opened: _cleared(opened, progress))


def _cleared(opened: Directory, progress: Progress) -> Survey:
    segments = opened.segment_files().values()
    manifests = [*opened.snapshot_files().values(), *opened.unfinished_files()]
    found = Survey(opened.path, len(segments), snapshots=[SnapshotSurvey(path.name) for path in manifests])
    files = [*segments, *manifests, *opened.token_files()]
    for done, path in enumerate(files, 1):
        found.file_bytes += path.lstat().st_size
        opened.unlink(path)
        progress(done, len(files))
    os.fsync(opened.fd)
    return found


def _of_both(directory: str | Path, look: Callable[[Directory], Survey]) -> Survey:
    """The cache, and the folder in it with states of recurrent layers, if there is one."""
    with _locked(directory) as opened:
        found = look(opened)
        if (opened.path / STATES_FOLDER).is_dir():
            with _locked(opened.path / STATES_FOLDER) as states:
                found.take_in(look(states))
        return found


@contextlib.contextmanager
def _locked(directory: str | Path) -> Iterator[Directory]:
    with contextlib.closing(open_directory(Path(directory).absolute())) as opened, usable(opened.path):
        yield opened


class _Surveyor:
    """One pass over the files, over their heads alone or with all `payloads`."""

    def __init__(self, directory: Directory, progress: Progress, payloads: bool) -> None:
        self._directory = directory
        self._survey = Survey(directory.path, num_good=0 if payloads else None)
        self._progress = progress
        self._heads: dict[tuple[bytes, bytes], SlotHead] = {}  # of the newest block, by space and key

    def survey(self) -> Survey:
        found = self._survey
        with contextlib.ExitStack() as opened:
            segments: list[tuple[int, SegmentHead]] = []
            for number, path in self._directory.segment_files().items():
                fd = self._directory.open_direct(path, os.O_RDONLY)
                opened.callback(self._directory.close_file, fd)
                if (head := self._segment_head(fd, number, path.name)) is not None:
                    segments.append((fd, head))
            found.num_slots = sum(head.num_slots for _, head in segments)
            num_done = 0
            for fd, head in segments:
                self._walk(fd, head, num_done)
                num_done += head.num_slots
        for slot_head in self._heads.values():
            found.spaces.setdefault(slot_head.envelope.space.hex(), SpaceSurvey()).add(slot_head)
        found.snapshots = [self._snapshot(*one) for one in self._directory.snapshot_files().items()]
        return found

    def _snapshot(self, id: str, path: Path) -> SnapshotSurvey:
        try:
            manifest = unpack_manifest(self._directory.read_manifest(id) or b"")
        except (SnapshotRefused, StoreFailed) as error:
            return SnapshotSurvey(path.name, damage=str(error))
        is_here = [(manifest.space, key) in self._heads for key in manifest.block_keys]
        return SnapshotSurvey(
            path.name,
            manifest.name,
            manifest.space.hex(),
            manifest.num_tokens,
            manifest.num_blocks,
            [*is_here, False].index(False),
            manifest.created_s,
            manifest.expires_s,
            "" if manifest.id == id else "the manifest lies under another snapshot's name",
        )

    def _segment_head(self, fd: int, number: int, name: str) -> SegmentHead | None:
        found, size = self._survey, self._directory.io.stat(fd).st_size
        head = read_head(self._directory, fd, number)
        found.num_segments += 1
        found.file_bytes += size
        if head is None:
            found.damaged.append(f"{name}: no head that can be read")
        elif size < segment_bytes(head.num_slots, head.block_bytes):
            found.damaged.append(f"{name}: shorter than its head says")
        return head

    def _walk(self, fd: int, segment: SegmentHead, num_done: int) -> None:
        name, payloads = self._directory.segment_path(segment.number).name, self._survey.num_good is not None
        step = max(1, _READ_BYTES // slot_bytes(segment.block_bytes))
        for first in range(0, segment.num_slots, step):
            slots = range(first, min(first + step, segment.num_slots))
            images = read_slots(self._directory, fd, segment.block_bytes, slots, payloads)
            for slot, image in zip(slots, images, strict=True):
                self._judge(segment, slot, f"{name} slot {slot}", image)
            self._progress(num_done + slots.stop, self._survey.num_slots)

    def _judge(self, segment: SegmentHead, slot: int, where: str, image: memoryview) -> None:
        found, head = self._survey, unpack_slot(image[:SECTOR_BYTES])
        if head is None and any(image[:64]):
            found.corrupt.append(f"{where}: damaged head")
        if head is None or not head.is_for(segment, slot):
            return
        if found.num_good is not None:
            if not head.envelope.fits(image[SECTOR_BYTES : SECTOR_BYTES + segment.block_bytes]):
                found.torn.append(f"{where}: key {head.envelope.key.hex()}, payload does not fit its head")
                return
            found.num_good += 1
        name = (head.envelope.space, head.envelope.key)
        older = self._heads.get(name)
        found.num_older += older is not None
        if older is None or older.envelope.sequence < head.envelope.sequence:
            self._heads[name] = head
