"""Three things that JAX's interpreter of Mosaic GPU kernels lacks (0.11.2 to 0.12.0), for tests.

1. `pl.run_state(f)(plgpu.ACC.init(x))`: a WGMMA accumulator that starts from a value.
2. `plgpu.wgmma(acc, x, b)` with `x` in registers rather than in shared memory.
3. `plgpu.copy_gmem_to_smem(..., collective_axes=axis)`: where the interpreter has each thread block
   copy everything for itself, each copies its part into the shared memory of all blocks of the
   cluster, and a barrier completes when all parts are there. So a part that is written before the
   other blocks have freed their memory is a race here too.

All are added to the interpreter's private classes, so this file goes when JAX has them.
"""

import dataclasses
import functools
import math
import threading
import time
from typing import Any
from unittest import mock

import jax
from jax._src import core
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax._src.state import discharge
from jax._src.state import types as state_types

REGISTERS = memory.get_memory_space_idx(gpu_core.MemorySpace.REGS)


def install():
    """Extend the interpreter. Must run before a kernel is traced; does nothing the second time."""
    interpreter: Any = jaxpr_interpret.JaxprInterpreter
    if getattr(interpreter, "_extended", False):
        return
    interpreter._extended = True
    interpreter._interpret_wgmma_ref_p = _with_operand_in_registers(
        interpreter._interpret_wgmma_ref_p
    )
    interpreter._interpret_copy_gmem_to_smem_p = _with_multicast(
        interpreter._interpret_copy_gmem_to_smem_p
    )
    interpreter.interpret = _with_run_state(interpreter.interpret)


def _where(interpreter):
    return {"mesh_location": interpreter.mesh_location, "thread": interpreter.thread}


def _allocate(interpreter, eqn, token, value):
    """A simulated register buffer that holds `value`: (token, key)."""
    token, request = gpu_callbacks.call_make_allocation_request_array(
        token=token,
        initial_ref_count=1,
        compute_unit=interpreter.thread,
        memory_space_id=REGISTERS,
    )
    return gpu_callbacks.call_allocate_buffer(
        token=token,
        allocation_request_as_array=request,
        value=value,
        source_info=eqn.source_info,
        **_where(interpreter),
    )


def _release(interpreter, eqn, token, key):
    return gpu_callbacks.call_deallocate_buffer(
        token=token, allocation_key_as_array=key, source_info=eqn.source_info, **_where(interpreter)
    )


def _run_state(interpreter, eqn, token, values):
    """Interpret a `run_state`: operands that are arrays become buffers for its body, refs pass
    through."""
    jaxpr = eqn.params["jaxpr"]
    is_array = [not isinstance(variable.aval, state_types.AbstractRef) for variable in eqn.invars]
    operands = []
    for value, array in zip(values, is_array, strict=True):
        if array:
            token, value = _allocate(interpreter, eqn, token, value)
        operands.append(value)
    token, _ = interpreter.interpret(jaxpr, token, *operands)
    results = []
    for variable, operand, array in zip(jaxpr.invars, operands, is_array, strict=True):
        if array:
            token, value = gpu_callbacks.call_get(
                token=token,
                result_shape_and_dtype=variable.aval.inner_aval,
                allocation_key_as_array=operand,
                transforms=(),
                source_info=eqn.source_info,
                **_where(interpreter),
            )
            token = _release(interpreter, eqn, token, operand)
            operand = value
        results.append(operand)
    return token, results


def _with_operand_in_registers(original):
    def interpret_wgmma(self, eqn, token, get_invals):
        if isinstance(eqn.invars[1].aval, state_types.AbstractRef):
            return original(self, eqn, token, get_invals)
        values = list(get_invals())
        token, key = _allocate(self, eqn, token, values[1])
        values[1] = key
        token, out = original(self, eqn, token, lambda: values)
        return _release(self, eqn, token, key), out

    return interpret_wgmma


