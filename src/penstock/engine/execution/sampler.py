"""Choosing tokens on the device. Owns the mathematics of sampling and its state by row: on the host
parameters and keys of draws, on the device the last token, counts for penalties, biases."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.contract import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams, Start
from penstock.engine.execution.batch import DraftedInputs
from penstock.engine.execution.staging import Uploads
from penstock.errors import InvariantBroken
from penstock.lanes.lane import Lane

_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
# And 1 for a row with biases, else 0, which masks values that an earlier request left in the row; and the
# tokens it lacks before it may end, see `Rows`.
NUM_FLOATS = len(_FLOATS) + 2
# and top_k, two words of draw key; then the keys of draws at earlier positions
NUM_PARAMS = NUM_FLOATS + 3
_MASK32 = 0xFFFFFFFF
NO_TOKEN = -1  # of a row after the first rejected draft
LEAST_NOISE = -4.0  # below any other value from a float32 uniform number
LEAST_TEMPERATURE = 1e-5  # lower ones count as greedy


class SampleKind(enum.Enum):
    """Ways to sample that need only the logits and the parameters of a step, so that a replay can do it."""

    GREEDY = "greedy"
    RANDOM = "random"
    FILTERED = "filtered"

    def plan(self) -> SamplePlan:
        no_rows, filters = np.empty(0, np.int32), self is SampleKind.FILTERED
        return SamplePlan(no_rows, self is SampleKind.GREEDY, False, filters, [], None)


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """How the rows of one step are sampled; decided on the host, so that a greedy step costs only an
    argmax."""

    rows: NDArray[np.int32]
    greedy: bool  # all rows, without penalties
    penalties: bool  # or biases: state of rows is needed
    filters: bool  # any top-k or top-p: needs a sort
    num_logprobs: list[int]  # by row: alternatives wanted; -1: no logprobs
    params: NDArray[np.int32] | None  # [NUM_PARAMS + 2 * unsure, S] packed words, None where greedy
    biases: bool = False  # any row has some; then `penalties` is set too
    random: bool = False  # any row is sampled
    ends: bool = False  # a row may be too short to end; then state of rows is needed
    # by row: its drafts may be verified by rejection sampling; None: no row's
    free: NDArray[np.bool_] | None = None

    @property
    def kind(self) -> SampleKind | None:
        """None if state of rows or logprobs are needed."""
        if self.penalties or self.ends or max(self.num_logprobs, default=-1) >= 0:
            return None
        if self.greedy:
            return SampleKind.GREEDY
        return SampleKind.FILTERED if self.filters else SampleKind.RANDOM


class Rows:
    """Parameters of the request in each row. `eos_ids`: tokens that end an answer unless it ignores them."""

    def __init__(
        self, max_batch: int, eos_ids: frozenset[int] = frozenset(), vocab: int = 0, rejects: bool = False
    ) -> None:
        """`rejects`: drafts are verified by rejection sampling where a request gives no seed."""
        self._eos_ids, self._vocab, self._rejects = eos_ids, vocab, rejects
        self._free = np.zeros(max_batch + 1, bool)
        self._floats = np.zeros((NUM_FLOATS, max_batch + 1), np.float32)
        self._floats[5] = 1.0
        self._top_k = np.zeros(max_batch + 1, np.int32)
        self._seeds = np.zeros(max_batch + 1, np.uint64)
        self._num_logprobs = np.full(max_batch + 1, -1, np.int32)
        self._flags = np.zeros((4, max_batch + 1), bool)  # random, penalties, filters, biases
        # the position after which a token may end the answer
        self._may_end_at = np.zeros(max_batch + 1, np.int32)

    def start(self, start: Start) -> None:
        row, sampling = start.row, start.sampling
        biased = bool(sampling.logit_bias)
        self._floats[:, row] = [*(getattr(sampling, name) for name in _FLOATS), biased, 0.0]
        self._may_end_at[row] = (
            start.num_prompt + sampling.min_tokens - 1 if ends_of(sampling, self._eos_ids, self._vocab) else 0
        )
        self._top_k[row] = max(sampling.top_k, 0)
        self._free[row] = self._rejects and sampling.is_free and not sampling.greedy
        self._seeds[row] = np.uint64((sampling.seed or 0) & (2**64 - 1))
        self._num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        self._flags[:, row] = (
            not sampling.greedy,
            is_penalised(sampling),
            sampling.top_k > 0 or sampling.top_p < 1.0,
            biased,
        )

    def draw_words(self) -> NDArray[np.int32]:
        """[7, rows]: bits of temperature, top-p and min-p; top-k; the two words of the seed; 1 if its draws
        are free."""
        floats = self._floats[[_FLOATS.index(name) for name in ("temperature", "top_p", "min_p")]].view(
            np.int32
        )
        seeds, free = self._seeds.view(np.int32).reshape(-1, 2).T, self._free[None].astype(np.int32)
        return np.concatenate([floats, self._top_k[None], seeds, free])

    def sample_plan(
        self, rows: NDArray[np.int32], positions: NDArray[np.int32], num_unsure: int = 0
    ) -> SamplePlan:
        """`positions` are those of the tokens whose logits are sampled: only they and the seed decide the
        draw. On the device a position may turn out up to `num_unsure` lower, so the keys of these draws are
        included."""
        random, penalties, filters, biases = (bool(flags.any()) for flags in self._flags[:, rows])
        # tokens still needed before the answer may end; more if a position turns out lower
        num_lacking = self._may_end_at[rows] - positions
        ends = bool((num_lacking > -num_unsure).any()) and bool(self._may_end_at[rows].any())
        greedy = not (random or penalties or ends)
        params = None
        if not greedy:
            params = np.empty((NUM_PARAMS + 2 * num_unsure, len(rows)), np.int32)
            params[:NUM_FLOATS] = self._floats[:, rows].view(np.int32)
            if ends:
                params[NUM_FLOATS - 1] = num_lacking.astype(np.float32).view(np.int32)
            params[NUM_FLOATS] = self._top_k[rows]
            seeds = self._seeds[rows]
            for shift in range(num_unsure + 1):
                at = NUM_FLOATS + 1 + 2 * shift
                params[at : at + 2] = draw_keys(seeds, positions - shift)
        free = self._free[rows] if self._rejects else None
        num_logprobs = self._num_logprobs[rows].tolist()
        return SamplePlan(rows, greedy, penalties, filters, num_logprobs, params, biases, random, ends, free)


def needs_state(sampling: SamplingParams) -> bool:
    """True if the device keeps state for the row: token counts, biases, or tokens that may not end it yet."""
    return is_penalised(sampling) or sampling.min_tokens > 0


def is_penalised(sampling: SamplingParams) -> bool:
    """True if penalties or biases apply."""
    penalised = (
        sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or sampling.repetition_penalty != 1.0
    )
    return penalised or bool(sampling.logit_bias)


def ends_of(sampling: SamplingParams, eos_ids: frozenset[int], vocab: int) -> list[int]:
    """Tokens that may not be chosen before the answer has `min_tokens`. Drops client ids that the model does
    not have."""
    if not sampling.min_tokens:
        return []
    ends = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else eos_ids)
    return sorted(end for end in ends if 0 <= end < vocab)


def draw_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Two 32-bit words per draw, from (seed, position) alone: the mixing steps of splitmix64."""
    with np.errstate(over="ignore"):
        x = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return np.stack(
        [(x & np.uint64(0xFFFFFFFF)).astype(np.uint32), (x >> np.uint64(32)).astype(np.uint32)]
    ).view(np.int32)


