"""The check of kernels before their first use, in child processes that stand in for a device's."""

import dataclasses
import functools
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

import swiftkv_jax as skv
from swiftkv_jax import kernel_check
from swiftkv_jax.cli import check_kernels
from swiftkv_jax.infer import Engine, EngineOptions, Request, SamplingParams
from swiftkv_jax.infer.runner.build import build_model_runner
from swiftkv_jax.kernel_check import (
    KernelCheck,
    KernelConfig,
    checked_implementation,
    configurations,
    running,
)
from swiftkv_jax.kernel_check.verdicts import DeviceVersion, Verdict, VerdictFile
from swiftkv_jax.pallas_kernels import choice, device
from swiftkv_jax.pallas_kernels.choice import Choice
from tests import tiny
from tests.kernel_check.stand_in import A100, Kernels, gpu, tpu

PREFILL = KernelConfig("prefill", 64, 2, "bfloat16", "bfloat16", 64)
DECODE = dataclasses.replace(PREFILL, op="decode")
ON_TPU = dataclasses.replace(DECODE, page_size=128)


@pytest.fixture
def warnings(caplog):
    """The warnings of the package since the test began."""
    kernel_check._log.cache_clear()
    caplog.set_level(logging.INFO, "swiftkv_jax")
    return lambda: [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]


def stand_in(mode: str, folder: Path, **options: Any) -> KernelCheck:
    options = {"device": gpu()} | options
    command = (sys.executable, "-m", "tests.kernel_check.stand_in", mode, str(folder / "starts"))
    command += (options["device"].device_kind,)
    return KernelCheck(folder=folder / "verdicts", command=command, **options)


def starts(folder: Path) -> int:
    """Child processes that have started."""
    path = folder / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


def kept(folder: Path) -> dict[str, str]:
    (path,) = (folder / "verdicts").glob("*.json")
    entries = json.loads(path.read_text())["verdicts"]
    return {entry["configuration"]["op"]: entry["verdict"]["outcome"] for entry in entries}


# Verdicts ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["is right", pytest.param("interpreted", marks=pytest.mark.long)])
def test_right_kernels_are_used_and_checked_once(mode, tmp_path, warnings, caplog):
    check = stand_in(mode, tmp_path)
    configs = [DECODE] if mode == "interpreted" else [PREFILL, DECODE]
    for _ in range(2):
        assert checked_implementation(None, configs, None, check) is None
    assert starts(tmp_path) == 1
    assert kept(tmp_path) == {config.op: "right" for config in configs}
    assert not warnings()
    assert len([one for one in caplog.messages if "agree with the reference" in one]) == 1
    (path,) = (tmp_path / "verdicts").glob("*.json")
    assert path.parent.stat().st_mode & 0o77 == 0


@pytest.mark.parametrize(
    ("mode", "outcome", "said"),
    [
        ("is wrong", "wrong", ": wrong, by up to "),
        ("crashes", "crashed", ": crashed, with SIGABRT"),
        ("hangs", "hung", ": hung, no result after 1 s"),
    ],
)
def test_kernels_that_are_not_right_are_not_used(mode, outcome, said, tmp_path, warnings):
    check = stand_in(mode, tmp_path, timeout=1.0 if mode == "hangs" else 120.0)
    for _ in range(2):
        assert checked_implementation(None, [DECODE, PREFILL], None, check) == "xla"
    assert starts(tmp_path) == 1
    assert kept(tmp_path) == {"decode": outcome}
    (warning,) = warnings()
    assert said in warning
    assert "HBM3, decode (head dim 64, 2 queries per key/value head, bfloat16, " in warning
    assert "swiftkv check-kernels" in warning and "`attention`=hopper" in warning
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert f"{tmp_path}/starts" not in left


def test_what_a_kernel_refuses_is_left_to_the_choice_of_the_ops(tmp_path, warnings, caplog):
    """And the log says once why XLA runs it."""
    refused = dataclasses.replace(DECODE, page_size=16)
    for _ in range(2):
        assert checked_implementation(None, [refused], None, stand_in("is wrong", tmp_path)) is None
    assert starts(tmp_path) == 0 and not warnings()
    (message,) = caplog.messages
    takes = (
        "hopper takes pages of a multiple of 64 positions, got 16 with k.shape=(4400, 2, 16, 64)"
    )
    assert message == f"{refused} runs through XLA: {takes}"


