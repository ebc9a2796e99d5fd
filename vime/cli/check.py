"""``vime check``: everything that is wrong with a pipeline, at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vime.cli.options import json_option, overrides_option, pipeline_argument
from vime.cli.words import counted

if TYPE_CHECKING:
    from vime.pipeline.prepare import Prepared


@click.command()
@pipeline_argument
@overrides_option
@click.option("--graph", is_flag=True, help="Print the dataflow graph of a step.")
@click.option("--resolved", is_flag=True, help="Print the pipeline with every default written out.")
@json_option
def check(pipeline: str, overrides: tuple[str, ...], graph: bool, resolved: bool, as_json: bool) -> int:
    """Check PIPELINE without starting anything."""
    from vime.pipeline.loading import read_pipeline, resolved_yaml
    from vime.pipeline.prepare import prepare
    from vime.pipeline.problems import PipelineError

    try:
        prepared = prepare(read_pipeline(pipeline, overrides), new_run=False)
    except PipelineError as error:
        if as_json:
            for problem in error.problems:
                click.echo(json.dumps(problem.as_json()))
        raise
    if as_json:
        click.echo(json.dumps({"file": pipeline, "problems": 0, "pipeline": prepared.pipeline.model_dump(mode="json")}))
        return 0
    if resolved:
        click.echo(resolved_yaml(prepared.pipeline), nl=False)
    if graph:
        click.echo(prepared.graph.draw())
    if not (graph or resolved):
        click.echo(f"{pipeline}: no problems. {_described(prepared)}")
    return 0


def _described(prepared: Prepared) -> str:
    """What would run, and whether ``vime run`` would find something in its way."""
    from vime.pipeline.machine import holds_run

    p = prepared.pipeline
    samples = p.stages.rollout.prompts_per_step * p.stages.rollout.samples_per_prompt
    prompts = counted(len(prepared.train_prompts), "training prompt")
    text = (
        f"{counted(p.steps, 'step')} of {counted(samples, 'sample')}; {prompts}, the longest of the run has "
        f"{counted(prepared.longest_prompt, 'token')}; KV cache of {counted(prepared.num_blocks, 'block')}"
    )
    if holds_run(Path(p.run_directory)):
        text += f". {p.run_directory} holds a run already: 'vime run' asks for --fresh or another run_directory"
    return text
