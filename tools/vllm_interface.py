"""Reads what the plug-in uses of vLLM out of an unpacked vLLM, without importing it, and writes or compares
the record that the tests have: `vllm_interface.py VERSION=FOLDER ... [--write]`. Owns the record's form."""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORD = Path(__file__).resolve().parents[1] / "tests" / "data" / "vllm-tiers.json"
JOBS = ("TransferJob", "JobMetadata")  # one class, under its newer and its older name
# attributes of the configuration that decide what a block's bytes mean
CONFIGS = {
    kind: names.split()
    for kind, names in {
        "model": "model hf_config dtype quantization max_model_len disable_sliding_window seed revision "
        "override_attention_dtype",
        "cache": "cache_dtype calculate_kv_scales kv_cache_layout prefix_caching_hash_algo",
        "parallel": "tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size "
        "decode_context_parallel_size world_size cp_kv_cache_interleave_size data_parallel_index",
        "attention": "backend",
        "load": "load_format download_dir",
        "vllm": "attention_config lora_config speculative_config use_v2_model_runner",
    }.items()
}


def interface_of(package: Path) -> dict[str, Any]:
    """`package` is the folder `vllm`."""
    tiering = _classes(package / "v1/kv_offload/tiering/base.py")
    base = _classes(package / "v1/kv_offload/base.py")
    tier = tiering["SecondaryTierManager"]
    job = next(tiering[name] for name in JOBS if name in tiering)
    return {
        "job": [job.name, _fields(job)],
        "result": _fields(tiering["JobResult"]),
        "lookup": _fields(base["LookupResult"]),
        "media": _fields(base["Medium"]) if "Medium" in base else None,
        "methods": {one.name: _parameters(one) for one in _functions(tier)},
        "abstract": sorted(
            one.name
            for one in _functions(tier)
            if any(ast.unparse(mark) == "abstractmethod" for mark in one.decorator_list)
        ),
        "fixed_seed": "resolve_none_hash_seed" in (package / "v1/core/kv_cache_utils.py").read_text(),
        "configs": {
            kind: [name for name in names if name in _names(package / f"config/{kind}.py")]
            for kind, names in CONFIGS.items()
        },
    }


def _classes(path: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(path.read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _functions(of: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    return (node for node in of.body if isinstance(node, ast.FunctionDef))


def _fields(of: ast.ClassDef) -> list[str]:
    """Of a dataclass, or the members of an enum."""
    found = [node.target for node in of.body if isinstance(node, ast.AnnAssign)]
    found += [target for node in of.body if isinstance(node, ast.Assign) for target in node.targets]  # type: ignore[misc]
    return [one.id for one in found if isinstance(one, ast.Name)]


def _parameters(of: ast.FunctionDef) -> list[str]:
    return [one.arg for one in of.args.args if one.arg not in ("self", "cls")]


def _names(path: Path) -> set[str]:
    """What the classes of a file declare."""
    found = set()
    for one in _classes(path).values():
        found |= set(_fields(one)) | {function.name for function in _functions(one)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="+", metavar="VERSION=FOLDER")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    differing = []
    for one in given.versions:
        version, _, folder = one.partition("=")
        found = interface_of(Path(folder))
        differing += [version] if record.get(version) != found else []
        record[version] = found
    if given.write:
        lines = ",\n".join(f"{json.dumps(one)}: {json.dumps(record[one])}" for one in sorted(record))
        RECORD.write_text(f"{{\n{lines}\n}}\n")
    elif differing:
        print(f"{RECORD} is not what vLLM {', '.join(differing)} has: run this with --write", file=sys.stderr)
    return int(bool(differing) and not given.write)


if __name__ == "__main__":
    sys.exit(main())
