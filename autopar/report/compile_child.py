"""Compiling an exported program in a child process that has as many devices as the plan.

XLA fixes the number of (virtual CPU) devices when its client starts, so a process that runs on 1
device cannot compile for 64. The child starts with the right number, compiles what it reads from
its standard input, runs nothing, and ends::

    parent                                     python -m autopar.report.compile_child
      the bytes of jax.export    --stdin-->     deserialise, lower, compile
      a JSON line, then the text <--stdout--    the compiled HLO and its memory
      the phase it is in         <--stderr--    one line each; the last names what waited

Named scopes survive in ``op_name``, and the collectives are those of a compilation in place.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.export
import numpy as np
from jax.sharding import AxisType, Mesh, Sharding

from autopar.errors import AuditError

_PHASE = "phase: "


@dataclass(frozen=True, slots=True)
class CompiledMemory:
    """XLA's memory of one device's program, in bytes."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int


@dataclass(frozen=True, slots=True)
class CompiledText:
    """The compiled HLO text, and its memory where the back-end tells it."""

    text: str
    memory: CompiledMemory | None


def compile_text(
    exported: bytes,
    *,
    mesh: Sequence[tuple[str, int]],
    timeout: float,
    donate: Sequence[int] = (),
    xla_flags: Sequence[str] = (),
) -> CompiledText:
    """Compile a serialised ``jax.export`` program for virtual CPU devices.

    Args:
        exported: ``jax.export.export(jitted, platforms=["cpu"])(*shapes).serialize()``, where
            the shapes are sharded over an ``AbstractMesh`` of Auto axes. Containers that
            ``jax.export`` cannot serialise are best flattened before.
        mesh: (name, size) of that mesh's axes, in order; there are as many devices as places.
        timeout: seconds until the child is killed.
        donate: positions, in the flattened arguments, of those to donate: an exported program
            does not remember them.
        xla_flags: more XLA flags for the child; the parent's are not inherited.

    Raises:
        AuditError: the child failed, or did not end in time; says in which phase.
    """
    devices = math.prod(size for _, size in mesh)
    request = json.dumps({"mesh": list(mesh), "donate": list(donate)})
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "autopar.report.compile_child", request],
            input=exported,
            capture_output=True,
            timeout=timeout,
            env=_environment(devices, xla_flags),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise AuditError(
            f"the compilation for {devices} devices did not end in {timeout:g} s",
            where=f"child process, while {_phase(error.stderr)}",
            got=f"a program of {len(exported)} bytes",
            remedy="give the audit more time, or audit on a smaller mesh",
        ) from error
    if done.returncode != 0:
        raise AuditError(
            f"the program did not compile for {devices} devices",
            where=f"child process, while {_phase(done.stderr)}",
            got=f"exit status {done.returncode}",
            why=_tail(done.stderr),
        )
    return _read_reply(done.stdout)


def main(arguments: Sequence[str]) -> int:
    """Run the child: the program on standard input, the reply on standard output."""
    request = json.loads(arguments[0])
    # whatever libraries print must not end up in the reply
    reply = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    compiled = _compile(sys.stdin.buffer.read(), request["mesh"], tuple(request["donate"]))
    with reply:
        reply.write(_write_reply(compiled))
    return 0


def _compile(
    exported: bytes, axes: Sequence[tuple[str, int]], donate: tuple[int, ...]
) -> CompiledText:
    """Compile in this process; the program's own shardings place arguments and results."""
    _say("starting the CPU client")
    jax.config.update("jax_enable_x64", True)  # the program's dtypes are fixed; keep 64-bit ones
    mesh = _mesh(axes)
    _say("reading the exported program")
    program = jax.export.deserialize(bytearray(exported))
    if program.nr_devices != mesh.size:
        raise ValueError(f"the program is for {program.nr_devices} devices, not for {mesh.size}")
    sources, targets = _shardings(program, mesh)
    shapes = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(program.in_avals, sources, strict=True)
    ]

    def flat(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        args, kwargs = jax.tree.unflatten(program.in_tree, leaves)
        return tuple(jax.tree.leaves(program.call(*args, **kwargs)))

    _say("lowering")
    lowered = jax.jit(flat, donate_argnums=donate, out_shardings=targets).lower(*shapes)
    _say("compiling")
    compiled = lowered.compile()
    stats = compiled.memory_analysis()
    memory = stats and CompiledMemory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
    )
    return CompiledText(compiled.as_text() or "", memory)


def _mesh(axes: Sequence[tuple[str, int]]) -> Mesh:
    """The exported program's mesh: ``jax.export`` asks for the same names, sizes and types."""
    sizes = tuple(size for _, size in axes)
    devices = np.array(jax.devices("cpu")[: math.prod(sizes)]).reshape(sizes)
    return Mesh(devices, tuple(name for name, _ in axes), axis_types=(AxisType.Auto,) * len(sizes))


def _shardings(
    program: jax.export.Exported, mesh: Mesh
) -> tuple[tuple[Sharding | None, ...], tuple[Sharding | None, ...]]:
    """Shardings of the flat arguments and results on ``mesh``, None where none was given.

    A program for one device has none: ``jax.export`` gives it an empty mesh, which fits no other.
    """
    if mesh.size == 1:
        return (None,) * len(program.in_avals), (None,) * len(program.out_avals)
    return tuple(program.in_shardings_jax(mesh)), tuple(program.out_shardings_jax(mesh))


def _environment(devices: int, xla_flags: Sequence[str]) -> dict[str, str]:
    """The child's environment: CPU only, ``devices`` of them, this package importable."""
    flags = (f"--xla_force_host_platform_device_count={devices}", *xla_flags)
    paths = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_FLAGS": " ".join(flags),
        "NPROC": str(2 * devices),
    }


def _write_reply(compiled: CompiledText) -> bytes:
    memory = compiled.memory
    numbers = memory and {name: getattr(memory, name) for name in CompiledMemory.__slots__}
    return json.dumps({"memory": numbers}).encode() + b"\n" + compiled.text.encode()


def _read_reply(reply: bytes) -> CompiledText:
    header, _, text = reply.partition(b"\n")
    memory = json.loads(header)["memory"]
    return CompiledText(text.decode(), memory and CompiledMemory(**memory))


def _say(phase: str) -> None:
    print(f"{_PHASE}{phase}", file=sys.stderr, flush=True)


def _phase(stderr: bytes | None) -> str:
    lines = (stderr or b"").decode(errors="replace").splitlines()
    phases = [line.removeprefix(_PHASE) for line in lines if line.startswith(_PHASE)]
    return phases[-1] if phases else "starting Python and importing JAX"


def _tail(stderr: bytes) -> str:
    """The last lines that the child wrote, without its phases."""
    lines = stderr.decode(errors="replace").splitlines()
    return "\n".join([line for line in lines if line and not line.startswith(_PHASE)][-5:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
