"""aiperf: a short benchmark of each of its endpoint types that is served here, streamed."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, URL, check

for kind in ("chat", "completions", "responses", "messages"):
    with check(f"{kind}, streamed"):
        folder = Path(tempfile.mkdtemp())
        command = [
            str(Path(sys.executable).parent / "aiperf"),
            "profile",
            "--model",
            MODEL,
            "--url",
            URL,
            "--endpoint-type",
            kind,
        ]
        command += [
            "--streaming",
            "--request-count",
            "3",
            "--concurrency",
            "2",
            "--tokenizer",
            os.environ["PENSTOCK_TOKENIZER"],
        ]
        command += [
            "--synthetic-input-tokens-mean",
            "32",
            "--output-tokens-mean",
            "8",
            "--ui",
            "none",
            "--artifact-dir",
            str(folder),
        ]
        made = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        assert made.returncode == 0, made.stdout[-600:] + made.stderr[-600:]
        found = json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text())
        assert found["request_count"]["avg"] == 3 and not found.get("error_request_count"), found.get(
            "error_request_count"
        )
