"""The bundled model at training time: a Qwen3-MoE forward pass and the Muon optimiser, in plain torch.

It exists because it is several times faster on two CPU cores than transformers' own: bf16 products, all
experts in one batched product, and shapes that never change, so that torch.compile handles it whole.
Inference uses none of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The architecture, in the words of a Qwen3-MoE config."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 32
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 64
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


def working_type() -> torch.dtype:
    """bf16 where a product in bf16 is fast: on a GPU and on CPUs with AVX-512. float32 elsewhere."""
    fast = torch.cuda.is_available() or torch.backends.cpu.get_cpu_capability() == "AVX512"
    return torch.bfloat16 if fast else torch.float32


WORKING_TYPE = working_type()
DROPOUT = 0.1
CAPACITY = 1.75  # places per expert in training, as a multiple of the mean load


class Gather(torch.autograd.Function):
    """Rows picked by an index whose inverse is known, so that the gradient is a gather too, not a scatter.

    Both indices may point one past the last row, which reads as zeros: an empty place.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return F.pad(rows, (0, 0, 0, 1)).index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        back = F.pad(gradient, (0, 0, 0, 1)).index_select(0, inverse)
        if ctx.copies > 1:
            back = back.view(-1, ctx.copies, gradient.shape[-1]).sum(1)
        return back, None, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(WORKING_TYPE)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in four blocks of queries, each over the keys it may see: faster on a CPU than one call."""
    if q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    length, mixed = q.shape[2], []
    block = -(-length // 4)
    for start in range(0, length, block):
        end = min(start + block, length)
        scores = (q[:, :, start:end] @ k[:, :, :end].transpose(-1, -2)).float() * q.shape[-1] ** -0.5
        visible = torch.arange(end, device=q.device) <= torch.arange(start, end, device=q.device).unsqueeze(1)
        chances = scores.masked_fill(~visible, -math.inf).softmax(-1).to(WORKING_TYPE)
        mixed.append(chances @ v[:, :, :end])
    return torch.cat(mixed, 2)


class Layer(nn.Module):
    """One decoder layer; matrices are kept as (..., outputs, inputs), experts stacked on the first axis."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        hidden, inner, experts = s.hidden_size, s.moe_intermediate_size, s.num_experts
        queries, keys = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
        scale = 0.5 / math.sqrt(2 * s.num_hidden_layers)

        def matrix(*size: int, gain: float = 0.5) -> nn.Parameter:
            return nn.Parameter(torch.randn(*size) * gain / math.sqrt(size[-1]))

        self.q, self.k, self.v = matrix(queries, hidden), matrix(keys, hidden), matrix(keys, hidden)
        self.o = matrix(hidden, queries, gain=scale)
        self.gate, self.up = matrix(experts, inner, hidden), matrix(experts, inner, hidden)
        self.down = matrix(experts, hidden, inner, gain=scale)
        self.router = nn.Parameter(torch.randn(experts, hidden) * 0.02)
        self.input_norm, self.post_norm = nn.Parameter(torch.ones(hidden)), nn.Parameter(torch.ones(hidden))
        self.q_norm, self.k_norm = nn.Parameter(torch.ones(s.head_dim)), nn.Parameter(torch.ones(s.head_dim))

    def queries_keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projections of normalised x, each [rows, heads, length, head size]; keys and values are repeated."""
        s, (rows, length, _) = self.shape, x.shape
        h = rms_norm(x, self.input_norm, s.rms_norm_eps)
        weight = torch.cat((self.q, self.k, self.v)).to(WORKING_TYPE)
        q_size, kv_size = self.q.shape[0], self.k.shape[0]
        q, k, v = F.linear(h, weight).split((q_size, kv_size, kv_size), -1)
        q = rms_norm(q.view(rows, length, -1, s.head_dim), self.q_norm, s.rms_norm_eps)
        k = rms_norm(k.view(rows, length, -1, s.head_dim), self.k_norm, s.rms_norm_eps)
        q, k = rotate(q, cos, sin).transpose(1, 2), rotate(k, cos, sin).transpose(1, 2)
        groups = s.num_attention_heads // s.num_key_value_heads
        v = v.view(rows, length, -1, s.head_dim).transpose(1, 2)
        return q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)

    def output(self, mixed: Tensor) -> Tensor:
        """The attention's output of the heads' mixed values."""
        rows, _, length, _ = mixed.shape
        return F.linear(mixed.transpose(1, 2).reshape(rows, length, -1), self.o.to(WORKING_TYPE))

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.output(causal_attention(*self.queries_keys_values(x, cos, sin)))

    def mixture(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The routed experts' output, the load-balancing loss, and each expert's share of the tokens."""
        s = self.shape
        h = rms_norm(x, self.post_norm, s.rms_norm_eps).view(-1, s.hidden_size)
        chances = F.linear(h.float(), self.router).softmax(-1)
        weights, chosen = chances.topk(s.num_experts_per_tok, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        experts, choices = s.num_experts, s.num_experts_per_tok
        flat = chosen.flatten()
        counts = (flat.unsqueeze(1) == torch.arange(experts, device=x.device)).sum(0)
        # Each expert has the same number of places, so that one batched product serves all. In training,
        # choices beyond the places of an expert are left out; a balanced router leaves out next to none.
        places = int(CAPACITY * flat.numel() / experts) if self.training else int(counts.max())
        order = flat.argsort(stable=True)
        owner = flat.index_select(0, order)
        before = counts.cumsum(0) - counts
        place = torch.arange(flat.numel(), device=x.device) - before.index_select(0, owner)
        slot = torch.where(place < places, owner * places + place, experts * places)
        slot_of_choice = torch.empty_like(slot).scatter_(0, order, slot)
        choice_of_slot = torch.full((experts * places + 1,), flat.numel(), device=x.device)
        choice_of_slot = choice_of_slot.scatter_(0, slot, order)[:-1]
        rows = Gather.apply(h, choice_of_slot // choices, slot_of_choice, choices).view(experts, places, -1)
        first = torch.cat((self.gate, self.up), 1).to(WORKING_TYPE).transpose(1, 2)
        gate, up = torch.bmm(rows, first).chunk(2, -1)
        out = torch.bmm(F.silu(gate) * up, self.down.to(WORKING_TYPE).transpose(1, 2))
        out = Gather.apply(out.flatten(0, 1), slot_of_choice, choice_of_slot, 1)
        mixed = (out.view(-1, choices, s.hidden_size) * weights.unsqueeze(-1).to(WORKING_TYPE)).sum(1)
        share = counts / flat.numel()
        balance = experts * (share * chances.mean(0)).sum()
        return mixed.view(x.shape), balance, share

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + F.dropout(self.attend(x, cos, sin), DROPOUT, self.training)
        mixed, balance, share = self.mixture(x)
        return x + F.dropout(mixed, DROPOUT, self.training), balance, share


class Model(nn.Module):
    """A Qwen3-MoE that computes token losses; activations are bf16, parameters and the residual fp32."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.embedding = nn.Parameter(torch.randn(s.vocab_size, s.hidden_size) * 0.02)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.num_hidden_layers))
        self.final_norm = nn.Parameter(torch.ones(s.hidden_size))
        angles = torch.arange(s.max_position_embeddings)[:, None] * s.rope_theta ** (
            -torch.arange(0, s.head_dim, 2) / s.head_dim
        )
        angles = torch.cat((angles, angles), -1)[:, None, :]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of every token (nats), the summed balance loss, and the experts' shares per layer."""
        h, balance, shares = self.hidden(inputs)
        logits = self.logits(h)
        losses = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.flatten(), reduction="none")
        return losses.view(targets.shape), balance, shares

    def hidden(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Input rows of the head for every token, the summed balance loss, and the experts' shares per layer."""
        length = inputs.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = F.dropout(F.embedding(inputs, self.embedding), DROPOUT, self.training)
        balances, shares = [], []
        for layer in self.layers:
            x, balance, share = layer(x, cos, sin)
            balances.append(balance)
            shares.append(share)
        h = rms_norm(x, self.final_norm, self.shape.rms_norm_eps)
        return h, torch.stack(balances).sum(), torch.stack(shares)

    def before_last_layer(self, inputs: Tensor) -> Tensor:
        """The residual stream that the last layer reads."""
        x = F.embedding(inputs, self.embedding)
        for layer in self.layers[:-1]:
            x, _, _ = layer(x, self.cos[: inputs.shape[1]], self.sin[: inputs.shape[1]])
        return x

    def logits(self, h: Tensor) -> Tensor:
        return F.linear(h, self.embedding.to(WORKING_TYPE)).float()


def orthogonalised(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, by quintic Newton-Schulz iteration, for a whole stack at once."""
    x = matrices.to(WORKING_TYPE)
    tall = x.shape[-2] > x.shape[-1]
    x = x.transpose(-1, -2) if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(-1, -2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.transpose(-1, -2) if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised per matrix: far fewer steps than AdamW for the matrices of a transformer."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                momentum = state.setdefault("momentum", torch.zeros_like(gradient))
                momentum.lerp_(gradient, 0.05)
                update = orthogonalised(gradient.lerp(momentum, 0.95))
                size = max(1.0, parameter.shape[-2] / parameter.shape[-1]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-group["lr"] * size)
