"""Twofold and llama.cpp on the same GGUF files: how often the likeliest next token is the same, teacher-forced.

    python -m benchmarks agreement model-Q8_0.gguf model-Q4_K_M.gguf [--llama-python PATH] [--json]

llama.cpp comes through llama-cpp-python (pip install 'twofold[peers]'), in this interpreter or in the one that
--llama-python names. Both are given the same token ids, those of Twofold's tokenizer; whether llama.cpp's tokenizer
gives the same ids is reported too. Ends with exit code 1 if a file's agreement is below --at-least.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.scenario import BenchmarkError, Report, Scenario, common, say

F32 = npt.NDArray[np.float32]

WORKER = """
import json, sys
import llama_cpp
import numpy as np
path, ids, text, out, f32_cache = json.load(sys.stdin)
kinds = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32} if f32_cache else {}
model = llama_cpp.Llama(
    path, n_ctx=len(ids), n_batch=len(ids), logits_all=True, verbose=False, flash_attn=False, **kinds
)
model.eval(ids)
np.save(out, np.array(model.scores[: len(ids)], np.float32))
print(json.dumps({"same_ids": model.tokenize(text.encode(), add_bos=False, special=True)[: len(ids)] == ids}))
"""


FLAGS: Final[dict[str, Mapping[str, Any]]] = {
    "files": {"nargs": "+", "type": Path, "metavar": "FILE.gguf"},
    **common("--llama-python"),
    "--text": {
        "type": Path,
        "help": "text to read (default: the tale that `twofold quantize` compares on)",
    },
    "--positions": {"type": int, "default": 200, "help": "tokens of the text (default: 200)"},
    "--at-least": {"type": float, "default": 0.95, "help": "agreement that is enough (default: 0.95)"},
    "--f32-cache": {
        "action": "store_true",
        "help": "llama.cpp keeps keys and values as float32, not as float16",
    },
}


def measure(args: argparse.Namespace) -> Report:
    """Figures by file; a file that llama.cpp does not read is among the problems."""
    rows: list[dict[str, Any]] = []
    problems = []
    for path in args.files:
        try:
            rows.append(compare(path, args))
        except BenchmarkError as error:
            problems.append(f"{path.name}: {error}")
            say(problems[-1])
    problems += [row["file"] for row in rows if row["agreement"] < args.at_least or not row["same_ids"]]
    return {"rows": rows, "problems": problems}


def show(report: Report) -> str:
    return "\n".join(
        f"{row['file']}: likeliest token the same for {100 * row['agreement']:.1f} % of {row['positions']} "
        f"positions, mean KL divergence {row['kl_mean']:.5f}, "
        f"token ids {'equal' if row['same_ids'] else 'DIFFER'}"
        for row in report["rows"]
    )


def compare(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    from twofold.models.model_files import open_model_files
    from twofold.quantise.texts import default_text
    from twofold.text.tokenizer import Tokenizer

    text = args.text.read_text(encoding="utf-8") if args.text else default_text()
    vocab_size = open_model_files(path).config.vocab_size
    ids = Tokenizer.open(path, vocab_size=vocab_size).encode(text)[: args.positions]
    ours = logits_of(path, ids)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "logits.npy")
        done = subprocess.run(
            [args.llama_python, "-c", WORKER],
            input=json.dumps([str(path), ids, text, str(out), args.f32_cache]),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise BenchmarkError(
                f"llama.cpp failed: {last} (install it: pip install 'twofold[peers]', or --llama-python PATH)"
            )
        theirs = np.load(out)[:, : ours.shape[1]]
    same_ids = bool(json.loads(done.stdout.splitlines()[-1])["same_ids"])
    return {"file": path.name, "positions": len(ids), **nearness(theirs, ours), "same_ids": same_ids}


def logits_of(path: Path, ids: list[int]) -> F32:
    """[tokens, vocabulary] by Twofold."""
    from twofold.blocks import ops
    from twofold.models.model_files import open_model_files
    from twofold.quantise.layers import LayeredModel

    model = LayeredModel(open_model_files(path), ops.ThreadPool(0))
    return model.logits(model.hidden_states([ids])[0])


def nearness(reference: F32, logits: F32) -> dict[str, float]:
    """How often the likeliest token is the same, and the divergence of `logits` from `reference`."""
    from twofold.quantise.quality import log_probabilities

    p, q = log_probabilities(reference), log_probabilities(logits)
    return {
        "agreement": float((logits.argmax(axis=1) == reference.argmax(axis=1)).mean()),
        "kl_mean": float((np.exp(p) * (p - q)).sum(axis=1).mean()),
    }


SCENARIO: Final = Scenario(measure, show, FLAGS, failed=lambda report: bool(report["problems"]))
