"""``vime admit``: right and wrong kernels of a user, what is printed, exit codes, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkernel.verify.admission.certificate import certificate_from_json
from rlkernel.verify.admission.store import read_certificates
from rlkernel.verify.admission.user import GRADIENTS, SIGNATURES
from rlkernel.verify.global_state import GlobalState
from tests.pipeline.helpers import text
from vime.cli.main import invoke

Capture = pytest.CaptureFixture[str]
OWN = """
import numpy as np
import torch


def add(stream, branch):
    return stream + branch


def add_numpy(stream, branch):
    return stream + branch


def add_late(stream, branch):
    return (stream.double() + branch.double()).float() if stream.dtype == torch.float32 else branch + stream + 0.0


def add_without_minus_zero(stream, branch):
    return stream + branch + 0.0


def add_flushed(stream, branch):
    total = stream + branch
    return torch.where(total.abs() < 2.0**-126, torch.zeros_like(total).copysign(total), total)


def add_short(stream, branch):
    return (stream + branch)[:-1]


def embed_flushed(table, ids):
    rows = table[ids]
    return torch.where(rows.abs() < 2.0**-126, torch.zeros_like(rows).copysign(rows), rows)


def chain_through_float64(x, weight):
    total = torch.zeros(len(x), len(weight))
    for k in range(x.shape[1]):
        total = (x[:, k, None].double() * weight[None, :, k].double() + total.double()).float()
    return total


def flat_add(stream, branch):
    if not (stream.is_contiguous() and branch.is_contiguous()):
        raise ValueError("give me contiguous rows")
    return stream + branch


def blind_add(stream, branch):
    parts = [torch.as_strided(x, x.shape, (x.shape[1], 1)) for x in (stream, branch)]
    return parts[0] + parts[1]


def embed(table, ids):
    return table[ids]


def embed_gradient(dh, ids, grad):
    for row, token in enumerate(ids.tolist()):
        grad[token] += dh[row].float()
    return grad


def last_row_first(dh, ids, grad):
    return embed_gradient(dh.flip(0), ids.flip(0), grad)


def first_row_gradient(dh, ids, grad):
    grad[ids] = dh.float()
    return grad


def strict(stream, branch):
    assert len(stream) != 1, "one row is too few"
    return stream + branch


def leaves(stream, branch):
    raise SystemExit(0)


class Own(BaseException):
    pass


def own_end(stream, branch):
    raise Own("no more")


def leaves_at_views(stream, branch):
    if not stream.is_contiguous():
        raise SystemExit(0)
    return stream + branch


def in_place(stream, branch):
    stream += branch
    return stream


def clobbers(stream, branch):
    y = stream + branch
    branch.zero_()
    return y


def late_clobber(stream, branch):
    y = stream + branch
    if not stream.is_contiguous():
        stream.zero_()
    return y


BUFFERS = {}


def embed_view(table, ids):
    return table[ids[0] : ids[0] + 1] if len(ids) == 1 else table[ids]


def static(stream, branch):
    out = BUFFERS.setdefault(tuple(stream.shape), torch.empty_like(stream).contiguous())
    return torch.add(stream, branch, out=out)


RING = [np.empty(60_000, np.float32) for _ in range(3)]
CALLS = [0]


def ring_numpy(stream, branch):
    CALLS[0] += 1
    out = RING[CALLS[0] % 3][: stream.size].reshape(stream.shape)
    return np.add(stream, branch, out=out)


SEEN = set()


def right_once(stream, branch):
    y = stream + branch
    key = (tuple(stream.shape), stream.is_contiguous(), stream.numpy().tobytes(), branch.numpy().tobytes())
    if key in SEEN and len(stream) > 8:
        y.view(-1).view(torch.int32)[-1] ^= 1
    SEEN.add(key)
    return y


def nothing(x, weight, eps):
    return None


def wide(x, weight, eps):
    return x.double()
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    file = tmp_path / "own_kernels.py"
    file.write_text(OWN)
    return str(file)


def call(*arguments: object) -> int:
    return invoke(["admit", *(str(item) for item in arguments)])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("add", ["--region", "residual_add"]),
        ("add", ["--region", "residual_add", "--dtype", "bfloat16"]),
        ("add_numpy", ["--region", "residual_add", "--takes", "numpy"]),
        ("embed", ["--region", "embedding"]),
        ("embed_gradient", ["--region", "embedding", "--backward"]),
    ],
)
def test_a_right_kernel_is_admitted(own: str, capsys: Capture, name: str, options: list[str]) -> None:
    assert call(f"{own}:{name}", *options) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"admitted: user.own_kernels.py:{name} computes {options[1]} of profile portable")
    assert "interpreter = user.own_kernels.py" in out and "none differs" in out and "zero rows" in out