@dataclass(slots=True)
class SampleOutput:
    """Device tensors of one step's choices; the logprob fields are None if not requested."""

    tokens: Tensor  # int32 [S]
    logprobs: Tensor | None = None  # float32 [S] of the chosen tokens
    ranks: Tensor | None = None  # int32 [S]
    top_ids: Tensor | None = None  # int64 [S, n]
    top_logprobs: Tensor | None = None  # float32 [S, n]
    # int64 [G]: the sample that is the last token of each request. None: every sample is
    lasts: Tensor | None = None

    def packed(self) -> Tensor:
        """All of it as int32 words [S, `packed_width`], or the tokens alone [S], for a single copy to the
        host. `running_step.py` unpacks it."""
        tokens = self.tokens.to(torch.int32)
        if self.logprobs is None or self.ranks is None:
            return tokens
        columns = [tokens[:, None], self.logprobs[:, None].view(torch.int32), self.ranks[:, None]]
        if self.top_ids is not None and self.top_logprobs is not None:
            columns += [self.top_ids.to(torch.int32), self.top_logprobs.contiguous().view(torch.int32)]
        return torch.cat(columns, dim=1)


def packed_width(num_top: int) -> int:
    """Words of one packed row; -1 alternatives: no logprobs at all."""
    return 1 if num_top < 0 else 3 + 2 * num_top


