"""The engine over guarded arenas: no step and no transfer touches a slot, in memory, that it has not
declared. In a process of its own, which would not survive it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

SCENE = """
import resource, torch
import numpy as np
from penstock.engine.build import build
from penstock.engine.execution.passes import Step
from tests.support.driving import generate, run_all, settle_all, submit, tiny_config
from tests.support.forced import forced
from penstock.testing.guarded import GuardedArena, GuardedSanitizer
from penstock.testing.sanitized import check_silent

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
torch.set_num_threads(1)
sanitizer = GuardedSanitizer()
engine = build(tiny_config(host_blocks=64, blocks=24, speculate=SPECULATE), sanitizer=sanitizer)
parts = engine.parts
if SPECULATE is not None:
    forced(engine)
for arena in (parts.arena, parts.cache.saves._host.memory._arena):
    layout = arena.layout
    sanitizer.guard(GuardedArena(arena.name, arena.tensor.data_ptr(), layout.block_bytes, layout.num_layers, arena.num_slots))

def prompt(num_tokens, seed=0):
    return np.random.default_rng(seed).integers(1, 500, num_tokens).tolist()
"""  # noqa: E501


def run(body: str, speculate: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "faulthandler", "-c", f"SPECULATE = {speculate!r}\n{SCENE}{body}"]
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("speculate", [None, "draft:tiny-qwen3", "draft:tiny-llama"])
def test_steps_and_transfers_touch_what_they_have_declared_and_nothing_else(speculate: str | None) -> None:
    done = run(
        """
cold = generate(engine, prompt(70), max_tokens=20)
settle_all(engine)
engine.cache.reset(("device",))
warm = generate(engine, prompt(70), max_tokens=20)
assert warm.tokens == cold.tokens and warm.events[0].source.host == 64, warm.events[0].source
crowd = [submit(engine, prompt(40 + 9 * n, seed=n), max_tokens=30) for n in range(5)]
for _ in range(6):
    engine.step()
engine.cancel(crowd[1].request_id)
run_all(engine)
engine.close(timeout_s=20.0)
check_silent(sanitizer)
print("done")
""",
        speculate,
    )
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr


def test_a_step_that_leaves_out_one_of_its_slots_does_not_survive_reading_it() -> None:
    done = run("""
whole = Step.kv

def forgetful(self, layers):
    read, write = whole(self, layers)
    return read._replace(slots=read.slots[1:]), write

Step.kv = forgetful
generate(engine, prompt(70), max_tokens=4)
print("survived")
""")
    assert done.returncode == -signal.SIGSEGV and "survived" not in done.stdout
    assert "penstock/engine/execution" in done.stderr, done.stderr