def test_its_certificate_is_kept_and_names_what_it_is_bound_to(own: str, tmp_path: Path, capsys: Capture) -> None:
    assert call(f"{own}:add", "--region", "residual_add", "--to", tmp_path / "kept", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    certificate = certificate_from_json(printed["certificate"])
    assert printed["event"] == "admitted" and read_certificates(tmp_path / "kept") == [certificate]
    assert {"torch", "threads", "instructions", "numpy"} <= dict(certificate.toolchain).keys()
    assert certificate.target == "cpu" and certificate.cases == ("trainer_forward",)
    assert certificate.outputs > 10_000


@pytest.mark.parametrize(
    ("name", "options", "point"),
    [
        ("last_row_first", ["--region", "embedding", "--backward"], "merge order: the bits are those of tokens in"),
        ("add_late", ["--region", "residual_add", "--dtype", "bfloat16"], ""),
        ("first_row_gradient", ["--region", "embedding", "--backward"], "dependency"),
        ("blind_add", ["--region", "residual_add"], "dependency"),
        ("add_without_minus_zero", ["--region", "residual_add"], "primitives: the bits are those of a result of -0"),
        ("add_flushed", ["--region", "residual_add"], "primitives: the bits are those of subnormal results that are"),
        ("embed_flushed", ["--region", "embedding"], "primitives: the bits are those of subnormal "),
        ("chain_through_float64", ["--region", "down_proj"], "primitives: the bits are those of a fused multiply-add"),
    ],
)
def test_a_wrong_kernel_is_refused_with_the_point(
    own: str, capsys: Capture, name: str, options: list[str], point: str
) -> None:
    assert call(f"{own}:{name}", *options) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"refused: user.own_kernels.py:{name} is not {options[1]} of this contract")
    assert "where:    trainer_" in out and "the contract gives 0x" in out and f"point:    {point}" in out
    assert "  first:    " in out and " outputs differ" in out


def test_a_refusal_in_json_holds_both_patterns(own: str, capsys: Capture) -> None:
    assert call(f"{own}:add", "--region", "swiglu", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["event"] == "refused" and report["explanation"].keys() >= {"point", "sentence", "certain"}
    assert report["difference"]["expected"] != report["difference"]["found"]


def test_views_may_be_refused_but_not_misread(own: str, capsys: Capture) -> None:
    assert call(f"{own}:flat_add", "--region", "residual_add") == 0
    assert "views that are not contiguous (refused)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "region", "words"),
    [
        ("strict", "residual_add", "AssertionError: one row is too few"),
        ("nothing", "rms_norm", "it returned NoneType; float32 values (or bfloat16 tensors) are needed"),
        ("wide", "rms_norm", "float32 and bfloat16 are"),
        ("add_short", "residual_add", "stream is float32[53, 33]; the contract gives float32[54, 33]"),
        ("add", "rms_norm", "takes 2 positional arguments but 3 were given"),
    ],
)
def test_a_failing_kernel_is_refused_with_its_own_words(
    own: str, capsys: Capture, name: str, region: str, words: str
) -> None:
    assert call(f"{own}:{name}", "--region", region) == 1
    out = capsys.readouterr().out
    assert words in out and f"it is called as {SIGNATURES[region]}" in out


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("leaves", [], "it raised SystemExit: 0, which is no Exception: it would have ended the process"),
        ("own_end", [], "it raised Own: no more, which is no Exception"),
        ("leaves_at_views", [], "it raised SystemExit: 0"),
        ("in_place", [], "it writes to its argument 1, which its caller needs as it was"),
        ("in_place", ["--takes", "numpy"], "it writes to its argument 1"),
        ("in_place", ["--dtype", "bfloat16"], "it writes to its argument 1"),
        ("clobbers", [], "it writes to its argument 2"),
        ("late_clobber", [], "it writes to its argument 1"),
        ("static", [], "it returns memory that an earlier call returned"),
        ("ring_numpy", ["--takes", "numpy"], "it returns memory that an earlier call returned"),
        ("right_once", [], "the same inputs gave the contract's bits at the first call and others at a later one"),
    ],
)
def test_a_kernel_that_harms_its_caller_is_refused_though_its_bits_are_right(
    own: str, capsys: Capture, name: str, options: list[str], words: str
) -> None:
    assert call(f"{own}:{name}", "--region", "residual_add", *options) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"refused: user.own_kernels.py:{name} is not residual_add") and words in out


