"""``python -m onnxfuse``: the console command."""

from onnxfuse.cli import main

main(prog_name="onnxfuse")
