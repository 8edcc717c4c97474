"""Rule files of `twofold quantize`: their meaning, and their error messages."""

from __future__ import annotations

from pathlib import Path

import pytest
from twofold.api.errors import ConfigError
from twofold.quantise.rules import read_rules
from twofold.weights.tensor_spec import TensorSpec


def spec(name: str) -> TensorSpec:
    return TensorSpec(f"model.layers.0.{name}.weight", (32, 32), "matrix", "")


TOP = "format: int4\nrules:\n"
CASES = [
    ("format: int4", "experts", 3, "mlp.experts.up_proj", "int4"),
    ("format: int4", "head", None, "lm_head", "q8_0"),
    (TOP + "- {format: int8}", "head", None, "lm_head", "q8_0"),
    (TOP + "- {blocks: head, format: int8}", "head", None, "lm_head", "int8"),
    (TOP + "- {blocks: attention, format: int8}", "experts", 3, "x", "int4"),
    (TOP + "- {blocks: [attention, dense], format: int8}", "dense", 3, "x", "int8"),
    (TOP + "- {layers: first, format: int8}", "dense", 0, "x", "int8"),
    (TOP + "- {layers: last, format: int8}", "dense", 9, "x", "int8"),
    (TOP + "- {layers: last, format: int8}", "dense", 8, "x", "int4"),
    (TOP + "- {layers: [1, 4-6], format: int8}", "dense", 5, "x", "int8"),
    (TOP + "- {layers: [1, 4-6], format: int8}", "dense", 7, "x", "int4"),
    (TOP + "- {layers: 11, format: int8}", "dense", 1, "x", "int4"),
    (TOP + "- {tensors: '*.up_proj', format: int8}", "experts", 1, "mlp.up_proj", "int8"),
    (TOP + "- {tensors: '*.up_proj', format: int8}", "experts", 1, "mlp.down_proj", "int4"),
    (TOP + "- {blocks: dense, format: int8}\n- {layers: 2, format: q8_0}", "dense", 2, "x", "q8_0"),
    (TOP + "- {layers: 2, format: q8_0}\n- {blocks: dense, format: int8}", "dense", 2, "x", "int8"),
]


@pytest.mark.parametrize(("text", "kind", "layer", "name", "expected"), CASES)
def test_which_format(
    tmp_path: Path, text: str, kind: str, layer: int | None, name: str, expected: str
) -> None:
    (tmp_path / "r.yaml").write_text(text)
    assert read_rules(tmp_path / "r.yaml").format_of(kind, layer, 10, spec(name)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is None"),
        ("format: int5", "did you mean 'int8'|did you mean 'int4'"),
        ("rules: []", "the file: has no format"),
        ("rules: [{format: int8}]", "the file: has no format"),
        ("format: int4\nrule: []", "did you mean 'rules'"),
        ("format: int4\nrules: {}", "expected a list of rules"),
        (TOP + "- {block: experts, format: int8}", "rule 1 has 'block'; did you mean 'blocks'"),
        (TOP + "- {format: int8}\n- {blocks: expert, format: int8}", "rule 2: .* did you mean 'experts'"),
        (TOP + "- {blocks: router, format: int8}", "blocks has 'router'"),
        (TOP + "- {layers: 3-x, format: int8}", "layers has '3-x', expected a number"),
        (TOP + "- {blocks: experts}", "rule 1: has no format"),
        (TOP + "- {tensors: 3, format: int8}", "tensors is 3"),
        ("format: [", "not YAML"),
        ("!!python/object/apply:os.getcwd []", "not YAML"),
    ],
)
def test_faults_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        read_rules(tmp_path / "r.yaml")
    assert str(tmp_path / "r.yaml") in str(refused.value)
