"""All engines of this process: closed when Python ends, or when the notebook cell that made one runs again.

Knows workers and notebook cells. Must not know what an engine does.
"""

from __future__ import annotations

import atexit
import weakref

from minivllm.engine.notebook_cells import MadeByCell
from minivllm.engine.worker import Worker

engines_of_cells = MadeByCell()
workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def stop_all() -> None:
    """Stop every engine and wait for its thread: leaving Python while one computes may crash the process."""
    running = list(workers)
    for worker in running:
        worker.stop()
    for worker in running:
        worker.thread.join()
