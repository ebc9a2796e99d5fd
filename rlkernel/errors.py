"""The exceptions of rlkernel. Each message names the value, the place and what would be accepted."""


class RlkernelError(Exception):
    """Base of every error that rlkernel raises on purpose."""


class ContractError(RlkernelError):
    """A contract cannot be built, read or kept: an unknown field, an impossible leaf plan, a missing claim."""


class NumericsError(RlkernelError):
    """The machine or an implementation does not compute what the contract says."""


class ModelError(RlkernelError):
    """A checkpoint, configuration or tokenizer that cannot be loaded, or does not fit."""
