"""The table of compiler results for the CUDA kernels: parsing, occupancy, what counts as worse."""

from __future__ import annotations

import dataclasses
import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import check_cuda  # noqa: E402

from scripts.cuda_table import sass  # noqa: E402
from scripts.cuda_table import table as kernel_table  # noqa: E402
from scripts.cuda_table.occupancy import occupancy  # noqa: E402
from scripts.cuda_table.sass import Compiled, Instance  # noqa: E402
from scripts.cuda_table.table import ARCHITECTURES, Launch, Row, Table, compare  # noqa: E402

# Machine words beside what nvdisasm 13 calls them.
LDG_EF_128 = (0x0000800C1C207981, 0x000EA8000C0E1D00)  # LDG.E.EF.128 R32, [R28.64+0x80], sm_80
LDG_64 = (0x0000000802187981, 0x0086E2000C1E1B00)  # LDG.E.64 R24, desc[UR8][R2.64], sm_120
LD = (0x0000A0080A0A7980, 0x000EA2000C101900)  # LD.E R10, desc[UR8][R10.64+0xa0], sm_120
COPY_80 = (0x0400000006057FAE, 0x0003E20008101C4C)  # LDGSTS.E.BYPASS.128 [R5+0x4000], [R6.64], P0, sm_80
COPY_120 = (0x040000000A0F7FAE, 0x0003E200089C1808)  # LDGSTS.E.BYPASS.128.ZFILL, sm_120
ST = (0x000000240600C985, 0x0003E8000C10190C)  # @!P4 ST.E [R6.64], R36, sm_80
STG_U8 = (0xFFFC000D02007986, 0x000FE2000C10110C)  # STG.E.U8 desc[UR12][R2.64+-0x400], R13, sm_120
LDS_64 = (0x0000000015107984, 0x000E280000000A00)  # LDS.64 R16, [R21], sm_120
STS_128 = (0x000000041B007388, 0x0003E20000004C00)  # STS.128 [R27.X4], R4, sm_80
STL = (0x0000180001007387, 0x0009E80000100800)  # STL [R1+0x18], R0: the stack offset is in bytes
FFMA = (0x000000141805B223, 0x008FE40000000005)  # @!P3 FFMA R5, R24, R20, R5


def test_widths_are_counted_as_the_disassembler_names_them() -> None:
    words = (LDG_EF_128, LDG_64, LD, COPY_80, COPY_120, ST, STG_U8, LDS_64, STS_128, STL, FFMA)
    code = b"".join(struct.pack("<QQ", *word) for word in words)
    assert sass.widths_of(code) == ((1, 1, 3), (2, 0, 0), (0, 1, 0), (0, 0, 3))


def test_what_is_no_cubin_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a 64-bit ELF file"):
        sass.codes_of(b"PK\x03\x04")


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        (
            "_ZN7twofold4cuda14gate_up_kernelILNS_7kernels12WeightFormatE5ELi8EEEvNS0_12ExpertLayoutE",
            "gate_up q4_0 8",
        ),
        (
            "_ZN7twofold4cuda14prefill_kernelILNS_7kernels12WeightFormatE12ELi128EEEvNS0_13PrefillMatrixE",
            "prefill int4_channel 128",
        ),
        (
            "_ZN7twofold4cuda46_GLOBAL__N__638521e7_13_route_rope_cu_da7327c017rope_store_kernelILi256EEEvNS0_7QkvRowsE",
            "rope_store 256",
        ),
        (
            "_ZN7twofold4cuda12_GLOBAL__N_113encode_kernelILNS_7kernels14ActivationKindE1EEEvPKt",
            "encode bf16",
        ),
        ("_Z1aPf", "a"),
    ],
)
def test_kernels_have_readable_names(mangled: str, name: str) -> None:
    assert str(sass.readable(mangled)) == name


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "percent"),
    [
        (80, 256, 32, 0, 100.0),  # 64 warps of 1024 registers fill the file of 65536
        (86, 256, 64, 0, 66.7),  # 2048 registers a warp: 32 warps of 48
        (90, 128, 255, 0, 12.5),  # rounded to 8160 -> 8192 a warp: 8 warps of 64
        (80, 1024, 33, 0, 50.0),  # 1056 -> 1280 a warp, 12 in each quarter: 48, but blocks of 32
        (86, 128, 32, 48 * 1024, 16.7),  # 49 KiB with the driver's 1: two blocks in 100 KiB, 8 warps of 48
        (89, 64, 64, 0, 66.7),  # 32 warps in registers are 16 blocks of two, however quarters share them
        (86, 32, 16, 0, 33.3),  # 16 blocks at most
        (120, 32, 16, 0, 50.0),  # 24 blocks at most
        (86, 128, 32, 100 * 1024, 0.0),  # 99 KiB at most
    ],
)
def test_occupancy_is_nvidias(arch: int, threads: int, registers: int, shared: int, percent: float) -> None:
    assert round(100 * occupancy(arch, threads, registers, shared), 1) == percent


