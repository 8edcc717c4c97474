"""Rules for modules: what files mean, what is wrong with them in words, and those that come with Twofold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from twofold.api.errors import ConfigError
from twofold.blocks import ops
from twofold.models.model_files import ModelFiles, open_model_files
from twofold.models.registry import FAMILIES
from twofold.rules.decisions import decide
from twofold.rules.modules import CLASSES, modules_of
from twofold.rules.placement import LEVELS, SHIPPED, parse_placement_rules, read_placement_rules
from twofold.rules.yaml_file import MAX_BYTES, parse_yaml, read_yaml
from twofold.tools.cli.main import main

from tests.tiny_models.table import EXAMPLES, tiny
from tests.tiny_models.writing import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]

MODULES = [family.module for family in FAMILIES]


def rules_of(text: str):
    return parse_placement_rules(parse_yaml(text, "r.yaml"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """Three layers, the first without experts; rows of 128 weights but for attention's and the dense layer's."""
    model = tiny(
        "glm4_moe",
        hidden_size=128,
        moe_intermediate_size=128,
        num_layers=3,
        num_experts=4,
        top_k=2,
        dtype="bfloat16",
    )
    return open_model_files(write_tiny_model(tmp_path_factory.mktemp("model"), model))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.yaml: is None, expected a list of rules"),
        ("match: all\ndevice: cpu", "expected a list of rules"),
        ("- 3", "r.yaml:1: the rule is 3, expected match, device"),
        ("- {match: all, device: cpu}\n- {match: all, devise: cpu}", "r.yaml:2: .* 'devise'; did you mean 'device'"),
        ("- {match: all}", "asks for nothing"),
        ("- {device: cpu}", "has no match"),
        ("- {match: everything, device: cpu}", "match is 'everything', expected name, class, layers"),
        ("- {match: {names: x}, device: cpu}", "match has 'names'; did you mean 'name'"),
        ("- {match: {class: expert}, device: cpu}", "class is 'expert'; did you mean 'experts'"),
        ("- {match: {class: torch.nn.Linear}, device: cpu}", "class is 'torch.nn.Linear'; it takes attention"),
        ("- {match: {name: '('}, device: cpu}", "no regular expression"),
        ("- {match: {name: 3}, device: cpu}", "name is 3"),
        ("- {match: {layers: 3-x}, device: cpu}", "layers has '3-x', expected a number"),
        ("- {match: all, device: cuda}", "device is 'cuda'; it takes auto, cpu, gpu"),
        ("- {match: all, format: int5}", "did you mean 'int8'|did you mean 'int4'"),
        ("- {match: all, threads: 0}", "threads is 0, expected 1 to"),
        ("- {match: all, threads: true}", "threads is True"),
        ("- {match: all, backend: AMX}", "backend is 'AMX'; .*amx"),
        ("- {match: all, device: cpu, device: gpu}", "'device' is there twice"),
        ("- [", "not YAML"),
        ("- !!python/object/apply:os.getcwd []", "not YAML of plain values"),
        ("- 2020-01-01", "not YAML of plain values"),
        ("- &a {match: all, device: cpu}\n- *a", r"r.yaml:2: has an alias \(\*a\)"),
        ("[" * 17, "nested more than 16 deep"),
        ("\x00", "not YAML"),
        # KTransformers' form
        ("- {match: all, replace: {class: X}}", "asks for class 'X' and no kwargs"),
        ("- {match: all, replace: {kwargs: {prefill_device: cuda}}}",
         "kwargs has 'prefill_device', which has no counterpart here; it takes generate_device, backend"),
        ("- {match: all, replace: {kwarg: {}}}", "replace has 'kwarg', .* did you mean 'kwargs'"),
        ("- {match: all, replace: {kwargs: {generate_device: 'cuda:1'}}}", "is 'cuda:1'; it takes cpu, cuda"),
        ("- {match: all, replace: {kwargs: {backend: AMXInt9}}}", "'AMXInt9'; did you mean 'AMXInt"),
        ("- {match: all, replace: [], device: cpu}", "has 'device', which has no counterpart"),
    ],
)  # fmt: skip
def test_faults_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        rules_of(text)
    assert str(refused.value).startswith("r.yaml")
    assert len(str(refused.value)) < 500


def test_a_file_is_read_within_bounds(tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_text("#" * (MAX_BYTES + 1))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xff")
    for name, message in (("large", "larger than"), ("binary", "not YAML"), ("none", "cannot be read")):
        with pytest.raises(ConfigError, match=message):
            read_yaml(tmp_path / f"{name}.yaml")
    with pytest.raises(ConfigError, match="1001 rules, expected 1000 at most"):
        rules_of("- 0\n" * 1001)


def test_the_first_rule_that_fits_counts(files: ModelFiles) -> None:
    text = """- {match: {class: experts, layers: last}, device: gpu, threads: 3}
