"""The process that runs untried kernels: `python -m swiftkv_jax.kernel_check.child`.

One JSON object on standard input names the implementation and the configurations. Standard output
has a JSON object a line: the device (or the error that there is none), then for each configuration
its number when it begins and its verdict when it ends. The process ends with its parent, when
standard input closes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from typing import Any, TextIO

from .comparison import verdict_on
from .configurations import KernelConfig
from .verdicts import DeviceVersion


def main(device: Any = None, **options: Any) -> int:
    """Run what standard input names, on the default device. `device` is what is said of it (None:
    the truth), `options` are those of `comparison.compare`."""
    lines = _own_output()
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import jax

    try:
        device = device or jax.devices()[0]
    except Exception as error:
        chosen = os.environ.get("JAX_PLATFORMS")
        found = (str(error).splitlines() or [type(error).__name__])[0]
        reason = (
            f"JAX_PLATFORMS={chosen!r} names no kind of device that is here" if chosen else found
        )
        _say(lines, {"error": reason})
        return 1
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))  # the device has room and computes
    _say(lines, {"device": dataclasses.asdict(DeviceVersion.of(device))})
    for number, fields in enumerate(request["configurations"]):
        _say(lines, {"begun": number})
        verdict = verdict_on(KernelConfig(**fields), request["implementation"], **options)
        _say(lines, {"ended": number, "verdict": dataclasses.asdict(verdict)})
    return 0


def _own_output() -> TextIO:
    """Standard output for this module alone; what libraries print goes to standard error."""
    own = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(own, "w", encoding="utf-8", buffering=1)


def _say(lines: TextIO, message: dict[str, Any]) -> None:
    lines.write(json.dumps(message) + "\n")
    lines.flush()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
