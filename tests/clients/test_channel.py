"""Where a client looks for the daemon: the same words mean the same socket to both, whatever the form."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore import config
from kvstore.clients.channel import target
from kvstore.clients.client import KVClient
from kvstore.errors import ConfigError
from kvstore.testing.daemon import DaemonProcess


@pytest.mark.parametrize("form", ["s.sock", "./s.sock", "{}/s.sock", "unix:{}/s.sock", "unix://{}/s.sock", "unix:s.sock", "~/s.sock"])
def test_a_form_of_a_path_names_one_socket_to_both(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    place = str(tmp_path / "s.sock")
    named = form.format(tmp_path)
    assert target(named) == f"unix:{place}"
    assert config.load(env={"KVSTORE_LISTEN": named}).listen == place
    (tmp_path / "f.toml").write_text(f'listen = "{named}"\n')
    assert config.load(env={"KVSTORE_CONFIG": str(tmp_path / "f.toml")}).listen == place


@pytest.mark.parametrize("address", ["localhost:7070", "127.0.0.1:7070", "[::1]:7070", "dns:///machine:7070"])
def test_an_address_of_a_network_stays_what_it_is(address: str) -> None:
    assert target(address) == address
    with pytest.raises(ConfigError, match="no path of a socket"):
        config.load(env={"KVSTORE_LISTEN": address})


def test_clients_read_the_file_that_the_daemon_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_LISTEN", "")
    file = tmp_path / "kvstore.toml"
    file.write_text(f'listen = "{tmp_path}/file.sock"\n[dram]\nbytes = "64MiB"\n')
    monkeypatch.setenv("KVSTORE_CONFIG", str(file))
    assert target(None) == target("") == f"unix:{tmp_path}/file.sock"
    monkeypatch.setenv("KVSTORE_LISTEN", f"{tmp_path}/set.sock")
    assert target(None) == f"unix:{tmp_path}/set.sock"
    monkeypatch.setenv("KVSTORE_LISTEN", "")
    file.write_text("listen = 3\n")
    with pytest.raises(ConfigError, match="listen"):
        target(None)
    monkeypatch.delenv("KVSTORE_CONFIG")
    assert target(None) == f"unix:{config.default_listen()}"


def test_a_client_takes_a_path_and_a_path_relative_to_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DaemonProcess(tmp_path / "d", nvme=False, dram="16MiB") as daemon:
        place = Path(daemon.address)
        monkeypatch.chdir(place.parent)
        for address in (place, place.name, Path(place.name), f"unix:{place}", os.path.relpath(place)):
            with KVClient(address) as client:
                assert client.stats().epoch
