"""The files of examples/deploy and the Dockerfile agree with each other and with the server."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.deploy import compose, test_router

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "deploy"
IMAGE = "swiftkv-jax:latest"
USER = 10001
HEALTH = "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready')"


def instructions() -> list[tuple[str, str]]:
    """(name, arguments) of each instruction of the Dockerfile."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", lines)
    return [
        (name, rest.strip())
        for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)
    ]


def the(name: str) -> list[str]:
    return [rest for one, rest in instructions() if one == name]


def documents(name: str) -> list[dict]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def pods(name: str) -> list[dict]:
    """Specifications of the pods of a file."""
    found = []
    for document in documents(name):
        group = document["spec"].get("leaderWorkerTemplate", {})
        templates = (
            document["spec"].get("template"),
            *map(group.get, ("leaderTemplate", "workerTemplate")),
        )
        found += [template["spec"] for template in templates if template]
    return found


def test_the_image_is_built_from_files_that_are_there():
    assert len(the("FROM")) == 2 and the("FROM")[0].endswith(" AS build")
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "**"
    for words in map(str.split, the("COPY")):
        if words[0].startswith("--from="):
            assert words[0] == "--from=build"
            continue
        for name in words[:-1]:
            assert (ROOT / name).exists() and f"!{name.removeprefix('./')}" in ignored
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"]} <= set(the("COPY")[0].split())


def test_extras_of_the_image_are_the_project_s():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [value for text in the("ARG") if (value := text.partition("EXTRAS=")[2])]
    extras.append(compose.services()["first"]["build"]["args"]["EXTRAS"])
    assert extras == ["serve,gguf", "serve,gguf,cuda"]
    assert {one for text in extras for one in text.split(",")} <= set(
        project["optional-dependencies"]
    )
    assert '".[${EXTRAS}]"' in the("RUN")[0]


def test_the_versions_of_the_image_are_those_of_the_lock():
    """The expression of the Dockerfile, in Python."""
    (expression,) = re.findall(r"sed -n '(.*?)' requirements.lock", the("RUN")[0])
    assert expression == r"s/^\([A-Za-z0-9._-]*==[^ ;]*\).*/\1/p"
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    found = [m[1] for line in lines if (m := re.match(r"([A-Za-z0-9._-]*==[^ ;]*)", line))]
    names = {one.partition("==")[0] for one in found}
    assert {"jax", "flax", "starlette", "uvicorn", "llguidance"} <= names
    assert all(re.fullmatch(r"[\w.-]+==[\w.!+]+", one) for one in found)


def test_the_image_runs_as_a_user_and_says_whether_it_is_ready():
    assert the("USER") == [str(USER)] and f"--uid {USER} " in the("RUN")[1]
    (check,) = the("HEALTHCHECK")
    assert json.loads(check.partition("CMD ")[2]) == ["python", "-c", HEALTH]
    assert the("EXPOSE") == ["8000"] and the("STOPSIGNAL") == ["SIGTERM"]
    assert json.loads(the("CMD")[0])[:3] == ["swiftkv", "infer", "serve"]


def test_compose_builds_and_uses_the_image():
    for name in ("first", "second"):
        service = compose.services()[name]
        assert service["image"] == IMAGE
        assert (
            FOLDER / service["build"]["context"] / "Dockerfile"
        ).resolve() == ROOT / "Dockerfile"
        assert service["healthcheck"]["test"] == ["CMD", "python", "-c", HEALTH]
        words = service["command"].split()
        timeout = int(words[words.index("--shutdown-timeout") + 1])
        assert int(service["stop_grace_period"].rstrip("s")) > timeout
    (script,) = shlex.split(compose.services()["router"]["command"])[2:]
    assert "--worker-urls http://first:8000 http://second:8000" in script


def test_the_router_that_is_tested_is_the_one_of_the_example():
    """At one version, and with its flags; the test adds names, ports and the size of the cache."""
    assert f"'{compose.router_package()}'" in (ROOT / "Makefile").read_text()
    assert re.fullmatch(r"[\w-]+==[\d.]+", compose.router_package())
    text = (FOLDER / "compose.yaml").read_text()
    for flags in (compose.router_flags(), compose.server_flags()):
        assert " ".join(flags).replace("--", "") and all(flag in text for flag in flags)
    own = {word for word in test_router.SIZES.split() if word.startswith("--")}
    assert not own & {*compose.server_flags(), *compose.router_flags()}
    assert "--policy" in compose.router_flags() and "cache_aware" in compose.router_flags()


@pytest.mark.parametrize("name", ["kubernetes.yaml", "leader-worker-set.yaml"])
def test_pods_use_the_image(name):
    assert pods(name)
    for pod in pods(name):
        (container,) = pod["containers"]
        assert container["image"] == IMAGE
        assert pod["securityContext"]["runAsUser"] == USER
        ports = [port["containerPort"] for port in container.get("ports", [])]
        assert ports in ([8000], []), "the default of --port"
        named = {port["name"] for port in container.get("ports", [])}
        probes = [container[key] for key in container if key.endswith("Probe")]
        assert all(probe["httpGet"]["port"] in named for probe in probes)
        assert {probe["httpGet"]["path"] for probe in probes} <= {"/ready", "/health"}
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        flags = dict(flag.partition("=")[::2] for flag in container["args"])
        most = int(flags["--shutdown-delay"]) + int(flags["--shutdown-timeout"])
        assert pod["terminationGracePeriodSeconds"] > most


@pytest.mark.parametrize(
    "name", ["kubernetes.yaml", "leader-worker-set.yaml", "inference-gateway.yaml"]
)
def test_what_a_file_refers_to_is_in_it_or_named_in_its_head(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    head = text[: text.index("\napiVersion")]
    defined = {(one["kind"], one["metadata"]["name"]) for one in documents(name)}
    referred = set()
    for pod in pods(name):
        for volume in pod["volumes"]:
            referred.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
        for variable in pod["containers"][0]["env"]:
            assert variable["name"] == "SWIFTKV_API_KEY"
            referred.add(("Secret", variable["valueFrom"]["secretKeyRef"]["name"]))
    for document in documents(name):
        for parent in document["spec"].get("parentRefs", ()):
            referred.add((parent["kind"], parent["name"]))
        for rule in document["spec"].get("rules", ()):
            referred |= {(one["kind"], one["name"]) for one in rule["backendRefs"]}
        if kind := document["spec"].get("gatewayClassName"):
            referred.add(("GatewayClass", kind))
    assert referred
    for kind, its_name in referred - defined:
        assert f"{kind} `{its_name}`" in " ".join(head.replace("#", " ").split()), (kind, its_name)


def test_the_gateway_leads_to_the_pods():
    head = (FOLDER / "inference-gateway.yaml").read_text(encoding="utf-8")
    (label,) = re.findall(r"matchLabels\.app=(\S+)", head)
    (deployment,) = [one for one in documents("kubernetes.yaml") if one["kind"] == "Deployment"]
    assert deployment["spec"]["template"]["metadata"]["labels"]["app"] == label
    (release,) = re.findall(r"helm install (\S+)", head)
    route = documents("inference-gateway.yaml")[1]["spec"]
    assert route["rules"][0]["backendRefs"][0]["name"] == release
