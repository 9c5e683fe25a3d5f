"""Verdicts on the kernels on a kind of device, and the file that they are kept in."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
from pathlib import Path
from typing import Any, Literal, Self, get_args

from ..errors import UsageError
from ..pallas_kernels.device import cudnn_version, device_kernels, hopper_refused_reason
from ..process.files import private_directory, write_json
from .configurations import KernelConfig

logger = logging.getLogger(__name__)

DEFAULT_FOLDER = "~/.cache/swiftkv-jax/kernel-checks"
Outcome = Literal[
    "right", "wrong", "crashed", "hung", "failed", "unsupported", "unchecked", "begun"
]
KEPT = ("right", "wrong", "crashed", "hung", "failed", "unsupported", "begun")


@dataclasses.dataclass(frozen=True)
class DeviceVersion:
    """All that a verdict depends on besides the configuration."""

    platform: str
    device_kind: str
    platform_version: str
    """As the client reports it: the versions of CUDA, or of libtpu."""
    driver: str
    """NVIDIA's kernel driver; "" elsewhere."""
    cudnn: int | None
    """As JAX finds it on a GPU; None elsewhere."""
    jax: str
    jaxlib: str
    kernels: str
    """Digest of the sources of `pallas_kernels`, tuning table included, and of this package."""

    @property
    def implementation(self) -> str | None:
        """The name of its kernels; None if there are none for it."""
        return device_kernels(self.platform, self.device_kind)

    @property
    def refused_reason(self) -> str | None:
        """Why a Hopper GPU does without the Hopper kernels; None if it has them, and for others."""
        return hopper_refused_reason(self.platform, self.device_kind)

    @classmethod
    def of(cls, device: Any) -> Self:
        """That of a `jax.Device`."""
        import jax

        is_gpu = device.platform in ("gpu", "cuda")
        return cls(
            platform=device.platform,
            device_kind=device.device_kind,
            platform_version=" ".join(device.client.platform_version.split()),
            driver=_nvidia_driver() if is_gpu else "",
            cudnn=cudnn_version() if is_gpu else None,
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
        """Whether the kernel may run; where it is unsupported, it does not."""
        return self.outcome in ("right", "unsupported")

    def __str__(self) -> str:
        return f"{self.outcome}, {self.detail}" if self.detail else self.outcome


class VerdictFile:
    """The verdicts of one `DeviceVersion` on disk. Another version has another file.

    Where the folder cannot be used, verdicts are kept nowhere, and the log says so.
    """

    def __init__(self, folder: str | Path, device: DeviceVersion, implementation: str):
        self._header = dataclasses.asdict(device) | {"implementation": implementation}
        text = json.dumps(self._header, sort_keys=True).encode()
        self.path: Path | None = None
        try:
            folder = private_directory("kernel_checks", folder)
            self.path = folder / f"{implementation}-{hashlib.sha256(text).hexdigest()[:16]}.json"
        except (OSError, UsageError) as error:
            logger.info("verdicts on kernels are not kept: %s", error)

    def read(self) -> dict[KernelConfig, Verdict]:
        """What is kept; nothing if the file is absent, damaged, or of another device."""
        try:
            document = json.loads(self.path.read_text("utf-8")) if self.path else {}
            if not document or document["device"] != self._header:
                return {}
            return {
                KernelConfig(**entry["configuration"]): _verdict(entry["verdict"])
                for entry in document["verdicts"]
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.info("%s: not used, kernels are checked again: %s", self.path, error)
            return {}

    def add(self, new: dict[KernelConfig, Verdict]) -> None:
        """Keep these too, in the place of older ones; those that say nothing about the kernel
        remove what was kept."""
        if self.path is None:
            return
        verdicts = {**self.read(), **new}
        document = {
            "device": self._header,
            "verdicts": [
                {
                    "configuration": dataclasses.asdict(config),
                    "verdict": dataclasses.asdict(verdict),
                }
                for config, verdict in sorted(verdicts.items(), key=lambda item: str(item[0]))
                if verdict.outcome in KEPT
            ],
        }
        try:
            write_json(self.path, document)
        except OSError as error:
            logger.info("verdicts on kernels are not kept: %s", error)


def _verdict(fields: dict[str, Any]) -> Verdict:
    """Raises `ValueError` or `TypeError` for what is none."""
    if fields["outcome"] not in get_args(Outcome):
        raise ValueError(f"outcome {fields['outcome']!r}")
    if (process := fields["process"]) is not None:
        host, number = process
        fields = fields | {"process": (host, number)}
    return Verdict(**fields)


@functools.cache
def kernels_digest() -> str:
    """The digest of all sources and tables of `pallas_kernels`, and of this package."""
    here, digest = Path(__file__).parent, hashlib.sha256()
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
