"""Runs configurations in child processes, which may compute nonsense, crash or hang; on TPUs in
this one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from ..process import interrupts
from ..process.files import is_running
from .comparison import verdict_on
from .configurations import KernelConfig
from .verdicts import DeviceVersion, Verdict, VerdictFile

CHILD = (sys.executable, "-m", "swiftkv_jax.kernel_check.child")
TIMEOUT = 120.0
"""Seconds for one configuration, compilation included, and for a child process to start."""
MEMORY_FRACTION = 0.04
"""Share of a GPU's memory that a child process may use at most: its parent may hold the rest."""
_GOES_ON = ("right", "wrong", "unsupported")
"""Outcomes after which the same process can run another configuration."""

type Verdicts = dict[KernelConfig, Verdict]


def describe_device(command: Sequence[str] = CHILD) -> DeviceVersion:
    """The default device as a child process finds it: this process touches none.

    Raises `RuntimeError` if the child process does not start.
    """
    with _Child(command, {"implementation": "", "configurations": []}) as child:
        found = child.start()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def check_in_children(
    configs: Sequence[KernelConfig],
    implementation: str,
    device: DeviceVersion,
    *,
    command: Sequence[str] = CHILD,
    timeout: float = TIMEOUT,
) -> Iterator[tuple[KernelConfig, Verdict]]:
    """Each configuration with its verdict, as soon as there is one. After a crash or a hang, a new
    child process takes the next ones."""
    remaining = list(configs)
    while remaining:
        for config, verdict in _one_child(remaining, implementation, device, command, timeout):
            remaining.remove(config)
            yield config, verdict


def _one_child(
    configs: list[KernelConfig], implementation: str, device: DeviceVersion, command, timeout
) -> Iterator[tuple[KernelConfig, Verdict]]:
    """The verdicts of one child process; those of all configurations if it does not start."""
    configs = list(configs)
    fields = [dataclasses.asdict(config) for config in configs]
    with _Child(command, {"implementation": implementation, "configurations": fields}) as child:
        found = child.start()
        if found != device:
            reason = found if isinstance(found, str) else f"a child process finds {found}"
            for config in configs:
                yield config, Verdict("unchecked", reason)
            return
        for config in configs:
            verdict = child.verdict(timeout)
            yield config, verdict
            if verdict.outcome not in _GOES_ON:
                return


class _Child:
    """A child process and the lines that it writes. It is killed on exit."""

    def __init__(self, command: Sequence[str], request: dict[str, Any]):
        self._command, self._request = command, request
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def __enter__(self) -> Self:
        self._errors = tempfile.TemporaryFile()
        # A session of its own: Ctrl-C ends the parent, and that ends the child.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment(),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(self._request).encode() + b"\n")
            self._process.stdin.flush()
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        # What hangs in the driver may not end at once; nothing depends on it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._errors.close()

    def start(self) -> DeviceVersion | str:
        """The device that the child process finds, or why it does not run."""
        try:
            message = self._messages.get(timeout=TIMEOUT)
        except queue.Empty:
            return f"a child process does not start within {TIMEOUT:g} s"
        if message is None:
            return f"a child process ends before it has found the device, {self._end()}"
        if "error" in message:
            return message["error"]
        return DeviceVersion(**message["device"])

    def verdict(self, timeout: float) -> Verdict:
        """The verdict on the next configuration."""
        start = time.monotonic()
        try:
            while (message := self._messages.get(timeout=timeout)) is not None:
                if "verdict" in message:
                    return Verdict(**message["verdict"])
        except queue.Empty:
            return Verdict("hung", f"no result after {timeout:g} s", time.monotonic() - start)
        return Verdict("crashed", self._end(), time.monotonic() - start)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines, contextlib.suppress(ValueError):
            for line in lines:
                self._messages.put(json.loads(line))
        self._messages.put(None)

    def _end(self) -> str:
        """How the process has ended, and the last line that it wrote."""
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return "its output has ended"
        if code < 0:
            try:
                how = f"with {signal.Signals(-code).name}"
            except ValueError:
                how = f"with signal {-code}"
        else:
            how = f"with exit code {code}"
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4096))
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return f"{how}: {lines[-1].strip()[:200]}" if lines else how


def _environment() -> dict[str, str]:
    """This process's, with the same package first, one GPU, and little of its memory."""
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
    implementation: str,
    device: Any,
    file: VerdictFile,
    *,
    timeout: float = TIMEOUT,
    **options: Any,
) -> Iterator[tuple[KernelConfig, Verdict]]:
    """Each configuration with its verdict, run by this process on `device`, a `jax.Device`.
    `options` are those of `comparison.compare`.

    `file` holds each configuration as begun while it runs: should it end this process, the next one
    reads that. Raises `TimeoutError` if there is no result after `timeout` seconds: what this
    process would compute next would wait for ever. The next process reads that, too.
    """
    import jax

    for config in configs:
        file.add({config: Verdict("begun", process=(socket.gethostname(), os.getpid()))})
        result: list[Verdict] = []

        def run(config: KernelConfig = config, result: list[Verdict] = result) -> None:
            with jax.default_device(device):
                result.append(verdict_on(config, implementation, **options))

        thread = threading.Thread(target=run, name="check_in_process", daemon=True)
        thread.start()
        try:
            interrupts.join(thread, timeout)
        except BaseException:  # an interrupt says nothing about the kernel
            file.add({config: Verdict("unchecked")})
            raise
        if not result:
            file.add({config: Verdict("hung", f"no result after {timeout:g} s", timeout)})
            raise TimeoutError(
                f"the {implementation} kernel hangs ({config}), and the device with it; start "
                f"again: attention will run through XLA"
            )
        yield config, result[0]


def after_the_end(verdict: Verdict | None) -> Verdict | None:
    """A verdict that was kept as begun, now: a crash if its process has ended, on this host. None
    if there is none yet."""
    if verdict is None or verdict.process is None:
        return verdict
    host, process = verdict.process
    if host != socket.gethostname() or (process != os.getpid() and is_running(process)):
        return None
    return Verdict("crashed", "an earlier process has ended while it ran")
