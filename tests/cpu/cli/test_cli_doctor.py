"""`doctor`: what is fine, what is missing, what is broken, and the exit code that goes with it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from penstock.commands import doctor
from penstock.config import GIB


def _checks(file) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(file.read_text())["checks"]}


def test_a_machine_that_can_run_it_gets_a_zero_and_a_file(penstock, tmp_path):
    file = tmp_path / "doctor.json"
    ran = penstock("doctor", "--model", "tiny-llama", "--device", "cpu", "--json", str(file))
    assert ran.code == 0, ran.out
    checks = _checks(file)
    assert {"python", "torch", "device", "memory", "weights", "cache folder", "generation"} <= set(checks)
    assert checks["generation"]["status"] == "ok" and "32 prompt tokens reused" in checks["generation"]["detail"]
    assert all(name in ran.out for name in checks)
    assert checks["python"]["hint"] == ""


def test_a_missing_model_and_an_unwritable_cache_fail_with_hints(penstock, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file" / "cache"))
    file = tmp_path / "doctor.json"
    assert penstock("doctor", "--model", "/no/model", "--device", "cpu", "--json", str(file)).code == 1
    checks = _checks(file)
    assert (checks["weights"]["status"], checks["cache folder"]["status"]) == ("fail", "fail")
    assert "tiny-llama" in checks["weights"]["hint"] and "PENSTOCK_CACHE" in checks["cache folder"]["hint"]


@pytest.mark.parametrize(
    ("missing", "hint"), [("gguf", "pip install gguf"), ("uvicorn", "penstock[server]"), ("matplotlib", "penstock[plots]")]
)
def test_a_missing_optional_package_is_a_warning_that_says_what_it_is_for(monkeypatch, missing, hint):
    monkeypatch.setattr(doctor, "installed_version", lambda package: None if package == missing else "1.0")
    check = doctor._optional(missing, doctor.OPTIONAL[missing])
    assert check.status is doctor.Status.WARN and hint in check.hint


def test_an_old_python_is_a_failure(monkeypatch):
    monkeypatch.setattr(doctor.sys, "version_info", (3, 10, 9))
    assert doctor._python().status is doctor.Status.FAIL


def test_cuda_that_is_not_there_is_a_failure(penstock, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "describe_gpus", list)
    monkeypatch.setattr("penstock.lanes.cuda.is_usable", lambda: False)
    file = tmp_path / "doctor.json"
    assert penstock("doctor", "--model", "tiny-llama", "--device", "cuda", "--json", str(file)).code == 1
    checks = _checks(file)
    assert checks["device"]["status"] == checks["generation"]["status"] == "fail"
    assert "no usable NVIDIA GPU" in checks["generation"]["detail"]


def test_a_cache_that_never_matches_is_found_by_the_generation(monkeypatch):
    monkeypatch.setattr("penstock.kv.blocks.pool.BlockPool.find", lambda self, keys, like=None: [])
    assert doctor._tiny_generation("cpu").status is doctor.Status.FAIL


@pytest.mark.parametrize(("available_gib", "status"), [(1.9, "warn"), (2.0, "ok"), (200.0, "ok")])
def test_little_memory_is_a_warning_that_says_what_to_do(monkeypatch, available_gib, status):
    memory = SimpleNamespace(available=int(available_gib * GIB), total=256 * GIB)
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: memory)
    check = doctor._memory()
    assert check.status == status and bool(check.hint) == (status == "warn")
    assert check.detail == f"{available_gib:.1f} of 256.0 GiB available"
