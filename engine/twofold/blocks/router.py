"""Router of an MoE layer: its norm, its gate, and how experts are chosen and weighted.

A token's scores (softmax, sigmoid ... of the gate's logits) plus an optional bias choose top_k experts, within the best
groups if experts are grouped. The weights are the chosen experts' scores, optionally divided by their sum, times a
scale, which may be per expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from twofold.blocks import ops
from twofold.blocks.block import Block, Cost
from twofold.blocks.block_weights import F32, BlockWeights
from twofold.blocks.device_step import DeviceBlock, DeviceState, DeviceStep, DeviceWeights, Routed, normed
from twofold.weights.tensor_spec import HasTensor, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

Gate = F32 | npt.NDArray[np.uint16]
"""[experts, hidden] in float32, or the bits of bfloat16."""


@dataclass(frozen=True)
class Router(Block):
    kind: ClassVar[str] = "router"

    hidden_size: int
    num_experts: int
    top_k: int
    eps: float
    renormalise: bool
    """Whether the k weights are divided by their sum."""
    scale: float = 1.0
    """Factor of the weights."""
    score: Literal["softmax", "sigmoid", "sqrt_softplus", "softmax_of_chosen"] = "softmax"
    bias: bool = False
    """Whether the gate has a bias that is added to the scores for choosing only."""
    bias_name: str = "gate.e_score_correction_bias"
    """Name of the bias in checkpoints, within the MoE module."""
    num_groups: int = 1
    """Groups of adjacent experts."""
    top_groups: int = 1
    group_score: Literal["max", "top_two_sum"] = "max"
    """Group score: its best expert's score, or the sum of its two best."""
    zero_others: bool = False
    """Whether experts of other groups are chosen by a score of 0, instead of not at all."""
    modules: tuple[str, ...] = ("mlp",)
    """Names of the MoE module in checkpoints; the first whose gate exists, else the last."""
    gates: tuple[str, ...] = ("gate",)
    """Names of the gate within it; the first that exists, else the last."""
    gate_bias: bool = False
    """Whether the gate's logits have a bias."""
    norm: str | None = "post_attention_layernorm"
    """Checkpoint name of the norm of the experts' input rows; None: they have none."""
    gguf_norm: str = "ffn_norm"
    """Its name in GGUF files."""
    zero_centred: bool = False
    """Whether checkpoints store the norm minus 1."""
    gate_scaled: bool = False
    """Whether the gate has its own input: normed without weights, times hidden_size ** -0.5 and a vector `scale`."""
    softcap: float = 0.0
    """Above 0, the gate's logits become softcap * tanh(logit / softcap)."""
    expert_scaled: bool = False
    """Whether weights are multiplied by their experts' `per_expert_scale`."""

    def problems(self) -> Iterator[str]:
        if self.top_k > self.num_experts:
            yield f"num_experts_per_tok {self.top_k} is more than the {self.num_experts} experts there are"
        if self.num_experts % self.num_groups:
            yield f"{self.num_experts} experts do not fill n_group {self.num_groups} groups of one size"
        elif self.top_k > self.num_experts // self.num_groups * min(self.top_groups, self.num_groups):
            yield f"num_experts_per_tok {self.top_k} is more than topk_group {self.top_groups} groups have"
        if self.top_groups > self.num_groups:
            yield f"topk_group {self.top_groups} is more than the {self.num_groups} groups of n_group"
        if self.group_score == "top_two_sum" and 1 < self.num_groups == self.num_experts:
            yield f"n_group {self.num_groups} leaves one expert to a group, which is chosen by its two best"

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        hf, gguf = f"model.layers.{self.layer}", f"blk.{self.layer}"
        shape = (self.num_experts, self.hidden_size)
        gates = {
            TensorSpec(f"{hf}.{module}.{gate}.weight", shape, "exact", f"{gguf}.ffn_gate_inp.weight"): module
            for module in self.modules
            for gate in self.gates
        }
        gate = next(filter(found, gates), list(gates)[-1])
        specs = {"gate": gate}
        if self.norm is not None:
            name, theirs, size = (
                f"{hf}.{self.norm}.weight",
                f"{gguf}.{self.gguf_norm}.weight",
                (self.hidden_size,),
            )
            specs = {
                "norm": TensorSpec(name, size, "exact", theirs, zero_centred=self.zero_centred),
                "gate": gate,
            }
        if self.bias:
            name = f"{hf}.{gates[gate]}.{self.bias_name}"
            bias = TensorSpec(name, (self.num_experts,), "exact", f"{gguf}.exp_probs_b.bias")
            bare = replace(bias, gguf=f"{gguf}.exp_probs_b")  # as some converters name it
            specs["bias"] = bare if found(bare) and not found(bias) else bias
        if self.gate_bias:
            name = f"{gate.name.removesuffix('weight')}bias"
            specs["gate_bias"] = TensorSpec(name, (self.num_experts,), "exact", f"{gguf}.ffn_gate_inp.bias")
        mixture = f"{hf}.{gates[gate]}"
        if self.gate_scaled:
            specs["gate_scale"] = TensorSpec(
                f"{mixture}.scale", (self.hidden_size,), "exact", f"{gguf}.ffn_gate_inp.scale"
            )
        if self.expert_scaled:
            name = f"{mixture}.per_expert_scale"
            specs["expert_scale"] = TensorSpec(
                name, (self.num_experts,), "exact", f"{gguf}.ffn_down_exps.scale"
            )
        return specs

    def host_bytes(self, weights: BlockWeights) -> int:
        plain = sum(weights.packed_bytes(part) for part in weights.specs if part not in ("gate", "bias"))
        return plain + 4 * self.num_experts * self.bias + self._gate_bytes(weights)

    def cost(self, weights: BlockWeights, tokens: int = 1, context_len: int = 0) -> Cost:
        base = super().cost(weights, tokens, context_len)
        return Cost(base.num_bytes, base.flops, self._gate_bytes(weights))

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        return ops.Router(pool, **self._arguments(weights, pool))

    def _arguments(self, weights: BlockWeights, pool: ops.ThreadPool) -> dict[str, Any]:
        """Keyword arguments of `ops.Router`."""
        return {
            "norm_weight": weights.optional_vector("norm"),
            "gate_weight": self._gate(weights, pool),
            "eps": self.eps,
            "shape": self.shape,
            "bias": weights.optional_vector("bias"),
            "gate_bias": weights.optional_vector("gate_bias"),
            "gate_norm": self._gate_norm(weights),
            "expert_scale": weights.optional_vector("expert_scale"),
            "softcap": self.softcap,
        }

    def _gate(self, weights: BlockWeights, pool: ops.ThreadPool, part: str = "gate") -> Gate:
        """A gate's matrix. Its products are exact in float32, whatever format the other weights have, because they
        decide the routing."""
        gate = weights.checked(pool, part)
        return np.array(gate.data) if gate.format == "bf16" else ops.dequantise(pool, gate)

    def _gate_norm(self, weights: BlockWeights) -> F32 | None:
        """Norm of the gate's input rows, if experts have another input."""
        scale = weights.optional_vector("gate_scale")
        return None if scale is None else scale * np.float32(self.hidden_size**-0.5)

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        scale = weights.vector("gate_scale")
        return RouterOnDevice(
            self,
            weights.vector("norm"),
            weights.exact("gate"),
            weights.vector("bias"),
            weights.vector("gate_bias"),
            None if scale is None else scale * self.hidden_size**-0.5,
            weights.vector("expert_scale"),
            moe_layer,
        )

    @property
    def shape(self) -> ops.RouterShape:
        """Native description of how logits become chosen experts and weights."""
        return ops.RouterShape(
            self.top_k,
            score=self.score,
            renormalise=self.renormalise,
            scale=self.scale,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            group_score=self.group_score,
            zero_others=self.zero_others,
        )

    def _gate_bytes(self, weights: BlockWeights) -> int:
        """Bytes of the gate: bfloat16 is kept, anything else becomes float32."""
        return math.prod(weights.specs["gate"].shape) * (2 if weights.format("gate") == "bf16" else 4)


