"""What is known of ONNX Runtime and its CUDA provider: what runs there without onnxfuse, and how well.

removed.py    nodes that run no kernel, and those that it takes out     host.py      what it runs and keeps on the host
fusions.py    a graph while its own fusions are found, their groups     kernels.py   how good its kernels are
layouts.py    what it lays out channels-last                            lacking.py   what the CPU runs in its place
words.py      what its errors say

What it fuses is said in rule files (``rules/runtime``), which ``onnxfuse.rules.runtime`` applies here; facts of one
operator are in its record (``onnxfuse.operators``).
"""
