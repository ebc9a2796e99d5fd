"""The exceptions of rlkernel. Each message names the value, the place and what would be accepted."""


class RlkernelError(Exception):
    """Base of every error that rlkernel raises on purpose."""


class ContractError(RlkernelError):
    """A contract cannot be built, read or kept: an unknown field, an impossible leaf plan, a missing claim."""


class NumericsError(RlkernelError):
    """The machine or an implementation does not compute what the contract says."""


class ModelError(RlkernelError):
    """A checkpoint, configuration or tokenizer that cannot be loaded, or does not fit."""


class DeviceError(RlkernelError):
    """A call of a device runtime failed; ``name`` is its error code as the runtime writes it."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call} failed: {name}")
        self.call, self.name = call, name

    @property
    def out_of_memory(self) -> bool:
        """Whether room on the device is what was lacking."""
        return self.name in ("hipErrorOutOfMemory", "CUDA_ERROR_OUT_OF_MEMORY")