- {match: {name: 'mlp.experts$'}, replace: {class: default, kwargs: {generate_device: cpu, backend: AMXInt8}}}
- {match: {class: [attention, ffn], layers: [0, 2-7]}, format: file}
- {match: all, format: q8_0}
"""
    read, decisions = decide(files, rules_of(text), None)
    found = {
        each.module.name: (
            each.rule.where if each.rule else "",
            each.device,
            each.module.formats,
            each.threads,
        )
        for each in decisions
    }
    assert found == {
        "model.embed_tokens": ("r.yaml:4", "auto", ("q8_0",), 0),
        "model.layers.0.self_attn": ("r.yaml:3", "auto", ("bf16",), 0),
        "model.layers.0.mlp": ("r.yaml:3", "auto", ("bf16",), 0),
        "model.layers.1.self_attn": ("r.yaml:4", "auto", ("q8_0",), 0),
        "model.layers.1.mlp.gate": ("r.yaml:4", "auto", (), 0),
        "model.layers.1.mlp.shared_experts": ("r.yaml:4", "auto", ("q8_0",), 0),
        "model.layers.1.mlp.experts": ("r.yaml:2", "cpu", ("int8",), 0),
        "model.layers.2.self_attn": ("r.yaml:3", "auto", ("bf16",), 0),
        "model.layers.2.mlp.gate": ("r.yaml:4", "auto", (), 0),
        "model.layers.2.mlp.shared_experts": ("r.yaml:4", "auto", ("q8_0",), 0),
        "model.layers.2.mlp.experts": ("r.yaml:1", "gpu", ("bf16",), 3),
        "lm_head": ("r.yaml:4", "auto", ("q8_0",), 0),
    }
    assert read.expert_formats() == (("int8",) * 3, ("bf16",) * 3)
    assert not any(files.recoded_formats)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {match: {name: 'layers.1.mlp.expert$'}, device: cpu}",
         r"fits no module; modules of this model are called model.layers.1.mlp.experts"),
        ("- {match: {class: gated_delta}, device: cpu}", "has 3 layers of attention, dense"),
        ("- {match: {class: experts, layers: 0}, device: cpu}", "fits no module of this model"),
        ("- {match: {class: head, layers: 0}, device: cpu}", "fits no module of this model"),
        ("- {match: all, device: cpu}\n- {match: {class: head}, format: int8}",
         r"r.yaml:2: all that this rule fits \(lm_head …\) is taken by the rule of r.yaml:1"),
        ("- {match: {class: router}, format: int8}", r"whose weights stay exact \(router: gates"),
        ("- {match: {class: experts}, format: q4_k}",
         r"experts.gate_proj has rows of 128 weights.* blocks of 256 of format q4_k; those that fit are f32.* int4"),
    ],
)  # fmt: skip
def test_a_mismatch_with_the_model_is_reported(files: ModelFiles, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decide(files, rules_of(text), None)


@pytest.mark.parametrize("family", [name for name in MODULES if EXAMPLES[name].has_experts])
def test_every_family_has_rules_that_describe_its_default(family: str, tmp_path: Path) -> None:
    files = open_model_files(write_tiny_model(tmp_path, EXAMPLES[family]))
    read, decisions = decide(files, read_placement_rules(SHIPPED), None)  # each rule fits something
    assert read is files
    for each in decisions:
        assert each.rule is not None, f"{each.module.name} is under no rule"
        assert (each.device, each.backend, each.threads) == ("auto", "auto", 0)
        assert each.module.classes <= set(CLASSES)
    names = [module.name for module in modules_of(files)]
    assert len(set(names)) == len(names)


def test_levels_are_those_of_the_kernels() -> None:
    from twofold._testing import kernels

    assert ("auto", *kernels.levels()) == LEVELS


def test_explain_names_the_line_of_each_rule(
    files: ModelFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.yaml").write_text(
        "- match: {class: experts}\n  replace: {kwargs: {generate_device: cpu, backend: AMXInt4}}\n"
        "- {match: {class: embedding}, backend: generic}\n"
    )
    model = str(files.tensors.where)
    assert main(["rules", "explain", model, "--optimize-config", str(tmp_path / "r.yaml")]) == 0
    *table, first, second = capsys.readouterr().out.splitlines()
    assert first == f"note: {tmp_path}/r.yaml:1: generate_device 'cpu' is read as device: cpu"
    assert second == f"note: {tmp_path}/r.yaml:1: backend AMXInt4 is read as format: int4"
    lines = [re.split(r"  +", line) for line in table]
    assert ["model.layers.1-2.mlp.experts", "experts", f"{tmp_path}/r.yaml:1", "cpu", "int4"] == lines[-2][:5]
    assert lines[1][2:6] == [f"{tmp_path}/r.yaml:3", "auto", "bf16 (file)", "generic"]
    own = ops.isa_choice()[0]
    assert lines[-1][:7] == ["lm_head", "head", "none", "auto", "bf16 (file)", own, "all"]
    assert main(["rules", "explain", model]) == 0
    assert "shipped rules:2" in capsys.readouterr().out


def test_the_page_shows_rules_that_are_read() -> None:
    page = (ROOT / "docs/guides/placement-rules.md").read_text(encoding="utf-8")
    examples = re.findall(r"```yaml\n(.*?)```", page, re.S)
    assert [len(rules_of(example)) for example in examples] == [4, 1]
    for word in (*CLASSES, *LEVELS[-1:]):
        assert word in page
