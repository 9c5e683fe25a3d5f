"""Work of the command `convert`: conversion leaf by leaf, and what a checkpoint holds."""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .. import cli, demo
from ..checkpoints import kind_of, open_any, orbax_io
from ..checkpoints.auxiliary import end_tokens, has_tokenizer, load_tokenizer
from ..checkpoints.gguf.file import shards
from ..checkpoints.gguf.read import stored_types
from ..checkpoints.hf_read import delta_config, open_delta
from ..checkpoints.hf_write import write_hf
from ..checkpoints.hub import local_path
from ..checkpoints.merge import with_adapter
from ..checkpoints.quantized.config import read_quantization_config
from ..checkpoints.source import Source
from ..checkpoints.tensor_map import MappedLeaf
from ..checkpoints.training_run import RECIPE, exported_model, is_run, open_run, run_steps
from ..errors import CheckpointError, UsageError
from ..model.cache import answer_bytes_per_token, bytes_per_token
from ..model.config import Config
from ..model.mesh import emulate_cpu_devices, make_mesh, parse_mesh
from ..model.quantization import SCALE
from ..model.rope_config import Rope
from ..process.files import check_free

HUGGING_FACE = "Hugging Face"
RUN = "training run"
_EXTENSIONS = "prompt_attention_layers", "prompt_mlp_neurons", "boundary_taps", "exact_head"
"""Fields of `Config` that only extended checkpoints have."""


def main(args: argparse.Namespace) -> int:
    _return_freed_memory()
    if args.command != "inspect":
        check_free(args.dst)  # before a download
    args.src = local_path(args.src, args.revision)
    if args.base is not None:
        args.base = local_path(args.base)
    return {"hf2orbax": _hf2orbax, "orbax2hf": _orbax2hf, "inspect": _inspect}[args.command](args)


