"""Sessions whose CUDA driver is the stand-in fake_cuda.c, so that fused nodes run in ONNX Runtime's CPU provider.

    ONNXFUSE_LIBCUDA=.../fake_cuda.so python scenarios.py NAME

Each scenario is a function that raises where something is wrong.  A process loads one driver, hence one process for
each.  With ``SCENARIO_MODELS`` set to a folder, models are read from it and the package is not imported, so that any
Python with an ONNX Runtime can run them; ``stand_in.write`` fills the folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from native import (
    call_scenarios,
    convolution_scenarios,
    kernel_scenarios,
    launch_scenarios,
    statistics_scenarios,
)

SCENARIOS = {
    function.__name__: function
    for module in (
        kernel_scenarios, launch_scenarios, call_scenarios, convolution_scenarios, statistics_scenarios)
    for function in module.SCENARIOS
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]]()
