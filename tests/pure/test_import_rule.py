"""The import rule of the code base, checked on every file of src/penstock. Owns the rule's one executable
form; type-only and function-local imports count like any other."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src"
# packages whose __init__ is empty, so that it needs no place
WITHOUT_INIT = ("penstock.kv", "penstock.engine")

# A unit is a module or package with everything inside it. A layer may import the layers before it. Units that
# "+" joins are one; the others of a layer are siblings, which do not import each other.
LAYERS = (
    (
        "penstock + penstock.contract + penstock.config + penstock.cores + penstock.errors + "
        "penstock.figures + penstock.observe",
    ),
    (
        "penstock.lanes",
        "penstock.experts",
        "penstock.kv.blocks",
        "penstock.kv.memory",
        "penstock.models",
        "penstock.engine.scheduling",
    ),
    ("penstock.speculation", "penstock.text"),
    ("penstock.kv.transfer", "penstock.engine.execution"),
    ("penstock.kv.tiers",),
    (
        "penstock.kv.cache + penstock.kv.ledger + penstock.kv.table + penstock.kv.build + "
        "penstock.kv.questions + penstock.kv.rules + penstock.kv.snapshots + penstock.kv.events + "
        "penstock.kv.state_events + penstock.kv.states",
        "penstock.sanitizer",
        "penstock.trace",
    ),
    ("penstock.ranks",),
    (
        " + ".join(
            f"penstock.engine.{name}"
            for name in (
                "engine",
                "build",
                "follower",
                "adapters",
                "inbox",
                "outbox",
                "loop",
                "pace",
                "parts",
                "recurrent",
                "routed",
                "sizing",
                "sessions",
                "cache_calls",
                "stats",
                "turns",
            )
        ),
    ),
    ("penstock.server", "penstock.bench", "penstock.testing", "penstock.plugins"),
    (
        "penstock.flags + penstock.answer + penstock.progress + penstock.llm + penstock.installation + "
        "penstock.settings_file",
    ),
    ("penstock.cli + penstock.commands + penstock.__main__",),
)
# storage works without the engine, which asks its door
NEVER = {"penstock.kv": "penstock.engine", "penstock.engine": "penstock.kv.tiers"}
STORAGE = ("penstock.kv", "penstock.plugins")  # what plug-ins import, and the base
HOSTED = ("penstock.plugins.vllm", "penstock.plugins.sglang")  # import their engine; it is not installed here
ONLY = {"penstock.sanitizer": "penstock.sanitizer", "penstock.trace": "penstock.trace"}  # and the base
PURE_SPECULATION = tuple(f"penstock.speculation.{name}" for name in ("ngram", "length", "drafter"))
NO_TORCH = (
    *LAYERS[0][0].split(" + "),
    "penstock.kv.blocks",
    "penstock.engine.scheduling",
    "penstock.sanitizer",
    "penstock.trace",
    "penstock.text",
    "penstock.experts",
    "penstock.plugins",
    *PURE_SPECULATION,
)
TORCH_CUDA = (
    "penstock.lanes.cuda",
    "penstock.kv.memory",
    "penstock.kv.transfer",
    "penstock.engine.execution.attention",
    "penstock.engine.execution.replays",
)
WEB = (
    "starlette",
    "uvicorn",
    "msgspec",
    "zmq",
    "httpx",
    "anyio",
    "h11",
    "prometheus_client",
    "fastapi",
    "aiohttp",
    "requests",
)


class Import(NamedTuple):
    line: int
    target: str


# ------------------------------------------------------------------------------------------------ the checker


def inside(module: str, *packages: str) -> bool:
    """The top package is only itself: what lies in it has a place of its own or none."""
    return any(module == name or (name != "penstock" and module.startswith(name + ".")) for name in packages)


def place_of(module: str) -> tuple[int, str] | None:
    """Layer and unit; None: the module has no place yet."""
    for layer, units in enumerate(LAYERS):
        for unit in units:
            if inside(module, *unit.split(" + ")):
                return layer, unit
    return None


def imports_of(tree: ast.Module, module: str, is_package: bool = False) -> Iterator[Import]:
    """Every import, wherever it stands; also those that importlib does by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(node, module, is_package)
            yield from (Import(node.lineno, _target(origin, alias.name)) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "importlib.import_module",
            "import_module",
            "__import__",
        ):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield Import(node.lineno, first.value)


def _origin(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + is_package]
    return ".".join([*kept, node.module] if node.module else kept)


def _target(origin: str, name: str) -> str:
    """A name out of the top package is a module of it, or an attribute such as its version."""
    path = SOURCES / "penstock" / name
    if origin == "penstock" and not (
        path.is_dir() or path.with_suffix(".py").is_file() or place_of(f"penstock.{name}")
    ):
        return origin
    return f"{origin}.{name}"