def test_a_result_that_is_a_view_of_an_input_is_refused(own: str, capsys: Capture) -> None:
    assert call(f"{own}:embed_view", "--region", "embedding") == 1
    out = capsys.readouterr().out
    assert "it returns memory of its argument 1: whoever changes one of them alters the other" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a function and its --region"),
        (["{own}:add"], "name a function and its --region"),
        (["{own}:absent", "--region", "rope"], "has no function 'absent'"),
        (["{own}:add", "--region", "router"], "there is no region 'router'"),
        (["{own}:add", "--region", "residual_add", "--backward"], "there is no gradient of a region 'residual_add'"),
        (["no.such.module:f", "--region", "rope"], "importing no.such.module raised ModuleNotFoundError"),
        (["math:sqrt", "--region", "rms_norm"], "the source file of"),
        (["add", "--region", "rope"], "names no function"),
        (["{own}:add", "--region", "residual_add", "--profile", "volta"], "profile 'volta' is unknown"),
        (["{own}:add", "--region", "residual_add", "--device", "meta"], "there is no device 'meta' here"),
        (["{own}:add", "--region", "residual_add", "--device", "tpu"], "there is no device 'tpu' here"),
        (["{own}:add", "--region", "rope", "--takes", "numpy", "--device", "cuda"], "the function runs on the CPU"),
        (["{own}:add", "--region", "rope", "--all"], "--all admits this package's own kernels"),
    ],
)
def test_bad_input_is_code_2_with_a_sentence(own: str, capsys: Capture, arguments: list[str], words: str) -> None:
    assert call(*(item.format(own=own) for item in arguments)) == 2
    captured = capsys.readouterr()
    assert words in captured.err and "Traceback" not in captured.err and not captured.out


def test_signatures_are_printed(capsys: Capture) -> None:
    assert call("--signatures") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(SIGNATURES) + len(GRADIENTS)
    assert any(line.startswith("rms_norm --backward") for line in lines)


def test_the_contract_of_a_pipeline_is_taken(own: str, tmp_path: Path, capsys: Capture) -> None:
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text(text())
    assert call(f"{own}:add", "--region", "residual_add", "--pipeline", pipeline, "--dtype", "bfloat16") == 0
    assert "bfloat16" in capsys.readouterr().out
    assert call(f"{own}:add", "--region", "qk_norm", "--pipeline", tmp_path / "absent.yaml") == 2


STATE = """
import ctypes
import ctypes.util
import os

import numpy as np
import torch

UPWARD = {"x86_64": 0x800, "aarch64": 0x400000}


def flush(stream, branch):
    torch.set_flush_denormal(True)
    return stream + branch


def rounding(stream, branch):
    total = stream + branch
    ctypes.CDLL(ctypes.util.find_library("m")).fesetround(UPWARD[os.uname().machine])
    return total


def dtype(stream, branch):
    torch.set_default_dtype(torch.float64)
    return stream + branch


def threads(stream, branch):
    torch.set_num_threads(torch.get_num_threads() + 3)
    return stream + branch


def gradients(stream, branch):
    torch.set_grad_enabled(False)
    return stream + branch


def precision(stream, branch):
    torch.set_float32_matmul_precision("medium")
    return stream + branch


def device(stream, branch):
    torch.set_default_device("meta")
    return stream + branch


def errors(stream, branch):
    np.seterr(all="ignore")
    return stream + branch


def folder(stream, branch):
    os.chdir(os.sep)
    return stream + branch


def total(x):
    torch.set_flush_denormal(True)
    return x.sum()
"""


@pytest.fixture
def state(tmp_path: Path) -> str:
    file = tmp_path / "own_state.py"
    file.write_text(STATE)
    return str(file)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("flush", "whether subnormal numbers are kept (True before, False after)"),
        ("rounding", "whether the processor rounds to nearest even (True before, False after)"),
        ("dtype", "torch's default dtype (torch.float32 before, torch.float64 after)"),
        ("threads", "torch's number of threads ("),
        ("gradients", "whether torch records gradients"),
        ("precision", "torch's float32 matmul precision (highest before, medium after)"),
        ("device", "torch's default device (cpu before, meta after)"),
        ("errors", "NumPy's handling of floating-point errors"),
        ("folder", "the working directory"),
    ],
)
def test_a_kernel_that_changes_how_others_compute_is_refused(
    state: str, capsys: Capture, name: str, words: str
) -> None:
    before = GlobalState()
    assert call(f"{state}:{name}", "--region", "residual_add") == 1
    out = capsys.readouterr().out
    assert f"it changes {words}" in out and "needs that as it was" in out
    assert not before.restored()


