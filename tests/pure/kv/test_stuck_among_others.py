"""One exchange that hangs makes its tier unusable, however many others come and go beside it."""

from __future__ import annotations

from tests.pure.kv.cold_rig import KEYS, LIMITS, Make, make

__all__ = ["make"]


def test_a_younger_exchange_does_not_hide_one_that_hangs(make: Make) -> None:
    rig = make()
    rig.write(KEYS[:2])
    rig.store.gate.hold("read")
    for number in range(2):
        rig.submit_read(KEYS[number : number + 1])
        rig.store.gate.wait_came(number + 1)
        assert rig.tier.usable
        rig.clock.advance(0.6 * LIMITS.stuck_s)
    assert not rig.tier.usable, "the first of them hangs"
    rig.store.gate.let()
    rig.settle()
    assert rig.tier.usable
