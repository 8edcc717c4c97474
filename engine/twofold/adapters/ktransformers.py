"""KTransformers' directories: PEFT's, with the routed experts in `fused_expert_lora.safetensors`.

Its tensors are layers.N.experts.NAME, with E experts, hidden size H and intermediate size I:

    gate_lora_a, up_lora_a [E, r, H]    gate_lora_b, up_lora_b [E, I, r]
    down_lora_a [E, r, I]               down_lora_b [E, H, r]

Their rank and alpha are in `kt_adapter_manifest.json`, with sizes and SHA-256 of all files; without that file they are
those of `adapter_config.json`. The scale is alpha / rank.

Sources: kt_kernel `sft/lora.py` (`_save_fused_expert_lora`), `scripts/convert_kt_to_sglang_adapter.py`; KTransformers'
fork of transformers, `integrations/kt_artifacts.py` (the manifest).
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Final

from twofold.adapters.factors import OTHER_MODEL, AdapterTensors, Pair, Products
from twofold.adapters.routed_experts import ExpertReader, LayerFactors
from twofold.adapters.settings import AdapterSettings
from twofold.api.errors import ModelLoadError
from twofold.api.regular_file import open_regular
from twofold.weights.json_file import Fields, read_json_object

FUSED_FILE: Final = "fused_expert_lora.safetensors"
MANIFEST_FILE: Final = "kt_adapter_manifest.json"
_VERSION: Final = 1
_NAME: Final = re.compile(
    r"layers\.(?P<layer>\d{1,6})\.experts\.(?P<part>gate|up|down)_lora_(?P<side>[ab])", re.ASCII
)
_PIECE: Final = 1 << 20


def read_fused_experts(tensors: AdapterTensors, settings: AdapterSettings, products: Products) -> None:
    """Add the products of FUSED_FILE. `settings`: those of adapter_config.json, which hold unless there is a manifest.

    Raises ModelLoadError for unknown tensors, files that the manifest does not fit, and what `ExpertReader` refuses.
    """
    layers: dict[str, LayerFactors] = {}
    for name in tensors.source:
        found = _NAME.fullmatch(name)
        if found is None:
            raise tensors.refused(
                name[:200], "is unknown, expected layers.N.experts.gate_lora_a and its like"
            )
        key = products.base.experts_of_layer(int(found["layer"]))
        if key is None:
            raise tensors.refused(
                name, f"the model's layer {int(found['layer'])} has no routed experts; {OTHER_MODEL}"
            )
        shape, count = tensors.shape(name), products.base.experts[key].num_experts
        if len(shape) != 3 or shape[0] != count:
            raise tensors.refused(
                name, f"has shape {list(shape)}, expected [{count}, ..., ...]; {OTHER_MODEL}"
            )
        layer, part = layers.setdefault(key, LayerFactors()), f"{found['part']}_proj"
        layer.modules[part, None] = f"{key}.{part}"
        layer.stacks.setdefault(part, Pair()).put(tensors, found["side"], name)
    ExpertReader(tensors, _of_experts(tensors.file.parent, settings), products).read(layers)


def _of_experts(directory: Path, settings: AdapterSettings) -> AdapterSettings:
    """Settings of the routed experts. Raises ModelLoadError for an invalid manifest, or one of other files."""
    manifest = directory / MANIFEST_FILE
    if not manifest.exists():
        if settings.by_root:
            raise ModelLoadError(
                f"{settings.file}: use_rslora is True beside {FUSED_FILE}, whose scale is alpha / rank; expected "
                f"{MANIFEST_FILE} with the alpha of the experts"
            )
        return AdapterSettings(settings.file, settings.alpha, settings.rank)
    fields = Fields(str(manifest), read_json_object(manifest, "files of a KTransformers adapter"))
    fields.only("version", _VERSION)
    fields.only("status", "ready")
    artifacts, lora = fields.section("artifacts"), fields.section("lora")
    if artifacts is None or lora is None or FUSED_FILE not in artifacts.data:
        raise ModelLoadError(
            f"{manifest}: has no lora, or no {FUSED_FILE} in artifacts; save the adapter again"
        )
    for name in artifacts.data:
        _check_file(directory, name, artifacts.section(name))
    return AdapterSettings(manifest, lora.number("alpha"), lora.integer("rank"))


def _check_file(directory: Path, name: str, record: Fields | None) -> None:
    file = directory / name
    if record is None or Path(name).name != name:
        raise ModelLoadError(
            f"{directory / MANIFEST_FILE}: artifact {name!r} is no record of a plain file name"
        )
    size, expected = record.integer("size", minimum=0, maximum=2**62), record.text("sha256")
    digest, found = hashlib.sha256(), 0
    try:
        with open_regular(file) as stream:
            while piece := stream.read(_PIECE):
                digest.update(piece)
                found += len(piece)
    except OSError as error:
        raise ModelLoadError(f"{file}: cannot be read: {error.strerror}; {MANIFEST_FILE} lists it") from None
    if found != size or digest.hexdigest() != expected:
        raise ModelLoadError(
            f"{file}: has {found} bytes and another SHA-256 than the {size} bytes that {MANIFEST_FILE} lists; files of "
            "different adapters are mixed or damaged, copy them again"
        )
