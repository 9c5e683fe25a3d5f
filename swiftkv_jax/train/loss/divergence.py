"""Divergence of the student's next-token distribution from the teacher's, and its gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .objective import Divergence

_LEFT_OUT = -1e30  # finite: the difference of two of them is 0, not NaN


def describe(kind: Divergence, temperature: float, top_k: int | None = None) -> str:
    """Describe what `divergence_and_gradient` returns, for people: `4 KL(teacher || student) at
    temperature 2`."""
    name = {
        "forward": "KL(teacher || student)",
        "reverse": "KL(student || teacher)",
        "jsd": "Jensen-Shannon divergence",
    }[kind]
    factor = "" if temperature == 1 else f"{temperature**2:g} "
    kept = "" if top_k is None else f", of the teacher's {top_k:,} likeliest tokens"
    return f"{factor}{name} at temperature {temperature:g}{kept}"


def divergence_and_gradient(
    kind: Divergence,
    student: Float[Array, "B T V"],
    teacher: Float[Array, "B T V"],
    temperature: float,
    top_k: int | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T V"]]:
    """(temperature^2 * divergence in nats, its gradient in the student's logits), both float32.

    With t the temperature, p and q the softmaxes of teacher and student over it, m = (p + q) / 2,
    P = sum p log(p / m), Q = sum q log(q / m) and R = sum q log(q / p):

        forward   sum p log(p / q)    gradient  t (q - p)
        reverse   R                   gradient  t q (log(q / p) - R)
        jsd       (P + Q) / 2         gradient  t q (log(q / m) - Q) / 2

    `top_k` leaves out all but the teacher's k likeliest tokens (and any that tie with the last of
    them) from both softmaxes.
    """
    student = student / temperature
    teacher = teacher / temperature
    if top_k is not None:
        left_out = teacher < jax.lax.top_k(teacher, top_k)[0][..., -1:]
        student, teacher = (jnp.where(left_out, _LEFT_OUT, logits) for logits in (student, teacher))
    log_q = jax.nn.log_softmax(student)
    log_p = jax.nn.log_softmax(teacher)
    p = jnp.exp(log_p)
    q = jnp.exp(log_q)
    if kind == "forward":
        return temperature**2 * (p * (log_p - log_q)).sum(axis=-1), temperature * (q - p)
    log_m = log_p if kind == "reverse" else jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
    to_m = log_q - log_m
    of_student = (q * to_m).sum(axis=-1)
    gradient = temperature * q * (to_m - of_student[..., None])
    if kind == "reverse":
        return temperature**2 * of_student, gradient
    of_teacher = (p * (log_p - log_m)).sum(axis=-1)
    return temperature**2 * (of_teacher + of_student) / 2, gradient / 2
