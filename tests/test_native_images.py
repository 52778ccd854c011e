"""What the library takes for machine code: an image is looked through before the driver is given it."""

from __future__ import annotations

import ctypes
import struct

import pytest
from fused_models import KERNELS
from native.stand_in import HEADER, SECTION, image, ptx

from onnxfuse.runtime import library
from onnxfuse.runtime.compile import architectures, compile_cubin

IMAGE = image("add_one", "add_more")
(TABLE,) = struct.unpack_from("<Q", IMAGE, 40)
CODE = TABLE + 2 * SECTION
"""Where the entry of the first kernel's section stands."""


def fault(image: bytes, name: str = "image") -> str:
    """Why the library would not give the image, or PTX, to the driver; "" where it would."""
    function = getattr(library.load(), f"onnxfuse_{name}_fault")
    function.restype, function.argtypes = ctypes.c_size_t, [ctypes.c_char_p, ctypes.c_size_t] * 2
    return library.read_checked(function, image, len(image))


def changed(place: int, kind: str, value: int) -> bytes:
    """The stand-in's image with a number of its own at a place."""
    raw = bytearray(IMAGE)
    struct.pack_into(f"<{kind}", raw, place, value)
    return bytes(raw)


@pytest.mark.parametrize(("image", "message"), [
    (b"", "it has 0 bytes, fewer than a header"),
    (IMAGE[:HEADER - 1], "it has 63 bytes, fewer than a header"),
    (b"\x7fELG" + IMAGE[4:], "it is no ELF file"),
    (b"//\n.version 9.0\n.target sm_90\n" + bytes(64), "it is no ELF file"),
    (b"\x50\xed\x55\xba" + bytes(64), "it is no ELF file"),
    (changed(4, "B", 1), "it is no ELF file of 64 bits"),
    (changed(5, "B", 2), "it is no ELF file of 64 bits"),
    (changed(18, "H", 62), "it is for the machine 62, not for NVIDIA GPUs"),
    (IMAGE[:-2], "its section table does not lie within it"),
    (IMAGE[:HEADER], "its section table does not lie within it"),
    (changed(40, "Q", 2**64 - 1), "its section table does not lie within it"),
    (changed(58, "H", 40), "its section table does not lie within it"),
    (changed(60, "H", 0xFFFF), "its section table does not lie within it"),
    (changed(60, "H", 0), "its section table has no names"),
    (changed(62, "H", 4), "its section table has no names"),
    (changed(62, "H", 2), "section 2 should hold the names of sections"),
    (changed(56, "H", 1), "its program table does not lie within it"),
    (changed(32, "Q", 2**31), "its program table does not lie within it"),
    (changed(CODE, "I", 4096), "section 2 has its name outside the table of names"),
    (changed(CODE + 24, "Q", len(IMAGE)), "section 2 does not lie within it"),
    (changed(CODE + 24, "Q", 2**64 - 8), "section 2 does not lie within it"),
    (changed(CODE + 32, "Q", 2**64 - 8), "section 2 does not lie within it"),
    (changed(CODE + 40, "I", 4), "section 2 refers to a section that it does not have"),
    (changed(CODE + 4, "I", 2), "section 2 is no table of symbols"),
    (changed(TABLE + SECTION + 4, "I", 1), "section 1 should hold the names of sections"),
    (changed(TABLE + SECTION + 32, "Q", 8), "section 1 has a name without end"),
])
def test_what_is_no_image_is_told_apart(image: bytes, message: str) -> None:
    assert fault(image) == message


def test_an_image_may_lack_a_last_byte_that_is_zero() -> None:
    assert (fault(IMAGE), fault(IMAGE[:-1])) == ("", "")


@pytest.mark.parametrize(("text", "message"), [
    (b"", "it does not begin with the directive .version"),
    (b"//.version 9.0", "it does not begin with the directive .version"),
    (b"// .version 9.0\n.target sm_90\n.version 9.0\n", "it does not begin with the directive .version"),
    (IMAGE, "it has a zero byte"),
    (ptx(90, "add_one") + b"\0", "it has a zero byte"),
    (ptx(90, "add_one"), ""),
])
def test_what_is_no_ptx_is_told_apart(text: bytes, message: str) -> None:
    assert fault(text, "ptx") == message


@pytest.mark.parametrize("architecture", [min(architectures()), max(architectures())])
def test_what_the_compiler_makes_for_later_gpus_is_ptx(architecture: int) -> None:
    text = compile_cubin(KERNELS, f"compute_{architecture}")
    assert fault(text, "ptx") == ""
    assert f".target sm_{architecture}\n".encode() in text and b".entry plain(" in text


@pytest.mark.parametrize("architecture", [min(architectures()), 90, max(architectures())])
def test_what_the_compiler_makes_is_an_image_and_no_part_of_it_is(architecture: int) -> None:
    image = compile_cubin(KERNELS, f"sm_{architecture}")
    assert fault(image) == "" != fault(image.rstrip(b"\0")[:-1])
    whole = len(image)
    assert all(fault(image[:size]) for size in (*range(0, whole - 8, 997), whole - 8))
    (table,), (count,) = struct.unpack_from("<Q", image, 40), struct.unpack_from("<H", image, 60)
    places = [table + SECTION * index for index in range(count)]
    symbols = next(place for place in places if struct.unpack_from("<I", image, place + 4)[0] == 2)
    (at,) = struct.unpack_from("<Q", image, symbols + 24)
    broken = image[:at + 24] + b"\xff" * 4 + image[at + 28:]
    assert fault(broken).endswith(" has a symbol without a name")
