"""The command line: `autopar demo | plan | show | audit`.

A command ends with 0 if all is well, 1 if what it checked is not, and 2 if it could not work.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
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
from autopar.target import load_target

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

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Automatic parallelisation for JAX.",
)

_Target = Annotated[str, typer.Argument(metavar="FILE.py:make", help="or module:make")]
_MethodName = Annotated[str, typer.Option("--method", help=" | ".join(METHODS))]
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
def plan(
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
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="NAME.plan.json without.")
    ] = None,
) -> None:
    """Plan a function; nothing runs. make() returns (step, args) or (step, args, batch_argnums)."""
    how = parse_method(method, mesh, solver)
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
) -> None:
    """Show a saved plan."""
    loaded = load_plan(file)
    typer.echo(loaded.summary(width=_width()), nl=False)
    if picture is not None:
        write_atomically(picture, plan_picture(loaded.frozen))
        typer.echo(f"\ndrawn into {picture}")


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
def demo(
    *,
    devices: Annotated[int, typer.Option(min=1, help="Virtual CPU devices.")] = 8,
    steps: Annotated[int, typer.Option(min=1)] = 300,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    method: _MethodName = "auto",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Save the plan here too.")
    ] = None,
) -> None:
    """Train a small transformer on a mesh and on one device, and compare the two."""
    how = parse_method(method, "", "auto")
    training = _training()
    config = importlib.import_module("autopar.demo").DemoConfig(steps=steps, seed=seed)
    _request_devices(devices)
    with _spinner("planning the train step"):
        ready = training.plan_demo(config, devices=devices, method=how)
    if output is not None:
        ready.plan.save(output)
    result = run_demo(ready)
    if result.failures():
        raise typer.Exit(NOT_OK)


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
        raise ArgumentError("unknown method", got=name, remedy=" | ".join(METHODS))
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
