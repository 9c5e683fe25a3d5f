"""Command-line arguments of the cut, for training and calibration."""

from __future__ import annotations

import argparse

from ..model.config import GENERATED_KV


def add_cut(parser: argparse._ActionsContainer, what_for: str) -> None:
    """The cut, and the keys and values of generated tokens: what the command does for them is
    `what_for`."""
    flag = parser.add_argument
    flag(
        "--num-key-value-layers",
        type=int,
        metavar="K",
        help="layers that keep their own keys and values (default: as in the model's delta, or as "
        "an analysis of the data recommends; demo: half)",
    )
    flag("--analysis", metavar="DIR", help="take the cut that this one recommends")
    flag(
        "--key-value-group-size",
        type=int,
        metavar="G",
        help="upper layers that share one key/value cache, AcrossKV (default: as in the model's "
        "delta, or 1)",
    )
    flag(
        "--prompt-attention-layers",
        type=int,
        metavar="M",
        help="upper layers, the first ones, of which prompts run the attention, with a linear map "
        "in place of the MLP (default: as in the model's delta, or 0)",
    )
    flag(
        "--prompt-mlp-neurons",
        type=int,
        metavar="N",
        help="neurons of each of their MLPs that prompts run beside the map (default: as in the "
        "model's delta, or 0)",
    )
    flag(
        "--boundary-taps",
        type=int,
        choices=(0, 1),
        help="1: keys come from the hidden states of a token and of the one before it "
        "(default: as in the model's delta, or 0)",
    )
    flag(
        "--generated-kv",
        choices=GENERATED_KV,
        help=f"{what_for} generated tokens that keep each upper layer's own keys and values "
        "(default: as the model says)",
    )
    flag(
        "--exact-tail",
        type=int,
        metavar="W",
        help="with --generated-kv own: also the last W tokens of a prompt (default: as the model)",
    )
    flag(
        "--exact-head",
        type=int,
        choices=(0, 1),
        help="1: the first token of a text runs through all layers and keeps its own keys and "
        "values, an attention sink (default: as the model)",
    )
