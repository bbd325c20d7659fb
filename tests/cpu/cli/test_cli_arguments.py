"""Arguments to config: every wrong one is refused by name, before anything is loaded.

Holds invariant 26: a flag that is unknown or has no effect is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import cli
from penstock.config import (
    Config,
    EngineConfig,
    KvConfig,
    LoraConfig,
    ModelSource,
    OffloadConfig,
    SanitizeConfig,
    ServerConfig,
)
from penstock.errors import IllegalTransition, Overloaded, StoreFailed
from penstock.flags import VLLM, config_of, instead_of, sampling_of

WITH_ENGINE = (
    ("serve",),
    ("generate",),
    ("chat",),
    ("bench", "decode"),
    ("bench", "ttft"),
    ("bench", "agents"),
)
COMMANDS = (*WITH_ENGINE, ("cache", "inspect"), ("cache", "verify"), ("cache", "clear"), ("doctor",))

BAD = [
    (("brew",), "brew"),
    (("bench", "compare"), "compare"),
    (("generate",), "PROMPT"),
    (("generate", "x", "--mod", "y"), "--mod"),
    (("generate", "x", "--kv-offload=yes"), "--kv-offload"),
    (("generate", "x", "--model", "~nobody-of-that-name/model"), "no model '~nobody-of-that-name/model'"),
    (("bench", "transfer", "--model", "~nobody-of-that-name/model"), "no model '~nobody-of-that-name/model'"),
    (
        ("generate", "x", "--no-kv-offload", "--kv-offload-host-gib", "1"),
        "--kv-offload-host-gib needs --kv-offload",
    ),
    (("generate", "x", "--kv-offload-host-gib", "0"), "--kv-offload-host-gib"),
    (("generate", "x", "--kv-offload-host-gib", "-2"), "--kv-offload-host-gib"),
    (("generate", "x", "--kv-offload-host-gib", "inf"), "--kv-offload-host-gib"),
    (("generate", "x", "--kv-offload-host-gib", "nan"), "--kv-offload-host-gib"),
    (("generate", "x", "--kv-offload-host-gib", "all"), "--kv-offload-host-gib"),
    (("generate", "x", "--kv-offload-ssd-dir", ""), "--kv-offload-ssd-dir"),
    (
        ("generate", "x", "--kv-offload-ssd-dir", "kv", "--no-kv-offload"),
        "--kv-offload-ssd-dir needs --kv-offload",
    ),
    (("generate", "x", "--kv-offload-ssd-gib", "16"), "--kv-offload-ssd-gib needs --kv-offload-ssd-dir"),
    (("generate", "x", "--kv-offload-ssd-dir", "kv", "--kv-offload-ssd-gib", "0"), "--kv-offload-ssd-gib"),
    (("generate", "x", "--kv-offload-ssd-dir", "kv", "--kv-offload-ssd-gib", "nan"), "--kv-offload-ssd-gib"),
    (
        ("generate", "x", "--kv-offload-ssd-admission", "always"),
        "--kv-offload-ssd-admission needs --kv-offload-ssd-dir",
    ),
    (
        ("generate", "x", "--kv-offload-ssd-dir", "kv", "--kv-offload-ssd-admission", "never"),
        "--kv-offload-ssd-admission",
    ),
    (
        ("generate", "x", "--kv-offload-remote", "valkey://h", "--no-kv-offload"),
        "--kv-offload-remote needs --kv-offload",
    ),
    (("generate", "x", "--kv-offload-remote", "memcached://h"), "--kv-offload-remote"),
    (("generate", "x", "--kv-offload-remote", "valkey://"), "--kv-offload-remote"),
    (("generate", "x", "--kv-offload-remote", "host:6379"), "--kv-offload-remote"),
    (
        ("generate", "x", "--kv-offload-remote-timeout-s", "1"),
        "--kv-offload-remote-timeout-s needs --kv-offload-remote",
    ),
    (
        ("generate", "x", "--kv-offload-remote", "s3://b", "--kv-offload-remote-timeout-s", "99"),
        "--kv-offload-remote-timeout-s",
    ),
    (("generate", "x", "--eviction", "fifo"), "--eviction"),
    (("generate", "x", "--no-kv-offload", "--eviction", "cost"), "--eviction"),
    (("generate", "x", "--load-format", "gguf"), "--load-format"),
    (("generate", "x", "--device", "tpu"), "--device"),
    (("generate", "x", "--dtype", "int8"), "--dtype"),
    (("generate", "x", "--block-tokens", "17"), "--block-tokens"),
    (("generate", "x", "--device-kv-gib", "0"), "--device-kv-gib"),
    (("generate", "x", "--device-kv-gib", "lots"), "--device-kv-gib"),
    (("generate", "x", "--device-kv-blocks", "1"), "--device-kv-blocks"),
    (("generate", "x", "--device-kv-blocks", "9", "--device-kv-gib", "1"), "not both"),
    (("generate", "x", "--max-model-len", "1"), "--max-model-len"),
    (("generate", "x", "--max-batch", "0"), "--max-batch"),
    (("generate", "x", "--prefill-chunk", "-1"), "--prefill-chunk"),
    (("generate", "x", "--prefill-chunk-ms", "-1"), "--prefill-chunk-ms"),
    (("generate", "x", "--overcommit", "0.5"), "--overcommit"),
    (("generate", "x", "--seed", "1.5"), "--seed"),
    (("generate", "x", "--max-tokens", "-1"), "--max-tokens"),
    (("generate", "x", "--temperature", "-0.1"), "--temperature"),
    (("generate", "x", "--temperature", "nan"), "--temperature"),
    (("generate", "x", "--top-p", "0"), "--top-p"),
    (("generate", "x", "--top-k", "-2"), "--top-k"),
    (("generate", "x", "--min-p", "1.5"), "--min-p"),
    (("generate", "x", "--stop", ""), "--stop"),
    (("generate", "x", "--json", "/no/such/folder/x.json"), "--json"),
    (("generate", "x", "--json", "/"), "--json"),
    (("chat", "--ignore-eos"), "--ignore-eos"),
    (("serve", "--port", "70000"), "--port"),
    (("serve", "--port", "http"), "--port"),
    (("serve", "--api-key", ""), "--api-key"),
    (("serve", "--max-body-bytes", "1"), "--max-body-bytes"),
    (("serve", "--max-concurrent", "0"), "--max-concurrent"),
    (("serve", "--shutdown-s", "-1"), "--shutdown-s"),
    (("serve", "--log-level", "loud"), "--log-level"),
    (("bench", "decode", "--batch", "1,,2"), "--batch"),
    (("bench", "decode", "--batch", "0"), "--batch"),
    (("bench", "decode", "--tokens", "1,2"), "--tokens"),
    (("bench", "decode", "--repeat", "0"), "--repeat"),
    (("bench", "ttft", "--tokens", "many"), "--tokens"),
    (("bench", "ttft", "--plot", "x.txt"), "--plot"),
    (("bench", "ttft", "--no-prefix-cache", "--no-kv-offload"), "--no-prefix-cache"),
    (("doctor", "--device", "tpu"), "--device"),
]


@pytest.mark.parametrize(("argv", "named"), BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_a_wrong_argument_is_refused_by_name_in_one_line(penstock, argv, named):
    ran = penstock(*argv)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("penstock: error: ") and ran.err.count("\n") == 1
    assert named in ran.err


@pytest.mark.parametrize("command", [(), ("bench",), ("cache",)], ids=["penstock", "bench", "cache"])
def test_a_command_that_needs_another_word_shows_its_help(penstock, command):
    assert penstock(*command) == penstock(*command, "--help")


@pytest.mark.parametrize(
    ("argv", "hint", "page"),
    [
        (("serve", "--prot", "80"), "did you mean --port?", "penstock serve --help"),
        (("bench", "decode", "--batc=3"), "did you mean --batch?", "penstock bench decode --help"),
        (
            ("cache", "inspect", "--kv-offload-ssd-dir", "x", "--jsn", "y"),
            "did you mean --json?",
            "penstock cache inspect --help",
        ),
        (
            ("serve", "m", "--tensor-parallel-size", "2"),
            "--tensor-parallel-size is vLLM's; here: none: one device",
            "penstock serve --help",
        ),
        (("serve", "--gpu_memory_utilization=0.9"), "here: --device-kv-gib", "penstock serve --help"),
        (
            ("serve", "--max-num-seqs", "4", "--port", "1"),
            "--max-num-seqs is vLLM's; here: --max-batch",
            "penstock serve --help",
        ),
    ],
)
def test_a_flag_that_is_mistyped_or_vllms_leads_to_ours_and_to_the_commands_own_help(
    penstock, argv, hint, page
):
    ran = penstock(*argv)
    assert ran.code == 2 and hint in ran.err and f"(see `{page}`)" in ran.err


def test_a_flag_like_none_of_ours_gets_no_suggestion(penstock):
    assert penstock("serve", "--xyzzy").err == (
        "penstock: error: unrecognized arguments: --xyzzy (see `penstock serve --help`)\n"
    )


def test_the_page_on_vllm_has_the_table_that_the_messages_come_from():
    page = (Path(__file__).parents[3] / "docs" / "coming-from-vllm.md").read_text()
    rows = [
        f"| {', '.join(f'`{name}`' for name in names.split())} | {text} |" for names, text in VLLM.items()
    ]
    table = "\n".join(["| vLLM | here |", "|---|---|", *rows])
    assert f"\n\n{table}\n\n" in page


def test_no_flag_of_ours_is_taken_for_vllms():
    known = {
        flag
        for action in cli.make_parser()._actions
        for parser in (action.choices or {}).values()
        for flag in parser._option_string_actions
    }
    assert "--max-batch" in known and not [flag for flag in known if instead_of(flag) is not None]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself_and_each_of_its_flags(penstock, command):
    ran = penstock(*command, "--help")
    assert ran.code == 0
    assert "--help" in ran.out and " ".join(command) in ran.out
    if command in WITH_ENGINE:
        for flag in (
            "--model",
            "--load-format",
            "--block-tokens",
            "--device-kv-gib",
            "--max-batch",
            "--no-capture",
            "--kv-offload",
            "--eviction",
            "--kv-offload-ssd-dir",
            "--kv-offload-ssd-gib",
            "--kv-offload-ssd-admission",
            "--kv-offload-remote ",
            "--kv-offload-remote-timeout-s",
        ):
            assert flag in ran.out


def _unexplained(parser) -> list[str]:
    found = []
    for action in parser._actions:
        if isinstance(action.choices, dict):
            found += [name for child in action.choices.values() for name in _unexplained(child)]
        elif not action.help:
            found.append("/".join(action.option_strings) or action.dest)
    return found


def test_no_flag_is_without_a_help_text():
    parser = cli.make_parser()
    assert _unexplained(parser) == []
    parser.add_argument("--mystery")
    assert _unexplained(parser) == ["--mystery"]


def test_version_is_told(penstock):
    assert penstock("--version").out.startswith("penstock ")


def test_defaults_are_those_of_the_config():
    assert config_of(cli.make_parser().parse_args(["serve"])) == Config()


def test_every_engine_flag_reaches_the_config():
    argv = (
        "serve --model m --load-format dummy --device cpu --dtype bfloat16 --seed 7 --block-tokens 32 "
        "--device-kv-gib 0.5 --no-prefix-cache --max-model-len 100 --max-batch 3 --prefill-chunk 64 "
        "--prefill-chunk-ms 80 --overcommit 2 --no-capture --scheduling fifo --max-overtaken-s 5 "
        "--kv-offload-host-gib 2.5 --eviction cost --kv-offload-ssd-dir kv --kv-offload-ssd-gib 7 "
        "--kv-offload-ssd-admission reuse --kv-offload-remote valkey://:pw@h:1/0 "
        "--kv-offload-remote-timeout-s 0.5 --sanitize strict --sanitize-json findings.json --sanitize-bytes "
        "--lora a=one --lora b=two --lora-dir adapters"
    )
    assert config_of(cli.make_parser().parse_args(argv.split())) == Config(
        ModelSource("m", "dummy", "cpu", "bfloat16", 7, positions=100),
        KvConfig(32, 0.5, None, False),
        EngineConfig(100, 3, 64, 80.0, 2.0, "expected", "fifo", 5.0, False, 7),
        OffloadConfig(
            True,
            2.5,
            "cost",
            ssd_dir="kv",
            ssd_gib=7.0,
            ssd_admission="reuse",
            remote="valkey://:pw@h:1/0",
            remote_timeout_s=0.5,
        ),
        SanitizeConfig("strict", "findings.json", True),
        LoraConfig((("a", "one"), ("b", "two")), "adapters"),
    )
    assert config_of(cli.make_parser().parse_args(["chat", "--device-kv-blocks", "9"])).kv.device_blocks == 9


@pytest.mark.parametrize(
    ("given", "enabled"), [((), True), (("--kv-offload",), True), (("--no-kv-offload",), False)]
)
def test_offload_is_on_unless_it_is_turned_off(given, enabled):
    assert config_of(cli.make_parser().parse_args(["chat", *given])).offload == OffloadConfig(enabled)


SECRET = "pa55 'w\"ord"
STORE = f"valkey://me:{SECRET}@kv.example:6379/0"
TYPED_WRONG = [
    ("serve", "--kv-offload-remot", STORE),
    ("serve", f"--kv-offload-remot={STORE}"),
    ("serve", STORE),
    (STORE,),
    ("serve", "--kv-offload-ssd-gib", STORE),
    ("serve", "--kv-offload-ssd-admission", STORE),
    ("serve", "--kv-offload-remote", STORE.replace("valkey", "memcached")),
    ("serve", "--kv-offload-remote", STORE, "--no-kv-offload"),
    ("serve", "--kv-offload-remote", STORE, "--kv-offload-remote-timeout-s", "0"),
    ("serve", "--json", STORE),
    ("bench", "ttft", "--json", STORE),
    ("serve", "--lora", STORE),
]


@pytest.mark.parametrize("argv", TYPED_WRONG, ids=[str(number) for number in range(len(TYPED_WRONG))])
def test_a_password_is_not_echoed_wherever_it_was_typed(penstock, argv):
    ran = penstock(*argv)
    assert ran.code == 2 and ran.err.startswith("penstock: error: ")
    assert "pa55" not in ran.out + ran.err and "ord@" not in ran.out + ran.err


def test_without_that_care_the_parser_would_echo_it(penstock, monkeypatch):
    monkeypatch.setattr(cli, "without_secrets", lambda message, argv: message)
    assert "pa55" in penstock("serve", f"--kv-offload-remot={STORE}").err


def test_an_error_that_repeats_the_url_is_shown_without_its_password(penstock, monkeypatch):
    def fail(config, server):
        raise StoreFailed(f"nobody answers at {config.offload.remote}")

    monkeypatch.setattr("penstock.commands.serve.serve", fail)
    ran = penstock("serve", "--kv-offload-remote", STORE)
    assert (ran.code, ran.err) == (1, "penstock: error: nobody answers at valkey://kv.example:6379\n")


def test_no_source_file_writes_out_a_config_but_as_it_may_be_shown():
    sources = (Path(cli.__file__).parent).rglob("*.py")
    found = [
        str(path)
        for path in sources
        if re.search(r"asdict\((self\.)?_?config\)", path.read_text()) and "models" not in path.parts
    ]
    assert found == []


def test_sampling_flags_reach_the_request_and_commands_keep_their_own_defaults():
    parser = cli.make_parser()
    given = (
        "generate x --max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 4 --min-p 0.1 --stop a --stop b "
        "--ignore-eos"
    )
    sampling = sampling_of(parser.parse_args(given.split()))
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0.5, 0.9, 4)
    assert (sampling.min_p, sampling.stop, sampling.ignore_eos) == (0.1, ("a", "b"), True)
    assert sampling_of(parser.parse_args(["generate", "x"])).temperature == 0.0
    assert sampling_of(parser.parse_args(["chat"])).temperature == 0.7
    assert sampling_of(parser.parse_args(["generate", "x"])).stop == ()


@pytest.mark.parametrize(
    ("given", "variable", "key"),
    [(None, "fromenv", "fromenv"), ("flag", "fromenv", "flag"), (None, None, None)],
)
def test_the_api_key_comes_from_its_flag_or_the_environment(monkeypatch, given, variable, key):
    seen = []
    monkeypatch.setattr("penstock.commands.serve.serve", lambda config, server: seen.append(server) or 0)
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("PENSTOCK_API_KEY", variable)
    assert cli.main(["serve", "--port", "0", *(["--api-key", given] if given else [])]) == 0
    assert (seen[0].api_key, seen[0].port, seen[0].log_level, seen[0].log_format) == (key, 0, "info", "text")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (Overloaded("too\nmany"), 1, "penstock: error: too many\n"),
        (
            IllegalTransition("slot", "free", "seal"),
            1,
            "penstock: error: slot: seal is not legal in state free\n",
        ),
        (KeyboardInterrupt(), 130, "penstock: interrupted\n"),
        (
            ModuleNotFoundError("x", name="psutil"),
            1,
            "penstock: error: this command needs the package psutil, which is not installed\n",
        ),
    ],
)
def test_what_a_command_raises_becomes_a_line_and_an_exit_code(penstock, monkeypatch, error, code, said):
    def fail(*args):
        raise error

    monkeypatch.setattr("penstock.commands.doctor.doctor", fail)
    ran = penstock("doctor")
    assert (ran.code, ran.err) == (code, said)


def test_a_defect_in_penstock_itself_is_not_hidden(monkeypatch):
    def fail(*args):
        raise ModuleNotFoundError("x", name="penstock.nowhere")

    monkeypatch.setattr("penstock.commands.doctor.doctor", fail)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["doctor"])


def test_help_and_argument_errors_need_no_torch():
    script = (
        "import sys; from penstock.cli import main; assert main(['generate', 'x', '--top-p', '2']) == "
        "2\ntry: main(['serve', '--help'])\nexcept SystemExit: pass\nprint('torch' in sys.modules, "
        "'uvicorn' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == "False False"


def test_serving_without_its_packages_says_what_to_install():
    script = (
        "import sys; sys.modules['uvicorn'] = None; from penstock.cli import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    argv = [sys.executable, "-c", script, "serve", "--model", "tiny-llama", "--load-format", "dummy"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "uvicorn" in done.stderr and "pip install 'penstock[server]'" in done.stderr


def test_every_server_flag_reaches_the_config(monkeypatch):
    """Each with a number of its own: two that are swapped would both be taken."""
    seen = []
    monkeypatch.setattr("penstock.commands.serve.serve", lambda config, server: seen.append(server) or 0)
    given = (
        "serve --host 127.0.0.9 --port 81 --api-key k --max-body-bytes 2048 --max-concurrent 3 --shutdown-s "
        "4 --read-timeout-s 5 --write-timeout-s 6 --allow-special-tokens-in-text --log-level error "
        "--log-format json --served-model-name a b/c --public-metrics --cors-origin http://a --cors-origin "
        "https://b:1 --api-processes 7"
    )
    assert cli.main(given.split()) == 0
    names, origins = ("a", "b/c"), ("http://a", "https://b:1")
    server = ServerConfig(
        "127.0.0.9",
        81,
        "k",
        True,
        None,
        names,
        origins,
        2048,
        3,
        4.0,
        5.0,
        6.0,
        True,
        api_processes=7,
        log_format="json",
        log_level="error",
    )
    assert seen == [server]
