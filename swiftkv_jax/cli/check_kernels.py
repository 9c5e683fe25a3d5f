"""Compare the device's attention kernels with the reference: `python -m
swiftkv_jax.cli.check_kernels`.

Every configuration runs in a child process, whatever is known of it from before; this process
touches no device. The verdicts are kept: engines and training runs read them.
"""

from __future__ import annotations

from ..process import interrupts

if __name__ == "__main__":
    interrupts.install()  # before the imports that take a second

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import cli
from ..errors import DataError

if TYPE_CHECKING:
    from ..kernel_check import KernelCheck, KernelConfig
    from ..kernel_check.verdicts import DeviceVersion, Verdicts


def main(argv: Sequence[str] | None = None, check: KernelCheck | None = None) -> int:
    """Run the command: 0 if no configuration is wrong, crashes, hangs or could not be checked, else
    1, or another exit code of `cli`."""
    flags = parser()
    args = flags.parse_args(argv)
    return cli.run(lambda: _run(args, check), flags)


def parser() -> argparse.ArgumentParser:
    result = cli.ArgumentParser(
        prog=cli.prog("check-kernels"),
        description="Compare the device's attention kernels with the reference, each configuration "
        "in a child process.",
    )
    add = result.add_argument
    add(
        "--model",
        "-m",
        metavar="DIR",
        help="check only what this checkpoint needs (default: all head dims and cache formats)",
    )
    add(
        "--revision",
        metavar="NAME",
        help="branch, tag or commit of a model on the Hub (default: main)",
    )
    add("--json", type=Path, metavar="FILE", help="also write the verdicts here")
    return result


def _run(args: argparse.Namespace, check: KernelCheck | None) -> int:
    from ..kernel_check import KernelCheck, configurations
    from ..kernel_check.verdicts import as_entries
    from ..process.files import check_absent, write_json

    check = check or KernelCheck()
    check_absent("`json`", args.json)
    config = None
    if args.model is not None:
        from ..checkpoints import open_any
        from ..checkpoints.hub import local_path

        config = open_any(local_path(args.model, args.revision)).config
    device = _device(check)
    kernels = device.kind.kernels
    found: Verdicts = {}
    if device.kind.hopper_refused_reason:
        print(f"without the hopper kernels: hopper {device.kind.hopper_refused_reason}")
    if kernels is None:
        print(f"no device kernels for {_name(device)}: attention runs through XLA")
    elif config is None:
        found = _check(configurations.standard_configs(kernels), device, kernels, check)
    else:
        found = _check(configurations.model_configs(config, kernels), device, kernels, check)
    if args.json is not None:
        document = {"device": dataclasses.asdict(device), "implementation": kernels}
        write_json(args.json, document | {"checks": as_entries(found)})
    return cli.OK if all(verdict.usable for verdict in found.values()) else cli.ERROR


def _check(
    configs: Sequence[KernelConfig], device: DeviceVersion, kernels: str, check: KernelCheck
) -> Verdicts:
    """Run the configurations that the kernels take, and print the table of all."""
    from ..kernel_check.configurations import choose_for
    from ..kernel_check.running import check_in_children
    from ..kernel_check.verdicts import HEADER, Verdict, VerdictFile, table_row

    print(
        f"{kernels} kernels on {_name(device)}, {len(configs)} configurations, at most "
        f"{check.timeout:g} s each\n{HEADER.format('kernel', 'seconds', 'verdict')}",
        flush=True,
    )
    reasons = {config: choose_for(config, device.kind).reason for config in configs}
    found = {config: Verdict("unsupported", reason) for config, reason in reasons.items() if reason}
    for config, verdict in found.items():
        print(table_row(kernels, config, verdict), flush=True)
    found |= check_in_children(
        [config for config in configs if config not in found],
        VerdictFile.in_folder(check.folder, device, kernels),
        command=check.command,
        timeout=check.timeout,
        every=True,
    )
    outcomes = [verdict.outcome for verdict in found.values()]
    right, unsupported = (outcomes.count(name) for name in ("right", "unsupported"))
    print(
        f"of {len(found)}: {right} right, {unsupported} not for this device, "
        f"{len(found) - right - unsupported} cannot be used"
    )
    return found


def _device(check: KernelCheck) -> DeviceVersion:
    """The device, as a child process finds it."""
    from ..kernel_check.running import describe_device
    from ..kernel_check.verdicts import DeviceVersion

    if check.device is not None:
        return DeviceVersion.of(check.device)
    try:
        return describe_device(check.command)
    except RuntimeError as error:
        raise DataError(f"the device cannot be used: {error}") from error


def _name(device: DeviceVersion) -> str:
    kind = device.device_kind
    return kind if kind == device.platform else f"{kind} ({device.platform})"


if __name__ == "__main__":
    cli.end(main())
