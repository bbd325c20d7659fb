"""The faults of `tools/faults.toml` still have their places in the source. `make mutants` tests them."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_kept_fault_has_one_place_and_tests_that_are_there() -> None:
    spec = importlib.util.spec_from_file_location("faults", ROOT / "tools" / "faults.py")
    assert spec is not None and spec.loader is not None
    sys.modules["faults"] = tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    wrong = []
    for fault in tool.read_faults(ROOT / "tools" / "faults.toml"):
        try:
            fault.change(ast.parse((ROOT / fault.file).read_text()))
        except (tool.DoesNotApply, OSError) as error:
            wrong.append(str(error))
        files = {test.partition("::")[0] for test in fault.tests}
        wrong += [f"{fault.name}: {file} is not there" for file in files if not (ROOT / file).exists()]
    assert wrong == []
