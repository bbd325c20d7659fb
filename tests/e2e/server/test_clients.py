"""The clients that install quickly, run as `make clients` runs them, against a server with the embedded
model."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("clients_run", ROOT / "tools" / "clients" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


run = load()


@pytest.mark.parametrize(
    ("name", "package", "script"),
    [("openai 3", "openai", "openai_sdk.py"), ("anthropic", "anthropic", "anthropic_sdk.py")],
)
def test_a_client_does_all_that_its_script_tries_and_what_the_page_shows(
    server_url: str, tmp_path: Path, name: str, package: str, script: str
) -> None:
    pytest.importorskip(package, reason="it is in the dev extra")
    path = os.pathsep.join([str(run.HERE), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        "PENSTOCK_URL": server_url,
        "PENSTOCK_MODEL": "smollm2-135m",
        "PYTHONPATH": path,
    }
    checks = run.ran([sys.executable, str(run.HERE / script)], tmp_path, environment)
    assert len(checks) >= 6 and [check for check in checks if not check["ok"]] == []
    (example,) = run.examples_of(name)
    source = tmp_path / "example.py"
    source.write_text(example.replace("http://127.0.0.1:8000", server_url))
    made = subprocess.run([sys.executable, str(source)], env=environment, capture_output=True, text=True)
    assert made.returncode == 0 and made.stdout.strip(), made.stderr


def test_every_client_has_a_section_and_every_section_a_client() -> None:
    page = run.EXAMPLES.read_text()
    sections = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert sorted(sections) == sorted(client.name for client in run.CLIENTS)
    assert all((run.HERE / client.script).is_file() for client in run.CLIENTS)
