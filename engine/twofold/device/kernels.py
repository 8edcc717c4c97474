"""What the dense part of a model on a device needs beyond torch: routing, rotation with the KV store, paged attention.

Two answers behind one protocol: `CudaKernels` are ours, and can be captured in a graph; `TorchKernels` say in plain
torch what they mean, run on any device, and are what tests compare with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from twofold import _cuda


@dataclass(frozen=True)
class KvLayer:
    """One layer's keys and values: bf16 [pages, page_size, kv_heads, head_dim] each."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class HeadShape:
    """Heads of one attention layer, and what happens to queries and keys before they meet."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    """Positions that are attended to at most; 0: all."""
    epsilon: float


class DeviceKernels(Protocol):
    """Device operations without a fitting primitive in torch. All write into tensors that live as long as a graph."""

    def route(self, logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
        """Softmax over f32 [T, experts]: (ids int32 [T, top_k] by descending weight, weights f32)."""

    def rope_store(
        self,
        qkv: Tensor,
        norms: tuple[Tensor | None, Tensor | None],
        angles: tuple[Tensor, Tensor],
        places: Tensor,
        kv: KvLayer,
        shape: HeadShape,
    ) -> Tensor:
        """Normalise and rotate q and k of bf16 [T, (heads + 2 kv_heads) * head_dim], store k and v, return q.

        Args:
            norms: f32 [head_dim] of q and of k, or None.
            angles: cosines and sines, f32 [T, head_dim / 2].
            places: int64 [T], page * page_size + position in it; negative: not stored.

        Returns:
            bf16 [T, heads, head_dim].
        """

    def decode_attention(
        self, q: Tensor, page_tables: Tensor, lengths: Tensor, kv: KvLayer, shape: HeadShape
    ) -> Tensor:
        """One query per sequence, bf16 [S, heads, head_dim], over its `lengths` positions; zeros where there is none.

        Args:
            page_tables: int32 [S, max_pages].
            lengths: int32 [S], this token included.
        """


class TorchKernels:
    """The operations in plain torch, for any device. Not fast, and `decode_attention` cannot be captured."""

    def route(self, logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
        """See `DeviceKernels.route`."""
        # A stable sort, so that the lower number comes first among equals.
        scores, order = torch.sort(torch.softmax(logits.float(), -1), dim=-1, descending=True, stable=True)
        weights = scores[:, :top_k]
        if normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return order[:, :top_k].to(torch.int32), weights.contiguous()

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


class CudaKernels:
    """Our kernels on the current CUDA device; every call goes to torch's current stream."""

    def __init__(self, max_length: int) -> None:
        """max_length: the longest sequence, which bounds the launches of attention."""
        self._max_length = max_length
        self._workspaces: list[Tensor] = []  # those outgrown too: graphs hold their addresses

    def route(self, logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
        """See `DeviceKernels.route`."""
        num_tokens, num_experts = logits.shape
        ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
        weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
        from twofold import _cuda

        _cuda.route(
            logits.data_ptr(), 0, num_tokens, num_experts, top_k, "softmax", normalise, 1.0, ids.data_ptr(),
            weights.data_ptr(), stream(),
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
        from twofold import _cuda

        q = torch.empty((len(qkv), shape.num_heads, shape.head_dim), dtype=torch.bfloat16, device=qkv.device)
        rows = _cuda.QkvRows(
            qkv=qkv.data_ptr(), num_tokens=len(qkv), num_heads=shape.num_heads, q_norm=address(norms[0]),
            k_norm=address(norms[1]), epsilon=shape.epsilon, cos=angles[0].data_ptr(), sin=angles[1].data_ptr(),
            rotary=shape.head_dim, slot_mapping=places.data_ptr(),
        )  # fmt: skip
        _cuda.rope_store(rows, self._pages(kv), q=q.data_ptr(), stream=stream())
        return q

    def decode_attention(
        self, q: Tensor, page_tables: Tensor, lengths: Tensor, kv: KvLayer, shape: HeadShape
    ) -> Tensor:
        """See `DeviceKernels.decode_attention`."""
        from twofold import _cuda

        num_sequences, max_pages = page_tables.shape
        max_length = min(self._max_length, max_pages * kv.keys.shape[1])
        num_bytes = _cuda.attention_workspace_bytes(
            num_sequences=num_sequences, num_heads=shape.num_heads, head_dim=shape.head_dim, max_length=max_length
        )  # fmt: skip
        if not self._workspaces or self._workspaces[-1].numel() < num_bytes:
            self._workspaces.append(torch.empty(num_bytes, dtype=torch.uint8, device=q.device))
        out = torch.empty_like(q)
        attention = _cuda.DecodeAttention(
            q=q.data_ptr(), page_tables=page_tables.data_ptr(), seq_lens=lengths.data_ptr(),
            num_sequences=num_sequences, num_heads=shape.num_heads, max_pages=max_pages, max_length=max_length,
            scale=shape.scale, window=shape.window,
        )  # fmt: skip
        workspace = self._workspaces[-1].data_ptr()
        _cuda.decode_attention(
            attention, self._pages(kv), workspace=workspace, out=out.data_ptr(), stream=stream()
        )
        return out

    def _pages(self, kv: KvLayer) -> _cuda.KvPages:
        from twofold import _cuda

        _, page_size, num_kv_heads, head_dim = kv.keys.shape
        return _cuda.KvPages(
            keys=kv.keys.data_ptr(), values=kv.values.data_ptr(), page_size=page_size, num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )  # fmt: skip


def address(tensor: Tensor | None) -> int:
    """Where the tensor's data lies; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def stream() -> int:
    """torch's current stream, as native code takes it."""
    return int(torch.cuda.current_stream().cuda_stream)
