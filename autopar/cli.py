"""The command line: `autopar demo | plan | show | audit | schedule`.

A command ends with 0 if all is well, 1 if what it checked is not, and 2 if it could not work.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from autopar import methods
from autopar.api import load_plan, make_plan
from autopar.cluster import Cluster
from autopar.errors import ArgumentError, AutoparError
from autopar.files import write_atomically
from autopar.ir.mesh import Mesh
from autopar.launch import request_cpu_devices
from autopar.report.picture import plan_picture
from autopar.report.timeline import save_picture, save_trace
from autopar.staged import StagedPlan
from autopar.target import load_target
from autopar.timelines import measured_chart, simulated_chart

TRACEBACK = "--traceback"

NOT_OK, FAILED = 1, 2
"""Exit codes: a check did not pass; the command could not work."""

STEPS_PER_LINE = 50
"""How often training says where it is when nobody watches a progress bar."""

METHODS: dict[str, Callable[..., methods.Method]] = {
    "auto": methods.Auto,
    "shard": methods.ShardParallel,
    "data-parallel": methods.DataParallel,
    "zero2": methods.Zero2Parallel,
    "zero3": methods.Zero3Parallel,
}
"""Those that need nothing said."""

PIPELINE = "pipeline"

METHOD_NAMES = (*METHODS, PIPELINE)

PIPELINE_MICRO_BATCHES = 4
"""Of a pipeline, where nobody says how many."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Automatic parallelisation for JAX.",
)

_Target = Annotated[str, typer.Argument(metavar="FILE.py:make", help="or module:make")]
_MethodName = Annotated[str, typer.Option("--method", help=" | ".join(METHOD_NAMES))]
_Stages = Annotated[
    str, typer.Option("--stages", help="Number of stages, or auto; for --method pipeline.")
]
_MicroBatches = Annotated[
    int | None,
    typer.Option("--micro-batches", min=1, help="Slices of the batch; for pipeline, shard, auto."),
]
_Schedule = Annotated[
    str, typer.Option("--schedule", help=" | ".join(methods.SCHEDULE_NAMES) + ", for pipeline.")
]
_PlanFile = Annotated[Path, typer.Argument(metavar="PLAN.json")]


@app.callback()
def _options(
    *,
    traceback: Annotated[
        bool, typer.Option(TRACEBACK, help="Show Python's traceback of an error.")
    ] = False,
) -> None:
    """The option is read in `main`, which is where errors end up."""


@app.command()
def plan(  # noqa: PLR0913 - options of the command
    target: _Target,
    *,
    cluster: Annotated[
        str, typer.Option(help="FILE.json | PRESET:HxD | local:N | ray:HxD | abstract:2x4")
    ] = "local",
    method: _MethodName = "auto",
    mesh: Annotated[
        str, typer.Option(help="Sizes of the logical mesh, such as 2x4; all are tried without.")
    ] = "",
    solver: Annotated[
        str, typer.Option(help="auto | elimination | ilp-highs | ilp-cbc, for --method shard")
    ] = "auto",
    stages: _Stages = "",
    micro_batches: _MicroBatches = None,
    schedule: _Schedule = "",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="NAME.plan.json without.")
    ] = None,
) -> None:
    """Plan a function; nothing runs. make() returns (step, args) or (step, args, batch_argnums)."""
    how = choose_method(method, mesh, solver, Pipeline(stages, micro_batches, schedule))
    where = parse_cluster(cluster)
    wanted = load_target(target)
    with _spinner(f"planning {wanted.name}") as progress:
        made = make_plan(
            wanted.step,
            *wanted.args,
            cluster=where,
            method=how,
            batch_argnums=wanted.batch_argnums,
            progress=progress,
        )
    file = output or Path(f"{wanted.name}.plan.json")
    made.save(file)
    typer.echo(made.summary(width=_width()), nl=False)
    typer.echo(f"\nsaved to {file}")


@app.command()
def show(
    file: _PlanFile,
    *,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the plan into this SVG file too.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a pipeline's simulated step as a Chrome trace (ui.perfetto.dev)."),
    ] = None,
) -> None:
    """Show a saved plan."""
    loaded = load_plan(file)
    typer.echo(loaded.summary(width=_width()), nl=False)
    if picture is not None:
        if isinstance(loaded, StagedPlan):
            save_picture([simulated_chart(loaded.frozen)], picture)
        else:
            write_atomically(picture, plan_picture(loaded.frozen))
        typer.echo(f"\ndrawn into {picture}")
    if trace is not None:
        if not isinstance(loaded, StagedPlan):
            raise ArgumentError(
                "only a pipeline has a timeline", got=str(file), remedy="--picture draws this plan"
            )
        save_trace(simulated_chart(loaded.frozen), trace)
        typer.echo(f"\ntrace in {trace}")


