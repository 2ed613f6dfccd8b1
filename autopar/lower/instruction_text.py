"""Worker programs as text for people and as JSON for other processes.

The text of one instruction is the table of `autopar.lower.instructions`. A program's JSON holds
plain values only: names, numbers, lists; equal buffer specs are stored once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.errors import AutoparError, VerifyError
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import parse_sharding
from autopar.lower.cross_mesh import Tile, TilePlan
from autopar.lower.instructions import (
    WHOLE,
    BufferSpec,
    Feed,
    Fetch,
    Free,
    Instruction,
    Mark,
    Recv,
    Run,
    Send,
    Task,
    WorkerProgram,
    Zero,
)

FORMAT = 1
"""Version of the JSON form."""


def instruction_text(instruction: Instruction) -> str:
    """One line; `parse_instruction` reads it back."""
    match instruction:
        case Run(task, inputs, outputs):
            return " ".join(("RUN", task, *inputs, "->", *outputs))
        case Send(buffer, peer, transfer, tag):
            return f"SEND {buffer} to {peer} by {transfer} tag {tag}"
        case Recv(buffer, peer, transfer, tag):
            return f"RECV {buffer} from {peer} by {transfer} tag {tag}"
        case Free(buffer):
            return f"FREE {buffer}"
        case Zero(buffer):
            return f"ZERO {buffer}"
        case Feed(buffer, argument, micro):
            return f"FEED {buffer} argument {argument} micro {micro}"
        case Fetch(buffer, result):
            return f"FETCH {buffer} result {result}"
        case Mark(text):
            return f"MARK {text}"


def _read_run(match: re.Match[str]) -> Instruction:
    return Run(match["task"], tuple(match["ins"].split()), tuple(match["outs"].split()))


def _read_feed(match: re.Match[str]) -> Instruction:
    micro = WHOLE if match["micro"] is None else int(match["micro"])
    return Feed(match["buffer"], int(match["argument"]), micro)


_MOVE = r"by (?P<transfer>\d+) tag (?P<tag>\d+)"
_FORMS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Instruction]], ...] = tuple(
    (re.compile(pattern), read)
    for pattern, read in (
        (r"RUN (?P<task>\S+)(?P<ins>(?: (?!->)\S+)*) ->(?P<outs>(?: \S+)*)", _read_run),
        (
            rf"SEND (?P<buffer>\S+) to (?P<peer>-?\d+) {_MOVE}",
            lambda m: Send(m["buffer"], int(m["peer"]), int(m["transfer"]), int(m["tag"])),
        ),
        (
            rf"RECV (?P<buffer>\S+) from (?P<peer>-?\d+) {_MOVE}",
            lambda m: Recv(m["buffer"], int(m["peer"]), int(m["transfer"]), int(m["tag"])),
        ),
        (r"FREE (?P<buffer>\S+)", lambda m: Free(m["buffer"])),
        (r"ZERO (?P<buffer>\S+)", lambda m: Zero(m["buffer"])),
        (
            r"FEED (?P<buffer>\S+) argument (?P<argument>\d+)(?: micro (?P<micro>-?\d+))?",
            _read_feed,
        ),
        (
            r"FETCH (?P<buffer>\S+) result (?P<result>\d+)",
            lambda m: Fetch(m["buffer"], int(m["result"])),
        ),
        (r"MARK (?P<text>\S.*)", lambda m: Mark(m["text"])),
    )
)


def parse_instruction(text: str) -> Instruction:
    """Read one line back.

    Raises:
        VerifyError: it is no instruction.
    """
    line = text.strip()
    for pattern, read in _FORMS:
        match = pattern.fullmatch(line)
        if match is not None:
            return read(match)
    raise VerifyError(
        "a line is no instruction",
        got=repr(text),
        remedy="a form of the table in autopar.lower.instructions",
    )


def instructions_text(instructions: Sequence[Instruction]) -> str:
    """One numbered line an instruction, indented under the MARK it belongs to."""
    width = len(str(max(len(instructions) - 1, 0)))
    marked, lines = False, []
    for number, instruction in enumerate(instructions):
        is_mark = isinstance(instruction, Mark)
        marked = marked or is_mark
        indent = "  " if marked and not is_mark else ""
        lines.append(f"{number:{width}}  {indent}{instruction_text(instruction)}\n")
    return "".join(lines)


def parse_instructions(text: str) -> tuple[Instruction, ...]:
    """Read lines back; line numbers and empty lines don't matter.

    Raises:
        VerifyError: a line is no instruction.
    """
    lines = (re.sub(r"^\s*\d+\s+", "", line).strip() for line in text.splitlines())
    return tuple(parse_instruction(line) for line in lines if line)


def program_text(program: WorkerProgram) -> str:
    """A whole program: its tasks, buffers, transfers and instructions."""
    lines = [f"worker {program.rank} ({program.stage}) on {program.mesh}"]
    for task in program.tasks:
        ins, outs = (" ".join(map(_spec_text, specs)) for specs in (task.inputs, task.outputs))
        donated = f" donates {' '.join(map(str, task.donated))}" if task.donated else ""
        lines.append(f"task {task.name}: {ins} -> {outs}{donated}")
    lines += [f"buffer {name} {_spec_text(spec)}" for name, spec in program.buffers]
    lines += [f"constant {name} = {value}" for name, value in program.constants]
    lines += [f"hidden {name} = closed-over array {index}" for name, index in program.hidden]
    for number, plan in enumerate(program.transfers):
        shape = ",".join(map(str, plan.shape))
        lines.append(
            f"transfer {number}: {plan.dtype}[{shape}] {plan.source} on {plan.source_mesh} -> "
            f"{plan.target} on {plan.target_mesh}, {len(plan.tiles)} tiles"
        )
    return "\n".join(lines) + "\n" + instructions_text(program.instructions)


def _spec_text(spec: BufferSpec) -> str:
    return f"{spec.dtype}[{','.join(map(str, spec.shape))}]@{spec.sharding}"


# JSON.


def worker_program_to_json(program: WorkerProgram) -> dict[str, Any]:
    """The program as JSON values."""
    specs = [spec for task in program.tasks for spec in (*task.inputs, *task.outputs)]
    specs += [spec for _, spec in program.buffers]
    place = {spec: number for number, spec in enumerate(dict.fromkeys(specs))}
    return {
        "autopar_worker": FORMAT,
        "rank": program.rank,
        "stage": program.stage,
        "mesh": str(program.mesh),
        "specs": [[list(spec.shape), spec.dtype, str(spec.sharding)] for spec in place],
        "tasks": [
            {
                "name": task.name,
                "inputs": [place[spec] for spec in task.inputs],
                "outputs": [place[spec] for spec in task.outputs],
                "donated": list(task.donated),
            }
            for task in program.tasks
        ],
        "buffers": [[name, place[spec]] for name, spec in program.buffers],
        "constants": [list(pair) for pair in program.constants],
        "hidden": [list(pair) for pair in program.hidden],
        "transfers": [tile_plan_to_json(plan) for plan in program.transfers],
        "instructions": [instruction_text(entry) for entry in program.instructions],
    }


def worker_program_from_json(data: Mapping[str, Any]) -> WorkerProgram:
    """Read a program back.

    Raises:
        VerifyError: it is of another version, or damaged.
    """
    if data.get("autopar_worker") != FORMAT:
        raise VerifyError(
            "this is not a worker program that this version reads",
            got=f"autopar_worker = {data.get('autopar_worker')!r}",
            why=f"this version reads {FORMAT}",
            remedy="the same version of autopar on the driver and on every worker",
        )
    try:
        return _read_program(data)
    except AutoparError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise VerifyError(
            "a worker program is damaged", got=f"{type(error).__name__}: {error}"
        ) from error


def _read_program(data: Mapping[str, Any]) -> WorkerProgram:
    specs = [
        BufferSpec(tuple(shape), dtype, parse_sharding(sharding))
        for shape, dtype, sharding in data["specs"]
    ]
    return WorkerProgram(
        rank=data["rank"],
        stage=data["stage"],
        mesh=Mesh.parse(data["mesh"]),
        tasks=tuple(
            Task(
                task["name"],
                tuple(specs[number] for number in task["inputs"]),
                tuple(specs[number] for number in task["outputs"]),
                tuple(task["donated"]),
            )
            for task in data["tasks"]
        ),
        buffers=tuple((name, specs[number]) for name, number in data["buffers"]),
        constants=tuple((name, value) for name, value in data["constants"]),
        hidden=tuple((name, index) for name, index in data["hidden"]),
        transfers=tuple(tile_plan_from_json(plan) for plan in data["transfers"]),
        instructions=tuple(map(parse_instruction, data["instructions"])),
    )


def tile_plan_to_json(plan: TilePlan) -> dict[str, Any]:
    """A tile plan as JSON values."""
    return {
        "shape": list(plan.shape),
        "dtype": plan.dtype,
        "source": [str(plan.source_mesh), str(plan.source)],
        "target": [str(plan.target_mesh), str(plan.target)],
        "tiles": [
            [tile.source, list(tile.targets), list(tile.starts), list(tile.shape)]
            for tile in plan.tiles
        ],
    }


def tile_plan_from_json(data: Mapping[str, Any]) -> TilePlan:
    """Read a tile plan back."""
    (source_mesh, source), (target_mesh, target) = data["source"], data["target"]
    return TilePlan(
        tuple(data["shape"]),
        data["dtype"],
        Mesh.parse(source_mesh),
        parse_sharding(source),
        Mesh.parse(target_mesh),
        parse_sharding(target),
        tuple(
            Tile(device, tuple(targets), tuple(starts), tuple(shape))
            for device, targets, starts, shape in data["tiles"]
        ),
    )
