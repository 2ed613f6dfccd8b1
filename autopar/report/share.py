"""How much of the contraction work of a function its plan divides among the devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.lower.program import Program
from autopar.report import hlo
from autopar.report.compile import compile_program, compile_single
from autopar.rules.rule import Rule


def parallel_share(
    program: Program,
    rules: Sequence[Rule],
    jaxpr: Any,
    *,
    timeout: float = 600.0,
    xla_flags: Sequence[str] = (),
) -> float:
    """Dot and convolution FLOPs of the one-device function over n times those of one device.

    1 is perfectly parallel, 1/n replicated; both numbers are read from compiled HLO (shapes times
    trip counts), so what XLA does to either program is in them.

    Args:
        program: the planned program, of n devices.
        rules: the rules of its ops.
        jaxpr: the ClosedJaxpr it was planned for.
        timeout: seconds for each of the two compilations.
        xla_flags: more XLA flags for both.

    Raises:
        AuditError: one of the two did not compile in time.
    """
    planned = compile_program(program, rules, timeout=timeout, xla_flags=xla_flags)
    return share_of(planned.text, program, jaxpr, timeout=timeout, xla_flags=xla_flags)


def share_of(
    planned: str,
    program: Program,
    jaxpr: Any,
    *,
    timeout: float = 600.0,
    xla_flags: Sequence[str] = (),
) -> float:
    """As `parallel_share`, for a planned program whose compiled HLO text is at hand."""
    single = compile_single(jaxpr, timeout=timeout, xla_flags=xla_flags)
    return hlo.parallel_share(hlo.read_hlo(single.text), hlo.read_hlo(planned), program.mesh.size)
