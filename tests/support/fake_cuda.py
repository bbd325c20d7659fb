"""A GPU that is not there: tensors without memory, lanes that run each op at once, kernels that are not
launched. Whole engines are built and made warm over it on a CPU, by the code that a GPU runs.

Torch's fake tensors know device, dtype and shape. So operands on two devices, products of two dtypes and
reads of values are errors, as on a GPU. A copy between host and device inside an op is one here: a replay
would repeat it from old memory, and from pageable memory it blocks the launching thread."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.contract import Access, Fence
from penstock.engine import build as engine_build
from penstock.engine import sizing
from penstock.engine.execution import staging
from penstock.kv import build as kv_build
from penstock.kv import memory
from penstock.lanes import cuda
from penstock.lanes.lane import Capture, Op, Replay, Ticket
from penstock.models import adapters, loader
from penstock.models.weights import each_weight, empty_weight

DEVICE_BYTES = 139 << 30
HOPPER = 90
_KERNEL_BYTES = 227 << 10  # of shared memory, for one program
_COPIES = ("_to_copy", "_pin_memory")
_OF_ONE_DTYPE = (
    *("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "index_put", "index_copy", "index_add"),
    *("scatter", "scatter_add"),
)
_SET_UP = (None, "padding")  # may copy as they like: no request waits


class _Passed:
    lane, number = "fake", 0

    def passed(self) -> bool:
        return True

    def wait_passed(self, timeout_s: float | None = None) -> None:
        pass


class _Done:
    def __init__(self, label: str, error: BaseException | None) -> None:
        self.label, self._error = label, error

    def done(self) -> bool:
        return True

    def error(self) -> BaseException | None:
        return self._error

    def wait_done(self, timeout_s: float | None = None) -> None:
        if self._error is not None:
            raise self._error


class FakeLane:
    """Implements `Lane`. Ops run on the caller's thread; those of a replay ran at its capture."""

    def __init__(self, name: str, gpu: FakeGpu) -> None:
        self.name, self._gpu = name, gpu
        self._num_open = 0

    def submit(
        self, op: Op, accesses: Sequence[Access] = (), *, label: str, after: Ticket | None = None
    ) -> _Done:
        error = after.error() if after is not None else None
        if error is None:
            self._num_open += 1
            try:
                with self._gpu.inside(label):
                    op()
            except Exception as raised:
                error = raised
            self._num_open -= 1
        if error is not None and self._gpu.is_capturing:
            raise error
        return _Done(label, error)

    def record(self) -> Fence:
        assert not self._gpu.is_capturing
        return _Passed()  # type: ignore[return-value]

    def wait(self, fence: Fence) -> None:
        pass

    @contextlib.contextmanager
    def capture(self, label: str) -> Iterator[Capture]:
        recording = Capture(self.name, label)
        self._gpu.is_capturing = True
        try:
            yield recording
        finally:
            self._gpu.is_capturing = False
        recording.made = Replay(label, lambda: None)

    def replay(
        self, replay: Replay, accesses: Sequence[Access] = (), *, after: Ticket | None = None
    ) -> _Done:
        return _Done(replay.label, None if after is None else after.error())

    def touch(self, accesses: Sequence[Access], *, label: str) -> None:
        pass

    def is_current(self) -> bool:
        return self._num_open > 0

    def drain(self, timeout_s: float | None = None) -> None:
        pass

    def close(self, timeout_s: float | None = None) -> None:
        pass


