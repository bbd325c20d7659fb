"""The tier under the real manager of tiers of an old and a new vLLM, without a model, and the recorded
interface beside both: `make plugins`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.environments import OLD_VLLM, ROOT, VLLM, packages_of, python_of
from tests.store_servers import valkey_or_skip
from tests.support.servers import Valkey

pytestmark = pytest.mark.skipif(
    not python_of(VLLM).exists(), reason="NO VLLM IS INSTALLED HERE: make plugins installs it"
)


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with valkey_or_skip() as server:
        yield server


_CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}


def run(package: str, folder: Path, url: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "tests" / "plugins" / "inside" / "drive_manager.py"
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [python_of(package), script, folder, url],
        env={**_CLEAN, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("package", [VLLM, OLD_VLLM])
def test_blocks_go_through_vllms_own_manager(package: str, tmp_path: Path, valkey: Valkey) -> None:
    valkey.ask("FLUSHALL")
    done = run(package, tmp_path, valkey.url(), PYTHONHASHSEED="0")
    assert done.returncode == 0, done.stderr
    version = package.partition("==")[2]
    assert f"evicted blocks return {version}" in done.stdout
    assert "other weights find nothing" in done.stdout
    assert "another server finds them in the store" in done.stdout


def test_an_old_vllm_without_a_hash_seed_is_refused(tmp_path: Path, valkey: Valkey) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    assert "PYTHONHASHSEED" not in environment
    done = run(OLD_VLLM, tmp_path, valkey.url())
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith(
        "penstock.errors.ConfigError: penstock: vLLM's block hashes"
    )


def test_the_recorded_interface_is_that_of_the_installed_versions() -> None:
    given = [f"{one.partition('==')[2]}={packages_of(one) / 'vllm'}" for one in (VLLM, OLD_VLLM)]
    tool = ROOT / "tools" / "vllm_interface.py"
    done = subprocess.run([sys.executable, tool, *given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
