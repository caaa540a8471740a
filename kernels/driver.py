"""The CUDA driver, as far as blocks in GPU memory need it: one protocol, and libcuda behind it. Nothing here decides anything.

Calls make their device's primary context current in the calling thread, so any thread may call; addresses and handles are integers. A
call that fails raises CudaError. Not yet run on a GPU: the tests check structures and names against cuda.h, and the tier against
`kvstore.testing.fake_cuda`, which has the same protocol and checks the driver's rules.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore.errors import ConfigError, Unavailable

IPC_HANDLE_BYTES = 64  # bytes of a CUDA IPC handle: CU_IPC_HANDLE_SIZE
OUT_OF_MEMORY = 2  # status: CUDA_ERROR_OUT_OF_MEMORY
_NOT_READY = 600  # status: CUDA_ERROR_NOT_READY
_MULTIPROCESS_DESCRIPTORS = (102, 103)  # attributes: virtual memory management; handles that are file descriptors
_DESCRIPTOR = 1  # mode: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_READ_WRITE = 3  # mode: CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_NON_BLOCKING = 1  # mode: CU_STREAM_NON_BLOCKING
_SLEEP_UNTIMED = 1 | 2  # mode: CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING
_PORTABLE = 1  # mode: CU_MEMHOSTREGISTER_PORTABLE, pinned for every device
_NO_FLAGS = ctypes.c_ulonglong(0)  # 64 bits wide, unlike what ctypes makes of a plain 0
_LAZY_PEERS = 1  # mode: CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class CudaError(Unavailable):
    """A call of the driver failed: `status` is its CUresult."""

    def __init__(self, call: str, status: int, text: str) -> None:
        super().__init__(f"{call}: {text} (CUDA status {status})")
        self.status = status


@dataclass(frozen=True)
class DeviceFacts:
    """A GPU. `descriptors`: whether its memory can be shared as descriptors."""

    name: str
    total_bytes: int
    free_bytes: int
    granularity_bytes: int
    descriptors: bool


class CudaDriver(Protocol):
    """What the tier, those who import its memory, and promotions call."""

    def devices(self) -> int:
        """How many GPUs this process sees."""

    def uuid(self, device: int) -> str:
        """The same in every process, unlike the number. Makes no context: asking takes no memory there."""

    def facts(self, device: int) -> DeviceFacts:
        """What the driver says of one that is to be used."""

    def create(self, device: int, size_bytes: int) -> int:
        """Memory that can be exported; a handle. Its size is a multiple of the granularity."""

    def release(self, device: int, handle: int) -> None:
        """Give a handle up: the memory goes when nothing maps it any more, in any process."""

    def map(self, device: int, handle: int, size_bytes: int) -> int:
        """An address range backed by a handle's memory, readable and writable by the device."""

    def unmap(self, device: int, address: int, size_bytes: int) -> None:
        """Give such a range back. Nothing may be in flight there."""

    def export_descriptor(self, device: int, handle: int) -> int:
        """A file descriptor for a handle; the caller closes it."""

    def import_descriptor(self, device: int, descriptor: int) -> int:
        """A handle for another process's memory; the descriptor stays the caller's."""

    def allocate(self, device: int, size_bytes: int) -> int:
        """Plain memory; its address."""

    def free(self, device: int, address: int) -> None:
        """Give plain memory back. Nothing may be in flight there, and importers must not use it any more."""

    def export_ipc(self, device: int, address: int) -> bytes:
        """A CUDA IPC handle for plain memory: good while this process lives and has not freed it."""

    def open_ipc(self, device: int, handle: bytes) -> int:
        """Map another process's plain memory."""

    def close_ipc(self, device: int, address: int) -> None:
        """Unmap it."""

    def pin(self, device: int, address: int, size_bytes: int) -> None:
        """Pin host memory, for every device. Must be a multiple of the system's page."""

    def unpin(self, device: int, address: int) -> None:
        """Undo `pin`, by the address it was given."""

    def stream(self, device: int) -> int:
        """A stream of its own, that waits for no other."""

    def close_stream(self, device: int, stream: int) -> None:
        """Destroy a stream; what is queued on it still runs."""

    def event(self, device: int) -> int:
        """An event whose waiter sleeps."""

    def close_event(self, device: int, event: int) -> None:
        """Destroy an event."""

    def copy(self, device: int, stream: int, to: int, of: int, size_bytes: int) -> None:
        """Queue a copy between any two addresses. Source and target must stay, unchanged, until an event after it is done."""

    def record(self, device: int, stream: int, event: int) -> None:
        """Queue the event: it is done when all before it on the stream is."""

    def follow(self, device: int, stream: int, event: int) -> None:
        """What is queued on the stream from now on runs after the event. The calling thread does not wait."""

    def done(self, device: int, event: int) -> bool:
        """Whether what was queued before the event has run."""

    def wait(self, device: int, event: int) -> None:
        """Sleep until it has; other threads of the interpreter run. Raises CudaError for what went wrong there."""


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationFlags(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 2), ("usage", ctypes.c_ushort), ("reserved", ctypes.c_ubyte * 4)]


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    ]


