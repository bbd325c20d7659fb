"""Load or recompute: whether fetching blocks is faster than computing them. Owns the measured rates; decides nothing else.

Computing n tokens behind a prefix of d takes n * (a + b * d): attention makes late tokens dearer. Loading takes what is ahead on the lane,
and the bytes over the tier's rate. Loading a prefix of what a tier has saves the cheap tokens and leaves the dear ones, so it is all or
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_FORGET = 0.95  # weight of what was known before, at each measurement
_MIN_S = 1e-6
_UNSURE = 0.25  # of a transfer's time at most, for it to count


@dataclass(slots=True)
class PrefillRate:
    """Seconds per token as a straight line over depth, fitted to the steps seen, newer ones counting more."""

    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # of xx, xd, dd, xs, ds with x = n, d = n * depth, s = seconds

    def add(self, num_tokens: int, depth: float, seconds: float) -> None:
        x, d = float(num_tokens), num_tokens * depth
        for i, value in enumerate((x * x, x * d, d * d, x * seconds, d * seconds)):
            self._sums[i] = self._sums[i] * _FORGET + value

    def seconds(self, num_tokens: int, depth: float) -> float | None:
        """None: nothing was measured."""
        xx, xd, dd, xs, ds = self._sums
        if xx <= 0.0:
            return None
        determinant = xx * dd - xd * xd
        per_token, per_depth = xs / xx, 0.0
        if determinant > 1e-9 * xx * dd:
            slope = (xx * ds - xd * xs) / determinant
            base = (dd * xs - xd * ds) / determinant
            if slope >= 0.0 and base >= 0.0:  # a fit through noise may have either below zero; then the mean is the better guess
                per_token, per_depth = base, slope
        return num_tokens * (per_token + per_depth * depth)


@dataclass(slots=True)
class LinkRate:
    """Bytes per second of a tier, as its transfers had it."""

    bytes_per_s: float | None = None

    def add(self, num_bytes: int, seconds: float, unsure_s: float = 0.0) -> None:
        """`unsure_s`: how long nobody looked before it was seen to be over. An engine with long steps looks rarely, and what that says
        about a link is nothing."""
        if unsure_s > _UNSURE * seconds:
            return
        rate = num_bytes / max(seconds, _MIN_S)
        self.bytes_per_s = rate if self.bytes_per_s is None else _FORGET * self.bytes_per_s + (1.0 - _FORGET) * rate

    def seconds(self, num_bytes: int) -> float | None:
        return None if self.bytes_per_s is None else num_bytes / self.bytes_per_s


def worth_loading(load_s: float | None, compute_s: float | None) -> bool:
    """What was never measured is tried: it is measured by that."""
    return load_s is None or compute_s is None or load_s <= compute_s