def test_what_could_not_be_checked_is_not_used_and_not_kept(tmp_path, warnings):
    check = stand_in("does not start", tmp_path)
    for _ in range(2):
        assert checked_implementation(None, [DECODE], None, check) == "xla"
    assert starts(tmp_path) == 2 and kept(tmp_path) == {}
    (warning,) = warnings()
    assert "ends before it has found the device, with exit code 3: no device left" in warning


def test_a_child_process_on_another_device_says_nothing(tmp_path, warnings):
    check = stand_in("is right", tmp_path, device=gpu("cuda 13010"))
    assert checked_implementation(None, [DECODE], None, check) == "xla"
    assert ": unchecked, a child process finds" in warnings()[0]


def test_a_name_is_obeyed_unchecked(tmp_path):
    check = stand_in("is wrong", tmp_path)
    assert checked_implementation("hopper", [DECODE], None, check) == "hopper"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("mode", "chosen"), [("is right", None), ("has other logs", "xla")])
def test_on_other_gpus_cudnn_is_checked(mode, chosen, tmp_path, warnings, monkeypatch):
    """For prefill alone, and not of packed rows: nothing starts for these."""
    monkeypatch.setattr(choice, "cudnn_version", lambda: 92000)
    check = stand_in(mode, tmp_path, device=gpu(kind=A100))
    packed = dataclasses.replace(PREFILL, page_size=None, packed=True)
    assert checked_implementation(None, [DECODE, packed], None, check) is None
    assert starts(tmp_path) == 0
    assert checked_implementation(None, [PREFILL, DECODE], None, check) == chosen
    assert starts(tmp_path) == 1
    assert kept(tmp_path) == {"prefill": "wrong" if chosen else "right"}
    said = "the cudnn kernels: on NVIDIA A100-SXM4-80GB, prefill (head dim 64"
    assert [said in warning for warning in warnings()] == ([True] if chosen else [])
    assert "`attention`=" not in "".join(warnings())  # by name it cannot decode


@pytest.mark.parametrize("kind", ["cpu", "AMD Instinct MI300X"])
def test_nothing_happens_without_device_kernels(kind, tmp_path):
    device = SimpleNamespace(platform="cpu" if kind == "cpu" else "gpu", device_kind=kind)
    check = stand_in("is wrong", tmp_path, device=device)
    assert checked_implementation(None, [DECODE], None, check) is None
    assert list(tmp_path.iterdir()) == []


def test_all_processes_do_as_the_one_that_found_a_mistake(tmp_path, warnings, monkeypatch):
    write([DECODE], tmp_path)
    monkeypatch.setattr(kernel_check, "any_process", lambda flag: True)
    assert checked_implementation(None, [DECODE], None, stand_in("-", tmp_path)) == "xla"
    assert "another process has not found them right" in warnings()[0]


# The file of verdicts -------------------------------------------------------------


def write(configs, folder, outcome: Any = "right", device=None, **fields) -> VerdictFile:
    """Keep these verdicts as of an earlier run."""
    device = device or gpu()
    name = "tpu" if device.platform == "tpu" else "hopper"
    file = VerdictFile.in_folder(folder / "verdicts", DeviceVersion.of(device), name)
    file.add({config: Verdict(outcome, **fields) for config in configs})
    return file


@pytest.mark.parametrize(
    "field", ["device_kind", "platform_version", "driver", "cudnn", "jax", "jaxlib", "kernels"]
)
def test_another_version_of_anything_is_checked_again(field, tmp_path):
    version = DeviceVersion.of(gpu())
    VerdictFile.in_folder(tmp_path, version, "hopper").add({DECODE: Verdict("wrong")})
    file = VerdictFile.in_folder(tmp_path, version, "hopper")
    assert file.read() == {DECODE: Verdict("wrong")}
    other = dataclasses.replace(version, **{field: "another"})
    assert VerdictFile.in_folder(tmp_path, other, "hopper").read() == {}


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"device": 1}', b"\xff", b'{"verdicts": []}'], ids=repr
)
def test_a_damaged_file_is_written_anew(damage, tmp_path):
    file = write([DECODE], tmp_path)
    assert file.path is not None
    for content in (damage, file.path.read_bytes().replace(b'"right"', b'"fine"')):
        file.path.write_bytes(content)
        assert file.read() == {}
        file.add({PREFILL: Verdict("right")})
        assert file.read() == {PREFILL: Verdict("right")}


