"""Every error a user can meet: what, where, what was got, why, and what to try."""

from __future__ import annotations


class AutoparError(Exception):
    """Base of all errors raised on purpose.

    Args:
        what: one sentence that names the failure.
        where: the user's file and line, or the file or flag concerned.
        got: the offending value, shortened.
        why: the reason the value cannot be used.
        remedy: what to try instead.
    """

    def __init__(
        self, what: str, *, where: str = "", got: str = "", why: str = "", remedy: str = ""
    ) -> None:
        self.what = what
        self.where = where
        self.got = got
        self.why = why
        self.remedy = remedy
        parts = (("where", where), ("got", got), ("why", why), ("try", remedy))
        lines = [what, *(f"  {name}: {text}" for name, text in parts if text)]
        super().__init__("\n".join(lines))


class ArgumentError(AutoparError):
    """An argument of a public function cannot be used."""


class ClusterError(AutoparError):
    """A cluster description is malformed, unknown, or does not fit the devices."""


class TraceError(AutoparError):
    """The user's function cannot be traced into a graph."""


class TransformError(AutoparError):
    """A parallelised function was differentiated, batched, or wrapped in a way it refuses."""


class RuleError(AutoparError):
    """A factor rule is malformed or does not fit the equation."""


class VerifyError(AutoparError):
    """A graph, plan, or schedule breaks one of its invariants."""


class SolveError(AutoparError):
    """No plan was found: infeasible, or a solver failed."""


class PlanError(AutoparError):
    """A plan file is malformed, of another version, or of another function."""


class AuditError(AutoparError):
    """The compiled program could not be read or compiled for an audit."""


class MicrobatchError(AutoparError):
    """The function cannot be split over micro-batches exactly."""


class ScheduleError(AutoparError):
    """A schedule is malformed, breaks a dependency, or would deadlock."""


class TransportError(AutoparError):
    """A transfer between workers failed, or did not end in time."""


class WorkerError(AutoparError):
    """A worker raised, died, or hangs: names worker, stage, step and instruction."""
