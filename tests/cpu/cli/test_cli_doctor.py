"""`doctor`: what is fine, what is missing, what is broken, and the exit code that goes with it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from penstock.commands import doctor
from penstock.config import GIB, Config, EngineConfig, KvConfig, ModelSource
from penstock.errors import ModelError
from penstock.models import loader
from penstock.models.hashed_file import WeightFile
from penstock.models.registry import layout
from penstock.models.rotary import RopeScaling
from penstock.testing.tiny_models import TINY_LLAMA, config_json, tiny_tensors, write_tiny_model
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.fixture
def examine(penstock, tmp_path):
    """The exit code, and the checks as they are written into the file, by name; all are shown."""

    def run(flags: str, code: int) -> dict[str, dict[str, str]]:
        file = tmp_path / "doctor.json"
        ran = penstock(f"doctor {flags} --json {file}")
        checks = {check["name"]: check for check in json.loads(file.read_text())["checks"]}
        assert ran.code == code == int(any(check["status"] == "fail" for check in checks.values())), ran.out
        assert all(name in ran.out for name in checks)
        return checks

    return run


TINY = "--model tiny-llama --device cpu"


def test_a_machine_that_can_run_it_gets_a_zero_and_a_file(examine):
    checks = examine(TINY, 0)
    first = [
        "penstock",
        "python",
        "torch",
        "threads",
        "device",
        "memory",
        "model",
        "weights",
        "KV",
        "cache folder",
    ]
    assert list(checks) == [*first, *doctor.OPTIONAL, "generation"]
    assert checks["generation"]["status"] == "ok"
    assert "32 prompt tokens reused" in checks["generation"]["detail"]
    assert checks["python"]["hint"] == "" and "dummy" in checks["weights"]["hint"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_beside_busy_processes_there_are_fewer_threads_than_cores(tmp_path):
    """A process of its own: torch reads the number of threads that the environment has when it is
    imported."""
    fixed = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in fixed}
    cores = sorted(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in cores]
    file = tmp_path / "doctor.json"
    try:
        argv = [sys.executable, *f"-m penstock doctor {TINY} --json {file}".split()]
        subprocess.run(argv, env=environment, capture_output=True, timeout=300, check=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    (detail,) = (one["detail"] for one in json.loads(file.read_text())["checks"] if one["name"] == "threads")
    assert int(detail.split()[0]) < len(cores) and f"{len(cores)} cores, others use" in detail


def test_a_missing_model_and_an_unwritable_cache_fail_with_hints(examine, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file" / "cache"))
    checks = examine("--model /no/model --device cpu", 1)
    assert (checks["model"]["status"], checks["cache folder"]["status"]) == ("fail", "fail")
    assert "tiny-llama" in checks["model"]["hint"] and "PENSTOCK_CACHE" in checks["cache folder"]["hint"]


def test_missing_optional_packages_and_an_embedded_model_that_is_missing_are_warnings(examine, monkeypatch):
    def missing():
        raise ModelError("they are not in this package")

    monkeypatch.setattr(doctor, "installed_version", lambda package: None)
    monkeypatch.setattr(loader, "embedded_file", missing)
    checks = examine("--device cpu", 0)
    for package, hint in (("gguf", "install gguf"), ("uvicorn", "[server]"), ("matplotlib", "[plots]")):
        assert checks[package]["status"] == "warn" and hint in checks[package]["hint"]
    assert (checks["model"]["status"], checks["model"]["detail"]) == ("warn", "they are not in this package")


def test_cuda_that_is_not_there_is_a_failure(examine, monkeypatch):
    monkeypatch.setattr(doctor, "describe_gpus", list)
    monkeypatch.setattr("penstock.lanes.cuda.is_usable", lambda: False)
    checks = examine("--model tiny-llama --device cuda", 1)
    assert checks["device"]["status"] == checks["generation"]["status"] == "fail"
    assert (
        "no usable NVIDIA GPU" in checks["generation"]["detail"] and "--json" in checks["generation"]["hint"]
    )


# ---------------------------------------------------------------------------------------- a model by its path


def model_checks(config: Config) -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor._model(config)}


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read of a file of weights."""
    reads: list[int] = []
    whole = WeightFile.read_into

    def read_into(self: WeightFile, room: memoryview, start: int) -> None:
        reads.append(len(room))
        whole(self, room, start)

    monkeypatch.setattr(WeightFile, "read_into", read_into)
    return reads


QWEN2 = dataclasses.replace(
    TINY_LLAMA,
    architecture="qwen2",
    qkv_bias=True,
    windows=(0, 40),
    rope_scaling=RopeScaling("yarn", 4.0, 2048, 1.1, 32.0, 1.0),
    max_position=8192,
)


