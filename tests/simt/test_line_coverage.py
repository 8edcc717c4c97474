"""Which lines of `kernels/cuda` the cases of the SIMT machine execute: gcov counts, over all instances of a template.

`kernels/cuda/gpu`, what only a GPU's compiler understands, is not compiled for it and not counted.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from tests.simt.rebuild import KERNELS, cases, compile_kernels, link

LEAST = 0.95


@pytest.mark.slow
def test_the_cases_execute_the_lines_of_the_kernels(tmp_path: Path) -> None:
    if shutil.which("gcov") is None:
        pytest.skip("gcov is not installed")
    sources = sorted(KERNELS.glob("*.cu"))
    objects = [tmp_path / f"{source.stem}.o" for source in sources]
    for source, output in zip(sources, objects, strict=True):
        compile_kernels(source, output, "--coverage -fprofile-update=atomic -O1")
    program = tmp_path / "counted"
    link(objects, program, "--coverage")
    done = subprocess.run(
        [program, *cases(program)], capture_output=True, text=True, check=False, timeout=570
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counts: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for each in objects:
        command = ["gcov", "--json-format", "--stdout", str(each.with_suffix(".gcda"))]
        reported = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300
        )
        for file in json.loads(reported.stdout)["files"]:
            path = Path(file["file"])
            if path.parent not in (KERNELS, KERNELS.parent / "device"):
                continue
            for line in file["lines"]:
                counts[path.name][line["line_number"]] += line["count"]
    missed = {name: sorted(n for n, count in lines.items() if count == 0) for name, lines in counts.items()}
    total = sum(len(lines) for lines in counts.values())
    left = sum(len(lines) for lines in missed.values())
    share = 1 - left / total
    print(f"{share:.2%} of {total} lines in {len(counts)} files of kernels/cuda are executed; not these:")
    for name, lines in sorted(missed.items()):
        if lines:
            print(f"  {name}: {', '.join(map(str, lines))}")
    assert {source.name for source in sources} <= counts.keys()
    assert share >= LEAST, missed
