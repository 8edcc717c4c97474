"""Models of random weights at known shapes, and routing that is forced upon them.

Routing comes from a recorded trace if there is one, else it is drawn with favourites that change slowly, as recorded
routing has them. Layers, experts and top-k are cut to what model and trace have both. A deep model has the weights of
few layers on disk, again and again; in memory each layer has its own.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from twofold.models import ModelFiles, open_model_files
from twofold.models.model_files import check_model_files, part_specs
from twofold.models.registry import read_config
from twofold.weights.tensor_source import TensorEntry, TensorSource

from benchmarks.gpu import cases
from benchmarks.gpu.machine import Machine

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Mixture-of-Experts model that determine its speed."""

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: int = 0
    """0: as many as are written."""


QWEN = Shape(cases.QWEN, 2048, 768, 128, 8, 32, 4, 128)
GPT_OSS = Shape(cases.GPT_OSS, 2880, 2880, 32, 4, 64, 8, 64)
SHAPES = {shape.name: shape for shape in (QWEN, GPT_OSS)}
_DRAWN_TOKENS = 512


def shrunk(shape: Shape, by: int) -> Shape:
    """A shape for a rehearsal: as many experts, all else small."""
    if by == 1:
        return shape
    experts = max(2 * shape.top_k, shape.num_experts // by * 4)
    layers = 4 if shape.layers else 0
    return Shape(shape.name, 64, 32, experts, shape.top_k, 2, 1, 64, layers)  # heads as kernels take them


def num_layers(machine: Machine, shape: Shape) -> int:
    """Layers of the model."""
    return shape.layers or machine.sizes.model_layers


def model_folder(machine: Machine, shape: Shape) -> Path:
    """A Hugging Face directory of a Qwen3-MoE model of random bf16 weights; written once."""
    folder = machine.folder / shape.name
    if not (folder / "config.json").exists():  # the last file that is written
        _write(machine, shape, folder)
    return folder


class _RepeatedLayers(TensorSource):
    """Tensors of a model whose layers are those of fewer layers on disk."""

    def __init__(self, written: TensorSource, num_written: int, num_layers: int) -> None:
        entries: dict[str, TensorEntry] = {}
        for name in written:
            entry = written.entry(name)
            *_, layer, rest = ("", *name.removeprefix("model.layers.").split(".", 1))
            own = range(int(layer), num_layers, num_written) if name.startswith("model.layers.") else ()
            names = [f"model.layers.{each}.{rest}" for each in own] or [name]
            entries |= {each: replace(entry, name=each) for each in names}
        super().__init__(written.where, entries)

    def release_pages(self, names: object) -> None:
        """Keep them: a later layer reads the same ones."""


def model_files(machine: Machine, shape: Shape) -> ModelFiles:
    """The model of a shape, with all its layers."""
    folder = model_folder(machine, shape)
    written = open_model_files(folder)
    if not shape.layers:
        return written
    deep = folder / f"{shape.layers}-layers"
    deep.mkdir(exist_ok=True)
    (deep / "config.json").write_text(json.dumps(_config(shape, shape.layers, machine.sizes.vocab_size)))
    tensors = _RepeatedLayers(written.tensors, machine.sizes.model_layers, shape.layers)
    config = read_config(deep)
    return check_model_files(config, part_specs(config, lambda spec: spec.name in tensors), tensors)


def _config(shape: Shape, num_layers: int, vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": shape.hidden,
        "num_hidden_layers": num_layers, "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "vocab_size": vocab_size,
        "intermediate_size": shape.intermediate, "moe_intermediate_size": shape.intermediate,
        "num_experts": shape.num_experts, "num_experts_per_tok": shape.top_k, "norm_topk_prob": True,
        "mlp_only_layers": [], "decoder_sparse_step": 1, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, "attention_bias": False,
        "torch_dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 0,
        "use_sliding_window": False, "sliding_window": None,
    }  # fmt: skip


def _write(machine: Machine, shape: Shape, folder: Path) -> None:
    from safetensors.torch import save_file
    from twofold.models.bundled import bundled_model_path

    folder.mkdir(parents=True, exist_ok=True)
    layers, vocab = machine.sizes.model_layers, machine.sizes.vocab_size
    generator = torch.Generator(machine.device).manual_seed(0)

    def matrix(*sizes: int) -> Tensor:
        values = torch.randn(*sizes, device=machine.device, generator=generator)
        return (values / sizes[-1] ** 0.5).bfloat16().cpu()

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    weight_map: dict[str, str] = {}

    def save(file: str, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, folder / file)
        weight_map.update(dict.fromkeys(tensors, file))

    save(
        "model-dense.safetensors",
        {
            "model.embed_tokens.weight": matrix(vocab, shape.hidden),
            "lm_head.weight": matrix(vocab, shape.hidden),
            "model.norm.weight": ones(shape.hidden),
        },
    )
    for layer in range(layers):
        at = f"model.layers.{layer}"
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        tensors = {
            f"{at}.input_layernorm.weight": ones(shape.hidden),
            f"{at}.post_attention_layernorm.weight": ones(shape.hidden),
            f"{at}.self_attn.q_proj.weight": matrix(queries, shape.hidden),
            f"{at}.self_attn.k_proj.weight": matrix(keys, shape.hidden),
            f"{at}.self_attn.v_proj.weight": matrix(keys, shape.hidden),
            f"{at}.self_attn.o_proj.weight": matrix(shape.hidden, queries),
            f"{at}.self_attn.q_norm.weight": ones(shape.head_dim),
            f"{at}.self_attn.k_norm.weight": ones(shape.head_dim),
            f"{at}.mlp.gate.weight": matrix(shape.num_experts, shape.hidden),
        }
        for expert in range(shape.num_experts):
            mlp = f"{at}.mlp.experts.{expert}"
            tensors[f"{mlp}.gate_proj.weight"] = matrix(shape.intermediate, shape.hidden)
            tensors[f"{mlp}.up_proj.weight"] = matrix(shape.intermediate, shape.hidden)
            tensors[f"{mlp}.down_proj.weight"] = matrix(shape.hidden, shape.intermediate)
        save(f"model-{layer:02}.safetensors", tensors)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_model_path() / name, folder / name)
    (folder / "config.json").write_text(json.dumps(_config(shape, layers, vocab)))


