"""Prepare a tagged commit on GitHub for its release: README.md and pyproject.toml, which PyPI
shows, get the addresses of the repository, another for each fork, README.md installs from PyPI, and
the changes of the version become notes.md."""

import os
import re
import tomllib
from pathlib import Path

FROM_PYPI = {
    "From a clone, on Linux": "On Linux",
    "'.[": "'swiftkv-jax[",
    "All set up a pinned": "These need a clone, and set up a pinned",
}
"""What README.md says of a clone, and of the release."""


def absolute(text: str, root: Path, repository: str, tag: str) -> str:
    """Markdown whose links and images of files in `root` are addresses of the tag. Raises
    `SystemExit` for a file that is not there."""

    def link(match: re.Match[str]) -> str:
        label, target = match.groups()
        if re.match(r"#|https?:", target):
            return match[0]
        if not (root / target.partition("#")[0]).exists():
            raise SystemExit(f"error: {target} is linked and does not exist")
        view = "raw" if label.startswith("!") else "blob"
        return f"{label}({repository}/{view}/{tag}/{target})"

    return re.sub(r"(!\[[^\]]*\]|\])\(([^)\s]+)\)", link, text)


def prepare(root: Path, repository: str, tag: str) -> None:
    """Raises `SystemExit` unless the tag is the version and the changes of it are dated."""
    readme, project = root / "README.md", root / "pyproject.toml"
    version = tomllib.loads(project.read_text())["project"]["version"]
    if tag != f"v{version}":
        raise SystemExit(f"error: the tag is {tag}, the version in pyproject.toml {version}")
    title = rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$"
    changes = re.split(title, (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    if len(changes) != 2:
        raise SystemExit(f"error: CHANGELOG.md has no section '## {version} (YYYY-MM-DD)'")
    notes = absolute(changes[1].split("\n## ")[0].strip(), root, repository, tag)
    joined = re.sub(r"(?<=\S)\n *(?=[^\s-])", " ", notes)  # notes keep their line breaks when shown
    (root / "notes.md").write_text(f"{joined}\n")
    text = absolute(readme.read_text(), root, repository, tag)
    for clone, release in FROM_PYPI.items():
        if clone not in text:
            raise SystemExit(f"error: README.md does not say {clone!r}, which a release replaces")
        text = text.replace(clone, release)
    readme.write_text(text)
    owner, name = repository.split("/")[-2:]
    pages = {
        "Homepage": repository,
        "Documentation": f"https://{owner}.github.io/{name}/",
        "Source": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
    }
    urls = "".join(f'\n{page} = "{address}"' for page, address in pages.items())
    head = "[project.urls]"
    project.write_text(project.read_text().replace(head, head + urls))


if __name__ == "__main__":
    repository = "{GITHUB_SERVER_URL}/{GITHUB_REPOSITORY}".format_map(os.environ)
    prepare(Path.cwd(), repository, os.environ["GITHUB_REF_NAME"])
