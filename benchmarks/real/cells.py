"""Which students of a model are measured: cut, program of the prompt, how they are served and how
long they were trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from swiftkv_jax import api
from swiftkv_jax.errors import UsageError
from swiftkv_jax.model.config import GENERATED_KV, Config, GeneratedKV
from swiftkv_jax.model.cut import quarter_of_neurons
from swiftkv_jax.model.model import Model


@dataclasses.dataclass(frozen=True)
class Program:
    """What the prompt computes above the cut beside the projections of keys and values, and how
    many layers share them."""

    boundary_taps: int = 0
    prompt_attention_layers: int = 0
    prompt_mlp_neurons: int = 0
    exact_head: int = 0
    key_value_group_size: int = 0
    """Layers that share a cache; 0 if each has its own."""

    def at(self, upper_layers: int) -> Program:
        """The same with no more layers of attention than a cut of so many upper layers takes."""
        count = min(self.prompt_attention_layers, upper_layers - 1)
        neurons = self.prompt_mlp_neurons if count else 0
        return dataclasses.replace(self, prompt_attention_layers=count, prompt_mlp_neurons=neurons)

    @property
    def options(self) -> dict[str, Any]:
        """Those that are not zero, as `skv.calibrate` and `Recipe` take them."""
        return {name: value for name, value in vars(self).items() if value}

    def __str__(self) -> str:
        parts = ["tap"] if self.boundary_taps else []
        if count := self.prompt_attention_layers:
            parts.append(f"attention of {count}")
        if self.prompt_mlp_neurons:
            parts.append(f"{self.prompt_mlp_neurons} neurons")
        if self.exact_head:
            parts.append("exact head")
        if self.key_value_group_size:
            parts.append(f"groups of {self.key_value_group_size}")
        return ", ".join(parts) or "closed form"


PROGRAMS = {
    "base": Program(),
    "tap": Program(boundary_taps=1),
    "attention": Program(prompt_attention_layers=2),
    "both": Program(boundary_taps=1, prompt_attention_layers=2),
    "head": Program(exact_head=1),
    "tap-head": Program(boundary_taps=1, exact_head=1),
    "both-head": Program(boundary_taps=1, prompt_attention_layers=2, exact_head=1),
}
GROUPS = {
    "groups": Program(key_value_group_size=2),
    "both-head-groups": dataclasses.replace(PROGRAMS["both-head"], key_value_group_size=2),
}
"""Programs for cuts that leave a whole number of pairs of layers."""
WITH_NEURONS = {
    "neurons": PROGRAMS["attention"],
    "tap-neurons": PROGRAMS["both"],
    "tap-neurons-head": PROGRAMS["both-head"],
    "tap-neurons-1-head": dataclasses.replace(PROGRAMS["both-head"], prompt_attention_layers=1),
}
"""Programs that get neurons beside their maps."""
NAMES = *PROGRAMS, *GROUPS, *WITH_NEURONS


def program_of(config: Config, name: str) -> Program:
    """That of a model with this name. Raises `UsageError` if it has none."""
    if known := (PROGRAMS | GROUPS).get(name):
        return known
    if name not in WITH_NEURONS:
        raise UsageError(f"`programs`={name!r}: expected some of {','.join(NAMES)}")
    if not (neurons := quarter_of_neurons(config)):
        raise UsageError(f"`programs`={name!r}: this model has no MLP of which some neurons run")
    return dataclasses.replace(WITH_NEURONS[name], prompt_mlp_neurons=neurons)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One student. The fields are those of `Config`."""

    num_key_value_layers: int
    program: Program
    generated_kv: GeneratedKV
    exact_tail: int
    tokens: int = 0
    """Tokens that it was trained on."""
    restated_share: float = 0
    """Share of them in examples whose answers repeat parts of their prompts."""

    @property
    def key(self) -> dict[str, Any]:
        """What tells cells apart in a result file."""
        return {
            "num_key_value_layers": self.num_key_value_layers,
            **vars(self.program),
            "generated_kv": self.generated_kv,
            "exact_tail": self.exact_tail,
            "trained_tokens": self.tokens,
            "restated_share": self.restated_share,
        }

    def __str__(self) -> str:
        served = f"own, tail {self.exact_tail}" if self.generated_kv == "own" else "boundary"
        trained = f", {self.tokens:,} tokens" if self.tokens else ""
        if self.restated_share:
            trained += f", {self.restated_share:.0%} restated"
        return f"K={self.num_key_value_layers}, {self.program}, {served}{trained}"


def cell_of(config: Config, tokens: int, restated_share: float) -> Cell:
    """The cell of a student that was trained on so many tokens."""
    program = Program(
        config.boundary_taps,
        config.prompt_attention_layers,
        config.prompt_mlp_neurons,
        config.exact_head,
        config.key_value_group_size if config.key_value_group_size > 1 else 0,
    )
    served = config.generated_kv, config.exact_tail
    return Cell(config.num_lower_layers, program, *served, tokens, restated_share)


SERVED: tuple[tuple[GeneratedKV, int], ...] = (("own", 64), ("boundary", 0))
CUTS = {30: (27, 23, 20, 18, 15)}
"""Layers of a model -> K, most layers first; of others the shares of `OTHER_CUTS`."""
OTHER_CUTS = (5 / 6, 2 / 3, 1 / 2)


def default_cuts(num_layers: int) -> tuple[int, ...]:
    """The K at which a model is measured unless others are named."""
    return CUTS.get(num_layers) or tuple(round(num_layers * share) for share in OTHER_CUTS)


def untrained_cells(
    config: Config, cuts: Sequence[int], programs: Sequence[str], served: Sequence[str]
) -> list[Cell]:
    """Program after program, in each cut after cut, as `served` (values of `generated_kv`) says.
    Raises `UsageError` for a program that the model does not have, and for another `served`."""
    if unknown := set(served) - set(GENERATED_KV):
        raise UsageError(f"`served`={','.join(sorted(unknown))}: expected some of own,boundary")
    known = {name: program_of(config, name) for name in programs}
    return [
        Cell(cut, program.at(config.num_layers - cut), generated_kv, tail)
        for program in (known[name] for name in NAMES if name in known)
        for cut in cuts
        for generated_kv, tail in SERVED
        if generated_kv in served
    ]


def calibrated(cell: Cell, teacher: Model, rows: Sequence[Any]) -> api.Calibrated:
    """The untrained student of a cell in closed form, from rows of token ids."""
    return api.calibrate(
        teacher,
        rows,
        cell.num_key_value_layers,
        generated_kv=cell.generated_kv,
        exact_tail=cell.exact_tail,
        max_length=max(map(len, rows)),
        batch_size=4,
        **cell.program.options,
    )
