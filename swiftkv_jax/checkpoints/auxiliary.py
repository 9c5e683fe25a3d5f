"""Files of a checkpoint other than weights: config.json, generation defaults, and the tokenizer's
files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ConfigError
from ..model.config import Config
from ..model.cut import CUT_FIELDS
from ..model.model import LOSS_FIELDS, AuxiliaryFiles, Model
from ..model.quantization import Format
from ..process.files import write_json
from ..process.json_files import check_no_pointer, parse_json, read_json
from .hf_config import config_from_hf, config_to_hf, is_wrapped, text_fields
from .quantized.compressed_tensors import quantization_config
from .quantized.config import read_quantization_config
from .tokenizer import TEMPLATES, corrected, read_tokenizer, with_chat_template

logger = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
# Any of these holds a vocabulary; the others only describe it.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
GENERATION_CONFIG = "generation_config.json"


def read_auxiliary_files(path: Path) -> tuple[Config, AuxiliaryFiles, tuple[int, ...]]:
    """config.json, the other side files, and the tokens that they state to end a generation
    (`end_tokens` has all). If the model wraps a text model, config.json is that of the text model
    alone; this is logged.

    Raises `ConfigError` naming config.json if it is malformed or not supported, `CheckpointError`
    for other files.
    """
    hf_config = read_json(path / "config.json", ConfigError)
    try:
        if is_wrapped(hf_config):
            kind = hf_config["model_type"]
            hf_config = text_fields(hf_config)
            _warn_of_images(path, kind)
        config = config_from_hf(hf_config)
    except ConfigError as error:
        raise ConfigError(f"{path / 'config.json'}: {error}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{path / 'config.json'}: malformed field ({error})") from None
    names = [*TOKENIZER_FILES, GENERATION_CONFIG]
    names += sorted(f"{TEMPLATES}/{file.name}" for file in (path / TEMPLATES).glob("*.jinja"))
    contents = {name: (path / name).read_bytes() for name in names if (path / name).is_file()}
    for name, content in contents.items():
        check_no_pointer(path / name, content)
    if hf_config["model_type"] == "mistral" and "tokenizer.json" in contents:
        contents["tokenizer.json"] = corrected(path, contents["tokenizer.json"])
    generation = parse_json(path / GENERATION_CONFIG, contents.get(GENERATION_CONFIG, b"{}"))
    return config, AuxiliaryFiles(contents, hf_config), _stated_ends(path, generation, hf_config)


def files_of(model: Model) -> AuxiliaryFiles:
    """The files of a model, with its end tokens and its tokenizer's chat template where they state
    others."""
    contents = dict(model.auxiliary_files.contents)
    file = Path(GENERATION_CONFIG)
    generation = parse_json(file, contents.get(GENERATION_CONFIG, b"{}"))
    stated = _stated_ends(file, generation, model.auxiliary_files.hf_config)
    ends = tuple(map(int, model.eos_token_ids))
    if ends not in (stated, end_tokens(stated, model.tokenizer, model.config.vocab_size)):
        generation["eos_token_id"] = ends
        contents[GENERATION_CONFIG] = json.dumps(generation, indent=2).encode()
    if has_tokenizer(model.auxiliary_files) and hasattr(model.tokenizer, "chat_template"):
        contents = with_chat_template(contents, model.tokenizer.chat_template)
    return dataclasses.replace(model.auxiliary_files, contents=contents)


@functools.cache
def _warn_of_images(path: Path, model_type: str) -> None:
    """Warn that images are not supported, once per directory."""
    logger.warning(
        "%s: of this %s model only the text model is read: images are not supported, and the "
        "tensors of the vision side are not read",
        path,
        model_type,
    )


def write_auxiliary_files(
    path: Path,
    config: Config,
    auxiliary_files: AuxiliaryFiles,
    dtype_name: str,
    quantization: Format | None,
) -> None:
    """config.json and everything that was carried along."""
    for name, content in auxiliary_files.contents.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
    hf_config = to_hf_config(config, auxiliary_files.hf_config, dtype_name, quantization)
    write_json(path / "config.json", hf_config, canonical=True)


def to_hf_config(
    config: Config, original: dict[str, Any], dtype_name: str, quantization: Format | None
) -> dict[str, Any]:
    """The original config.json with the fields that `config` determines replaced.

    Hugging Face has a field for fp8 matrices; int8 ones are in our own directories only, whose
    manifest says so. Spelled as transformers 4 reads it: `rope_theta`, `rope_scaling` and
    `torch_dtype`, which later versions read too.
    """
    stale = (
        "rope_parameters",
        "dtype",
        "quantization_config",
        "auto_map",
        "swiftkv",
        "shared_kv_heads",
        *CUT_FIELDS,
        "num_local_experts",
    )
    if config.num_upper_layers == 0:
        stale = (*stale, *LOSS_FIELDS)
    kept = {name: value for name, value in original.items() if name not in stale}
    if quantization == "fp8":
        fields = original.get("quantization_config") or {}
        ours = quantization_config(experts=config.num_experts > 0)
        kept["quantization_config"] = ours
        # That of a wrapped model may have another name for the head.
        if "lm_head" in (fields.get("ignore") or ()):
            theirs = read_quantization_config(fields)
            if theirs.kept == "fp8" and theirs.groups == read_quantization_config(ours).groups:
                kept["quantization_config"] = fields
    width = {"intermediate_size": config.mlp_dim}
    return width | kept | config_to_hf(config) | {"torch_dtype": dtype_name}


def has_tokenizer(auxiliary_files: AuxiliaryFiles) -> bool:
    return any(name in auxiliary_files.contents for name in _VOCABULARIES)


def load_tokenizer(path: Path, auxiliary_files: AuxiliaryFiles) -> Any:
    """The transformers tokenizer in a checkpoint directory, or None if there is none. Runs no code
    from the checkpoint.

    Raises `CheckpointError` if the files are there and cannot be used.
    """
    if not has_tokenizer(auxiliary_files):
        return None
    contents = auxiliary_files.contents
    try:
        with _quiet_transformers():
            if "tokenizer.json" in contents or "tokenizer.model" in contents:
                return read_tokenizer(path, contents, auxiliary_files.hf_config)
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # whatever the files make transformers and tokenizers raise
        reason, *_ = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{path}: the tokenizer cannot be loaded ({reason})") from None


def end_tokens(stated: tuple[int, ...], tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """The tokens that end a generation: those `stated` by the configs, and the tokenizer's own,
    which is the only one that some fine-tunes change. One that the model lacks ends nothing."""
    own = getattr(tokenizer, "eos_token_id", None)
    if own is None or own in stated or own >= vocab_size:
        return stated
    return (*stated, own)


def _stated_ends(
    path: Path, generation: Mapping[str, Any], hf_config: Mapping[str, Any]
) -> tuple[int, ...]:
    """The end tokens of generation_config.json, or where it has none those of config.json. Raises
    `CheckpointError` that names `path` for what are no token ids."""
    value: Any = generation.get("eos_token_id")
    if value is None:
        value = hf_config.get("eos_token_id")
    ids: Any = value
    if value is None:
        ids = []
    elif not isinstance(value, list):
        ids = [value]
    if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise CheckpointError(
            f"{path}: eos_token_id={value!r} must be a token id or a list of them"
        )
    return tuple(ids)


@contextlib.contextmanager
def _quiet_transformers():
    """A context in which transformers logs no remarks: on models that are missing without PyTorch,
    on what is unusual in a config.json that we read ourselves.

    transformers sets its logger's level when it is first imported, so the import comes first.
    """
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    advisory = os.environ.get(name)
    os.environ[name] = "1"
    try:
        import transformers  # noqa: F401
    finally:
        if advisory is None:
            del os.environ[name]
        else:
            os.environ[name] = advisory
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
