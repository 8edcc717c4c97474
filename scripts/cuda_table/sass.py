"""Compiler results per kernel: registers from ptxas's report, widths of accesses from the machine code.

Machine code is read from a cubin, an ELF file with a section `.text.NAME` per kernel: instructions of 16 bytes, whose
lowest nine bits are the opcode and bits 73 to 75 the access width. `nvdisasm` shows the same, but is not part of
every toolkit; the test holds words beside what it calls them.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

_ROOT: Final = Path(__file__).resolve().parents[2]
_INCLUDE: Final = _ROOT / "kernels/include/twofold/formats"

ACCESSES: Final = ("global loads", "global stores", "shared loads", "shared stores")
# Generic accesses (LD, ST), whose space the compiler could not tell, are counted as global.
_ACCESS: Final = {0x180: 0, 0x181: 0, 0x185: 1, 0x186: 1, 0x184: 2, 0x188: 3}
_COPY: Final = 0x1AE  # LDGSTS, which is cp.async.cg here and so 16 bytes
_WIDTH: Final = {5: 1, 6: 2, 7: 2}

_BY_LIST: Final = tuple(
    f"{kind}_{part}_kernel" for kind in ("attention", "mla") for part in ("split", "join")
)

Widths = tuple[int, int, int]
"""Numbers of accesses of 32 bits or less, of 64, of 128."""


class Instance(NamedTuple):
    """A kernel by its readable name."""

    kernel: str
    """The name without `_kernel`."""
    format: str = "-"
    tile: str = "-"
    """Tokens at once, or the size of a head."""

    def __str__(self) -> str:
        return " ".join(part for part in self if part != "-")


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture."""

    name: str
    """Mangled name."""
    arch: int
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    """Static shared memory."""
    widths: tuple[Widths, ...] = ()
    """Widths per entry of ACCESSES."""


@cache
def _enumerations() -> dict[str, list[str]]:
    formats = re.search(
        r"#define TWOFOLD_WEIGHT_FORMATS\(X\)((?:.*\\\n)*.*)", (_INCLUDE / "registry.h").read_text()
    )
    kinds = re.search(r"enum class ActivationKind[^{]*{([^}]*)}", (_INCLUDE / "panel.h").read_text())
    assert formats is not None
    assert kinds is not None
    return {
        "WeightFormat": [name.lower() for name in re.findall(r"X\((\w+)\)", formats[1])],
        "ActivationKind": [name.lower() for name in re.findall(r"k(\w+)", kinds[1])],
    }


def readable(mangled: str) -> Instance:
    """`_ZN7twofold4cuda14gate_up_kernelILNS_7kernels12WeightFormatE5ELi8EE...` is gate_up of q4_0, 8 tokens."""
    at, name = len("_Z"), mangled
    at += mangled[at : at + 1] == "N"
    while length := re.match(r"\d+", mangled[at:]):
        at += length.end()
        name = mangled[at : at + int(length[0])]
        at += int(length[0])
    format = tile = "-"
    if mangled[at : at + 1] == "I":
        for kind, number, plain in re.findall(
            r"L(?:N\w*?\d+(WeightFormat|ActivationKind)E(\d+)|i(\d+))E",
            mangled[at : mangled.index("EEv", at) + 1],
        ):
            if kind:
                format = _enumerations()[kind][int(number)]
            else:
                tile = plain
        # Attention's last argument: whether it reads lists of chosen positions.
        if name in _BY_LIST and mangled[at : mangled.index("EEv", at) + 1].endswith("Lb1EE"):
            tile = "of a list" if tile == "-" else f"{tile} of a list"
    return Instance(name.removesuffix("_kernel"), format, tile)


def parse_report(report: str) -> list[Compiled]:
    """The kernels in what `nvcc -Xptxas -v` prints."""
    pattern = re.compile(
        r"Compiling entry function '(?P<name>\S+)' for 'sm_(?P<arch>\d+)\w*'.*?"
        r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
        r"Used (?P<registers>\d+) registers(?:.*?, (?P<shared>\d+) bytes smem)?",
        re.DOTALL,
    )
    # By kernel, so that no figure is taken from the next one.
    return [
        Compiled(
            found["name"],
            int(found["arch"]),
            int(found["registers"]),
            int(found["stack"]),
            int(found["stores"]) + int(found["loads"]),
            int(found["shared"] or 0),
        )
        for part in report.split("ptxas info    : Compiling")
        if (found := pattern.search("Compiling" + part))
    ]


def widths_of(code: bytes) -> tuple[Widths, ...]:
    """Access widths in a kernel's machine code, for each of ACCESSES."""
    counts = [[0, 0, 0] for _ in ACCESSES]
    for low, high in struct.iter_unpack("<QQ", code):
        operation = low & 0x1FF
        if operation == _COPY:
            counts[0][2] += 1
            counts[3][2] += 1
        elif operation in _ACCESS:
            counts[_ACCESS[operation]][_WIDTH.get(high >> 9 & 7, 0)] += 1
    return tuple((a, b, c) for a, b, c in counts)


def codes_of(cubin: bytes) -> dict[str, bytes]:
    """Each kernel's machine code in a cubin. Raises ValueError for what is no 64-bit ELF file."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("not a cubin: expected a 64-bit ELF file; compile with nvcc -cubin")
    (offset,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    # name, type, flags, address, offset, size
    sections = [struct.unpack_from("<IIQQQQ", cubin, offset + i * size) for i in range(count)]
    strings = sections[names][4]
    codes = {}
    for name, _, _, _, begin, length in sections:
        text = cubin[strings + name : cubin.index(b"\0", strings + name)].decode()
        if text.startswith(".text."):
            codes[text.removeprefix(".text.")] = cubin[begin : begin + length]
    return codes
