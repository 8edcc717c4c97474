"""CUDA kernels for the dense part of a model: implements `blocks.device_step.DeviceKernels`."""

from __future__ import annotations

import torch
from torch import Tensor

from twofold import _cuda
from twofold.blocks.device_step import Favour, HeadShape, KvLayer, NativeKernels, Norms
from twofold.blocks.router import Router
from twofold.device.kernels import PromptAttention, TorchKernels


class CudaKernels(PromptAttention):
    """Our kernels on the current CUDA device; every call runs on torch's current stream."""

    def __init__(self, max_length: int) -> None:
        """max_length: the longest sequence, which bounds attention's launches."""
        self.max_length = max_length
        self._workspaces: list[Tensor] = []  # outgrown ones too: graphs hold their addresses

    @property
    def native(self) -> NativeKernels:
        """See `DeviceKernels.native`."""
        return self

    def stream(self) -> int:
        """See `NativeKernels.stream`."""
        return stream()

    def workspace(self, num_bytes: int, device: torch.device) -> Tensor:
        """See `NativeKernels.workspace`."""
        if not self._workspaces or self._workspaces[-1].numel() < num_bytes:
            self._workspaces.append(torch.empty(num_bytes, dtype=torch.uint8, device=device))
        return self._workspaces[-1]

    def route(
        self, logits: Tensor, router: Router, bias: Tensor | None, favour: Favour | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `DeviceKernels.route`; in torch where experts have a cache prior, which a graph can capture too."""
        if favour is not None:
            return TorchKernels().route(logits, router, bias, favour)
        num_tokens, num_experts = logits.shape
        ids = torch.empty((num_tokens, router.top_k), dtype=torch.int32, device=logits.device)
        weights = torch.empty((num_tokens, router.top_k), dtype=torch.float32, device=logits.device)
        _cuda.route(
            logits.data_ptr(), address(bias), num_tokens, num_experts, router.shape, ids.data_ptr(), weights.data_ptr(),
            stream(),
        )  # fmt: skip
        return ids, weights

    def rope_store(
        self,
        qkv: Tensor,
        norms: Norms,
        angles: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
        kv: KvLayer,
        shape: HeadShape,
    ) -> Tensor:
        """See `DeviceKernels.rope_store`."""
        q = torch.empty((len(qkv), shape.num_heads, shape.head_dim), dtype=torch.bfloat16, device=qkv.device)
        rows = _cuda.QkvRows(
            qkv=qkv.data_ptr(), num_tokens=len(qkv), num_heads=shape.num_heads, q_norm=address(norms[0]),
            k_norm=address(norms[1]), epsilon=shape.epsilon, cos=angles[0].data_ptr(), sin=angles[1].data_ptr(),
            rotary=2 * angles[0].shape[1], slot_mapping=slot_mapping.data_ptr(),
            v_norm=address(norms[2]),
        )  # fmt: skip
        _cuda.rope_store(rows, self._pages(kv), q=q.data_ptr(), stream=stream())
        return q

    def decode_attention(
        self,
        q: Tensor,
        page_tables: Tensor,
        seq_lens: Tensor,
        kv: KvLayer,
        shape: HeadShape,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `DeviceKernels.decode_attention`."""
        num_sequences, max_pages = page_tables.shape
        max_length = min(self.max_length, max_pages * kv.keys.shape[1])
        num_bytes = _cuda.attention_workspace_bytes(
            num_sequences=num_sequences, num_heads=shape.num_heads, head_dim=shape.head_dim, max_length=max_length
        )  # fmt: skip
        workspace = self.workspace(num_bytes, q.device).data_ptr()
        out = torch.empty_like(q)
        attention = _cuda.DecodeAttention(
            q=q.data_ptr(), page_tables=page_tables.data_ptr(), seq_lens=seq_lens.data_ptr(),
            num_sequences=num_sequences, num_heads=shape.num_heads, max_pages=max_pages, max_length=max_length,
            scale=shape.scale, window=shape.window, chunk=shape.chunk, sinks=address(sinks),
        )  # fmt: skip
        _cuda.decode_attention(
            attention, self._pages(kv), workspace=workspace, out=out.data_ptr(), stream=stream()
        )
        return out

    def _pages(self, kv: KvLayer) -> _cuda.KvPages:
        _, page_size, num_kv_heads, head_dim = kv.keys.shape
        return _cuda.KvPages(
            keys=kv.keys.data_ptr(), values=kv.values.data_ptr(), page_size=page_size, num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )  # fmt: skip


def address(tensor: Tensor | None) -> int:
    """The tensor's data address; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def stream() -> int:
    """torch's current stream, as native code takes it."""
    return int(torch.cuda.current_stream().cuda_stream)