@pytest.mark.parametrize("kind", ["directory", "sharded", "gguf"])
def test_a_model_is_judged_by_its_headers_alone(kind, tmp_path, monkeypatch):
    config = dataclasses.replace(QWEN2, windows=()) if kind == "gguf" else QWEN2
    if kind == "gguf":
        path = write_tiny_gguf(tmp_path / "model.gguf", config)
    else:
        path = write_tiny_model(tmp_path / "model", config, shards=3 if kind == "sharded" else 1)
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    reads = counted_reads(monkeypatch)
    checks = model_checks(Config(ModelSource(str(path), device="cpu"), KvConfig(device_gib=0.5)))
    parameters = sum(weight.numel for weight in layout(config))
    assert 0 < sum(reads) < sum(file.stat().st_size for file in files) - 4 * parameters + 64
    assert [check.status for check in checks.values()] == ["ok"] * 3, checks
    assert (
        "qwen2, 2 layers, 4 heads over 2 for KV, width 64, context 8192, yarn positions up to 8192"
    ) in checks["model"].detail
    assert ("a window of 40 in 1 layers" in checks["model"].detail) == (kind != "gguf")
    assert (
        f"{parameters / 1e6:.1f} million parameters, {4 * parameters / GIB:.2f} GiB in float32"
    ) in checks["weights"].detail
    assert (
        "512 bytes per token in float32, 2097152 tokens per GiB; 0.50 GiB (--device-kv-gib) hold 1048576 "
        "tokens"
    ) in checks["KV"].detail


def test_a_model_that_would_not_load_fails_for_the_reason_that_a_load_gives(tmp_path):
    path = write_tiny_model(tmp_path / "model")
    tensors = tiny_tensors(TINY_LLAMA)
    tensors.pop("model.norm.weight")
    write_tiny_model(path, tensors=tensors)
    checks = model_checks(Config(ModelSource(str(path), device="cpu")))
    assert checks["model"].status == "fail"
    assert "missing tensors: model.norm.weight" in checks["model"].detail
    write_tiny_model(path)
    (path / "config.json").write_text(json.dumps({**config_json(TINY_LLAMA), "hidden_act": "gelu"}))
    checks = model_checks(Config(ModelSource(str(path), device="cpu")))
    assert set(checks) == {"model"} and "hidden_act 'gelu'" in checks["model"].detail


def test_4_bits_are_shown_where_the_file_has_them_and_fail_where_it_does_not(tmp_path):
    path = write_tiny_gguf(
        tmp_path / "four.gguf", encoding_of=lambda name: "Q4_0" if ".layers." in name else "Q8_0"
    )
    four, eight = (
        model_checks(Config(ModelSource(str(path), device="cpu", weights=weights)))
        for weights in ("int4", "int8")
    )
    assert "in int4 for up to 8 rows and int8 for up to 8 rows, bfloat16 for more" in four["weights"].detail
    assert "in int8 for up to 8 rows, bfloat16 for more" in eight["weights"].detail
    plain = write_tiny_model(tmp_path / "plain")
    failed = model_checks(Config(ModelSource(str(plain), device="cpu", weights="int4")))["weights"]
    assert failed.status == "fail"
    assert "needs a GGUF file with matrices in Q4_0, Q4_1 or Q4_K" in failed.detail


@pytest.mark.parametrize(
    ("free_gib", "given_gib", "max_model_len", "weights", "kv"),
    [
        (2.0, None, None, "fail", "fail"),  # 2.22 GiB of weights
        (8.0, None, None, "ok", "warn"),  # 1 GiB is no whole context
        (32.0, 9.0, None, "ok", "ok"),
        (8.0, 9.0, None, "ok", "fail"),
        (8.0, None, 4096, "ok", "ok"),
        (8.0, None, 4672, "ok", "ok"),  # just what 1 GiB holds
        (8.0, None, 4673, "ok", "warn"),
        (8.0, None, 40961, "ok", "fail"),
    ],
)
def test_sizes_are_held_against_what_is_free(monkeypatch, free_gib, given_gib, max_model_len, weights, kv):
    monkeypatch.setattr(doctor, "_free_bytes", lambda device: free_gib * GIB)
    config = Config(
        ModelSource("qwen3-0.6b", device="cpu"), KvConfig(device_gib=given_gib), EngineConfig(max_model_len)
    )
    checks = model_checks(config)
    assert (checks["weights"].status, checks["KV"].status) == (weights, kv)
