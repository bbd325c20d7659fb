"""Lengths of answers that are always wrong, for tests of what happens then. Owns nothing that ships."""

from __future__ import annotations

from penstock.contract import Request
from penstock.engine.scheduling.lengths import Lengths


class Guess(Lengths):
    """Lengths that are always wrong: every request is about to write so many tokens more than it has, and no
    more."""

    def __init__(self, num_more: int) -> None:
        self.num_more = num_more

    def expected(self, request: Request, num_written: int) -> int:
        return min(request.sampling.max_tokens, num_written + self.num_more)


def guessed(num_more: int) -> Guess | None:
    """0: there are no lengths, and requests are promised all that they may need."""
    return Guess(num_more) if num_more else None
