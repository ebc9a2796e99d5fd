"""``vime check``: everything that is wrong with a pipeline, at once."""

from __future__ import annotations

import json

import click

from vime.cli.options import json_option, overrides_option, pipeline_argument


@click.command()
@pipeline_argument
@overrides_option
@click.option("--graph", is_flag=True, help="Print the dataflow graph of a step.")
@click.option("--resolved", is_flag=True, help="Print the pipeline with every default written out.")
@json_option
def check(pipeline: str, overrides: tuple[str, ...], graph: bool, resolved: bool, as_json: bool) -> int:
    """Check PIPELINE without starting anything."""
    from vime.pipeline.loading import load_pipeline, resolved_yaml
    from vime.pipeline.prepare import prepare
    from vime.pipeline.problems import PipelineError

    try:
        loaded = load_pipeline(pipeline, overrides)
        prepared = prepare(loaded, new_run=False)
    except PipelineError as error:
        for problem in error.problems:
            click.echo(json.dumps(problem.as_json()) if as_json else str(problem), err=not as_json)
        count = len(error.problems)
        click.echo(f"vime: {count} problem{'s' if count != 1 else ''} in {pipeline}; nothing was started", err=True)
        return error.exit_code
    if as_json:
        click.echo(json.dumps({"file": pipeline, "problems": 0, "pipeline": prepared.pipeline.model_dump(mode="json")}))
        return 0
    if resolved:
        click.echo(resolved_yaml(prepared.pipeline), nl=False)
    if graph:
        click.echo(prepared.graph.draw())
    if not (graph or resolved):
        p = prepared.pipeline
        samples = p.stages.rollout.prompts_per_step * p.stages.rollout.samples_per_prompt
        click.echo(
            f"{pipeline}: no problems. {p.steps} steps of {samples} samples; {len(prepared.train_prompts)} training "
            f"prompts, the longest has {prepared.longest_prompt} tokens; KV cache of {prepared.num_blocks} blocks"
        )
    return 0
