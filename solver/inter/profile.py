"""What runs of layers cost on submeshes: each distinct layer is solved once on each submesh.

A run of layers is priced as the sum of its layers. That leaves out what a layer gains by agreeing
with its neighbours on layouts, and is what the search needs: the stages it picks are solved whole
afterwards. Equal layers (the same ops, shapes and wiring) are recognised and solved once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

from autopar.cluster import Cluster
from autopar.ir.text import params_text, short_type, wires_text
from autopar.layers.divide import Divided, into_stages
from autopar.layers.stage_graph import StageGraph
from autopar.methods import AutoStages, PipeshardParallel
from autopar.plan.pipeline import StagePlan
from autopar.plan.schedule import Schedule
from autopar.rules.rule import Rule
from autopar.solver.inter.links import link_seconds
from autopar.solver.inter.shapes import allowed_shapes, flat_shape, submesh_cluster
from autopar.solver.inter.stage_plan import plan_stage
from autopar.solver.inter.stage_problem import (
    Discipline,
    StageCost,
    StageProblem,
    StageSlice,
    gpipe_live,
    one_f_one_b_live,
)
from autopar.solver.inter.submesh import Shape
from autopar.solver.schedules.registry import make_schedule
from autopar.solver.schedules.simulate import Durations, simulate


def structure(stage: StageGraph) -> str:
    """A digest of what a stage computes: equal for layers that differ in names alone."""
    digest = hashlib.sha256()
    graph = stage.graph
    for entry in graph.inputs:
        value = graph.values[entry.value]
        text = f"in {short_type(value.shape, value.dtype)} {entry.tied_output} {entry.donated}\n"
        digest.update(text.encode())
    for op, task in zip(graph.ops, stage.tasks, strict=True):
        text = f"{task} {op.name} {wires_text(op.inputs)} {params_text(op.params)} {op.outputs}\n"
        digest.update(text.encode())
    digest.update(f"{graph.outputs} {stage.gathered}".encode())
    return digest.hexdigest()


class Profile:
    """Costs of runs of layers, and the problem over them.

    Attributes:
        problem: for solver.inter.stage_dp.
    """

    def __init__(
        self,
        divided: Divided,
        firsts: Sequence[int],
        cluster: Cluster,
        method: PipeshardParallel,
        progress: Callable[[str], None],
    ) -> None:
        assert isinstance(method.stages, AutoStages)
        self._method = method
        self._cluster = cluster
        self._schedules: dict[int, Schedule] = {}
        self._cuts = [divided.line.cuts[first] for first in firsts]
        staged = into_stages(divided, firsts)
        shapes = allowed_shapes(cluster)
        self._costs = self._solve_layers(staged.graphs, staged.rules, shapes, progress)
        limit = method.stages.memory_bytes
        gpipe = method.schedule != "1f1b"
        self.problem = StageProblem(
            layers=len(firsts),
            mesh=flat_shape(cluster),
            submeshes=shapes,
            micro_batches=method.num_micro_batches,
            cost=self._cost,
            transfer=self._transfer,
            transfer_back=self._transfer_back,
            live=gpipe_live if gpipe else one_f_one_b_live,
            memory_bytes=cluster.device.memory_bytes if limit is None else limit,
            discipline=Discipline.FORWARDS_FIRST if gpipe else Discipline.CAPPED,
        )

    def _solve_layers(
        self,
        graphs: Sequence[StageGraph],
        rules_of: Callable[[int], Sequence[Rule]],
        shapes: Sequence[Shape],
        progress: Callable[[str], None],
    ) -> list[list[StageCost]]:
        """Per submesh, per layer, its cost."""
        kinds = [structure(graph) for graph in graphs]
        total = len(set(kinds)) * len(shapes)
        made = []
        done = 0
        for shape in shapes:
            known: dict[str, StageCost] = {}
            for number, (kind, graph) in enumerate(zip(kinds, graphs, strict=True)):
                if kind not in known:
                    done += 1
                    progress(f"profiling layers on submeshes, {done} of {total}")
                    plan = plan_stage(
                        graph,
                        rules_of(number),
                        submesh_cluster(self._cluster, shape),
                        self._method.shard,
                        start=0,
                        devices=tuple(range(math.prod(shape))),
                    )
                    known[kind] = _stage_cost(plan)
            made.append([known[kind] for kind in kinds])
        return made

    def _cost(self, first: int, last: int, submesh: int) -> StageCost:
        parts = self._costs[submesh][first : last + 1]
        return StageCost(
            forward=math.fsum(part.forward for part in parts),
            backward=math.fsum(part.backward for part in parts),
            update=math.fsum(part.update for part in parts),
            base_bytes=math.fsum(part.base_bytes for part in parts),
            activation_bytes=math.fsum(part.activation_bytes for part in parts),
            workspace_bytes=max(part.workspace_bytes for part in parts),
        )

    def _transfer(self, boundary: int, one: int, other: int) -> float:
        """Seconds over a boundary: on the links inside a host, if both submeshes could be there."""
        a, b = (math.prod(self.problem.submeshes[n]) for n in (one, other))
        inside = a + b <= flat_shape(self._cluster)[1]
        level = self._cluster.levels[-1 if inside else 0]
        return link_seconds(level, self._cuts[boundary], min(a, b))

    def _transfer_back(self, boundary: int, one: int, other: int) -> float:
        return 0.0 if self._method.schedule == "inference" else self._transfer(boundary, one, other)

    def makespan(self, stages: tuple[StageSlice, ...]) -> float:
        """The simulated step of a split."""
        count = self._method.num_micro_batches
        parts = [self._cost(*stage) for stage in stages]

        def transfer(source: int, target: int, kind: str) -> float:
            boundary = stages[max(source, target)].first
            pair = (stages[source].submesh, stages[target].submesh)
            return (self._transfer if kind == "F" else self._transfer_back)(boundary, *pair)

        durations = Durations(
            forward=tuple(part.forward for part in parts),
            backward=tuple(part.backward for part in parts),
            update=tuple(part.update for part in parts),
            transfer=transfer,
        )
        if len(stages) not in self._schedules:
            made = make_schedule(self._method.schedule, len(stages), count)
            self._schedules[len(stages)] = made
        return simulate(self._schedules[len(stages)], durations).makespan


def _stage_cost(plan: StagePlan) -> StageCost:
    return StageCost(
        plan.forward_seconds,
        plan.backward_seconds,
        plan.update_seconds,
        plan.base_bytes,
        plan.activation_bytes,
        plan.workspace_bytes,
    )