NAME = Instance("gate_up", "q4_0", "8")
TRAFFIC = ((1.5, 1.0), (8.0, 8.0), (0.0, 0.0))
WIDTHS = ((4, 0, 8), (2, 0, 0), (0, 0, 16), (8, 0, 0))


def table(launch: Launch | None = None, **changes: object) -> Table:
    """One kernel: 64 registers in 256 threads, on sm_90 a half of the warps. Changes: of the kernel on sm_90."""
    made = {arch: Compiled("", arch, 64, 16, 0, 1024, WIDTHS) for arch in ARCHITECTURES}
    made[90] = dataclasses.replace(made[90], **changes)  # type: ignore[arg-type]
    return {NAME: Row(launch or Launch(256, 0, TRAFFIC), made)}


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (
            table(registers=65),
            "gate_up q4_0 8 on sm_90: occupancy 50 % before, 38 % now (64 registers, now 65); take",
        ),
        (table(shared_bytes=60_000), "on sm_90: occupancy 50 % before, 38 % now"),
        (table(stack_bytes=24), "on sm_90: 16 bytes of stack before, 24 now; index arrays"),
        (
            table(widths=((20, 0, 4), *WIDTHS[1:])),
            "on sm_90: global loads of 32/64/128 bits 4/0/8 before, 20/0/4 now; read",
        ),
        (
            table(Launch(256, 0, ((1.6, 1.0), *TRAFFIC[1:]))),
            "on every architecture: shared wavefronts per request 1.50 (1.00) before, 1.60 (1.00) now; spread",
        ),
        (
            table(Launch(256, 0, (TRAFFIC[0], (9.0, 8.0), TRAFFIC[2]))),
            "sectors read per request 8.00 (8.00) before",
        ),
    ],
)
def test_a_slower_kernel_is_reported_once_and_its_revert_as_faster(now: Table, says: str) -> None:
    worse = compare(table(), now)
    assert worse.better == []
    (line,) = worse.worse
    assert says in line
    better = compare(now, table())
    assert (better.worse, len(better.better)) == ([], 1)


@pytest.mark.parametrize(
    "now",
    [
        table(registers=63),  # more registers than it had, or fewer, where as many warps fit
        table(widths=((5, 0, 8), *WIDTHS[1:])),  # a scalar more
        table(widths=((2, 0, 4), *WIDTHS[1:])),  # unrolled less
        table(Launch(256, 0, ((2.0, 1.33), *TRAFFIC[1:]))),  # larger requests, as many conflicts
    ],
)
def test_a_free_change_is_not_worse(now: Table) -> None:
    assert compare(table(), now).worse == []


