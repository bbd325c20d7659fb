"""What every test has in common: weights run in float32, the reference, where a test does not ask for another form."""

from __future__ import annotations

import os

os.environ["PENSTOCK_WEIGHTS"] = "float32"  # for child processes, too
