"""The Triton backend agrees with the reference in float64, reads nothing that it must not, and writes
everything that it must.

With TRITON_INTERPRET=1 the same tests run on CPU tensors, with smaller batches, in float32 and float16.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch", reason="NOT TESTED: the attention kernels need torch")
pytest.importorskip("triton", reason="NOT TESTED: the attention kernels need triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip(
        "NOT TESTED: the attention kernels need an NVIDIA GPU, and there is none here",
        allow_module_level=True,
    )

from penstock.engine.execution.attention import triton as backend  # noqa: E402
from penstock.engine.execution.attention import triton_kernels  # noqa: E402
from tests.support.reference_attention import ReferenceAttention  # noqa: E402
from penstock.engine.execution.attention.triton import TritonAttention  # noqa: E402
from penstock.models.model import ModelConfig, OtherRope  # noqa: E402
from tests.support.ragged import RaggedStep, Span, leave_out, outputs, ragged_config, ragged_step, rope_table  # noqa: E402

pytestmark = pytest.mark.gpu
on_gpu = pytest.mark.skipif(INTERPRETED, reason="NOT TESTED: needs the device itself")

DEVICE = "cpu" if INTERPRETED else "cuda"
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # products of bfloat16 are wrong in the interpreter
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}

DECODES = (Span(37, 1), Span(0, 1), Span(31, 1, writes=False), Span(95, 1))
CHUNKS = (Span(0, 11), Span(16, 3), Span(21, 17))
MIXED = DECODES[:3] + CHUNKS
SMALL = ragged_config(num_heads=2, num_kv_heads=1, head_dim=16, num_layers=1)


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if INTERPRETED:
        torch.set_num_threads(1)
        monkeypatch.setattr(
            backend, "ROTATE_MANY_FROM", 2
        )  # one program per head and token takes the interpreter minutes
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(8, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def make_step(spans: tuple[Span, ...], config: ModelConfig | None = None, **how: Any) -> RaggedStep:
    config = config or ragged_config(num_heads=3, num_kv_heads=1, num_layers=1)
    return ragged_step(config, spans, device=DEVICE, **{"shared_blocks": 1, **how})


def assert_agrees(
    step: RaggedStep,
    kind: type[TritonAttention] = TritonAttention,
    norms: bool = True,
    blank_from: int | None = None,
    **how: Any,
) -> None:
    theirs, ours = step.with_own_arena(), step.with_own_arena()
    reference = ReferenceAttention(theirs.arena, step.config, step.rope, blank_from, torch.float64)
    tried = kind(ours.arena, step.config, step.rope, blank_from, backend.Choices(**how))
    expected, made = outputs(reference, theirs, norms=norms), outputs(tried, ours, norms=norms)
    tolerance = TOLERANCE[step.arena.dtype]
    for got, want in zip(made, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=want is expected[-1])


def with_splits(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    monkeypatch.setattr(TritonAttention, "num_splits", lambda *_: splits)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["single", "half"])
@pytest.mark.parametrize("splits", [1, 3])
def test_a_mixed_step_agrees_with_the_reference(
    dtype: Any, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_splits(monkeypatch, splits)
    assert_agrees(make_step(MIXED, dtype=dtype, seed=splits))


@pytest.mark.parametrize("group", [1, 2, 5, 8])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_every_group_size_and_head_size_agrees(group: int, head_dim: int) -> None:
    if INTERPRETED and (group, head_dim) not in {(1, 16), (5, 80), (8, 128), (8, 256)}:
        pytest.skip("NOT TESTED: left to the device, the interpreter is slow")
    config = ragged_config(num_heads=group, num_kv_heads=1, head_dim=head_dim, num_layers=1)
    assert_agrees(make_step((Span(21, 1), Span(9, 20)), config, dtype=HALF, seed=group))


@pytest.mark.parametrize("block_tokens", [8, 16, 32, 128])
def test_every_block_size_agrees(block_tokens: int) -> None:
    assert_agrees(make_step((Span(130, 1), Span(70, 5)), block_tokens=block_tokens, seed=block_tokens))


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("norms", [True, False], ids=["norms", "plain"])
def test_few_and_many_tokens_rotate_alike(
    num_tokens: int, norms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "ROTATE_MANY_FROM", 5)
    config = ragged_config(num_heads=4, num_kv_heads=2, num_layers=2)
    assert_agrees(make_step((Span(30, num_tokens),), config), norms=norms)


def test_layers_of_another_table_turn_by_theirs() -> None:
    for theta in (700.0, 0.0):
        config = replace(ragged_config(num_layers=3), windows=(0, 20, 0), other_rope=OtherRope((1,), theta))
        assert_agrees(make_step((Span(30, 1), Span(9, 20)), config))


def on_multiprocessors(num: int) -> type[TritonAttention]:
    """The backend as on a device that has so many."""

    class On(TritonAttention):
        def __init__(self, *args: Any, **how: Any) -> None:
            super().__init__(*args, **how)
            self._num_sms = num

    return On


@pytest.mark.parametrize("shares", [33, 64] if INTERPRETED else [31, 32, 33, 63, 64])
def test_long_keys_in_as_many_shares_as_can_be_merged_agree(
    shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every share has keys, the last one only a few: a share that is not merged is missing from the
    result."""
    assert shares <= backend.MAX_SPLITS == 64, (
        "these shares go below, to and beyond the half and the whole of what is merged"
    )
    with_splits(monkeypatch, shares)
    keys = backend.TUNING[4].decode.keys
    assert_agrees(make_step((Span((shares - 1) * keys + 4, 1),), SMALL, seed=shares))


