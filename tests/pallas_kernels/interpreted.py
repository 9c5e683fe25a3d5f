"""Device kernels on the device they are for, or, where there is none, interpreted on the CPU with
race detection."""

import contextlib

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from swiftkv_jax.pallas_kernels.device import Device
from tests.pallas_kernels import mosaic_interpreter

H100 = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", platform="gpu", num_cores=132)
V5E = AbstractDevice(device_kind="TPU v5 lite", platform="tpu", num_cores=1)
DEVICES = {
    "H100": H100,
    "H200": AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132),
    "GH200": AbstractDevice(device_kind="NVIDIA GH200 480GB", platform="gpu", num_cores=132),
    "A100": AbstractDevice(device_kind="NVIDIA A100-SXM4-80GB", platform="gpu", num_cores=108),
    "B200": AbstractDevice(device_kind="NVIDIA B200", platform="gpu", num_cores=148),
    "v5e": V5E,
}


def device(name: str) -> Device:
    """One of `DEVICES`, as the choice of an implementation takes it."""
    return Device.of(DEVICES[name])


def under(device: str):
    """A mesh of one device of `DEVICES`, which need not exist: code is traced for it in here."""
    return _device(DEVICES[device])


def on_hardware(implementation: str) -> bool:
    """True if the device is one that runs `implementation`."""
    device = jax.devices()[0]
    if implementation == "hopper":
        return Device.of(device).is_hopper
    return device.platform == {"cudnn": "gpu", "tpu": "tpu"}.get(implementation)


@contextlib.contextmanager
def device_of(implementation: str):
    """Code traced and run in here sees the device that `implementation` is for. A race fails on
    leaving. The test is skipped on another accelerator: kernels are interpreted on CPUs."""
    if implementation == "xla" or on_hardware(implementation):
        yield
    elif jax.default_backend() != "cpu":
        kind = jax.devices()[0].device_kind
        pytest.skip(f"the {implementation} kernels do not run on {kind}, and CPUs interpret them")
    elif implementation == "hopper":
        with _interpreted_hopper():
            yield
    else:
        with _interpreted_tpu():
            yield


@contextlib.contextmanager
def _quick_callbacks():
    """An interpreter calls Python for each access to memory. JAX puts the operands of a call on a
    device first, which is half of the interpreters' time; they do with NumPy's arrays."""
    from jax._src import callback, core
    from jax._src.pallas.mosaic_gpu.interpret import shared_memory

    def call(*operands, callback, **_):
        return jax.tree.map(np.asarray, callback(*operands))

    def to_int(x):
        return x if isinstance(x, core.Tracer) else int(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callback, "io_callback_impl", call)
        patch.setattr(shared_memory, "_to_int", to_int)
        yield


@contextlib.contextmanager
def _interpreted_hopper():
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    mosaic_interpreter.install()
    parameters = plgpu.InterpretGPUParams(detect_races=True)
    registers = mosaic_interpreter.REGISTERS
    with (
        _quick_callbacks(),
        _device(H100),
        plgpu.force_gpu_interpret_mode(parameters),
        _no_races(gpu_callbacks, "GPURaceDetectionState", registers),
    ):
        try:
            yield
        finally:
            gpu_callbacks.reset_gpu_interpret_mode_state()


@contextlib.contextmanager
def _interpreted_tpu():
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    parameters = pltpu.InterpretParams(detect_races=True)
    with (
        _quick_callbacks(),
        _device(V5E),
        pltpu.force_tpu_interpret_mode(parameters),
        _no_races(interpret_pallas_call, "RaceDetectionState"),
    ):
        try:
            yield
        finally:
            pltpu.reset_tpu_interpret_mode_state()


def _device(device: AbstractDevice):
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


@contextlib.contextmanager
def _no_races(module, name: str, registers: int | None = None):
    """Every kernel starts a race detector of its own, `module.name`. All are kept, and asked in the
    end.

    `registers` is a memory space to pass over: a thread's registers are its own, but the clocks of
    their users start anew with each thread block while the history of accesses goes on.
    """
    detector, started = getattr(module, name), []

    class Kept(detector):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

        def check_read(self, thread, clock, key, *args, **kwargs):
            if registers is None or key.memory_space_id != registers:
                super().check_read(thread, clock, key, *args, **kwargs)

        def check_write(self, thread, clock, key, *args, **kwargs):
            if registers is None or key.memory_space_id != registers:
                super().check_write(thread, clock, key, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, Kept)
        yield
    assert started, "no kernel was interpreted"
    assert not any(state.races_found for state in started), "a race was found: see the output"
