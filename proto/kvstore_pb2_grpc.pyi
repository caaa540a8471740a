# ruff: noqa
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc
import grpc.aio
from kvstore.proto import kvstore_pb2

class KVStoreStub:
    def __init__(self, channel: grpc.Channel) -> None: ...
    OpenNamespace: grpc.UnaryUnaryMultiCallable[kvstore_pb2.OpenNamespaceRequest, kvstore_pb2.OpenNamespaceReply]
    JoinGroup: grpc.UnaryUnaryMultiCallable[kvstore_pb2.JoinGroupRequest, kvstore_pb2.JoinGroupReply]
    Attach: grpc.StreamStreamMultiCallable[kvstore_pb2.ClientMessage, kvstore_pb2.ServerMessage]
    Lookup: grpc.UnaryUnaryMultiCallable[kvstore_pb2.LookupRequest, kvstore_pb2.LookupReply]
    Read: grpc.UnaryStreamMultiCallable[kvstore_pb2.ReadRequest, kvstore_pb2.BlockBytes]
    Write: grpc.StreamUnaryMultiCallable[kvstore_pb2.BlockBytes, kvstore_pb2.WriteReply]
    Prefetch: grpc.UnaryUnaryMultiCallable[kvstore_pb2.PrefetchRequest, kvstore_pb2.PrefetchReply]
    Pin: grpc.UnaryUnaryMultiCallable[kvstore_pb2.PinRequest, kvstore_pb2.PinReply]
    Unpin: grpc.UnaryUnaryMultiCallable[kvstore_pb2.PinRequest, kvstore_pb2.PinReply]
    Clear: grpc.UnaryUnaryMultiCallable[kvstore_pb2.ClearRequest, kvstore_pb2.ClearReply]
    Stats: grpc.UnaryUnaryMultiCallable[kvstore_pb2.StatsRequest, kvstore_pb2.StatsReply]
    Watch: grpc.UnaryStreamMultiCallable[kvstore_pb2.WatchRequest, kvstore_pb2.WatchEvent]
    ListNamespaces: grpc.UnaryUnaryMultiCallable[kvstore_pb2.ListNamespacesRequest, kvstore_pb2.ListNamespacesReply]
    Explain: grpc.UnaryUnaryMultiCallable[kvstore_pb2.ExplainRequest, kvstore_pb2.ExplainReply]

class KVStoreAsyncStub:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    OpenNamespace: grpc.aio.UnaryUnaryMultiCallable[kvstore_pb2.OpenNamespaceRequest, kvstore_pb2.OpenNamespaceReply]
    JoinGroup: grpc.aio.UnaryUnaryMultiCallable[kvstore_pb2.JoinGroupRequest, kvstore_pb2.JoinGroupReply]
    Attach: grpc.aio.StreamStreamMultiCallable[kvstore_pb2.ClientMessage, kvstore_pb2.ServerMessage]
    Lookup: grpc.aio.UnaryUnaryMultiCallable[kvstore_pb2.LookupRequest, kvstore_pb2.LookupReply]
    Read: grpc.aio.UnaryStreamMultiCallable[kvstore_pb2.ReadRequest, kvstore_pb2.BlockBytes]
    Write: grpc.aio.StreamUnaryMultiCallable[kvstore_pb2.BlockBytes, kvstore_pb2.WriteReply]
    Prefetch: grpc.aio.UnaryUnaryMultiCallable[kvstore_pb2.PrefetchRequest, kvstore_pb2.PrefetchReply]
    Pin: grpc.aio.UnaryUnaryMultiCallable[kvstore_pb2.PinRequest, kvstore_pb2.PinReply]
    Unpin: grpc.aio.UnaryUnaryMultiCallable[kvstore_pb2.PinRequest, kvstore_pb2.PinReply]
    Clear: grpc.aio.UnaryUnaryMultiCallable[kvstore_pb2.ClearRequest, kvstore_pb2.ClearReply]
    Stats: grpc.aio.UnaryUnaryMultiCallable[kvstore_pb2.StatsRequest, kvstore_pb2.StatsReply]
    Watch: grpc.aio.UnaryStreamMultiCallable[kvstore_pb2.WatchRequest, kvstore_pb2.WatchEvent]
    ListNamespaces: grpc.aio.UnaryUnaryMultiCallable[kvstore_pb2.ListNamespacesRequest, kvstore_pb2.ListNamespacesReply]
    Explain: grpc.aio.UnaryUnaryMultiCallable[kvstore_pb2.ExplainRequest, kvstore_pb2.ExplainReply]

class KVStoreServicer:
    def OpenNamespace(self, request: kvstore_pb2.OpenNamespaceRequest, context: grpc.aio.ServicerContext[Any, Any]) -> Awaitable[kvstore_pb2.OpenNamespaceReply]: ...
    def JoinGroup(self, request: kvstore_pb2.JoinGroupRequest, context: grpc.aio.ServicerContext[Any, Any]) -> Awaitable[kvstore_pb2.JoinGroupReply]: ...
    def Attach(self, request_iterator: AsyncIterator[kvstore_pb2.ClientMessage], context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[kvstore_pb2.ServerMessage] | Awaitable[None]: ...
    def Lookup(self, request: kvstore_pb2.LookupRequest, context: grpc.aio.ServicerContext[Any, Any]) -> Awaitable[kvstore_pb2.LookupReply]: ...
    def Read(self, request: kvstore_pb2.ReadRequest, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[kvstore_pb2.BlockBytes] | Awaitable[None]: ...
    def Write(self, request_iterator: AsyncIterator[kvstore_pb2.BlockBytes], context: grpc.aio.ServicerContext[Any, Any]) -> Awaitable[kvstore_pb2.WriteReply]: ...
    def Prefetch(self, request: kvstore_pb2.PrefetchRequest, context: grpc.aio.ServicerContext[Any, Any]) -> Awaitable[kvstore_pb2.PrefetchReply]: ...
    def Pin(self, request: kvstore_pb2.PinRequest, context: grpc.aio.ServicerContext[Any, Any]) -> Awaitable[kvstore_pb2.PinReply]: ...
    def Unpin(self, request: kvstore_pb2.PinRequest, context: grpc.aio.ServicerContext[Any, Any]) -> Awaitable[kvstore_pb2.PinReply]: ...
    def Clear(self, request: kvstore_pb2.ClearRequest, context: grpc.aio.ServicerContext[Any, Any]) -> Awaitable[kvstore_pb2.ClearReply]: ...
    def Stats(self, request: kvstore_pb2.StatsRequest, context: grpc.aio.ServicerContext[Any, Any]) -> Awaitable[kvstore_pb2.StatsReply]: ...
    def Watch(self, request: kvstore_pb2.WatchRequest, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[kvstore_pb2.WatchEvent] | Awaitable[None]: ...
    def ListNamespaces(self, request: kvstore_pb2.ListNamespacesRequest, context: grpc.aio.ServicerContext[Any, Any]) -> Awaitable[kvstore_pb2.ListNamespacesReply]: ...
    def Explain(self, request: kvstore_pb2.ExplainRequest, context: grpc.aio.ServicerContext[Any, Any]) -> Awaitable[kvstore_pb2.ExplainReply]: ...

def add_KVStoreServicer_to_server(servicer: KVStoreServicer, server: grpc.Server | grpc.aio.Server) -> None: ...
