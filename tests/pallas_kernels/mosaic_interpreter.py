"""Two things that JAX's interpreter of Mosaic GPU kernels lacks (0.11.2 to 0.12.0), for tests only.

1. `pl.run_state(f)(plgpu.ACC.init(x))`: a WGMMA accumulator that starts from a value.
2. `plgpu.wgmma(acc, x, b)` with `x` in registers rather than in shared memory.

Both are added to the interpreter's private classes, so this file goes when JAX has them.
"""

from typing import Any

from jax._src import core
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
