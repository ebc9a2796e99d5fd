"""``vime reveal``: in which order a reduction adds, found by probing and proven by execution."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vime.cli.options import json_option, overrides_option
from vime.errors import InputError

if TYPE_CHECKING:
    from rlkernel.contract.build import Contract
    from rlkernel.contract.points import SixPoints
    from rlkernel.verify.discovery.reveal import Order, Revelation
    from rlkernel.verify.discovery.targets import Target


@click.command()
@click.argument("name", metavar="TARGET")
@click.option("--n", "count", type=click.IntRange(min=1), help="Reduce one row of N inputs.")
@click.option("--shape", metavar="SHAPE", help="ROWSxN: reduce each row; MxKxN: a product of matrices, over K.")
@click.option("--dtype", default="float32", show_default=True, help="Of the inputs; or float64, bfloat16, float16.")
@click.option("--output", metavar="DTYPE", help="Of the outputs [default: that of the inputs].")
@click.option("--takes", type=click.Choice(["numpy", "torch"]), help="What a function of your own takes.")
@click.option("--device", default="cpu", show_default=True, help="Of torch tensors, as in 'cuda'.")
@click.option("--operands", type=click.Choice(["1", "2"]), help="2: with --n, a function of two vectors.")
@click.option("--parts", type=click.IntRange(1), default=1, help="Leaves of rlkernel.gemm, shards of rlkernel.logprob.")
@click.option("--inputs", "vectors", type=click.IntRange(1), default=1000, show_default=True, help="Random inputs.")
@click.option("--seed", type=int, default=0, help="Of the random inputs.")
@click.option("--against", metavar="REGION", help="Compare with a region's entry of the contract of --pipeline.")
@click.option("--pipeline", type=click.Path(dir_okay=False), metavar="FILE", help="The pipeline for --against.")
@click.option("--case", metavar="CASE", help="The case for --against, where a region's cases differ.")
@overrides_option
@click.option("--draw", type=click.Path(dir_okay=False), metavar="FILE.svg", help="Draw the tree.")
@click.option("--depends", is_flag=True, help="Also find out which inputs reach which outputs.")
@json_option
def reveal(
    name: str,
    count: int | None,
    shape: str | None,
    dtype: str,
    output: str | None,
    takes: str | None,
    device: str,
    operands: str | None,
    parts: int,
    vectors: int,
    seed: int,
    against: str | None,
    pipeline: str | None,
    case: str | None,
    overrides: tuple[str, ...],
    draw: str | None,
    depends: bool,
    as_json: bool,
) -> int:
    """Reveal in which order TARGET adds, by numerical probing.

    TARGET is torch.sum, torch.matmul, numpy.dot, ...; rlkernel.gemm and other kernels of this package; or your own
    package.module:function or FILE.py:function. The order is proven: the revealed tree, executed, must give the bits of
    TARGET on random inputs. Exit code 1 where it does not, where TARGET is no summation tree, or where it does not
    follow the contract's entry.
    """
    from rlkernel.verify.discovery.callables import find_target, parse_shape
    from rlkernel.verify.discovery.reveal import reveal as reveal_order

    if (count is None) == (shape is None):
        raise InputError("give the number of inputs with --n, or a shape with --shape; one of the two")
    if (against is None) != (pipeline is None):
        raise InputError("--against REGION compares with the contract of --pipeline FILE; give both")
    dimensions = (count,) if count is not None else parse_shape(str(shape))
    target = find_target(
        name,
        dimensions,
        dtype=dtype,
        output=output,
        library=takes,
        device=device,
        operands=None if operands is None else int(operands),
        parts=parts,
    )
    entry = None
    if against is not None and pipeline is not None:
        entry = _entry(against, pipeline, overrides, case, target.n)
    found = reveal_order(target, vectors=vectors, seed=seed)
    compared = None if entry is None else [_differences(entry, found, order) for order in found.orders]
    reach = _reach(target) if depends else []
    if as_json:
        click.echo(json.dumps(_json(found, against, compared, reach)))
    else:
        _print(found, against, compared, reach)
    if draw is not None:
        _draw(found, Path(draw), as_json)
    return 0 if found.proven and not any(compared or []) else 1


def _entry(region: str, pipeline: str, overrides: tuple[str, ...], case: str | None, n: int) -> SixPoints:
    from rlkernel.names import hint
    from rlkernel.verify.discovery.expected import domain_size, expected_order
    from vime.cli.contract import read_pipeline_contract

    contract: Contract = read_pipeline_contract(pipeline, overrides)
    regions = sorted({name for _, name in contract.entries})
    if region not in regions:
        raise InputError(
            f"the contract of {pipeline} has no region {region!r}; it has {', '.join(regions)}{hint(region, regions)}"
        )
    entries = {key: points for (key, name), points in contract.entries.items() if name == region}
    if case is not None and case not in entries:
        raise InputError(f"region {region!r} has no case {case!r}; it has {', '.join(entries)}{hint(case, entries)}")
    chosen = [entries[case]] if case is not None else list(entries.values())
    if any(points != chosen[0] for points in chosen):
        raise InputError(
            f"the cases of region {region!r} have different entries; choose one with --case: {', '.join(entries)}"
        )
    size = domain_size(chosen[0], contract.config)
    if size is not None and size != n:
        raise InputError(
            f"region {region!r} of {pipeline} reduces the {chosen[0].dependency.domain}, {size} inputs; the target "
            f"reduces {n}"
        )
    expected_order(chosen[0], n)  # an entry that cannot be compared is refused before anything is probed
    return chosen[0]


def _differences(entry: SixPoints, found: Revelation, order: Order) -> list[str]:
    from rlkernel.verify.discovery.expected import differences

    return differences(entry, found.n, order.tree, order.arithmetic, order.subnormals)


def _reach(target: Target) -> list[tuple[str, str]]:
    """(what, pattern) for each axis of the target's inputs."""
    import numpy as np

    from rlkernel.verify.discovery.dependency import probe_dependency
    from rlkernel.verify.discovery.inputs import draw
    from rlkernel.verify.discovery.targets import Trial

    rng = np.random.default_rng(0)
    trial = target.trial(lambda many: draw(target, many, rng))

    def call(*arrays: Any) -> Any:
        return target.outputs(Trial(arrays[0], arrays[1] if len(arrays) > 1 else None))

    arrays = [trial.a] if trial.b is None else [trial.a, trial.b]
    found = []
    if target.rows > 1:
        rows = probe_dependency(call, arrays, 0, input_axis=0, output_axis=0)
        found.append(("rows of the outputs on rows of the inputs", rows.describe()))
    inputs = probe_dependency(call, arrays, 0, input_axis=1, output_axis=0)
    found.append(("rows of the outputs on the inputs of a row", inputs.describe()))
    if target.operands == 2 and target.columns > 1 and target.columns_alike:
        columns = probe_dependency(call, arrays, 1, input_axis=1, output_axis=1)
        found.append(("columns of the outputs on columns of the second operand", columns.describe()))
    return found