@dataclass(frozen=True)
class ForcedTrace:
    """Routing of decode tokens, as long as it is asked for: it restarts at its end."""

    ids: I32
    """[tokens][layers][top_k]."""
    weights: npt.NDArray[np.float32]
    source: str

    def rows(self, step: int, batch: int) -> tuple[I32, npt.NDArray[np.float32]]:
        """[layers][batch][top_k] of a step: its sequences stand evenly apart in the trace."""
        count = len(self.ids)
        at = [(step + row * (count // batch)) % count for row in range(batch)]
        return self.ids[at].swapaxes(0, 1), self.weights[at].swapaxes(0, 1)


def trace_for(machine: Machine, shape: Shape) -> ForcedTrace:
    """The recorded trace where it fits the shape, else drawn routing."""
    layers = num_layers(machine, shape)
    if machine.trace is not None and shape.name == cases.GPT_OSS:
        with np.load(machine.trace, allow_pickle=False) as file:
            ids, offsets = file["ids"][:, :layers].astype(np.int32), file["offsets"]
            probs = file["probs"][:, :layers].astype(np.float32)
        half = int(offsets[len(offsets) // 2])  # nothing was tuned on the second half
        if ids.shape[2] == shape.top_k and ids.max() < shape.num_experts:
            return ForcedTrace(ids[half:], probs[half:], machine.trace.name)
    return drawn_trace(shape, layers)


def drawn_trace(shape: Shape, layers: int, seed: int = 0) -> ForcedTrace:
    """Each layer has favourites by a power law; some of a token's experts are those of the token before."""
    random = np.random.default_rng(seed)
    popularity = 1 / (1 + np.arange(shape.num_experts)) ** 0.7
    orders = np.stack([random.permutation(shape.num_experts) for _ in range(layers)])
    ids = np.empty((_DRAWN_TOKENS, layers, shape.top_k), np.int32)
    for token in range(_DRAWN_TOKENS):
        for layer in range(layers):
            score = np.log(popularity)[np.argsort(orders[layer])] + random.gumbel(size=shape.num_experts)
            if token:
                score[ids[token - 1, layer]] += 1.0
            ids[token, layer] = np.argsort(-score)[: shape.top_k]
    weights = np.sort(random.random(ids.shape, np.float32), axis=-1)[..., ::-1]
    return ForcedTrace(ids, np.ascontiguousarray(weights / weights.sum(-1, keepdims=True)), "drawn")


class ForcedRouting:
    """`DeviceKernels` with a prescribed routing; all other calls go to the wrapped kernels."""

    def __init__(
        self, beneath: Any, num_layers: int, top_k: int, device: torch.device, most_rows: int = 64
    ) -> None:
        self._beneath, self._num_layers, self._next = beneath, num_layers, 0
        self.on = True
        self._ids = torch.zeros((num_layers, most_rows, top_k), dtype=torch.int32, device=device)
        self._ids += torch.arange(top_k, dtype=torch.int32, device=device)
        self._weights = torch.full((num_layers, most_rows, top_k), 1.0 / top_k, device=device)

    def set_routing(self, ids: I32, weights: npt.NDArray[np.float32]) -> None:
        """[layers][rows][top_k] of the next step. Steps of more rows than there is room for route by themselves."""
        rows, self._next = ids.shape[1], 0
        if rows > self._ids.shape[1]:
            return
        self._ids[:, :rows].copy_(torch.from_numpy(np.ascontiguousarray(ids)))
        self._weights[:, :rows].copy_(torch.from_numpy(np.ascontiguousarray(weights)))

    def route(
        self, logits: Tensor, router: Any, bias: Tensor | None, prior: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the prescribed routing; a step calls it layer by layer."""
        layer, self._next = self._next, (self._next + 1) % self._num_layers
        if not self.on or len(logits) > self._ids.shape[1]:
            return self._beneath.route(logits, router, bias, prior)  # type: ignore[no-any-return]
        return self._ids[layer, : len(logits)].clone(), self._weights[layer, : len(logits)].clone()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._beneath, name)
