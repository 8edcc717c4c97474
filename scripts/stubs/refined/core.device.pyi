"""Types of `twofold._core.device` (engine/bindings/launches): kernel arguments for a layer on a device.

All are frozen, and keep nothing alive. The headers in kernels/device document the memory they point to.
"""

from typing import Final

from twofold import _core
from twofold._core import _I32, _Address

class ExpertLayout:
    """Layout of one expert's panels: gate, up, down, one after the other, then biases. Sizes in bytes."""

    def __init__(self):
        """limit: of the activation (kernels/include/twofold/expert.h); 0: none."""

class EncodedRows:
    """bf16 rows and the address of their encoded rows."""

class DecodeShape:
    """Bounds of a decode launch."""

class CombinedLayer:
    """Partial results of both sides and the hidden states they are added to."""

class PlacementTables:
    """Tables that the device reads to place a layer's experts."""

class PlacedLayer:
    """Results of a layer's placement, in device memory."""

class MailboxShape:
    """Capacity of a mailbox."""
