"""The process that runs untried kernels: `python -m swiftkv_jax.kernel_check.child`.

One JSON object on standard input names the file of verdicts, what it is for, and the
configurations; the verdicts go into the file, `begun` before a configuration runs. Without a file
the process writes what device it finds. Where a configuration takes too long, or the process that
started this one has ended, it ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .comparison import verdict_on
from .configurations import KernelConfig
from .verdicts import DeviceVersion, Verdict, VerdictFile, table_row

EXPLAINED = 64
HUNG = 65
"""Exit codes: the last line on standard error is the reason; there is no time left."""
START_SECONDS = 120.0
GOES_ON = ("right", "wrong")
"""Outcomes after which the process can run another configuration."""


def main(device: Any = None, **options: Any) -> int:
    """Run what standard input names, on the default device. `device` is reported in place of the
    real one, `options` are those of `comparison.compare`."""
    request = json.load(sys.stdin)
    parent = os.getppid()
    with _ended_after(START_SECONDS):
        try:
            version = _device_version(device)
        except Exception as error:
            chosen = os.environ.get("JAX_PLATFORMS")
            found = (str(error).splitlines() or [type(error).__name__])[0]
            if chosen:
                found = f"JAX_PLATFORMS={chosen!r} names no kind of device that is here"
            print(found, file=sys.stderr)
            return EXPLAINED
    if request is None:
        print(json.dumps(dataclasses.asdict(version)))
        return 0
    if dataclasses.asdict(version) != request["device"]:
        print(f"a child process finds {version}", file=sys.stderr)
        return EXPLAINED
    kernels = request["implementation"]
    file = VerdictFile(Path(request["file"]), version, kernels)
    for fields in request["configurations"]:
        config = KernelConfig(**fields)
        file.add({config: Verdict.begun()})
        with _ended_after(request["timeout"]):
            verdict = verdict_on(config, kernels, **options)
        if verdict.outcome == "unchecked":
            print(verdict.detail, file=sys.stderr)
            return EXPLAINED
        file.add({config: verdict})
        if request["every"]:
            print(table_row(kernels, config, verdict), flush=True)
        goes_on = verdict.usable or request["every"]
        if not goes_on or verdict.outcome not in GOES_ON or os.getppid() != parent:
            break
    return 0


def _device_version(device: Any) -> DeviceVersion:
    """The default device, after a look that it has room and computes."""
    import jax

    device = device or jax.devices()[0]
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))
    return DeviceVersion.of(device)


@contextlib.contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """End the process if what runs in here takes longer: it may hang in native code."""
    timer = threading.Timer(seconds, os._exit, [HUNG])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


if __name__ == "__main__":
    sys.exit(main())
