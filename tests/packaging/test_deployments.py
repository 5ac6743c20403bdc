"""The Compose file, the Kubernetes manifests and the install script fit the programs and each other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cortex.fleet.catalogue import Catalogue
from cortex.gateway.config import load as load_gateway
from cortex.neuron.config import load as load_neuron
from cortex.settings import loads

PACKAGING = Path(__file__).parents[2] / "packaging"
COMPOSE = PACKAGING / "compose"


def manifests() -> dict[tuple[str, str], Any]:
    """Every Kubernetes object by kind and name."""
    files = sorted((PACKAGING / "kubernetes").glob("*.yaml"))
    found = [each for file in files for each in yaml.safe_load_all(file.read_text())]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def environment(pod: Any) -> dict[str, str]:
    (container,) = pod["containers"]
    return {each["name"]: each.get("value", "a-secret-of-16-or-more") for each in container.get("env", ())}


def test_compose_mounts_only_what_exists_and_keeps_the_state() -> None:
    compose = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    mounts = [mount.split(":") for service in compose["services"].values() for mount in service["volumes"]]
    for source, *_ in mounts:
        assert (COMPOSE / source).exists() if source.startswith(".") else source in compose["volumes"], source
    kept = {tuple(mount[:2]) for mount in mounts}
    assert ("./config", "/etc/cortex") in kept
    assert ("cortex-state", "/var/lib/cortex") in kept
    assert ("neuron-cache", "/var/cache/neuron") in kept


def test_images_of_others_are_named_by_digest() -> None:
    compose = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    images = [service["image"] for service in compose["services"].values() if "build" not in service]
    files = [file.read_text() for file in (PACKAGING / "container").iterdir()]
    for text in files:
        assert re.findall(r"^FROM (\S+)", text, re.M)[0] == "${PYTHON_IMAGE}"
        images += re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", text, re.M)
        stages = {"${PYTHON_IMAGE}", *re.findall(r"^FROM \S+ AS (\S+)", text, re.M)}
        assert set(re.findall(r"^FROM (\S+)", text, re.M)) <= stages
    assert len(images) == 4
    for image in images:
        assert re.fullmatch(r"docker\.io/[a-z/]+:[\w.-]+@sha256:[0-9a-f]{64}", image), image


def test_compose_services_find_each_other() -> None:
    compose = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    config = load_gateway(COMPOSE / "config" / "cortex.toml", {"CORTEX_NODE_KEY": "x"})
    (node,) = config.neurons
    assert node.endpoint == "http://neuron:13131"
    assert f"{config.key_variable(node)}=" in compose["services"]["cortex"]["entrypoint"][2]
    load_neuron(None, compose["services"]["neuron"]["environment"])
    scraped = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())["scrape_configs"]
    targets = [target for job in scraped for group in job["static_configs"] for target in group["targets"]]
    metrics = config.gateway.metrics_listen
    assert metrics is not None
    assert set(targets) == {f"cortex:{metrics.port}", f"neuron:{load_neuron(None, {}).address.port}"}
    assert (
        f"127.0.0.1:{config.gateway.listen.port}:{config.gateway.listen.port}" in compose["services"]["cortex"]["ports"]
    )


def test_compose_declares_every_secret_and_waits_longer_than_a_drain() -> None:
    compose = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    services = compose["services"]
    used = {secret for service in services.values() for secret in service.get("secrets", ())}
    assert used == set(compose["secrets"])
    assert services["neuron"]["environment"]["NEURON_KEY_FILE"].removeprefix("/run/secrets/") in used
    drains = {"cortex": load_gateway(None, {}).gateway.drain_s, "neuron": load_neuron(None, {}).drain_s}
    for name, drain_s in drains.items():
        assert float(services[name]["stop_grace_period"].removesuffix("s")) > drain_s


def test_kubernetes_configuration_is_valid_and_names_the_headless_service(tmp_path: Path) -> None:
    found = manifests()
    files = found["ConfigMap", "cortex"]["data"]
    (tmp_path / "cortex.toml").write_text(files["cortex.toml"])
    gateway = found["Deployment", "cortex"]["spec"]["template"]["spec"]
    config = load_gateway(tmp_path / "cortex.toml", environment(gateway))
    assert loads(Catalogue, files["models.toml"]).models
    service = found["Service", "neurons"]
    assert config.discovery.dns == f"neurons.{service['metadata']['namespace']}.svc.cluster.local"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["ports"][0]["port"] == config.discovery.port
    node = found["DaemonSet", "neuron"]["spec"]["template"]
    assert service["spec"]["selector"].items() <= node["metadata"]["labels"].items()
    assert load_neuron(None, environment(node["spec"])).key_file is not None


@pytest.mark.parametrize(("kind", "name"), [("Deployment", "cortex"), ("DaemonSet", "neuron")])
def test_pods_have_no_service_links_and_mount_what_they_declare(kind: str, name: str) -> None:
    pod = manifests()[kind, name]["spec"]["template"]["spec"]
    assert pod["enableServiceLinks"] is False
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize(("kind", "name"), [("Deployment", "cortex"), ("DaemonSet", "neuron")])
def test_pods_have_the_ports_labels_and_grace_that_services_and_probes_expect(kind: str, name: str) -> None:
    found = manifests()
    assert {each["metadata"]["namespace"] for each in found.values()} == {"cortex"}
    workload = found[kind, name]["spec"]
    labels, pod = workload["template"]["metadata"]["labels"], workload["template"]["spec"]
    assert workload["selector"]["matchLabels"].items() <= labels.items()
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    services = [each["spec"] for (each_kind, _), each in found.items() if each_kind == "Service"]
    (service,) = [each for each in services if each["selector"].items() <= labels.items()]
    for port in service["ports"]:
        assert port["port"] == ports[port["targetPort"]]
    if name == "cortex":
        gateway = load_gateway(None, {}).gateway
        assert gateway.metrics_listen is not None
        assert ports == {"api": gateway.listen.port, "metrics": gateway.metrics_listen.port}
        drain_s = gateway.drain_s
    else:
        node = load_neuron(None, {})
        assert ports == {"api": node.address.port}
        drain_s = node.drain_s
    assert pod["terminationGracePeriodSeconds"] > drain_s
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "api"}


def test_manifests_refer_only_to_the_documented_secret_and_the_configuration_beside_them() -> None:
    documented = (PACKAGING / "kubernetes" / "gateway.yaml").read_text().partition("apiVersion")[0]
    assert "create secret generic cortex " in documented
    given = set(re.findall(r"--from-literal=([\w-]+)=", documented))
    wanted: set[str] = set()
    for (kind, _), each in manifests().items():
        if kind not in ("Deployment", "DaemonSet"):
            continue
        pod = each["spec"]["template"]["spec"]
        references = [
            entry["valueFrom"]["secretKeyRef"] for entry in pod["containers"][0]["env"] if "valueFrom" in entry
        ]
        wanted |= {reference["key"] for reference in references}
        names = {reference["name"] for reference in references}
        for volume in pod["volumes"]:
            if "secret" in volume:
                names.add(volume["secret"]["secretName"])
                wanted |= {item["key"] for item in volume["secret"]["items"]}
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in manifests()
        assert names == {"cortex"}
    assert wanted == given


def install(root: Path, kind: str) -> None:
    subprocess.run([PACKAGING / "install.sh", kind], env={**os.environ, "DESTDIR": str(root)}, check=True)


def test_install_script_installs_what_the_units_need_and_keeps_configuration(tmp_path: Path) -> None:
    for kind in ("gateway", "neuron"):
        install(tmp_path, kind)
    (tmp_path / "etc" / "cortex" / "cortex.toml").write_text("# mine")
    install(tmp_path, "gateway")
    assert (tmp_path / "etc" / "cortex" / "cortex.toml").read_text() == "# mine"
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {
        "etc/cortex/cortex.toml",
        "etc/cortex/models.toml",
        "etc/cortex/neuron.toml",
        "etc/systemd/system/cortex.service",
        "etc/systemd/system/cortex.socket",
        "etc/systemd/system/neuron.service",
        "opt/cortex/docs/operations.md",
        "usr/lib/sysusers.d/cortex.conf",
    }


def test_gateway_makes_the_key_of_the_nodes_and_nodes_use_a_copy(tmp_path: Path) -> None:
    gateway, node = tmp_path / "gateway", tmp_path / "node"

    def prepare(kind: str, directory: Path) -> str:
        command = [str(PACKAGING / "node-key.sh"), kind, str(directory)]
        environment = {**os.environ, "NEURON": f"{sys.executable} -m cortex.cli.neuron"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    prepare("gateway", gateway)
    key = (gateway / "neuron.key").read_text()
    assert (gateway / "cortex.env").read_text() == f"CORTEX_NODE_KEY={key}"
    assert (gateway / "cortex.env").stat().st_mode & 0o077 == 0
    prepare("gateway", gateway)
    assert (gateway / "cortex.env").read_text().count("CORTEX_NODE_KEY") == 1, "it is kept"
    assert "copy it from the gateway's host" in prepare("neuron", node)
    assert not (node / "neuron.key").exists(), "no second key"


def test_socket_has_the_addresses_of_the_example() -> None:
    config = load_gateway(PACKAGING.parent / "examples" / "cortex.toml", {"CORTEX_NODE_KEY": "x", "ELSEWHERE_KEY": "x"})
    addresses = re.findall(r"^ListenStream=(.*)$", (PACKAGING / "systemd" / "cortex.socket").read_text(), re.M)
    assert addresses == [config.gateway.listen, config.gateway.metrics_listen]


def test_install_script_installs_nothing_that_is_not_locked() -> None:
    """As security.md promises. Only torch for CPUs, which another index has, is pinned without a hash."""
    installs = re.findall(r"^ +pip (-.*)$", (PACKAGING / "install.sh").read_text(), re.M)
    assert len(installs) == 3
    assert all(line.startswith(("--require-hashes", "--no-deps")) for line in installs)


def test_image_for_cpus_takes_torch_from_an_index_of_cpu_builds_and_tries_it() -> None:
    """PyPI's builds need CUDA libraries, which this image does not have."""
    text = (PACKAGING / "container" / "Containerfile.neuron").read_text()
    assert "ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu\n" in text
    assert text.count('python -c "import torch"\n') == 2, "an image without a usable torch is not built"


