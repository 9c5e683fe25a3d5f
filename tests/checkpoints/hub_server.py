"""A stand-in for the Hugging Face Hub: the routes that `snapshot_download` uses, over a folder that
holds ORGANISATION/NAME/REVISION/files."""

import contextlib
import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

TOKEN = "hf_valid"


class Hub(ThreadingHTTPServer):
    """Serves the repositories below `folder`: those in `private` to who sends `TOKEN`, those in
    `gated`, of which all may see the names of the files, to nobody."""

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.status: int | None = None
        """What every request is answered, if any."""
        self.requests: list[str] = []
        """Method and path of each."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def downloaded(self) -> list[str]:
        """The names of the files whose content was sent."""
        paths = [request.partition("/resolve/")[2] for request in self.requests if "GET" in request]
        return sorted(path.partition("/")[2] for path in paths if path)


@contextlib.contextmanager
def hub(folder: Path) -> Iterator[Hub]:
    """A hub that runs in a thread."""
    with Hub(folder) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        try:
            yield server
        finally:
            server.shutdown()


@contextlib.contextmanager
def hub_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub without repositories, and an empty cache, both below `folder`. The working directory is
    an empty folder."""
    with hub(folder / "hub") as running:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        set_endpoint(monkeypatch, running.url)
        (folder / "here").mkdir()
        monkeypatch.chdir(folder / "here")
        yield running


def set_endpoint(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def add(server: Hub, name: str, model: Path | None, others=(), revision: str = "main") -> Path:
    """A revision of a repository, with the files of a model and `others`, whose content is their
    name."""
    folder = server.folder / name / revision
    folder.mkdir(parents=True)
    if model is not None:
        shutil.copytree(model, folder, dirs_exist_ok=True)
    for other in (*others, ".gitattributes"):
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_text(other)
    return folder


def commit_of(name: str, revision: str) -> str:
    """The commit that a branch stands for."""
    return hashlib.sha1(f"{name}@{revision}".encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def log_message(self, format, *args):
        self.server.requests.append(f"{self.command} {self.path}")

    def do_GET(self):
        path = unquote(urlsplit(self.path).path).strip("/").split("/")
        api = path[:2] == ["api", "models"]
        organisation, repository, route, revision, *rest = [*(path[2:] if api else path), "", ""]
        name = f"{organisation}/{repository}"
        if (refusal := self._refusal(name, route)) is not None:
            return self._send(*refusal)
        names = [each.name for each in (self.server.folder / name).iterdir()]
        found = [each for each in names if revision in (each, commit_of(name, each))]
        if not found:
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        commit, folder = commit_of(name, found[0]), self.server.folder / name / found[0]
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        if route == "revision":
            siblings = [{"rfilename": file.relative_to(folder).as_posix()} for file in files]
            return self._send(200, {}, {"id": name, "sha": commit, "siblings": siblings})
        if route == "tree":
            entries = [
                {
                    "type": "file",
                    "path": file.relative_to(folder).as_posix(),
                    "size": file.stat().st_size,
                    "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
                }
                for file in files
            ]
            return self._send(200, {}, entries)
        content = (folder / "/".join(filter(None, rest))).read_bytes()
        etag = hashlib.sha1(content).hexdigest()
        return self._send(200, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}, content)

    do_HEAD = do_GET

    def _refusal(self, name: str, route: str) -> tuple[int, dict[str, str]] | None:
        """Status and headers of the answer to a request that is refused, as the Hub sends them."""
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.server.status is not None:
            return self.server.status, {}
        if given and given != TOKEN:
            return 401, {"X-Error-Message": "Invalid credentials in Authorization header"}
        if name in self.server.gated and route == "resolve":
            return 403 if given else 401, {"X-Error-Code": "GatedRepo"}
        private = name in self.server.private and given != TOKEN
        if private or not (self.server.folder / name).is_dir():
            return 404 if given else 401, {"X-Error-Code": "RepoNotFound"}
        return None

    def _send(self, status: int, headers: dict[str, str], content: object = b"") -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
