"""KTransformers' adapters: `fused_expert_lora.safetensors`, with and without its manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from twofold.adapters.reading import read_adapter
from twofold.api.errors import ModelLoadError

from tests.adapters.adapter_files import COUNT, EXPERTS, HIDDEN, SCALE, Tensors, base, changes, numbers
from tests.adapters.ktransformers_files import FUSED, Q, fused, write_kt, write_manifest


def expected(tensors: Tensors, scale: float) -> dict[str, npt.NDArray[np.float32]]:
    return {
        f"{EXPERTS}.{number}.{part}_proj": np.float32(scale)
        * (
            tensors[f"layers.0.experts.{part}_lora_b"][number]
            @ tensors[f"layers.0.experts.{part}_lora_a"][number]
        )
        for number in range(COUNT)
        for part in ("gate", "up", "down")
    }


@pytest.mark.parametrize("manifest", [False, True])
def test_experts_beside_attention(tmp_path: Path, manifest: bool) -> None:
    tensors = fused()
    write_kt(tmp_path, tensors)
    if manifest:
        write_manifest(tmp_path, alpha=6.0)
    found = changes(read_adapter(tmp_path, base()))
    assert found.pop(Q).shape == (8, HIDDEN)
    for key, values in expected(tensors, 3.0 if manifest else SCALE).items():
        np.testing.assert_array_equal(found.pop(key), values)
    assert not found


def test_rank_of_the_manifest(tmp_path: Path) -> None:
    tensors = fused(rank=4)
    write_manifest(write_kt(tmp_path, tensors), rank=4, alpha=4.0)
    found = changes(read_adapter(tmp_path, base()))
    np.testing.assert_array_equal(
        found[f"{EXPERTS}.2.up_proj"], expected(tensors, 1.0)[f"{EXPERTS}.2.up_proj"]
    )


def test_experts_alone(tmp_path: Path) -> None:
    write_kt(tmp_path, fused())
    (tmp_path / "adapter_model.safetensors").unlink()
    assert len(read_adapter(tmp_path, base()).products) == 3 * COUNT


def refusal(directory: Path) -> str:
    with pytest.raises(ModelLoadError, match=r"^[ -~]+$") as error:
        read_adapter(directory, base())
    return str(error.value)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.update({"layers.0.experts.x_lora_a": numbers(2)}), "x_lora_a: is unknown"),
        (lambda t: t.pop("layers.0.experts.up_lora_a"), "has no partner: factor A"),
        (
            lambda t: t.update({"layers.3.experts.up_lora_a": numbers(3, 2, 6)}),
            "layer 3 has no routed experts",
        ),
        (
            lambda t: t.update({"layers.0.experts.up_lora_a": numbers(1, 2, 6)}),
            "has shape [1, 2, 6], expected [3,",
        ),
        (lambda t: t.update({"layers.00.experts.up_lora_a": numbers(3, 2, 6)}), "is also there as"),
        (
            lambda t: t.update({"layers.0.experts.up_lora_b": numbers(3, 5, 2)}),
            "[5, 6], but the model has [4, 6]",
        ),
    ],
)
def test_tensors(tmp_path: Path, edit: Callable[[Tensors], object], words: str) -> None:
    tensors = fused()
    edit(tensors)
    assert words in refusal(write_kt(tmp_path, tensors))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda m: m.update(version=2), "version is 2, expected 1"),
        (lambda m: m.update(status="staging"), "status is 'staging', expected 'ready'"),
        (lambda m: m.pop("lora"), "has no lora"),
        (lambda m: m["artifacts"].pop(FUSED), f"no {FUSED} in artifacts"),
        (
            lambda m: m["artifacts"][FUSED].update(size=1),
            "than the 1 bytes that kt_adapter_manifest.json lists",
        ),
        (lambda m: m["artifacts"][FUSED].update(sha256="0" * 64), "another SHA-256"),
        (lambda m: m["artifacts"].update({"../x": {"size": 1, "sha256": ""}}), "'../x' is no record"),
        (lambda m: m["artifacts"].update(missing={"size": 1, "sha256": ""}), "missing: cannot be read"),
        (lambda m: m["lora"].update(rank=3), "has rank 2, expected 3"),
    ],
)
def test_manifests(tmp_path: Path, edit: Callable[[dict[str, Any]], object], words: str) -> None:
    assert words in refusal(write_manifest(write_kt(tmp_path, fused()), edit))


def test_scale_that_is_not_known(tmp_path: Path) -> None:
    assert "use_rslora is True beside" in refusal(write_kt(tmp_path, fused(), use_rslora=True))


@pytest.mark.parametrize("name", ["adapter_model.bin", "lora_experts.safetensors"])
def test_further_files(tmp_path: Path, name: str) -> None:
    write_kt(tmp_path, fused())
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / name)
    assert f"holds {name}" in refusal(tmp_path)