@pytest.mark.parametrize("shares", [5] if INTERPRETED else [1, 5])
def test_chunks_around_the_edges_of_tiles_agree(shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token and one key less than a tile, a tile, and one more, in both directions."""
    with_splits(monkeypatch, shares)
    tile, group = backend.TUNING[4].short, SMALL.num_heads // SMALL.num_kv_heads
    tokens = tile.rows // group
    spans = [
        Span(tile.keys + past, q_len) for past in (-2, -1, 0, 1) for q_len in (tokens - 1, tokens, tokens + 1)
    ]
    assert_agrees(make_step(tuple(spans[:: 2 if INTERPRETED else 1]), SMALL), norms=False)


SIZES = backend.FusedSizes(own=64, rows=(64, 32), least_rows=24, keys=(256, 128), least_keys=128)


def test_all_shapes_that_a_context_can_need_are_planned() -> None:
    own = [(64, 0), (128, 0)]
    assert backend.fused_shapes(SIZES, 128, 384) == [*own, (64, 256), (32, 256), (64, 128), (32, 128)]
    assert backend.fused_shapes(SIZES, 128, 257) == [*own, (64, 256), (32, 256), (64, 128), (32, 128)]
    assert backend.fused_shapes(SIZES, 128, 256) == [*own, (64, 128), (32, 128)], (
        "a chunk behind 256 would be outside the context"
    )
    assert backend.fused_shapes(SIZES, 128, 128) == own
    assert backend.fused_shapes(SIZES, 128, 40) == [(64, 0)], "a short context has no more than it can use"
    assert backend.fused_shapes(SIZES, 33, 384) == [(64, 256), (32, 256), (64, 128), (32, 128)], (
        "a chunk of 33 tokens is rounded up"
    )
    assert backend.fused_shapes(SIZES._replace(least_keys=200), 32, 200) == [], (
        "pieces that are never taken are not planned"
    )


def test_only_planned_shapes_are_fused() -> None:
    """A chunk among itself from half a size on; what is before it in whole pieces; in float32, or before
    anything is planned, nothing."""
    step = make_step((Span(0, 8),), SMALL, dtype=HALF)
    choices = backend.Choices(fused_sizes=SIZES)
    attention = TritonAttention(step.arena, step.config, step.rope, choices=choices)
    assert attention._fuses(0, 64) == attention._fuses(256, 64) == (0, False)
    attention._planned = set(backend.fused_shapes(SIZES, 128, 600))
    assert [attention._fuses(0, q_len) for q_len in (31, 32, 128, 129)] == [
        (0, False),
        (0, True),
        (0, True),
        (0, False),
    ]
    assert [attention._fuses(start, 64) for start in (127, 128, 129, 384, 500)] == [
        (0, False), (128, True), (128, False), (384, True), (384, False)
    ]  # fmt: skip
    assert [attention._fuses(128, q_len) for q_len in (23, 24, 31, 32)] == [
        (0, False),
        (128, False),
        (128, False),
        (128, True),
    ]
    attention._planned.discard((32, 128))
    assert attention._fuses(128, 96) == (0, False) and attention._fuses(128, 64) == (128, True)
    single = make_step((Span(0, 8),), SMALL)
    attention = TritonAttention(single.arena, single.config, single.rope, choices=choices)
    attention._planned = set(backend.fused_shapes(SIZES, 128, 600))
    assert attention._fuses(256, 64) == (0, False)


def test_a_captured_step_does_not_know_its_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(MIXED)
    assert_agrees(replace(step, inputs=replace(step.inputs, max_q_len=0, max_kv_len=0, spans=())))


@pytest.mark.parametrize("splits", [1, 3])
def test_padding_tokens_that_belong_to_no_chunk_give_zeros(
    splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_splits(monkeypatch, splits)
    step = make_step((Span(9, 4), Span(0, 6)))
    attention = TritonAttention(step.arena, step.config, step.rope)
    q_starts = step.inputs.q_starts.clone()
    q_starts[2:] = 4  # the second chunk has no tokens, and its six are padding
    inputs = replace(step.inputs, q_starts=q_starts, num_decodes=0, max_q_len=0, max_kv_len=0, spans=())
    q, k, v = attention.rotate_and_write(0, step.qkv(), None, None, inputs)
    out = attention.attend(0, q, k, v, inputs)
    assert out[4:].eq(0).all() and out[:4].isfinite().all() and out[:4].ne(0).any()


def test_a_chunk_without_keys_gives_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    for splits in (1, 4):
        with_splits(monkeypatch, splits)
        step = make_step((Span(20, 1), Span(7, 1)))
        step.inputs.kv_lens[1] = 0
        out = outputs(TritonAttention(step.arena, step.config, step.rope), step)[3]
        assert out[1].eq(0).all() and out[0].isfinite().all()


def test_a_length_one_too_long_is_noticed() -> None:
    """The value behind the end is NaN, so nothing that reads it passes."""
    step = make_step((Span(37, 1), Span(40, 1)))
    step.inputs.kv_lens.add_(1)
    assert outputs(TritonAttention(step.arena, step.config, step.rope), step)[3].isnan().any()


@pytest.mark.parametrize(("num_chunks", "splits"), [(8, 2), (9, 3), (10, 3), (11, 1), (20, 1), (21, 1)])
def test_decodes_agree_with_the_reference_however_many_there_are_per_multiprocessor(
    num_chunks: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = [Span(37 + 29 * (i % 5), 1) for i in range(num_chunks)]
    step, kind = make_step(spans, dtype=HALF), on_multiprocessors(8)
    made = kind(step.arena, step.config, step.rope)
    monkeypatch.setattr(kind, "num_splits", lambda *_: 2)
    assert made.grid(backend._Launch(0, num_chunks, 0, num_chunks, 1), deep=False).splits == splits
    assert_agrees(step, kind)


def test_sequences_of_different_lengths_in_many_shares_agree_with_the_reference() -> None:
    tuning = backend.TUNING[2]._replace(programs_per_sm=64)
    assert_agrees(
        make_step([Span(3, 1), Span(900, 1), Span(64, 1), Span(250, 1), Span(0, 1)], dtype=HALF),
        tuning=tuning,
    )


# ---------------------------------------------------------------------------------- PyTorch's fused attention


def plain_attention(
    self: TritonAttention, q: Any, k: Any, v: Any, *, causal: bool, with_lse: bool
) -> tuple[Any, Any]:
    """What the fused operators return, from their definition."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[1:], device=q.device).tril().bool(), float("-inf")
        )
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out.to(q.dtype).contiguous(), scores.logsumexp(-1).float().contiguous()