def _with_run_state(original):
    def interpret(self, jaxpr, token, *args):
        if not any(eqn.primitive is discharge.run_state_p for eqn in jaxpr.eqns):
            return original(self, jaxpr, token, *args)
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))
        pending = []

        def read(atom):
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        def run_pending(token):
            """The equations since the last `run_state`, by the interpreter as it is."""
            if not pending:
                return token
            produced = {variable for eqn in pending for variable in eqn.outvars}
            needed = dict.fromkeys(
                atom
                for eqn in pending
                for atom in eqn.invars
                if not isinstance(atom, core.Literal) and atom not in produced
            )
            kept = [
                variable
                for eqn in pending
                for variable in eqn.outvars
                if not isinstance(variable, core.DropVar)
            ]
            part = core.Jaxpr(
                constvars=(),
                invars=list(needed),
                outvars=kept,
                eqns=list(pending),
                effects=jaxpr.effects,
                debug_info=jaxpr.debug_info.with_unknown_names(),
            )
            token, results = original(self, part, token, *map(read, needed))
            values.update(zip(kept, results, strict=True))
            pending.clear()
            return token

        for eqn in jaxpr.eqns:
            if eqn.primitive is not discharge.run_state_p:
                pending.append(eqn)
                continue
            token = run_pending(token)
            token, results = _run_state(self, eqn, token, [read(atom) for atom in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
        return run_pending(token), [read(variable) for variable in jaxpr.outvars]

    return interpret


# Multicast --------------------------------------------------------------------


def _with_multicast(original):
    def interpret_copy(self, eqn, token, get_invals):
        if not eqn.params["collective_axes"]:
            return original(self, eqn, token, get_invals)
        assert eqn.params["collective_axes"] == self.mesh.cluster_names
        multicast = functools.partial(_multicast, blocks=math.prod(self.cluster_dims))
        with mock.patch.object(gpu_callbacks, "copy_gmem_to_smem", multicast):
            return original(self, eqn, token, get_invals)

    return interpret_copy


@gpu_callbacks.fail_on_exception
def _multicast(
    *,
    token,
    mesh_location,
    thread,
    src_allocation_key_as_array,
    src_transforms,
    dst_allocation_key_as_array,
    dst_transforms,
    barrier_allocation_key_as_array,
    blocks,
    source_info=None,
):
    """The part of a copy that the thread block of `thread` makes, to each block of its cluster."""
    shared = gpu_callbacks._get_shared_memory()
    from_array = memory.HostAllocationKey.from_array

    def part(key, transforms):
        transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
        return _part(shared.access(key, transforms), thread.block_id, blocks)

    src, dst, barrier = map(
        from_array,
        (src_allocation_key_as_array, dst_allocation_key_as_array, barrier_allocation_key_as_array),
    )
    src_part, dst_part = part(src, src_transforms), part(dst, dst_transforms)
    for block in range(blocks):
        there, landed = (dataclasses.replace(key, block_id=block) for key in (dst, barrier))
        for key in (there, landed):
            _wait_until_allocated(shared, key)
        task: Any = gpu_callbacks.AsyncCopyGmemToSmemTask(
            mesh_location=mesh_location,
            thread=thread,
            src_allocation_key=src,
            src_access=src_part,
            dst_allocation_key=there,
            dst_access=dst_part,
            barrier_allocation_key=landed,
            source_info=source_info,
            clock=shared.incr_clock(thread) if shared.detect_races else None,
        )
        task.barrier = _Part(task.barrier, blocks, own=block == thread.block_id)
        shared.execute_async_task(task)
    return token


def _part(access, block: int, blocks: int):
    """The `block`-th of `blocks` parts of what is accessed, along the first axis that is sliced."""
    axis = next(i for i, index in enumerate(access.range) if isinstance(index, slice))
    rows = access.range[axis]
    size = (rows.stop - rows.start) // blocks
    start = rows.start + block * size
    ranges = list(access.range)
    ranges[axis] = slice(start, start + size, rows.step)
    return interpret_utils.Access(tuple(ranges), access.permutation)


def _wait_until_allocated(shared, key):
    """A cluster's blocks start at different times here, but on a GPU they wait for each other."""
    deadline = time.monotonic() + 60
    while True:
        shared.check_failed()
        with shared.lock:
            if key in shared.mem:
                return
        if time.monotonic() > deadline:
            raise RuntimeError(f"thread block {key.block_id} of the cluster has ended: {key}")
        time.sleep(1e-3)


class _Part:
    """In place of the barrier of one copy: arrives there when the block's own copy has been issued
    and as many parts have landed as there are blocks. A GPU counts bytes too, whoever sent them."""

    lock = threading.Lock()

    def __init__(self, barrier, blocks: int, *, own: bool):
        self.barrier, self.blocks, self.own = barrier, blocks, own

    def arrive(self, thread, clock, logging_info):
        with self.lock:
            landed = vars(self.barrier).setdefault("landed", [])
            landed.append((self.own, clock))
            own = [part for part in landed if part[0]][:1]
            parts = own + [part for part in landed if not part[0]][: self.blocks - 1]
            if not own or len(parts) < self.blocks:
                return
            landed[:] = [part for part in landed if not any(part is other for other in parts)]
        if clock is not None:
            for _, other in parts:
                clock.update(other)
        self.barrier.arrive(thread, clock, logging_info)
