"""A prediction layer's logits from transformers' own layers, wired as DeepSeek-V3's report describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from twofold.models.registry import read_config

from tests.models.transformers_runs import reference
from tests.tiny_models.families import TinyErnie
from tests.tiny_models.qwen3_next import TinyQwen3Next
from tests.tiny_models.writing import TinyModel, _write_json, tiny_config, tiny_weights, write_weights

F32 = npt.NDArray[np.float32]


def _as_ordinary(model: TinyModel) -> TinyModel:
    """The model with its prediction layer as one more ordinary layer: transformers has no prediction layers."""
    last = model.num_layers
    if isinstance(model, TinyQwen3Next):
        full = (*model.full_attention, last)
        return replace(model, num_layers=last + 1, full_attention=full, has_mtp=False)
    if isinstance(model, TinyErnie):
        return replace(model, num_layers=last + 1, last_moe=last - 1, num_mtp_layers=0)
    return replace(model, num_layers=last + 1, num_mtp_layers=0)


@dataclass
class PredictionReference:
    """One model's target and prediction layer in torch."""

    target: Any
    layer: Any
    """transformers' model of the prediction layer alone."""
    tensors: Mapping[str, torch.Tensor]
    """What the layer has besides an ordinary one: enorm, hnorm, eh_proj."""
    eps: float

    @classmethod
    def of(cls, model: TinyModel, root: Path) -> PredictionReference:
        """model: written to `root`/hf. Its further files are made in `root`."""
        known = model.twin
        plain = root / "ordinary"
        plain.mkdir()
        config = read_config(root / "hf")
        assert config.prediction is not None
        weights = {}
        for name, values in tiny_weights(known).items():
            old, new = next((p for p in config.prediction.renamed if name.startswith(p[0])), ("", ""))
            weights[new + name.removeprefix(old)] = values
        ordinary = _as_ordinary(known)
        _write_json(plain / "config.json", tiny_config(ordinary))
        write_weights(plain, weights)
        target = reference(plain)
        own = f"model.layers.{model.num_layers}."
        centred = 1.0 if isinstance(model, TinyQwen3Next) else 0.0
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
