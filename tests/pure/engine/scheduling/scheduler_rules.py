"""What every plan and every event of a scheduler must obey, from what its listeners know. Owns the rules, not
the world they hold in."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

from penstock.contract import TOKEN_IN_FLIGHT, Chunk, Echo, FinishReason, Start, StepPlan, TokenEvent
from penstock.engine.scheduling import conversations
from penstock.engine.scheduling.budget import blocks_for
from penstock.engine.scheduling.stages import State, WaitingRequest
from penstock.kv.tiers.loads import BlockLoad
from tests.pure.engine.scheduling.scheduler_device import BLOCK, prompt_logprobs

if TYPE_CHECKING:
    from tests.pure.engine.scheduling.scheduler_world import Asked, World


def check_turn(world: World, request_id: str) -> None:
    """A request is admitted now. None in line could have been, that is of a higher priority, or of the same
    and arrived so much earlier."""
    admitted = world.scheduler.lives[request_id]
    is_ranked = admitted.waiting is None or admitted.waiting.is_ranked
    bound_s, mine = world.budget.max_overtaken_s, (admitted.request.arrival_s, admitted.order)
    for other in tuple(world.scheduler.admission.line):
        theirs = (other.request.arrival_s, other.life.order)
        overtakes = (admitted.request.priority, mine) > (other.request.priority, theirs)
        if other.life is admitted or not overtakes:
            continue
        if not _may_start(world, other):
            world.seen["overtakes one that waits for others' blocks"] += 1
            continue
        assert admitted.request.priority == other.request.priority, (
            f"{request_id} goes before {other.request.id} of a higher priority"
        )
        late_s = mine[0] - theirs[0]
        assert bound_s and late_s <= bound_s, (
            f"{request_id} arrived {late_s} s after {other.request.id} and goes first"
        )
        short, long = (
            len(admitted.tokens) < conversations.LONG_TOKENS,
            other.num_tokens >= conversations.LONG_TOKENS,
        )
        assert is_ranked or other.is_ranked or (short and long), (
            f"neither {request_id} nor {other.request.id} finds anything: the later one goes first"
        )
        world.seen["overtakes"] += 1


def _may_start(world: World, waiting: WaitingRequest) -> bool:
    """It need not wait for a step, a save, a store, or for what somebody else computes or loads."""
    others = len(world.scheduler.running) or world.cache.num_settling
    is_ready = waiting.life.placement.is_ready(waiting)
    return is_ready and not (others and world.scheduler.admission.is_pending(waiting))


def check_wants(world: World) -> None:
    """Whatever blocks are wanted, somebody in line wants them, or somebody who was answered a moment ago."""
    waiting = [life.waiting for life in world.scheduler.lives.values() if life.waiting is not None]
    kept = world.scheduler.admission.conversations
    answered = {one.want for one in kept._kept if one.until <= kept._num_plans + conversations.KEPT_PLANS}
    assert set(world.cache.pool.idle.wants) <= {one.want for one in waiting} | answered, (
        "blocks are wanted by nobody in line"
    )
    if world.tiers is not None:
        host = world.tiers.host
        assert set(host.pool.idle.wants) <= {lease.want for lease in host.leases}, (
            "host blocks are wanted without a lease"
        )
        leases = {one.lease for one in waiting}
        assert all(lease in leases or getattr(lease, "saving", False) for lease in host.leases), (
            "a lease is nobody's in line"
        )


def check_plan(world: World, plan: StepPlan) -> None:
    sizes = [c.num_tokens for c in plan.chunks]
    assert sizes and min(sizes) >= 1
    num_ones = sizes.count(1)
    assert sizes[:num_ones] == [1] * num_ones, f"chunks of one token come first: {sizes}"
    assert sum(size for size in sizes if size > 1) <= world.budget.prefill_chunk, (
        f"prompts take more than the budget: {sizes}"
    )
    assert len(sizes) <= world.budget.max_batch
    ids = [c.request_id for c in plan.chunks]
    assert len(set(ids)) == len(ids) and len({c.row for c in plan.chunks}) == len(ids)
    assert (
        plan.num_decodes == num_ones
        and plan.is_decode == (num_ones == len(sizes))
        and plan.num_tokens == sum(sizes)
    )
    rows = [one.row for one in world.scheduler.running.requests.values()]
    assert len(set(rows)) == len(rows), "two requests run on one row"
    # A request may set off, and be gone again before a step has room for it: the last start of a row is whose
    # row it is.
    for start in {start.request_id: start for start in plan.starts}.values():
        running = world.scheduler.running.requests.get(start.request_id)
        if running is not None and running.life.state is State.RUNNING:
            _check_start(world, start)
    for chunk in plan.chunks:
        _check_chunk(world, chunk)
    _check_after(world, plan)
    _check_loads(world, plan)


def _check_start(world: World, start: Start) -> None:
    asked = world.asked[start.request_id]
    assert asked.ended is None
    assert world.samples_in_flight(start.request_id) == 0, "it resumes before its newest token is known"
    assert list(start.output) == asked.got, "it resumes with other tokens than it has sent"
    world.seen["resume with tokens"] += bool(asked.got)
    world.seen["resume inside the prompt"] += bool(asked.lives and not asked.got)
    asked.begin(start.row)


def _check_chunk(world: World, chunk: Chunk) -> None:
    asked = world.asked[chunk.request_id]
    life, sampling = asked.lives[-1], asked.request.sampling
    slots = chunk.slots.tolist()
    assert asked.ended is None and chunk.request_id in world.cache.tables
    assert chunk.row == life.row
    if not life.slots:
        _check_first_chunk(world, chunk, asked)
    else:
        assert chunk.start == life.end, "positions are computed once, in order"
    paged = [] if chunk.paged is None else chunk.paged.tolist()
    num_elsewhere = chunk.num_elsewhere
    assert num_elsewhere + len(slots) == blocks_for(chunk.kv_len, BLOCK) and len(set(slots)) == len(slots), (
        "the table is as long as the sequence"
    )
    assert paged[: len(life.paged)] == life.paged, "what was paged out stays where it is"
    kept = life.slots[num_elsewhere - life.num_elsewhere :] if life.slots else []
    assert slots[: len(kept)] == kept, "a table only grows, but for what makes way at its beginning"
    _check_deep(world, chunk, asked)
    _check_window(world, chunk)
    in_flight = world.samples_in_flight(chunk.request_id)
    expected = [*asked.known, *[TOKEN_IN_FLIGHT] * in_flight]
    assert list(chunk.tokens) == expected[chunk.start : chunk.kv_len], (
        "known tokens are given, those in flight are not"
    )
    assert chunk.num_logits == (sampling.max_tokens > 0 and chunk.kv_len == len(expected)), (
        "only the newest token's logits are of use"
    )
    assert len(asked.got) + in_flight + chunk.num_logits <= sampling.max_tokens, (
        "more is sampled than was asked for"
    )
    echoed = (
        ()
        if sampling.prompt_logprobs is None
        else tuple(asked.request.prompt[chunk.start + 1 : chunk.kv_len + 1])
    )
    assert chunk.echo == (Echo(echoed, sampling.prompt_logprobs or 0) if echoed else None), (
        "other prompt tokens are scored than were asked"
    )
    if chunk.writes:
        written = slots[chunk.start // BLOCK - num_elsewhere :]
        assert all(map(world.cache.is_private, written)), "a block that others may read is written"
    life.end, life.slots, life.paged, life.num_elsewhere = chunk.kv_len, slots, paged, num_elsewhere


def _check_deep(world: World, chunk: Chunk, asked: Asked) -> None:
    most = world.budget.resident_blocks
    if asked.lifetime_blocks <= world.budget.deep_blocks or not most:
        assert not chunk.num_paged, "it may have all of its blocks on the device"
        return
    assert len(chunk.slots) <= most, (
        f"{chunk.request_id} has {len(chunk.slots)} blocks on the device, and may have {most}"
    )
    world.seen["deep step"] += 1
    world.seen["step that reads host memory"] += chunk.num_paged > 0


def _check_window(world: World, chunk: Chunk) -> None:
    if not world.window:
        assert not chunk.num_left_out, "its tokens see all before them"
        return
    first_seen = max(0, chunk.start + 1 - world.window)
    assert chunk.num_left_out * BLOCK <= first_seen, f"{chunk.request_id} lacks tokens that it sees"
    world.seen["step without what left the window"] += chunk.num_left_out > 0


def _check_first_chunk(world: World, chunk: Chunk, asked: Asked) -> None:
    num_known = len(asked.known)
    assert chunk.start <= num_known - 1, "at least one token is computed"
    if not asked.request.may_match:
        assert chunk.start == 0 and chunk.writes, "it cannot use what is cached"
    if not chunk.writes:
        assert chunk.num_tokens == 1 and chunk.kv_len == num_known and num_known % BLOCK == 0, (
            "a match ends where a block ends"
        )
        world.seen["full match"] += 1
    elif chunk.start % BLOCK:
        assert len(asked.lives) > 1, "nobody else's blocks end inside a block"
        world.seen["resume with its tail"] += 1
    world.seen["partial match"] += bool(chunk.start and chunk.writes)
    if asked.load is not None and asked.load.is_cold:
        num_came = asked.load.num_landed if asked.load.settled else asked.num_asked
        assert chunk.start == min((asked.num_opened + num_came) * BLOCK, num_known - 1), (
            "it computes what did not come, and nothing else"
        )
        world.seen["cold load that ended short"] += 0 < num_came < asked.num_asked
        world.seen["cold load that brought nothing"] += num_came == 0
    asked.found(chunk.start)


def _check_loads(world: World, plan: StepPlan) -> None:
    """A step waits for what is on its way into slots of its own requests, and for nothing else."""
    loads = world.log.waits[plan.number].loads
    assert plan.loads == tuple(loads) and all(
        world.asked[name].load is load for name, load in loads.items()
    ), "a load under another's name"
    waits = set(loads.values())
    for chunk in plan.chunks:
        asked = world.asked[chunk.request_id]
        if asked.load is not None and not asked.load.settled and not asked.load_waited:
            assert asked.load in waits, f"{chunk.request_id} computes over what has not come"
        if asked.load in waits:
            assert asked.load is not None and asked.load.arrivals is not None, (
                "there is nothing to wait for yet"
            )
            waits.remove(asked.load)
            asked.load_waited = True
            world.seen["step over a load"] += 1
    assert not waits, "the step waits for a load of somebody else"


def _check_after(world: World, plan: StepPlan) -> None:
    """Slots that a launched step still uses are written behind it: the step waits for it, or for a load that
    does, or an earlier step of the same table has waited."""
    fences, loads = world.log.waits[plan.number].of(plan)
    assert plan.after == tuple((fence.lane, fence.number) for fence in fences), "a fence under another's name"
    covered = max((fence.number for fence in fences), default=0)
    copies = [copy for load in loads if isinstance(load, BlockLoad) for copy in load.copies]
    loaded = {slot for copy in copies for slot in copy.dest_slots.tolist()}  # type: ignore[attr-defined]
    for chunk in plan.chunks:
        life = world.asked[chunk.request_id].lives[-1]
        life.covered = max(life.covered, covered)
        for slot in (
            chunk.slots[chunk.start // BLOCK - chunk.num_elsewhere :].tolist() if chunk.writes else ()
        ):
            fence = world.cache.last_fence.pop(slot, None)
            if fence is not None and not fence.passed() and slot not in loaded:
                world.seen["slot reused under a fence"] += 1
                assert life.covered >= fence.number, (
                    f"slot {slot} is written without waiting for step {fence.number}"
                )


def check_event(world: World, event: TokenEvent) -> None:
    """An event of a step that did not fail."""
    asked = world.asked[event.request_id]
    _check_first_event(world, event, asked)
    asked.got += event.tokens
    assert asked.got == asked.tokens[: len(asked.got)], f"{event.request_id} got a wrong token"
    if asked.request.sampling.logprobs is None:
        assert event.logprobs is None
    elif event.tokens or event.stop_token is not None:
        assert event.logprobs is not None and tuple(entry.token for entry in event.logprobs) == event.tokens
    if event.finish is not None:
        assert (asked.got, event.finish, event.stop_token) == (asked.tokens, asked.finish, asked.stop_token)
        assert event.request_id not in world.cache.tables, f"{event.request_id} ended and keeps its blocks"
        asked.ended = event.finish
    assert asked.ended is not None or len(asked.got) < len(asked.tokens) or asked.finish is FinishReason.STOP


def _check_first_event(world: World, event: TokenEvent, asked: Asked) -> None:
    if asked.first is not None:
        assert event.source is None and event.prompt_logprobs is None
        return
    asked.first = event
    prompt = asked.request.prompt
    _check_source(event, asked)
    if asked.request.sampling.prompt_logprobs is None:
        assert event.prompt_logprobs is None
    else:
        assert event.prompt_logprobs == (None, *prompt_logprobs(prompt, 1, len(prompt))), (
            "prompt logprobs are lost or doubled"
        )


def _check_source(event: TokenEvent, asked: Asked) -> None:
    """Where the prompt came from; what it found of its own after a retraction was computed."""
    source, num_prompt = event.source, len(asked.request.prompt)
    assert source is not None
    assert sum(dataclasses.astuple(source)) == num_prompt and min(dataclasses.astuple(source)) >= 0, (
        "sources sum to the prompt"
    )
    told = {tier: num for tier, num in dataclasses.asdict(source).items() if num and tier != "computed"}
    assert told == Counter(asked.came), "the source is not true"
    assert source.host + source.ssd + source.remote <= asked.num_landed, (
        "it never got so much from colder tiers"
    )
