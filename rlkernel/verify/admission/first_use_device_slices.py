"""Small parts of live operands on a device, executed again there by the contract's interpreter, which is torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rlkernel.kernels.cpu.convert import as_float32
from rlkernel.models.definition import Region
from rlkernel.ops.host import RopeTables, TokenBatch
from rlkernel.reference.arith import div, mul, sub
from rlkernel.reference.attention import attend, attend_backward
from rlkernel.reference.head import ReferenceLinearLogprob, scalar, shard_borders, statistics
from rlkernel.reference.lookup import primitive
from rlkernel.reference.primitives import LOG2E
from rlkernel.reference.reductions import matmul
from rlkernel.reference.regions import Interpreter, continued, output, reference_ops, whole_steps
from rlkernel.verify.admission.bits import Results
from rlkernel.verify.admission.first_use_slices import NORMS, PlainNorm

Tensor = torch.Tensor
FEATURES, CORNER, WINDOW = 64, 8, 48
DeviceHost = Any  # of rlkernel.ops.device, which needs Triton


@dataclass(frozen=True)
class Slice:
    """Rows that were executed again, the expected results, and how to cut the same out of a kernel's results."""

    rows: list[int]
    expected: Results
    found: Callable[[Sequence[Tensor]], Results]


class LiveInterpreter(Interpreter):
    """The interpreter on the device, with the weights that the kernels read."""

    def weight(self, host: Any, name: str) -> Tensor:
        """A logical vector or the head, as float32."""
        return values(host.weights.vector(name))


def values(x: Tensor) -> Tensor:
    """The same values as float32, C-contiguous."""
    return x.detach().float().contiguous()


def home(x: Tensor) -> Any:
    """NumPy array of a device tensor: float32, or integers as they are."""
    own = x.detach().cpu().contiguous()
    return as_float32(own) if own.is_floating_point() else own.numpy()


def flat(x: Tensor) -> Tensor:
    """[T, ...] as [T, width]."""
    return x.reshape(len(x), math.prod(x.shape[1:]))


def some(count: int, most: int, device: torch.device) -> Tensor:
    """Indices spread over ``count``, int64, at most ``most``."""
    return torch.from_numpy(np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))).to(device)