def faults(source: str, module: str, is_package: bool = False) -> list[str]:
    """What the source of `module` does against the rule."""
    tree = ast.parse(source)
    found: list[str] = []
    if place_of(module) is None and not (module in WITHOUT_INIT and is_package and not tree.body):
        found.append(f"{module} has no place in the import rule")
    for line, target in imports_of(tree, module, is_package):
        top = target.partition(".")[0]
        reason = _own_fault(module, target) if top == "penstock" else _foreign_fault(module, target, top)
        if reason is not None:
            found.append(f"{module}:{line} imports {target}: {reason}")
    if not inside(module, *TORCH_CUDA):
        found += [f"{module}:{line} uses torch.cuda" for line in uses_of_torch_cuda(tree)]
    return found


def uses_of_torch_cuda(tree: ast.Module) -> Iterator[int]:
    """Lines that reach it as an attribute, or by asking torch for it; imports of it are seen as imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.cuda", "torch.get_device_module"):
            yield node.lineno


def _foreign_fault(module: str, target: str, top: str) -> str | None:
    if top == "torch" and inside(module, *NO_TORCH):
        return "this module stays free of torch"
    if inside(target, "torch.cuda") and not inside(module, *TORCH_CUDA):
        return "torch.cuda is for the CUDA lane, arenas, copies, attention backends and replays"
    if top in WEB and not inside(module, "penstock.server"):
        return "web packages are for the server"
    return None


def _own_fault(module: str, target: str) -> str | None:
    here, there = place_of(module), place_of(target)
    if (module, target) == ("penstock", "penstock.llm") or (
        module == "penstock" and target.startswith("penstock.llm.")
    ):
        return None  # what users import from the package; loaded when it is asked for
    if any(inside(module, unit) and inside(target, other) for unit, other in NEVER.items()):
        return "storage does not know the engine"
    if here == there:
        return None
    if inside(module, "penstock.plugins") and there is not None and there[0] and not inside(target, *STORAGE):
        return "plug-ins import storage only"
    if here is None or there is None:
        return "one of the two has no place in the import rule"
    if any(
        inside(module, unit) and there[0] > 0 and not inside(target, other) for unit, other in ONLY.items()
    ):
        return "this unit may not import that"
    if there[0] == here[0]:
        return "siblings do not import each other"
    return "it lies above" if there[0] > here[0] else None


# ---------------------------------------------------------------------------------------------- the code base


def modules() -> list[tuple[Path, str, bool]]:
    found = []
    for path in sorted((SOURCES / "penstock").rglob("*.py")):
        parts = path.relative_to(SOURCES).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        found.append((path, ".".join(parts[:-1] if is_package else parts), is_package))
    return found


def test_every_file_keeps_the_import_rule() -> None:
    found = [
        fault
        for path, module, is_package in modules()
        for fault in faults(path.read_text(), module, is_package)
    ]
    assert not found, "\n" + "\n".join(found)


def test_the_rule_is_tried_on_the_whole_tree() -> None:
    names = {module for _, module, _ in modules()}
    assert {
        "penstock.kv.blocks.pool",
        "penstock.engine.engine",
        "penstock.lanes.cuda",
        "penstock.server.app",
    } <= names


def test_every_package_that_is_imported_is_declared() -> None:
    """The core runs on the core dependencies; only the server needs the server's, and what is for tests those
    of tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    core = _names(project["dependencies"]) | {"penstock"}
    optional = _names(extras["gpu"]) | _names(extras["plots"]) | _names(extras["structured"])
    found = []
    for path, module, is_package in modules():
        allowed = core | optional | (_names(extras["server"]) if inside(module, "penstock.server") else set())
        allowed |= {"opentelemetry"} if inside(module, "penstock.server.tracing") else set()  # the extra otel
        allowed |= {"zmq"} if inside(module, "penstock.server.kv_events") else set()  # the extra events
        allowed |= _names(extras["hub"]) if inside(module, "penstock.models.hub") else set()
        allowed |= _names(extras["dev"]) if inside(module, "penstock.testing") else set()
        allowed |= {"vllm", "sglang", "huggingface_hub"} if inside(module, "penstock.plugins") else set()
        for line, target in imports_of(ast.parse(path.read_text()), module, is_package):
            top = target.partition(".")[0]
            if top not in allowed and top not in sys.stdlib_module_names:
                found.append(f"{module}:{line} imports {top}, which pyproject.toml does not declare for it")
    assert not found, "\n" + "\n".join(found)


def test_stores_import_the_interface_of_stores_and_what_they_declare() -> None:
    ours = {"penstock.errors", "penstock.kv.tiers.remote", "penstock.kv.tiers.store"}
    theirs = {"mooncake-transfer-engine-non-cuda": "mooncake"}  # which is not what its package is called
    for store in sorted((ROOT / "stores").iterdir()):
        project = tomllib.loads((store / "pyproject.toml").read_text())["project"]
        allowed = {theirs.get(name, name) for name in _names(project["dependencies"])} - {"penstock"}
        package = f"penstock_{store.name}"
        for path in sorted((store / package).glob("*.py")):
            for line, target in imports_of(ast.parse(path.read_text()), package, True):
                top = target.partition(".")[0]
                known = top in allowed | {package} or top in sys.stdlib_module_names
                fine = known or target in ours or target.rpartition(".")[0] in ours or top == "numpy"
                assert fine, f"{path}:{line} imports {target}"


