"""Rotary position embedding: cos and sin per token, with context-extension scalings.

Sources
- RoPE: Su et al., "RoFormer", arXiv 2104.09864, section 3.2.2: theta_i = base^(-2i/d).
- Linear: Chen et al., "Position Interpolation", arXiv 2306.15595, section 3.2: positions divided by the factor.
- Dynamic NTK: Peng et al., "YaRN", arXiv 2309.00071, section 3.1 (the "NTK-aware" change of base) made dynamic by its
  section 3.3; in the exact form of transformers' `_compute_dynamic_ntk_parameters`:
  base' = base * (factor * n / L - (factor - 1))^(d / (d - 2)) for a sequence of n > L = max_position_embeddings tokens.
- Llama 3: as Llama 3.1 was published, in the form of transformers' `_compute_llama3_parameters`: frequencies that turn
  rarely within the original context are divided by the factor, those that turn often are not, between them a blend.
- Factors by dimension, as GGUF files have them (Llama 3's scaling, computed at conversion): each frequency is
  divided by its factor.
- Proportional: in the form of transformers' `_compute_proportional_rope_parameters`: frequencies of all d, of which the
  lowest are zero, so that a pair is (i, i + d/2) also where only a share of them turns.
- YaRN: same paper, section 3.2 ("NTK-by-parts") and section 3.4 (attention factor 0.1 ln(factor) + 1; applied to cos
  and sin, so that q and k both carry it). mscale is DeepSeek-V2's refinement, in the form of transformers'
  `_compute_yarn_parameters`.

Arithmetic is float32 in the order of the reference implementation, because position * frequency magnifies a last-bit
difference by the position. Layout is "rotate half": pairs are (i, i + d/2), so a row has d/2 values. `dim` is d, the
elements of a head that are rotated: all of them or fewer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

_FIRST_ROWS: Final = 1024

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "proportional"]
Arrangement = Literal["consecutive", "interleaved", "rows and columns in turn"]
"""Which pairs turn by which axis, see `axes_of_pairs`."""
ROPE_KINDS: Final[tuple[RopeKind, ...]] = ("default", "linear", "dynamic", "yarn", "llama3")
"""Rotation kinds that every family may have."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding settings and scaling; formulas in the module's docstring."""

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """Context length before YaRN's or Llama 3's scaling; 0 for the other kinds."""
    attention_factor: float | None = None
    """YaRN: given explicitly; None derives it from factor and mscale."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """Llama 3: turns within the original context up to which, and from which, a frequency counts as low or high."""
    share: float = 1.0
    """Proportional: share of the pairs that are rotated."""
    frequency_factors: tuple[float, ...] = ()
    """Divisors [dim/2] of the frequencies of kind "default", if any (GGUF's rope_freqs)."""
    sections: tuple[int, ...] = ()
    """Pairs that turn by each axis of a picture's positions (time, row, column); empty: there is one axis."""
    arrangement: Arrangement = "consecutive"
    """Which pairs an axis has, see `axes_of_pairs`."""
    block: int = 1
    """Positions that turn as the first of them; blocks begin at multiples of their number."""
    learned: tuple[float, ...] = ()
    """Logarithms [dim/2] of learned factors of the frequencies (Mistral Large 4); empty: there are none."""


def axes_of_pairs(rope: RopeConfig, dim: int) -> I32:
    """The axis [dim/2] whose position each pair turns by.

    Sections in transformers' forms. Consecutive (`apply_multimodal_rotary_pos_emb`). Interleaved
    (`apply_interleaved_mrope`): axis a > 0 has the pairs a, a + 3, … below 3 · sections[a], and time the others. Rows
    and columns in turn (ERNIE's `recomposition_frequencies`): row and column alternate, sections[0] pairs each, and
    time has the pairs after them.
    """
    pairs = dim // 2
    axes = np.zeros(pairs, np.int32)
    if rope.arrangement == "rows and columns in turn":
        turning = min(2 * rope.sections[0], pairs)
        axes[:turning] = 1 + np.arange(turning) % 2
    elif rope.arrangement == "interleaved":
        for axis, count in enumerate(rope.sections[1:], start=1):
            axes[axis : len(rope.sections) * count : len(rope.sections)] = axis
    elif rope.sections:
        consecutive = np.repeat(np.arange(len(rope.sections), dtype=np.int32), rope.sections)[:pairs]
        axes[: len(consecutive)] = consecutive
    return axes


def inverse_frequencies(rope: RopeConfig, dim: int) -> F32:
    """Frequencies [dim/2] in radians per position, for every kind; dynamic: those within the original context."""
    scaled = _scaled_frequencies(rope, dim)
    return scaled * np.exp(np.array(rope.learned, np.float32)) if rope.learned else scaled


def _scaled_frequencies(rope: RopeConfig, dim: int) -> F32:
    """`inverse_frequencies` without learned factors."""
    one, factor = np.float32(1.0), np.float32(rope.factor)
    wavelengths = np.float32(rope.theta) ** _exponents(dim)
    if rope.kind == "linear":
        return (one / wavelengths / factor).astype(np.float32)
    if rope.kind == "proportional":
        turning = np.arange(len(wavelengths)) < int(rope.share * dim // 2)
        return np.where(turning, one / wavelengths, 0).astype(np.float32) / factor
    if rope.kind == "yarn":
        # Low dimensions turn often within the original context and extrapolate; high ones turn rarely and interpolate.
        extrapolated = one - _yarn_ramp(rope, dim)
        blend = one / (factor * wavelengths) * (one - extrapolated) + one / wavelengths * extrapolated
        return blend.astype(np.float32)
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, one / wavelengths)
    if rope.frequency_factors:
        wavelengths = wavelengths * np.array(rope.frequency_factors, np.float32)
    return (one / wavelengths).astype(np.float32)


def dynamic_inverse_frequencies(rope: RopeConfig, dim: int, lengths: I32, max_positions: int) -> F32:
    """Dynamic NTK frequencies [len(lengths), dim/2] of sequences with `lengths` tokens."""
    grown = np.maximum(lengths, max_positions).astype(np.float32)
    ratio = np.float32(rope.factor) * grown / np.float32(max_positions) - np.float32(rope.factor - 1.0)
    bases = np.float32(rope.theta) * ratio ** np.float32(dim / (dim - 2))
    frequencies = (np.float32(1.0) / bases[:, None] ** _exponents(dim)[None, :]).astype(np.float32)
    return frequencies * np.exp(np.array(rope.learned, np.float32)) if rope.learned else frequencies


def attention_factor(rope: RopeConfig) -> float:
    """Factor of cos and sin: 1 except for YaRN."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def preserving_length(rope: RopeConfig) -> tuple[RopeConfig, float]:
    """The rotation without its factor of cos and sin, and that factor: a norm after the rotation removes it."""
    if rope.kind != "yarn":
        return rope, 1.0
    return replace(rope, attention_factor=1.0), attention_factor(rope)


class RopeTable:
    """cos and sin rows for tokens, from a table that grows with the longest position seen.

    Dynamic NTK has no table: there a token's frequencies follow from the length its sequence has when the token is
    processed. That is max(prompt length, position + 1): a prompt is one step however it is cut into chunks, and every
    later token is a step of its own. So chunked prefill equals prefill at once, and both equal transformers' generate.
    """

    def __init__(self, rope: RopeConfig, dim: int, max_position_embeddings: int) -> None:
        self._rope = rope
        self._dim = dim
        self._max_positions = max_position_embeddings
        self._frequencies = inverse_frequencies(rope, dim)
        self._scale = np.float32(attention_factor(rope))
        self._axes = axes_of_pairs(rope, dim)
        empty = np.empty((0, dim // 2), np.float32)
        self._cos, self._sin = empty, empty

    def rows(self, positions: I32, prompt_lengths: I32) -> tuple[F32, F32]:
        """cos and sin, each [T, dim/2], for tokens at `positions` [T] whose prompts have `prompt_lengths` [T]."""
        positions = self.turned(positions)
        if self._rope.kind == "dynamic":
            lengths = np.maximum(prompt_lengths, positions + 1)
            distinct, which = np.unique(np.maximum(lengths, self._max_positions), return_inverse=True)
            table = dynamic_inverse_frequencies(
                self._rope, self._dim, distinct.astype(np.int32), self._max_positions
            )
            return self._rotate(positions, table[which])
        cos, sin = self.tables(int(positions.max(initial=-1)) + 1)
        return cos[positions], sin[positions]

    def rows_by_axis(self, rotations: I32) -> tuple[F32, F32]:
        """cos and sin, each [T, dim/2], for tokens at positions [axes, T]; requires `has_tables`."""
        cos, sin = self.tables(int(rotations.max(initial=-1)) + 1)
        positions, pairs = np.ascontiguousarray(rotations[self._axes].T), np.arange(len(self._axes))
        return cos[positions, pairs], sin[positions, pairs]

    @property
    def block(self) -> int:
        """See `RopeConfig.block`."""
        return self._rope.block

    def turned(self, positions: I32) -> I32:
        """The positions by which tokens at `positions` turn."""
        return positions if self.block == 1 else positions // self.block * self.block

    @property
    def has_tables(self) -> bool:
        """Whether the rotation depends on the position alone."""
        return self._rope.kind != "dynamic"

    def tables(self, num_positions: int) -> tuple[F32, F32]:
        """cos and sin, each [at least `num_positions`, dim/2]; requires `has_tables`."""
        if num_positions > len(self._cos):
            rows = max(_FIRST_ROWS, 2 ** math.ceil(math.log2(num_positions)))
            self._cos, self._sin = self._rotate(np.arange(rows, dtype=np.int32), self._frequencies[None, :])
        return self._cos, self._sin

    def _rotate(self, positions: I32, frequencies: F32) -> tuple[F32, F32]:
        angles = positions.astype(np.float32)[:, None] * frequencies
        return np.cos(angles) * self._scale, np.sin(angles) * self._scale


def rope_tables(rotations: Iterable[tuple[RopeConfig, int]], max_position_embeddings: int) -> list[RopeTable]:
    """RoPE tables, one for each (rope, dim)."""
    return [RopeTable(rope, dim, max_position_embeddings) for rope, dim in rotations]


def _llama3_frequencies(rope: RopeConfig, frequencies: F32) -> F32:
    one, factor = np.float32(1.0), np.float32(rope.factor)
    original, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = np.float32(2 * math.pi) / frequencies
    scaled = np.where(wavelengths > original / low, frequencies / factor, frequencies)
    with np.errstate(divide="ignore", invalid="ignore"):  # nothing is between two factors that are equal
        smooth = (np.float32(original) / wavelengths - np.float32(low)) / np.float32(high - low)
        blended = (one - smooth) * scaled / factor + smooth * scaled
    between = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return np.where(between, blended, scaled).astype(np.float32)


def _exponents(dim: int) -> F32:
    """Exponents 2i/d for i < d/2."""
    return (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)).astype(np.float32)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_ramp(rope: RopeConfig, dim: int) -> F32:
    """YaRN ramp [dim/2] from 0 (extrapolate) to 1 (interpolate): one minus the paper's gamma, by dimension."""

    def dimension(rotations: float) -> float:
        """The dimension that turns `rotations` times within the original context."""
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return (dim * math.log(turns)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    clipped: F32 = np.clip(ramp, 0.0, 1.0).astype(np.float32)
    return clipped
