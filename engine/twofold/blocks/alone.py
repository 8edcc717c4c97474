"""A layer's blocks where it is run without earlier ones."""

from __future__ import annotations

from dataclasses import replace

from twofold.blocks.attention.selection import Chosen, Window
from twofold.blocks.block import Block
from twofold.blocks.gqa import Gqa
from twofold.blocks.mla import Mla


def alone(block: Block) -> Block:
    """The block; one that reads positions which an earlier layer chose has a window of as many instead."""
    if not isinstance(block, Gqa | Mla) or not isinstance(block.select, Chosen):
        return block
    select = block.select
    return block if select.chooser is not None else replace(block, select=Window(select.most))
