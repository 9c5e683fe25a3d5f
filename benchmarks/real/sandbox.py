"""Run Python that a model wrote, read from standard input: in its own network namespace, which has
no network, with limits on time and memory, without other processes and without changing files.
Print the mark, the first argument, at the end.

This file is started as a process of its own, `python -I -B sandbox.py MARK SECONDS`, and imports
nothing of the package.
"""

import os
import resource
import sys

MEMORY = 2**30
NO_NAMESPACE = 90
"""Exit code where the machine does not let a process leave its network."""

_REFUSED = ("subprocess.", "shutil.", "ctypes.", "signal.")
_REFUSED_OF_OS = (
    "chflags chmod chown exec fork forkpty kill killpg link mkdir posix_spawn putenv remove rename "
    "rmdir spawn startfile symlink system truncate unsetenv"
).split()
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def refuse(event: str, args: tuple) -> None:
    """An audit hook."""
    if event == "open":
        refused = isinstance(args[2], int) and bool(args[2] & _WRITING)
    else:
        refused = event.startswith(_REFUSED)
        refused |= event.startswith("os.") and event[3:] in _REFUSED_OF_OS
    if refused:
        raise PermissionError(event)


def main() -> None:
    mark, seconds = sys.argv[1], int(sys.argv[2])
    source = sys.stdin.read()
    try:
        os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)
    except OSError:
        sys.exit(NO_NAMESPACE)
    for limit, value in {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: MEMORY,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }.items():
        resource.setrlimit(limit, (value, value))
    sys.addaudithook(refuse)
    exec(compile(source, "program", "exec"), {"__name__": "__main__"})
    print(mark, flush=True)


if __name__ == "__main__":
    main()
