"""`twofold` with gloo in NCCL's place: messages go through another memory, which is the host's here.

python -m tests.parallel.nccl_stand_in serve MODEL --distributed-backend nccl …
"""

from __future__ import annotations

import datetime
import sys
from unittest.mock import patch

import torch
from torch._C._distributed_c10d import Store
from twofold.parallel import groups
from twofold.parallel.groups import GroupBackend, MessageGroup, open_default_group
from twofold.parallel.place import Place
from twofold.tools.cli.main import main


def open_stand_in(place: Place, store: Store, address: str, timeout: datetime.timedelta) -> MessageGroup:
    return open_default_group("gloo", place, torch.device("cpu"), store, timeout)


if __name__ == "__main__":
    with patch.dict(groups.BACKENDS, nccl=GroupBackend(lambda: None, open_stand_in)):  # type: ignore[arg-type]
        sys.exit(main())
