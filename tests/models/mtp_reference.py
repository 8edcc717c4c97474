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
    "qwen4_exp",
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
            for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "fc_embedding", "fc_hidden")
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
        if "fc_hidden" not in tensors:
            return cls(target, layer, tensors, 1e-6)
        for name, values in layer.model.hyper_connection_mixer.named_parameters():
            values.data = torch.from_numpy(weights[f"{own}hyper_connection_mixer.{name}"])
        layer.model.config.ple_layer_ids = []
        return _OfStreams(target, layer, tensors, 1e-6)

    @torch.no_grad()
    @lower_entries_first()
    def logits(self, ids: list[int], depth: int) -> list[F32]:
        """Greedily chained: of each depth, logits after `ids`; of the first one at every position but the last."""
        tokens = torch.tensor([ids])
        embed = self.target.model.embed_tokens
        _, states = self._run(self.target.model, input_ids=tokens[:, :-1])
        joined = self._joined(embed(tokens[:, 1:]), states)
        found = []
        for _ in range(depth):
            hidden, states = self._run(self.layer.model, inputs_embeds=joined)
            logits = self.target.lm_head(hidden)[0]
            found.append(logits.float().numpy() if not found else logits[-1].float().numpy())
            drafted = logits[-1].argmax()[None, None]
            joined = torch.cat([joined, self._joined(embed(drafted), states[:, -1:])], 1)
        return found

    def _run(self, model: Any, **given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The last hidden states, and what the layer reads of them."""
        hidden = model(use_cache=False, **given).last_hidden_state
        return hidden, hidden

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], None, self.eps) * self.tensors[name].view(
            -1, x.shape[-1]
        )

    def _joined(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        both = [self._normed(embedded, "enorm"), self._normed(states, "hnorm")]
        return torch.cat(both, -1) @ self.tensors["eh_proj"].T


class _OfStreams(MtpReference):
    """The same of Qwen3.8-Flash-Next: each residual stream has a projection of its own [1, T, streams * hidden]."""

    def _run(self, model: Any, **given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept: list[torch.Tensor] = []
        hooks = [model.hyper_connection_mixer.register_forward_pre_hook(lambda _, of: kept.append(of[0]))]
        if (streams := given.get("inputs_embeds")) is not None:
            given["inputs_embeds"] = streams[..., : model.config.hidden_size]
            hooks.append(model.layers[0].register_forward_pre_hook(lambda _, of: (streams, *of[1:])))
        hidden, _ = super()._run(model, **given)
        for hook in hooks:
            hook.remove()
        return hidden, kept[0]

    def _joined(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        by_stream = states.unflatten(-1, (-1, embedded.shape[-1]))
        of_token = self._normed(embedded, "enorm") @ self.tensors["fc_embedding"].T
        return (
            of_token[:, :, None] + self._normed(by_stream, "hnorm") @ self.tensors["fc_hidden"].T
        ).flatten(2)
