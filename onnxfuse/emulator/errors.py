"""The one error of the emulator."""

from __future__ import annotations


class EmulatorError(Exception):
    """Kernel text that does not compile for the CPU, or a launch that did something wrong; the text says where."""