@pytest.mark.parametrize("span", [Span(0, 40), Span(37, 24), Span(64, 32)], ids=str)
def test_a_gathered_prefix_joins_the_chunk(span: Span, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonAttention, "_fused_attention", plain_attention)
    config = ragged_config(num_heads=4, num_kv_heads=2, num_layers=1)
    assert_agrees(make_step((span,), config, dtype=HALF), prefill="sdpa")


class Planned(TritonAttention):
    """Everything is planned; records what fused attention is asked for."""

    asked: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args[:4], choices=backend.Choices(fused_sizes=SIZES))
        for shape in backend.fused_shapes(SIZES, 128, 2000):
            self.plan(*shape)
            self._planned.add(shape)
        self.asked.clear()

    def _fused_attention(self, q: Any, k: Any, v: Any, *, causal: bool, with_lse: bool) -> tuple[Any, Any]:
        self.asked.append((len(q), 0 if causal else len(k)))
        fused = plain_attention if INTERPRETED else TritonAttention._fused_attention
        return fused(self, q, k, v, causal=causal, with_lse=with_lse)


FUSED = ragged_config(num_heads=4, num_kv_heads=2, head_dim=16 if INTERPRETED else 128, num_layers=1)


@pytest.mark.parametrize("splits", [3] if INTERPRETED else [1, 3])
@pytest.mark.parametrize(
    ("spans", "asked"),
    [
        ((Span(128, 40),), [(64, 0), (64, 128)]),  # nothing between
        ((Span(128, 64), Span(40, 3)), [(64, 0), (64, 128)]),
        ((Span(150, 30),), [(32, 128)]),
        ((Span(410, 70),), [(64, 256), (32, 256), (64, 128), (32, 128)]),  # two pieces, and the chunk in two
        ((Span(37, 1), Span(300, 1), Span(0, 50)), [(64, 0)]),  # behind decodes
        (
            (Span(37, 1), Span(9, 20), Span(130, 33), Span(5, 30), Span(70, 24), Span(256, 32), Span(3, 2)),
            [(64, 128), (64, 0), (32, 256)],
        ),
    ],
    ids=["alone", "before another", "between", "pieces", "behind decodes", "among others"],
)
def test_deep_chunks_take_fused_attention_over_pieces_of_their_prefix(
    spans: tuple[Span, ...], asked: list[tuple[int, int]], splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside decodes and other chunks, with and without tokens between the pieces and the chunk, and with
    rows that fill no shape."""
    with_splits(
        monkeypatch, 1 if INTERPRETED and len(spans) > 3 else splits
    )  # shares of many chunks take the interpreter seconds
    assert_agrees(make_step(spans, FUSED, dtype=HALF, seed=splits), Planned)
    assert Planned.asked == asked


def test_every_step_is_divided_anew() -> None:
    one, other = (
        make_step(spans, FUSED, dtype=HALF) for spans in ((Span(150, 30),), (Span(9, 30), Span(150, 30)))
    )
    attention = Planned(one.arena, one.config, one.rope)
    for _ in range(2):
        assert [part.num_fused for part in attention._parts(one.inputs)] == [128]
        assert [part.num_fused for part in attention._parts(other.inputs)] == [0, 128]
        assert attention._parts(replace(one.inputs, spans=())) == []


def test_gathered_tokens_are_those_of_the_table() -> None:
    config = ragged_config(num_heads=4, num_kv_heads=2, num_layers=2)
    step = make_step((Span(30, 1), Span(53, 20)), config)
    attention = TritonAttention(step.arena, step.config, step.rope)
    for first, num_tokens in ((0, 1), (0, 32), (0, 53), (16, 37), (9, 33)):
        gathered = attention.gathered(1, 1, first, num_tokens, step.inputs)
        slots = step.inputs.tables[int(step.inputs.table_starts[1]) :][:4].long()
        expected = step.arena[slots, 1].transpose(0, 1).flatten(1, 2)[:, first : first + num_tokens]
        for got, want in zip(gathered, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


@on_gpu
@pytest.mark.parametrize("fused", ["cudnn", "flash"])
@pytest.mark.parametrize("span", [Span(0, 256), Span(0, 777), Span(512, 256), Span(333, 100)], ids=str)
def test_fused_attention_agrees_with_the_reference(fused: Any, span: Span) -> None:
    config = ragged_config(num_heads=8, num_kv_heads=2, head_dim=128, num_layers=2)
    assert_agrees(make_step((span,), config, dtype=HALF), prefill="sdpa", fused=fused)


# ----------------------------------------------------------------------------------------- only on the device


@on_gpu
def test_a_replayed_capture_equals_an_eager_step_to_the_bit() -> None:
    """Captured over one set of lengths and slots, replayed over another that was written into the same
    tensors."""
    config = ragged_config(num_heads=8, num_kv_heads=2, head_dim=128, num_layers=2)
    first = make_step((Span(40, 1), Span(9, 1), Span(200, 1)), config, dtype=HALF, seed=1)
    second = make_step((Span(12, 1), Span(203, 1), Span(36, 1)), config, dtype=HALF, seed=2)
    assert first.arena.shape == second.arena.shape
    expected = outputs(TritonAttention(second.arena.clone(), config, second.rope), second)[:-1]
    held = replace(
        second, arena=first.arena, inputs=replace(first.inputs, max_q_len=0, max_kv_len=0, spans=())
    )
    attention = TritonAttention(first.arena, config, first.rope)
    outputs(attention, held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = outputs(attention, held)[:-1]
    first.arena.copy_(second.arena)
    for field in ("positions", "write_at", "kv_lens", "table_starts", "tables"):
        getattr(held.inputs, field).copy_(getattr(second.inputs, field))
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(made, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@on_gpu
def test_slots_beyond_what_32_bits_count_are_reached() -> None:
    config = ragged_config(num_heads=32, num_kv_heads=8, head_dim=128, num_layers=36)
    slots = 3 * 2**31 // (36 * 2 * 16 * 8 * 128) // 2
    if torch.cuda.mem_get_info()[0] < 4 * slots * 36 * 2 * 16 * 8 * 128 * 2:
        pytest.skip("NOT TESTED: 64-bit offsets need 26 GB of free device memory")
    step = make_step((Span(300, 1), Span(100, 64)), config, dtype=HALF, spare_slots=slots)
    assert step.inputs.tables.max().item() * step.arena.stride(0) > 2**31
    assert_agrees(step)
    assert_agrees(make_step((Span(256, 128),), config, dtype=HALF, spare_slots=slots), prefill="sdpa")


@on_gpu
def test_many_random_batches_agree() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    for seed in range(20):
        decodes = [Span(draw(0, 900), 1, bool(draw(0, 2))) for _ in range(draw(0, 12))]
        chunks = [Span(draw(0, 400), draw(2, 300)) for _ in range(draw(0, 4))]
        config = ragged_config(
            num_heads=8, num_kv_heads=(1, 2, 4, 8)[draw(0, 4)], head_dim=(64, 128)[draw(0, 2)], num_layers=1
        )
        spans = (*decodes, *chunks) or (Span(5, 1),)
        assert_agrees(make_step(spans, config, dtype=HALF, shared_blocks=draw(0, 5), seed=seed))


@on_gpu
@pytest.mark.parametrize("windows", [(), (100, 0)], ids=["no windows", "windows"])
def test_no_step_compiles_anything_after_the_first_of_its_kind(windows: tuple[int, ...]) -> None:
    config = replace(
        ragged_config(num_heads=8, num_kv_heads=2, head_dim=64, num_layers=len(windows) or 1), windows=windows
    )

    def run(*spans: Span) -> None:
        step = make_step(spans, config, dtype=HALF)
        # An offset of one moves the index tensors off their 16-byte alignment, as views into one packed
        # tensor are.
        for field in ("positions", "write_at", "q_starts", "kv_lens", "table_starts", "tables"):
            whole = getattr(step.inputs, field)
            setattr(step.inputs, field, torch.cat([whole[:1], whole])[1:] if len(spans) % 2 else whole)
        outputs(TritonAttention(step.arena, config, step.rope), step)

    def compiled() -> int:
        known = (
            triton_kernels.paged_attention_kernel,
            triton_kernels.merge_splits_kernel,
            triton_kernels.rotate_and_write_kernel,
        )
        return sum(len(cache[0]) for kernel in known for cache in kernel.device_caches.values())

    for spans in (
        (Span(20, 1),),
        (Span(5, 1),) * 300,
        (Span(0, 600),),
        (Span(0, 10),),
        (Span(0, 600),) * 5,
        (Span(0, 10),) * 300,
    ):
        run(*spans)
    before = compiled()
    for spans in (
        (Span(21, 1),) * 3,
        (Span(7, 1),) * 16,
        (Span(40, 1),) * 32,
        (Span(3, 599),),
        (Span(16, 15), Span(0, 16)),
        (Span(1, 1),),
    ):
        run(*spans)
    assert compiled() == before


# ---------------------------------------------------------------------------------------------------- windows

WINDOWED = (Span(70, 1), Span(33, 1), Span(3, 1), Span(41, 3), Span(30, 37))


def windowed(*windows: int, **sizes: int) -> ModelConfig:
    sizes = sizes or {"num_heads": 3, "num_kv_heads": 1}
    return replace(ragged_config(num_layers=len(windows), **sizes), windows=windows)


@pytest.mark.parametrize("window", [1, 34] if INTERPRETED else [1, 7, 16, 33, 34, 35, 63, 64, 65, 71, 4096])
@pytest.mark.parametrize("splits", [3] if INTERPRETED else [1, 3])
def test_a_window_hides_what_it_hides_in_the_reference(
    window: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_splits(monkeypatch, splits)
    assert_agrees(
        make_step(WINDOWED, windowed(window, num_heads=2, num_kv_heads=1, head_dim=16), seed=window)
    )


@pytest.mark.parametrize("left_out", [range(3, 40), range(130), range(2000)], ids=["some", "tiles", "all"])
@pytest.mark.parametrize("window", [34] if INTERPRETED else [0, 34])
@pytest.mark.parametrize("splits", [3] if INTERPRETED else [1, 3])
def test_keys_that_were_left_out_are_seen_by_nobody(
    splits: int, window: int, left_out: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_splits(monkeypatch, splits)
    step = make_step(
        (Span(200, 1), *MIXED, Span(150, 9)), windowed(window), shared_blocks=0, dtype=HALF
    )  # of some whole tiles are left out
    leave_out(step, left_out)
    assert_agrees(step, blank_from=0)


def test_all_that_a_layer_of_drafts_may_need_is_compiled_before_the_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other layers share what captures of steps have compiled: it skips no keys."""
    kind, kernel = on_multiprocessors(132), triton_kernels.paged_attention_kernel
    made = set[tuple[Any, ...]]()

    class Noted:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*given: Any, **how: Any) -> None:
                made.add(tuple(how[name] for name in VARIANT))
                kernel[grid](*given, **how)

            return launch

    monkeypatch.setattr(triton_kernels, "paged_attention_kernel", Noted())
    attention = kind(
        torch.zeros(2, 2, 2, 16, 1, 32, dtype=HALF, device=DEVICE),
        (config := windowed(0, 34)),
        rope_table(config, DEVICE),
        blank_from=1,
    )
    attention.compile()
    needed = set[tuple[Any, ...]]()
    for q_len, num_chunks, deep in itertools.product(
        (1, 2, 16, 64, 600, 5000), (1, 5, 40, 150, 200, 300, 500), (False, True)
    ):
        tile, _, splits = attention.grid(backend._Launch(0, num_chunks, 0, q_len * num_chunks, q_len), deep)
        needed.add((*tile, splits > 1, False, 34, True))
    assert needed <= made and len(needed) > 8


VARIANT = ("TILE_ROWS", "TILE_KEYS", "num_warps", "num_stages", "SPLIT", "WITH_LSE", "WINDOW", "SKIPS_BLANK")


@on_gpu
@pytest.mark.parametrize("window", [100, 512, 1000])
def test_windows_over_long_contexts_agree_in_half_precision(window: int) -> None:
    config = windowed(window, 0, num_heads=8, num_kv_heads=2, head_dim=128)
    spans = (*(Span(num, 1) for num in (4000, 777, 99, 100, 511, 512)), Span(0, 1500), Span(1400, 700))
    assert_agrees(make_step(spans, config, dtype=HALF, seed=window))


def test_a_chunk_whose_window_hides_keys_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step((Span(0, 40),), windowed(39, 40), dtype=HALF)
    choices = backend.Choices(prefill="sdpa")
    attention = TritonAttention(step.arena, step.config, step.rope, choices=choices)
    assert [attention._fuses(0, 40, window) for window in (39, 40, 0)] == [(0, False), (0, True), (0, True)]
