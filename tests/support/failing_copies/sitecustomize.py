"""For the other ranks of a test: their first loads fail. Python imports this by its name at the start."""

import os
import sys

if "penstock.engine.follower" in " ".join(sys.orig_argv):
    from penstock.kv import transfer

    _left = [int(os.environ.get("PENSTOCK_TEST_FAILING_LOADS", "0"))]
    _copy = transfer.CpuCopier.copy

    def copy(self, source_slots, dest_slots, layers):  # type: ignore[no-untyped-def]
        source, dest = self._ends.tensors
        if len(source) > len(dest) and _left[0]:  # from host memory, which is larger in that test
            _left[0] -= 1
            raise RuntimeError("the link of this rank is down")
        _copy(self, source_slots, dest_slots, layers)

    transfer.CpuCopier.copy = copy  # type: ignore[method-assign]
