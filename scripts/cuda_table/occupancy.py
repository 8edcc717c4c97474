"""Occupancy: resident warps of a kernel per multiprocessor, relative to the maximum.

Limits are those of the CUDA C++ Programming Guide, "Compute Capabilities", table "Technical Specifications per Compute
Capability"; how registers and shared memory are handed out (per warp and per block, in which units) is that of
`cuda_occupancy.h` of the CUDA toolkit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

WARP: Final = 32
_REGISTERS: Final = 64 * 1024
_REGISTER_UNIT: Final = 256  # allocated per warp at a time
_PARTITIONS: Final = 4  # a multiprocessor's schedulers, each with its share of the registers
_SHARED_UNIT: Final = 128
_SHARED_RESERVED: Final = 1024  # bytes that the driver keeps per block


@dataclass(frozen=True)
class Limits:
    """Limits of one multiprocessor."""

    warps: int
    blocks: int
    shared_bytes: int


LIMITS: Final = {
    80: Limits(64, 32, 164 * 1024),
    86: Limits(48, 16, 100 * 1024),
    89: Limits(48, 24, 100 * 1024),
    90: Limits(64, 32, 228 * 1024),
    120: Limits(48, 24, 100 * 1024),
}


def occupancy(arch: int, threads: int, registers: int, shared_bytes: int) -> float:
    """Share of the resident warps that the architecture has room for, 0 where a block does not fit at all.

    threads: of a block. registers: of a thread. shared_bytes: of a block, static and dynamic. Raises KeyError for an
    architecture whose limits are not listed.
    """
    limits = LIMITS[arch]
    warps = -(-threads // WARP)
    of_warp = -(-max(registers, 1) * WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    warps_in_registers = _REGISTERS // _PARTITIONS // of_warp * _PARTITIONS
    in_registers = warps_in_registers // warps
    of_block = -(-(shared_bytes + _SHARED_RESERVED) // _SHARED_UNIT) * _SHARED_UNIT
    blocks = min(limits.blocks, limits.warps // warps, in_registers, limits.shared_bytes // of_block)
    return blocks * warps / limits.warps
