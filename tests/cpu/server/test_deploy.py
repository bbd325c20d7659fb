"""What the documents and the files for operators say is what the server has: fields, metrics and flags."""

from __future__ import annotations

import configparser
import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from penstock import cli
from penstock.server.metrics import exposition
from penstock.server.routes import OPEN_PATHS
from penstock.server.seats import RequestFigures
from penstock.settings_file import take_in
from tests.cpu.server.test_metrics import STATS, Fixed

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
METRIC = re.compile(r"\b(?:penstock_|process_|python_|vllm:)[a-z0-9_]+")


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compatibility", ROOT / "tools" / "compatibility.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exposed() -> set[str]:
    """Every name that a scrape of a full engine has, suffixes of histograms included."""
    engine: Any = Fixed(STATS)
    figures = RequestFigures()
    figures.by_status["/x", "200"] = figures.by_finish["stop"] = 1
    families = text_string_to_metric_families(exposition(engine.stats(), figures, "m", 1).decode())
    return {sample.name for family in families for sample in family.samples}


def test_the_page_on_compatibility_is_what_the_parser_takes() -> None:
    """`PYTHONPATH=src python3 tools/compatibility.py --write` brings it up to date."""
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert tool().with_tables(page) == page


@pytest.mark.parametrize("file", ["grafana.json", "alerts.yml"])
def test_every_metric_of_the_board_and_the_alerts_exists(file: str) -> None:
    named = set(METRIC.findall((DEPLOY / file).read_text()))
    assert len(named) >= 6
    assert named <= exposed(), named - exposed()


def test_every_name_of_vllm_that_the_page_lists_exists_and_no_other_is_there() -> None:
    page = set(re.findall(r"vllm:[a-z0-9_]+", (ROOT / "docs" / "coming-from-vllm.md").read_text()))
    families = {
        re.sub(r"_(bucket|sum|count|created)$", "", name) for name in exposed() if name.startswith("vllm:")
    }
    assert {name.removesuffix("_total") for name in page} == {
        name.removesuffix("_total") for name in families
    }


def test_the_board_is_one_that_grafana_reads() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) >= 10
    assert all(
        target["expr"].count("(") == target["expr"].count(")")
        for panel in board["panels"]
        for target in panel["targets"]
    )


def test_alerts_are_rules_with_a_name_an_expression_and_a_text() -> None:
    text = (DEPLOY / "alerts.yml").read_text()
    rules = text.split("- alert: ")[1:]
    assert len(rules) >= 5
    for rule in rules:
        assert re.match(
            r"Penstock\w+\n\s+expr: .+\n(\s+for: \d+m\n)?\s+annotations: \{summary: \".+\"\}\s*$", rule
        ), rule


def test_the_unit_and_the_image_start_a_server_with_flags_that_exist() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "penstock.service")
    command, flag, file = shlex.split(unit["Service"]["ExecStart"])[1:]
    words = [command, flag, str(DEPLOY / Path(file).name)]
    args = cli.make_parser().parse_args(words)
    take_in(args, words)
    assert (args.log_format, args.kv_offload_ssd_dir) == ("json", "/var/lib/penstock")
    assert f"/{unit['Service']['StateDirectory']}" in args.kv_offload_ssd_dir
    assert float(unit["Service"]["TimeoutStopSec"]) > 20 + 5
    # homes are hidden from it
    assert unit["Service"]["Environment"] == f"PENSTOCK_CACHE=/var/cache/{unit['Service']['CacheDirectory']}"
    assert (
        f"useradd --system --home-dir /var/lib/penstock --shell /usr/sbin/nologin {unit['Service']['User']}"
        in (ROOT / "docs" / "deploying.md").read_text()
    )
    image = (DEPLOY / "Containerfile").read_text()
    command = json.loads(re.search(r"^CMD (\[.*\])$", image, flags=re.MULTILINE)[1])  # type: ignore[index]
    assert cli.make_parser().parse_args(command).host == "0.0.0.0"


