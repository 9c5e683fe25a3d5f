"""A `Worker` of the benchmarks whose calls run in the process of the tests."""

from typing import Any


class InProcess:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def call(self, function: Any, *args: Any, seconds: float | None = None) -> Any:
        return function(*args)

    def end(self):
        pass

    def works(self) -> bool:
        return True
