"""Checked mode on real memory: spoiled slots are NaN, and a digest tells any change of a block."""

from __future__ import annotations

import pytest
import torch

from penstock.kv.memory import ArenaGuard, BlockLayout, DeviceArena
from penstock.sanitizer.sanitizer import Sanitizer


def arena(dtype: str = "float32", name: str = "device") -> DeviceArena:
    made = DeviceArena(BlockLayout(3, 2, 8, 4, dtype), 6, "cpu", name)
    made.tensor.copy_(torch.randn(made.tensor.shape, generator=torch.Generator().manual_seed(1)))
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_poisoned_slot_is_nan_and_its_neighbours_are_as_they_were(dtype: str) -> None:
    guarded = arena(dtype)
    before = guarded.tensor.clone()
    ArenaGuard(guarded).poison("device", [1, 4])
    assert guarded.tensor[[1, 4]].isnan().all()
    assert torch.equal(guarded.tensor[[0, 2, 3, 5, 6]], before[[0, 2, 3, 5, 6]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_digest_is_that_of_the_bytes_wherever_they_lie(dtype: str) -> None:
    device, host = arena(dtype), arena(dtype, "host")
    guard = ArenaGuard(device, host)
    host.tensor[5].copy_(device.tensor[2])
    first, copied, other = (
        *guard.digests("device", [2]),
        *guard.digests("host", [5]),
        *guard.digests("host", [4]),
    )
    assert first == copied != other


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_single_change_and_every_exchange_of_two_values_changes_the_digest(dtype: str) -> None:
    guarded = arena(dtype)
    guard = ArenaGuard(guarded)
    values = guarded.tensor[2].view(-1)
    (before,) = guard.digests("device", [2])
    for at in range(0, values.numel(), 7):
        kept = values.clone()
        values[at] += 1
        assert guard.digests("device", [2]) != [before]
        values.copy_(kept)
        values[[at, (at + 1) % values.numel()]] = kept[[(at + 1) % values.numel(), at]]
        assert guard.digests("device", [2]) != [before]
        values.copy_(kept)
    assert guard.digests("device", [2]) == [before]


def test_a_block_that_comes_back_changed_is_reported_and_one_that_does_not_is_not() -> None:
    device, host = arena(), arena(name="host")
    guard, sanitizer = ArenaGuard(device, host), Sanitizer()
    for slot, spoil in ((1, False), (2, True)):
        host.tensor[slot].copy_(device.tensor[slot])
        sanitizer.checksums.demoted("host", slot, bytes([slot]) * 16, *guard.digests("device", [slot]))
        guard.poison("device", [slot])
        if spoil:
            guard.poison("host", [slot])
        device.tensor[5].copy_(host.tensor[slot])
        sanitizer.checksums.promoted("host", slot, bytes([slot]) * 16, *guard.digests("device", [5]))
    (report,) = sanitizer.reports
    assert report.slots == (2,) and report.sentence.startswith("bytes changed between demote and promote")
