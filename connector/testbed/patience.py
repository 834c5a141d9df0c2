"""What a worker of an engine of several ranks loads, so that all of them can wait on few cores.

vLLM's workers wait for a second by `sched_yield` in a loop. On two cores three such loops keep Linux from running
anything else for seconds (seen on 6.18): the master's answer comes after its timeout.
"""

import sys
import time

from vllm.distributed.device_communicators import shm_broadcast

WAIT_S = 50e-6

sys.setswitchinterval(0.0002)  # as in the engine's own process: else a worker's loop starves its transfer threads
shm_broadcast.sched_yield = lambda: time.sleep(WAIT_S)


class Patience:
    """For `worker_extension_cls`: adds nothing to the worker, as loading this module does it all."""
