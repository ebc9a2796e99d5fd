"""A function of every region, forward and backward, gets what its signature says, and is compared as it should be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlkernel.contract.build import build_contract
from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.presets import PRESETS
from rlkernel.verify.admission.bits import compare
from rlkernel.verify.admission.conduct import Misconduct
from rlkernel.verify.admission.execute import Executor, reference_operation
from rlkernel.verify.admission.generate import problems_of
from rlkernel.verify.admission.user import GRADIENTS, SIGNATURES, UserOp
from tests.verify import own_kernels

CONTRACT = build_contract(PRESETS["tiny-qwen3"])
EXECUTOR = Executor(CONTRACT, Workers(1))
CASES = [
    *((region, "trainer_forward", name) for region, name in own_kernels.FORWARD.items()),
    *((region, "trainer_backward", name) for region, name in own_kernels.BACKWARD.items()),
]


def operation(function, region, case, library="numpy"):
    return UserOp(f"tests.verify.own_kernels:{function.__name__}", function, region, case, "float32", library, "cpu")


def test_there_is_a_function_for_every_signature():
    assert set(own_kernels.FORWARD) == set(SIGNATURES) and set(own_kernels.BACKWARD) == set(GRADIENTS)


@pytest.mark.parametrize(("region", "case", "name"), CASES)
def test_a_right_function_has_the_contract_s_bits_and_a_flipped_one_has_not(region, case, name):
    function = getattr(own_kernels, name)

    def flipped(*arguments):
        found = function(*arguments)
        first = found[0] if isinstance(found, tuple) else found
        first.reshape(-1).view(np.uint32)[:1] ^= 1
        return found

    problem = problems_of(CONTRACT, region, case)[0]
    right, wrong = (EXECUTOR.run(operation(each, region, case), problem, case) for each in (function, flipped))
    want = EXECUTOR.run(reference_operation(CONTRACT, region), problem, case)
    if region == "logprob" and case == "trainer_forward":
        want = {"logprob": want["logprob"]}  # all that a function gives of the head
    compared, difference = compare(want, right)
    assert compared > 0 and difference is None, difference
    assert compare(want, wrong)[1] is not None


def test_a_function_gets_gaps_in_memory_where_the_inputs_have_some():
    seen = []

    def add(stream, branch):
        seen.append((stream.is_contiguous(), stream.stride()))
        return stream + branch

    problem = problems_of(CONTRACT, "residual_add", "trainer_forward")[0]
    wide = [np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan, np.float32) for x in problem.inputs]
    for target, x in zip(wide, problem.inputs, strict=True):
        target[:, ::2] = x
    views = replace(problem, inputs=tuple(x[:, ::2] for x in wide))
    op = operation(add, "residual_add", "trainer_forward", "torch")
    want = EXECUTOR.run(op, problem, "trainer_forward")
    assert compare(want, EXECUTOR.run(op, views, "trainer_forward"))[1] is None
    width = problem.inputs[0].shape[1]
    assert seen == [(True, (width, 1)), (False, (2 * width, 2))]


def test_a_function_gets_memory_of_its_own():
    def add_in_place(stream, branch):
        stream += branch
        return stream

    problem = problems_of(CONTRACT, "residual_add", "trainer_forward")[0]
    before = problem.inputs[0].copy()
    with pytest.raises(Misconduct, match="it writes to its argument 1"):
        EXECUTOR.run(operation(add_in_place, "residual_add", "trainer_forward", "torch"), problem, "trainer_forward")
    assert np.array_equal(before.view(np.uint32), problem.inputs[0].view(np.uint32))


def test_a_function_runs_on_as_many_threads_as_the_user_has():
    seen = []

    def add(stream, branch):
        seen.append(torch.get_num_threads())
        return stream + branch

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        op = operation(add, "residual_add", "trainer_forward", "torch")
        torch.set_num_threads(1)
        EXECUTOR.run(op, problems_of(CONTRACT, "residual_add", "trainer_forward")[0], "trainer_forward")
        assert seen == [3] and torch.get_num_threads() == 1 and dict(op.toolchain)["threads"] == "3"
    finally:
        torch.set_num_threads(before)


def test_a_function_that_refuses_views_refuses_nothing_else():
    def picky(stream, branch):
        raise ValueError("no")

    op = operation(picky, "residual_add", "trainer_forward", "torch")
    problem = problems_of(CONTRACT, "residual_add", "trainer_forward")[0]
    with pytest.raises(ValueError, match="no"):
        EXECUTOR.run(op, problem, "trainer_forward")
    views = replace(problem, inputs=tuple(np.repeat(x, 2, axis=1)[:, ::2] for x in problem.inputs))
    with pytest.raises(ContractError, match="inputs that are not contiguous are refused: no"):
        EXECUTOR.run(op, views, "trainer_forward")
