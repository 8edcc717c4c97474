"""An MTP layer's logits from transformers' own layers, wired as DeepSeek-V3's report describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from twofold.models.registry import read_config

from tests.models.transformers_runs import lower_entries_first, reference
from tests.tiny_models.family import Row, TinyFamily
from tests.tiny_models.table import tiny
from tests.tiny_models.writing import _write_json, tiny_config, tiny_weights, write_weights

F32 = npt.NDArray[np.float32]
PREDICTING = (
    "deepseek_v3", "glm_moe_dsa", "glm4_moe", "glm4_moe_lite", "ernie4_5_moe", "qwen3_next", "qwen3_5_moe",
)  # fmt: skip
MODELS: dict[str, TinyFamily] = {
    "qwen3_moe": TinyFamily(
        row=Row("qwen3_moe", gguf="qwen3moe"), tie_word_embeddings=True, has_mtp=True,
        settings={"norm_topk_prob": True, "num_nextn_predict_layers": 1},
    ),
    **{name: tiny(name, has_mtp=True, num_nextn_predict_layers=1, rope_scaling=None) for name in PREDICTING},
}  # fmt: skip
MODELS["qwen3_next"] = MODELS["qwen3_next"].changed(mlp_only_layers=[])
MODELS["glm_moe_dsa"] = MODELS["glm_moe_dsa"].changed(
    index_topk_pattern=None, indexer_types=["full", "full", "shared"]
)


def _as_ordinary(model: TinyFamily) -> TinyFamily:
    """The model with its MTP layer as one more ordinary layer: transformers has no MTP layers."""
    last, settings = model.num_layers, model.settings
    more = {"layer_types": "full_attention", "mlp_layer_types": "sparse", "indexer_types": "full"}
    lists = {key: [*settings[key], kind] for key, kind in more.items() if key in settings}
    end = {"moe_layer_end_index": last - 1} if "moe_layer_end_index" in settings else {}
    return model.changed(num_layers=last + 1, has_mtp=False, num_nextn_predict_layers=0, **lists, **end)


@dataclass
class MtpReference:
    """One model's target and MTP layer in torch."""

    target: Any
    layer: Any
    """transformers' model of the MTP layer alone."""
    tensors: Mapping[str, torch.Tensor]
    """What the layer has besides an ordinary one: enorm, hnorm, eh_proj."""
    eps: float

    @classmethod
    def of(cls, model: TinyFamily, root: Path) -> MtpReference:
        """model: written to `root`/hf. Its further files are made in `root`."""
        known = model.twin
        plain = root / "ordinary"
        plain.mkdir()
        config = read_config(root / "hf")
        assert config.mtp is not None
        weights = {}
        for name, values in tiny_weights(known).items():
            old, new = next((p for p in config.mtp.renamed if name.startswith(p[0])), ("", ""))
            weights[new + name.removeprefix(old)] = values
        ordinary = _as_ordinary(known)
        _write_json(plain / "config.json", tiny_config(ordinary))
        write_weights(plain, weights)
        target = reference(plain)
        own = f"model.layers.{model.num_layers}."
        centred = float(config.head.zero_centred)
        tensors = {
            name: torch.from_numpy(weights[f"{own}{name}.weight"])
            for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
            if f"{own}{name}.weight" in weights
        }
        layer = reference(plain)
        layer.model.layers = torch.nn.ModuleList([layer.model.layers[model.num_layers]])
        if "shared_head.norm" in tensors:
            layer.model.norm.weight.data = tensors["shared_head.norm"]
        target.model.layers = target.model.layers[: model.num_layers]
        target.config.num_hidden_layers, layer.config.num_hidden_layers = model.num_layers, 1
        if getattr(layer.config, "layer_types", None):  # masks are chosen by these
            layer.config.layer_types = layer.config.layer_types[model.num_layers :]
        for name in ("enorm", "hnorm"):
            tensors[name] = tensors[name] + centred
        return cls(target, layer, tensors, 1e-6)

    @torch.no_grad()
    @lower_entries_first()
    def logits(self, ids: list[int], depth: int) -> list[F32]:
        """Greedily chained: of each depth, logits after `ids`; of the first one at every position but the last."""
        tokens = torch.tensor([ids])
        embed = self.target.model.embed_tokens
        hidden = self.target.model(tokens[:, :-1], use_cache=False).last_hidden_state
        joined = self._joined(embed(tokens[:, 1:]), hidden)
        found = []
        for _ in range(depth):
            hidden = self.layer.model(inputs_embeds=joined, use_cache=False).last_hidden_state
            logits = self.target.lm_head(hidden)[0]
            found.append(logits.float().numpy() if not found else logits[-1].float().numpy())
            drafted = logits[-1].argmax()[None, None]
            joined = torch.cat([joined, self._joined(embed(drafted), hidden[:, -1:])], 1)
        return found

    def _joined(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, self.eps)

        both = [normed(embedded, self.tensors["enorm"]), normed(hidden, self.tensors["hnorm"])]
        return torch.cat(both, -1) @ self.tensors["eh_proj"].T