@dataclass(frozen=True)
class RouterOnDevice:
    router: Router
    norm: Tensor | None
    gate: Tensor
    """f32 [experts, hidden]: routing needs the exactness."""
    bias: Tensor | None
    gate_bias: Tensor | None
    """f32 [experts]."""
    gate_norm: Tensor | None
    """f32 [hidden]."""
    expert_scale: Tensor | None
    """f32 [experts]."""
    moe_layer: int = -1

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        """Route the tokens for the blocks after it; adds nothing to `total`."""
        rows = self._rows(hidden, self.norm)
        logits = self._logits(rows) if self.gate_norm is None else self.look(hidden)
        prior = step.moe.cache_prior(self.moe_layer, len(rows))
        if prior is not None:
            prior = replace(prior, experts=prior.experts[:, : len(self.gate)])
        ids, weights = step.kernels.route(logits, self.router, self.bias, prior)
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[ids]
        padding = (step.batch.slot_mapping < 0)[:, None]
        step.routed = Routed(rows, ids.masked_fill_(padding, -1), weights)

    def look(self, hidden: Tensor) -> Tensor:
        """Router logits f32 [T, experts] for the residual stream of any layer."""
        norm = self.norm if self.gate_norm is None else self.gate_norm
        return self._logits(self._rows(hidden, norm))

    def _rows(self, hidden: Tensor, norm: Tensor | None) -> Tensor:
        return hidden.bfloat16() if norm is None else normed(hidden, norm, self.router.eps)

    def _logits(self, rows: Tensor) -> Tensor:
        from torch.nn import functional

        logits = functional.linear(rows.float(), self.gate, self.gate_bias)
        cap = self.router.softcap
        return logits if cap == 0.0 else cap * (logits / cap).tanh()