def _print(
    found: Revelation, against: str | None, compared: list[list[str]] | None, reach: list[tuple[str, str]]
) -> None:
    from rlkernel.verify.discovery.notation import compact, indented, summary

    outputs = f", {found.rows} x {found.columns} outputs a call" if found.rows * found.columns > 1 else ""
    click.echo(
        f"{found.target}: {found.n:,} inputs{outputs}; {found.probes:,} probes in {found.calls:,} calls, "
        f"{found.seconds:.1f} s"
    )
    for k, order in enumerate(found.orders):
        if len(found.orders) > 1:
            click.echo(f"\norder {k + 1} of {len(found.orders)}, {order.outputs} outputs: {order.where}")
        text = compact(order.tree)
        click.echo(f"  form        {summary(order.tree)}")
        click.echo(f"  order       {text}" if len(text) <= 100 else "  order")
        if len(text) > 100:
            click.echo("\n".join("    " + line for line in indented(order.tree).splitlines()))
        click.echo(f"  arithmetic  {order.arithmetic.describe()}")
        if order.arithmetic.products:
            click.echo(f"  products    {order.arithmetic.products_in_words(order.tree)}")
        equal = order.checked - order.differing
        elsewhere = f"; {order.elsewhere:,} more at other magnitudes" if order.elsewhere and not order.parts else ""
        click.echo(
            f"  proof       {equal:,} of {order.checked:,} outputs of random inputs have the executed tree's bits"
            f"{elsewhere}; subnormals {order.subnormals}"
        )
        if compared is not None:
            lines = compared[k] or [f"follows the entry of {against}"]
            click.echo(f"  contract    {lines[0]}")
            for line in lines[1:]:
                click.echo(f"              {line}")
    for note in found.notes:
        click.echo(f"note: {note}")
    for what, pattern in reach:
        click.echo(f"depends: {what}: {pattern}")
    if not found.proven:
        click.echo(f"vime: {found.reason}", err=True)


def _json(
    found: Revelation, against: str | None, compared: list[list[str]] | None, reach: list[tuple[str, str]]
) -> dict[str, Any]:
    from rlkernel.verify.discovery.notation import compact, summary

    orders = []
    for k, order in enumerate(found.orders):
        arithmetic = order.arithmetic
        orders.append(
            {
                "where": order.where,
                "outputs": order.outputs,
                "form": summary(order.tree),
                "tree": compact(order.tree),
                "inputs": arithmetic.inputs,
                "accumulator": arithmetic.accumulator,
                "output": arithmetic.output,
                "arithmetic": arithmetic.describe(),
                "products": arithmetic.products_in_words(order.tree),
                "checked": order.checked,
                "differing": order.differing,
                "elsewhere": order.elsewhere,
                "parts": order.parts,
                "subnormals": order.subnormals,
                **({"against": against, "differences": compared[k]} if compared is not None else {}),
            }
        )
    return {
        "target": found.target,
        "n": found.n,
        "rows": found.rows,
        "columns": found.columns,
        "proven": found.proven,
        "reason": found.reason,
        "notes": list(found.notes),
        "probes": found.probes,
        "calls": found.calls,
        "seconds": round(found.seconds, 3),
        "orders": orders,
        **({"depends": [{"what": what, "pattern": pattern} for what, pattern in reach]} if reach else {}),
    }


def _draw(found: Revelation, path: Path, quiet: bool) -> None:
    from rlkernel.verify.discovery.drawing import draw_svg

    for k, order in enumerate(found.orders):
        file = path if k == 0 else path.with_stem(f"{path.stem}-{k + 1}")
        where = "" if len(found.orders) == 1 else f", {order.where}"
        try:
            file.write_text(draw_svg(order.tree, f"{found.target}, {found.n:,} inputs{where}"))
        except OSError as error:
            raise InputError(f"the drawing cannot be written to {file}: {error.strerror}") from error
        if not quiet:
            click.echo(f"drawn: {file}")
