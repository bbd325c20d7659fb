"""One engine of `penstock demo`, in a process of its own: started, asked, and what it computed stored. Owns
the engine and the clock; the process ends when it returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from penstock.answer import Answer
from penstock.bench.report import device_of, measured_on
from penstock.bench.ttft import wait_scanned
from penstock.commands.demo_stages import DemoAnswer, DemoEngine, DemoStage, EngineRun, story
from penstock.config import GIB, Config
from penstock.contract import SamplingParams
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.engine.sizing import layout_for
from penstock.errors import DeadlineExceeded
from penstock.models.hub import fetched
from penstock.models.loader import inspect_model
from penstock.models.progress import Progress
from penstock.models.tokenizer import TextCodec

ANSWER_TOKENS = 40
ASKED_TOKENS = 512  # room for the question and the answer
TOKEN_CHARS = 4  # of the story; models need fewer tokens for it
FLUSH_S = 60.0
POLL_S = 0.01

Say = Callable[..., None]  # what is happening: a word, then what belongs to it


def ask_all(engine: DemoEngine, tokens: int | None, blocks_on_disk: int, say: Say) -> EngineRun:
    """`tokens`: of the document; None: as long as it is. `blocks_on_disk` have to be found there first."""
    started_s = time.monotonic()

    def progress(stage: str, done: int, total: int) -> None:
        say("progress", stage, done, total)

    config = fetched(engine.config, progress)
    with _running(_sized(config, tokens), progress) as running:
        _wait_host(running, progress)
        if blocks_on_disk:
            wait_scanned(running, blocks_on_disk)
        ids = _document(running.tokenizer, tokens)
        text, where = running.tokenizer.decode(ids), measured_on(running.name, config)
        start_s = time.monotonic() - started_s
        say("ready", where["model"], where["device"], len(ids))
        answers = []
        for stage in engine.stages:
            if stage.tier == "host":
                _store_and_forget(running, progress)
            say("asking", stage)
            answers.append(_ask(running, stage, _prompt(running.tokenizer, text, stage.question), say))
            say("answered", answers[-1])
        ssd = running.stats().kv_blocks.get("ssd", {"used": 0})["used"]
        return EngineRun(where, len(ids), ssd, start_s, answers)


@contextmanager
def _running(config: Config, progress: Progress) -> Iterator[Engine]:
    engine = build(config, progress)
    loop = EngineLoop(engine)
    loop.start(progress)
    try:
        yield engine
    finally:
        loop.close(deadline_s=0.0)


def _sized(config: Config, tokens: int | None) -> Config:
    """Host memory for four such prompts: a quarter of it may be on its way to disk and store. Preparing the
    default's gigabytes would run beside the figures."""
    facts = inspect_model(config.source, config.engine.max_model_len)
    layout = layout_for(config, facts.config, torch.device(device_of(config)))
    most = 4 * (ASKED_TOKENS + (tokens or len(story()) // TOKEN_CHARS))
    gib = (most / layout.block_tokens + 1) * layout.block_bytes / GIB
    return replace(config, offload=replace(config.offload, host_gib=gib))


def _wait_host(engine: Engine, progress: Progress) -> None:
    host = engine.cache.host
    while host.memory is not None and not host.memory.is_over and host.num_unready:
        progress("preparing host memory", host.num_slots - host.num_unready, host.num_slots)
        time.sleep(POLL_S)


def _document(tokenizer: TextCodec, tokens: int | None) -> list[int]:
    """Cut at its beginning, or repeated: it ends as the story does."""
    ids = tokenizer.encode(story(), add_special=False)
    return ids if tokens is None else (ids * -(-tokens // len(ids)))[-tokens:]


def _prompt(tokenizer: TextCodec, text: str, question: str) -> list[int]:
    asked = f"{text}\n\nAnswer with one sentence from the text: {question}"
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat([{"role": "user", "content": asked}])
    return tokenizer.encode(f"{asked}\nAnswer:")


def _ask(engine: Engine, stage: DemoStage, prompt: list[int], say: Say) -> DemoAnswer:
    answer = Answer(engine, prompt, SamplingParams(ANSWER_TOKENS, temperature=0.0))
    for _ in answer.pieces():
        say("first_token", answer.figures().first_token_s)
    found = answer.figures()
    times = found.first_token_s, found.total_s
    return DemoAnswer(stage, len(prompt), found.kv_source, *times, answer.tokens, answer.text)


def _store_and_forget(engine: Engine, progress: Progress) -> None:
    """All that was computed is in every tier, and then no longer on the device."""
    progress("storing KV in the other tiers", 0, 1)
    engine.kv.wait_flushed("persisted", FLUSH_S)
    by_s = time.monotonic() + FLUSH_S
    while engine.is_transferring():  # to tiers behind the first one
        if time.monotonic() > by_s:
            raise DeadlineExceeded(f"KV is still on its way to colder tiers after {FLUSH_S:g} s")
        time.sleep(POLL_S)
    engine.kv.reset(("device",))
