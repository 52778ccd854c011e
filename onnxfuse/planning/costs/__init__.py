"""How long kernels take on a GPU, and what that is predicted by.

cost.py        from bytes and arithmetic to seconds; library.py what ONNX Runtime's libraries take
traffic.py     bytes, kernels and arithmetic of a run; placement.py how every node runs, executions.py how often,
               broadcasts.py what the second-level cache is asked for
memory.py      the most that a run holds at once
hardware.py    what is known of a GPU
"""
