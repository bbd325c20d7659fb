"""Arguments to config: every wrong one is refused by name, before anything is loaded.

Holds invariant 26: a flag that is unknown or has no effect is refused."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import __version__, cli
from penstock.config import (
    Config,
    EngineConfig,
    ExpertsConfig,
    KvConfig,
    LoraConfig,
    ModelSource,
    OffloadConfig,
    RanksConfig,
    SanitizeConfig,
    ServerConfig,
    SpeculationConfig,
    TraceConfig,
)
from penstock.errors import IllegalTransition, Overloaded, StoreFailed
from penstock.flags import SETTINGS, VLLM, config_from, config_of, instead_of, sampling_of

# Rules of single settings are in tests/pure/test_config.py; here is one flag for each way to refuse a value.
BAD = {
    "brew": "brew",
    "bench compare": "compare",
    "cache prune": "prune",
    "cache inspect": "--kv-offload-ssd-dir",
    "cache inspect --yes --kv-offload-ssd-dir x": "--yes",
    "cache verify --kv-offload-ssd-dir x --json /no/such/folder/x": "--json",
    "generate": "PROMPT",
    "generate x --mod y": "--mod",
    "generate x --kv-offload=yes": "--kv-offload",
    "generate x --model ~nobody-of-that-name/model": "no model '~nobody-of-that-name/model'",
    "bench transfer --model ~nobody-of-that-name/model": "no model '~nobody-of-that-name/model'",
    "generate x --no-kv-offload --kv-offload-host-gib 1": "--kv-offload-host-gib needs --kv-offload",
    "generate x --kv-offload-host-gib nan": "--kv-offload-host-gib must be positive, got nan",
    "generate x --kv-offload-host-gib all": "--kv-offload-host-gib: invalid float value: 'all'",
    "generate x --kv-offload-ssd-dir ": "--kv-offload-ssd-dir: it is empty",
    "generate x --kv-offload-ssd-gib 16": "--kv-offload-ssd-gib needs --kv-offload-ssd-dir",
    "generate x --kv-offload-ssd-admission always": "--kv-offload-ssd-admission needs --kv-offload-ssd-dir",
    "bench transfer --kv-offload-remote-timeout-s 1": "-remote-timeout-s needs --kv-offload-remote",
    "generate x --kv-offload-remote valkey://h --no-kv-offload": "--kv-offload-remote needs --kv-offload",
    "generate x --kv-offload-remote memcached://h": "--kv-offload-remote: it must be the URL of a store",
    "generate x --kv-offload-remote valkey://": "--kv-offload-remote: it must be the URL of a store",
    "generate x --kv-offload-remote host:6379": "--kv-offload-remote: it must be the URL of a store",
    "generate x --eviction fifo": "--eviction: invalid choice: 'fifo'",
    "generate x --kv-pin-spans 0": "--kv-pin-spans: '0' is no list of spans",
    "generate x --block-tokens 17": "--block-tokens must be 8, 16, 32, 64 or 128, got 17",
    "generate x --seed 1.5": "--seed",
    "generate x --max-tokens -1": "--max-tokens",
    "generate x --temperature nan": "--temperature",
    "generate x --top-p 0": "--top-p",
    "generate x --top-k -2": "--top-k",
    "generate x --min-p 1.5": "--min-p",
    "generate x --stop ": "--stop",
    "generate x --json /": "--json",
    "generate x --trace /nowhere/trace.json": "--trace: '/nowhere/trace.json' cannot be written",
    "serve --trace-mib 256": "--trace-mib needs --trace",
    "chat --ignore-eos": "--ignore-eos",
    "serve --port http": "--port",
    "serve --api-key ": "--api-key (or $PENSTOCK_API_KEY) is empty",
    "serve --log-level loud": "--log-level",
    "bench decode --batch 1,,2": "--batch",
    "bench decode --tokens 1,2": "--tokens: '1,2' is not one positive whole number",
    "bench decode --repeat 0": "--repeat",
    "bench agents trace --think -1": "--think",
    "bench trace trace --policies lru,none": "there is no policy 'none'",
    "bench ttft --plot x.txt": "--plot",
    "bench ttft --no-prefix-cache --no-kv-offload": "--no-prefix-cache",
    "doctor --device tpu": "--device",
    "generate x --experts-on-device 0": "--experts-on-device must be GiB such as 8, a share such as 25%",
    "generate x --experts-on-device 101%": "got '101%'",
    "generate x --experts-policy lru": "--experts-policy needs --experts-on-device",
    "generate x --no-experts-prefetch": "--no-experts-prefetch needs --experts-on-device",
    "generate x --record-routing /nowhere/x": "--record-routing: '/nowhere/x' cannot be written",
    "generate x --device-memory-gib 4 --device cpu": "--device-memory-gib 4 needs --device cuda",
    "generate x --experts-on-device 1": "--experts-on-device 1: this model has no experts",
    "generate x --record-routing x": "--record-routing x: this model has no experts",
    "generate x --lora nopath": "as in name=path",
    "generate x --lora a=p --lora b=q": "one adapter, and 2 are given: a, b",
    "chat --lora a=p --lora b=q": "one adapter, and 2 are given: a, b",
    "serve --lora a=p --lora a=q": "--lora a= is given more than once",
    "generate x --lora-dir /tmp": "--lora-dir",
    "bench ttft --lora a=p": "--lora",
    "doctor --lora a=p": "--lora",
    "serve a --model b": "two models are given: a and --model b",
}


@pytest.mark.parametrize("line", BAD)
def test_a_wrong_argument_is_refused_by_name_in_one_line(penstock, line):
    ran = penstock(line)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("penstock: error: ") and ran.err.count("\n") == 1
    assert BAD[line] in ran.err


@pytest.mark.parametrize("command", ["", "bench", "cache"])
def test_a_command_that_needs_another_word_shows_its_help(penstock, command):
    assert penstock(command) == penstock(f"{command} --help".strip())


@pytest.mark.parametrize(
    ("line", "hint", "page"),
    [
        ("serve --prot 80", "did you mean --port?", "serve"),
        ("bench decode --batc=3", "did you mean --batch?", "bench decode"),
        ("cache inspect --kv-offload-ssd-dir x --jsn y", "did you mean --json?", "cache inspect"),
        ("serve m --tensor-parallel-size 2", "is vLLM's; here: --tensor-parallel (", "serve"),
        ("serve --gpu_memory_utilization=0.9", "here: --device-kv-gib", "serve"),
        ("serve --max-num-seqs 4 --port 1", "--max-num-seqs is vLLM's; here: --max-batch", "serve"),
        ("serve --xyzzy", "error: unrecognized arguments: --xyzzy (see", "serve"),
    ],
)
def test_a_flag_that_is_mistyped_or_vllms_leads_to_ours_and_to_the_commands_own_help(
    penstock, line, hint, page
):
    ran = penstock(line)
    assert ran.code == 2 and hint in ran.err and f"(see `penstock {page} --help`)" in ran.err


def test_the_page_on_vllm_has_the_table_that_the_messages_come_from():
    page = (Path(__file__).parents[3] / "docs" / "coming-from-vllm.md").read_text()
    rows = [f"| `{names.replace(' ', '`, `')}` | {text} |" for names, text in VLLM.items()]
    table = "\n".join(["| vLLM | here |", "|---|---|", *rows])
    assert f"\n\n{table}\n\n" in page


def parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    found = [parser]
    for action in parser._actions:
        if isinstance(action.choices, dict):
            found += (one for child in action.choices.values() for one in parsers(child))
    return found


def test_every_flag_of_every_command_is_explained_and_none_is_taken_for_vllms():
    found = parsers(cli.make_parser())
    assert len(found) == 24
    for parser in found:
        for action in parser._actions:
            flag = "/".join(action.option_strings) or action.dest
            assert action.help or isinstance(action.choices, dict), (parser.prog, flag)
            assert not any(map(instead_of, action.option_strings)), flag
        text = parser.format_help()
        assert parser.prog in text and not re.search(r"\(default: (None|\[\]|False)\)", text)
    with_engine = [parser for parser in found if "--max-batch" in parser._option_string_actions]
    assert len(with_engine) == 11
    flags = {SETTINGS[name].flag for name in ENGINE - {"lora"}}
    assert all(flags <= set(parser._option_string_actions) for parser in with_engine)


# by name, as in a namespace
ENGINE = set(SETTINGS) & set(vars(cli.make_parser().parse_args(["chat"])))


def test_the_version_says_what_is_installed_and_where(penstock):
    ran = penstock("--version")
    torch = importlib.metadata.version("torch")
    place = f"checkout in {Path(__file__).parents[3]}"
    assert ran == (
        0,
        f"penstock {__version__} ({place}), Python {platform.python_version()}, torch {torch}\n",
        "",
    )


# ------------------------------------------------------------------------------------------- right arguments


def config_by(line: str) -> Config:
    return config_of(cli.make_parser().parse_args(line.split()))


def test_every_engine_flag_reaches_the_config_by_command_line_and_by_name():
    given = (
        "--model m --load-format dummy --device cpu --dtype bfloat16 --weights int8 --deterministic --seed 7 "
        "--no-download "
        "--block-tokens 32 --device-kv-gib 0.5 --no-prefix-cache --kv-resident-tokens 512 "
        "--kv-residency scored --kv-pin-spans 0-64,100-200 --kv-scorer lru --max-model-len 100 "
        "--max-batch 3 --prefill-chunk 64 --prefill-chunk-ms 80 --overcommit 2 --admission lifetime "
        "--no-capture --scheduling fifo --max-overtaken-s 5 --kv-offload-host-gib 2.5 --eviction cost "
        "--kv-offload-ssd-dir kv --kv-offload-ssd-gib 7 --kv-offload-ssd-admission reuse "
        "--kv-offload-remote valkey://:pw@h:1/0 --kv-offload-remote-timeout-s 0.5 --sanitize strict "
        "--sanitize-json findings.json --sanitize-bytes --speculate draft:d --speculate-tokens 3 "
        "--speculate-sampling rejection "
        "--trace trace.json --trace-mib 9 --kv-offload-states-gib 1.5 --state-every 64 "
        "--experts-on-device 25% --experts-policy lru --no-experts-prefetch --record-routing routing.jsonl "
        "--device-memory-gib 24 "
        "--tensor-parallel 4 --rank-timeout-s 9"
    )
    spans = ((0, 64), (100, 200))
    offload = {"ssd_admission": "reuse", "remote": "valkey://:pw@h:1/0", "remote_timeout_s": 0.5}
    offload |= {"states_gib": 1.5, "state_every": 64}
    expected = Config(
        ModelSource("m", "dummy", "cpu", "bfloat16", 7, 100, "auto", "int8", True, False, 24.0),
        KvConfig(32, 0.5, None, False, 512, "scored", spans, "lru"),
        EngineConfig(100, 3, 64, 80.0, 2.0, "lifetime", "fifo", 5.0, False, 7),
        OffloadConfig(True, 2.5, "cost", ssd_dir="kv", ssd_gib=7.0, **offload),
        SanitizeConfig("strict", "findings.json", True),
        LoraConfig((("a", "one"), ("org/b", "two=2")), "adapters"),
        SpeculationConfig("draft:d", 3, "rejection"),
        TraceConfig("trace.json", 9),
        ExpertsConfig("25%", "lru", False, "routing.jsonl"),
        RanksConfig(4, 9.0),
    )
    adapters = "--lora a=one --lora org/b=two=2"
    assert config_by(f"serve {given} {adapters} --lora-dir adapters") == expected
    words = f"{given} ".replace(" --", "\n--")[:-1].split("\n")
    named = {word.split()[0][2:].replace("-", "_"): [*word.split(), True][1] for word in words}
    by_name = config_from({**named, "lora": ["a=one", "org/b=two=2"]})
    assert config_by(f"generate x {given} {adapters}") == by_name
    assert by_name.source.generation_config == "none", "only the server's requests have the model's defaults"
    assert set(named) | {"lora"} == ENGINE - {"device_kv_blocks", "kv_offload"}


def test_defaults_are_those_of_the_config_and_offload_is_on_unless_it_is_turned_off():
    assert config_by("serve") == Config()
    assert config_by("chat --device-kv-blocks 9").kv.device_blocks == 9
    for given, enabled in (("", True), (" --kv-offload", True), (" --no-kv-offload", False)):
        assert config_by(f"chat{given}").offload == OffloadConfig(enabled)
    for given in (None, True, False):
        assert config_from({"kv_offload": given}).offload == OffloadConfig(given is not False)
    assert config_from({"no_prefix_cache": False, "max_batch": None, "kv_offload_ssd_dir": Path("x")}) == (
        config_from({"kv_offload_ssd_dir": "x"})
    )


@pytest.fixture
def served(monkeypatch):
    """What `serve` was called with."""
    seen = []
    monkeypatch.setattr("penstock.commands.serve.serve", lambda *given: seen.append(given) or 0)
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    return seen


def test_every_server_flag_reaches_the_config(served, penstock):
    """Each with a number of its own: two that are swapped would both be taken."""
    given = (
        "serve m --host 127.0.0.9 --port 81 --api-key k --public-metrics --otlp-endpoint http://h:1 "
        "--served-model-name a b/c --cors-origin http://a --cors-origin https://b:1 --max-body-bytes 2048 "
        "--max-concurrent 3 --shutdown-s 4 --read-timeout-s 5 --write-timeout-s 6 "
        "--allow-special-tokens-in-text --tool-call-parser json --reasoning-parser none --api-processes 7 "
        "--kv-events tcp://*:5557 --kv-events-replay tcp://*:5558 --kv-events-topic t --no-page "
        "--log-format json --log-level error --generation-config none"
    )
    assert penstock(given).code == 0
    names, origins = ("a", "b/c"), ("http://a", "https://b:1")
    limits = (2048, 3, 4.0, 5.0, 6.0, True, "json", "none", 7)
    events = ("tcp://*:5557", "tcp://*:5558", "t")
    server = ServerConfig(
        "127.0.0.9", 81, "k", True, "http://h:1", names, origins, *limits, *events, False, "json", "error"
    )
    assert served == [(Config(ModelSource("m", generation_config="none"), KvConfig(events=True)), server)]


def test_the_api_key_comes_from_its_flag_or_the_environment(served, penstock, monkeypatch):
    assert penstock("serve").code == 0
    monkeypatch.setenv("PENSTOCK_API_KEY", "from the environment")
    assert penstock("serve").code == penstock("serve --api-key flag").code == 0
    assert [server.api_key for _, server in served] == [None, "from the environment", "flag"]


def test_sampling_flags_reach_the_request_and_commands_keep_their_own_defaults():
    given = (
        "generate x --max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 4 --min-p 0.1 --stop a --stop b "
        "--ignore-eos"
    )
    sampling, generate, chat = (
        sampling_of(cli.make_parser().parse_args(line.split())) for line in (given, "generate x", "chat")
    )
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0.5, 0.9, 4)
    assert (sampling.min_p, sampling.stop, sampling.ignore_eos) == (0.1, ("a", "b"), True)
    assert (generate.temperature, generate.max_tokens, generate.stop) == (0.0, 256, ())
    assert (chat.temperature, chat.max_tokens, chat.ignore_eos) == (0.7, 1024, False)


# --------------------------------------------------------------------------------------------------- secrets

STORE = "valkey://me:pa55 'w\"ord@kv.example:6379/0"
TYPED_WRONG = [
    ("serve", "--kv-offload-remot", STORE),
    ("serve", f"--kv-offload-remot={STORE}"),
    ("serve", STORE),
    ("bench", STORE),
    ("serve", "--kv-offload-ssd-gib", STORE),
    ("serve", "--kv-offload-ssd-admission", STORE),
    ("serve", "--kv-offload-remote", STORE.replace("valkey", "memcached")),
    ("serve", "--kv-offload-remote", STORE, "--no-kv-offload"),
    ("serve", "--kv-offload-remote", STORE, "--kv-offload-remote-timeout-s", "0"),
    ("bench ttft", "--json", STORE),
    ("serve", "--lora", STORE),
]


def test_a_password_is_not_echoed_wherever_it_was_typed(penstock, monkeypatch):
    for argv in TYPED_WRONG:
        ran = penstock(*argv)
        assert ran.code == 2 and ran.err.startswith("penstock: error: ")
        assert "pa55" not in ran.out + ran.err and "ord@" not in ran.out + ran.err
    monkeypatch.setattr(cli, "without_secrets", lambda message, argv: message)
    assert "pa55" in penstock(*TYPED_WRONG[1]).err, "without that care the parser would echo it"


def test_an_error_that_repeats_the_url_is_shown_without_its_password(penstock, monkeypatch):
    def fail(config, server):
        raise StoreFailed(f"nobody answers at {config.offload.remote}")

    monkeypatch.setattr("penstock.commands.serve.serve", fail)
    ran = penstock("serve", "--kv-offload-remote", STORE)
    assert (ran.code, ran.err) == (1, "penstock: error: nobody answers at valkey://kv.example:6379\n")


# ------------------------------------------------------------------------------------- errors and exit codes


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (Overloaded("too\nmany"), 1, "error: too many"),
        (IllegalTransition("slot", "free", "seal"), 1, "error: slot: seal is not legal in state free"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            ModuleNotFoundError("x", name="psutil"),
            1,
            "error: this command needs the package psutil, which is not installed",
        ),
    ],
)
def test_what_a_command_raises_becomes_a_line_and_an_exit_code(penstock, monkeypatch, error, code, said):
    def fail(*args):
        raise error

    monkeypatch.setattr("penstock.commands.doctor.run", fail)
    ran = penstock("doctor")
    assert (ran.code, ran.err) == (code, f"penstock: {said}\n")
    error.name = "penstock.nowhere"
    if isinstance(error, ModuleNotFoundError):
        with pytest.raises(ModuleNotFoundError):  # a defect of Penstock itself is not hidden
            cli.main(["doctor"])


def python(script: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, text=True, timeout=120)


def test_help_and_argument_errors_need_no_torch():
    script = (
        "import sys; from penstock.cli import main; assert main(['generate', 'x', '--top-p', '2']) == 2\n"
        "assert main(['chat', '--max-batch', '0']) == 2\n"
        "try: main(['serve', '--help'])\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules, 'uvicorn' in sys.modules)"
    )
    assert python(script).stdout.splitlines()[-1] == "False False"
