"""What the dense part of a model on a device needs beyond torch: routing, rotation with the KV store, paged attention.

Two answers behind one protocol, `blocks.device_step.DeviceKernels`: `CudaKernels` are ours, and can be captured in a
graph; `TorchKernels` say in plain torch what they mean, run on any device, and are what tests compare with.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from twofold.blocks.device_step import HeadShape, KvLayer
from twofold.blocks.router import Router


class PromptAttention:
    """`DeviceKernels.prompt_attention` by torch's scaled_dot_product_attention."""

    def prompt_attention(
        self, q: Tensor, positions: Tensor, pages: Tensor, seq_len: int, kv: KvLayer, shape: HeadShape
    ) -> Tensor:
        """See `DeviceKernels.prompt_attention`."""
        return attend(q, positions, pages, seq_len, kv, shape)


class TorchKernels(PromptAttention):
    """The operations in plain torch, for any device. Not fast, and `decode_attention` cannot be captured."""

    def route(self, logits: Tensor, router: Router, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `DeviceKernels.route`."""
        scores = _scores(logits.float(), router.score)
        choice = scores if bias is None else scores + bias
        if router.num_groups > 1:
            choice = _within_best_groups(choice, router)
        # A stable sort, so that the lower number comes first among equals.
        chosen = torch.sort(choice, dim=-1, descending=True, stable=True)[1][:, : router.top_k]
        weights = scores.gather(1, chosen)
        if router.score == "softmax_of_chosen":
            weights = torch.softmax(weights, -1)
        if router.renormalise:
            weights = weights / (
                weights.sum(-1, keepdim=True) + (0.0 if router.score == "softmax" else 1e-20)
            )
        return chosen.to(torch.int32), (weights * router.scale).contiguous()

    def rope_store(
        self,
        qkv: Tensor,
        norms: tuple[Tensor | None, Tensor | None],
        angles: tuple[Tensor, Tensor],
        places: Tensor,
        kv: KvLayer,
        shape: HeadShape,
    ) -> Tensor:
        """See `DeviceKernels.rope_store`."""
        heads = qkv.float().view(len(qkv), shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        q, k, v = torch.tensor_split(heads, (shape.num_heads, shape.num_heads + shape.num_kv_heads), dim=1)
        q, k = (self._turned(x, norm, angles, shape.epsilon) for x, norm in zip((q, k), norms, strict=True))
        stored = places >= 0
        kv.keys.view(-1, *kv.keys.shape[2:])[places[stored]] = k[stored].to(kv.keys.dtype)
        kv.values.view(-1, *kv.values.shape[2:])[places[stored]] = v[stored].to(kv.values.dtype)
        return q.to(qkv.dtype)

    def decode_attention(
        self, q: Tensor, page_tables: Tensor, lengths: Tensor, kv: KvLayer, shape: HeadShape
    ) -> Tensor:
        """See `DeviceKernels.decode_attention`."""
        out = torch.zeros_like(q)
        for s, length in enumerate(lengths.tolist()):
            if length > 0:
                positions = torch.tensor([length - 1], device=q.device)
                out[s] = attend(q[s : s + 1], positions, page_tables[s], length, kv, shape)[0]
        return out

    @staticmethod
    def _turned(x: Tensor, norm: Tensor | None, angles: tuple[Tensor, Tensor], epsilon: float) -> Tensor:
        if norm is not None:
            x = torch.nn.functional.rms_norm(x, x.shape[-1:], norm, epsilon)
        cos, sin = (angle[:, None, :] for angle in angles)
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _scores(logits: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return torch.softmax(logits, -1)
    if score == "sigmoid":
        return torch.sigmoid(logits)
    if score == "sqrt_softplus":
        return torch.nn.functional.softplus(logits).sqrt()
    return logits  # of the chosen ones the softmax is taken afterwards


def _within_best_groups(choice: Tensor, router: Router) -> Tensor:
    """`choice` with the experts of all but the best groups out of reach."""
    groups = choice.view(len(choice), router.num_groups, -1)
    of_group = groups.amax(-1) if router.group_score == "max" else groups.topk(2, -1)[0].sum(-1)
    order = torch.sort(of_group, dim=-1, descending=True, stable=True)[1]
    best = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, order[:, : router.top_groups], True)
    within: Tensor = groups.masked_fill(~best[:, :, None], -torch.inf).flatten(1)
    return within


def attend(q: Tensor, positions: Tensor, pages: Tensor, length: int, kv: KvLayer, shape: HeadShape) -> Tensor:
    """Queries of one sequence over its first `length` positions, by torch's scaled_dot_product_attention.

    Args:
        q: [Q, heads, head_dim].
        positions: int64 [Q], of the queries; each sees itself and what is before it, within the window.
        pages: int32, the sequence's pages in order.
    """
    page_size = kv.keys.shape[1]
    used = pages[: -(-length // page_size)].long()
    keys = kv.keys[used].flatten(0, 1)[:length].to(q.dtype)
    values = kv.values[used].flatten(0, 1)[:length].to(q.dtype)
    seen = torch.arange(length, device=q.device)[None, :] <= positions[:, None]
    if shape.window > 0:
        seen &= torch.arange(length, device=q.device)[None, :] > positions[:, None] - shape.window
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=seen,
        scale=shape.scale,
        enable_gqa=shape.num_heads != shape.num_kv_heads,
    )
    return out[0].transpose(0, 1)


class CudaKernels(PromptAttention):
    """Our kernels on the current CUDA device; every call goes to torch's current stream."""

    def __init__(self, max_length: int) -> None:
        """max_length: the longest sequence, which bounds the launches of attention."""
        self._cuda: Any = importlib.import_module("twofold._cuda")
        self._max_length = max_length
        self._workspaces: list[Tensor] = []  # those outgrown too: graphs hold their addresses

    def route(self, logits: Tensor, router: Router, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `DeviceKernels.route`."""
        num_tokens, num_experts = logits.shape
        ids = torch.empty((num_tokens, router.top_k), dtype=torch.int32, device=logits.device)
        weights = torch.empty((num_tokens, router.top_k), dtype=torch.float32, device=logits.device)
        self._cuda.route(
            logits.data_ptr(), address(bias), num_tokens, num_experts, router.shape, ids.data_ptr(), weights.data_ptr(),
            stream(),
        )  # fmt: skip
        return ids, weights

    def rope_store(
        self,
        qkv: Tensor,
        norms: tuple[Tensor | None, Tensor | None],
        angles: tuple[Tensor, Tensor],
        places: Tensor,
        kv: KvLayer,
        shape: HeadShape,
    ) -> Tensor:
        """See `DeviceKernels.rope_store`."""
        q = torch.empty((len(qkv), shape.num_heads, shape.head_dim), dtype=torch.bfloat16, device=qkv.device)
        self._cuda.rope_store(
            qkv.data_ptr(), len(qkv), shape.num_heads, address(norms[0]), address(norms[1]), shape.epsilon,
            angles[0].data_ptr(), angles[1].data_ptr(), shape.head_dim, places.data_ptr(), self._pages(kv),
            q.data_ptr(), stream(),
        )  # fmt: skip
        return q

    def decode_attention(
        self, q: Tensor, page_tables: Tensor, lengths: Tensor, kv: KvLayer, shape: HeadShape
    ) -> Tensor:
        """See `DeviceKernels.decode_attention`."""
        num_sequences, max_pages = page_tables.shape
        max_length = min(self._max_length, max_pages * kv.keys.shape[1])
        num_bytes = self._cuda.attention_workspace_bytes(
            num_sequences, shape.num_heads, shape.head_dim, max_length
        )
        if not self._workspaces or self._workspaces[-1].numel() < num_bytes:
            self._workspaces.append(torch.empty(num_bytes, dtype=torch.uint8, device=q.device))
        out = torch.empty_like(q)
        self._cuda.decode_attention(
            q.data_ptr(), page_tables.data_ptr(), lengths.data_ptr(), num_sequences, shape.num_heads, max_pages,
            max_length, shape.scale, shape.window, 0, self._pages(kv), self._workspaces[-1].data_ptr(), out.data_ptr(),
            stream(),
        )  # fmt: skip
        return out

    def _pages(self, kv: KvLayer) -> Any:
        _, page_size, num_kv_heads, head_dim = kv.keys.shape
        return self._cuda.KvPages(kv.keys.data_ptr(), kv.values.data_ptr(), page_size, num_kv_heads, head_dim)


def address(tensor: Tensor | None) -> int:
    """Where the tensor's data lies; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def stream() -> int:
    """torch's current stream, as native code takes it."""
    return int(torch.cuda.current_stream().cuda_stream)