def _names(requirements: list[str]) -> set[str]:
    return {
        requirement.split(">")[0].split("=")[0].split("[")[0].strip().replace("-", "_")
        for requirement in requirements
    }


def test_the_layers_without_torch_do_not_bring_it_in_through_others() -> None:
    wanted = [module for _, module, _ in modules() if inside(module, *NO_TORCH) and module not in HOSTED]
    code = (
        f"import importlib, sys\nfor name in {wanted!r}: importlib.import_module(name)\nsys.exit('torch' in "
        "sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert len(wanted) > 10
    assert done.returncode == 0, done.stderr or "torch was imported"


# ------------------------------------------------------------------------------------- the checker can say no

REFUSED = {
    "a lower layer imports a higher one": ("penstock.lanes.cpu", "from penstock.kv.transfer import Mover"),
    "siblings import each other": ("penstock.models.llama", "import penstock.lanes.lane"),
    "siblings of the front import each other": (
        "penstock.bench.run",
        "from penstock.server.app import make_app",
    ),
    "storage imports the engine from above": (
        "penstock.kv.cache",
        "from penstock.engine.scheduling.budget import blocks_for",
    ),
    "storage imports the engine": ("penstock.kv.tiers.host", "from penstock.engine import engine"),
    "what is observed imports its observer": (
        "penstock.lanes.cpu",
        "from penstock.sanitizer.detector import Detector",
    ),
    "the observer imports what it observes": (
        "penstock.sanitizer.detector",
        "from penstock.lanes.lane import Lane",
    ),
    "a plug-in imports the engine": ("penstock.plugins.tiers", "from penstock.engine.engine import Engine"),
    "a plug-in imports what lies below storage": (
        "penstock.plugins.tiers",
        "from penstock.lanes.cpu import CpuLane",
    ),
    "a plug-in imports torch": ("penstock.plugins.vllm", "import torch"),
    "the engine imports the front": ("penstock.engine.loop", "from penstock.server.service import Service"),
    "the engine imports test tools": ("penstock.engine.build", "from penstock.testing import faults"),
    "torch in the pool": ("penstock.kv.blocks.pool", "import torch"),
    "torch in the scheduler": ("penstock.engine.scheduling.scheduler", "from torch import Tensor"),
    "torch in the base": ("penstock.contract", "import torch.nn.functional as F"),
    "torch.cuda in the engine, used": (
        "penstock.engine.build",
        "import torch\nok = torch.cuda.is_available()",
    ),
    "torch.cuda in the engine, asked for": (
        "penstock.engine.build",
        "import torch\nm = torch.get_device_module('cuda')",
    ),
    "torch.cuda in the engine, imported": ("penstock.engine.build", "from torch import cuda"),
    "torch.cuda in a model, imported": ("penstock.models.layers", "from torch.cuda import Stream"),
    "a web package in the engine": ("penstock.engine.loop", "import starlette.requests"),
    "a web package in a command": ("penstock.commands.serve", "import uvicorn"),
    "a type-only import": (
        "penstock.lanes.cpu",
        "if TYPE_CHECKING:\n    from penstock.engine.engine import Engine",
    ),
    "a function-local import": ("penstock.kv.blocks.pool", "def f():\n    import torch"),
    "an import by name": ("penstock.kv.blocks.pool", "import importlib\nimportlib.import_module('torch')"),
    "a relative import": ("penstock.lanes.cpu", "from ..kv.cache import KvCache"),
    "a module out of its package": ("penstock.lanes.cpu", "from penstock.kv import cache"),
    "a module without a place": ("penstock.misc", ""),
    "an import of a module without a place": ("penstock.cli", "import penstock.misc"),
    "code in a package that only holds others": (
        "penstock.engine",
        "from penstock.engine.engine import Engine",
    ),
}
ALLOWED = {
    "downwards": (
        "penstock.engine.execution.executor",
        "from penstock.lanes.lane import Lane\nfrom penstock.kv.memory import BlockLayout",
    ),
    "the base": (
        "penstock.kv.blocks.pool",
        "from penstock.errors import Leaked\nfrom penstock import __version__",
    ),
    "within one unit": ("penstock.engine.loop", "from penstock.engine.engine import Engine"),
    "within one package, relatively": ("penstock.kv.blocks.pool", "from .slots import SlotBook"),
    "the composition root takes the observer": (
        "penstock.engine.build",
        "from penstock.sanitizer.detector import Detector",
    ),
    "torch.cuda on the CUDA lane": ("penstock.lanes.cuda", "import torch\ntorch.cuda.Stream()"),
    "web packages in the server": (
        "penstock.server.app",
        "import msgspec\nfrom starlette.routing import Route",
    ),
    "the command line and the front": (
        "penstock.commands.serve",
        "from penstock.server.run import serve\nimport penstock.bench.decode",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_checker_refuses(case: str) -> None:
    module, source = REFUSED[case]
    assert faults(source, module, is_package=module in WITHOUT_INIT)


@pytest.mark.parametrize("case", ALLOWED)
def test_the_checker_allows(case: str) -> None:
    module, source = ALLOWED[case]
    assert faults(source, module) == []