@app.command()
def schedule(
    name: Annotated[str, typer.Argument(metavar="NAME", help=" | ".join(methods.SCHEDULE_NAMES))],
    *,
    stages: Annotated[int, typer.Option(min=1)] = 4,
    micro_batches: Annotated[int, typer.Option("--micro-batches", min=1)] = 8,
    sends: Annotated[bool, typer.Option("--sends", help="With sends and receives.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Write it here too, one row a rank.")] = None,
) -> None:
    """Show a schedule: who does what in which order, and how long it takes if B = 2 F."""
    rooms = importlib.import_module("autopar.solver.schedules.show")
    made, text = rooms.show_schedule(name, stages, micro_batches, sends=sends)
    typer.echo(text)
    if csv is not None:
        made.to_csv(csv)
        typer.echo(f"saved to {csv}")


@app.command()
def audit(file: _PlanFile, target: _Target) -> None:
    """Compile a saved plan for virtual devices and hold what runs against what was planned."""
    loaded = load_plan(file)
    wanted = load_target(target)
    with _spinner("compiling"):
        report = loaded.bind(wanted.step, *wanted.args).audit()
    typer.echo(report.summary())
    if not report.ok:
        raise typer.Exit(NOT_OK)


@app.command()
def demo(  # noqa: PLR0913 - options of the command
    *,
    devices: Annotated[int, typer.Option(min=1, help="Virtual CPU devices.")] = 8,
    steps: Annotated[int, typer.Option(min=1)] = 300,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    method: _MethodName = "auto",
    cluster: Annotated[
        str, typer.Option(help="ray:2x4 trains on Ray workers; this process's devices without.")
    ] = "",
    stages: _Stages = "",
    micro_batches: _MicroBatches = None,
    schedule: _Schedule = "",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Save the plan here too.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw a pipeline's step, simulated and measured, here.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a pipeline's measured step as a Chrome trace here.")
    ] = None,
) -> None:
    """Train a small transformer on a mesh and on one device, and compare the two."""
    name = PIPELINE if method == "auto" and cluster.startswith("ray:") else method
    stages = stages or ("2" if name == PIPELINE else "")
    how = choose_method(name, "", "auto", Pipeline(stages, micro_batches, schedule))
    training = _training()
    config = importlib.import_module("autopar.demo").DemoConfig(steps=steps, seed=seed)
    _request_devices(1 if cluster else devices)
    where = Cluster.parse(cluster) if cluster else None
    with _spinner("planning the train step"):
        ready = training.plan_demo(config, devices=devices, method=how, cluster=where)
    if output is not None:
        ready.plan.save(output)
    try:
        result = run_demo(ready)
        _draw_timelines(ready, picture, trace)
    finally:
        ready.step.close()
    if result.failures():
        raise typer.Exit(NOT_OK)


def _draw_timelines(ready: Any, picture: Path | None, trace: Path | None) -> None:
    """A pipeline's step as it was simulated, and as it was measured."""
    if picture is None and trace is None:
        return
    if not isinstance(ready.plan, StagedPlan):
        raise ArgumentError("only a pipeline has a timeline", remedy="--method pipeline")
    events = ready.measure()
    last = max(event["step"] for row in events for event in row)
    measured = measured_chart(ready.plan.frozen, events, last)
    if picture is not None:
        save_picture([simulated_chart(ready.plan.frozen), measured], picture)
        typer.echo(f"drawn into {picture}")
    if trace is not None:
        save_trace(measured, trace)
        typer.echo(f"trace in {trace}")


def run_demo(ready: Any) -> Any:
    """Train twice and print what comes of it.

    Args:
        ready: a `training.Demo`, of a module that needs optax and is not imported here.

    Returns:
        A `training.DemoResult`.
    """
    devices = ready.plan.mesh.size
    typer.echo(ready.plan.summary(width=_width()))
    runs = [
        _trained(title, ready.config.steps, train)
        for title, train in (
            (f"{devices} devices", ready.train_parallel),
            ("1 device", ready.train_single),
        )
    ]
    with _spinner("compiling for the audit"):
        result = ready.result(*runs)
    typer.echo(_verdict(result, devices))
    return result


def _verdict(result: Any, devices: int) -> str:
    failures = result.failures()
    lines = [
        "",
        f"mean of the last 20 losses   {result.mean_last(result.parallel):.4f} on {devices} "
        f"devices, {result.mean_last(result.single):.4f} on 1",
        f"largest difference           {result.largest_difference:.2g} of a loss, over "
        f"{result.config.steps} steps",
        f"parallel share               {result.share:.3f}",
        f"audit                        {'ok' if result.audit.ok else 'not ok'}: "
        f"{result.audit.planned} collectives planned, {result.audit.compiled} compiled",
        *(["", result.audit.summary()] if not result.audit.ok else []),
        *(f"FAILED: {failure}" for failure in failures),
        *([] if failures else ["all as it should be"]),
    ]
    return "\n".join(lines)


