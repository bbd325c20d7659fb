"""`bench trace`: hit rates worked out by hand, the optimum against every policy and against brute force, and
bad traces refused by line."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.bench.trace import OPTIMUM, best_hits, ladder, measure, next_uses, replay
from penstock.bench.trace_files import BLOCK_TOKENS, Trace, read_any, read_trace, with_scan
from penstock.cli import main
from penstock.config import EVICTIONS
from penstock.errors import ConfigError
from penstock.kv.blocks.eviction import prefill_cost
from penstock.models.progress import silent

PROMPTS = [[1, 2], [3], [1, 2], [4, 5], [1, 2], [3]]
TAIL = 5  # tokens of each prompt behind its last full block


def trace_of(prompts) -> Trace:
    keys = [[repr(block).encode().ljust(16, b".") for block in prompt] for prompt in prompts]
    return Trace("by hand", keys, sum(len(prompt) * BLOCK_TOKENS + TAIL for prompt in prompts))


def line_of(prompt, **other) -> str:
    fields = {
        "timestamp": 0,
        "input_length": len(prompt) * BLOCK_TOKENS + TAIL,
        "output_length": 1,
        "hash_ids": [*prompt, 1000 + sum(prompt)],
    }
    return json.dumps(fields | other)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(line_of, PROMPTS)) + "\n\n")
    return path


# -------------------------------------------------------------------------------------------------- hit rates


@pytest.mark.parametrize(
    ("capacity", "lru", "optimum"),
    [
        # Every request pushes out the one before; the optimum keeps 1 and nothing else.
        (1, 0, 2),
        # 3 pushes out 2; 1 is found again, then 4 and 5 push out everything. The optimum keeps 1 and 2.
        (2, 1, 4),
        # 1 and 2 are found; 4 and 5 push out 3 and the deeper 2; 1 is found.
        (3, 3, 5),
        # 4 and 5 push out 3 alone, then 3 pushes out one of them.
        (4, 4, 5),
        (5, 5, 5),
    ],
)
def test_hits_are_those_worked_out_by_hand(capacity, lru, optimum):
    trace = trace_of(PROMPTS)
    assert replay(trace, "lru", capacity, silent).blocks == lru
    assert best_hits(next_uses(trace), capacity, silent).blocks == optimum


def test_rates_are_shares_of_blocks_of_tokens_and_of_work():
    rows = measure(trace_of(PROMPTS), ["lru"], [3], silent)
    assert [row["policy"] for row in rows] == ["lru", OPTIMUM]
    assert rows[0]["hit_rate"] == 3 / 10
    assert rows[0]["hit_rate_tokens"] == 3 * 512 / (10 * 512 + 6 * TAIL)
    one, two = prefill_cost(512), prefill_cost(1024)
    assert rows[0]["prefill_saved"] == pytest.approx((two + one) / (4 * two + 2 * one))
    assert (rows[1]["hit_rate"], rows[1]["prefill_saved"]) == (5 / 10, None)


# ---------------------------------------------------------------------------------------------------- optimum

trees = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=15).map(
    lambda prompts: trace_of(
        [[tuple(prompt[: depth + 1]) for depth in range(len(prompt))] for prompt in prompts]
    )
)


@settings(max_examples=100, deadline=None)
@given(trace=trees, capacity=st.integers(1, 12))
def test_no_policy_beats_the_optimum(trace, capacity):
    best = best_hits(next_uses(trace), capacity, silent).blocks
    for name in EVICTIONS:
        assert replay(trace, name, capacity, silent).blocks <= best


@settings(max_examples=50, deadline=None)
@given(trace=trees)
def test_with_room_for_everything_all_policies_find_every_block_that_was_there_before(trace):
    capacity = ladder(trace)[-1]
    again = trace.num_blocks - trace.num_distinct
    assert {replay(trace, name, capacity, silent).blocks for name in EVICTIONS} == {again}
    assert best_hits(next_uses(trace), capacity, silent).blocks == again


def by_trying_everything(blocks: list[int], capacity: int) -> int:
    """The most hits of any way to keep up to `capacity` of the blocks seen."""

    @cache
    def best(place: int, kept: frozenset[int]) -> int:
        if place == len(blocks):
            return 0
        seen = kept | {blocks[place]}
        ways = [seen] if len(seen) <= capacity else [seen - {block} for block in seen]
        return (blocks[place] in kept) + max(best(place + 1, way) for way in ways)

    return best(0, frozenset())


@settings(max_examples=100, deadline=None)
@given(blocks=st.lists(st.integers(0, 4), min_size=1, max_size=12), capacity=st.integers(1, 4))
@example(blocks=[0], capacity=1)
@example(blocks=[0, 1, 0, 1], capacity=1)
@example(blocks=[0, 1, 2, 0, 1, 2, 3, 0], capacity=2)
def test_the_optimum_is_what_trying_everything_finds(blocks, capacity):
    trace = trace_of([[block] for block in blocks])
    assert best_hits(next_uses(trace), capacity, silent).blocks == by_trying_everything(blocks, capacity)


# ----------------------------------------------------------------------------------------------------- traces


def test_a_trace_is_read_as_keys_of_its_full_blocks(file):
    trace = read_trace(file)
    assert [len(keys) for keys in trace.prompts] == [2, 1, 2, 2, 2, 1]
    assert trace.prompts[0] == trace.prompts[2] == trace.prompts[4] and trace.prompts[1] == trace.prompts[5]
    assert (trace.num_blocks, trace.num_distinct, trace.num_tokens) == (10, 5, 10 * 512 + 6 * TAIL)
    assert [len(keys) for keys in read_trace(file, 2).prompts] == [2, 1]


BAD_LINES = [
    ("{", "not JSON"),
    ("[1, 2]", "expected an object"),
    ("{}", "input_length must be a whole number"),
    (line_of([1], input_length="600"), "input_length must be a whole number"),
    (line_of([1], input_length=True), "input_length must be a whole number"),
    (line_of([1], input_length=-1), "input_length must be a whole number"),
    (line_of([1], hash_ids=5), "hash_ids a list"),
    (line_of([1], hash_ids=[1, "2"]), "hash_ids a list"),
    (line_of([1], hash_ids=[1]), "1 hash_ids for an input_length of 517; one stands for 512 tokens"),
    (line_of([1, 2], hash_ids=[1, 2, 1]), "names a block twice"),
]


def test_a_bad_line_is_refused_by_its_number(file):
    for line, said in BAD_LINES:
        file.write_text("\n".join([line_of([1]), "", line, line_of([2])]))
        with pytest.raises(ConfigError, match=rf"trace\.jsonl, line 3: .*{said}"):
            read_trace(file)
        assert len(read_trace(file, 1).prompts) == 1


def test_a_trace_that_cannot_be_read_or_has_nothing_to_keep_is_refused(tmp_path):
    path = tmp_path / "trace"
    short = json.dumps({"input_length": 511, "hash_ids": [1]}).encode()
    for content, said in (
        (None, "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"\n", "nothing to keep"),
        (short, "no prompt with a full block"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=said):
            read_trace(path)


# --------------------------------------------------------------------------------------- conversations, scans


def conversation_of(name: str, requests, parent=None) -> str:
    """`requests`: when, tokens, blocks shared, new blocks of 64 tokens."""
    lines = [[at, tokens, 7, 0.0, shared, new] for at, tokens, shared, new in requests]
    return json.dumps({"id": name, "parent": parent, "block_tokens": 64, "requests": lines})


@pytest.fixture
def conversations(tmp_path):
    one, two, more = list(range(8)), list(range(8, 16)), list(range(20, 28))
    path = tmp_path / "agents.jsonl.gz"
    lines = [
        conversation_of("a", [(0.0, 1030, 0, one + two), (30.0, 1536, 16, more), (40.0, 1000, 7, [77] * 8)]),
        conversation_of("a.0", [(0.0, 512, 0, one), (10.0, 600, 8, [5])], parent="a"),
        conversation_of("b", [(0.0, 512, 0, one)]),
    ]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_conversations_are_read_as_blocks_of_mooncakes_size_in_the_order_of_their_times(conversations):
    trace = read_any(conversations)
    assert [len(keys) for keys in trace.prompts] == [2, 1, 1, 1, 3, 1]
    first, sub, other, again, longer, changed = trace.prompts
    assert longer[:2] == first and sub == again == first[:1], "a sub-agent shares its parent's ids"
    assert other != sub, "ids of another conversation are other blocks"
    assert changed[0] != first[0], "its eighth block of 64 tokens is another one"
    assert (trace.num_blocks, trace.num_distinct) == (9, 5)
    assert trace.num_tokens == 1030 + 512 + 512 + 600 + 1536 + 1000
    assert [len(keys) for keys in read_any(conversations, 3).prompts] == [2, 1, 1]
    assert [len(keys) for keys in read_any(conversations, None, "turns").prompts] == [2, 1, 1, 3, 1, 1]


def test_conversations_without_a_full_block_or_of_an_odd_size_are_refused(tmp_path):
    path = tmp_path / "agents.jsonl"
    path.write_text(conversation_of("a", [(0.0, 500, 0, [1, 2, 3, 4, 5, 6, 7])]))
    with pytest.raises(ConfigError, match="nothing to keep"):
        read_any(path)
    path.write_text(
        json.dumps({"id": "a", "parent": None, "block_tokens": 48, "requests": [[0, 48, 1, 0, 0, [1]]]})
    )
    with pytest.raises(ConfigError, match="blocks of 48 tokens do not make up blocks of 512"):
        read_any(path)


def test_documents_of_a_scan_are_spread_evenly_and_never_come_back():
    trace = trace_of(PROMPTS)
    scanned = with_scan(trace, 3, 2)
    places = [number for number, keys in enumerate(scanned.prompts) if keys not in trace.prompts]
    assert places == [1, 4, 7]
    assert [keys for keys in scanned.prompts if keys in trace.prompts] == trace.prompts
    documents = [key for place in places for key in scanned.prompts[place]]
    assert len(set(documents)) == 6 and not set(documents) & {key for keys in trace.prompts for key in keys}


def test_a_scan_is_no_part_of_the_rates_but_pushes_others_out():
    trace = trace_of(PROMPTS)
    scanned = with_scan(trace, 3, 2)
    for name in ("num_requests", "num_blocks", "num_distinct", "num_tokens"):
        assert getattr(scanned, name) == getattr(trace, name)
    assert ladder(scanned) == ladder(trace)
    plenty = trace.num_distinct + 6
    for alone, among in zip(
        measure(trace, ["lru"], [3, plenty], silent),
        measure(scanned, ["lru"], [3, plenty], silent),
        strict=True,
    ):
        if among["policy"] == OPTIMUM or among["capacity_blocks"] == plenty:
            assert (among["hit_rate"], among["prefill_saved"]) == (alone["hit_rate"], alone["prefill_saved"])
        else:
            assert among["hit_rate"] < alone["hit_rate"]


# ---------------------------------------------------------------------------------------------------- command


def test_the_command_replays_conversations_and_a_scan(conversations, tmp_path, capsys):
    out = tmp_path / "out.json"
    argv = f"--policies lru --capacity-blocks 5,100 --interleave turns --scan 2 --scan-blocks 3 --json {out}"
    assert main(["bench", "trace", str(conversations), *argv.split()]) == 0
    assert "6 requests and 2 one-off documents of 3 blocks" in capsys.readouterr().out
    report = json.loads(out.read_text())
    of = report["trace"]
    assert (of["requests"], of["scans"], of["scan_blocks"], of["interleave"]) == (6, 2, 3, "turns")
    assert report["results"][1]["hit_blocks"] == 4


def test_the_command_prints_both_tables_and_writes_file_and_picture(file, tmp_path, capsys):
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    argv = f"--policies lru,cost,lru --capacity-blocks 3,5 --json {out} --plot {picture}".split()
    assert main(["bench", "trace", str(file), *argv]) == 0
    shown = capsys.readouterr().out
    assert "30.0" in shown and "prefill work saved" in shown and "upper bound" in shown
    report = json.loads(out.read_text())
    assert [(row["policy"], row["capacity_blocks"]) for row in report["results"]] == [
        (policy, capacity) for policy in ("lru", "cost", "optimum") for capacity in (3, 5)
    ]
    assert report["trace"] == {
        "file": "trace.jsonl",
        "requests": 6,
        "tokens": 5150,
        "block_tokens": 512,
        "blocks": 10,
        "distinct_blocks": 5,
    }
    assert report["results"][0]["hit_rate"] == 0.3
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_is_wrong_is_refused_by_name_in_one_line(file, tmp_path, capsys, monkeypatch):
    for argv, named in (
        (("--policies", "lru,mru"), "'mru'"),
        (("--policies", ""), "--policies"),
        (("--capacity-blocks", "0"), "--capacity-blocks"),
        (("--requests", "0"), "--requests"),
        (("--interleave", "time"), "--interleave"),
        (("--interleave", "often"), "--interleave"),
        (("--scan", "0"), "--scan"),
        (("--scan-blocks", "8"), "--scan-blocks needs --scan"),
        (("--plot", "x.txt"), "--plot"),
        (("--model", "smollm2-135m"), "--model"),
    ):
        assert main(["bench", "trace", str(file), *argv]) == 2
        assert named in capsys.readouterr().err
    file.write_text("nonsense\n")
    assert main(["bench", "trace", str(file)]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and "line 1: not JSON" in shown.err
    monkeypatch.setattr("penstock.bench.report.find_spec", lambda name: None)  # before the trace is read
    assert main(["bench", "trace", str(tmp_path / "none"), "--plot", str(tmp_path / "x.png")]) == 2
    assert "penstock[plots]" in capsys.readouterr().err


def test_the_command_needs_no_torch(file, tmp_path):
    script = (
        "import sys; sys.modules['torch'] = None\nfrom penstock.cli import main\n"
        f"sys.exit(main(['bench', 'trace', {str(file)!r}, '--plot', {str(tmp_path / 'x.png')!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
