"""Is a planned step as fast as the same step parallelised by hand with `jax.jit`?

`python -m benchmarks.paired data-parallel|zero3 [--model mlp|gpt] [--pairs N] [--json FILE]`

    data-parallel   the plan of DataParallel against `jax.jit` with a replicated state and a split
                    batch: the same collectives, FLOPs and bytes within 1 % (less is named and
                    passes), and the lower end of the ratio of times at most 1.03
    zero3           the plan of Zero3Parallel against `jax.jit` with every leaf of the state split
                    over all devices (FSDP): the upper end of the ratio below 1

Both have 8 virtual CPU devices, the normal optimisation level, a state of their own in its own
layout that is given away and fed back, and both are awaited after every step; ours is called by
its public Python front. The exit status is 0 if the question is answered with yes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import autopar as ap
from autopar.launch import request_cpu_devices
from autopar.methods import Method
from autopar.report.hlo import HloProgram, read_hlo
from benchmarks.pairs import Contender, Interval, Pair, median_interval, time_pairs
from examples import gpt, mlp

DEVICES = 8
AXIS = "x"
WARM_UP_STEPS = 5
TOLERANCE = 0.01
LOSS_TOLERANCE = 1e-4
# Of the lower end of the ratio's interval, and of its upper end.
MOST_DATA_PARALLEL, MOST_ZERO3 = 1.03, 1.0

METHODS: Mapping[str, Method] = {
    "data-parallel": ap.DataParallel(),
    "zero3": ap.Zero3Parallel(),
}
MODELS: Mapping[str, Callable[[], Any]] = {
    # 8 layers of 512 x 512, 8 rows a device: a layer's kernel is larger than its activations
    "mlp": lambda: mlp.make(mlp.Config(batch=64, widths=(512,) * 9)),
    # the same of 256 x 256 with 128 rows a device: the activations are larger
    "mlp-rows": lambda: mlp.make(mlp.Config(batch=1024, widths=(256,) * 9)),
    # 2 blocks, 4 sequences a device: the activations are larger; the embedding is also the head
    "gpt": lambda: gpt.make(
        gpt.Config(batch=32, length=64, vocabulary=512, layers=2, width=128, heads=8, hidden=512)
    ),
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What one device's compiled program does and needs.

    Attributes:
        collectives: per kind, how many instructions run.
        elements: per kind, elements that they carry in a step.
        flops: of dots.
        argument_bytes, output_bytes, temp_bytes, alias_bytes: as XLA tells them.
    """

    collectives: dict[str, int]
    elements: dict[str, int]
    flops: float
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int

    @property
    def bytes(self) -> int:
        """Of arguments, results and temporaries, each buffer once."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure of the two compiled programs that is not the same."""

    name: str
    ours: int
    theirs: int

    def __str__(self) -> str:
        word = "more" if self.ours > self.theirs else "less"
        return f"{word} {self.name}: {self.ours:,} against {self.theirs:,}"


