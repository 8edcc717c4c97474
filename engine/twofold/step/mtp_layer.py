"""A loaded MTP layer: hidden states from which the token after the next one is predicted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from twofold import _core
from twofold.blocks import ops

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


def states_of(decoder: ops.Decoder, head: ops.LmHead, hidden: F32) -> F32:
    """What an MTP layer reads of the newest forward pass of `decoder`, whose result is `hidden`: [T, hidden] after the
    head's norm, or all residual streams [T, streams * hidden]."""
    streams = decoder.streams
    if len(streams):
        return streams
    normed = np.empty_like(hidden)
    head.norm(hidden, normed)
    return normed


class MtpLayer:
    """One layer after a model's last. It shares the model's embedding, the matrix of its head, and its cache."""

    def __init__(self, decoder: ops.Decoder, head: ops.LmHead, embed: Callable[[I32], F32]) -> None:
        """head: the model's matrix after the layer's norm. embed: the model's."""
        self.head = head
        self._decoder, self._embed = decoder, embed

    def states(self, hidden: F32) -> F32:
        """`previous` of the positions after those of the newest `forward`, whose result is `hidden`."""
        return states_of(self._decoder, self.head, hidden)

    def forward(
        self,
        next_tokens: I32,
        previous: F32,
        batch: ops.AttentionBatch,
        kv_cache: ops.StateCache,
        experts: _core.MoeExecutor,
    ) -> F32:
        """Hidden states [T, hidden] for `head`. Writes keys and values to `kv_cache`.

        Args:
            next_tokens: [T] for each position, the token after it.
            previous: `states_of` the model at these positions, or, for a token after a predicted one, this layer's
                `states` at the position before.
        """
        hidden = self._embed(next_tokens)
        self._decoder.forward(hidden, batch, kv_cache, experts, previous)
        return hidden
