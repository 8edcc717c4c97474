"""Rows of torch that do not depend on the rows beside them.

torch adds a product of eight rows in another order than that of one row, and computes the last elements of a tensor by
other instructions than the first, on every CPU otherwise. A result then differs in its last bit, and a token drawn
beside the edge of its interval is another token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from twofold.device.queue import LaunchWorker

_ROUNDED: Final = frozenset((
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "mv", "einsum", "convolution", "sum", "mean", "cumsum",
    "logsumexp", "_softmax", "_log_softmax", "_scaled_dot_product_flash_attention_for_cpu", "exp", "sigmoid", "silu",
    "softplus", "tanh", "gelu", "rsqrt",
))  # fmt: skip
"""Operations whose rounding depends on the place of a row."""


@contextmanager
def independent_rows() -> Iterator[None]:
    """Within it torch computes sums and functions in float64, and rounds each result once to its operands' type.

    So it does in this thread and in those of devices.
    """
    start = LaunchWorker.start

    def start_exact(worker: LaunchWorker, launch: Callable[[], None]) -> None:
        def exact() -> None:
            with _IndependentRows():
                launch()

        start(worker, exact)

    with patch.object(LaunchWorker, "start", start_exact), _IndependentRows():
        yield


class _IndependentRows(TorchDispatchMode):
    def __torch_dispatch__(
        self, called: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kinds: set[torch.dtype] = set()

        def widened(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            kinds.add(value.dtype)
            return value.double()

        if called.overloadpacket.__name__ not in _ROUNDED or "dtype" in kwargs:
            return called(*args, **kwargs)
        out = called(*tree_map(widened, args), **tree_map(widened, kwargs))
        if not kinds:
            return out
        (kind,) = kinds
        return tree_map(lambda value: value.to(kind) if isinstance(value, Tensor) else value, out)
