"""The embedded rollout engine: continuous batching over a paged KV cache, with any model that keeps its protocol."""

from vime.rollout.native.config import EngineConfig, default_num_blocks
from vime.rollout.native.engine import EngineProgress, NativeEngine
from vime.rollout.native.model import BatchState, EngineModel, KVShape, PagedKV

__all__ = [
    "BatchState",
    "EngineConfig",
    "EngineModel",
    "EngineProgress",
    "KVShape",
    "NativeEngine",
    "PagedKV",
    "default_num_blocks",
]
