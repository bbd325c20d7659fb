"""Rules on token ids: only allowed ones may come, and banned sequences never do. Owns the position of one
answer in these sequences; knows no text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.contract import SamplingParams


class TokenRules:
    """The rules of one answer. They come on top of its grammar. Used by one thread at a time."""

    def __init__(self, sampling: SamplingParams, num_words: int) -> None:
        allowed = sampling.allowed_token_ids
        self._words = np.full(num_words, 0 if allowed is not None else -1, np.int32)  # a bit per token
        if allowed is not None:
            _set(self._words, np.fromiter(allowed, np.int64, len(allowed)))
        # last tokens of longer sequences, by the tokens before them
        self._lasts: dict[tuple[int, ...], list[int]] = {}
        for *before, last in sampling.bad_token_ids:
            if before:
                self._lasts.setdefault(tuple(before), []).append(last)
            else:
                _clear(self._words, [last])
        self._lengths = sorted({len(before) for before in self._lasts})
        self._written: list[int] = []  # the answer's last tokens, as many as a sequence needs

    def consume(self, tokens: Sequence[int]) -> None:
        if self._lengths:
            self._written = [*self._written, *tokens][-self._lengths[-1] :]

    def apply(self, rows: NDArray[np.int32], drafts: Sequence[int] = ()) -> int | None:
        """Clear the bits of tokens that may not come next, and in the rows behind it of those that may not
        come after each of `drafts`. Returns the number of drafts after which none may, if there is one; that
        row then allows all."""
        most: int | None = None
        for num in range(1 + len(drafts)):
            self._clear_in(rows[num], [*self._written, *drafts[:num]])
            if num and not rows[num].any():
                rows[num] = -1
                most = num if most is None else most
        return most

    def _clear_in(self, row: NDArray[np.int32], written: Sequence[int]) -> None:
        row &= self._words
        for length in self._lengths:
            if length <= len(written):
                _clear(row, self._lasts.get(tuple(written[-length:]), ()))


def _set(words: NDArray[np.int32], tokens: NDArray[np.int64]) -> None:
    np.bitwise_or.at(words.view(np.uint32), tokens // 32, _bits(tokens))


def _clear(words: NDArray[np.int32], tokens: Sequence[int]) -> None:
    for token in tokens:
        words.view(np.uint32)[token // 32] &= 0xFFFFFFFF ^ (1 << token % 32)


def _bits(tokens: NDArray[np.int64]) -> NDArray[np.uint32]:
    return np.left_shift(np.uint32(1), (tokens % 32).astype(np.uint32))
