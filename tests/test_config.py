"""The settings tree and its three sources."""

import argparse
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.config import GIB, KIB, MIB, Settings, add_flags, default_listen, format_bytes, load, parse_bytes
from kvstore.errors import ConfigError


def _flags(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(words)


def _file(folder: Path, text: str) -> Path:
    (folder / "kvstore.toml").write_text(text)
    return folder / "kvstore.toml"


def test_without_sources_the_defaults_hold() -> None:
    settings = load(env={})
    assert settings == Settings(listen=default_listen({}))
    assert (settings.dram.bytes, settings.nvme.path, settings.nvme.write, settings.session.silence_s) == (2 * GIB, "", "through", 30.0)


def test_one_setting_has_one_value_from_each_source(tmp_path: Path) -> None:
    file = _file(tmp_path, '[dram]\nbytes = "1GiB"\n')
    env = {"KVSTORE_DRAM_BYTES": "2GiB"}
    assert load(env={}, file=file).dram.bytes == GIB
    assert load(env=env, file=file).dram.bytes == 2 * GIB
    assert load(_flags("--dram-bytes", "3GiB"), env, file).dram.bytes == 3 * GIB


def test_all_kinds_of_values_are_read_from_a_file(tmp_path: Path) -> None:
    text = 'verify = "read"\nacquire_timeout_s = 2\n[dram]\nbytes = 8388608\nprefault = false\n'
    text += "[session]\nsilence_s = 1.5\nmax_sessions = 7\n"
    settings = load(env={}, file=_file(tmp_path, text))
    assert (settings.verify, settings.acquire_timeout_s, settings.dram.bytes, settings.dram.prefault) == ("read", 2.0, 8 * MIB, False)
    assert (settings.session.silence_s, settings.session.max_sessions) == (1.5, 7)
    assert isinstance(settings.acquire_timeout_s, float)


def test_all_kinds_of_values_are_read_from_flags() -> None:
    words = ["--no-dram-prefault", "--nvme", "/data", "--dram", "1.5GiB", "--session-silence-s", "2.5", "--nvme-queue-depth", "4"]
    settings = load(_flags(*words), env={})
    assert (settings.dram.prefault, settings.nvme.path, settings.dram.bytes) == (False, "/data", 1536 * MIB)
    assert (settings.session.silence_s, settings.nvme.queue_depth) == (2.5, 4)


def test_all_kinds_of_values_are_read_from_the_environment() -> None:
    env = {"KVSTORE_DRAM_HUGE_PAGES": "no", "KVSTORE_NVME_WRITE": "on_evict", "KVSTORE_SHUTDOWN_S": "0", "KVSTORE_INDEX_BLOCKS": "9"}
    settings = load(env=env)
    assert (settings.dram.huge_pages, settings.nvme.write, settings.shutdown_s, settings.index.blocks) == (False, "on_evict", 0.0, 9)


def test_the_file_is_found_by_flag_or_environment(tmp_path: Path) -> None:
    file = _file(tmp_path, 'verify = "read"')
    assert load(_flags("--config", str(file)), env={}).verify == "read"
    assert load(env={"KVSTORE_CONFIG": str(file), "KVSTORE_API_KEY": "a worker's key, no setting"}).verify == "read"


SERVICE_LINKS = {
    "KVSTORE_SERVICE_HOST": "10.0.0.11",
    "KVSTORE_SERVICE_PORT": "9464",
    "KVSTORE_SERVICE_PORT_METRICS": "9464",
    "KVSTORE_PORT": "tcp://10.0.0.11:9464",
    "KVSTORE_PORT_9464_TCP": "tcp://10.0.0.11:9464",
    "KVSTORE_PORT_9464_TCP_PROTO": "tcp",
    "KVSTORE_PORT_9464_TCP_PORT": "9464",
    "KVSTORE_PORT_9464_TCP_ADDR": "10.0.0.11",
}


def test_what_kubernetes_says_of_a_service_called_kvstore_is_no_setting() -> None:
    assert load(env=SERVICE_LINKS | {"KVSTORE_DRAM_BYTES": "4GiB"}).dram.bytes == 4 * GIB
    with pytest.raises(ConfigError, match="KVSTORE_DRAM_BYTE: no such setting"):
        load(env=SERVICE_LINKS | {"KVSTORE_DRAM_BYTE": "4GiB"})
    other = {name.replace("KVSTORE_", "KVSTORE_METRICS_"): value for name, value in SERVICE_LINKS.items()}
    assert load(env=other).dram.bytes == load(env={}).dram.bytes
    with pytest.raises(ConfigError, match="KVSTORE_PORT: no such setting"):
        load(env=other | {"KVSTORE_PORT": "9464"})
    for name in ("KVSTORE_PORT", "KVSTORE_SERVICE_PORT"):  # alone it is somebody's mistake
        with pytest.raises(ConfigError, match=f"{name}: no such setting"):
            load(env={name: "9464"})


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"KVSTORE_DRAM_BYTE": "1GiB"}, "environment KVSTORE_DRAM_BYTE: no such setting; did you mean KVSTORE_DRAM_BYTES?"),
        ({"KVSTORE_DRAM_BYTES": "much"}, "environment KVSTORE_DRAM_BYTES: dram.bytes: 'much' is no size"),
        ({"KVSTORE_DRAM_BYTES": "1KiB"}, "give 1.0 MiB to"),
        ({"KVSTORE_DRAM_PREFAULT": "perhaps"}, "neither yes nor no"),
        ({"KVSTORE_NVME_WRITE": "never"}, "give one of through, on_evict, off"),
        ({"KVSTORE_NVME_THREADS": "two"}, "no whole number"),
        ({"KVSTORE_NVME_THREADS": "0"}, "give 1 to 64"),
        ({"KVSTORE_SESSION_SILENCE_S": "nan"}, "session.silence_s is nan"),
        ({"KVSTORE_SESSION_SILENCE_S": "inf"}, "session.silence_s is inf"),
        ({"KVSTORE_SHUTDOWN_S": "-1"}, "shutdown_s is -1"),
        ({"KVSTORE_SHUTDOWN_S": "soon"}, "shutdown_s"),
        ({"KVSTORE_TCP": "localhost"}, "write host:port"),
        ({"KVSTORE_METRICS": "localhost:99999"}, "write host:port"),
        ({"KVSTORE_LISTEN": "/" + "x" * 200}, "choose another"),
        ({"KVSTORE_LISTEN": ""}, "listen is empty; give the path of a socket"),
        ({"KVSTORE_DRAM_EXTENT_BYTES": "64GiB"}, "more than dram.bytes"),
        ({"KVSTORE_DRAM_EXTENT_BYTES": "100"}, "dram.extent_bytes is 100; give 2.0 MiB to 4096.0 PiB, or 0"),
        ({"KVSTORE_DRAM_EXTENT_BYTES": "4096"}, "give 2.0 MiB to"),
        ({"KVSTORE_DRAM_EXTENT_BYTES": "2097153"}, "give a multiple of 4096 bytes"),
    ],
)
def test_a_wrong_value_names_its_source_and_remedy(env: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(env=env)
    assert said in str(caught.value)


def test_the_smallest_extent_may_be_given_and_so_may_the_choice_by_size() -> None:
    assert load(env={"KVSTORE_DRAM_EXTENT_BYTES": "2MiB"}).dram.extent_bytes == 2 * MIB
    assert load(env={"KVSTORE_DRAM_EXTENT_BYTES": "0"}).dram.extent_bytes == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[dram]\nbyte = 1", "dram.byte: no such setting; did you mean dram.bytes?"),
        ("[drum]\nbytes = 1", "did you mean dram.bytes?"),
        ("dram = 1", "dram: no such setting"),
        ("listen = 1", "wrong type"),
        ("[nvme]\nthreads = true", "wrong type"),
        ("[nvme]\nthreads = [2]", "wrong type"),
        ("[dram]\nprefault = 3", "neither yes nor no"),
        ("[dram", "write TOML"),
    ],
)
def test_a_wrong_file_is_named_with_its_fault(text: str, said: str, tmp_path: Path) -> None:
    file = _file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(env={}, file=file)
    assert said in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="check the path"):
        load(env={}, file=tmp_path / "none.toml")