class FakeGpu(TorchDispatchMode):
    """What ops do, and the memory that tensors would take."""

    def __init__(self) -> None:
        super().__init__()
        self.is_capturing = False
        self.label: str | None = None  # of the op that runs
        self.kernels: dict[tuple[Any, ...], Any] = {}  # as compiled, where that is wanted
        self.num_launched = 0
        self.held = {False: 0, True: 0}  # bytes: made outside of captures, and in them
        self.most = dict(self.held)
        self._known = set[int]()

    @contextlib.contextmanager
    def inside(self, label: str) -> Iterator[None]:
        before, self.label = self.label, label
        try:
            yield
        finally:
            self.label = before

    @property
    def free_bytes(self) -> int:
        return DEVICE_BYTES - sum(self.held.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name.rstrip("_") in _OF_ONE_DTYPE:
            dtypes = {one.dtype for one in tree_leaves(args) if isinstance(one, Tensor)} - {torch.int64}
            assert len(dtypes - {torch.int32}) < 2, f"{name} of {dtypes} in {self.label!r}"
        if name in _COPIES:
            self.check_copy(args[0].device, made.device, (kwargs or {}).get("non_blocking", False))
        for one in tree_leaves(made):
            if isinstance(one, FakeTensor) and one.is_cuda:
                self._count(one)
        return made

    def check_copy(self, one: torch.device, other: torch.device, non_blocking: bool) -> None:
        if one == other or self.label in _SET_UP:
            return
        assert non_blocking and not self.is_capturing, f"a copy between {one} and {other} in {self.label!r}"

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        at, num_bytes, pool = storage._cdata, storage.nbytes(), self.is_capturing
        if at in self._known:
            return
        self._known.add(at)
        self.held[pool] += num_bytes
        self.most[pool] = max(self.most[pool], self.held[pool])
        weakref.finalize(storage, self._freed, at, num_bytes, pool)

    def _freed(self, at: int, num_bytes: int, pool: bool) -> None:
        self._known.discard(at)
        self.held[pool] -= num_bytes


class _Methods(TorchFunctionMode):
    """Of tensors: torch's own ask for a device, and a build of torch without CUDA knows none."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if given and func is not Tensor.to and not any(isinstance(one, FakeTensor) for one in given):
            with unset_fake_temporarily():  # host memory, which has content
                return func(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and args[0].is_cuda:
            view, tensors = _viewed(*args)
            return torch.ops.aten.index(view, tensors) if tensors else view
        if func is Tensor.__setitem__ and args[0].is_cuda:
            (view, tensors), value = _viewed(*args[:2]), args[2]
            if tensors:
                value = value if isinstance(value, Tensor) else view.new_tensor(value)
                return torch.ops.aten.index_put_(view, tensors, value)
            return self._copied(view, value) if isinstance(value, Tensor) else view.fill_(value)
        if func is torch.equal and self._gpu.label in _SET_UP:
            return args[0] is args[1]
        if func is Tensor.contiguous and args[0].is_cuda:
            whole = args[0]
            return whole if whole.is_contiguous() else whole.clone(memory_format=torch.contiguous_format)
        if func is Tensor.copy_ and args[0].is_cuda | args[1].is_cuda:
            return self._copied(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _copied(self, dest: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert torch.broadcast_shapes(dest.shape, source.shape) == dest.shape
        self._gpu.check_copy(dest.device, source.device, non_blocking)
        return dest


def _viewed(whole: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """The part that numbers and slices leave, and its index tensors by dimension."""
    parts = index if isinstance(index, tuple) else (index,)
    at = next((i for i, one in enumerate(parts) if one is Ellipsis), len(parts))
    num_own = sum(one is not None and one is not Ellipsis for one in parts)
    parts = (*parts[:at], *[slice(None)] * (whole.dim() - num_own), *parts[at + 1 :])
    view, dim, tensors = whole, 0, list[Tensor | None]()
    for one in parts:
        if isinstance(one, Tensor):
            tensors += [None] * (dim - len(tensors)) + [one]
            dim += 1
        elif one is None:
            view, dim = view.unsqueeze(dim), dim + 1
        elif isinstance(one, slice):
            if one != slice(None):
                first, end, step = one.indices(view.shape[dim])
                view = torch.ops.aten.slice(view, dim, first, max(first, end), step)
            dim += 1
        else:
            view = view.select(dim, int(one))
    return view, tensors


class _Driver:
    """As Triton asks for it."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _launcher(gpu: FakeGpu, run: Any, compiles: bool) -> Any:
    from triton.runtime.errors import OutOfResources

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        for name, one in zip(self.arg_names, args, strict=False):
            if isinstance(one, Tensor):
                is_pinned = self.fn.__name__ == "_move_kernel" and not isinstance(one, FakeTensor)
                assert one.is_cuda or is_pinned, f"{self.fn.__name__}: {name} is on {one.device}"
        assert all(0 < size < 1 << (31 if at == 0 else 16) for at, size in enumerate(grid)), (self, grid)
        gpu.num_launched += 1
        if not compiles:
            return
        with unset_fake_temporarily(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = run(self, *args, grid=grid, warmup=True, **options)
        gpu.kernels[made.hash,] = made
        if made.metadata.shared > _KERNEL_BYTES:
            raise OutOfResources(made.metadata.shared, _KERNEL_BYTES, self.fn.__name__)

    return launch


def _patch(patch: pytest.MonkeyPatch, gpu: FakeGpu, compiles: bool) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    def lane(name: str, *_: Any) -> FakeLane:
        return FakeLane(name, gpu)

    def free_bytes(device: torch.device) -> int:
        return gpu.free_bytes if device.type == "cuda" else 64 << 30

    def real(whole: Any) -> Any:
        """Host memory is there, and not pinned."""

        def made(*args: Any, pin_memory: bool = False, **how: Any) -> Any:
            with unset_fake_temporarily() if pin_memory else contextlib.nullcontext():
                return whole(*args, **how)

        return made

    def weights(config: Any, seed: int, device: Any, dtype: Any, progress: Any, forms: Any) -> Any:
        return {
            one.name: empty_weight(one, device, dtype) for one in each_weight(config, "weights", progress)
        }

    row_order = adapters._row_order

    def real_order(*given: Any) -> Any:
        with unset_fake_temporarily():
            return row_order(*given)

    patch.setattr(adapters, "_row_order", real_order)
    patch.setattr(cuda, "is_usable", lambda: True)
    patch.setattr(cuda, "wait_set_up", lambda device: None)
    for module in (engine_build, kv_build):
        patch.setattr(module, "make_lane", lane)
    for module in (engine_build, sizing, kv_build, memory):
        patch.setattr(module, "free_bytes", free_bytes)
    patch.setattr(memory, "_register", lambda *_: "there is no GPU")
    patch.setattr(loader, "dummy_weights", weights)
    patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    patch.setattr(torch, "empty", real(torch.empty))
    patch.setattr(torch, "zeros", real(torch.zeros))
    patch.setattr(staging, "_NUM_PIECES", 4)
    patch.setattr(JITFunction, "run", _launcher(gpu, JITFunction.run, compiles))
    patch.setattr(driver, "_active", _Driver(GPUTarget("cuda", HOPPER, 32)))


@contextlib.contextmanager
def fake_cuda(compiles: bool = False) -> Iterator[FakeGpu]:
    """Inside, `build` makes engines on a GPU that is not there. `compiles`: kernels are compiled for Hopper,
    which takes seconds each; one that does not fit is an error."""
    gpu = FakeGpu()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        _patch(patch, gpu, compiles)
        with FakeTensorMode(allow_non_fake_inputs=True), gpu, _Methods(gpu):
            yield gpu
