"""Device memory that other processes can open, through the CUDA driver: a dozen calls of libcuda.so.1, by ctypes.

The driver's library is on every machine with a device, whatever toolkit torch was built with; NVIDIA's Python bindings
are tied to the toolkit's version, and would be one more package for these calls.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from rlkernel.errors import DeviceError, RlkernelError

IPC_HANDLE_BYTES = 64
_PEER_ACCESS_WHERE_NEEDED = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Bytes16(ctypes.Structure):
    _fields_ = (("bytes", c_char * 16),)


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", c_char * IPC_HANDLE_BYTES),)


_CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (POINTER(_Bytes16), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemcpy": (c_uint64, c_uint64, c_size_t),
    "cuIpcGetMemHandle": (POINTER(_IpcHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), _IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}
"""Names as the library exports them, and the types of their arguments; all return a CUresult."""


class CudaRuntime:
    """Calls of the CUDA driver as plain integers and bytes; as :class:`hardware.rocm.runtime.HipRuntime`.

    Primary contexts are used, which torch uses too: addresses are those of torch's tensors.

    Raises:
        RlkernelError: there is no libcuda.so.1, or it lacks a call.
        DeviceError: from every method whose call fails.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
            for name, types in _CALLS.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = types, c_int
        except (OSError, AttributeError) as error:
            raise RlkernelError(f"the CUDA driver cannot be used: {error}") from error
        self._contexts: dict[int, c_void_p] = {}
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise DeviceError(name, text.value.decode() if text.value else f"error {code}")

    def device_count(self) -> int:
        """How many devices this process sees."""
        count = c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def _device(self, ordinal: int) -> int:
        device = c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        return device.value

    def identity(self, ordinal: int) -> str:
        """The device's UUID in hex: one name in every process."""
        uuid = _Bytes16()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), self._device(ordinal))
        return ctypes.string_at(ctypes.addressof(uuid), 16).hex()

    def use(self, ordinal: int) -> None:
        """Make a device's primary context this thread's current one."""
        if ordinal not in self._contexts:
            context = c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(ordinal))
            self._contexts[ordinal] = context
        self._call("cuCtxSetCurrent", self._contexts[ordinal])

    def allocate(self, size: int) -> int:
        """Memory on the current device, in bytes; its address."""
        address = c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), size)
        return address.value

    def free(self, address: int) -> None:
        """Give back what :meth:`allocate` returned."""
        self._call("cuMemFree_v2", address)

    def export(self, address: int) -> bytes:
        """The handle by which another process opens an allocation."""
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return ctypes.string_at(ctypes.addressof(handle), IPC_HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation on the current device; its address here."""
        address, wrapped = c_uint64(), _IpcHandle()
        ctypes.memmove(ctypes.addressof(wrapped), handle, IPC_HANDLE_BYTES)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), wrapped, _PEER_ACCESS_WHERE_NEEDED)
        return address.value

    def unmap(self, address: int) -> None:
        """Undo :meth:`open`."""
        self._call("cuIpcCloseMemHandle", address)

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy bytes between any two places, behind what torch's default stream does; see :meth:`synchronise`."""
        self._call("cuMemcpy", target, source, size)

    def synchronise(self) -> None:
        """Wait until every copy is done."""
        self._call("cuCtxSynchronize")