def test_a_folder_that_others_can_write_is_not_used(tmp_path, caplog):
    caplog.set_level(logging.INFO, "swiftkv_jax")
    folder = tmp_path / "verdicts"
    folder.mkdir()
    folder.chmod(0o777)
    assert write([DECODE], tmp_path).read() == {}
    assert "verdicts on kernels are not kept" in caplog.text and not list(folder.iterdir())


def test_verdicts_are_added_and_replaced(tmp_path):
    file = write([PREFILL, DECODE], tmp_path)
    wrong = Verdict("wrong", "by up to 3", 1.5, 3.0)
    file.add({DECODE: wrong})
    assert file.read() == {PREFILL: Verdict("right"), DECODE: wrong}
    file.add({DECODE: Verdict("unchecked")})
    assert file.read() == {PREFILL: Verdict("right")}


# In this process, as on a TPU -----------------------------------------------------


def in_process(folder, mode, timeout=120.0):
    file = VerdictFile.in_folder(folder / "verdicts", DeviceVersion.of(tpu()), "tpu")
    options = {"ops": Kernels(mode), "positions": 150, "runs": 1}
    device = jax.local_devices()[1]
    return file, lambda: running.check_in_process(
        [ON_TPU], device, file, timeout=timeout, **options
    )


@pytest.mark.parametrize("mode", ["is right", "is wrong"])
def test_a_tpu_is_checked_in_this_process(mode, tmp_path):
    file, check = in_process(tmp_path, mode)
    found = check()
    assert found[ON_TPU].outcome == mode.removeprefix("is ")
    assert file.read() == found


def test_a_kernel_that_hangs_in_this_process_is_known_to_the_next(tmp_path, monkeypatch, warnings):
    ended, kept_meanwhile = threading.Event(), []
    file, check = in_process(tmp_path, "-", timeout=0.1)

    def hang(*_, **__):
        kept_meanwhile.append(file.read()[ON_TPU].outcome)
        ended.wait()

    monkeypatch.setattr(running, "verdict_on", hang)
    with pytest.raises(TimeoutError, match="the tpu kernel hangs .*; start again: attention will"):
        check()
    ended.set()
    assert kept_meanwhile == ["begun"] and file.read()[ON_TPU].outcome == "hung"
    check = stand_in("-", tmp_path, device=tpu())
    assert checked_implementation(None, [ON_TPU], None, check) == "xla"
    assert ": hung, no result after 0.1 s" in warnings()[0]


def test_a_process_that_a_kernel_has_ended_is_noticed(tmp_path, warnings):
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1)
    process = os.uname().nodename, int(ended.stdout)
    write([ON_TPU], tmp_path, "begun", tpu(), process=process)
    check = stand_in("-", tmp_path, device=tpu())
    assert checked_implementation(None, [ON_TPU], None, check) == "xla"
    assert ": crashed, an earlier process has ended while it ran" in warnings()[0]


def test_another_process_that_runs_a_kernel_has_no_verdict_yet():
    for process in (("another host", 1), (os.uname().nodename, os.getppid())):
        assert running.after_the_end(Verdict("begun", process=process)) is None


def test_an_interrupt_says_nothing_about_a_kernel(tmp_path, monkeypatch):
    file, check = in_process(tmp_path, "is right")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(running.threading.Thread, "join", interrupt)
    with pytest.raises(KeyboardInterrupt):
        check()
    assert file.read() == {}


# The engine -----------------------------------------------------------------------


def small():
    hf = tiny.hf_config(num_hidden_layers=2, num_key_value_layers=1)
    return hf, tiny.tensors_for(hf)


@functools.cache
def model() -> skv.Model:
    return tiny.model_of(*small())


