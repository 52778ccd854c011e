"""What the compiler made of a kernel, read from the compiled image: no GPU and no driver needed.

An image is an ELF file.  NVIDIA keeps what a loader must know of each kernel in its section ``.nv.info``: records of a
format byte, an attribute byte and 16 bits, which are the value itself or the length of what follows.  The attributes
are those that ``cuobjdump --dump-elf`` prints by name.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from onnxfuse.errors import KernelError

_LONG = 4
"""Format of a record that something follows."""

_MIN_STACK_SIZE = 0x12
_REGISTERS = 0x2F

_RESERVED, _RESERVED_BYTES = ".nv.reservedSmem.offset0", 1024
"""From compute capability 9.0 on, a block's shared memory begins with what the driver needs, which is not the kernel's;
images that count it have this symbol."""


@dataclass(frozen=True)
class KernelFigures:
    """What the compiler made of a kernel.

    Attributes:
        registers: 32-bit registers of a thread.
        local_bytes: bytes of a thread's values that registers do not hold: spilled, or indexed at run time.
        shared_bytes: static shared memory of a block.
    """

    registers: int
    local_bytes: int
    shared_bytes: int


def read_figures(image: bytes) -> dict[str, KernelFigures]:
    """The figures of an image's kernels, by name.

    Raises:
        KernelError: this is no compiled image, or none of a form that is known.
    """
    try:
        return _read(ELFFile(io.BytesIO(image)))
    except (ELFError, KeyError, struct.error, UnicodeDecodeError) as error:
        raise KernelError(
            f"registers cannot be read from a compiled image ({type(error).__name__}: {error})",
            remedy="this release of onnxfuse reads images of CUDA 12 and 13",
        ) from error


def _read(elf: ELFFile) -> dict[str, KernelFigures]:
    names, records = elf.get_section_by_name(".symtab"), elf.get_section_by_name(".nv.info")
    if not isinstance(names, SymbolTableSection) or records is None:
        raise ELFError("it has no section .symtab or .nv.info")
    found: dict[int, dict[int, int]] = {_MIN_STACK_SIZE: {}, _REGISTERS: {}}
    for attribute, symbol, number in _records(records.data()):
        found.setdefault(attribute, {})[symbol] = number
    called = {number: str(symbol.name) for number, symbol in enumerate(names.iter_symbols())}
    reserved = _RESERVED_BYTES if _RESERVED in called.values() else 0
    figures = {}
    # Functions that kernels call have registers of their own; only kernels have the stack of all that they call.
    for symbol, local in found[_MIN_STACK_SIZE].items():
        shared = elf.get_section_by_name(f".nv.shared.{called[symbol]}")
        own = 0 if shared is None else max(shared.data_size - reserved, 0)
        figures[called[symbol]] = KernelFigures(found[_REGISTERS][symbol], local, own)
    return figures


def _records(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(attribute, symbol, number) of the records that speak of one symbol's number."""
    place = 0
    while place < len(data):
        kind, attribute, length = struct.unpack_from("<BBH", data, place)
        place += 4
        if kind != _LONG:
            continue
        if length == 8:
            symbol, number = struct.unpack_from("<II", data, place)
            yield attribute, symbol, number
        place += length
