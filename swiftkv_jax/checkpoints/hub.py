"""Models by their names on the Hugging Face Hub: `ORGANISATION/NAME`, and
`ORGANISATION/NAME:Q4_K_M` for a GGUF file of such a repository, or one in parts, as llama.cpp and
vLLM spell it.

`huggingface_hub` downloads into its cache, which other programs share, and resumes what was
interrupted. HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE are for it. Its locks let one of
several processes on a machine download while the others wait.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, UsageError
from ..process.json_files import read_json
from . import foreign
from .auxiliary import GENERATION_CONFIG, TOKENIZER_FILES
from .gguf.file import is_later_part, is_model_name, shards
from .hf_write import INDEX, SINGLE_FILE
from .peft import WEIGHTS as ADAPTER_WEIGHTS
from .quantized.config import MODELOPT
from .tokenizer import TEKKEN, TEMPLATES

logger = logging.getLogger(__name__)

_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"(?P<repository>{_PART}/{_PART})(?::(?P<file>[\w./-]+))?")
_SIDE_FILES = (
    "config.json",
    GENERATION_CONFIG,
    *TOKENIZER_FILES,
    TEKKEN,
    f"{TEMPLATES}/*.jinja",
    INDEX,
    # Of an adapter; beside a model they are not read.
    foreign.ADAPTER,
    ADAPTER_WEIGHTS,
    # This is not read, but says why the model is not.
    MODELOPT,
    ".gitattributes",  # which every repository has, so that something is found
)
# The part of a GGUF file's name that says how it is stored, before the ending.
_QUANTISATION = re.compile(
    r"(?:.*[-._/])?((?:UD-)?(?:I?Q\d|TQ\d|B?F16|F32|MXFP4)\w*?)(?:-00001-of-\d{5})?\.gguf",
    re.IGNORECASE,
)


def is_repository(model: str | os.PathLike[str]) -> bool:
    """True if this is spelled like a name on the Hub, and nothing is at this path. What begins with
    `./` or ends in `.gguf` is a path."""
    model = os.fspath(model)
    found = _NAME.fullmatch(model)
    is_name = found is not None and not foreign.is_path(found["repository"])
    return is_name and not os.path.exists(model)


def local_path(
    model: str | os.PathLike[str], revision: str | None = None, *, weights: bool = True
) -> Path:
    """The path of a model: itself, or where nothing is there and it is spelled like a name on the
    Hub, the folder in the cache, or the GGUF file (its first part), downloaded if it has to be.

    `revision` is a branch, a tag or a commit; None is `main`. Weights in safetensors are fetched,
    the tokenizer's files, chat templates and configs, and adapters, and nothing else; without
    `weights`, not those of a model in safetensors. A GGUF file, whose metadata is the model's
    config and tokenizer, always is. Raises `CheckpointError` if this fails, `UsageError` for a
    revision of what is not on the Hub.
    """
    model = os.fspath(model)
    if not is_repository(model):
        if foreign.is_path(model) and not os.path.exists(model):
            raise CheckpointError(f"{model}: {foreign.missing(model)}")
        if revision is not None:
            raise UsageError(f"`revision`={revision}: {model} is not a name on the Hub")
        return Path(model)
    found = _NAME.fullmatch(model)
    assert found is not None
    name = found["repository"]
    file = found["file"]
    try:
        return _fetch(name, file, revision, weights=weights)
    except CheckpointError:
        raise
    except Exception as error:  # those of the network's libraries have no base but this
        if (reason := _reason_of_failure(name, revision, error)) is None:
            raise
        raise CheckpointError(f"{model}: no such file or folder, and {reason}") from error


def repository_of(path: Path) -> tuple[str, str] | None:
    """(name, commit) of the repository in whose folder in the Hub's cache a path lies."""
    for folder in (path, *path.parents):
        kind, _, name = folder.parent.parent.name.partition("--")
        if folder.parent.name == "snapshots" and kind == "models" and name:
            return name.replace("--", "/", 1), folder.name
    return None


