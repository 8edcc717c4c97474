"""Ranks that meet over a store and gloo, each on a thread of this process."""

from __future__ import annotations

import threading

from twofold.api.errors import ConfigError
from twofold.parallel.identity import Identity
from twofold.parallel.joining import Meeting
from twofold.parallel.link import RankLink
from twofold.parallel.place import Place

IDENTITY = Identity(version="1", panels="2", level="avx2", model="m (1)", settings="--x 1")


def meet(
    *ranks: int,
    size: int = 2,
    timeout_s: float = 5.0,
    identities: dict[int, Identity] | None = None,
    sizes: dict[int, int] | None = None,
    port: int = 0,
    attempt: int = 0,
) -> list[RankLink | ConfigError]:
    """What comes of ranks that meet, each on a thread: in the order of `ranks`, the first of which listens.

    Args:
        sizes: number of ranks that single ranks expect, where it is not `size`.
        port: that of a store which is there.
        attempt: number of earlier meetings in it.
    """

    def meeting_of(rank: int, port: int) -> Meeting:
        expected = (sizes or {}).get(rank, size)
        place = Place(rank, expected, 0, 1, "127.0.0.1", port, has_store=port == 0, attempt=attempt)
        return Meeting(place, timeout_s)

    first = meeting_of(ranks[0], port)
    found: dict[int, RankLink | ConfigError] = {}

    def join(at: int, rank: int) -> None:
        try:
            meeting = first if at == 0 else meeting_of(rank, first.port)
            found[at] = meeting.join((identities or {}).get(rank, IDENTITY))
        except ConfigError as error:
            found[at] = error

    threads = [threading.Thread(target=join, args=each) for each in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[at] for at in range(len(ranks))]