class AccessDescription(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_char * IPC_HANDLE_BYTES)]


class LibCuda:
    """libcuda. Raises ConfigError where there is no driver, or it sees no GPU; the text says what to do."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError(f"no NVIDIA driver ({error}); install it to keep blocks in GPU memory") from error
        status = self._library.cuInit(0)
        if status:
            raise ConfigError(f"the NVIDIA driver does not start: {self._text(status)}; nvidia-smi says more")
        self._contexts: dict[int, ctypes.c_void_p] = {}
        if not self.devices():
            raise ConfigError("the NVIDIA driver sees no GPU; check CUDA_VISIBLE_DEVICES, and that the container was given one")

    def devices(self) -> int:
        """See `CudaDriver`."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def uuid(self, device: int) -> str:
        """See `CudaDriver`."""
        found = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", found, device)
        return bytes(found).hex()

    def facts(self, device: int) -> DeviceFacts:
        """See `CudaDriver`."""
        self._enter(device)
        name = ctypes.create_string_buffer(256)
        free, total, granularity = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuDeviceGetName", name, 256, device)
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        descriptors = all(self._attribute(device, attribute) for attribute in _MULTIPROCESS_DESCRIPTORS)
        if descriptors:
            self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(_properties(device)), 1)
        return DeviceFacts(name.value.decode(), total.value, free.value, granularity.value or 2 << 20, descriptors)

    def create(self, device: int, size_bytes: int) -> int:
        """See `CudaDriver`."""
        size, properties = ctypes.c_size_t(size_bytes), ctypes.byref(_properties(device))
        return self._made(device, "cuMemCreate", ctypes.c_ulonglong(), size, properties, _NO_FLAGS)

    def release(self, device: int, handle: int) -> None:
        """See `CudaDriver`."""
        self._on(device, "cuMemRelease", ctypes.c_ulonglong(handle))

    def map(self, device: int, handle: int, size_bytes: int) -> int:
        """See `CudaDriver`."""
        size, zero = ctypes.c_size_t(size_bytes), _NO_FLAGS
        address = self._made(device, "cuMemAddressReserve", ctypes.c_ulonglong(), size, ctypes.c_size_t(0), zero, zero)
        where = ctypes.c_ulonglong(address)
        mapped = False
        try:
            self._on(device, "cuMemMap", where, size, ctypes.c_size_t(0), ctypes.c_ulonglong(handle), zero)
            mapped = True
            access = AccessDescription(_Location(1, device), _READ_WRITE)
            self._on(device, "cuMemSetAccess", where, size, ctypes.byref(access), ctypes.c_size_t(1))
        except CudaError:
            if mapped:
                self._library.cuMemUnmap(where, size)
            self._library.cuMemAddressFree(where, size)
            raise
        return address

    def unmap(self, device: int, address: int, size_bytes: int) -> None:
        """See `CudaDriver`."""
        where, size = ctypes.c_ulonglong(address), ctypes.c_size_t(size_bytes)
        self._on(device, "cuMemUnmap", where, size)
        self._on(device, "cuMemAddressFree", where, size)

    def export_descriptor(self, device: int, handle: int) -> int:
        """See `CudaDriver`."""
        return self._made(
            device, "cuMemExportToShareableHandle", ctypes.c_int(), ctypes.c_ulonglong(handle), _DESCRIPTOR, _NO_FLAGS
        )

    def import_descriptor(self, device: int, descriptor: int) -> int:
        """See `CudaDriver`."""
        return self._made(device, "cuMemImportFromShareableHandle", ctypes.c_ulonglong(), ctypes.c_void_p(descriptor), _DESCRIPTOR)

    def allocate(self, device: int, size_bytes: int) -> int:
        """See `CudaDriver`."""
        return self._made(device, "cuMemAlloc_v2", ctypes.c_ulonglong(), ctypes.c_size_t(size_bytes))

    def free(self, device: int, address: int) -> None:
        """See `CudaDriver`."""
        self._on(device, "cuMemFree_v2", ctypes.c_ulonglong(address))

    def export_ipc(self, device: int, address: int) -> bytes:
        """See `CudaDriver`."""
        handle = IpcHandle()
        self._on(device, "cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_ulonglong(address))
        return bytes(handle)

    def open_ipc(self, device: int, handle: bytes) -> int:
        """See `CudaDriver`."""
        return self._made(device, "cuIpcOpenMemHandle_v2", ctypes.c_ulonglong(), IpcHandle.from_buffer_copy(handle), _LAZY_PEERS)

    def close_ipc(self, device: int, address: int) -> None:
        """See `CudaDriver`."""
        self._on(device, "cuIpcCloseMemHandle", ctypes.c_ulonglong(address))

    def pin(self, device: int, address: int, size_bytes: int) -> None:
        """See `CudaDriver`."""
        self._on(device, "cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), _PORTABLE)

    def unpin(self, device: int, address: int) -> None:
        """See `CudaDriver`."""
        self._on(device, "cuMemHostUnregister", ctypes.c_void_p(address))

    def stream(self, device: int) -> int:
        """See `CudaDriver`."""
        return self._made(device, "cuStreamCreate", ctypes.c_void_p(), _NON_BLOCKING)

    def close_stream(self, device: int, stream: int) -> None:
        """See `CudaDriver`."""
        self._on(device, "cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def event(self, device: int) -> int:
        """See `CudaDriver`."""
        return self._made(device, "cuEventCreate", ctypes.c_void_p(), _SLEEP_UNTIMED)

    def close_event(self, device: int, event: int) -> None:
        """See `CudaDriver`."""
        self._on(device, "cuEventDestroy_v2", ctypes.c_void_p(event))

    def copy(self, device: int, stream: int, to: int, of: int, size_bytes: int) -> None:
        """See `CudaDriver`."""
        ends = ctypes.c_ulonglong(to), ctypes.c_ulonglong(of), ctypes.c_size_t(size_bytes)
        self._on(device, "cuMemcpyAsync", *ends, ctypes.c_void_p(stream))

    def record(self, device: int, stream: int, event: int) -> None:
        """See `CudaDriver`."""
        self._on(device, "cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def follow(self, device: int, stream: int, event: int) -> None:
        """See `CudaDriver`."""
        self._on(device, "cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), 0)

    def done(self, device: int, event: int) -> bool:
        """See `CudaDriver`."""
        self._enter(device)
        status = self._library.cuEventQuery(ctypes.c_void_p(event))
        if status not in (0, _NOT_READY):
            raise CudaError("cuEventQuery", status, self._text(status))
        return bool(status == 0)

    def wait(self, device: int, event: int) -> None:
        """See `CudaDriver`."""
        self._on(device, "cuEventSynchronize", ctypes.c_void_p(event))

    def _enter(self, device: int) -> None:
        """Make the device's primary context current in this thread; it is kept for the life of the process."""
        context = self._contexts.get(device)
        if context is None:
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[device] = context
        self._call("cuCtxSetCurrent", context)

    def _attribute(self, device: int, attribute: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        return value.value

    def _made(self, device: int, call: str, result: Any, *words: Any) -> int:
        """What a call puts where its first argument points to."""
        self._on(device, call, ctypes.byref(result), *words)
        return int(result.value or 0)

    def _on(self, device: int, call: str, *words: Any) -> None:
        self._enter(device)
        self._call(call, *words)

    def _call(self, call: str, *words: Any) -> None:
        status = getattr(self._library, call)(*words)
        if status:
            raise CudaError(call, status, self._text(status))

    def _text(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(status, ctypes.byref(text))
        return (text.value or b"unknown").decode()


def _properties(device: int) -> AllocationProperties:
    """Memory pinned to one device that can be exported as a descriptor."""
    return AllocationProperties(type=1, handle_types=_DESCRIPTOR, location=_Location(1, device))
