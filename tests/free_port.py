"""A port for a process that cannot choose one itself."""

import socket


def free_port() -> int:
    """A port of the loopback address on which nothing listens now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
