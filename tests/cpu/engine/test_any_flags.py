"""Flags together: with every two of their values an engine gets warm, and its requests have the tokens of an
engine without any of them, under the strict sanitizer, also when the same prompts come again and after a
restart."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config import ADMISSIONS, DEVICE_EVICTIONS, EVICTIONS, Config
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.execution import warm
from penstock.flags import Parser, config_of, engine_flags
from tests.cpu.engine.test_eagle_engine import write_random_eagle
from tests.cpu.engine.test_mtp_engine import model_of, write_random_head
from tests.pairwise import Case, pairwise
from tests.support.driving import run_all, settle_all, submit, wait_scanned
from tests.support.forced import forced
from tests.support.trace_reader import read_trace

MODEL = ("--model", "tiny-qwen3", "--load-format", "dummy", "--device", "cpu", "--dtype", "float32")
OPTIONS = {
    "--block-tokens": (8, 16, 64),
    "--max-batch": (1, 3, 16),
    "--prefill-chunk": (33, 256),
    "--prefill-chunk-ms": (None, 0.5),
    "--overcommit": (1.0, 3.0),
    "--scheduling": ("cost", "fifo"),
    "--no-capture": (None, ""),
    "--no-prefix-cache": (None, ""),
    "--eviction": EVICTIONS,
    "--sanitize-bytes": (None, ""),
    "--trace": (None, "trace.json"),
    "--speculate": (None, "ngram", "mtp", "eagle", "draft:tiny-qwen3"),
    "--speculate-tokens": (None, 1, 15, 16),
    "blocks": ("few", "many"),
    "tiers": ("none", "host", *ADMISSIONS),
    "deep": (False, True),
    "always drafts": (False, True),
}
HEADS = {"mtp": write_random_head, "eagle": write_random_eagle}
CASES = pairwise(OPTIONS)
MAX_MODEL_LEN, NUM_TOKENS = 400, 20


def prompts() -> list[list[int]]:
    chooser = random.Random(0)
    long, short = (
        [chooser.randrange(1, 500) for _ in range(num)] for num in (MAX_MODEL_LEN - NUM_TOKENS, 90)
    )
    return [short, long, short[:40], [7] * 30]


def flags_of(case: Case, heads: Path, disk: Path) -> list[str]:
    """What belongs to something that the case does not have is left out: it would be refused."""
    given = {name: value for name, value in case.items() if name.startswith("--") and value is not None}
    if case["--speculate"] is None:
        given.pop("--speculate-tokens", None)
    elif (kind := case["--speculate"]) in HEADS:
        given["--speculate"] = f"{kind}:{heads / kind}"
    block = case["--block-tokens"]
    has_tiers, is_deep = (
        case["tiers"] != "none",
        case["deep"] and case["tiers"] != "none" and case["--no-prefix-cache"] is None,
    )
    if not has_tiers and case["--eviction"] not in DEVICE_EVICTIONS:
        del given["--eviction"]
    if case["--trace"] is not None:
        given["--trace"] = disk.with_name(str(case["--trace"]))
    num_blocks = -(-MAX_MODEL_LEN // block) + 1
    given["--device-kv-blocks"] = num_blocks if case["blocks"] == "few" else 4 * num_blocks
    if is_deep:
        given["--kv-resident-tokens"] = max(256, 8 * block)
    flags = [*MODEL, "--max-model-len", str(MAX_MODEL_LEN), "--sanitize", "strict"]
    flags += ["--kv-offload-host-gib", "0.01"] if has_tiers else ["--no-kv-offload"]
    if case["tiers"] in ADMISSIONS:
        flags += [
            "--kv-offload-ssd-dir",
            str(disk),
            "--kv-offload-ssd-gib",
            "0.02",
            "--kv-offload-ssd-admission",
            case["tiers"],
        ]
    return flags + [
        str(part) for name, value in given.items() for part in ((name, value) if value != "" else (name,))
    ]


def parsed(flags: list[str]) -> Config:
    return config_of(Parser(parents=[engine_flags()]).parse_args(flags))


def answers(engine: Engine) -> list[tuple[int, ...]]:
    found = [submit(engine, prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in prompts()]
    run_all(engine)
    assert [one.error for one in found] == [None] * len(found)
    return [tuple(one.tokens) for one in found]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[tuple[int, ...]], Path]]:
    """What an engine without any of the flags says, and where heads for its model are, by their kind."""
    engine = build(
        parsed(
            [*MODEL, "--max-model-len", str(MAX_MODEL_LEN), "--device-kv-blocks", "256", "--no-kv-offload"]
        )
    )
    heads = tmp_path_factory.mktemp("any flags")
    for kind, write in HEADS.items():
        write(heads / kind, model_of(engine))
    yield answers(engine), heads
    engine.close(timeout_s=20.0)


@pytest.mark.parametrize("case", CASES, ids=[str(number) for number in range(len(CASES))])
def test_with_any_two_flags_a_warm_engine_says_what_it_says_without(
    case: Case, plain: tuple[list[tuple[int, ...]], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, heads = plain
    if case["always drafts"]:  # at any cost: nothing depends on how long steps take
        monkeypatch.setattr(warm, "measured_costs", lambda executor, slot, costs: costs)
    flags = flags_of(case, heads, tmp_path / "kv")
    for _ in range(2 if case["tiers"] in ADMISSIONS else 1):
        engine = build(parsed(flags))
        if case["tiers"] in ADMISSIONS:
            wait_scanned(engine)
        engine.warm()
        if engine.parts.speculation is not None and case["always drafts"]:
            forced(engine)
        assert answers(engine) == right, flags
        settle_all(engine)
        assert answers(engine) == right, flags
        engine.check()
        engine.close(timeout_s=20.0)
        if case["--trace"] is not None:
            assert not read_trace(tmp_path / "trace.json").open
