"""Changes on the disk under the engine's names."""

from __future__ import annotations

from penstock.plugins.events import DiskChanges


def changes() -> DiskChanges:
    one = DiskChanges()
    one.name([b"a", b"b", b"c"], [b"A", b"B", b"C"])
    return one


def test_blocks_come_and_leave_under_their_names() -> None:
    one = changes()
    one.sealed("ssd", 0, b"a")
    one.sealed("ssd", 1, b"b")
    one.evicted("ssd", 0, b"a")
    assert one.take() == [(b"A", False), (b"B", False), (b"A", True)]
    assert one.take() == []


def test_blocks_without_a_name_are_not_told_of() -> None:
    one = changes()
    one.sealed("ssd", 0, b"earlier")
    one.evicted("ssd", 0, b"earlier")
    one.evicted("ssd", 0, b"a")  # an earlier process wrote it, too
    assert one.take() == []


def test_names_of_blocks_that_were_not_written_are_forgotten() -> None:
    """Otherwise they would grow without end while the disk is full or broken."""
    one = changes()
    one.sealed("ssd", 0, b"a")
    one.written([b"a", b"b"])
    one.sealed("ssd", 1, b"b")
    one.evicted("ssd", 0, b"a")
    assert one.take() == [(b"A", False), (b"A", True)]
