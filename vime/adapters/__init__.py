"""How engines and trainers of other frameworks join a run: what they provide, tools for it, a suite that proves it."""

from vime.adapters.interface import ENGINE_FACTS, TRAINER_FACTS, EngineAdapter, TrainerAdapter
from vime.adapters.tools import distribution_digests, file_digest, observed_degrees, own_policy, weights_digest

__all__ = [
    "ENGINE_FACTS",
    "TRAINER_FACTS",
    "EngineAdapter",
    "TrainerAdapter",
    "distribution_digests",
    "file_digest",
    "observed_degrees",
    "own_policy",
    "weights_digest",
]
