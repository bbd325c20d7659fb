"""Installs the routers that the tests of this folder run, each in an environment of its own under .routers,
and Valkey. Needs a network; later runs find all of it there."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ROUTERS = {"dynamo": "ai-dynamo-runtime==1.6.1", "vllm-router": "vllm-router==0.1.16"}
HOME = Path(__file__).resolve().parents[2] / ".routers"


def main() -> None:
    from tests.support.servers import find_program

    print("Valkey", find_program("valkey", ("valkey-server", "redis-server")).path, flush=True)
    for number, (name, package) in enumerate(ROUTERS.items(), 1):
        home = HOME / name
        wanted, mark = f"{package}\n", home / "installed"
        if mark.exists() and mark.read_text() == wanted:
            continue
        print(f"{number} of {len(ROUTERS)}: installing {package} in {home}", flush=True)
        venv.create(home, clear=True, with_pip=True)
        subprocess.run([home / "bin" / "pip", "install", "--quiet", package], check=True)
        mark.write_text(wanted)


if __name__ == "__main__":
    sys.exit(main())