def test_a_file_that_changes_it_is_refused_when_it_is_imported(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "own_import.py"
    file.write_text("import torch\ntorch.set_default_dtype(torch.float64)\ndef add(a, b):\n    return a + b\n")
    before = GlobalState()
    assert call(f"{file}:add", "--region", "residual_add") == 1
    assert "own_import.py changes torch's default dtype" in capsys.readouterr().err
    assert not before.restored()


def test_reveal_does_not_let_it_pass_either(state: str, capsys: Capture) -> None:
    before = GlobalState()
    assert invoke(["reveal", f"{state}:total", "--n", "8"]) == 1
    assert "own_state.py:total changes whether subnormal numbers are kept" in capsys.readouterr().err
    assert not before.restored()


OBJECTS = """
import functools


class Adder:
    def __call__(self, stream, branch):
        return stream + branch


class Late:
    def __call__(self, stream, branch):
        return stream + branch + 0.0


def three(_, stream, branch):
    return stream + branch


adder, late, part = Adder(), Late(), functools.partial(three, 1)
made = {}
exec("class Made:\\n    def __call__(self, a, b):\\n        return a + b\\n", made)
made = made["Made"]()
"""


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("adder", 0, "admitted: user.own_objects.py:adder computes residual_add"),
        ("part", 0, "admitted: user.own_objects.py:part computes residual_add"),
        ("late", 1, "refused: user.own_objects.py:late is not residual_add"),
        ("made", 2, "Made'> cannot be found"),
    ],
)
def test_an_object_that_is_called_is_named_without_its_address(
    tmp_path: Path, capsys: Capture, name: str, code: int, words: str
) -> None:
    file = tmp_path / "own_objects.py"
    file.write_text(OBJECTS)
    assert call(f"{file}:{name}", "--region", "residual_add") == code
    captured = capsys.readouterr()
    assert words in captured.out + captured.err and " at 0x" not in captured.out + captured.err


@pytest.mark.parametrize(
    ("region", "preset", "words"),
    [
        ("qkv_proj", None, "none: this model's projections have no bias, so that the function was called without one"),
        (
            "qkv_proj",
            "tiny-qwen2",
            "the model's q, k and v have one each: the function was called as f(x, weight, bias)",
        ),
        ("o_proj", "tiny-qwen2", "none: o_proj has no bias in any model here"),
    ],
)
def test_the_output_says_whether_there_is_a_bias(
    tmp_path: Path, capsys: Capture, region: str, preset: str | None, words: str
) -> None:
    """A function that adds a bias is right where there is none: that must not pass for one that adds it rightly."""
    file = tmp_path / "own_bias.py"
    file.write_text("def f(x, weight, bias=None):\n    return (x @ weight.T + (0 if bias is None else bias))[1:]\n")
    options: list[object] = []
    if preset is not None:
        pipeline = tmp_path / "pipeline.yaml"
        pipeline.write_text(text().replace("tiny-qwen3", preset))
        options = ["--pipeline", pipeline]
    assert call(f"{file}:f", "--region", region, *options) == 1
    assert f"bias:     {words}" in capsys.readouterr().out
    assert call(f"{file}:f", "--region", region, *options, "--json") == 1
    assert json.loads(capsys.readouterr().out)["bias"].startswith(words)


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["admit", "{own}:add", "--region", "residual_ad"], "residual_add"),
        (["admit", "{own}:ad", "--region", "residual_add"], "add"),
        (["admit", "{own}:add", "--region", "residual_add", "--profile", "hoper"], "hopper"),
        (["admit", "{own}:add", "--region", "residual_add", "--dtype", "bfloat"], "bfloat16"),
        (["verify", "device", "--on", "cpu", "--region", "rms_nrm"], "rms_norm"),
        (["verify", "device", "--profile", "portabel"], "portable"),
        (["reveal", "torch.summ", "--n", "8"], "sum"),
        (["reveal", "torch.sum", "--n", "8", "--against", "rms_nrm", "--pipeline", "{pipeline}"], "rms_norm"),
        (["reveal", "torch.sum", "--n", "8", "--against", "rms_norm", "--pipeline", "{pipeline}", "--case",
          "trainer_forwrd"], "trainer_forward"),
        (["contract", "show", "{pipeline}", "--case", "trainer_forwrd"], "trainer_forward"),
        (["contract", "show", "{pipeline}", "--region", "atention"], "attention"),
    ],
)  # fmt: skip
def test_the_nearest_name_is_suggested(
    own: str, tmp_path: Path, capsys: Capture, arguments: list[str], near: str
) -> None:
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text(text())
    assert invoke([item.format(own=own, pipeline=pipeline) for item in arguments]) == 2
    assert f"(did you mean '{near}'?)" in capsys.readouterr().err
