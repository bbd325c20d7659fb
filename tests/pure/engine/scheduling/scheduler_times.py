"""How long prompts take in the scheduler's world, in ticks that a test sets; and the rule that every plan
keeps by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.contract import Chunk, StepPlan
from penstock.engine.scheduling.budget import PrefillTimes, blocks_for
from tests.pure.engine.scheduling.scheduler_device import BLOCK

if TYPE_CHECKING:
    from tests.pure.engine.scheduling.scheduler_world import World


@dataclass
class Ticks:
    """A token takes `per_token`, and `per_depth` more for each before it; counted, where the engine solves an
    equation."""

    per_token: float = 1.0
    per_depth: float = 0.0
    measured: bool = True

    def seconds(self, num_tokens: int, depth: float) -> float | None:
        return num_tokens * (self.per_token + self.per_depth * depth) if self.measured else None

    def tokens(self, seconds: float, start: int) -> int | None:
        if not self.measured:
            return None
        num = 0
        while self.seconds_from(start, num + 1) <= seconds:
            num += 1
        return num

    def seconds_from(self, start: int, num_tokens: int) -> float:
        return num_tokens * (self.per_token + self.per_depth * (start + num_tokens / 2))


class Timed(NamedTuple):
    """What a world's budget says about time."""

    chunk_s: float = 0.0
    min_chunk: int = 0
    times: PrefillTimes | None = None


UNTIMED = Timed()


def check_time(world: World, plan: StepPlan) -> None:
    """From where somebody gets a token from the step, prompts take the target at most; the first alone may
    have the least chunk that there is instead. Looked at before the plan counts as made."""
    times, budget = world.sizes.timed.times, world.budget
    if not isinstance(times, Ticks) or not times.measured or budget.chunk_s <= 0.0:
        return
    started = {start.request_id for start in plan.starts}
    gives_tokens = any(_decodes(world, chunk) and chunk.request_id not in started for chunk in plan.chunks)
    spent_s, first = 0.0, True
    for chunk in (chunk for chunk in plan.chunks if chunk.num_tokens > 1):
        spent_s += times.seconds_from(chunk.start, chunk.num_tokens)
        least = blocks_for(chunk.start + max(1, budget.min_chunk), BLOCK) * BLOCK - chunk.start
        if gives_tokens and spent_s > budget.chunk_s:
            assert first and chunk.num_tokens <= least, (
                f"prompts take {spent_s} while others wait, more than {budget.chunk_s}"
            )
            world.seen["least chunk"] += 1
        elif (
            gives_tokens
            and not chunk.num_logits
            and chunk.num_tokens < budget.prefill_chunk
            and chunk.kv_len % BLOCK == 0
        ):
            world.seen["chunk cut by time"] += 1
        gives_tokens |= chunk.kv_len == len(world.asked[chunk.request_id].known)
        first = False


def _decodes(world: World, chunk: Chunk) -> bool:
    lives = world.asked[chunk.request_id].lives
    return chunk.num_tokens == 1 and chunk.num_logits > 0 and bool(lives and lives[-1].slots)
