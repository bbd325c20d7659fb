"""Sampling state of running requests, by row. Owns the host side of it: parameters and draw keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.contract import SamplingParams, Start

_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
NUM_FLOATS = len(_FLOATS) + 1  # and 1 for a row that has biases, else 0: what another request left in the row does not count
NUM_PARAMS = NUM_FLOATS + 3  # and top_k, two words of draw key; behind them the keys of draws at earlier positions


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """What sampling the rows of one step takes; decided on the host, so that a greedy step costs an argmax and nothing else."""

    rows: NDArray[np.int32]
    greedy: bool  # all of them, without penalties
    penalties: bool  # or biases: state of rows is needed
    filters: bool  # any top-k or top-p: needs a sort
    num_logprobs: list[int]  # by row: alternatives wanted; -1: no logprobs
    params: NDArray[np.int32] | None  # [NUM_PARAMS + 2 * unsure, S] packed words, None where greedy
    biases: bool = False  # any row has some; then `penalties` is set too
    random: bool = False  # any row is sampled


class Rows:
    """Parameters of the request in each row."""

    def __init__(self, max_batch: int) -> None:
        self._floats = np.zeros((NUM_FLOATS, max_batch + 1), np.float32)
        self._floats[5] = 1.0
        self._top_k = np.zeros(max_batch + 1, np.int32)
        self._seeds = np.zeros(max_batch + 1, np.uint64)
        self._num_logprobs = np.full(max_batch + 1, -1, np.int32)
        self._flags = np.zeros((4, max_batch + 1), bool)  # random, penalties, filters, biases

    def start(self, start: Start) -> None:
        row, sampling = start.row, start.sampling
        biased = bool(sampling.logit_bias)
        self._floats[:, row] = [*(getattr(sampling, name) for name in _FLOATS), biased]
        self._top_k[row] = max(sampling.top_k, 0)
        self._seeds[row] = np.uint64((sampling.seed or 0) & (2**64 - 1))
        self._num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        self._flags[:, row] = (not sampling.greedy, needs_state(sampling), sampling.top_k > 0 or sampling.top_p < 1.0, biased)

    def sample_plan(self, rows: NDArray[np.int32], positions: NDArray[np.int32], num_unsure: int = 0) -> SamplePlan:
        """`positions` are those of the tokens whose logits are sampled: they and the seed decide the draw, nothing else in the batch. The
        device may find that some are up to `num_unsure` less, and gets the keys of these draws as well."""
        random, penalties, filters, biases = (bool(flags.any()) for flags in self._flags[:, rows])
        greedy = not (random or penalties)
        params = None
        if not greedy:
            params = np.empty((NUM_PARAMS + 2 * num_unsure, len(rows)), np.int32)
            params[:NUM_FLOATS] = self._floats[:, rows].view(np.int32)
            params[NUM_FLOATS] = self._top_k[rows]
            seeds = self._seeds[rows]
            for shift in range(num_unsure + 1):
                at = NUM_FLOATS + 1 + 2 * shift
                params[at : at + 2] = draw_keys(seeds, positions - shift)
        return SamplePlan(rows, greedy, penalties, filters, self._num_logprobs[rows].tolist(), params, biases, random)


def needs_state(sampling: SamplingParams) -> bool:
    """Whether the device keeps something for the row: counts of its tokens, or biases."""
    penalised = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0 or sampling.repetition_penalty != 1.0
    return penalised or bool(sampling.logit_bias)


def draw_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Two 32-bit words per draw, from (seed, position) alone: the mixing steps of splitmix64."""
    with np.errstate(over="ignore"):
        x = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return np.stack([(x & np.uint64(0xFFFFFFFF)).astype(np.uint32), (x >> np.uint64(32)).astype(np.uint32)]).view(np.int32)
