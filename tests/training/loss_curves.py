"""Loss curves of other libraries' unchanged programs, over our experts and over transformers' own.

python -m tests.training.loss_curves --python trl-sft=VENV/bin/python … [--write]

Every program runs twice with the same arguments and seed: by itself, and under `python -m twofold.training`. Only the
launcher differs. --write renews the plot in the documentation and its data.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import write_tiny_model

ROOT: Final = Path(__file__).resolve().parents[2]
DATA: Final = ROOT / "docs/images/training-curves.json"
PLOT: Final = DATA.with_suffix(".svg")
FAMILIES: Final = ("qwen3_moe", "deepseek_v3", "gpt_oss")
TOLERANCE: Final = 1e-4
"""Largest difference of a loss, nats. Both sides are float32; they add in another order, which steps carry on."""
STEPS: Final = 16
RUN_S: Final = 400
_LAUNCHERS: Final[Mapping[str, tuple[str, ...]]] = {"theirs": (), "ours": ("-m", "twofold.training")}
_TRL: Final = (
    "--use_peft", "--lora_r", "4", "--lora_alpha", "8", "--lora_dropout", "0", "--lora_target_modules", "all-linear",
    "--lora_target_parameters", "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "--max_steps", str(STEPS),
    "--per_device_train_batch_size", "2", "--logging_steps", "1", "--report_to", "none",
    "--bf16", "False", "--seed", "1", "--max_length", "128", "--use_cpu", "True", "--save_strategy", "steps",
    "--save_steps", str(STEPS), "--disable_tqdm", "True",
)  # fmt: skip
_RATES: Final = {"sft": "1e-2", "dpo": "1e-3"}
_LLAMA_FACTORY: Final = {
    "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 4, "lora_target": "all",
    "dataset": "tales", "template": "qwen", "cutoff_len": 128, "logging_steps": 1, "save_strategy": "no",
    "per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_steps": STEPS, "seed": 1, "report_to": "none",
    "bf16": False, "disable_tqdm": True, "use_cpu": True, "overwrite_output_dir": True,
}  # fmt: skip
LIBRARIES: Final[Mapping[str, str]] = {"trl-sft": "trl", "trl-dpo": "trl", "llama-factory": "llamafactory"}
"""Programs, and the packages that have them."""
LACKING: Final[Mapping[tuple[str, str], str]] = {
    ("llama-factory", "gpt_oss"): "LLaMA-Factory trains gpt-oss with a FlashAttention-3 kernel only, on a GPU"
}
"""Models that a program cannot train on a CPU, whatever computes the experts."""


def curves(program: str, family: str, python: str, directory: Path) -> dict[str, list[float]]:
    """Losses of all steps, "ours" and "theirs".

    Args:
        python: the interpreter of an environment that has the program.
        directory: an empty one.

    Raises:
        RuntimeError: the program failed, or our launcher did not load the model.
    """
    example = EXAMPLES[family]
    model = write_tiny_model(directory / "model", replace(example, max_position_embeddings=512))
    _write_data(directory / "data")
    found = {}
    for side, launcher in _LAUNCHERS.items():
        out = directory / side
        words = [python, *launcher, *_command(program, model, directory, out)]
        paths = [str(ROOT / "engine"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(directory / "cache"), "CUDA_VISIBLE_DEVICES": "", "DISABLE_VERSION_CHECK": "1",
        }  # fmt: skip
        run = subprocess.run(
            words, capture_output=True, text=True, env=environment, timeout=RUN_S, cwd=directory
        )
        text = run.stdout + run.stderr
        if run.returncode != 0 or "is loaded by transformers alone" in text:
            raise RuntimeError(f"{program} on {family}, {side}: exit code {run.returncode}\n{text[-6000:]}")
        state = next(out.rglob("trainer_state.json"))
        log = json.loads(state.read_text())["log_history"]
        found[side] = [entry["loss"] for entry in log if "loss" in entry]
    return found


def difference(pair: Mapping[str, list[float]]) -> float:
    """Largest difference of two curves of the same length."""
    return max(abs(one - other) for one, other in zip(pair["ours"], pair["theirs"], strict=True))


def _command(program: str, model: Path, directory: Path, out: Path) -> list[str]:
    if program == "llama-factory":
        settings = _LLAMA_FACTORY | {
            "model_name_or_path": str(model), "dataset_dir": str(directory / "data"), "output_dir": str(out)
        }  # fmt: skip
        recipe = directory / f"{out.name}.yaml"
        recipe.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items()))
        return ["-m", "llamafactory.cli", "train", str(recipe)]
    kind = program.removeprefix("trl-")
    places = ["--model_name_or_path", str(model), "--dataset_name", str(directory / "data" / kind)]
    rate = ["--learning_rate", _RATES[kind]]
    return ["-m", f"trl.scripts.{kind}", *places, *rate, "--output_dir", str(out), *_TRL]


def _write_data(directory: Path) -> None:
    """The same tales as messages, as preferences, and as LLaMA-Factory's named data set."""
    rng = random.Random(0)
    asked = [f"{rng.choice(['Say', 'Tell', 'Sing'])} {rng.choice(['cat', 'king', 'sea'])}" for _ in range(32)]
    rows: dict[str, list[Any]] = {"sft": [], "dpo": [], "tales": []}
    for text in asked:
        question, answer = [{"role": "user", "content": text}], f"the {text[4:]} and the thing. Tra-la!"
        good, bad = [{"role": "assistant", "content": each} for each in (answer, f"No {text}.")]
        rows["sft"].append({"messages": [*question, good]})
        rows["dpo"].append({"prompt": question, "chosen": [good], "rejected": [bad]})
        rows["tales"].append({"instruction": text, "input": "", "output": answer})
    for name in ("sft", "dpo"):
        folder = directory / name
        folder.mkdir(parents=True)
        (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[name]))
    (directory / "tales.json").write_text(json.dumps(rows["tales"]))
    (directory / "dataset_info.json").write_text(json.dumps({"tales": {"file_name": "tales.json"}}))