def _fetch(name: str, wanted: str | None, revision: str | None, *, weights: bool) -> Path:
    """Download and return the folder, or the GGUF file that `wanted` stands for, or that is the
    repository's only model."""
    import huggingface_hub

    folder = Path(
        huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=[*_SIDE_FILES], tqdm_class=_no_progress()
        )
    )
    names: Sequence[str] = _weight_files(folder)
    file = None
    if wanted is not None or not all((folder / each).is_file() for each in names):
        files, failure = _files(name, folder)
        if wanted is not None:
            file = _named_gguf(name, wanted, files, failure)
        elif not any(each in files for each in names):
            file = None if foreign.ADAPTER in files else _only_gguf(name, files)
        if file is not None:
            names = [part.as_posix() for part in shards(Path(file))]
        elif not weights:
            return folder
        missing = [each for each in names if not (folder / each).is_file()]
        if missing and failure is not None:
            raise failure
        if present := [each for each in missing if each in files]:
            huggingface_hub.snapshot_download(name, revision=folder.name, allow_patterns=present)
        elif missing == list(names) and file is None:
            raise CheckpointError(f"{name}: {_without_weights(folder, files)}")
    elif not weights:
        return folder
    model, path = (name, folder) if file is None else (f"{name}:{wanted or file}", folder / file)
    logger.info("%s: commit %s in %s", model, folder.name, path)
    return path


def _no_progress() -> type:
    """A class of progress bars that are not shown, for files that come at once."""
    from huggingface_hub.utils import tqdm

    class Hidden(tqdm):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options | {"disable": True})

    return Hidden


def _weight_files(folder: Path) -> tuple[str, ...]:
    """The files that the index lists, or the single file of a model without an index. A damaged
    index lists none: reading the folder says what is wrong with it."""
    if not (folder / INDEX).is_file():
        return (SINGLE_FILE,)
    try:
        listed = read_json(folder / INDEX)["weight_map"].values()
    except (CheckpointError, KeyError, AttributeError):
        return (INDEX,)
    return tuple(sorted({name for name in listed if isinstance(name, str)})) or (INDEX,)


def _files(name: str, folder: Path) -> tuple[list[str], Exception | None]:
    """The names of the files of a repository at the commit of `folder`. Without an answer from the
    Hub, the names of those in the cache, and the error. One request, which is not repeated."""
    import huggingface_hub

    try:
        info = huggingface_hub.HfApi().model_info(name, revision=folder.name)
        return sorted(file.rfilename for file in info.siblings or ()), None
    except (_http_error(), OSError) as error:
        cached = [path for path in folder.rglob("*") if path.is_file()]
        return sorted(path.relative_to(folder).as_posix() for path in cached), error


def _named_gguf(name: str, wanted: str, files: list[str], failure: Exception | None) -> str:
    """The GGUF file, or the first of several parts, that `wanted`, a name or a quantisation, stands
    for. Raises `CheckpointError` unless there is exactly one. `failure` as `_files` returns it."""
    ggufs, there = _gguf_models(files)
    if wanted in ggufs:
        return wanted
    found = _ending_in(wanted, there)
    if len(found) == 1:
        return found[0]
    listed = ", ".join(found or there or ggufs)
    if failure is not None and not found:
        has = f"has only {listed}" if listed else "has none"
        reason = f"{_not_reached()}; of the repository's GGUF files the cache {has}"
    elif found:
        reason = f"several GGUF files of the repository have this ending; name one: {listed}"
    elif ggufs:
        reason = f"the repository has no such GGUF file; it has {listed}"
    else:
        reason = "the repository has no GGUF files"
        if any(file.endswith(".safetensors") for file in files):
            reason += f"; its safetensors are loaded by the name {name}"
    raise CheckpointError(f"{name}:{wanted}: {reason}")


def _only_gguf(name: str, files: list[str]) -> str | None:
    """The GGUF file, or the first of several parts, of a repository whose only model it is; None if
    there is none. Raises `CheckpointError` if there are several."""
    _, there = _gguf_models(files)
    if len(there) < 2:
        return there[0] if there else None
    kinds = [kind[1] for file in there if (kind := _QUANTISATION.fullmatch(file))]
    usual = next((k for k in ("Q4_K_M", *kinds) if len(_ending_in(k, there)) == 1), there[0])
    raise CheckpointError(
        f"{name}: GGUF files only: name one, such as {name}:{usual}; it has {', '.join(there)}"
    )