def manifests() -> dict[str, list[Any]]:
    files = (DEPLOY / "kubernetes").glob("*.yaml")
    return {file.name: list(yaml.safe_load_all(file.read_text())) for file in files}


@pytest.mark.parametrize("file", ["cpu.yaml", "gpu.yaml"])
def test_pods_start_the_server_with_settings_that_exist_and_writes_to_the_volume(
    file: str, tmp_path: Path
) -> None:
    read = manifests()
    [settings, *services] = read["penstock.yaml"]
    [stateful] = read[file]
    pod = stateful["spec"]["template"]["spec"]
    [server] = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in server["volumeMounts"]}
    [name] = settings["data"]
    assert server["args"][1:3] == ["--config", f"{mounts['config']}/{name}"]
    (tmp_path / name).write_text(settings["data"][name])
    words = [server["args"][0], "--config", str(tmp_path / name), *server["args"][3:]]
    args = cli.make_parser().parse_args(words)
    take_in(args, words)
    assert (args.host, args.port) == ("0.0.0.0", server["ports"][0]["containerPort"])

    # below the volume's root, which kubelet makes writable for the group: the server refuses such a folder
    written = {one["name"]: one.get("value", "") for one in server["env"]}
    assert written.keys() == {"PENSTOCK_API_KEY", "PENSTOCK_CACHE", "HOME"}
    for folder in (args.kv_offload_ssd_dir, written["PENSTOCK_CACHE"], written["HOME"]):
        assert Path(folder).parent == Path(mounts["data"])
    [claim] = stateful["spec"]["volumeClaimTemplates"]
    storage = claim["spec"]["resources"]["requests"]["storage"]
    assert claim["metadata"]["name"] == "data" and args.kv_offload_ssd_gib < int(storage.removesuffix("Gi"))
    assert args.kv_offload_host_gib < int(server["resources"]["limits"]["memory"].removesuffix("Gi"))

    probes = [server[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert [probe["path"] for probe in probes] == ["/live", "/live", "/health"]
    assert {probe["path"] for probe in probes} <= OPEN_PATHS
    pause_s = float(server["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause_s + args.shutdown_s + 20

    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert stateful["spec"]["serviceName"] in {one["metadata"]["name"] for one in services}
    [policy], [monitor] = read["networkpolicy.yaml"], read["podmonitor.yaml"]
    for selector in (
        *(one["spec"]["selector"] for one in services),
        stateful["spec"]["selector"]["matchLabels"],
        policy["spec"]["podSelector"]["matchLabels"],
        monitor["spec"]["selector"]["matchLabels"],
    ):
        assert selector == labels
    [secret] = [one["valueFrom"]["secretKeyRef"] for one in server["env"] if "valueFrom" in one]
    assert monitor["spec"]["podMetricsEndpoints"] == [
        {
            "port": server["ports"][0]["name"],
            "path": "/metrics",
            "interval": "15s",
            "authorization": {"type": "Bearer", "credentials": secret},
        }
    ]


def test_servers_with_and_without_a_gpu_differ_only_in_sizes() -> None:
    read = manifests()
    [cpu], [gpu] = read["cpu.yaml"], read["gpu.yaml"]
    for one in (cpu, gpu):
        pod = one["spec"]["template"]["spec"]
        pod.pop("tolerations", None)
        pod["containers"][0]["args"] = [word for word in pod["containers"][0]["args"] if not word.isdigit()]
        del pod["containers"][0]["resources"]
        del one["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]
    assert cpu == gpu


def test_the_image_runs_as_the_user_that_pods_run_as() -> None:
    image = (DEPLOY / "Containerfile").read_text()
    user = re.search(r"^USER (\d+)$", image, flags=re.MULTILINE)
    assert user is not None and f"useradd --uid {user[1]} " in image
    for file in ("cpu.yaml", "gpu.yaml"):
        [stateful] = manifests()[file]
        pod = stateful["spec"]["template"]["spec"]
        assert str(pod["securityContext"]["runAsUser"]) == user[1]
        [server] = pod["containers"]
        assert server["securityContext"]["readOnlyRootFilesystem"]