@dataclass(frozen=True, slots=True)
class Setup:
    """One contender: the step, its arguments in place, and the compiled program.

    Attributes:
        step: what is called.
        args: (params, opt_state, batch).
        compiled: of the same step.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    compiled: Any


@dataclass(frozen=True, slots=True)
class Record:
    """The answer.

    Attributes:
        question, model: what was compared.
        ratio: time of ours over theirs.
        flags: `XLA_FLAGS` of the process; empty when it counts.
        ours, theirs: the compiled programs.
        seconds_ratio_of_medians: of the two medians, for comparison with `ratio`.
        first_effect: median ratio when ours went first over that when it went second.
        differences: what the compiled programs differ in by more than `TOLERANCE`.
        passed: whether the target is met.
    """

    question: str
    model: str
    ratio: Interval
    flags: str
    ours: Facts
    theirs: Facts
    seconds_ratio_of_medians: float
    first_effect: float
    differences: tuple[Difference, ...]
    passed: bool


def facts_of(compiled: Any) -> Facts:
    """Read a compiled program."""
    program: HloProgram = read_hlo(compiled.as_text())
    counts: dict[str, int] = {}
    elements: dict[str, int] = {}
    for item in program.collectives:
        counts[item.kind] = counts.get(item.kind, 0) + item.times
        elements[item.kind] = elements.get(item.kind, 0) + item.times * item.elements
    memory = compiled.memory_analysis()
    return Facts(
        counts,
        elements,
        program.dot_flops,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
    )


def differences(ours: Facts, theirs: Facts) -> tuple[Difference, ...]:
    """Elements of each kind of collective, FLOPs and bytes that differ beyond `TOLERANCE`."""
    kinds = sorted({*ours.elements, *theirs.elements})
    figures = [
        (f"{kind} elements", ours.elements.get(kind, 0), theirs.elements.get(kind, 0))
        for kind in kinds
    ]
    figures += [
        ("dot FLOPs", int(ours.flops), int(theirs.flops)),
        ("argument bytes", ours.argument_bytes, theirs.argument_bytes),
        ("bytes in all", ours.bytes, theirs.bytes),
    ]
    found = (Difference(*figure) for figure in figures)
    return tuple(item for item in found if abs(item.ours - item.theirs) > TOLERANCE * item.theirs)


def split_state(leaf: Any) -> PartitionSpec:
    """The largest dim that divides, the first of equals, over all devices."""
    fitting = [d for d, size in enumerate(leaf.shape) if size and size % DEVICES == 0]
    if not fitting:
        return PartitionSpec()
    dim = max(fitting, key=lambda d: (leaf.shape[d], -d))
    return PartitionSpec(*(AXIS if d == dim else None for d in range(leaf.ndim)))


def by_hand(question: str, plain: Callable[..., Any], args: Sequence[Any]) -> Setup:
    """The step as people write it: `jax.jit` with shardings of arguments and results."""
    devices = np.array(jax.devices()[:DEVICES])
    mesh = Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))
    state = split_state if question == "zero3" else lambda leaf: PartitionSpec()
    held = tuple(
        jax.tree.map(lambda leaf: NamedSharding(mesh, state(leaf)), part) for part in args[:2]
    )
    batch = jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec(AXIS)), args[2])
    step = jax.jit(
        plain,
        in_shardings=(*held, batch),
        out_shardings=(*held, NamedSharding(mesh, PartitionSpec())),
        donate_argnums=(0, 1),
    )
    placed = tuple(jax.device_put(_copied(args), (*held, batch)))
    return Setup(step, placed, step.lower(*placed).compile())


def planned(question: str, plain: Callable[..., Any], args: Sequence[Any]) -> Setup:
    """The step under the plan."""
    step = ap.parallelize(
        jax.jit(plain, donate_argnums=(0, 1)),
        cluster=ap.Cluster.local(DEVICES),
        method=METHODS[question],
        batch_argnums=(2,),
    )
    placed = step.place(*_copied(args))
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*placed).compile()
    return Setup(step, placed, compiled)


def _copied(args: Sequence[Any]) -> tuple[Any, ...]:
    """Copies: what a step is given it gives away, and each contender wants the same start."""
    return tuple(jax.tree.map(np.array, tuple(args)))


def contenders(question: str, model: str) -> tuple[Setup, Setup]:
    """Ours and theirs, of one of `MODELS`."""
    step, args, _ = MODELS[model]()
    plain = step.__wrapped__
    return planned(question, plain, args), by_hand(question, plain, args)


def compare(question: str, model: str, *, pairs: int, steps: int, seed: int) -> Record:
    """Set both up, time them in pairs, and judge."""
    ours, theirs = contenders(question, model)
    runners = [Contender(side.step, side.args[:2], side.args[2]) for side in (ours, theirs)]
    for runner in runners:
        runner.run(WARM_UP_STEPS)
    np.testing.assert_allclose(float(runners[0].loss), float(runners[1].loss), rtol=LOSS_TOLERANCE)
    timed = time_pairs(
        lambda: runners[0].run(steps), lambda: runners[1].run(steps), pairs=pairs, seed=seed
    )
    ratio = median_interval([pair.ratio for pair in timed], seed=seed)
    facts = facts_of(ours.compiled), facts_of(theirs.compiled)
    differ = differences(*facts)
    return Record(
        question,
        model,
        ratio,
        os.environ.get("XLA_FLAGS", ""),
        *facts,
        _median(timed, "ours") / _median(timed, "theirs"),
        _first_effect(timed),
        differ,
        passes(question, ratio, differ),
    )


def passes(question: str, ratio: Interval, differ: Sequence[Difference]) -> bool:
    """Whether the target is met; less communication, work or memory than by hand is no fault."""
    if question == "zero3":
        return ratio.high < MOST_ZERO3
    return ratio.low <= MOST_DATA_PARALLEL and all(item.ours < item.theirs for item in differ)


def _median(timed: Sequence[Pair], side: str) -> float:
    return float(statistics.median(getattr(pair, side) for pair in timed))


def _first_effect(timed: Sequence[Pair]) -> float:
    first, second = (
        [pair.ratio for pair in timed if pair.ours_first is wanted] for wanted in (True, False)
    )
    return statistics.median(first) / statistics.median(second) if first and second else 1.0


def table(record: Record) -> str:
    """The record for people."""
    ours, theirs = record.ours, record.theirs
    kinds = sorted({*ours.elements, *theirs.elements})
    rows = [
        (f"{kind}: instructions", ours.collectives.get(kind, 0), theirs.collectives.get(kind, 0))
        for kind in kinds
    ]
    rows += [
        (f"{kind}: elements", ours.elements.get(kind, 0), theirs.elements.get(kind, 0))
        for kind in kinds
    ]
    rows += [
        ("dot FLOPs a device", int(ours.flops), int(theirs.flops)),
        ("argument bytes a device", ours.argument_bytes, theirs.argument_bytes),
        ("temporary bytes a device", ours.temp_bytes, theirs.temp_bytes),
        ("bytes in all, a device", ours.bytes, theirs.bytes),
    ]
    lines = [f"{record.question}, {record.model}, {DEVICES} CPU devices"]
    lines.append(f"{'':28}{'plan':>16}{'jit':>16}{'ratio':>8}")
    for name, one, other in rows:
        share = f"{one / other:8.3f}" if other else f"{'-':>8}"
        lines.append(f"{name:28}{one:16,}{other:16,}{share}")
    lines += [f"not the same: {item}" for item in record.differences]
    lines.append(f"time of the plan over jit: {record.ratio}")
    lines.append(f"first effect {record.first_effect:.3f}; passed: {record.passed}")
    return "\n".join(lines)


def main() -> int:
    """Answer one question; the exit status says whether the target is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("question", choices=sorted(METHODS))
    parser.add_argument("--model", choices=sorted(MODELS), default="mlp")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1, help="of each side in a pair")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record as JSON")
    options = parser.parse_args()
    request_cpu_devices(DEVICES)
    record = compare(
        options.question,
        options.model,
        pairs=options.pairs,
        steps=options.steps,
        seed=options.seed,
    )
    print(table(record))
    if options.json:
        options.json.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
    return 0 if record.passed else 1


if __name__ == "__main__":
    sys.exit(main())
