"""The committed code is what kvstore.proto gives, and its types agree with what runs."""

from pathlib import Path

import grpc
import pytest

from kvstore.proto import generate, kvstore_pb2, kvstore_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", generate.GENERATED)
def test_generated_files_are_what_the_proto_gives(tmp_path: Path, name: str) -> None:
    generate.generate(ROOT, tmp_path)
    assert (tmp_path / "kvstore/proto" / name).read_text() == (ROOT / "proto" / name).read_text(), "run python -m kvstore.proto.generate"


def test_a_proto_that_does_not_compile_is_an_error(tmp_path: Path) -> None:
    broken = tmp_path / "kvstore/proto/kvstore.proto"
    broken.parent.mkdir(parents=True)
    broken.write_text('syntax = "proto3"; message Half {')
    with pytest.raises(RuntimeError, match="protoc"):
        generate.generate(tmp_path, tmp_path / "out")


def test_every_call_of_the_service_has_a_stub() -> None:
    with grpc.insecure_channel("unix:/nobody-listens-here") as channel:
        stub = kvstore_pb2_grpc.KVStoreStub(channel)
        methods = [method.name for method in kvstore_pb2.DESCRIPTOR.services_by_name["KVStore"].methods]
        assert "Attach" in methods
        assert all(hasattr(stub, name) for name in methods)
