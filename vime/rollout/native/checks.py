"""What can be wrong with a request, found before it is queued."""

from __future__ import annotations

import math

from vime.errors import InputError
from vime.rollout.native.config import EngineConfig, blocks_of
from vime.types import NAMESPACES, RolloutRequest


def check_request(request: RolloutRequest, config: EngineConfig, vocab_size: int, has_detokenizer: bool) -> None:
    """Raise InputError naming the sample, the value and what would be accepted."""
    sample, prompt, params = request.sample_id, request.prompt_token_ids, request.params
    where = f"engine {config.engine_id}: sample {sample}"
    if sample.namespace not in NAMESPACES or not 0 <= sample.prompt_index < 1 << 32 or not 0 <= sample.k < 1 << 24:
        raise InputError(
            f"{where}: the sampler's counter holds a namespace of {', '.join(NAMESPACES)}, "
            "a prompt index below 2^32 and k below 2^24"
        )
    if not prompt:
        raise InputError(f"{where}: the prompt has length 0; at least 1 of at most {config.max_position - 1} is needed")
    if len(prompt) >= config.max_position:
        raise InputError(
            f"{where}: the prompt has length {len(prompt)}; the context of {config.max_position} tokens "
            f"leaves room for a prompt of at most {config.max_position - 1}"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise InputError(
            f"{where}: prompt token ids reach from {min(prompt)} to {max(prompt)}; the vocabulary has {vocab_size}"
        )
    if params.max_new_tokens < 1:
        raise InputError(f"{where}: max_new_tokens = {params.max_new_tokens}; at least 1 is needed")
    if not (math.isfinite(params.temperature) and params.temperature > 0):
        raise InputError(f"{where}: temperature = {params.temperature}; a finite number above 0 is needed")
    if params.top_k < 0:
        raise InputError(f"{where}: top_k = {params.top_k}; 0 (off) or more is needed")
    if not 0 < params.top_p <= 1:
        raise InputError(f"{where}: top_p = {params.top_p}; above 0 and at most 1 (off) is needed")
    if any(not 0 <= token < vocab_size for token in params.stop_token_ids):
        raise InputError(f"{where}: stop_token_ids = {params.stop_token_ids}; the vocabulary has {vocab_size}")
    if any(not text for text in params.stop_strings):
        raise InputError(f"{where}: stop_strings holds an empty string, which every text contains")
    if params.stop_strings and not has_detokenizer:
        raise InputError(f"{where}: stop_strings = {params.stop_strings} need an engine with a tokenizer")
    # the KV of the last token is never computed
    longest = min(len(prompt) + params.max_new_tokens, config.max_position) - 1
    needed = blocks_of(longest, config.block_size)
    if needed > config.num_blocks:
        raise InputError(
            f"{where}: prompt ({len(prompt)} tokens) and response (up to {params.max_new_tokens}) need {needed} "
            f"KV blocks of {config.block_size} tokens; the engine has {config.num_blocks}"
        )