def test_the_engine_goes_on_with_xla(tmp_path, warnings, monkeypatch):
    monkeypatch.setattr(kernel_check, "choose_for", lambda *_: Choice("hopper"))  # heads of 8
    wrong = Verdict("wrong", "by up to 3")
    monkeypatch.setattr(
        kernel_check, "check_in_children", lambda configs, *_, **__: dict.fromkeys(configs, wrong)
    )
    options = EngineOptions(max_num_seqs=1, page_size=16, max_model_len=16, one_size=True)
    requests = [Request([5, 7, 11], SamplingParams(max_tokens=6))]
    runner = build_model_runner(model(), options, kernel_check=stand_in("-", tmp_path))
    assert runner._attention.implementation == "xla" and len(warnings()) == 1
    engine = Engine(
        runner, config=runner.config, eos_token_ids=model().eos_token_ids, options=options
    )
    baseline = Engine.from_model(model(), options, attention="xla")
    found, expected = (
        [token for _, output in one.run(requests) for token in output.token_ids]
        for one in (engine, baseline)
    )
    assert found == expected and len(found) == 6


# The command ----------------------------------------------------------------------


def test_the_command_prints_a_table_and_writes_json(tmp_path, capfd, monkeypatch):
    refused = dataclasses.replace(DECODE, page_size=16)
    configs = [DECODE, PREFILL, dataclasses.replace(DECODE, cache_dtype="int8"), refused]
    monkeypatch.setattr(configurations, "standard_configs", lambda implementation: configs)
    write([DECODE], tmp_path, "right")  # checked all the same
    path = tmp_path / "out.json"
    assert check_kernels.main(["--json", str(path)], stand_in("crashes", tmp_path)) == 1
    title, header, *rows, summary = capfd.readouterr().out.splitlines()
    assert title.startswith("hopper kernels on NVIDIA H100 80GB HBM3 (gpu), 4 configurations, at ")
    assert "verdict" in header
    names = [f"hopper.{one.op}" for one in (refused, *configs[:3])]
    assert [row.split(" (")[0] for row in rows] == names
    assert "not for this device: takes pages of a multiple of 64 positions, got 16" in rows[0]
    assert "crashed, with SIGABRT" in rows[1] and "right, within 0.0" in rows[2]
    assert summary == "of 4: 1 right, 1 not for this device, 2 cannot be used"
    assert starts(tmp_path) == 2  # a new one after the first crash
    document = json.loads(path.read_text())
    outcomes = [one["verdict"]["outcome"] for one in document["checks"]]
    assert outcomes == ["unsupported", "crashed", "right", "crashed"]
    assert document["device"]["device_kind"].startswith("NVIDIA H100")
    assert check_kernels.main(["--json", str(path)]) == 2
    assert "--json" in capfd.readouterr().err


def test_the_command_checks_what_a_model_needs(tmp_path, capsys, monkeypatch):
    skv.save_hf(model(), tmp_path / "model")
    seen: list[KernelConfig] = []

    def check(configs, *_, **__):
        seen.extend(configs)
        return {one: Verdict("right", difference=0.0) for one in configs}

    monkeypatch.setattr(configurations, "choose_for", lambda *_: Choice("hopper"))
    monkeypatch.setattr(running, "check_in_children", check)
    assert check_kernels.main(["-m", str(tmp_path / "model")], stand_in("-", tmp_path)) == 0
    assert {one.head_dim for one in seen} == {8, 0} and len(seen) == 10
    assert "of 10: 10 right, 0 not for this device, 0 cannot" in capsys.readouterr().out


# Devices without kernels, or that do without ----------------------------------------


def test_engines_and_the_command_say_that_cuda_miscompiles_the_kernels(
    warnings, capsys, monkeypatch
):
    monkeypatch.setattr(device, "cuda_runtime_version", lambda: 12090)
    for _ in range(2):
        checked_implementation(None, [], None, KernelCheck(device=gpu()))
    (warning,) = warnings()
    assert "runs without the hopper kernels" in warning and "this is 12.9" in warning
    monkeypatch.setattr(configurations, "standard_configs", lambda kernels: [])
    assert check_kernels.main([], KernelCheck(device=gpu())) == 0
    first, title, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("without the hopper kernels") and title.startswith("cudnn kernels on")


def test_no_such_device_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert check_kernels.main([]) == 1
    error = capsys.readouterr().err
    assert "JAX_PLATFORMS='cuda' names no kind of device that is here" in error
    assert error.count("\n") == 1


def test_the_command_without_device_kernels(capsys):
    assert check_kernels.main([]) == 0
    assert capsys.readouterr().out == "no device kernels for cpu: attention runs through XLA\n"
