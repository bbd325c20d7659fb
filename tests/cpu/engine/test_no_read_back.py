"""Nothing on the way to the device reads a tensor back. Ops are launched by the engine thread where the
device is a GPU, and one that asks for a value there waits for all that was launched before it. On the CPU the
same ops show whether they ask.

Holds invariant 6: no step and no transfer asks the device for a value."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import penstock
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.execution.running_step import RunningStep
from penstock.engine.execution.sampler import Sampler
from tests.cpu.engine.test_tiers import forget
from tests.support.driving import run_all, settle_all, submit, tiny_config
from tests.support.forced import forced

Prompts = Callable[..., list[int]]

READS = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "nonzero",
    "pin_memory",
    "__array__",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
)
OURS = (str(Path(penstock.__file__).parent), __file__)
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "seed": 1},
    {
        "temperature": 1.0,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
    {"logprobs": 3},
    {"prompt_logprobs": 2},
]


def reader(frame: FrameType | None) -> str | None:
    """Who of the package reads; None: somebody who may, because the step is over, or because it is code for
    the CPU alone."""
    first = None
    while frame is not None:
        code = frame.f_code
        if (
            code is RunningStep.wait_result.__code__
            or code.co_filename.endswith("attention/cpu.py")
            or code.co_name == "_norm_one_row"
        ):
            return None
        if first is None and code.co_filename.startswith(OURS):
            first = f"{Path(code.co_filename).name}: {code.co_name}"
        frame = frame.f_back
    return first


@contextmanager
def read_backs() -> Iterator[list[str]]:
    """Who has read a tensor, on whatever thread, without waiting for the step that makes it."""
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            whole = getattr(torch.Tensor, name)

            def noted(
                self: torch.Tensor, *args: Any, whole: Any = whole, name: str = name, **named: Any
            ) -> Any:
                who = reader(sys._getframe(1))
                if who is not None:
                    found.append(f"{name} in {who}")
                return whole(self, *args, **named)

            patch.setattr(torch.Tensor, name, noted)
        yield found


@pytest.fixture(params=[None, "draft:tiny-llama"], ids=["plain", "drafts"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Not in checked mode, in which launchers compare bytes and wait for them."""
    made = build(tiny_config(host_blocks=64, speculate=request.param))
    if made.parts.speculation is not None:
        forced(made)
    yield made
    made.close(timeout_s=20.0)


def requests_of_every_kind(engine: Engine, prompts: Prompts) -> list[str]:
    with read_backs() as found:
        # the first are computed, the second begin with what comes from host memory
        for num_tokens in (70, 90):
            done = [submit(engine, prompts(num_tokens), **kind) for kind in KINDS]
            run_all(engine)
            assert all(len(one.tokens) == 8 for one in done)
            settle_all(engine)
            forget(engine)
    return found


def test_no_step_and_no_transfer_reads_a_tensor_back_while_it_is_launched(
    engine: Engine, prompts: Prompts
) -> None:
    assert requests_of_every_kind(engine, prompts) == []
    traffic = engine.stats().traffic
    assert traffic is not None and all(
        traffic.bytes[route] for route in (("device", "host"), ("host", "device"))
    )


def test_a_sampler_that_reads_a_value_is_noticed(
    engine: Engine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = Sampler.sample

    def reading(self: Sampler, logits: torch.Tensor, *rest: Any) -> Any:
        return sample(self, logits + 0 * logits.max().item(), *rest)

    monkeypatch.setattr(Sampler, "sample", reading)
    found = requests_of_every_kind(engine, prompts)
    assert found and set(found) == {f"item in {Path(__file__).name}: reading"}