def test_a_wrong_flag_is_named() -> None:
    with pytest.raises(ConfigError, match="flag --nvme-queue-depth"):
        load(_flags("--nvme-queue-depth", "5000"), env={})


def test_the_socket_lies_in_the_users_runtime_directory(tmp_path: Path) -> None:
    assert default_listen({"XDG_RUNTIME_DIR": str(tmp_path)}) == str(tmp_path / "kvstore" / "kvstore.sock")
    assert default_listen({"XDG_RUNTIME_DIR": str(tmp_path / "gone")}).startswith("/tmp/kvstore-")
    assert load(env={"XDG_RUNTIME_DIR": str(tmp_path)}).listen.startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("0", 0), ("4096", 4096), ("8GiB", 8 * GIB), ("512 mib", 512 * MIB), ("1.5KiB", 1536), ("8GB", 8 * 10**9), ("1TiB", 2**40)],
)
def test_sizes_are_read_in_binary_and_decimal_units(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "8G", "GiB", "-1", "1e9", "0.3KiB", "9999PiB", "8GiBs", "8,5GiB", "½GiB", "٣GiB", "1" * 5000])
def test_sizes_that_are_not_clear_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


@given(st.integers(0, 2**62))
def test_a_shown_size_is_near_the_size(size_bytes: int) -> None:
    shown = format_bytes(size_bytes).removesuffix(" B").replace(" ", "")
    number, _, _ = shown.partition("iB")
    scale = {"K": 1, "M": 2, "G": 3, "T": 4, "P": 5}.get(number[-1:], 0)
    assert float(number.rstrip("KMGTP")) * KIB**scale == pytest.approx(size_bytes, rel=0.051)


def test_every_setting_has_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _flags("--help")
    text = " ".join(capsys.readouterr().out.split())
    for words in ("--dram SIZE, --dram-bytes SIZE", "the arena in host memory (default 2.0 GiB)", "--nvme-write through|on_evict|off"):
        assert words in text


def test_the_compose_file_sets_settings_that_exist() -> None:
    text = (Path(__file__).resolve().parent.parent / "docker-compose.yml").read_text()
    env = dict(re.findall(r"^ +(KVSTORE_\w+): (\S+)$", text, re.MULTILINE))
    settings = load(env=env)
    arena_mib = int(re.findall(r"o: size=(\d+)m", text)[0])
    assert settings.dram.bytes < arena_mib * MIB
    assert {settings.dram.dir, settings.nvme.path} <= set(re.findall(r"^ +- \w+:(/\S+)$", text, re.MULTILINE))
    assert f"{settings.metrics.rpartition(':')[2]}/metrics" in text
