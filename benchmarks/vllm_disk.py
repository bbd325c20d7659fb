"""vLLM with Penstock's disk under its host memory, beside vLLM with its own file-system tier, in turns in one
run. Owns the comparison: time to first token of a prefix that only the disk has, time of the scheduler's
thread inside the tier, bytes on disk, what a kill -9 leaves, and what becomes of flipped bits.

`vllm_disk.py --python VLLM/bin/python`: each side is a process of its own (`vllm_side.py`), idle while the
other is measured. A prefix is read by a process that has just started, so its device and host memory are
empty. Both tiers read past the page cache (O_DIRECT), and it is dropped. On a CPU, copies on the engine's
thread stand for vLLM's transfers between device and host.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from driver import Side, flags, text, write
from driver import show as show_table
from penstock.bench.report import describe_machine
from penstock.models.qwen3 import QWEN3_4B
from penstock.testing.tiny_models import TINY_LLAMA, config_json, write_tiny_model

SIDE = Path(__file__).with_name("vllm_side.py")
# vLLM writes to both of its outputs, so answers come by a third
LOGGED = ("sh", "-c", 'exec 3>&1 >>"$0" 2>&1; exec "$@"')
NAMES = ("penstock", "fs")
CLASSES = {"penstock": "Penstock", "fs": "FileSystem"}
CALLS = ("lookup", "submit_store", "submit_load", "get_finished_jobs", "on_schedule_end")
SMALL = dataclasses.replace(
    TINY_LLAMA, num_layers=8, hidden=256, num_heads=4, num_kv_heads=4, head_dim=64, ffn=256, max_position=8192
)
TOP_BIT = 0x40  # of the exponent, in the last byte of a value
LAST_BYTE = 3  # of the value at a mark, for two and for four bytes
GIB = 1 << 30


class Size(NamedTuple):
    """What a device of one kind is asked for."""

    tokens: tuple[int, ...]
    rounds: int
    kills: int
    host_gib: float
    ssd_gib: float
    prompts: int  # before a kill, and in the middle of it
    prompt_tokens: int
    engine: dict[str, Any]


SIZES = {
    "cpu": Size(
        *((512, 1024, 2048), 7, 3, 0.5, 4.0, 12, 512),
        {"dtype": "float32", "block_size": 32, "num_gpu_blocks_override": 96, "max_num_batched_tokens": 1024},
    ),
    "cuda": Size(
        *((2048, 8192, 32768), 3, 1, 12.0, 32.0, 6, 2048),
        {
            "dtype": "bfloat16",
            "block_size": 16,
            "gpu_memory_utilization": 0.4,
            "load_format": "dummy",
            "max_num_batched_tokens": 8192,
        },
    ),
}


def write_model(folder: Path, device: str) -> Path:
    if device == "cpu":
        return write_tiny_model(folder, SMALL)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_json(QWEN3_4B)))
    return folder


class Bench:
    """Folders and processes."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.size, self._args, self._folder = SIZES[args.device], args, folder
        self._model = write_model(folder / "model", args.device)
        self.about: dict[str, Any] = {}

    def kv(self, name: str, phase: str) -> Path:
        return self._folder / phase / name / "kv"

    def clear(self, phase: str) -> None:
        """Two phases may not fit on the disk."""
        shutil.rmtree(self._folder / phase)

    def ledger(self, name: str, phase: str) -> Path:
        return self._folder / phase / name / "ledger"

    @contextlib.contextmanager
    def sides(self, phase: str, watched: bool) -> Iterator[dict[str, Side]]:
        """`watched`: bytes are compared, so times are not what they are."""
        started: dict[str, Side] = {}
        shared_memory = []
        try:
            for name in NAMES:  # one after the other: vLLM measures free memory at start
                started[name] = self._start(name, phase, watched)
                answer = started[name].answer()
                shared_memory += answer.pop("shared_memory")
                self.about |= answer
            yield started
            for side in started.values():
                side.close()
        finally:
            for side in started.values():
                side.kill()
            for path in shared_memory:  # of a killed process
                Path(path).unlink(missing_ok=True)

    def _start(self, name: str, phase: str, watched: bool) -> Side:
        self.kv(name, phase).mkdir(parents=True, exist_ok=True)
        most = max(*self._args.tokens, self.size.prompt_tokens)
        settings = {
            "tier": CLASSES[name],
            "device": self._args.device,
            "host_bytes": int(self._args.host_gib * GIB),
            "options": {
                "ledger": str(self.ledger(name, phase)) if watched else None,
                **self._options(name, self.kv(name, phase)),
            },
            "engine": {
                "model": str(self._model),
                "skip_tokenizer_init": True,
                "disable_log_stats": True,
                "max_model_len": most + 64,
                "max_num_seqs": 4,
                "enforce_eager": watched or self._args.eager or self._args.device == "cpu",
                **self.size.engine,
            },
        }
        command = [*LOGGED, str(self._args.log), self._args.python, str(SIDE), json.dumps(settings)]
        return Side(name, command, threads=1, **_environment())

    def _options(self, name: str, folder: Path) -> dict[str, Any]:
        if name == "fs":
            return {"root_dir": str(folder)}
        return {
            "ssd_dir": str(folder),
            "ssd_gib": self._args.ssd_gib,
            "queue_mib": int(1024 * self._args.host_gib),  # the other's queue has no bound
        }


