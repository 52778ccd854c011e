"""NVRTC through ctypes, and a process that compiles with it: what ``processes`` starts.

Nothing but Python's own library is imported, so that such a process is there within a twentieth of a second.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from typing import Any

COMPILATION = "NVRTC_ERROR_COMPILATION"
"""What an error's name is that is the text's."""

Answer = tuple[bytes, str, str]
"""What came of a text: the image, what the compiler said, and why there is no image, or ""."""


class NVRTCError(RuntimeError):
    """NVRTC refused a call."""


class NvrtcLibrary:
    """An NVRTC library through ctypes, with the functions and names of ``cupy.cuda.nvrtc`` that onnxfuse uses.

    Args:
        path: the library.

    Raises:
        OSError: it does not load.
    """

    NVRTCError = NVRTCError

    def __init__(self, path: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            raise NVRTCError(f"{self._library.nvrtcGetErrorString(result).decode()} ({result})")

    def getVersion(self) -> tuple[int, int]:  # noqa: N802 - CuPy's name
        """Major and minor version."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def getSupportedArchs(self) -> tuple[int, ...]:  # noqa: N802 - CuPy's name
        """Architectures as 90 for sm_90."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return tuple(numbers)

    def createProgram(  # noqa: N802 - CuPy's name
        self, source: str, name: str, headers: Sequence[str], include_names: Sequence[str]
    ) -> int:
        """A program without headers of its own; ``headers`` and ``include_names`` must be empty."""
        if headers or include_names:
            raise ValueError("headers are given by folder")
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        return program.value or 0

    def compileProgram(self, program: int, options: Sequence[str]) -> None:  # noqa: N802 - CuPy's name
        """Compile; ctypes lets other threads run meanwhile."""
        texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        self._call("nvrtcCompileProgram", ctypes.c_void_p(program), len(options), texts)

    def getCUBIN(self, program: int) -> bytes:  # noqa: N802 - CuPy's name
        """Machine code of a compiled program, without the last byte, a zero that CuPy's binding drops as well."""
        return self._output(program, "CUBIN")[:-1]

    def getPTX(self, program: int) -> bytes:  # noqa: N802 - CuPy's name
        """PTX of a compiled program."""
        return self._output(program, "PTX").rstrip(b"\0")

    def getProgramLog(self, program: int) -> str:  # noqa: N802 - CuPy's name
        """The compiler's messages."""
        return self._output(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")

    def destroyProgram(self, program: int) -> None:  # noqa: N802 - CuPy's name
        """Free a program."""
        self._call("nvrtcDestroyProgram", ctypes.byref(ctypes.c_void_p(program)))

    def _output(self, program: int, kind: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{kind}Size", ctypes.c_void_p(program), ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{kind}", ctypes.c_void_p(program), buffer)
        return buffer.raw


def compiled(nvrtc: Any, source: str, arguments: Sequence[str], ptx: bool) -> Answer:
    """What NVRTC makes of a text.

    Args:
        nvrtc: has the functions of ``cupy.cuda.nvrtc``; arguments: of the compiler; ptx: in place of machine code.
    """
    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, arguments)
        image: bytes = nvrtc.getPTX(program) if ptx else nvrtc.getCUBIN(program)
        return image, nvrtc.getProgramLog(program), ""
    except nvrtc.NVRTCError as error:
        return b"", nvrtc.getProgramLog(program), str(error)
    finally:
        nvrtc.destroyProgram(program)


def main(path: str) -> None:
    """Say which version the library is, and compile what comes until nothing does: pickled arguments of ``compiled`` on
    the standard input, pickled answers on the standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to who asks as well, and that ends this
    nvrtc = NvrtcLibrary(path)
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # whatever else is printed is no answer
        answer: object = nvrtc.getVersion()
        while True:
            pickle.dump(answer, answers)
            answers.flush()
            try:
                answer = compiled(nvrtc, *pickle.load(sys.stdin.buffer))
            except EOFError:
                return


if __name__ == "__main__":
    main(sys.argv[1])
