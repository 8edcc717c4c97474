"""The bundled model's MTP layer at training time, in plain torch.

The layer is as DeepSeek-V3's report describes multi-token prediction (arXiv 2412.19437, section 2.2): the trunk's
hidden state at a position and the embedding of the next token are normalised, joined and projected to one hidden
state; a decoder layer follows; the trunk's own head reads the result, as a guess at the token after the next. To guess
further, the layer reads its own output in place of the trunk's.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from tales_model import WORKING_TYPE, Layer, Model, Shape, rms_norm
from torch import Tensor, nn


class MtpLayer(nn.Module):
    """One layer that guesses the token after the next; weights are kept as in `Layer`."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        hidden = s.hidden_size
        self.embedding_norm, self.hidden_norm = (
            nn.Parameter(torch.ones(hidden)),
            nn.Parameter(torch.ones(hidden)),
        )
        self.projection = nn.Parameter(torch.randn(hidden, 2 * hidden) * 0.1 / math.sqrt(hidden))
        self.layer = Layer(s)
        self.final_norm = nn.Parameter(torch.ones(hidden))

    @torch.no_grad()
    def start_from(self, trunk: Model, states: Tensor, tokens: Tensor) -> None:
        """Begin as the trunk's last layer. The projection begins as the least-squares guess of what that layer reads.

        Args:
            states: [rows, n, hidden], the trunk's hidden states at positions 0 … n - 1, normalised as for its head.
            tokens: [rows, n + 1].
        """
        self.layer.load_state_dict(trunk.layers[-1].state_dict())
        self.final_norm.copy_(trunk.final_norm)
        known = (
            self.parts(F.embedding(tokens[:, 1:-1], trunk.embedding), states[:, :-1]).flatten(0, 1).double()
        )
        wanted = trunk.before_last_layer(tokens[:, :-1])[:, 1:].flatten(0, 1).double()
        gram = known.T @ known
        gram += 1e-3 * gram.diagonal().mean() * torch.eye(len(gram))
        self.projection.copy_(torch.linalg.solve(gram, known.T @ wanted).T)

    def parts(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        eps = self.shape.rms_norm_eps
        return torch.cat(
            (rms_norm(embedded, self.embedding_norm, eps), rms_norm(hidden, self.hidden_norm, eps)), -1
        )

    def forward(
        self, trunk: Model, hidden: Tensor, tokens: Tensor, depth: int
    ) -> tuple[list[Tensor], Tensor]:
        """Hidden states for the head, one per depth, and the balance loss.

        Args:
            trunk: for its embedding and rotation angles.
            hidden: [rows, n, hidden], the trunk's at positions 0 … n - 1, normalised as for its head.
            tokens: [rows, n], those at positions 1 … n.
            depth: number of chained guesses. Of each the state at index i guesses the token at i + 2; the first
                depth - 1 indices of a depth have no meaning, because the chain begins there.
        """
        length = tokens.shape[1]
        cos, sin = trunk.cos[:length], trunk.sin[:length]
        embedded = F.embedding(tokens, trunk.embedding)
        keys, values, found = [], [], []
        balance = torch.zeros((), device=hidden.device)
        for _ in range(depth):
            x = F.linear(self.parts(embedded, hidden), self.projection.to(WORKING_TYPE))
            query, key, value = self.layer.queries_keys_values(x, cos, sin)
            keys.append(key)
            values.append(value)
            x = x + self.layer.output(chained_attention(query, keys, values))
            mixed, own, _ = self.layer.mixture(x)
            balance = balance + own
            hidden = rms_norm(x + mixed, self.final_norm, self.shape.rms_norm_eps)
            found.append(hidden)
            hidden = later(hidden, 1, 1)
        return found, balance / depth


def later(x: Tensor, by: int, axis: int) -> Tensor:
    """x moved to later positions along an axis, with zeros before it."""
    kept = x.narrow(axis, 0, x.shape[axis] - by)
    return torch.cat((torch.zeros_like(x.narrow(axis, 0, by)), kept), axis)


def chained_attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of the last depth's queries as drafting meets them.

    The newest positions' keys are those of their own depth. All positions before them have the first depth's, because
    they were accepted and computed again from the trunk's hidden states.
    """
    depth, length = len(keys), query.shape[2]
    scale = query.shape[-1] ** -0.5
    at = torch.arange(length, device=query.device)
    scores = (query @ keys[0].transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(at > at[:, None] - (depth - 1), -math.inf)
    newest = [later(key, depth - 1 - own, 2) for own, key in enumerate(keys)][1:]
    extra = [(query * key).sum(-1, keepdim=True).float() * scale for key in newest]
    chances = torch.cat((scores, *extra), -1).softmax(-1).to(WORKING_TYPE)
    mixed = chances[..., :length] @ values[0]
    for own, value in enumerate(values[1:], 1):
        chance = chances[..., length + own - 1 : length + own]
        mixed = mixed + chance * later(value, depth - 1 - own, 2)
    return mixed
