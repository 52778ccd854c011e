"""The commands.  Thin: options in, one call, printing out; what takes long to import is imported when it is used."""

from onnxfuse.cli.main import main

__all__ = ["main"]