def test_the_file_gives_the_table_back_and_a_broken_one_is_refused() -> None:
    text = kernel_table.to_markdown(table(registers=65), "13.0.88")
    read, version = kernel_table.from_markdown(text)
    assert version == "13.0.88"
    assert compare(read, table(registers=65)).worse == compare(table(registers=65), read).worse == []
    assert kernel_table.to_markdown(read, version) == text
    with pytest.raises(ValueError, match="rewrite it"):
        kernel_table.from_markdown(text.replace("| kernel ", "| name "))
    with pytest.raises(ValueError, match="cells, expected"):
        kernel_table.from_markdown(text.replace("gate_up | q4_0", "gate_up"))


def test_a_worse_kernel_is_refused_and_a_better_one_passes_with_a_hint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    worse = table(registers=80)
    assert check_cuda.report_changes(table(), worse, same_nvcc=True, whole=True)
    assert "run `make check-cuda WRITE=1`" in capsys.readouterr().err
    assert not check_cuda.report_changes(
        table(), worse, same_nvcc=False, whole=True
    )  # what another compiler chose
    assert check_cuda.report_changes(table(), table(spill_bytes=8), same_nvcc=False, whole=True)
    assert "0 bytes spilled before, 8 now" in capsys.readouterr().err
    assert not check_cuda.report_changes(worse, table(), same_nvcc=True, whole=True)
    assert "to keep it" in capsys.readouterr().out
    assert check_cuda.report_changes({}, table(), same_nvcc=True, whole=False)  # one that nothing bounds
    assert check_cuda.report_changes(table(), {}, same_nvcc=True, whole=True)
    assert not check_cuda.report_changes(table(), {}, same_nvcc=True, whole=False)


def test_the_table_in_the_repository_lists_each_kernels_launch() -> None:
    text = check_cuda.TABLE.read_text(encoding="utf-8")
    kept, version = kernel_table.from_markdown(text)
    assert kernel_table.to_markdown(kept, version) == text
    assert [str(name) for name, row in kept.items() if row.launch is None] == []
    assert len(kept) > 90


@pytest.mark.slow
def test_conflicts_and_sectors_are_those_of_the_table() -> None:
    if not check_cuda.TRAFFIC.exists():
        pytest.skip("the native test programs are not built beside these sources")
    done = subprocess.run([check_cuda.TRAFFIC], capture_output=True, text=True, check=True, timeout=570)
    kept, _ = kernel_table.from_markdown(check_cuda.TABLE.read_text(encoding="utf-8"))
    launches = kernel_table.parse_launches(done.stdout)
    now = {name: dataclasses.replace(row, launch=launches[name]) for name, row in kept.items()}
    assert compare(kept, now).worse == []


def test_estimates_are_a_roofline_beside_the_bound() -> None:
    from benchmarks.gpu.estimate import Work, estimate, lines, work_of
    from benchmarks.gpu.models import Shape

    # One token, 2 of 4 experts: three matrices of 64 x 64 in bf16 each.
    work = work_of("decode", Shape("x", 64, 64, 4, 2, 1, 1, 64), "bf16", 1)
    assert work.weight_bytes == pytest.approx(2 * 3 * 64 * 64 * 2)
    assert work.flops == 2 * 3 * 2 * 64 * 64
    # 1 GB/s moves 1000 bytes in 1 us: 80 % of it in 1.25 us; 2 us of arithmetic are longer than that.
    assert estimate("decode", Work(1000, 0, 0), 1, 1) == estimate("decode", Work(1000, 0, 1000), 1, 1)
    assert estimate("decode", Work(1000, 0, 0), 1, 1).bound == pytest.approx(1.25)
    assert estimate("prefill", Work(1000, 500, 1000), 1, 1).roofline == pytest.approx(1.5)
    assert estimate("prefill", Work(1000, 0, 2000), 1, 1).bound == pytest.approx(4)
    report_changes = lines([("decode", "qwen3-30b-a3b", "bf16", 1)])
    assert "ESTIMATES, nothing here was measured" in report_changes[0]
    assert "19 <= 24" in report_changes[-1]  # 8 experts of 9.44 MB at 4 TB/s, and at 80 % of that