def gumbel_noise(keys: Tensor, vocab: int) -> Tensor:
    """float32 [S, vocab] of standard Gumbel noise; entry (s, v) depends on keys[:, s] and v alone.

    -log(E) with E = -log1p(-u) keeps full relative precision where it matters: the winner is the smallest E.
    """
    if keys.is_cuda:
        from penstock.engine.execution import triton_steps

        return triton_steps.gumbel_noise(keys, vocab)
    words = keys.to(torch.int64) & _MASK32
    index = torch.arange(vocab, device=keys.device, dtype=torch.int64)
    x = _mix32(_mix32(index[None, :] ^ words[0][:, None]) ^ words[1][:, None])
    uniform = (x.to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform))


def uniform_of(keys: Tensor) -> Tensor:
    """float32 [S] in (0, 1], independent of the noise of `keys` [2, S]: that of a token that does not
    exist."""
    words = keys.to(torch.int64) & _MASK32
    x = _mix32(_mix32(words[0] ^ _MASK32) ^ words[1])
    return (x.to(torch.float32) + 0.5) * 2.0**-32


def _mix32(x: Tensor) -> Tensor:
    """A bijection of 32-bit words with good avalanche, in int64 arithmetic."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


class Allowed(NamedTuple):
    """Grammar masks on the device."""

    at: Tensor  # int64 [C]: which of the sampled rows are constrained
    words: Tensor  # int32 [C, vocab / 32, rounded up]: a bit per token

    def forbid(self, logits: Tensor) -> None:
        """Set the tokens of `logits` that are not allowed to minus infinity; other rows are unchanged."""
        if logits.is_cuda:
            from penstock.engine.execution import triton_steps

            triton_steps.forbid(logits, self.at, self.words)
            return
        bits = (self.words[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
        forbidden = bits.flatten(1)[:, : logits.shape[-1]] == 0
        logits.index_copy_(0, self.at, logits[self.at].masked_fill(forbidden, -torch.inf))


def drafts_of(step_tokens: Tensor, starts: Tensor, num_drafts: int) -> Tensor:
    """int32 [G, num_drafts]: the step's tokens after the first one of each group. Entries beyond a group's
    own drafts are undefined."""
    at = starts.long()[:, None] + torch.arange(1, num_drafts + 1, device=starts.device)
    return step_tokens[at.clamp(max=len(step_tokens) - 1)]


def kept_tokens(
    drafting: DraftedInputs, chosen: Tensor, rows: Tensor, pending: Tensor, rejected: Tensor
) -> tuple[Tensor, Tensor]:
    """For each group its accepted drafts, those equal to `chosen` [S], and the token after them: int32 [S],
    then `NO_TOKEN`; and int64 [G], the last sample of each. Writes the last token to column 0 of `pending`
    and the number of rejected drafts to `rejected`, by the `rows` of the samples."""
    if chosen.is_cuda:
        from penstock.engine.execution import triton_steps

        return triton_steps.kept_tokens(drafting, chosen, rows, pending, rejected)
    starts, lengths, num_drafts = drafting.starts, drafting.lengths, drafting.num_drafts
    at, places = starts.long(), torch.arange(len(chosen), device=chosen.device)
    drafts = drafts_of(drafting.tokens, starts, num_drafts)
    # the target's own choice at the position of each draft
    target = drafts_of(chosen, starts - 1, num_drafts)
    is_real = torch.arange(num_drafts, device=chosen.device) < lengths[:, None]
    kept = (is_real & (drafts == target)).long().cumprod(dim=1).sum(dim=1)
    lasts, of_group = at + kept, rows.long()[at]
    pending[:, 0].index_copy_(0, of_group, chosen[lasts].to(torch.int32))
    rejected.index_copy_(0, of_group, lengths - kept.to(torch.int32))
    last_of = torch.repeat_interleave(lasts, lengths.long() + 1)
    return torch.where(places <= last_of, chosen, NO_TOKEN).to(torch.int32), lasts


def counts_before(drafts: Tensor, vocab: int) -> Tensor:
    """int32 [G, K + 1, vocab]: how often each token occurs in a request's drafts [G, K] before a position.
    Penalties of a verified row count these drafts as emitted; rejected drafts are never counted for good."""
    hits = torch.nn.functional.one_hot(drafts.long().clamp(min=0), vocab).to(torch.int32)
    return torch.nn.functional.pad(hits.cumsum(dim=1), (0, 0, 1, 0)).to(torch.int32)


class Sampler:
    """Greedy and random choice with penalties and filters; a row's choice never depends on its neighbours in
    the batch."""

    def __init__(
        self,
        max_batch: int,
        vocab: int,
        lane: Lane,
        uploads: Uploads,
        num_pending: int = 0,
        eos_ids: Iterable[int] = (),
    ) -> None:
        """`num_pending`: drafts per request that stay on the device for the next step. `eos_ids`: tokens that
        end an answer unless ignored."""
        num_rows, device = max_batch + 1, uploads.device  # one more row for padding
        self.lane = lane
        self._uploads = uploads
        # the last token, and drafts after it
        self.pending = torch.zeros((num_rows, 1 + num_pending), dtype=torch.int32, device=device)
        self.last_tokens = self.pending[:, 0]
        # number of rejected drafts in the last step with drafts
        self.rejected = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._counts = torch.zeros((num_rows, vocab), dtype=torch.int32, device=device)  # of generated tokens
        self._in_prompt = torch.zeros((num_rows, vocab), dtype=torch.bool, device=device)
        # token ids; unused entries have bias 0
        self._biased = torch.zeros((num_rows, MAX_LOGIT_BIAS), dtype=torch.int64, device=device)
        self._bias = torch.zeros((num_rows, MAX_LOGIT_BIAS), dtype=torch.float32, device=device)
        self.eos_ids = frozenset(eos_ids)
        most_ends = MAX_STOP_TOKEN_IDS + len(self.eos_ids)
        # token ids, padded with the first one
        self._ends = torch.zeros((num_rows, most_ends), dtype=torch.int64, device=device)

    def start(self, start: Start) -> None:
        """Set up penalty state for a request that takes a row. An op of the lane, before the step's own ops:
        the step before may still be counting tokens of the row's last request."""
        self._require_lane()
        self._counts[start.row].zero_()
        self._in_prompt[start.row].zero_()
        if start.prompt_tokens is not None:
            self._in_prompt[start.row].index_fill_(0, self._uploads.send(start.prompt_tokens), True)
        if start.output:
            output = self._uploads.send(start.output)
            self._counts[start.row].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        if biases := start.sampling.logit_bias:
            self._bias[start.row].zero_()
            words = np.array([bias for _, bias in biases], np.float32).view(np.int32)
            self._biased[start.row, : len(biases)] = self._uploads.send([token for token, _ in biases])
            self._bias[start.row, : len(biases)] = (
                self._uploads.send(words).to(torch.int32).view(torch.float32)
            )

        if ends := ends_of(start.sampling, self.eos_ids, self._counts.shape[1]):
            self._ends[start.row] = self._uploads.send([*ends, *ends[:1] * (self._ends.shape[1] - len(ends))])

    def _require_lane(self) -> None:
        if not self.lane.is_current():
            raise InvariantBroken(f"the sampler's state is used outside lane {self.lane.name}")

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        plan: SamplePlan,
        params: Tensor | None,
        allowed: Allowed | None = None,
        drafting: DraftedInputs | None = None,
    ) -> SampleOutput:
        """`logits` [S, vocab], `rows` int32 [S], `params` the uploaded words of the plan. Writes the choice
        to `last_tokens`. With drafts, rows after the first rejected one have no token. `logits` lose the
        tokens that `allowed` forbids, unless logprobs are wanted."""
        self._require_lane()
        num_top, open_logits = max(plan.num_logprobs, default=-1), logits
        if allowed is not None:
            open_logits = logits if num_top < 0 else logits.clone()
            allowed.forbid(open_logits)
        if params is None:
            tokens = open_logits.argmax(dim=-1)
        else:
            tokens = self._choose(open_logits.float(), rows, plan, params, drafting)
        if drafting is not None:
            tokens, lasts = self._keep(drafting, rows, tokens, plan.penalties)
        else:
            lasts = None
            self.last_tokens.index_copy_(0, rows.long(), tokens.to(torch.int32))
            if plan.penalties:
                self._counts.index_put_((rows.long(), tokens), torch.ones_like(rows), accumulate=True)
        output = SampleOutput(tokens.to(torch.int32), lasts=lasts)
        if num_top >= 0:
            _add_logprobs(output, logits, tokens if drafting is None else tokens.clamp(min=0), num_top)
        return output

    def _keep(
        self, drafting: DraftedInputs, rows: Tensor, chosen: Tensor, counts_tokens: bool
    ) -> tuple[Tensor, Tensor]:
        """For each request its accepted drafts and the token after them: [S], or `NO_TOKEN`. And its last
        sample."""
        tokens, lasts = kept_tokens(drafting, chosen, rows, self.pending, self.rejected)
        if counts_tokens:
            kept = (tokens >= 0).to(torch.int32)
            self._counts.index_put_((rows.long(), tokens.long().clamp(min=0)), kept, accumulate=True)
        return tokens.long(), lasts

    def _choose(
        self,
        logits: Tensor,
        rows: Tensor,
        plan: SamplePlan,
        params: Tensor,
        drafting: DraftedInputs | None = None,
    ) -> Tensor:
        return self._scored(logits, rows, plan, params, drafting).choice()

    def _scored(
        self,
        logits: Tensor,
        rows: Tensor,
        plan: SamplePlan,
        params: Tensor,
        drafting: DraftedInputs | None,
    ) -> Scored:
        floats = params[:NUM_FLOATS].view(torch.float32)
        temperature, top_p, min_p, *penalties, biased, lacking = (f[:, None] for f in floats)
        if plan.ends:
            logits = self._without_ends(logits, rows, lacking, drafting)
        if plan.penalties:
            logits = self._penalise(logits, rows, penalties, self._counted(rows, drafting))
        if plan.biases:
            # Each token of a row has one bias; the unused zeros change nothing, in any order.
            logits = logits.scatter_add(1, self._biased[rows.long()], biased * self._bias[rows.long()])
        random = temperature >= LEAST_TEMPERATURE
        scores = logits / torch.where(random, temperature, 1.0)
        # One draw in 33 million is -inf, where the uniform number is rounded up to 1: times zero it would be
        # NaN, and win.
        noise = gumbel_noise(self._keys(params, rows, drafting), logits.shape[-1]).clamp(min=LEAST_NOISE)
        noise = torch.where(random, noise, 0.0)
        floor = scores.amax(dim=-1, keepdim=True) + torch.log(min_p)
        cuts = (params[NUM_FLOATS][:, None], top_p) if plan.filters else None
        return Scored(scores, noise, floor, cuts)

    def _counted(self, rows: Tensor, drafting: DraftedInputs | None) -> Tensor:
        """int32 [S, vocab]: generated tokens before each row. Drafts before a row count as emitted."""
        counts = self._counts[rows.long()]
        if drafting is None or not drafting.num_drafts:
            return counts
        group_of, starts = drafting.group_of.long(), drafting.starts
        before = counts_before(drafts_of(drafting.tokens, starts, drafting.num_drafts), counts.shape[-1])
        # index of each sample in its group
        places = torch.arange(len(rows), device=rows.device) - starts[group_of]
        return counts + before[group_of, places]

    def _without_ends(
        self, logits: Tensor, rows: Tensor, lacking: Tensor, drafting: DraftedInputs | None
    ) -> Tensor:
        """Forbid tokens that would end an answer below its `min_tokens`, unless a grammar allows nothing
        else."""
        if drafting is not None and drafting.num_unsure:
            lacking = lacking + (self.rejected[rows] * drafting.unsure)[:, None]
        is_short = lacking > 0
        ends = self._ends[rows.long()]
        going_on = logits.scatter(1, ends, -torch.inf)
        can_go_on = going_on.amax(dim=-1, keepdim=True) > -torch.inf
        return torch.where(is_short & can_go_on, going_on, logits)

    def _keys(self, params: Tensor, rows: Tensor, drafting: DraftedInputs | None) -> Tensor:
        """int32 [2, S] of the draws, at the actual positions of the rows."""
        keys = params[NUM_FLOATS + 1 :]
        if drafting is None or drafting.num_unsure == 0:
            return keys
        shift = (self.rejected[rows] * drafting.unsure).long()
        return keys.view(-1, 2, len(rows)).gather(0, shift.expand(1, 2, -1))[0]

    def _penalise(self, logits: Tensor, rows: Tensor, penalties: Sequence[Tensor], counts: Tensor) -> Tensor:
        presence, frequency, repetition = penalties
        seen = (counts > 0) | self._in_prompt[rows.long()]
        damped = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen & (repetition != 1.0), damped, logits)
        return logits - frequency * counts - presence * (counts > 0)


