"""Prometheus' promtool on what GET /metrics says, and on the alert rules."""

import os
import subprocess
import urllib.request
from pathlib import Path

from checks import URL, check

with check("check metrics"):
    exposition = urllib.request.urlopen(f"{URL}/metrics").read()
    made = subprocess.run(["promtool", "check", "metrics"], input=exposition, capture_output=True)
    lines = (made.stdout + made.stderr).decode().splitlines()
    # vLLM's names have a colon in them, which is what makes them of use to its dashboards.
    wrong = [line for line in lines if line and not line.startswith("vllm:")]
    assert not wrong, wrong
with check("check rules"):
    rules = Path(os.environ["PENSTOCK_ROOT"]) / "deploy" / "alerts.yml"
    made = subprocess.run(["promtool", "check", "rules", str(rules)], capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
