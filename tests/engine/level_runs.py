"""Forward passes of models under rules for modules, and under no rule at the level that TWOFOLD_ISA chose.

`python -m tests.engine.level_runs OUT.npz MODEL...` writes what the process's level makes of each model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from twofold.api.config import EngineConfig
from twofold.blocks import ops
from twofold.engine.module_rules import apply_rules
from twofold.experts.accelerator import AcceleratorChoice
from twofold.models.model_files import open_model_files
from twofold.step.model import LoadedModel

from tests.engine.model_runs import F32, Runner, random_prompt

PROMPT = random_prompt(40)
NOWHERE = AcceleratorChoice("none", "asked for")


def ruled(directory: Path, rules: Path | None, num_threads: int = 2) -> Runner:
    pool = ops.ThreadPool(num_threads)
    config = EngineConfig(
        model=str(directory), accelerator="none", optimize_config=None if rules is None else str(rules)
    )
    files, found = apply_rules(config, open_model_files(directory), pool, NOWHERE)
    runner = Runner(LoadedModel(files, pool, None, found.threads, found.pools))
    found.set_kernels(runner.moe.store)
    return runner


def computed(runner: Runner, chunks: Sequence[int] = ()) -> F32:
    """Hidden states of a prompt and of one token after it, and all their logits."""
    sequence, hidden = runner.prefill(PROMPT, chunks)
    rows = np.concatenate([hidden, runner.step((sequence, [5]))[0]])
    return np.concatenate([rows, runner.logits(rows)], axis=1)


if __name__ == "__main__":
    np.savez(sys.argv[1], *[computed(ruled(Path(each), None)) for each in sys.argv[2:]])
