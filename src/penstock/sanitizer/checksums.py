"""Whether blocks come back as they went: what each copy in a colder tier held when it was made, compared when it is used. Owns digests
by slot, one each, so it is bounded by the tiers; who computes them, and how, is the business of whoever moves the bytes.

A digest belongs to a copy, not to its key: the same tokens computed twice, in other chunks, give bytes that differ in their last bits and
may stand for each other. So only what one copy held at two moments is compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from penstock.sanitizer.findings import Findings
from penstock.sanitizer.report import Kind, Report


class _Copy(NamedTuple):
    key: bytes
    digest: int


class Checksums:
    """Implements `observe.ContentObserver`. Any thread may call."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._copies: dict[str, dict[int, _Copy]] = {}  # by tier and slot

    def __len__(self) -> int:
        return sum(map(len, self._copies.values()))

    def demoted(self, tier: str, slot: int, key: bytes, digest: int) -> None:
        with self._findings.lock:
            copies = self._copies.setdefault(tier, {})
            known = copies.get(slot)
            copies[slot] = _Copy(key, digest)
            if known is not None and known.key == key and known.digest != digest:
                self._tell(
                    tier, slot, key, "key published over different bytes", f"its slot held {known.digest:x} and now holds {digest:x}"
                )

    def promoted(self, tier: str, slot: int, key: bytes, digest: int) -> None:
        with self._findings.lock:
            known = self._copies.get(tier, {}).get(slot)
            if known is None:
                return  # it was made before anybody looked, or has been forgotten
            if known.key != key:
                self._tell(tier, slot, key, "bytes of another key promoted", f"they were demoted under {known.key.hex()[:16]}")
            elif known.digest != digest:
                changed = f"{known.digest:x} was demoted, {digest:x} came back"
                self._tell(tier, slot, key, "bytes changed between demote and promote", changed)

    def forget(self, tier: str, slots: Iterable[int]) -> None:
        """`slots` hold nothing any more."""
        copies = self._copies.get(tier)
        if copies:
            for slot in slots:
                copies.pop(slot, None)

    def _tell(self, tier: str, slot: int, key: bytes, what: str, how: str) -> None:
        sentence = f"{what}: slot {slot} of {tier}, key {key.hex()[:16]}: {how}"
        self._findings.tell(Report(Kind.LIFETIME, tier, (slot,), sentence, stack=self._findings.stacks.here()), tier, what)
