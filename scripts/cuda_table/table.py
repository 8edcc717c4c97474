"""The table of what the compiler made of each kernel, kept beside the kernels, and what got worse against it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from scripts.cuda_table.occupancy import occupancy
from scripts.cuda_table.sass import ACCESSES, Compiled, Instance, Widths, readable

_LISTED: Final = Path(__file__).resolve().parents[2] / "kernels/cuda/architectures.txt"
ARCHITECTURES: Final = tuple(int(arch) for arch in re.findall(r"\d+", _LISTED.read_text(encoding="utf-8")))
"""Architectures with machine code in a wheel; cmake/Cuda.cmake reads the same file."""
TRAFFIC: Final = ("shared wavefronts", "sectors read", "sectors written")
_NARROWER: Final = 0.9  # ratio of mean widths; above it the difference is a few scalars
_BUSIER: Final = 1.02

_EXPLANATION: Final = """\
# What the compiler made of the kernels

Written by `make check-cuda WRITE=1` and compared by `make check-cuda`, which fails where a kernel got worse.
Nothing here was measured on a GPU. Where the architectures {archs} differ, a cell has a figure for each,
in this order.

- threads and dynamic shared bytes of a block, for the shapes of `tests/simt/traffic_table.cpp`, and its static ones;
  registers of a thread, bytes of its stack (none is spilled: that fails); occupancy: percent of the warps that a
  multiprocessor has room for (`scripts/cuda_table/occupancy.py`);
- loads and stores in the machine code: how many of 32 bits or less / 64 / 128;
- by a model over the addresses that the SIMT machine recorded: shared-memory wavefronts and global sectors per
  request of a warp, in brackets the least that the same bytes need.
"""
_COLUMNS: Final = (
    "kernel", "format", "tile", "threads", "dynamic", "static", "registers", "stack", "occupancy", *ACCESSES, *TRAFFIC
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """Launch shape of a kernel on the SIMT machine, and its traffic."""

    threads: int
    shared_bytes: int
    """Dynamic shared memory."""
    traffic: tuple[tuple[float, float], ...]
    """Per entry of TRAFFIC: per request, and the minimum."""


@dataclass
class Row:
    """A kernel on all architectures; a launch where its shape is known."""

    launch: Launch | None = None
    compiled: dict[int, Compiled] = field(default_factory=dict)

    def occupancy(self, arch: int) -> int | None:
        """Occupancy in percent."""
        if self.launch is None:
            return None
        made = self.compiled[arch]
        shared = self.launch.shared_bytes + made.shared_bytes
        return round(100 * occupancy(arch, self.launch.threads, made.registers, shared))


Table = dict[Instance, Row]


def parse_launches(text: str) -> dict[Instance, Launch]:
    """Parses the output of `simt_traffic`; ValueError shows a line that does not fit."""
    found = {}
    for line in text.splitlines():
        kernel, format, tile, threads, shared, *figures = line.split("\t")
        if len(figures) != 2 * len(TRAFFIC):
            raise ValueError(
                f"a line of simt_traffic has {len(figures)} figures, expected 6: {line!r}; build it again"
            )
        pairs = tuple((float(a), float(b)) for a, b in zip(figures[::2], figures[1::2], strict=True))
        found[Instance(kernel, format, tile)] = Launch(int(threads), int(shared), pairs)
    return found


def launches_of(table: Table) -> dict[Instance, Launch]:
    """Launches of a table's kernels, by name."""
    return {name: row.launch for name, row in table.items() if row.launch is not None}


def tabulate(compiled: Iterable[Compiled], launches: Mapping[Instance, Launch]) -> Table:
    """Kernels with their launches, by name."""
    table: Table = {}
    for made in compiled:
        name = readable(made.name)
        table.setdefault(name, Row(launches.get(name))).compiled[made.arch] = made
    return dict(
        sorted(table.items(), key=lambda item: (item[0].kernel, item[0].format, item[0].tile.zfill(4)))
    )


