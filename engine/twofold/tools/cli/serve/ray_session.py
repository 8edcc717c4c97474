"""Ray below a fleet: started or joined, and left again."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Final

from twofold.tools.cli.serve.orphans import descendants, ending_with_this_process

_POLL_S: Final = 0.1


@contextlib.contextmanager
def ray_session(address: str | None) -> Iterator[None]:
    """Ray Serve during the block: of a Ray that is started here, or of the cluster at `address`."""
    if not sys.stdout.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # Ray colours its own lines in files too
    import ray
    from ray import serve

    with contextlib.ExitStack() as session:
        ray.init(address=address or "local", include_dashboard=False, log_to_driver=False)
        if address is None:
            session.enter_context(ending_with_this_process(descendants(os.getpid())))
        session.callback(ray.shutdown)
        serve.start(proxy_location="Disabled")
        yield


def end_application(name: str) -> None:
    """Delete the application and wait until its replicas have drained and ended.

    Ray ends them itself after their `graceful_shutdown_timeout_s`. Ray Serve's controller is not shut down by
    `serve.shutdown`: Ray reports the killed controller as a failed task with infinite retries. `ray.shutdown` ends it
    where this command started Ray. In a cluster it goes on, for other applications.
    """
    from ray import serve

    serve.delete(name, _blocking=False)
    while name in serve.status().applications:
        time.sleep(_POLL_S)
