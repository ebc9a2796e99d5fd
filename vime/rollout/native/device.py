"""Key and value pages on a GPU."""

from __future__ import annotations

import torch

from vime.rollout.native.model import NULL_PAGE, KVShape


class DevicePagedKV:
    """Key and value pages of every layer, [P, page, KVH, D] in the contract's dtype.

    Page 0 is the null page of :class:`vime.rollout.native.model.PagedKV`: it holds ``null``. That is NaN for kernels
    that keep the contract; torch's own multiply what they read there by 0, and need zeros.
    """

    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        null: float = torch.nan,
    ) -> None:
        self.page_size = block_size
        size = (num_blocks + 1, block_size, shape.num_kv_heads, shape.head_dim)
        self._layers = [
            (torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, dtype=dtype, device=device))
            for _ in range(shape.num_layers)
        ]
        for keys, values in self._layers:
            keys[NULL_PAGE] = null
            values[NULL_PAGE] = null

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value pages of a layer."""
        return self._layers[layer]
