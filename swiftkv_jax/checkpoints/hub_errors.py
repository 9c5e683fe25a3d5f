"""Why a download from the Hugging Face Hub failed, and what helps: each text is the rest of an
error message."""

from __future__ import annotations

import errno
from collections.abc import Iterator

_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


def not_reached() -> str:
    """Say that the Hub is not asked, and how it is, or that it does not answer."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "offline: unset HF_HUB_OFFLINE to download it"
    return f"the Hub at {constants.ENDPOINT} cannot be reached"


def reason_of_failure(name: str, revision: str | None, error: BaseException) -> str | None:
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
    if isinstance(error, OSError | RuntimeError) or any(map(_is_of_http, causes)):
        detail = (str(last).strip().splitlines() or [""])[0] or type(last).__name__
        return f"the Hub at {hub} cannot be reached ({detail}); it is not in the cache {cache}"
    return None


def _is_of_cache(error: OSError, cache: str) -> bool:
    """Whether a folder of the cache cannot be made or written."""
    at = str(error.filename or "")
    above = bool(at) and (cache.startswith(at) or at.startswith(cache))  # /proc has no folders
    return error.errno in _UNWRITABLE or (error.errno == errno.ENOENT and above)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those that caused it, the first cause last."""
    while error is not None:
        yield error
        error = error.__cause__


def _is_of_http(error: BaseException) -> bool:
    """Whether it is of the HTTP library, which depends on the version of huggingface_hub."""
    from huggingface_hub.errors import HfHubHTTPError

    return isinstance(error, HfHubHTTPError.__bases__[0])
