"""The events that listeners of requests get, and their totals. Owns the rule that ends a generation; the
scheduler then ends the request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from penstock.contract import FinishReason, KvSource, Sampled, StepFailure, TokenEvent
from penstock.engine.scheduling.stages import Life
from penstock.figures import RECALL_BOUNDS, Histogram


@dataclass(slots=True)
class SchedulerCounts:
    """Running totals as plain numbers, for reports."""

    prompt_tokens: dict[str, int] = field(default_factory=lambda: asdict(KvSource()))
    generated_tokens: int = 0
    retractions: int = 0
    parts_fetched: int = 0  # of scored requests' contexts, from host memory to the device
    scorings: int = 0
    recall: Histogram = field(default_factory=lambda: Histogram(RECALL_BOUNDS))
    # accepted drafts by position: first, second, ...
    accepted_by_place: list[int] = field(default_factory=list)
    drafted_by_place: list[int] = field(default_factory=list)

    def see_place(self, place: int) -> None:
        """Drafts up to this position are possible: report their counts from now on, even if 0."""
        for counts in (self.drafted_by_place, self.accepted_by_place):
            counts.extend([0] * (place - len(counts)))

    def see_scoring(self, recall: float | None) -> None:
        self.scorings += 1
        if recall is not None:
            self.recall.add(recall)

    def add_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """A step verified `num_drafts` drafts of one request."""
        self.see_place(num_drafts)
        for counts, num in ((self.drafted_by_place, num_drafts), (self.accepted_by_place, num_accepted)):
            for place in range(num):
                counts[place] += 1


class Events:
    """Makes events in the order in which things happen to a request, and counts their tokens."""

    def __init__(self, stop_ids: Iterable[int], counts: SchedulerCounts) -> None:
        self.stop_ids = frozenset(stop_ids)
        self._counts = counts

    def of_tokens(self, life: Life, sampled: Sampled, num_drafts: int = 0) -> TokenEvent:
        """A step sampled tokens for it. Keeps them up to the token that ends it, if any. `num_drafts`: drafts
        verified for it."""
        sampling = life.request.sampling
        kept: list[int] = []
        finish: FinishReason | None = None
        stop_token: int | None = None
        for token in sampled.tokens:
            self._counts.generated_tokens += 1
            if token in sampling.stop_token_ids or (token in self.stop_ids and not sampling.ignore_eos):
                finish, stop_token = FinishReason.STOP, token
                break
            life.tokens.append(token)
            kept.append(token)
            if life.num_written >= sampling.max_tokens:
                finish = FinishReason.LENGTH
                break
        logprobs = None if sampled.logprobs is None else sampled.logprobs[: len(kept)]
        event = TokenEvent(life.request.id, tuple(kept), logprobs, None, finish, stop_token)
        if not life.started:
            event = self._first(life, event)
        if not num_drafts:
            return event
        # Tokens after the one that ends it are dropped. The last sampled token was no draft.
        num_accepted = min(len(sampled.tokens) - 1, len(kept) + (stop_token is not None))
        self._counts.add_drafts(num_drafts, num_accepted)
        life.num_drafted += num_drafts
        life.num_accepted += num_accepted
        return event._replace(drafted=num_drafts, accepted=num_accepted)

    def of_end(self, life: Life, finish: FinishReason) -> TokenEvent:
        """It ends without a token: max_tokens is 0, it was cancelled, its grammar is complete, or a step
        failed."""
        event = TokenEvent(life.request.id, finish=finish)
        return event if life.started or finish is not FinishReason.LENGTH else self._first(life, event)

    def of_failure(self, life: Life, error: StepFailure) -> TokenEvent:
        return self.of_end(life, FinishReason.ERROR)._replace(error=str(error))

    def _first(self, life: Life, event: TokenEvent) -> TokenEvent:
        """Its first event: with the logprobs of its prompt, and the tiers that the prompt's KV came from."""
        life.started = True
        tokens: Counter[str] = Counter()
        for tier, num in life.sources.found:
            tokens[tier] += num
        source = KvSource(**tokens, computed=life.num_prompt - tokens.total())
        for tier, num_tokens in asdict(source).items():
            self._counts.prompt_tokens[tier] += num_tokens
        return event._replace(
            prompt_logprobs=life.prompt_logprobs, source=source, scored=life.placement.is_partial
        )
