"""Runs configurations in child processes, which may compute nonsense, crash or hang; on TPUs in
this one."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..process import interrupts
from ..process.files import is_running
from .child import EXPLAINED, HUNG, START_SECONDS
from .comparison import verdict_on
from .configurations import KernelConfig
from .verdicts import DeviceVersion, Verdict, VerdictFile, Verdicts, table_row

CHILD = (sys.executable, "-m", "swiftkv_jax.kernel_check.child")
TIMEOUT = 120.0
"""Seconds for one configuration, compilation included."""
MEMORY_FRACTION = 0.04
"""Share of a GPU's memory that a child process may use at most: its parent may hold the rest."""


def describe_device(command: Sequence[str] = CHILD) -> DeviceVersion:
    """The default device as a child process finds it: this process touches none.

    Raises `RuntimeError` if the child process does not start.
    """
    ended = _run(command, None, START_SECONDS)
    if ended.returncode:
        raise RuntimeError(_why_not_started(ended))
    return DeviceVersion(**json.loads(ended.stdout.splitlines()[-1]))


def check_in_children(
    configs: Sequence[KernelConfig],
    file: VerdictFile,
    *,
    command: Sequence[str] = CHILD,
    timeout: float = TIMEOUT,
    every: bool = False,
) -> Verdicts:
    """The verdicts on these configurations, which child processes keep in `file`. After a crash or
    a hang, a new one takes those that are left.

    Ends with the first that cannot be used, unless `every` one is wanted: then each is printed, a
    row of a table, as soon as it is there.
    """
    configs = list(dict.fromkeys(configs))
    with tempfile.TemporaryDirectory() as folder:
        if file.path is None:
            file = dataclasses.replace(file, path=Path(folder) / "verdicts.json")
        file.add({config: Verdict("unchecked") for config in configs})  # forgets what was kept
        found: Verdicts = {}
        while len(found) < len(configs):
            left = configs[len(found) :]
            start = time.monotonic()
            request = {
                "file": str(file.path),
                "device": dataclasses.asdict(file.device),
                "implementation": file.implementation,
                "configurations": [dataclasses.asdict(config) for config in left],
                "timeout": timeout,
                "every": every,
            }
            ended = _run(command, request, START_SECONDS + len(left) * (timeout + 60), show=every)
            kept = file.read()
            before = len(found)
            found |= {config: kept[config] for config in left if config in kept}
            last = next(reversed(found), None)
            if last is not None and found[last].outcome == "begun":
                seconds = time.monotonic() - start
                verdict = Verdict("crashed", _how(ended), seconds)
                if ended.returncode == HUNG:
                    verdict = Verdict("hung", f"no result after {timeout:g} s", timeout)
                elif ended.returncode == EXPLAINED:
                    verdict = Verdict("unchecked", _last_line(ended), seconds)
                found[last] = verdict
                file.add({last: verdict})
                if every:
                    print(table_row(file.implementation, last, verdict), flush=True)
            elif len(found) == before:
                reason = Verdict("unchecked", _why_not_started(ended))
                return found | {config: reason for config in left}
            if not every and not all(verdict.usable for verdict in found.values()):
                break
        return found


def _run(
    command: Sequence[str], request: dict[str, Any] | None, timeout: float, *, show: bool = False
) -> subprocess.CompletedProcess[str]:
    """A child process with this request, after it has ended. `show`: its output is this process's,
    else it is kept."""
    try:
        return subprocess.run(
            command,
            input=json.dumps(request),
            stdout=None if show else subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env=_environment(),
            timeout=timeout,
            start_new_session=True,  # Ctrl-C ends the parent, and that ends the child
        )
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(command, HUNG, "", str(error))


def _how(ended: subprocess.CompletedProcess[str]) -> str:
    """How a process has ended, and the last line that it wrote."""
    code = ended.returncode
    last = _last_line(ended)
    how = f"with exit code {code}"
    if code < 0:
        try:
            how = f"with {signal.Signals(-code).name}"
        except ValueError:
            how = f"with signal {-code}"
    return f"{how}: {last}" if last else how


def _why_not_started(ended: subprocess.CompletedProcess[str]) -> str:
    if ended.returncode == EXPLAINED:
        return _last_line(ended)
    if ended.returncode == HUNG:
        return f"a child process does not start within {START_SECONDS:g} s"
    return f"a child process ends before it has found the device, {_how(ended)}"


def _last_line(ended: subprocess.CompletedProcess[str]) -> str:
    lines = ended.stderr.strip().splitlines()
    return lines[-1].strip()[:200] if lines else ""


def _environment() -> dict[str, str]:
    """Return the environment of this process, with the same package first, one GPU, and little of
    its memory."""
    environment = dict(os.environ)
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR"):
        environment.pop(name, None)
    above = [str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")]
    gpus = environment.get("CUDA_VISIBLE_DEVICES", "0")
    return environment | {
        "PYTHONPATH": os.pathsep.join(filter(None, above)),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_CLIENT_MEM_FRACTION": str(MEMORY_FRACTION),
        "CUDA_VISIBLE_DEVICES": gpus.split(",")[0],
    }


# In this process ----------------------------------------------------------------


def check_in_process(
    configs: Sequence[KernelConfig],
    device: Any,
    file: VerdictFile,
    *,
    timeout: float = TIMEOUT,
    **options: Any,
) -> Verdicts:
    """The verdicts on these configurations up to the first that cannot be used, run by this process
    on `device`, a `jax.Device`. `options` are those of `comparison.compare`.

    `file` holds each configuration as begun while it runs: should it end this process, the next one
    reads that. Raises `TimeoutError` if there is no result after `timeout` seconds: what this
    process would compute next would wait for ever. The next process reads that, too.
    """
    import jax

    found: Verdicts = {}

    def run(config: KernelConfig) -> None:
        with jax.default_device(device):
            found[config] = verdict_on(config, file.implementation, **options)

    for config in configs:
        file.add({config: Verdict.begun()})
        thread = threading.Thread(target=run, args=[config], daemon=True)
        thread.start()
        try:
            interrupts.join(thread, timeout)
        except BaseException:  # an interrupt says nothing about the kernel
            file.add({config: Verdict("unchecked")})
            raise
        if config not in found:
            file.add({config: Verdict("hung", f"no result after {timeout:g} s", timeout)})
            raise TimeoutError(
                f"the {file.implementation} kernel hangs ({config}), and the device with it; start "
                f"again: attention will run through XLA"
            )
        file.add({config: found[config]})
        if not found[config].usable:
            break
    return found


def after_the_end(verdict: Verdict) -> Verdict | None:
    """A verdict that was kept as begun, now: a crash if its process has ended, on this host. None
    if there is none yet."""
    if verdict.process is None:
        return verdict
    host, process = verdict.process
    if host != socket.gethostname() or (process != os.getpid() and is_running(process)):
        return None
    return Verdict("crashed", "an earlier process has ended while it ran")