def _environment() -> dict[str, str]:
    return {
        "PYTHONHASHSEED": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler's thread is the one that asks
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


# --------------------------------------------------------------------------------------------------- the disk


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in files(folder))


def drop_page_cache(folder: Path) -> None:
    for path in files(folder):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def flip(folder: Path, mark: bytes) -> None:
    """One bit of the value that begins with `mark`, wherever the tier keeps it."""
    found = []
    for path in files(folder):
        if path.stat().st_size >= len(mark):
            with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
                at = data.find(mark)
                while at >= 0:
                    found.append((path, at))
                    at = data.find(mark, at + 1)
    if len(found) != 1:
        raise SystemExit(f"a block's bytes are {len(found)} times in {folder}, not once")
    ((path, at),) = found
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        data[at + LAST_BYTE] ^= TOP_BIT
        data.flush()


def entries(ledger: Path) -> list[dict[str, Any]]:
    """The last line may be half written."""
    lines = ledger.read_text().split("\n")[:-1] if ledger.exists() else []
    return [json.loads(line) for line in lines]


# -------------------------------------------------------------------------------------------------- the speed

Answers = dict[str, list[dict[str, Any]]]


def measure_speed(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    asked = [(args.tokens[0], 0)]  # warms up
    for number in range(1, args.rounds + 1):
        asked += [(tokens, 1000 * number + place) for place, tokens in enumerate(args.tokens)]
    computed, read = _in_turns(bench, asked), _in_turns(bench, asked)
    sizes = {name: _bytes(bench, name, computed[name]) for name in NAMES}
    bench.clear("speed")
    return {
        "ttft_ms": {tokens: _ttft(tokens, computed, read) for tokens in args.tokens},
        "engine_thread": {name: _calls([*computed[name], *read[name]]) for name in NAMES},
        "bytes": sizes,
    }


def _in_turns(bench: Bench, asked: Sequence[tuple[int, int]]) -> Answers:
    """What is on its way to the disk gets there before the next question."""
    found: Answers = {name: [] for name in NAMES}
    for name in NAMES:
        drop_page_cache(bench.kv(name, "speed"))
    with bench.sides("speed", watched=False) as sides:
        for turn, (tokens, prompt) in enumerate(asked):
            for name in NAMES if turn % 2 else reversed(NAMES):
                answer, rest = sides[name].ask("ask", prompt, tokens), sides[name].ask("settle")
                answer |= {"size": tokens, "warms": prompt == 0, "stored": answer["stored"] + rest["stored"]}
                found[name].append({**answer, "settled": rest["engine_thread"]})
    return found


def _ttft(tokens: int, computed: Answers, read: Answers) -> dict[str, Any]:
    def of(answers: Answers, figure: str) -> dict[str, list[Any]]:
        return {
            name: [one[figure] for one in answers[name] if one["size"] == tokens and not one["warms"]]
            for name in NAMES
        }

    disk, cold = of(read, "ttft_ms"), of(computed, "ttft_ms")
    return {
        "disk": {name: statistics.median(disk[name]) for name in NAMES},
        "computed": {name: statistics.median(cold[name]) for name in NAMES},
        "ratio": _ratio(disk),
        "least_cached": {name: min(found) for name, found in of(read, "cached").items()},
        "same_answers": {name: of(computed, "tokens")[name] == of(read, "tokens")[name] for name in NAMES},
        "load_ms": {name: statistics.median(found) for name, found in of(read, "load_ms").items()},
        "lookup_us": {
            name: statistics.median(
                times["lookup"]["us"] / loaded
                for times, loaded in zip(all_of, of(read, "loaded")[name], strict=True)
            )
            for name, all_of in of(read, "engine_thread").items()
        },
        "engine_thread_ms": {
            name: statistics.median(
                sum(one[call]["us"] for call in ("lookup", "submit_load") if call in one) / 1000
                for one in all_of
            )
            for name, all_of in of(read, "engine_thread").items()
        },
        "rounds": {"disk": disk, "computed": cold},
    }


def _ratio(times: dict[str, list[float]]) -> float:
    """Of the other's to ours, in the same turn."""
    return statistics.median(
        theirs / ours for theirs, ours in zip(times["fs"], times["penstock"], strict=True)
    )


def _calls(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For each method of a tier: its calls, the medians over questions of a call and of a block."""
    found = {}
    for call in CALLS:
        all_of = [
            times[call]
            for one in answers
            for times in (one["engine_thread"], one["settled"])
            if call in times
        ]
        of_block = [one["us"] / one["blocks"] for one in all_of if one["blocks"]]
        found[call] = {
            "calls": sum(one["calls"] for one in all_of),
            "median_us": statistics.median(one["median_us"] for one in all_of) if all_of else None,
            "us_per_block": statistics.median(of_block) if of_block else None,
        }
    return found


def _bytes(bench: Bench, name: str, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    folder = bench.kv(name, "speed")
    kv = sum(one["stored"] for one in answers) * bench.about["block_bytes"]
    return {"kv": kv, "disk": disk_bytes(folder), "files": len(files(folder))}


# ------------------------------------------------------------------------------------------------ the trouble


def measure_trouble(bench: Bench, number: int) -> dict[str, dict[str, Any]]:
    """A kill -9 in the middle of stores, one bit flipped in a block of each earlier prompt, a restart."""
    size, phase = bench.size, f"trouble-{number}"
    kept, cut = range(1, size.prompts + 1), range(101, 101 + size.prompts)
    found: dict[str, dict[str, Any]] = {name: {} for name in NAMES}
    with bench.sides(phase, watched=True) as sides:
        right = {
            name: [_kept(side, prompt, size.prompt_tokens) for prompt in kept] for name, side in sides.items()
        }
        for name, side in sides.items():
            side.send("burst", cut[0], len(cut), size.prompt_tokens)
            _wait_for_writes(bench.ledger(name, phase), cut[len(cut) // 2])
            side.kill()
    for name in NAMES:
        folder = bench.kv(name, phase)
        found[name]["left_over"] = {
            "files": sum(path.name.endswith(".tmp") for path in files(folder)),
            "bytes": sum(path.stat().st_size for path in files(folder) if path.name.endswith(".tmp")),
        }
        marks = _marks(bench.ledger(name, phase), kept)
        for mark in marks:
            flip(folder, mark)
        found[name]["flipped"] = len(marks)
        drop_page_cache(folder)
    with bench.sides(phase, watched=True) as sides:
        for name, side in sides.items():
            found[name] |= side.ask("present")
            found[name]["after_flips"] = _answers(side, kept, size.prompt_tokens, right[name])
            reference = [
                side.ask("ask", prompt, size.prompt_tokens, f"alone-{prompt}")["tokens"] for prompt in cut
            ]
            found[name]["after_kill"] = _answers(side, cut, size.prompt_tokens, reference)
    bench.clear(phase)
    return found


def _kept(side: Side, prompt: int, tokens: int) -> list[int]:
    answer = side.ask("ask", prompt, tokens)
    side.ask("settle")
    given: list[int] = answer["tokens"]
    return given


def _wait_for_writes(ledger: Path, prompt: int) -> None:
    """Until blocks of `prompt` are stored: the first of the same burst are written, its own are under way."""
    until = time.monotonic() + 120
    while not any(entry.get("prompt") == prompt for entry in entries(ledger)):
        if time.monotonic() > until:
            raise SystemExit("the blocks of a prompt were never stored")
        time.sleep(0.001)


def _marks(ledger: Path, prompts: Sequence[int]) -> list[bytes]:
    """Of a block in the middle of each prompt."""
    found = []
    for prompt in prompts:
        of_prompt = [entry["mark"] for entry in entries(ledger) if entry.get("prompt") == prompt]
        found.append(bytes.fromhex(of_prompt[len(of_prompt) // 2]))
    return found


def _answers(
    side: Side, prompts: Sequence[int], tokens: int, right: Sequence[Sequence[int]]
) -> dict[str, Any]:
    answers = [side.ask("ask", prompt, tokens) for prompt in prompts]
    return {
        "prompts": len(answers),
        "loaded_blocks": sum(one["loaded"] for one in answers),
        "blocks_with_other_bytes": sum(one["other_bytes"] for one in answers),
        "wrong_answers": sum(one["tokens"] != given for one, given in zip(answers, right, strict=True)),
    }


# -------------------------------------------------------------------------------------------------- the table


def rows_of(found: dict[str, Any]) -> list[dict[str, str]]:
    speed = found.get("speed")
    rows = _speed_rows(speed) if speed is not None else []
    return rows + (_trouble_rows(found["trouble"]) if found["trouble"] else [])


def _row(what: str, values: dict[str, Any], digits: int = 1, ratio: float | None = None) -> dict[str, str]:
    cells = {
        name: "-"
        if values[name] is None
        else f"{values[name]:,.{digits}f}"
        if digits
        else f"{values[name]:,}"
        for name in NAMES
    }
    if ratio is None and digits and values["penstock"] and values["fs"]:
        ratio = values["fs"] / values["penstock"]
    return {"what": what, **cells, "ratio": "" if ratio is None else f"{ratio:.2f}"}


def _at(found: Any, path: Sequence[str]) -> int:
    for word in path:
        found = found[word]
    return int(found)


def _speed_rows(speed: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    for tokens, times in speed["ttft_ms"].items():
        rows.append(_row(f"first token, {tokens} tokens on disk, ms", times["disk"], ratio=times["ratio"]))
        rows.append(_row(f"first token, {tokens} tokens computed, ms", times["computed"]))
        rows.append(_row("  of them found on disk, least", times["least_cached"], 0))
        rows.append(_row("  longest load, seen by the scheduler, ms", times["load_ms"]))
        rows.append(_row("  lookups, for a block of it, us", times["lookup_us"]))
        rows.append(_row("  lookups and submits of a prefix, ms", times["engine_thread_ms"]))
    for call in CALLS:
        values = {name: speed["engine_thread"][name][call] for name in NAMES}
        rows.append(_row(f"{call}, a call, us", {name: one["median_us"] for name, one in values.items()}))
        if call.startswith("submit"):
            rows.append(
                _row(f"{call}, a block, us", {name: one["us_per_block"] for name, one in values.items()})
            )
    sizes = {name: one["disk"] / one["kv"] for name, one in speed["bytes"].items()}
    return [*rows, _row("bytes on disk for one of KV", sizes, 3)]


def _trouble_rows(trouble: list[dict[str, dict[str, Any]]]) -> list[dict[str, str]]:
    def total(*path: str) -> dict[str, int]:
        return {name: sum(_at(one[name], path) for one in trouble) for name in NAMES}

    return [
        _row("killed: blocks reported as written", total("written"), 0),
        _row("  found after the restart", total("found"), 0),
        _row("  files of no use left", total("left_over", "files"), 0),
        _row("  blocks served with other bytes", total("after_kill", "blocks_with_other_bytes"), 0),
        _row("  wrong answers", total("after_kill", "wrong_answers"), 0),
        _row("one bit flipped in so many blocks", total("flipped"), 0),
        _row("  blocks served with other bytes", total("after_flips", "blocks_with_other_bytes"), 0),
        _row("  wrong answers", total("after_flips", "wrong_answers"), 0),
    ]


def parse() -> argparse.Namespace:
    parser = flags(
        __doc__,
        device=("cpu", "cpu or cuda"),
        python=(sys.executable, "of an environment with vLLM"),
        dir=("", "where both tiers write; default: a temporary folder"),
    )
    parser.add_argument("--tokens", type=lambda given: [int(part) for part in given.split(",")])
    parser.add_argument("--rounds", type=int, help="0: no times")
    parser.add_argument("--kills", type=int, help="0: no kills and no flips")
    parser.add_argument("--host-gib", type=float, help="of each vLLM's host memory")
    parser.add_argument("--ssd-gib", type=float, help="of Penstock's disk")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--log", type=Path, default=Path("vllm_disk.log"), help="what both vLLM write")
    args = parser.parse_args()
    size = SIZES[args.device]
    for name in ("tokens", "rounds", "kills", "host_gib", "ssd_gib"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(size, name))
    args.log = args.log.absolute()
    return args


def main() -> int:
    args = parse()
    folder = Path(tempfile.mkdtemp(prefix="vllm-disk-", dir=args.dir or None))
    try:
        bench = Bench(args, folder)
        speed = measure_speed(bench, args) if args.rounds else None
        trouble = [measure_trouble(bench, number) for number in range(args.kills)]
        found = {
            "machine": describe_machine(),
            "device": args.device,
            **bench.about,
            "rounds": args.rounds,
            "host_gib": args.host_gib,
            "speed": speed,
            "trouble": trouble,
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    write(args.json, found)
    columns = [("", "what"), ("Penstock", "penstock"), ("vLLM fs", "fs"), ("fs / Penstock", "ratio")]
    show_table(rows_of(found), [text(*column) for column in columns])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