def to_markdown(table: Table, nvcc: str) -> str:
    """The table's file. nvcc: its version. Every kernel has to be there for all of ARCHITECTURES."""
    lines = [_EXPLANATION.format(archs=", ".join(map(str, ARCHITECTURES))), f"Compiled by nvcc {nvcc}.", ""]
    lines += ["| " + " | ".join(_COLUMNS) + " |", "|---" * 3 + "|--:" * (len(_COLUMNS) - 3) + "|"]
    for name, row in table.items():
        made = [row.compiled[arch] for arch in ARCHITECTURES]
        launch = row.launch
        cells = [*name, str(launch.threads) if launch else "-"]
        cells.append(str(launch.shared_bytes) if launch else "-")
        cells.append(_side_by_side(m.shared_bytes for m in made))
        cells.append(_side_by_side(m.registers for m in made))
        cells.append(_side_by_side(m.stack_bytes for m in made))
        cells.append(_side_by_side(row.occupancy(arch) for arch in ARCHITECTURES) if launch else "-")
        cells += [_side_by_side("/".join(map(str, m.widths[i])) for m in made) for i in range(len(ACCESSES))]
        cells += (
            [f"{now:.2f} ({least:.2f})" for now, least in launch.traffic] if launch else ["-"] * len(TRAFFIC)
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def from_markdown(text: str) -> tuple[Table, str]:
    """The table and the version of nvcc that a file of `to_markdown` tells. Raises ValueError for another text."""
    version = re.search(r"^Compiled by nvcc (\S+)\.$", text, re.MULTILINE)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    if version is None or not rows or tuple(rows[0].strip("| ").split(" | ")) != _COLUMNS:
        raise ValueError("the table of kernels is broken; rewrite it with `make check-cuda WRITE=1`")
    return dict(_parse_row(line) for line in rows[1:]), version[1]


def _parse_row(line: str) -> tuple[Instance, Row]:
    cells = line.strip("| ").split(" | ")
    if len(cells) != len(_COLUMNS):
        raise ValueError(
            f"a row of the table of kernels has {len(cells)} cells, expected {len(_COLUMNS)}: {line}"
        )
    name = Instance(*cells[:3])
    launch = None
    if cells[3] != "-":
        pairs = (re.fullmatch(r"(\S+) \((\S+)\)", cell) for cell in cells[-len(TRAFFIC) :])
        launch = Launch(int(cells[3]), int(cells[4]), tuple((float(p[1]), float(p[2])) for p in pairs if p))
    shared, registers, stack = (_cell_parts(cells[i]) for i in (5, 6, 7))
    widths = [_cell_parts(cell) for cell in cells[9 : 9 + len(ACCESSES)]]
    compiled = {}
    for i, arch in enumerate(ARCHITECTURES):
        accesses = tuple(_widths(column[i]) for column in widths)
        compiled[arch] = Compiled("", arch, int(registers[i]), int(stack[i]), 0, int(shared[i]), accesses)
    return name, Row(launch, compiled)


def _side_by_side(values: Iterable[object]) -> str:
    texts = [str(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else " ".join(texts)


def _cell_parts(cell: str) -> list[str]:
    texts = cell.split()
    return texts * len(ARCHITECTURES) if len(texts) == 1 else texts


def _widths(text: str) -> Widths:
    a, b, c = map(int, text.split("/"))
    return a, b, c


def _mean_bits(widths: Widths) -> float:
    return sum(bits * n for bits, n in zip((32, 64, 128), widths, strict=True)) / max(sum(widths), 1)


class Comparison:
    """Differences between a new table and the kept one; each line names kernel, architecture, before and now."""

    def __init__(self) -> None:
        self.worse: list[str] = []
        self.better: list[str] = []

    def weigh(self, change: float, finding: str, remedy: str) -> None:
        """change: above 0 worse, below 0 better."""
        if change > 0:
            self.worse.append(f"{finding}; {remedy}")
        elif change < 0:
            self.better.append(finding)

    def compiled(self, where: str, old: Compiled, new: Compiled) -> None:
        """Stack and widths on one architecture."""
        self.weigh(
            new.stack_bytes - old.stack_bytes,
            f"{where}: {old.stack_bytes} bytes of stack before, {new.stack_bytes} now",
            "index arrays by constants alone",
        )
        for access, a, b in zip(ACCESSES, old.widths, new.widths, strict=True):
            before, now = "/".join(map(str, a)), "/".join(map(str, b))
            narrower, wider = (_mean_bits(x) < _NARROWER * _mean_bits(y) for x, y in ((b, a), (a, b)))
            self.weigh(
                narrower - wider,
                f"{where}: {access} of 32/64/128 bits {before} before, {now} now",
                "read and write whole aligned vectors",
            )

    def traffic(self, name: Instance, old: Launch, new: Launch) -> None:
        """Conflicts and sectors, which no architecture changes."""
        remedies = "spread addresses over the banks", *["let neighbouring lanes take neighbouring bytes"] * 2
        for what, remedy, before, now in zip(TRAFFIC, remedies, old.traffic, new.traffic, strict=True):
            waste, wastes = (passes / least if least else 1.0 for passes, least in (before, now))
            change = (wastes > _BUSIER * waste) - (waste > _BUSIER * wastes)
            figures = f"{before[0]:.2f} ({before[1]:.2f}) before, {now[0]:.2f} ({now[1]:.2f}) now"
            self.weigh(change, f"{name} on every architecture: {what} per request {figures}", remedy)


def compare(before: Table, now: Table) -> Comparison:
    """Both tables kernel by kernel, for the kernels and architectures that both have."""
    found = Comparison()
    for name, row in now.items():
        old = before.get(name)
        if old is None:
            continue
        for arch, made in row.compiled.items():
            where = f"{name} on sm_{arch}"
            found.compiled(where, old.compiled[arch], made)
            was, full = old.occupancy(arch), row.occupancy(arch)
            if was is not None and full is not None:
                registers = f"{old.compiled[arch].registers} registers, now {made.registers}"
                finding = f"{where}: occupancy {was} % before, {full} % now ({registers})"
                found.weigh(was - full, finding, "take fewer registers or less shared memory")
        if old.launch is not None and row.launch is not None:
            found.traffic(name, old.launch, row.launch)
    return found