def _ending_in(wanted: str, files: list[str]) -> list[str]:
    """The GGUF files whose names end in a word or several, before the number of a part."""
    ending = re.compile(rf"(.*[-._/])?{re.escape(wanted)}(-00001-of-\d{{5}})?\.gguf", re.IGNORECASE)
    return [file for file in files if ending.fullmatch(file)]


def _gguf_models(files: list[str]) -> tuple[list[str], list[str]]:
    """The GGUF files that may hold a model, and those of them that are not a later part of one."""
    ggufs = [file for file in files if file.endswith(".gguf") and is_model_name(file)]
    return ggufs, [file for file in ggufs if not is_later_part(Path(file))]


def _without_weights(folder: Path, files: list[str]) -> str:
    """Why a repository that has these files, but no weights to read, is no model."""
    reason = foreign.without_weights(folder) or foreign.pickles(files)
    return reason or f"no weights in the repository: looked for {INDEX}, {SINGLE_FILE} and GGUF"


# Errors: each text is the rest of a message -----------------------------------

_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


def _not_reached() -> str:
    """Say that the Hub is not asked, and how it is, or that it does not answer."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "offline: unset HF_HUB_OFFLINE to download it"
    return f"the Hub at {constants.ENDPOINT} cannot be reached"


def _reason_of_failure(name: str, revision: str | None, error: BaseException) -> str | None:
    """Why a download failed and what helps; None for an error that is none of the download's."""
    from huggingface_hub import constants, errors, get_token

    hub = constants.ENDPOINT
    cache = constants.HF_HUB_CACHE
    causes = tuple(_causes(error))
    answers = [each for each in causes if isinstance(each, errors.HfHubHTTPError)]
    status = answers[0].response.status_code if answers else None
    log_in = "log in by `hf auth login`, or set HF_TOKEN"
    if any(isinstance(e, OSError) and e.errno in _FULL for e in causes) or (
        "No space left on device" in str(error)
    ):
        return (
            f"no space is left for it in {cache}: free some, or set HF_HOME to a folder with more; "
            f"what has arrived is kept"
        )
    if any(isinstance(e, errors.OfflineModeIsEnabled) for e in causes) or constants.HF_HUB_OFFLINE:
        what = "it" if revision is None else f"its revision {revision}"
        return (
            f"as a name on the Hub {what} is not in the cache {cache}, or not whole: unset "
            f"HF_HUB_OFFLINE to download it"
        )
    if isinstance(error, errors.GatedRepoError):
        then = "as the account of your token" if get_token() else f"and {log_in}"
        return f"access to it on the Hub is gated: accept the terms at {hub}/{name} {then}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"on the Hub it has no revision {revision}: give a branch, a tag or a commit"
    if isinstance(error, errors.RepositoryNotFoundError):
        where = f"no such repository at {hub}"
        if get_token():
            return f"{where}, or the account of the token may not read it"
        return f"{where}, or it is private: {log_in}"
    if status == 401:
        return f"{hub} refuses the token (401): {log_in} to one that is valid"
    if status == 403:
        return f"{hub} refuses it (403): the token needs the permission to read {name}"
    if status is not None:
        return f"{hub} answered {status}: try again later"
    if isinstance(error, errors.HFValidationError):
        return "no repository of the Hub can have this name"
    last = causes[-1]
    if isinstance(error, OSError) and _is_of_cache(error, cache):
        return f"the cache {cache} cannot be written: set HF_HOME to a folder that can"
    if isinstance(error, OSError | RuntimeError) or any(
        isinstance(each, _http_error()) for each in causes
    ):
        detail = (str(last).strip().splitlines() or [""])[0] or type(last).__name__
        return f"the Hub at {hub} cannot be reached ({detail}); it is not in the cache {cache}"
    return None


def _is_of_cache(error: OSError, cache: str) -> bool:
    """True if a folder of the cache cannot be made or written."""
    at = str(error.filename or "")
    # Above it too: /proc has no folders.
    above = bool(at) and (Path(cache).is_relative_to(at) or Path(at).is_relative_to(cache))
    return error.errno in _UNWRITABLE or (error.errno == errno.ENOENT and above)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those that caused it, the first cause last."""
    while error is not None:
        yield error
        error = error.__cause__


def _http_error() -> type[Exception]:
    """The base of errors of the HTTP library, which depends on the version of huggingface_hub."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__[0]