def test_reload_needs_no_program_that_a_minimal_system_lacks() -> None:
    """`/bin/kill` is a package of its own."""
    assert "ExecReload=/bin/sh -c 'kill -HUP $MAINPID'" in (PACKAGING / "systemd" / "cortex.service").read_text()


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="needs systemd-sysusers")
def test_sysusers_file_is_valid(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    file = PACKAGING / "systemd" / "cortex.sysusers"
    done = subprocess.run(
        ["systemd-sysusers", f"--root={tmp_path}", "--dry-run", file], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "neuron" in done.stdout + done.stderr) == (0, True), done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("name", ["cortex", "neuron"])
def test_unit_is_valid(tmp_path: Path, name: str) -> None:
    """Only the program, which is not installed here, is replaced."""
    unit = (PACKAGING / "systemd" / f"{name}.service").read_text()
    copy = tmp_path / f"{name}.service"
    copy.write_text(unit.replace(f"ExecStart=/opt/cortex/bin/{name}", "ExecStart=/bin/true"))
    shutil.copy(PACKAGING / "systemd" / "cortex.socket", tmp_path)
    done = subprocess.run(
        ["systemd-analyze", "verify", *tmp_path.glob(f"{name}.*")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_metrics_are_open_to_other_hosts_only_in_containers_which_publish_ports() -> None:
    metrics = load_gateway(None, {}).gateway.metrics_listen
    assert metrics is not None
    assert metrics.is_loopback
    image = (PACKAGING / "container" / "Containerfile.cortex").read_text()
    assert f"ENV CORTEX_GATEWAY__METRICS_LISTEN=0.0.0.0:{metrics.port}\n" in image


def test_start_limits_in_the_guide_are_those_of_the_units() -> None:
    (row,) = re.findall(r"^\| start limit \|(.*)\|$", (PACKAGING.parent / "docs" / "operations.md").read_text(), re.M)
    limits = []
    for name in ("cortex", "neuron"):
        unit = (PACKAGING / "systemd" / f"{name}.service").read_text()
        found = dict(re.findall(r"^StartLimit(\w+)=(\d+)$", unit, re.M))
        limits.append(f"{found['Burst']} starts in {int(found['IntervalSec']) // 60} minutes")
    assert [cell.strip() for cell in row.split("|")] == limits
