"""What the tests of the page need: Playwright, axe-core and TypeScript under .page, and Chromium. Needs a
network; later runs find all of it there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.servers import Program, find_program

HOME = Path(__file__).resolve().parents[2] / ".page"
PACKAGES = {"playwright": "playwright==1.65.0"}
MODULES = {"axe-core": "axe-core@4.14.1", "typescript": "typescript@7.0.2"}


def chromium() -> Program:
    """The browser itself, not the script that starts it, which looks for settings of the system."""
    found = find_program("chromium", ("chromium",))
    folder = found.path.resolve().parent
    itself = folder.parent / "lib" / "chromium" / "chromium"
    return Program(itself, found.library_dirs) if itself.exists() else found


def main() -> None:
    print("Chromium", chromium().path, flush=True)
    wanted, mark = f"{PACKAGES} {MODULES}\n", HOME / "installed"
    if mark.exists() and mark.read_text() == wanted:
        return
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir()
    print(f"installing {', '.join((*PACKAGES, *MODULES))} in {HOME}", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(HOME / "packages")]
    subprocess.run([*pip, *PACKAGES.values()], check=True)
    npm = ["npm", "install", "--prefix", str(HOME), "--silent", "--no-audit", "--no-fund", "--save-exact"]
    subprocess.run([*npm, *MODULES.values()], check=True)
    mark.write_text(wanted)


if __name__ == "__main__":
    sys.exit(main())
