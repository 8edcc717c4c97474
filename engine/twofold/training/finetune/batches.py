"""Micro-batches: examples of one forward, packed into one row or padded to a common length.

A packed row has positions that start again with each example; transformers then lets tokens attend within their own
example alone. Models with recurrent layers would carry state across, so their examples are padded.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from twofold.training.finetune.answers import Example

IGNORED: Final = -100
"""Label of tokens that the loss leaves out, as torch has it."""
_MOST_DIFFERENT: Final = 1e-3
"""Largest difference of packed logits from those alone, relative to the largest logit: above rounding in float32."""
_MOST_ROUNDINGS: Final = 8
"""The same in roundings of the logits' type, where that is more: bfloat16's are 0.008 each."""


def micro_batches(
    examples: Sequence[Example], batch_tokens: int, *, packs: bool, seed: int
) -> list[dict[str, Tensor]]:
    """All examples in micro-batches of at most `batch_tokens` tokens, padding included, or of one longer example.

    Examples are drawn in an order of `seed`. Padded ones are grouped by length, so that little is padded.
    """
    order = list(examples)
    random.Random(seed).shuffle(order)  # noqa: S311
    if packs:
        return [_packed(group) for group in _first_fit(order, batch_tokens)]
    order.sort(key=len)
    groups: list[list[Example]] = []
    for example in order:
        if groups and (len(groups[-1]) + 1) * len(example) <= batch_tokens:
            groups[-1].append(example)
        else:
            groups.append([example])
    return [_padded(group) for group in groups]


def _first_fit(examples: Sequence[Example], batch_tokens: int) -> list[list[Example]]:
    """Each example goes into the first of the open groups that has room. Only the emptiest few are kept open."""
    groups: list[list[Example]] = []
    room: dict[int, int] = {}
    for example in examples:
        place = next((group for group, free in room.items() if len(example) <= free), None)
        if place is None:
            place = len(groups)
            groups.append([])
            room[place] = max(batch_tokens, len(example))
            if len(room) > _MOST_OPEN:
                del room[min(room, key=lambda group: room[group])]
        groups[place].append(example)
        room[place] = room.get(place, len(example)) - len(example)
    return groups


_MOST_OPEN: Final = 256


def _labels(example: Example) -> list[int]:
    # Labels are shifted by one in the model: the first token of a row is predicted by none.
    pairs = zip(example.ids, example.is_answer, strict=True)
    labels = [token if counts else IGNORED for token, counts in pairs]
    return [IGNORED, *labels[1:]]


def _packed(group: Sequence[Example]) -> dict[str, Tensor]:
    return {
        "input_ids": torch.tensor([[token for each in group for token in each.ids]]),
        "position_ids": torch.tensor([[place for each in group for place in range(len(each))]]),
        "labels": torch.tensor([[label for each in group for label in _labels(each)]]),
    }


def _padded(group: Sequence[Example]) -> dict[str, Tensor]:
    length = max(map(len, group))
    pads = [length - len(each) for each in group]

    def rows(values: list[list[int]], filling: int) -> Tensor:
        return torch.tensor([row + [filling] * pad for row, pad in zip(values, pads, strict=True)])

    return {
        "input_ids": rows([list(each.ids) for each in group], 0),
        "attention_mask": rows([[1] * len(each) for each in group], 0),
        "labels": rows([_labels(each) for each in group], IGNORED),
    }


def packs_exactly(model: Any, vocab_size: int) -> bool:
    """Whether two sequences in one row have the logits that they have alone, tried on `model`."""
    ids = torch.arange(24, device=model.device) * 7 % vocab_size
    places = torch.cat([torch.arange(11), torch.arange(13)]).to(model.device)
    with torch.no_grad():
        packed = model(input_ids=ids[None], position_ids=places[None], use_cache=False).logits[0, 11:]
        alone = model(input_ids=ids[None, 11:], use_cache=False).logits[0]
    most = max(_MOST_DIFFERENT, _MOST_ROUNDINGS * torch.finfo(alone.dtype).eps)
    return bool((packed - alone).abs().max() <= most * alone.abs().max())
