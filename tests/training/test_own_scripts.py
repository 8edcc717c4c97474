"""Scripts of the user: under the launcher or after `enable()`, from_pretrained loads MoE models over our experts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from twofold.training import enable, loading

from tests.models.transformers_runs import one_torch_thread
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import write_tiny_model

__all__ = ["one_torch_thread"]  # a fixture

pytest.importorskip("peft")
pytest.importorskip("accelerate")

SCRIPT = '''
"""Nothing here names Twofold."""
import json, sys
import peft, torch, transformers

def main():
    transformers.set_seed(0)
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], target_parameters=["mlp.experts.down_proj"])
    model = peft.get_peft_model(model, config)
    data = [{"input_ids": list(range(n, n + 20)), "labels": list(range(n, n + 20))} for n in range(8)]
    arguments = transformers.TrainingArguments(
        sys.argv[2], use_cpu=True, max_steps=6, learning_rate=5e-2, logging_steps=1, report_to="none",
        per_device_train_batch_size=2, gradient_checkpointing=True,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    trainer.save_model(sys.argv[2])
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    kind = model.get_base_model().config._experts_implementation
    print(json.dumps({"losses": losses, "experts": kind, "file": __file__, "name": __name__}))

if __name__ == "__main__":
    main()
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), EXAMPLES["qwen3_moe"])


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`enable()`, undone afterwards."""
    base = transformers.PreTrainedModel
    monkeypatch.setattr(base, "from_pretrained", vars(base)["from_pretrained"])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    enable()
    return transformers.AutoModelForCausalLM


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=environment, timeout=200
    )


@pytest.mark.slow
def test_an_unchanged_script_has_the_losses_of_plain_transformers(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    results = []
    for launcher in ([], ["-m", "twofold.training"]):
        found = run(*launcher, str(script), str(model), str(tmp_path / "out"))
        assert found.returncode == 0, found.stderr
        results.append(json.loads(found.stdout.splitlines()[-1]))
        assert (tmp_path / "out/adapter_model.safetensors").is_file()
    theirs, ours = results
    assert (theirs["experts"], ours["experts"]) == ("grouped_mm", "twofold")
    assert ours["file"] == str(script)
    assert ours["losses"][-1] < ours["losses"][0] - 0.1
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-3)


def test_a_launcher_without_a_script_prints_its_usage(tmp_path: Path) -> None:
    for words in ([], ["-m"], ["no-such-script.py"]):
        found = run("-m", "twofold.training", *words)
        assert found.returncode == 2
        assert len(found.stderr.splitlines()) == 1


def test_arguments_of_from_pretrained_are_those_of_transformers(hooked: Any, model: Path) -> None:
    class_itself = transformers.Qwen3MoeForCausalLM
    for kind in (hooked, class_itself):
        found = kind.from_pretrained(model, dtype="bfloat16", attn_implementation="eager", use_cache=False)
        assert type(found) is class_itself
        assert found.config._experts_implementation == "twofold"
        assert (found.dtype, found.config._attn_implementation) == (torch.bfloat16, "eager")
        assert found.config.use_cache is False
        assert found.generation_config.temperature == 0.7
        assert (found.name_or_path, found.training) == (str(model), False)


def test_what_is_not_ours_is_left_to_transformers(
    hooked: Any,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dense = write_tiny_model(tmp_path, EXAMPLES["qwen3"])
    assert hooked.from_pretrained(dense).config._experts_implementation != "twofold"
    chosen = hooked.from_pretrained(model, experts_implementation="eager")
    assert chosen.config._experts_implementation == "eager"
    assert capsys.readouterr().err == ""

    given = hooked.from_pretrained(model, output_loading_info=True)
    assert given[0].config._experts_implementation == "grouped_mm"
    assert capsys.readouterr().err == (
        f"twofold: {model} is loaded by transformers alone: output_loading_info of from_pretrained is given\n"
    )

    def refuse(*_: Any, **__: Any) -> None:
        raise KeyError("two\nlines")

    monkeypatch.setattr(loading, "open_base", refuse)
    assert hooked.from_pretrained(model).config._experts_implementation == "grouped_mm"
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(KeyError):
        hooked.from_pretrained(model, experts_implementation="twofold")


def test_a_name_of_the_hub_is_read_from_its_cache(hooked: Any, tmp_path: Path) -> None:
    folder, commit = tmp_path / "models--org--name", "a" * 40
    write_tiny_model(folder / "snapshots" / commit, replace(EXAMPLES["qwen3_moe"], num_shards=3))
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(commit)
    found = hooked.from_pretrained("org/name", cache_dir=tmp_path, local_files_only=True)
    assert (found.config._experts_implementation, found.name_or_path) == ("twofold", "org/name")


def test_a_moved_or_converted_model_has_experts_without_memory(hooked: Any, model: Path) -> None:
    found = hooked.from_pretrained(model, device_map={"": "cpu"}).to("cpu").to(torch.float64)
    stacks = [each for name, each in found.named_parameters() if "experts" in name]
    assert [(each.dtype, each.untyped_storage().nbytes()) for each in stacks] == [(torch.float64, 8)] * len(
        stacks
    )
    assert not any(each.requires_grad for each in stacks)


def test_a_base_whose_experts_have_no_memory_is_not_saved(hooked: Any, model: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="twofold merge"):
        hooked.from_pretrained(model).save_pretrained(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
