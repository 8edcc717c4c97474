"""The native kernels for the dense part of a model: implements `blocks.device_step.DeviceKernels`."""

from __future__ import annotations

import torch
from torch import Tensor

from twofold._core.device import DecodeAttention, KvPages, QkvRows
from twofold.blocks.attention.chosen import ChosenPositions, position_lists
from twofold.blocks.device_step import CachePrior, HeadShape, KvLayer, NativeKernels, Norms, RoutingRule
from twofold.device.device import Device
from twofold.device.kernels import PromptAttention, TorchKernels


class NativeDenseKernels(PromptAttention):
    """A device's own kernels; every call runs on torch's current stream."""

    def __init__(self, device: Device, max_length: int) -> None:
        """max_length: the longest sequence, which bounds attention's launches."""
        self.device, self.stream, self.max_length = device.native, device.stream, max_length
        self._workspaces: list[Tensor] = []  # outgrown ones too: graphs hold their addresses

    @property
    def native(self) -> NativeKernels:
        return self

    def workspace(self, num_bytes: int, device: torch.device) -> Tensor:
        if not self._workspaces or self._workspaces[-1].numel() < num_bytes:
            self._workspaces.append(torch.empty(num_bytes, dtype=torch.uint8, device=device))
        return self._workspaces[-1]

    def route(
        self, logits: Tensor, router: RoutingRule, bias: Tensor | None, prior: CachePrior | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `DeviceKernels.route`; in torch where experts have a cache prior, which a graph can capture too."""
        if prior is not None:
            return TorchKernels().route(logits, router, bias, prior)
        num_tokens, num_experts = logits.shape
        ids = torch.empty((num_tokens, router.top_k), dtype=torch.int32, device=logits.device)
        weights = torch.empty((num_tokens, router.top_k), dtype=torch.float32, device=logits.device)
        self.device.route(
            logits=logits,
            bias=bias,
            num_tokens=num_tokens,
            num_experts=num_experts,
            shape=router.shape,
            ids=ids,
            weights=weights,
            stream=self.stream(),
        )
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
        q = torch.empty((len(qkv), shape.num_heads, shape.head_dim), dtype=torch.bfloat16, device=qkv.device)
        (q_norm, k_norm, v_norm), (cos, sin) = norms, angles
        rows = QkvRows(
            qkv=qkv,
            num_tokens=len(qkv),
            num_heads=shape.num_heads,
            q_norm=q_norm,
            k_norm=k_norm,
            epsilon=shape.epsilon,
            cos=cos,
            sin=sin,
            rotary=2 * cos.shape[1],
            slot_mapping=slot_mapping,
            v_norm=v_norm,
        )
        self.device.rope_store(rows, _pages(kv), q=q, stream=self.stream())
        return q

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
        num_sequences, max_pages = page_tables.shape
        max_length = min(self.max_length, max_pages * kv.keys.shape[1])
        num_bytes = self.device.attention_workspace_bytes(
            num_sequences=num_sequences,
            num_heads=shape.num_heads,
            head_dim=shape.head_dim,
            max_length=max_length,
        )
        workspace, out = self.workspace(num_bytes, q.device), torch.empty_like(q)
        attention = DecodeAttention(
            q=q,
            page_tables=page_tables,
            seq_lens=seq_lens,
            num_sequences=num_sequences,
            num_heads=shape.num_heads,
            max_pages=max_pages,
            max_length=max_length,
            rule=shape.scores.native,
            select=shape.select.native,
            sinks=sinks,
            chosen=position_lists(chosen),
        )
        self.device.decode_attention(
            attention, _pages(kv), workspace=workspace, out=out, stream=self.stream()
        )
        return out


def _pages(kv: KvLayer) -> KvPages:
    _, page_size, num_kv_heads, head_dim = kv.keys.shape
    return KvPages(
        keys=kv.keys, values=kv.values, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
