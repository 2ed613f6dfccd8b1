"""Runs a program on devices of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autopar.errors import ClusterError
from autopar.lower.program import Program
from autopar.lower.spmd import jax_mesh, jit_program, named_shardings
from autopar.rules.rule import Rule


def local_devices(count: int, device_ids: Sequence[int] = ()) -> tuple[Any, ...]:
    """`count` devices of this process: those with the given ids, else the first ones.

    Raises:
        ClusterError: there are not enough.
    """
    here = jax.devices()
    if device_ids:
        by_id = {device.id: device for device in here}
        missing = [number for number in device_ids if number not in by_id]
        if not missing:
            return tuple(by_id[number] for number in device_ids)
    if len(here) < count:
        platform = here[0].platform
        raise ClusterError(
            f"the plan needs {count} devices and this process has {len(here)}",
            got=f"{len(here)} {platform} device(s)",
            why="a plan runs on as many devices as it was made for",
            remedy=f'jax.config.update("jax_num_cpu_devices", {count}) before the first use of JAX'
            if platform == "cpu"
            else f"a cluster of {len(here)} devices, or more hardware",
        )
    return tuple(here[:count])


def _in_place(leaf: Any, sharding: jax.sharding.NamedSharding) -> bool:
    """Whether a leaf already lies as wanted; results of the step itself are found at once."""
    here = getattr(leaf, "sharding", None)
    if here is None:
        return False
    return here is sharding or here == sharding or here.is_equivalent_to(sharding, leaf.ndim)


class LocalProgram:
    """A program compiled for a mesh of this process's devices.

    On CPU each step is awaited before the call returns: the CPU client aborts the process when
    several programs with collectives wait for too few threads. Elsewhere steps are asynchronous.
    """

    def __init__(
        self,
        program: Program,
        rules: Sequence[Rule],
        devices: Sequence[Any],
        hidden: Sequence[Any] = (),
    ) -> None:
        self.program = program
        self.mesh = jax_mesh(program.mesh, devices)
        self.in_shardings = named_shardings(program.inputs, self.mesh)
        self.out_shardings = named_shardings(program.outputs, self.mesh)
        self.step = jit_program(program, rules, self.mesh)
        self._await = devices[0].platform == "cpu"
        first = len(self.in_shardings) - len(hidden)
        # Even if the first use is inside a trace: what is kept must not be a tracer of it.
        with jax.ensure_compile_time_eval():
            self._hidden = tuple(
                jax.device_put(array, sharding)
                for array, sharding in zip(hidden, self.in_shardings[first:], strict=True)
            )

    def place(self, leaves: Sequence[Any], *, give_away: bool = False) -> list[Any]:
        """Put argument leaves where the program wants them; what is in place stays.

        Args:
            leaves: flat argument leaves.
            give_away: free the original of a moved leaf at once, if the step donates it.
        """
        placed = []
        for leaf, sharding, entry in zip(
            leaves, self.in_shardings, self.program.graph.inputs, strict=False
        ):
            if _in_place(leaf, sharding):
                placed.append(leaf)
            else:
                donate = give_away and entry.donated and isinstance(leaf, jax.Array)
                placed.append(jax.device_put(leaf, sharding, donate=donate))
        return placed

    def run(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """One step: flat argument leaves to flat results."""
        results = self.step(*self.place(leaves, give_away=True), *self._hidden)
        if self._await:
            jax.block_until_ready(results)
        return tuple(results)
