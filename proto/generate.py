"""Writes the code of kvstore.proto beside it: `python -m kvstore.proto.generate`, from the root of a checkout.

protoc gives the messages, their types and the stubs; the types of the stubs it does not give, so they are written here
from the same description of the service.
"""

import sys
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet, MethodDescriptorProto, ServiceDescriptorProto

PROTO = "kvstore/proto/kvstore.proto"  # as compiled, so that the generated imports are those that users write
GENERATED = ("kvstore_pb2.py", "kvstore_pb2.pyi", "kvstore_pb2_grpc.py", "kvstore_pb2_grpc.pyi")


def generate(root: Path, out: Path) -> None:
    """Compile `root`/kvstore/proto/kvstore.proto into `out`/kvstore/proto. Raises RuntimeError with protoc's status."""
    from grpc_tools import protoc

    (out / "kvstore/proto").mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile() as description:
        outputs = [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}", f"--descriptor_set_out={description.name}"]
        status = protoc.main(["protoc", f"-I{root}", *outputs, PROTO])
        if status != 0:
            raise RuntimeError(f"protoc ended with status {status}; its messages are above")
        service = FileDescriptorSet.FromString(Path(description.name).read_bytes()).file[0].service[0]
    (out / "kvstore/proto/kvstore_pb2_grpc.pyi").write_text(stub_types(service))


def stub_types(service: ServiceDescriptorProto) -> str:
    """The .pyi of the generated stubs: the client's calls, and the servicer that a grpc.aio server takes."""
    name = service.name
    lines = [
        "# ruff: noqa",
        "from collections.abc import AsyncIterator, Awaitable",
        "from typing import Any",
        "",
        "import grpc",
        "import grpc.aio",
        "from kvstore.proto import kvstore_pb2",
        "",
        f"class {name}Stub:",
        "    def __init__(self, channel: grpc.Channel) -> None: ...",
        *(f"    {method.name}: {_callable(method, 'grpc')}" for method in service.method),
        "",
        f"class {name}AsyncStub:",
        "    def __init__(self, channel: grpc.aio.Channel) -> None: ...",
        *(f"    {method.name}: {_callable(method, 'grpc.aio')}" for method in service.method),
        "",
        f"class {name}Servicer:",
        *(f"    {_handler(method)}" for method in service.method),
        "",
        f"def add_{name}Servicer_to_server(servicer: {name}Servicer, server: grpc.Server | grpc.aio.Server) -> None: ...",
        "",
    ]
    return "\n".join(lines)


def _callable(method: MethodDescriptorProto, package: str) -> str:
    shape = {(False, False): "UnaryUnary", (False, True): "UnaryStream", (True, False): "StreamUnary", (True, True): "StreamStream"}
    kind = shape[method.client_streaming, method.server_streaming]
    return f"{package}.{kind}MultiCallable[{_type(method.input_type)}, {_type(method.output_type)}]"


def _handler(method: MethodDescriptorProto) -> str:
    request, reply = _type(method.input_type), _type(method.output_type)
    takes = f"request_iterator: AsyncIterator[{request}]" if method.client_streaming else f"request: {request}"
    gives = f"AsyncIterator[{reply}] | Awaitable[None]" if method.server_streaming else f"Awaitable[{reply}]"
    return f"def {method.name}(self, {takes}, context: grpc.aio.ServicerContext[Any, Any]) -> {gives}: ..."


def _type(message: str) -> str:
    return f"kvstore_pb2.{message.rpartition('.')[2]}"


if __name__ == "__main__":
    here = Path.cwd()
    if not (here / PROTO).exists():
        sys.exit(f"{PROTO} is not under {here}: run this from the root of a checkout")
    generate(here, here)
