"""Verdicts on the kernels on a kind of device, and the file that they are kept in."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import socket
from pathlib import Path
from typing import Any, Literal, Self, get_args

from ..errors import UsageError
from ..pallas_kernels.device import Device, cudnn_version
from ..process.files import private_directory, write_json
from .configurations import KernelConfig

logger = logging.getLogger(__name__)

DEFAULT_FOLDER = "~/.cache/swiftkv-jax/kernel-checks"
Outcome = Literal[
    "right", "wrong", "crashed", "hung", "failed", "unsupported", "unchecked", "begun"
]
HEADER = "{:88}{:>7}  {}"
"""A row of the table: kernel, seconds, verdict."""


@dataclasses.dataclass(frozen=True)
class DeviceVersion:
    """All that a verdict depends on besides the configuration."""

    platform: str
    device_kind: str
    platform_version: str
    """Versions of CUDA, or of libtpu, as the client reports them."""
    driver: str
    """NVIDIA's kernel driver; "" elsewhere."""
    cudnn: int | None
    """Version of cuDNN that JAX finds on a GPU; None elsewhere."""
    jax: str
    jaxlib: str
    kernels: str
    """Digest of the sources of `pallas_kernels`, tuning table included, and of this package."""

    @property
    def kind(self) -> Device:
        return Device(self.platform, self.device_kind)

    @classmethod
    def of(cls, device: Any) -> Self:
        """Return the `DeviceVersion` of a `jax.Device`."""
        import jax

        driver = ""
        cudnn = None
        if device.platform in ("gpu", "cuda"):
            driver = _nvidia_driver()
            cudnn = cudnn_version()
        return cls(
            platform=device.platform,
            device_kind=device.device_kind,
            platform_version=" ".join(device.client.platform_version.split()),
            driver=driver,
            cudnn=cudnn,
            jax=jax.__version__,
            jaxlib=importlib.metadata.version("jaxlib"),
            kernels=kernels_digest(),
        )


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a configuration did on a device."""

    outcome: Outcome
    detail: str = ""
    """For people: by how much it is wrong, the signal, the reason."""
    seconds: float = 0.0
    difference: float | None = None
    """Largest difference from the reference; None if it did not get that far, or is not finite."""
    process: tuple[str, int] | None = None
    """Host and number of the process that has begun."""

    @property
    def usable(self) -> bool:
        """True if the kernel may run; where it is unsupported, it does not."""
        return self.outcome in ("right", "unsupported")

    @classmethod
    def begun(cls) -> Self:
        """Return the verdict on a configuration that this process is running."""
        return cls("begun", process=(socket.gethostname(), os.getpid()))

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Raises `ValueError` or `TypeError` for what is none."""
        if fields["outcome"] not in get_args(Outcome):
            raise ValueError(f"outcome {fields['outcome']!r}")
        process: Any = fields["process"]
        if process is not None:
            process = tuple(process)
        return cls(**{**fields, "process": process})

    @property
    def text(self) -> str:
        """For the table."""
        if self.outcome == "unsupported":
            return f"not for this device: {self.detail}"
        if self.outcome == "right":
            return f"right, within {self.difference:.2g}"
        return str(self)

    def __str__(self) -> str:
        return f"{self.outcome}, {self.detail}" if self.detail else self.outcome


type Verdicts = dict[KernelConfig, Verdict]


@dataclasses.dataclass(frozen=True)
class VerdictFile:
    """The verdicts on the kernels of one `DeviceVersion` on disk. Another version has another
    file."""

    path: Path | None
    """None keeps nothing."""
    device: DeviceVersion
    implementation: str

    @classmethod
    def in_folder(cls, folder: str | Path, device: DeviceVersion, implementation: str) -> Self:
        """The file in `folder`. Where that cannot be used, verdicts are kept nowhere, and the log
        says so."""
        fields = dataclasses.asdict(device) | {"implementation": implementation}
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
        try:
            path = private_directory("kernel_checks", folder) / f"{implementation}-{digest}.json"
        except (OSError, UsageError) as error:
            logger.info("verdicts on kernels are not kept: %s", error)
            path = None
        return cls(path, device, implementation)

    @property
    def _header(self) -> dict[str, Any]:
        return dataclasses.asdict(self.device) | {"implementation": self.implementation}

    def read(self) -> Verdicts:
        """Return the verdicts that are kept; none if the file is absent or damaged."""
        try:
            document = json.loads(self.path.read_text("utf-8")) if self.path else {"verdicts": []}
            return {
                KernelConfig(**entry["configuration"]): Verdict.from_json(entry["verdict"])
                for entry in document["verdicts"]
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.info("%s: not used, kernels are checked again: %s", self.path, error)
            return {}

    def add(self, new: Verdicts) -> None:
        """Keep these too, in the place of older ones; those that say nothing about the kernel
        remove what was kept."""
        if self.path is None:
            return
        verdicts = {**self.read(), **new}
        kept = {config: one for config, one in verdicts.items() if one.outcome != "unchecked"}
        try:
            write_json(self.path, {"device": self._header, "verdicts": as_entries(kept)})
        except OSError as error:
            logger.info("verdicts on kernels are not kept: %s", error)


def as_entries(verdicts: Verdicts) -> list[dict[str, Any]]:
    """Verdicts as JSON has them."""
    return [
        {"configuration": dataclasses.asdict(config), "verdict": dataclasses.asdict(verdict)}
        for config, verdict in verdicts.items()
    ]


def table_row(kernels: str, config: KernelConfig, verdict: Verdict) -> str:
    """The row of `swiftkv check-kernels` for a configuration."""
    return HEADER.format(f"{kernels}.{config}", f"{verdict.seconds:.1f}", verdict.text)


@functools.cache
def kernels_digest() -> str:
    """The digest of all sources and tables of `pallas_kernels`, and of this package."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    kernels = here.parent / "pallas_kernels"
    files = [*kernels.rglob("*.py"), *kernels.rglob("*.json"), *here.glob("*.py")]
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(here.parent).as_posix()} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _nvidia_driver() -> str:
    """The version in the first line of the driver's own file; "" where there is none."""
    try:
        lines = Path("/proc/driver/nvidia/version").read_text("utf-8").splitlines()
    except OSError:
        return ""
    return " ".join(lines[0].split()) if lines else ""
