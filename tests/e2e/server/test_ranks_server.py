"""`penstock serve --tensor-parallel 2`: if a rank is killed, the client gets an error, the server ends with a
message, and nothing is left."""

from __future__ import annotations

import httpx
import psutil

from penstock.ranks.start import FOLLOWER
from tests.e2e.server.test_processes import DEADLINE_S, LONG, SHORT, running

RANKS = (
    *("--model", "tiny-llama", "--load-format", "dummy", "--device", "cpu", "--weights", "float32"),
    *("--device-kv-gib", "0.1", "--max-model-len", "60000", "--max-batch", "8", "--tensor-parallel", "2"),
)


def test_a_killed_rank_ends_the_server_with_its_name() -> None:
    with running(*RANKS) as server, httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client:
        assert client.post("/v1/completions", json=SHORT).status_code == 200
        (rank,) = (
            child
            for child in psutil.Process(server.process.pid).children(recursive=True)
            if child.status() != psutil.STATUS_ZOMBIE and FOLLOWER in child.cmdline()
        )
        with client.stream("POST", "/v1/completions", json=LONG) as stream:
            lines = stream.iter_lines()
            assert next(lines)
            rank.kill()
            rest = "".join(lines)  # it ends
        assert f"rank 1 (process {rank.pid}) was ended by SIGKILL" in rest
        assert server.process.wait(DEADLINE_S) == 1
        assert "was ended by SIGKILL" in server.log()