def rows_of(count: int) -> list[int]:
    """Rows at both ends (an even and an odd one) and in the middle."""
    return sorted({min(max(row, 0), count - 1) for row in (0, 1, count // 2, count - 2, count - 1)})


def _plain_host(host: DeviceHost, rows: list[int], gradients: Any = None) -> Any:
    """What the interpreter's regions take of a host, for some rows."""
    batch = TokenBatch(
        home(host.batch.tokens[rows]), home(host.batch.positions[rows]), np.array([0, len(rows)], np.int32)
    )
    return SimpleNamespace(
        case=host.case, config=host.config, tp=host.tp, batch=batch, weights=host.weights, state=None,
        rope=RopeTables(home(host.cos), home(host.sin)), gradients=gradients, row_starts=None,
    )  # fmt: skip


def row_slice(interpreter: Interpreter, region: Region, inputs: Sequence[Tensor], host: DeviceHost) -> Slice:
    """Some rows of a region whose rows are independent."""
    rows = rows_of(len(inputs[0]))
    if region.kind == "embedding":
        expected = [home(host.weights.vector(region.weights[0])[inputs[0][rows]])]
    else:
        reference = reference_ops(interpreter)[region.kind]
        expected, _ = reference.forward(region, [home(x[rows]) for x in inputs], _plain_host(host, rows))
    names = [f"output {i}" for i in range(len(expected))]
    return Slice(
        rows,
        dict(zip(names, expected, strict=True)),
        lambda outputs: {name: home(x[rows]) for name, x in zip(names, outputs, strict=True)},
    )


class _Buffers:
    """Copies of running chains, for the interpreter to continue."""

    def __init__(self, gradients: Any, names: Sequence[str]) -> None:
        self.own = {name: home(gradients.buffer(name)).copy() for name in names}

    def buffer(self, name: str) -> Any:
        """The copy of a chain."""
        return self.own[name]


def row_backward_slice(
    interpreter: Interpreter, region: Region, inputs: Sequence[Tensor], grads: Sequence[Tensor], host: DeviceHost
) -> Slice:
    """Gradients of some rows; of all, where the gradient of a norm's weight runs over them."""
    count = len(grads[0])
    rows = list(range(count)) if region.weights else rows_of(count)
    buffers = _Buffers(host.gradients, region.weights)
    part = _plain_host(host, rows, buffers)
    reference: Any = PlainNorm(interpreter) if region.kind in NORMS else reference_ops(interpreter)[region.kind]
    before = SimpleNamespace(**{**vars(part), "case": "trainer_forward"})
    _, saved = reference.forward(region, [home(x[rows]) for x in inputs], before)
    again = reference.backward(region, saved, [home(g[rows]) for g in grads], part)
    expected = {f"gradient {i}": x for i, x in enumerate(again)}
    expected |= {f"gradient of {name}": value for name, value in buffers.own.items()}

    def found(results: Sequence[Tensor]) -> Results:
        own = {f"gradient {i}": home(x[rows]) for i, x in enumerate(results)}
        return own | {f"gradient of {name}": home(host.gradients.buffer(name)) for name in region.weights}

    return Slice(rows, expected, found)


def embedding_backward_slice(region: Region, ids: Tensor, grads: Sequence[Tensor], host: DeviceHost) -> Slice:
    """Gradient rows of some of the batch's ids, the least and the largest among them: rows added in token order."""
    buffer = host.gradients.embedding(region.weights[0])
    present = torch.unique(ids)
    chosen = torch.unique(torch.cat([present[some(len(present), CORNER, present.device)], ids[:1]]))
    expected, firsts = [], []
    for token in chosen:
        total = home(buffer[token]).copy()
        for row in home(grads[0][ids == token]):
            total = total + row
        expected.append(total)
        firsts.append(int((ids == token).nonzero()[0]))
    return Slice(firsts, {"gradient of ids": np.stack(expected)}, lambda _: {"gradient of ids": home(buffer[chosen])})


def linear_slice(interpreter: Interpreter, region: Region, x: Tensor, host: DeviceHost) -> Slice:
    """Some rows and features of a projection."""
    points, matrix, bias = (
        interpreter.points(host.case, region.kind),
        host.weights.matrix(region),
        host.weights.bias(region),
    )
    rows, features = rows_of(len(x)), some(len(matrix), FEATURES, matrix.device)
    places = features
    if sum(name.endswith(".weight") for name in region.weights) > 1:
        places = torch.argsort(host.weights.order(region))[features]
    chosen = None if bias is None else values(bias[places])
    again = output(points, matmul(points, values(flat(x)[rows]), values(matrix[places]), bias=chosen))

    def found(outputs: Sequence[Tensor]) -> Results:
        return {"projection": home(torch.cat([flat(part)[rows] for part in outputs], dim=1)[:, features])}

    return Slice(rows, {"projection": home(again)}, found)


def linear_backward_slice(
    interpreter: Interpreter, region: Region, x: Tensor, grads: Sequence[Tensor], host: DeviceHost
) -> Slice:
    """Some elements of a projection's gradients of input and first weight."""
    points, wgrad = (interpreter.points(host.case, name) for name in (region.kind, f"{region.kind}.wgrad"))
    matrix, rows = host.weights.matrix(region), rows_of(len(x))
    columns = some(matrix.shape[1], FEATURES, matrix.device)
    dy = torch.cat([flat(g)[rows] for g in grads], dim=1)
    if len(grads) > 1:
        dy = dy[:, host.weights.order(region)]
    dx = output(points, matmul(points, values(dy), values(matrix[:, columns].T)))
    name = next(name for name in region.weights if name.endswith(".weight"))
    buffer = host.gradients.buffer(name)
    n, k = (some(size, CORNER, matrix.device) for size in buffer.shape)
    starts = np.concatenate([[0], np.cumsum(host.batch.lengths)])
    steps = [whole_steps(wgrad, starts, values(side)) for side in (flat(grads[0])[:, n], flat(x)[:, k])]
    expected = {"gradient of the input": home(dx)}
    expected[f"gradient of {name}"] = home(continued(wgrad, steps[0], steps[1], values(buffer[n][:, k])))

    def found(results: Sequence[Tensor]) -> Results:
        return {
            "gradient of the input": home(flat(results[0])[rows][:, columns]),
            f"gradient of {name}": home(buffer[n][:, k]),
        }

    return Slice(rows, expected, found)


def attention_slice(interpreter: Interpreter, region: Region, inputs: Sequence[Tensor], host: DeviceHost) -> Slice:
    """First and last head of the row with the fewest keys, and of the one with the most."""
    points = interpreter.points(host.case, "attention")
    q, k, v = inputs
    positions = home(host.batch.positions)
    starts = np.concatenate([[0], np.cumsum(host.batch.lengths)])
    group = host.config.num_heads // host.config.num_kv_heads
    rows = sorted({int(np.argmin(positions)), int(np.argmax(positions))})
    heads = sorted({0, host.config.num_heads - 1})
    expected = []
    for row in rows:
        index, last = int(np.searchsorted(starts, row, side="right")) - 1, int(positions[row])
        place = torch.tensor([last], device=q.device)
        for head in heads:
            if host.state is None:
                first = int(starts[index])
                keys, rest = (side[first : first + last + 1, head // group] for side in (k, v))
            else:
                j = torch.arange(last + 1, device=q.device)
                page = host.state.block_table[index][j // host.state.page_size].long()
                keys, rest = (
                    side[page, j % host.state.page_size, head // group] for side in host.state.pages(region.layer)
                )
            expected.append(home(attend(points, values(q[row : row + 1, head]), values(keys), values(rest), place)[0]))
    attended = np.concatenate(expected).reshape(len(rows), len(heads), -1)
    return Slice(rows, {"attended": attended}, lambda outputs: {"attended": home(outputs[0][rows][:, heads])})


def attention_backward_slice(
    interpreter: Interpreter, inputs: Sequence[Tensor], out: Tensor, grad: Tensor, host: DeviceHost
) -> Slice:
    """Of the longest sequence: dq of its first rows and its last one, dk and dv of its last keys."""
    points, forward = interpreter.points(host.case, "attention"), interpreter.points("trainer_forward", "attention")
    q, k, v = inputs
    chosen = int(np.argmax(host.batch.lengths))
    first, length = sum(host.batch.lengths[:chosen]), host.batch.lengths[chosen]
    heads, width = slice(0, host.config.num_heads // host.config.num_kv_heads), min(length, WINDOW)
    keys, rest = (values(side[first : first + length, 0]) for side in (k, v))

    def gradients(begin: int, end: int, first_key: int) -> tuple[Tensor, Tensor, Tensor]:
        """By the query rows [begin, end), of keys from ``first_key`` on that they alone may see."""
        rows, places = slice(first + begin, first + end), torch.arange(begin, end, device=q.device)
        logs = [attend(forward, values(q[rows, head]), keys, rest, places)[1] for head in range(heads.stop)]
        return attend_backward(
            points, values(grad[rows, heads]), values(q[rows, heads]), keys[first_key:end], rest[first_key:end],
            values(out[rows, heads]), torch.stack(logs, dim=1), places - first_key,
        )  # fmt: skip

    dq = [gradients(0, width, 0)[0]]
    if width < length:
        dq.append(gradients(length - 1, length, 0)[0])
    _, dk, dv = gradients(length - width, length, length - width)
    rows = [*range(first, first + width), *([first + length - 1] if width < length else [])]
    tail = slice(first + length - width, first + length)
    names = ("gradient of the queries", "gradient of the keys", "gradient of the values")

    def found(results: Sequence[Tensor]) -> Results:
        parts = (results[0][rows, heads], results[1][tail, 0], results[2][tail, 0])
        return {name: home(part) for name, part in zip(names, parts, strict=True)}

    expected = {name: home(value) for name, value in zip(names, (torch.cat(dq), dk, dv), strict=True)}
    return Slice(rows, expected, found)


def head_slice(
    interpreter: Interpreter, region: Region, x: Tensor, targets: Tensor, temperature: float, host: DeviceHost
) -> Results:
    """Statistics of some rows."""
    head = ReferenceLinearLogprob(interpreter)
    found = head.forward(region, home(x), home(targets), temperature, host)
    return dict(vars(found))


def head_backward_slice(
    interpreter: Interpreter, region: Region, x: Tensor, targets: Tensor, temperature: float, coefficient: Tensor,
    host: DeviceHost,
) -> Results:  # fmt: skip
    """The first features of the gradient of the last row."""
    points, dgrad = (interpreter.points(host.case, name) for name in ("logprob", "lm_head"))
    weight, ids = interpreter.weight(host, region.weights[0]), targets[-1:]
    z = matmul(interpreter.points("trainer_forward", "lm_head"), values(x[-1:]), weight)
    z = div(z, scalar(temperature, z))
    found = statistics(interpreter.points("trainer_forward", "logprob"), z, ids)
    m, log_sum = (torch.from_numpy(v).to(z.device)[:, None].expand_as(z) for v in (found.max, found.log_sum))
    p = primitive(points.primitive("exp2"))(mul(sub(sub(z, m), log_sum), scalar(LOG2E, z)))
    hot = torch.zeros_like(z).scatter_(1, ids[:, None], 1.0)
    c = div(values(coefficient[-1:]), scalar(temperature, z[:, 0]))
    dz = output(points, mul(sub(hot, p), c[:, None].expand_as(z)))
    corner = weight[:, :CORNER].T.contiguous()
    dx = output(dgrad, matmul(dgrad, dz, corner, borders=shard_borders(dgrad, dz.shape[1])))
    return {"gradient of hidden": home(dx)}