def plot(found: Mapping[str, Mapping[str, Mapping[str, list[float]]]]) -> None:
    """Write the curves of all programs and models as one picture."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    mpl.rcParams |= {"svg.hashsalt": "curves", "svg.fonttype": "none", "font.size": 8}
    figure, axes = pyplot.subplots(len(found), len(FAMILIES), figsize=(9, 2.2 * len(found)), squeeze=False)
    for row, (program, of_families) in zip(axes, found.items(), strict=True):
        for axis in row[len(of_families) :]:
            axis.axis("off")
        for axis, (family, pair) in zip(row, of_families.items(), strict=False):
            steps = range(1, len(pair["ours"]) + 1)
            axis.plot(steps, pair["theirs"], color="#b9c4d0", linewidth=4, label="PEFT and transformers")
            axis.plot(
                steps, pair["ours"], color="#0b5cad", linewidth=1.2, label="the same over Twofold's experts"
            )
            axis.set_title(f"{program}, {family}: differ by at most {difference(pair):.0e}", fontsize=7.5)
            axis.grid(alpha=0.25)
    axes[0][0].legend(frameon=False)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    for row in axes:
        row[0].set_ylabel("loss")
    figure.tight_layout()
    figure.savefig(PLOT, metadata={"Date": None})


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", action="append", default=[], metavar="PROGRAM=PATH",
        help=f"interpreter that has a program: {', '.join(LIBRARIES)}; may be given several times",
    )  # fmt: skip
    parser.add_argument("--write", action="store_true", help="renew the documentation's plot and its data")
    args = parser.parse_args(words)
    found: dict[str, Any] = json.loads(DATA.read_text()) if args.write and DATA.is_file() else {}
    worst = 0.0
    for program, python in (each.split("=", 1) for each in args.python):
        for family in (each for each in FAMILIES if (program, each) not in LACKING):
            with tempfile.TemporaryDirectory() as folder:
                pair = curves(program, family, python, Path(folder))
            found.setdefault(program, {})[family] = pair
            if args.write:
                found = {each: found[each] for each in LIBRARIES if each in found}
                DATA.write_text(json.dumps(found, indent=1) + "\n")
            worst = max(worst, difference(pair))
            print(
                f"{program:14} {family:12} {pair['ours'][0]:.4f} → {pair['ours'][-1]:.4f}, "
                f"differs by at most {difference(pair):.1e}",
                flush=True,
            )
    if args.write:
        plot(found)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
