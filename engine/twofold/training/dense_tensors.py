"""The tensors of a model's dense part by transformers' names.

Three things name a tensor: the checkpoint, our family table (`ModelConfig.renamed` gives its names for a checkpoint's)
and transformers (a list of conversions gives its names for a checkpoint's). Applied to each other's names, both find
every tensor that is only named differently. Values are read by our readers, so they may be quantised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from twofold.api.errors import ModelLoadError
from twofold.blocks import ops
from twofold.blocks.block import ExpertBlock
from twofold.models import ModelFiles
from twofold.weights.checkpoint import renamed_tensor

_MIXTRAL: Final = (".mlp.", ".block_sparse_moe.")
"""Part of a name in transformers' modules, and in the published checkpoints that differ."""


class DenseTensors:
    """Finds and reads the tensors of one model's dense part."""

    def __init__(self, model: Any, files: ModelFiles, pool: ops.ThreadPool) -> None:
        """model: transformers' model."""
        self._files, self._pool = files, pool
        blocks = (weights for block, weights in files.parts() if not isinstance(block, ExpertBlock))
        of_blocks = {spec.name: spec.shape for weights in blocks for spec in weights.specs.values()}
        # In the files, but read by no block of ours: those that choose positions of long contexts, say.
        routed = set(chain.from_iterable(files.expert_names()))
        others = {name: files.tensors.entry(name).shape for name in files.tensors if name not in routed}
        self._shapes = others | of_blocks
        rename = _renaming(model)
        self._ours = {rename(name): name for name in self._shapes}

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """The tensor that transformers calls `name`, float32; None if the files lack it.

        Raises ModelLoadError for a format that cannot be read, or a size that transformers does not expect.
        """
        found = next((each for each in self._names(name) if each in self._shapes), None)
        if found is None:
            return None
        stored, source = self._shapes[found], self._files.tensors
        if math.prod(stored) != math.prod(shape):
            raise ModelLoadError(
                f"{source.where}: {found} has shape {list(stored)}, and transformers' {name} has {list(shape)}; the "
                "configuration belongs to another model"
            )
        if len(stored) == 2:
            values = ops.dequantise(self._pool, source.matrix(found, (stored[0], stored[1])))
        else:
            values = np.array(source.vector(found, stored))
        # In torch's memory, aligned to cache lines: see `experts._tensor`.
        return torch.from_numpy(values).clone().reshape(shape)

    def _names(self, name: str) -> Iterator[str]:
        """Names among ours of the tensor that transformers calls `name`."""
        yield name
        if name in self._ours:
            yield self._ours[name]
        for each in (name, name.replace(*_MIXTRAL)):
            yield each
            yield renamed_tensor(each, self._files.config.renamed)


def _renaming(model: Any) -> Callable[[str], str]:
    """transformers' name of a checkpoint's tensor, where the tensor itself stays as it is."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    conversions = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]

    def rename(name: str) -> str:
        for conversion in conversions:
            name = conversion.rename_source_key(name)[0]
        return name

    return rename
