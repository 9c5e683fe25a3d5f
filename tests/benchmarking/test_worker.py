"""A benchmark's calls in another process: what fails, dies or hangs there is told, and loses no
other call."""

import os
import time

import pytest

from benchmarks.worker import Worker, WorkerError


def test_calls_share_a_process_until_one_is_lost():
    """Errors arrive in one line. After a process that died or hung the next call has another."""
    with Worker() as worker:
        first = worker.call(os.getpid)
        with pytest.raises(WorkerError, match="^ZeroDivisionError: "):
            worker.call(divmod, 1, 0)
        assert worker.call(os.getpid) == first != os.getpid()
        with pytest.raises(WorkerError, match="ended with exit code 3"):
            worker.call(os._exit, 3)
        second = worker.call(os.getpid)
        with pytest.raises(WorkerError, match="no result after 0.1 s"):
            worker.call(time.sleep, 3600, seconds=0.1)
        assert len({first, second, worker.call(os.getpid)}) == 3
        with pytest.raises(ProcessLookupError):
            os.kill(second, 0)
