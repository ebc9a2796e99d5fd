"""Sizes that have to fit: the model's dimensions and the claimed topology, sequences, context and KV cache."""

from __future__ import annotations

from rlkernel.contract.build import build_contract
from rlkernel.contract.claims import Topology
from rlkernel.errors import RlkernelError
from rlkernel.models.config import ModelConfig
from vime.errors import InputError
from vime.pipeline.combinations import Found, check_rules
from vime.pipeline.loading import LoadedPipeline
from vime.pipeline.model import ResolvedModel
from vime.pipeline.problems import Problem
from vime.pipeline.schema import Pipeline


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def longest_sequence(pipeline: Pipeline, config: ModelConfig, longest_prompt: int) -> int:
    """Tokens of the longest sequence that can be generated: prompt and response, at most the context."""
    return min(longest_prompt + pipeline.stages.rollout.sampling.max_new_tokens, config.max_position)


def bytes_per_block(pipeline: Pipeline, config: ModelConfig) -> int:
    """Keys and values of one block over all layers; the CPU holds both dtypes as float32."""
    width = 2 if pipeline.device == "cuda" and pipeline.contract.dtype == "bfloat16" else 4
    values = config.num_layers * config.num_kv_heads * config.head_dim * pipeline.stages.rollout.block_size
    return 2 * values * width


def kv_blocks(pipeline: Pipeline, config: ModelConfig, longest_prompt: int) -> int:
    """Blocks of the KV cache: ``num_blocks``, what fits ``kv_memory_bytes``, or ``max_num_seqs`` longest sequences.

    Raises:
        InputError: the memory holds less than one block beside the null block.
    """
    rollout = pipeline.stages.rollout
    if rollout.num_blocks is not None:
        return rollout.num_blocks
    each = _blocks(longest_sequence(pipeline, config, longest_prompt), rollout.block_size)
    wanted = each * rollout.max_num_seqs
    if rollout.kv_memory_bytes is None:
        return wanted
    # One more block, which is never read, is allocated beside them.
    affordable = rollout.kv_memory_bytes // bytes_per_block(pipeline, config) - 1
    if affordable < 1:
        needed = 2 * bytes_per_block(pipeline, config)
        raise InputError(f"kv_memory_bytes = {rollout.kv_memory_bytes} holds no KV block: at least {needed} are needed")
    return min(wanted, affordable)


def check_model_sizes(loaded: LoadedPipeline, model: ResolvedModel) -> list[Problem]:
    """Claimed degrees against dimensions, token ids and candidates against the vocabulary."""
    config = model.config

    def divides(p: Pipeline) -> Found:
        for name in ("num_heads", "num_kv_heads", "intermediate_size"):
            size, tp = getattr(config, name), p.contract.topology.tp
            if size % tp:
                message = f"{tp} does not divide the model's {name} = {size}: every rank owns whole, equal parts"
                yield "contract.topology.tp", message

    def stops(p: Pipeline) -> Found:
        outside = [t for t in p.stages.rollout.sampling.stop_token_ids if t >= config.vocab_size]
        if outside:
            message = f"{outside} are no tokens: the vocabulary has {config.vocab_size}"
            yield "stages.rollout.sampling.stop_token_ids", message

    def candidates(p: Pipeline) -> Found:
        top_k = p.stages.rollout.sampling.top_k
        if top_k > config.vocab_size:
            message = f"{top_k} candidates of a vocabulary of {config.vocab_size}: nothing would be removed; 0 says so"
            yield "stages.rollout.sampling.top_k", message

    return check_rules(loaded, (divides, stops, candidates))


def check_contract(loaded: LoadedPipeline, config: ModelConfig) -> list[Problem]:
    """Whether a contract can be made at all, of a pipeline with which nothing else is wrong."""
    contract = loaded.pipeline.contract
    try:
        build_contract(
            config,
            profile=contract.profile,
            dtype=contract.dtype,
            topology=Topology(**contract.topology.model_dump()),
            temperature=loaded.pipeline.stages.rollout.sampling.temperature,
        )
    except RlkernelError as error:
        return [loaded.problem("contract", str(error))]
    return []


def check_sequence_sizes(loaded: LoadedPipeline, config: ModelConfig, longest_prompt: int) -> list[Problem]:
    """The longest prompt (0: unknown) and response against context and KV cache."""
    pipeline = loaded.pipeline
    rollout = pipeline.stages.rollout
    new = rollout.sampling.max_new_tokens
    if longest_prompt >= config.max_position:
        message = (
            f"the longest prompt has {longest_prompt} tokens; the model's context of {config.max_position} leaves room "
            f"for at most {config.max_position - 1}"
        )
        return [loaded.problem("data.source", message)]
    if max(longest_prompt, 1) + new > config.max_position:
        message = (
            f"{new} new tokens after the longest prompt ({longest_prompt} tokens) go beyond the model's context of "
            f"{config.max_position}: at most {config.max_position - max(longest_prompt, 1)} are possible"
        )
        return [loaded.problem("stages.rollout.sampling.max_new_tokens", message)]
    if not longest_prompt:
        return []
    needed = _blocks(longest_prompt + new, rollout.block_size)
    key = "stages.rollout.num_blocks" if rollout.num_blocks is not None else "stages.rollout.kv_memory_bytes"
    try:
        have = kv_blocks(pipeline, config, longest_prompt)
    except InputError as error:
        return [loaded.problem(key, str(error))]
    if have < needed:
        message = (
            f"the KV cache has {have} blocks of stages.rollout.block_size = {rollout.block_size} tokens; one sequence "
            f"of {longest_prompt} + {new} tokens (prompt + max_new_tokens) needs {needed}"
        )
        return [loaded.problem(key, message)]
    return []
