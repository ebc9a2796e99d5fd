"""Device memory that other processes can open, through the HIP runtime (hip-python, loaded on first use)."""

from __future__ import annotations

import ctypes
from typing import Any

from rlkernel.errors import DeviceError, RlkernelError

IPC_HANDLE_BYTES = 64
_PEER_ACCESS_WHERE_NEEDED = 1  # hipIpcMemLazyEnablePeerAccess


class HipRuntime:
    """Calls of the HIP runtime as plain integers and bytes. Addresses are those of this process.

    Raises:
        RlkernelError: hip-python is not installed, or there is no libamdhip64.so that it can load.
        DeviceError: from every method whose call fails.
    """

    def __init__(self) -> None:
        try:
            from hip import hip
        except ImportError as error:
            raise RlkernelError("HIP memory needs hip-python: pip install -e '.[rocm]'") from error
        self._hip: Any = hip
        self._pointers: dict[int, Any] = {}
        try:
            self.device_count()
        except RuntimeError as error:  # hip-python's own, where it finds no library
            raise RlkernelError(f"the HIP runtime cannot be used: {error}") from error

    def _call(self, name: str, *arguments: Any) -> Any:
        found = getattr(self._hip, name)(*arguments)
        code, values = (found[0], found[1:]) if isinstance(found, tuple) else (found, ())
        if code != self._hip.hipError_t.hipSuccess:
            raise DeviceError(name, code.name if hasattr(code, "name") else str(code))
        return values[0] if values else None

    def device_count(self) -> int:
        """How many devices this process sees."""
        try:
            return int(self._call("hipGetDeviceCount"))
        except DeviceError as error:
            if error.name == "hipErrorNoDevice":
                return 0
            raise

    def identity(self, ordinal: int) -> str:
        """What names a device in every process: its UUID in hex, or its PCI bus id where the runtime has no UUID."""
        uuid = bytes(self._call("hipDeviceGetUuid", ordinal).bytes)
        if any(uuid):
            return uuid.hex()
        return bytes(self._call("hipDeviceGetPCIBusId", 64, ordinal)).split(b"\0")[0].decode()

    def use(self, ordinal: int) -> None:
        """Make a device this thread's current one."""
        self._call("hipSetDevice", ordinal)

    def allocate(self, size: int) -> int:
        """Memory on the current device, in bytes; its address."""
        pointer = self._call("hipMalloc", size)
        address = int(pointer)
        self._pointers[address] = pointer
        return address

    def free(self, address: int) -> None:
        """Give back what :meth:`allocate` returned."""
        self._call("hipFree", self._pointers.pop(address))

    def export(self, address: int) -> bytes:
        """The handle by which another process opens an allocation."""
        return bytes(self._call("hipIpcGetMemHandle", self._pointers[address]).reserved)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation on the current device; its address here."""
        content = ctypes.create_string_buffer(handle, IPC_HANDLE_BYTES)
        wrapped = self._hip.hipIpcMemHandle_t.fromObj(ctypes.addressof(content))
        pointer = self._call("hipIpcOpenMemHandle", wrapped, _PEER_ACCESS_WHERE_NEEDED)
        address = int(pointer)
        self._pointers[address] = pointer
        return address

    def unmap(self, address: int) -> None:
        """Undo :meth:`open`."""
        self._call("hipIpcCloseMemHandle", self._pointers.pop(address))

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy bytes between any two places, behind what torch's default stream does; see :meth:`synchronise`."""
        self._call("hipMemcpy", target, source, size, self._hip.hipMemcpyKind.hipMemcpyDefault)

    def synchronise(self) -> None:
        """Wait until every copy is done."""
        self._call("hipDeviceSynchronize")
