"""Models by their names on the Hugging Face Hub: `ORGANISATION/NAME`, and
`ORGANISATION/NAME:Q4_K_M` for a GGUF file of such a repository, or one in parts, as llama.cpp and
vLLM spell it.

`huggingface_hub` downloads into its cache, which other programs share, and resumes what was
interrupted. HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE are for it. Its locks let one of
several processes on a machine download while the others wait.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, UsageError
from . import foreign
from .auxiliary import GENERATION_CONFIG, TOKENIZER_FILES
from .gguf_file import is_later_part, shards
from .hf_write import INDEX, SINGLE_FILE
from .quantization_config import MODELOPT
from .tokenizer import TEMPLATES

logger = logging.getLogger(__name__)

_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"(?P<repository>{_PART}/{_PART})(?::(?P<file>[\w./-]+))?")
_SIDE_FILES = (
    "config.json",
    GENERATION_CONFIG,
    *TOKENIZER_FILES,
    f"{TEMPLATES}/*.jinja",
    INDEX,
    # These are not read, but say why the model is not.
    foreign.ADAPTER,
    MODELOPT,
    ".gitattributes",  # which every repository has, so that something is found
)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


def is_repository(model: str | os.PathLike[str]) -> bool:
    """Whether this is spelled like a name on the Hub, and nothing is at this path."""
    return _NAME.fullmatch(os.fspath(model)) is not None and not Path(model).exists()


def local_path(
    model: str | os.PathLike[str], revision: str | None = None, *, weights: bool = True
) -> Path:
    """The path of a model: itself, or where nothing is there and it is spelled like a name on the
    Hub, the folder (of one with `:`, the GGUF file or its first part) in the cache, downloaded if
    it has to be.

    `revision` is a branch, a tag or a commit; None is `main`. Weights in safetensors are fetched,
    the tokenizer's files, chat templates and configs, and nothing else; without `weights`, not
    those in safetensors. Raises `CheckpointError` if this fails, `UsageError` for a revision of
    what is not on the Hub.
    """
    if not is_repository(model):
        if revision is not None:
            raise UsageError(f"`revision`={revision}: {model} is not a name on the Hub")
        return Path(model)
    found = _NAME.fullmatch(os.fspath(model))
    assert found is not None
    name, file = found["repository"], found["file"]
    try:
        return _fetch(name, file, revision, weights=weights)
    except CheckpointError:
        raise
    except Exception as error:  # those of the network's libraries have no base but this
        if (reason := _reason(name, revision, error)) is None:
            raise
        raise CheckpointError(f"{model}: no such file or folder, and {reason}") from error


def repository_of(path: Path) -> tuple[str, str] | None:
    """(name, commit) of the repository in whose folder in the Hub's cache a path lies."""
    for folder in (path, *path.parents):
        kind, _, name = folder.parent.parent.name.partition("--")
        if folder.parent.name == "snapshots" and kind == "models" and name:
            return name.replace("--", "/", 1), folder.name
    return None


def _fetch(name: str, file: str | None, revision: str | None, *, weights: bool) -> Path:
    """Download and return the folder, or its GGUF `file`."""
    import huggingface_hub

    folder = Path(
        huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=[*_SIDE_FILES], tqdm_class=_no_progress()
        )
    )
    commit = folder.name
    if file is not None:
        file = _gguf_file(name, file, _files(name, commit, folder))
        _download(name, folder, tuple(part.as_posix() for part in shards(Path(file))))
        return folder / file
    if not weights:
        return folder
    names = _weight_files(folder)
    _download(name, folder, names)
    if not any((folder / weights).is_file() for weights in names):
        reason = foreign.without_weights(folder)
        reason = reason or _without_weights(name, _files(name, commit, folder))
        raise CheckpointError(f"{name}: {reason}")
    logger.info("%s: commit %s in %s", name, commit, folder)
    return folder


def _download(name: str, folder: Path, files: tuple[str, ...]) -> None:
    """Download those of the `files` that the folder of a commit lacks and the repository has, with
    progress on standard error."""
    import huggingface_hub

    if missing := [file for file in files if not (folder / file).is_file()]:
        huggingface_hub.snapshot_download(name, revision=folder.name, allow_patterns=missing)


def _no_progress() -> type:
    """A class of progress bars that are not shown, for files that come at once."""
    from huggingface_hub.utils import tqdm

    class Hidden(tqdm):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options | {"disable": True})

    return Hidden


def _weight_files(folder: Path) -> tuple[str, ...]:
    """The files that the index lists, or the one that there is without an index. A damaged index
    lists none: reading the folder says what is wrong with it."""
    if not (folder / INDEX).is_file():
        return (SINGLE_FILE,)
    try:
        listed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    except (ValueError, KeyError, AttributeError, TypeError):
        return (INDEX,)
    return tuple(sorted({name for name in listed if isinstance(name, str)})) or (INDEX,)


def _files(name: str, commit: str, folder: Path) -> list[str]:
    """The names of the repository's files; without a connection, of those in the cache."""
    import huggingface_hub

    try:
        return sorted(huggingface_hub.HfApi().list_repo_files(name, revision=commit))
    except (huggingface_hub.errors.HfHubHTTPError.__bases__[0], OSError):
        return sorted(
            path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
        )


def _gguf_file(name: str, wanted: str, files: list[str]) -> str:
    """The GGUF file, or the first of several parts, that `wanted`, a name or a quantisation, stands
    for. Raises `CheckpointError` unless there is exactly one."""
    if wanted in (ggufs := _gguf_models(files)):
        return wanted
    there = [file for file in ggufs if not is_later_part(Path(file))]
    ending = re.compile(rf"(.*[-._/])?{re.escape(wanted)}(-00001-of-\d{{5}})?\.gguf", re.IGNORECASE)
    found = [file for file in there if ending.fullmatch(file)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(found or there) or "none at all"
    what = "several such GGUF files, of which one has to be named" if found else "no such GGUF file"
    raise CheckpointError(f"{name}:{wanted}: the repository has {what}: {listed}")


def _gguf_models(files: list[str]) -> list[str]:
    """The GGUF files but projectors of images."""
    return [file for file in files if file.endswith(".gguf") and "mmproj" not in file]


def _without_weights(name: str, files: list[str]) -> str:
    """Why a repository that has these files, but no safetensors to read, is no model."""
    if ggufs := _gguf_models(files):
        return f"GGUF files only: name one, such as {name}:{ggufs[0]}"
    reason = foreign.pickles(files)
    return reason or f"no weights in the repository: looked for {INDEX} and {SINGLE_FILE}"


def _reason(name: str, revision: str | None, error: BaseException) -> str | None:
    """Why a download failed and what helps; None for an error that is none of the download's."""
    from huggingface_hub import constants, errors, get_token

    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
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
        then = "with its account" if get_token() else f"and {log_in}"
        return f"on the Hub it is gated: accept its terms at {hub}/{name} {then}"
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
    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        return f"the cache {cache} cannot be written: set HF_HOME to a folder that can"
    if isinstance(error, OSError | RuntimeError) or any(map(_is_of_http, causes)):
        detail = (str(last).strip().splitlines() or [""])[0] or type(last).__name__
        return f"the Hub at {hub} cannot be reached ({detail}); it is not in the cache {cache}"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those that caused it, the first cause last."""
    while error is not None:
        yield error
        error = error.__cause__


def _is_of_http(error: BaseException) -> bool:
    """Whether it is of the HTTP library, which depends on the version of huggingface_hub."""
    from huggingface_hub.errors import HfHubHTTPError

    return isinstance(error, HfHubHTTPError.__bases__[0])