class Scored(NamedTuple):
    """What one token of each row is chosen by, [S, vocab] each."""

    scores: Tensor
    noise: Tensor
    floor: Tensor  # [S, 1]: the least score that min-p leaves
    cuts: tuple[Tensor, Tensor] | None  # [S, 1]: top-k and top-p; None: no row has any

    def choice(self) -> Tensor:
        scores, noise, floor, cuts = self
        if cuts is None:
            return torch.where(scores >= floor, scores + noise, -torch.inf).argmax(dim=-1)
        ranked, ids, keep = self._ranked(*cuts)
        best = torch.where(keep, ranked + noise.gather(1, ids), -torch.inf).argmax(dim=-1, keepdim=True)
        return ids.gather(1, best)[:, 0]

    def probabilities(self) -> Tensor:
        """Of what `choice` draws from."""
        if self.cuts is None:
            return torch.where(self.scores >= self.floor, self.scores, -torch.inf).softmax(dim=-1)
        ranked, ids, keep = self._ranked(*self.cuts)
        shares = torch.where(keep, ranked, -torch.inf).softmax(dim=-1)
        return torch.zeros_like(shares).scatter_(1, ids, shares)

    def _ranked(self, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores in falling order, their tokens, and which of them top-k, top-p and `floor` leave."""
        scores = self.scores
        ranked, ids = scores.sort(dim=-1, descending=True, stable=True)
        place = torch.arange(scores.shape[-1], device=scores.device)[None, :]
        keep = (place < torch.where(top_k > 0, top_k, scores.shape[-1])) & (ranked >= self.floor)
        shares = torch.where(keep, ranked, -torch.inf).softmax(dim=-1)
        keep &= shares.cumsum(dim=-1) - shares < top_p
        keep[:, 0] = True  # rounding never empties the choice
        return ranked, ids, keep


def _add_logprobs(output: SampleOutput, logits: Tensor, tokens: Tensor, num_top: int) -> None:
    """Logprobs of the model's own distribution, before masks, penalties, temperature and filters."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens.long()[:, None])
    output.logprobs = chosen[:, 0]
    output.ranks = (logprobs > chosen).sum(dim=-1, dtype=torch.int32) + 1
    if num_top > 0:
        output.top_ids = _top_ids(logits, num_top)
        output.top_logprobs = logprobs.gather(1, output.top_ids)


def _top_ids(logits: Tensor, num: int) -> Tensor:
    """[S, num]: the likeliest tokens; ties by lowest id, as in greedy decoding. The order of ties in `topk`
    depends on the shape of its input, and in bfloat16 many logits are equal."""
    values, ids = logits.topk(num, dim=-1)
    least = values[:, -1:]
    every_id = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.int32)
    last_ids = (
        torch.where(logits == least, every_id, logits.shape[-1] - 1)
        .topk(num, dim=-1, largest=False)
        .values.long()
    )
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    is_above = values > least
    place = torch.arange(num, device=logits.device) - is_above.sum(dim=-1, keepdim=True)
    return torch.where(is_above, ids.gather(1, by_value), last_ids.gather(1, place.clamp(min=0)))


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> SampleOutput:
    """Logprobs of given tokens, for prompts."""
    output = SampleOutput(tokens)
    _add_logprobs(output, logits, tokens, num_top)
    return output
