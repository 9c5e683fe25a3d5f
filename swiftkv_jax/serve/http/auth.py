"""Keys, and the clients that may use which route."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ...errors import UsageError
from ..errors import APIError

KEY_VARIABLE = "SWIFTKV_API_KEY"
"""Environment variable that holds a key."""


class Client(NamedTuple):
    """The client that a key stands for."""

    name: str = ""
    """Name of the key, for logs and turns; "" where none is needed."""
    salt: str = ""
    """Salt of its prefixes, a digest of the key itself: pages on disk outlive the server, and the
    name may be another client's in the next one."""


class Keys:
    """The keys that are let in, as digests. Without any, every request is."""

    def __init__(self, keys: Mapping[str, str]):
        """`keys` maps names to keys."""
        self._clients = [(_digest(key), Client(name, _salt(key))) for name, key in keys.items()]

    def client_of(self, headers: Mapping[bytes, bytes]) -> Client:
        """The client whose key a request brings. Raises `APIError`.

        The digest of what was offered is compared with every key's in a time that does not depend
        on either, so the time of the answer tells nothing about a key.
        """
        if not self._clients:
            return Client()
        offered = _offered(headers)
        if offered is None:
            raise _refusal(
                "missing_api_key",
                "a key is needed: `Authorization: Bearer KEY` or `X-Api-Key: KEY`",
            )
        digest = _digest(offered)
        found = None
        for stored, client in self._clients:
            if hmac.compare_digest(digest, stored):
                found = client
        if found is None:
            raise _refusal("invalid_api_key", "this key is not known")
        return found


def _offered(headers: Mapping[bytes, bytes]) -> str | None:
    """`Authorization: Bearer KEY`, or `X-Api-Key: KEY` beside another scheme or none: proxies add
    theirs."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    found = key if scheme.lower() == b"bearer" else headers.get(b"x-api-key")
    return None if found is None else found.strip().decode("latin-1")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _salt(key: str) -> str:
    content = key.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(content, digest_size=32, person=b"prefix cache").hexdigest()


def _refusal(code: str, message: str) -> APIError:
    return APIError(401, code, message, headers={"www-authenticate": "Bearer"})


# Where keys come from ------------------------------------------------------------


def read_keys(given: Iterable[str], file: Path | None) -> dict[str, str]:
    """Name -> key, from arguments, a file and the environment. Raises `UsageError`."""
    keys = {f"key{number}": key for number, key in enumerate(given, start=1)}
    for key in keys.values():
        _check(key, "`api_key`")
    if key := os.environ.get(KEY_VARIABLE):
        keys["environment"] = _check(key, KEY_VARIABLE)
    if file is not None:
        of_file = _read_file(file)
        if both := sorted(keys.keys() & of_file.keys()):
            raise UsageError(f"`api_key_file`={file}: the name {both[0]!r} is taken")
        keys |= of_file
    return keys


def _check(key: str, where: str) -> str:
    """The key. Raises `UsageError`, which does not repeat it."""
    if not re.fullmatch(r"[!-~]{8,512}", key):
        raise UsageError(f"{where}: a key must be 8 to 512 letters, digits and signs")
    return key


def _read_file(file: Path) -> dict[str, str]:
    """A line for each key, `name:key`; empty lines and those with # are left out. A key has a name
    for the log and for turns, and keeps it when the file is read anew."""
    if stat.S_IMODE(file.stat().st_mode) & 0o077:
        raise UsageError(f"`api_key_file`={file}: others can read it; chmod 600 it")
    keys: dict[str, str] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not (line := line.strip()) or line.startswith("#"):
            continue
        name, _, key = map(str.strip, line.partition(":"))
        where = f"`api_key_file`={file}: line {number}"
        if not key:
            raise UsageError(f"{where} must be NAME:KEY")
        if name in keys:
            raise UsageError(f"{where}: {name!r} is there twice")
        if not (name and name.isprintable()):
            raise UsageError(f"{where}: {name!r} is not a valid name")
        keys[name] = _check(key, where)
    if not keys:
        raise UsageError(f"`api_key_file`={file}: there is no key in it")
    return keys
