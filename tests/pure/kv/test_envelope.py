"""What stands before a block outside the process: it reads back as it was written, and whatever has changed
is noticed.

Holds invariant 23: length, key and checksum stand before every stored block."""

from __future__ import annotations

import pytest

from penstock.errors import InvariantBroken
from penstock.kv.blocks.key import KEY_BYTES, SCOPE_BYTES
from penstock.kv.tiers import store as envelope_module
from penstock.kv.tiers.store import HEADER_BYTES, Envelope, checksum, pack, unpack

KEY, SPACE, PAYLOAD = b"k" * KEY_BYTES, b"s" * SCOPE_BYTES, bytes(range(256)) * 3
HEADER = pack(KEY, SPACE, PAYLOAD, sequence=7)


def test_a_header_reads_back_as_it_was_written() -> None:
    assert len(HEADER) == HEADER_BYTES
    envelope = unpack(HEADER)
    assert envelope == Envelope(KEY, SPACE, len(PAYLOAD), 7, checksum(PAYLOAD)) and envelope.fits(PAYLOAD)
    assert unpack(memoryview(HEADER + b"whatever follows")) == envelope


@pytest.mark.parametrize("at", range(HEADER_BYTES))
def test_any_byte_of_a_header_that_has_changed_is_noticed(at: int) -> None:
    for bit in range(8):
        damaged = bytearray(HEADER)
        damaged[at] ^= 1 << bit
        assert unpack(damaged) is None


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1])
def test_a_header_that_was_cut_is_none(length: int) -> None:
    assert unpack(HEADER[:length]) is None


def test_a_sound_header_of_another_format_or_maker_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FORMAT", envelope_module.FORMAT + 1), ("_MAGIC", b"somebody")):
        with monkeypatch.context() as patch:
            patch.setattr(envelope_module, name, value)
            theirs = pack(KEY, SPACE, PAYLOAD)
            assert unpack(theirs) is not None
        assert unpack(theirs) is None


def test_nothing_but_the_payload_that_it_was_written_for_fits() -> None:
    envelope = unpack(HEADER)
    assert envelope is not None
    for at in range(0, len(PAYLOAD), 37):
        damaged = bytearray(PAYLOAD)
        damaged[at] ^= 1
        assert not envelope.fits(bytes(damaged))
    assert not envelope._replace(num_bytes=len(PAYLOAD) - 1).fits(PAYLOAD), (
        "the length is looked at by itself"
    )
    assert not envelope.fits(PAYLOAD[:-1]) and not envelope.fits(PAYLOAD + b"\0")


@pytest.mark.parametrize(("key", "space"), [(b"short", SPACE), (KEY, b"short"), (b"", b"")])
def test_a_key_or_a_space_of_another_length_has_no_header(key: bytes, space: bytes) -> None:
    with pytest.raises(InvariantBroken, match="have no header"):
        pack(key, space, PAYLOAD)