def _return_freed_memory() -> None:
    """Have glibc give large blocks back to the system when freed: else buffers of earlier leaves
    pile up in its pools."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        m_mmap_threshold = -3
        mallopt(m_mmap_threshold, 2**20)


def _hf2orbax(args: argparse.Namespace) -> int:
    if is_run(args.src):
        raise CheckpointError(f"{args.src}: a training run; convert it with orbax2hf first")
    src = exported_model(Path(args.src))
    if kind_of(src) == "Orbax":
        raise CheckpointError(
            f"{src}: an Orbax directory already; give a Hugging Face directory or a GGUF file"
        )
    shape = parse_mesh(args.mesh)
    emulate_cpu_devices(math.prod(shape))
    mesh = make_mesh(shape)
    opened = (
        open_any(src)
        if args.base is None
        else open_delta(src, open_any(args.base, delta_config(src)))
    )
    if args.adapter is not None:
        opened = with_adapter(opened, local_path(args.adapter, weights=False))
    with _bar(opened) as advance:
        orbax_io.write_orbax(opened, args.dst, dtype=args.dtype, mesh=mesh, progress=advance)
    return cli.OK


def _orbax2hf(args: argparse.Namespace) -> int:
    kind, opened = _open(args)
    if args.adapter is not None:
        if args.format == "delta":
            raise UsageError(
                "--adapter with --format delta: a delta is joined with the base that it was made "
                "for, which is not the merged one; write another --format"
            )
        opened = with_adapter(opened, local_path(args.adapter, weights=False))
    elif kind == HUGGING_FACE and args.format == "full" and not _changes(opened, args.dtype):
        raise CheckpointError(
            f"{opened.path}: a Hugging Face directory in this format already; give a training run, "
            f"one written by hf2orbax or save, another --format or --dtype, or an --adapter to "
            f"merge"
        )
    with _bar(opened) as advance:
        write_hf(opened, args.dst, format=args.format, dtype=args.dtype, progress=advance)
    return cli.OK


def _changes(opened: Source, dtype: str | None) -> bool:
    """Say whether a Hugging Face directory, written as it is read in `dtype`, gets other weights:
    another dtype, decoded ones, or a file of its own."""
    if opened.path is not None and demo.shares_a_file(opened.path):
        return True
    if opened.quantization is None and opened.auxiliary_files.hf_config.get("quantization_config"):
        return True
    stored = {
        opened.dtypes[leaf.name].name for leaf in opened.leaves if leaf.size and not leaf.part
    }
    return dtype is not None and stored != {dtype}


@contextlib.contextmanager
def _bar(opened: Source) -> Iterator[Callable[[MappedLeaf], None]]:
    """A progress bar of bytes on stderr, advanced leaf by leaf; silent where stderr is no
    terminal."""
    total = sum(_num_bytes(opened, leaf) for leaf in opened.leaves)
    with tqdm(total=total, unit="B", unit_scale=True, file=sys.stderr, disable=None) as bar:

        def advance(leaf: MappedLeaf) -> None:
            bar.set_description(leaf.name, refresh=False)
            bar.update(_num_bytes(opened, leaf))

        yield advance


def _inspect(args: argparse.Namespace) -> int:
    kind, opened = _open(args)
    facts = _facts(opened, kind)
    if kind == RUN:
        assert opened.path is not None
        facts[1:1] = [
            ("checkpoint", opened.path.name),
            ("of", ", ".join(map(str, run_steps(args.src)))),
        ]
    for name, value in facts:
        print(f"{name:22} {value}")
    return cli.OK


def _open(args: argparse.Namespace) -> tuple[str, Source]:
    """The kind of model that SRC holds, and the model unread."""
    if is_run(args.src):
        return RUN, open_run(args.src, args.step, args.base)
    if args.step is not None or args.base is not None:
        raise UsageError(f"--step and --base are for training runs; {args.src} holds no {RECIPE}")
    src = exported_model(Path(args.src))
    return kind_of(src), open_any(src)


def _mlp(config: Config) -> str:
    if not config.num_experts:
        return f"MLP {config.mlp_dim}"
    return f"{config.num_experts_per_token} of {config.num_experts} experts {config.mlp_dim}"


def _facts(opened: Source, kind: str) -> list[tuple[str, str]]:
    config = opened.config
    trained = sum(leaf.size for leaf in opened.leaves if leaf.is_delta and leaf.part != SCALE)
    frozen = sum(leaf.size for leaf in opened.leaves if leaf.part != SCALE) - trained
    dtypes = sorted({opened.dtypes[leaf.name].name for leaf in opened.leaves if leaf.size})
    num_bytes = sum(_num_bytes(opened, leaf) for leaf in opened.leaves)
    dtype = opened.dtypes["embed"]
    teacher = bytes_per_token(config, dtype, swiftkv=False)
    vocabulary = str(config.vocab_size)
    if config.tie_word_embeddings:
        vocabulary += ", head tied to embedding"
    facts = [
        ("kind", kind),
        ("layers", f"{config.num_layers} of width {config.embed_dim}, {_mlp(config)}"),
        (
            "heads",
            f"{config.num_heads} query, {config.num_kv_heads} key/value, {config.head_dim} wide",
        ),
        ("vocabulary", vocabulary),
        ("family", config.family),
        ("attention", "; ".join(_kinds(config))),
        ("max positions", str(config.max_position_embeddings)),
        ("attention biases", _biases(config)),
        ("options", ", ".join(_options(config)) or "those of Llama"),
        ("swiftkv", _yes(opened.has_delta)),
        ("num_key_value_layers", str(config.num_key_value_layers)),
        ("key_value_group_size", str(config.key_value_group_size)),
        *((name, str(value)) for name in _EXTENSIONS if (value := getattr(config, name))),
        ("teacher q, k, v", _yes(opened.has_teacher)),
        ("parameters", f"{frozen + trained:,} = {frozen:,} frozen + {trained:,} trained"),
        ("bytes", f"{num_bytes:,}"),
        ("dtype", ", ".join(dtypes)),
        ("KV bytes per token", f"{teacher:,} teacher"),
        ("end tokens", ", ".join(map(str, _end_tokens(opened))) or "none"),
        ("tokenizer", _yes(has_tokenizer(opened.auxiliary_files))),
        ("digests", _yes(opened.digests)),
    ]
    stored = opened.auxiliary_files.hf_config.get("quantization_config")
    if kind == HUGGING_FACE and stored is not None:
        facts.append(("quantization", str(read_quantization_config(stored))))
    if kind == "GGUF":
        assert opened.path is not None
        size = sum(part.stat().st_size for part in shards(opened.path))
        facts.append(("quantization", f"GGUF: {stored_types(opened.path)}"))
        facts.append(("file bytes", f"{size:,}"))
    if opened.has_delta:
        student = bytes_per_token(config, dtype)
        found = f"{teacher:,} teacher, {student:,} student ({100 * student / teacher:.1f} %)"
        if config.has_two_caches:
            found += f", {answer_bytes_per_token(config, dtype):,} of an answer"
        row = [name for name, _ in facts].index("KV bytes per token")
        facts[row] = ("KV bytes per token", found)
    return facts


def _end_tokens(opened: Source) -> tuple[int, ...]:
    assert opened.path is not None
    tokenizer = load_tokenizer(opened.path, opened.auxiliary_files)
    return end_tokens(opened.eos_token_ids, tokenizer, opened.config.vocab_size)


def _num_bytes(opened: Source, leaf: MappedLeaf) -> int:
    return leaf.size * opened.dtypes[leaf.name].itemsize


def _kinds(config: Config) -> list[str]:
    """A few words on each kind of layer."""
    layers = range(config.num_layers)
    counts = collections.Counter(config.kind(layer) for layer in layers)
    return [
        f"{counts[kind]} with {_rope(kind.rope)}"
        + ("" if kind.window is None else f", window {kind.window}")
        for kind in config.kinds
    ]


def _rope(rope: Rope | None) -> str:
    if rope is None:
        return "no rope"
    scaling = "no scaling" if rope.scaling is None else f"{rope.scaling.rope_type} scaling"
    share = "" if rope.fraction == 1 else f" of {rope.fraction:g} of each head"
    return f"rope{share}, theta {rope.theta:g}, {scaling}"


def _options(config: Config) -> list[str]:
    """The options of the layer that are not Llama's, by their names in `Config`."""
    shown = {"layer_kinds", "qkv_bias", "o_bias", "family", "num_experts", "num_experts_per_token"}
    shown |= {"max_position_embeddings", "tie_word_embeddings", "norm_eps", "shared_kv_heads"}
    shown |= {"num_key_value_layers", "key_value_group_size"}
    shown |= set(_EXTENSIONS)
    return [
        f"{field.name}={_shortened(getattr(config, field.name))}"
        for field in dataclasses.fields(config)
        if field.default is not dataclasses.MISSING
        and field.name not in shown
        and getattr(config, field.name) != field.default
    ]


def _shortened(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _biases(config: Config) -> str:
    found = {"q, k, v": config.qkv_bias, "output": config.o_bias}
    return " and ".join(name for name, there in found.items() if there) or "none"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
