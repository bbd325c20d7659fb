"""What four drafts of one request take, by the size of the vocabulary that a head guesses from. Engines
measure it when they warm up; here the shipped head is given vocabularies of other sizes, in turns. What each
size keeps is in docs/speculation.md.

python benchmarks/draft_vocab.py --sizes 4096,8192,16384,0 --rounds 5 --json bench_results/draft-vocab.json
python benchmarks/draft_vocab.py --device cuda --model PATH.gguf --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from pathlib import Path

import safetensors.torch
import torch

from penstock.config import Config, EngineConfig, KvConfig, ModelSource, OffloadConfig, SpeculationConfig
from penstock.engine.build import build
from penstock.speculation.mtp import CONFIG_FILE, TENSORS_FILE, installed_heads


def write_sized(directory: Path, size: int) -> None:
    """The shipped head over the first `size` tokens; 0: over all. Which ones they are makes no difference to
    the time."""
    shipped = installed_heads()[0]
    stated = json.loads((shipped / CONFIG_FILE).read_text()) | {"draft_vocab": size, "d2t_form": "absolute"}
    tensors = safetensors.torch.load_file(shipped / TENSORS_FILE)
    del tensors["d2t"]
    if size:
        tensors["d2t"] = torch.arange(size, dtype=torch.int32)
    directory.mkdir()
    safetensors.torch.save_file(tensors, directory / TENSORS_FILE)
    (directory / CONFIG_FILE).write_text(json.dumps(stated))


def drafting_s(args: argparse.Namespace, head: Path) -> float:
    """Seconds that making drafts behind a step takes."""
    source = ModelSource(args.model, device=args.device, weights=args.weights, dtype=args.dtype)
    speculation = SpeculationConfig(f"mtp:{head}", args.drafts)
    engine = build(
        Config(
            source,
            KvConfig(device_gib=0.5),
            EngineConfig(max_batch=2),
            OffloadConfig(enabled=False),
            speculation=speculation,
        )
    )
    try:
        engine.warm()
        assert engine.parts.speculation is not None
        return engine.parts.speculation._costs.making_s
    finally:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument(
        "--sizes", type=lambda text: [int(one) for one in text.split(",")], default=[4096, 8192, 16384, 0]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    times: dict[int, list[float]] = {size: [] for size in args.sizes}
    with tempfile.TemporaryDirectory() as name:
        for size in args.sizes:
            write_sized(Path(name) / str(size), size)
        for number in range(args.rounds):
            for size in args.sizes:
                times[size].append(drafting_s(args, Path(name) / str(size)))
                print(
                    f"round {number + 1}: {size or 'all'} tokens: {1e3 * times[size][-1]:.3f} ms", flush=True
                )
    for size, some in times.items():
        print(
            f"{size or 'all':>6}: {1e3 * statistics.median(some):.3f} ms ({1e3 * min(some):.3f} to "
            f"{1e3 * max(some):.3f})"
        )
    if args.json is not None:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        stored = {
            "machine": platform.processor() or platform.machine(),
            "settings": settings,
            "seconds": {str(size): some for size, some in times.items()},
        }
        args.json.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
