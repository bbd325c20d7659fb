"""What the wheels and sdists have in them. `make wheel-check` installs and runs them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    "penstock": (".", "src"),
    "penstock_valkey": ("stores/valkey", "penstock_valkey"),
    "penstock_s3": ("stores/s3", "penstock_s3"),
    "penstock_mooncake": ("stores/mooncake", "penstock_mooncake"),
    "penstock_heads": ("heads", "penstock_heads"),
}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from copies: nothing is written beside the sources, and nothing old is there."""
    folder = tmp_path_factory.mktemp("wheels")
    for name, (place, package) in SOURCES.items():
        copy = folder / "sources" / name
        left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / place / package, copy / package, ignore=left_out)
        for file in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / place / file, copy / file)
        kinds = ["--sdist", "--wheel"] if name == "penstock" else ["--wheel"]
        build = [sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", folder / "dist", copy]
        subprocess.run(build, check=True, capture_output=True)
    return folder / "dist"


def opened(dist: Path, name: str) -> zipfile.ZipFile:
    (path,) = dist.glob(f"{name}-*.whl")
    return zipfile.ZipFile(path)


def about(dist: Path, name: str) -> Message:
    with opened(dist, name) as wheel:
        (path,) = (path for path in wheel.namelist() if path.endswith(".dist-info/METADATA"))
        return message_from_string(wheel.read(path).decode())


def files_of(name: str) -> set[str]:
    place, package = SOURCES[name]
    root = ROOT / place / package
    base = root if package == "src" else root.parent
    found = {str(path.relative_to(base)) for path in root.rglob("*") if path.is_file()}
    return {path for path in found if "__pycache__" not in path and ".egg-info" not in path}


@pytest.mark.parametrize("name", SOURCES)
def test_a_wheel_has_every_file_of_its_package_and_no_other(dist: Path, name: str) -> None:
    """Data files among them, which setuptools leaves out unless they are named."""
    with opened(dist, name) as wheel:
        packed = {path for path in wheel.namelist() if ".dist-info/" not in path}
        assert packed == files_of(name)
        assert any(path.endswith(".dist-info/licenses/LICENSE") for path in wheel.namelist())


@pytest.mark.parametrize("name", SOURCES)
def test_metadata_says_version_license_python_and_what_it_is(dist: Path, name: str) -> None:
    found = about(dist, name)
    assert found["Version"] == penstock.__version__ and found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == ">=3.11" and found["Description-Content-Type"] == "text/markdown"
    assert found["Summary"] and str(found.get_payload()).startswith("# ")
    assert "Operating System :: POSIX :: Linux" in found.get_all("Classifier", [])


def test_the_extras_of_stores_and_heads_are_the_packages_that_are_built(dist: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        one.partition(";")[0] for extra in ("valkey", "s3", "mooncake", "heads") for one in extras[extra]
    }
    assert {one.replace("-", "_") for one in named} == set(SOURCES) - {"penstock"}


def test_entry_points_are_the_command_and_every_scheme(dist: Path) -> None:
    def entries(name: str) -> str:
        with opened(dist, name) as wheel:
            (path,) = (path for path in wheel.namelist() if path.endswith("entry_points.txt"))
            return wheel.read(path).decode()

    assert "penstock = penstock.cli:main" in entries("penstock")
    for name, scheme in (("valkey", "rediss"), ("s3", "s3"), ("mooncake", "mooncake")):
        assert f"{scheme} = penstock_{name}:open_store" in entries(f"penstock_{name}")


def test_the_sdist_has_what_the_wheel_is_made_of(dist: Path) -> None:
    (path,) = dist.glob("penstock-*.tar.gz")
    with tarfile.open(path) as sdist:
        found = {name.partition("/")[2] for name in sdist.getnames() if not name.endswith(".egg-info")}
    assert {
        "LICENSE",
        "README.md",
        "pyproject.toml",
        *(f"src/{one}" for one in files_of("penstock")),
    } <= found
    assert not {name for name in found if name.startswith(("tests", "docs", ".venv"))}