def _trained(title: str, steps: int, train: Callable[..., tuple[float, ...]]) -> tuple[float, ...]:
    """Train with a progress bar; where no terminal is, with a line now and then."""
    console = Console()
    if not console.is_terminal:

        def say(done: int, loss: float) -> None:
            if done % STEPS_PER_LINE == 0 or done in (1, steps):
                typer.echo(f"{title:>10}  step {done:>4}  loss {loss:.4f}")

        return train(say)
    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=steps, loss=float("nan"))
        return train(lambda done, loss: bar.update(task, completed=done, loss=loss))


def parse_method(name: str, mesh: str = "", solver: str = "auto") -> methods.Method:
    """The method of that name, with the mesh and solver asked for.

    Raises:
        ArgumentError: there is no such method, or it takes no mesh or solver.
    """
    if name not in METHODS:
        raise ArgumentError("unknown method", got=name, remedy=" | ".join(METHOD_NAMES))
    if not mesh and solver == "auto":
        return METHODS[name]()
    if name not in ("auto", "shard"):
        raise ArgumentError(
            f"the method {name} takes no --mesh and no --solver",
            why="it lays all devices on one axis",
            remedy="--method shard",
        )
    sizes = Mesh.parse(mesh).sizes if mesh else None
    return methods.ShardParallel(logical_mesh=sizes, solver=solver)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The options of a pipeline as they were typed; empty or None where they were not."""

    stages: str = ""
    micro_batches: int | None = None
    schedule: str = ""


def choose_method(name: str, mesh: str, solver: str, pipeline: Pipeline) -> methods.Method:
    """The method of that name, with all that was asked for.

    Raises:
        ArgumentError: there is no such method, or an option does not belong to it.
    """
    if name == PIPELINE:
        return _pipeline_method(mesh, solver, pipeline)
    made = parse_method(name, mesh, solver)
    for option, value in (("--stages", pipeline.stages), ("--schedule", pipeline.schedule)):
        if value:
            raise ArgumentError(
                f"the method {name} takes no {option}", got=value, remedy=f"--method {PIPELINE}"
            )
    if pipeline.micro_batches is None:
        return made
    if not isinstance(made, methods.ShardParallel | methods.Auto):
        raise ArgumentError(
            f"the method {name} takes no --micro-batches",
            got=str(pipeline.micro_batches),
            remedy=f"--method shard, or {PIPELINE}",
        )
    return replace(made, num_micro_batches=pipeline.micro_batches)


def _pipeline_method(mesh: str, solver: str, asked: Pipeline) -> methods.PipeshardParallel:
    stages: methods.UniformStages | methods.AutoStages = methods.AutoStages()
    if asked.stages not in ("", "auto"):
        if not re.fullmatch(r"[1-9]\d*", asked.stages):
            raise ArgumentError("--stages is a number or auto", got=repr(asked.stages))
        stages = methods.UniformStages(int(asked.stages))
    sizes = Mesh.parse(mesh).sizes if mesh else None
    made = methods.PipeshardParallel(
        asked.micro_batches or PIPELINE_MICRO_BATCHES,
        stages=stages,
        shard=methods.ShardParallel(logical_mesh=sizes, solver=solver),
    )
    return replace(made, schedule=asked.schedule) if asked.schedule else made


def parse_cluster(text: str) -> Cluster:
    """The cluster of that text; `local:N` gets its N virtual CPU devices if JAX is not up yet.

    Raises:
        ClusterError: it is none.
    """
    if local := re.fullmatch(r"local:([1-9]\d*)", text.strip()):
        request_cpu_devices(int(local[1]))
    return Cluster.parse(text)


def _request_devices(count: int) -> None:
    # The demo is for machines without accelerators; who wants it on one says so to JAX.
    if "JAX_PLATFORMS" not in os.environ:
        importlib.import_module("jax").config.update("jax_platforms", "cpu")
    request_cpu_devices(count)


def _training() -> Any:
    try:
        return importlib.import_module("autopar.training")
    except ModuleNotFoundError as error:
        raise ArgumentError(
            "the demo needs a package that is not installed",
            got=str(error.name),
            remedy='pip install "autopar[demo]"',
        ) from error


@contextlib.contextmanager
def _spinner(text: str) -> Iterator[Callable[[str], None]]:
    """A sign of life on stderr, if that is a terminal; yields what changes its text."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(text) as status:
        yield lambda news: status.update(news)


def _width() -> int:
    """Columns of the terminal; 100 where there is none, so that files come out alike."""
    return max(80, Console().width) if sys.stdout.isatty() else 100


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of the command `autopar`; ends the process.

    Args:
        arguments: of the command line; those of this process by default.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        app(given)
    except AutoparError as error:
        if TRACEBACK in given:
            raise
        typer.echo(f"error: {error}", err=True)
        sys.exit(FAILED)
