"""Operations of a model's dense part that torch lacks, in plain torch: routing, rotary embedding, paged attention.

The reference for `blocks.device_step.DeviceKernels`: runs on any device, and tests compare with it. `native_kernels`
has our own kernels, which can be captured in a graph.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from twofold.blocks.attention.chosen import ChosenPositions
from twofold.blocks.device_step import CachePrior, HeadShape, KvLayer, Norms, RoutingRule


class PromptAttention:
    """`DeviceKernels.prompt_attention` by torch's scaled_dot_product_attention."""

    def prompt_attention(
        self,
        q: Tensor,
        positions: Tensor,
        pages: Tensor,
        seq_len: int,
        kv: KvLayer,
        shape: HeadShape,
        sinks: Tensor | None = None,
        chosen: ChosenPositions | None = None,
        *,
        ends: Tensor | None = None,
    ) -> Tensor:
        page_size = kv.keys.shape[1]
        used = pages[: -(-seq_len // page_size)].long()
        keys = kv.keys[used].flatten(0, 1)[:seq_len].to(q.dtype)
        values = kv.values[used].flatten(0, 1)[:seq_len].to(q.dtype)
        seen = shape.select.seen(positions, seq_len, ends)
        if chosen is not None:
            seen = chosen.within(seen, shape.num_heads)
        return shape.scores.attended(q, keys, values, seen, sinks=sinks)


class TorchKernels(PromptAttention):
    """The operations in plain torch, for any device. Slow; `decode_attention` cannot be captured."""

    native = None

    def route(
        self, logits: Tensor, router: RoutingRule, bias: Tensor | None, prior: CachePrior | None = None
    ) -> tuple[Tensor, Tensor]:
        scores = _scores(logits.float(), router.score)
        choice = scores if bias is None else scores + bias
        if router.num_groups > 1:
            choice = _within_best_groups(choice, router)
        if prior is not None:
            choice = choice + prior.experts * _bonus(scores, router.score, prior.strength)
        # Stable sort: the lower expert number comes first among equals.
        chosen = torch.sort(choice, dim=-1, descending=True, stable=True)[1][:, : router.top_k]
        weights = scores.gather(1, chosen)
        if router.score == "softmax_of_chosen":
            weights = torch.softmax(weights, -1)
        if router.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen.to(torch.int32), (weights * router.scale).contiguous()

    def rope_store(
        self,
        qkv: Tensor,
        norms: Norms,
        angles: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
        kv: KvLayer,
        shape: HeadShape,
    ) -> Tensor:
        heads = qkv.float().view(len(qkv), shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        q, k, v = torch.tensor_split(heads, (shape.num_heads, shape.num_heads + shape.num_kv_heads), dim=1)
        q, k = (
            self._rotated(x, norm, angles, shape.epsilon) for x, norm in zip((q, k), norms[:2], strict=True)
        )
        if norms[2] is not None:
            v = torch.nn.functional.rms_norm(v, v.shape[-1:], norms[2], shape.epsilon)
        stored = slot_mapping >= 0
        kv.keys.view(-1, *kv.keys.shape[2:])[slot_mapping[stored]] = k[stored].to(kv.keys.dtype)
        kv.values.view(-1, *kv.values.shape[2:])[slot_mapping[stored]] = v[stored].to(kv.values.dtype)
        return q.to(qkv.dtype)

    def decode_attention(
        self,
        q: Tensor,
        page_tables: Tensor,
        seq_lens: Tensor,
        kv: KvLayer,
        shape: HeadShape,
        sinks: Tensor | None = None,
        chosen: ChosenPositions | None = None,
    ) -> Tensor:
        out = torch.zeros_like(q)
        for s, length in enumerate(seq_lens.tolist()):
            if length > 0:
                positions = torch.tensor([length - 1], device=q.device)
                query, pages = q[s : s + 1], page_tables[s]
                own = None if chosen is None else chosen.of(slice(s, s + 1))
                out[s] = self.prompt_attention(query, positions, pages, length, kv, shape, sinks, own)[0]
        return out

    @staticmethod
    def _rotated(x: Tensor, norm: Tensor | None, angles: tuple[Tensor, Tensor], epsilon: float) -> Tensor:
        if norm is not None:
            x = torch.nn.functional.rms_norm(x, x.shape[-1:], norm, epsilon)
        cos, sin = (angle[:, None, :] for angle in angles)
        rotated = cos.shape[-1]
        first, second, rest = torch.tensor_split(x, (rotated, 2 * rotated), dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def _scores(logits: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return torch.softmax(logits, -1)
    if score == "sigmoid":
        return torch.sigmoid(logits)
    if score == "sqrt_softplus":
        return torch.nn.functional.softplus(logits).sqrt()
    return logits  # the softmax over the chosen logits follows later


def _bonus(scores: Tensor, score: str, prior: float) -> Tensor | float:
    if score == "softmax_of_chosen":
        return -math.log1p(-prior)
    return prior / (1 - prior) * scores


def _within_best_groups(choice: Tensor, router: RoutingRule) -> Tensor:
    """`choice` with the experts outside the best groups masked out."""
    groups = choice.view(len(choice), router.num_groups, -1)
    of_group = groups.amax(-1) if router.group_score == "max" else groups.topk(2, -1)[0].sum(-1)
    order = torch.sort(of_group, dim=-1, descending=True, stable=True)[1]
    best = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, order[:, : router.top_groups], True)
    within: Tensor = groups.masked_fill(~best[:, :, None], 0.0 if router.zero_others else -torch.inf).flatten(
        1
    )
    return within
