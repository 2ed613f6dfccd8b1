"""One worker: a JAX client that owns the mesh of a stage, and keeps arrays by handle.

A worker knows nothing of who drives it. Its life is

    Worker() -> load(program, code, ...) -> put / receive arguments -> step, step, ... -> close

and everything is compiled, placed and prepared by `load`: nothing compiles in a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import WorkerError
from autopar.lower.cross_mesh import TilePlan
from autopar.lower.instructions import BufferSpec, Key, Recv, Send, Task, WorkerProgram, Zero
from autopar.runtime.executor import Event, Executor, Loaded, Progress, Step
from autopar.runtime.transfer import Receiver, Sender, named_sharding
from autopar.runtime.transport.base import Transport

Code = bytes | Callable[..., Any]
"""Of a task: a `jax.export` serialisation, or a function of flat arrays to flat arrays."""


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """What a worker holds.

    Attributes:
        handles: arrays it keeps for its driver.
        bytes: of these arrays, over all of its devices.
        steps: it has done.
    """

    handles: int
    bytes: int
    steps: int


def in_place(array: Any, sharding: jax.sharding.Sharding) -> bool:
    """Whether an array already lies as a sharding says."""
    here = getattr(array, "sharding", None)
    if here is None:
        return False
    return bool(here == sharding or here.is_equivalent_to(sharding, array.ndim))


def sharding_of(
    spec: BufferSpec, program: WorkerProgram, devices: Sequence[Any]
) -> jax.sharding.NamedSharding:
    """How a buffer of a program lies on the worker's devices."""
    return named_sharding(spec.sharding, program.mesh, devices)


def put_array(array: Any, spec: BufferSpec, sharding: jax.sharding.Sharding) -> Any:
    """An array where a buffer wants it; one that is in place is returned as it is.

    Raises:
        WorkerError: it is of another shape or dtype.
    """
    given = array if hasattr(array, "dtype") else np.asarray(array)
    dtype = jax.dtypes.canonicalize_dtype(given.dtype)
    if tuple(given.shape) != spec.shape or dtype != jnp.dtype(spec.dtype):
        raise WorkerError(
            "an array does not fit its buffer",
            got=f"{dtype}{list(given.shape)}",
            why=f"the plan says {spec.dtype}{list(spec.shape)}",
        )
    return given if in_place(given, sharding) else jax.device_put(given, sharding)


class Worker:
    """Runs one worker program on devices of this process.

    Args:
        timeout: seconds that any single wait for a peer may take.
        recorder: takes the timed events of each step, if they are wanted.
        report: told (step, position) before each instruction.
    """

    def __init__(
        self,
        *,
        timeout: float = 60.0,
        recorder: Callable[[Event], None] | None = None,
        report: Callable[[int, int], None] | None = None,
    ) -> None:
        self.timeout = timeout
        self._recorder = recorder
        self._report = report
        self._store: dict[int, Any] = {}
        self._steps = 0
        self._failed = ""
        self._loaded: _Program | None = None
        self._routes: dict[tuple[str, TilePlan], Sender | Receiver] = {}

    def load(
        self,
        program: WorkerProgram,
        code: Mapping[str, Code],
        devices: Sequence[Any],
        transport: Transport,
        hidden: Sequence[Any] = (),
    ) -> None:
        """Compile all tasks, place constants and closed-over arrays, prepare all transfers.

        Args:
            program: verified.
            code: per task name.
            devices: as many as the program's mesh has, row-major.
            transport: of the program's rank; connected before the first step.
            hidden: closed-over arrays; `program.hidden` names them by index.

        Raises:
            WorkerError: naming the worker and the task that cannot be compiled.
        """
        if len(devices) != program.mesh.size:
            raise WorkerError(
                f"worker {program.rank} ({program.stage}) needs {program.mesh.size} devices",
                got=f"{len(devices)} devices for the mesh {program.mesh}",
            )
        loaded = Loaded(
            tasks={task.name: compile_task(program, task, code, devices) for task in program.tasks},
            zeros=_makers_of_zeros(program, devices),
            persistent=_persistent(program, devices, hidden),
            senders=_senders(program, devices, transport.memory),
            receivers=_receivers(program, devices, transport.memory),
        )
        for receiver in loaded.receivers.values():
            transport.prepare(receiver.specs)
        executor = Executor(
            program,
            loaded,
            transport,
            awaits=devices[0].platform == "cpu",
            recorder=self._recorder,
            report=self._report,
        )
        feeds = {key: (spec, sharding_of(spec, program, devices)) for key, spec in program.feeds()}
        self._loaded = _Program(program, tuple(devices), transport, executor, feeds)
        self._routes.clear()
        self._failed = ""

    def start(
        self,
        number: int,
        args: Mapping[Key, Any],
        results: Mapping[int, int],
        given_away: Collection[Key] = (),
    ) -> Step:
        """A step as a generator of waits; see `step`, which drives it."""
        loaded = self._ready()
        try:
            arrays = {key: self._argument(loaded, key, given) for key, given in args.items()}
            found = yield from loaded.executor.run(number, arrays, given_away)
        except Exception as error:
            self._failed = str(error).partition("\n")[0]
            raise
        handles = [(key, given) for key, given in args.items() if isinstance(given, int)]
        for key, handle in handles:
            if key in given_away or arrays[key].is_deleted():
                self._store.pop(handle, None)
        for index, handle in results.items():
            self._store[handle] = found[index]
        self._steps += 1
        return found

    def step(
        self,
        number: int,
        args: Mapping[Key, Any],
        results: Mapping[int, int],
        given_away: Collection[Key] = (),
    ) -> None:
        """Run one step to its end.

        Args:
            number: of the step, for errors and events.
            args: by (argument, micro-batch or WHOLE): a handle, or an array to be placed.
            results: the handle that each wanted result gets, by index; others are dropped.
            given_away: keys of `args` whose arrays the caller does not keep: their handles are
                gone afterwards.

        Raises:
            WorkerError: the step failed; the peers are told, and this worker runs no other step
                until it is loaded anew.
        """
        loaded = self._ready()
        running = self.start(number, args, results, given_away)
        try:
            self._drive(loaded, running)
        except WorkerError as error:
            loaded.transport.abort(error.what)
            raise

    def _drive(self, loaded: _Program, running: Step) -> None:
        try:
            requests = next(running)
            while True:
                try:
                    loaded.transport.wait(requests, timeout=self.timeout)
                except Exception as error:  # the step knows where it was
                    requests = running.throw(error)
                else:
                    requests = next(running)
        except StopIteration:
            return

    def _ready(self) -> _Program:
        if self._loaded is None:
            raise WorkerError("a worker has no program yet", remedy="load one first")
        if self._failed:
            raise WorkerError(
                f"worker {self._loaded.program.rank} failed before and runs no other step",
                got=self._failed,
                remedy="load the program again, over new connections",
            )
        return self._loaded

    def _argument(self, loaded: _Program, key: Key, given: Any) -> Any:
        if key not in loaded.feeds:
            raise WorkerError(
                f"worker {loaded.program.rank} takes no argument {key[0]} (micro-batch {key[1]})"
            )
        spec, sharding = loaded.feeds[key]
        return put_array(self.get(given) if isinstance(given, int) else given, spec, sharding)

    # Arrays by handle.

    def put(self, handle: int, array: Any, spec: BufferSpec) -> None:
        """Keep an array, laid out as a buffer of this worker's mesh."""
        loaded = self._ready()
        sharding = sharding_of(spec, loaded.program, loaded.devices)
        self._store[handle] = jax.block_until_ready(put_array(array, spec, sharding))

    def get(self, handle: int) -> Any:
        """The `jax.Array` of a handle.

        Raises:
            WorkerError: there is no such handle.
        """
        if handle not in self._store:
            raise WorkerError(
                f"there is no array with the handle {handle}",
                why="it was deleted, or given away to a step",
            )
        return self._store[handle]

    def delete(self, handles: Iterable[int]) -> None:
        """Forget arrays; unknown handles are no error, since a step may have taken them."""
        for handle in handles:
            self._store.pop(handle, None)

    def receive(self, handle: int, plan: TilePlan, peer: int, tag: int) -> None:
        """Receive an array from a peer (or `DRIVER`) by a plan that ends on this mesh."""
        loaded = self._ready()
        receiver = self._route("receive", plan)
        assert isinstance(receiver, Receiver)
        requests = receiver.post(loaded.transport, peer, tag)
        loaded.transport.wait(requests, timeout=self.timeout)
        self._store[handle] = receiver.join(requests)

    def send(self, handle: int, plan: TilePlan, peer: int, tag: int) -> None:
        """Send an array to a peer (or `DRIVER`) by a plan that begins on this mesh."""
        loaded = self._ready()
        sender = self._route("send", plan)
        assert isinstance(sender, Sender)
        requests = sender.post(loaded.transport, peer, tag, self.get(handle))
        loaded.transport.wait(requests, timeout=self.timeout)

    def _route(self, direction: str, plan: TilePlan) -> Sender | Receiver:
        loaded = self._ready()
        if (direction, plan) not in self._routes:
            end = Sender if direction == "send" else Receiver
            memory = loaded.transport.memory
            self._routes[direction, plan] = end(plan, loaded.devices, memory=memory)
        return self._routes[direction, plan]

    # What others may ask, also while a step runs.

    def stats(self) -> WorkerStats:
        """Live handles, and the bytes of their shards on this worker's devices."""
        arrays = tuple(array for array in self._store.values() if not array.is_deleted())
        held = sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)
        return WorkerStats(len(arrays), held, self._steps)

    def progress(self) -> Progress | None:
        """Where the worker is; from any thread. None before a program is loaded."""
        return None if self._loaded is None else self._loaded.executor.progress()

    def abort(self, reason: str) -> None:
        """End a step under way with an error, here and at the peers; from any thread."""
        if self._loaded is not None:
            self._failed = self._failed or reason
            self._loaded.transport.abort(reason)

    def close(self) -> None:
        """Forget all arrays and programs; the transport is its owner's to close."""
        self._store.clear()
        self._routes.clear()
        self._loaded = None


@dataclass(frozen=True, slots=True)
class _Program:
    """What `load` made."""

    program: WorkerProgram
    devices: tuple[Any, ...]
    transport: Transport
    executor: Executor
    feeds: Mapping[Key, tuple[BufferSpec, jax.sharding.Sharding]]


def _struct(spec: BufferSpec, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=sharding)


def compile_task(
    program: WorkerProgram, task: Task, code: Mapping[str, Code], devices: Sequence[Any]
) -> Callable[..., Sequence[Any]]:
    """The compiled program of a task on real devices.

    A serialised program has lost its donation, so that is asked for again here.

    Raises:
        WorkerError: naming worker and task.
    """
    who = f"task {task.name} of worker {program.rank} ({program.stage})"
    if task.name not in code:
        raise WorkerError(f"{who} has no code", got=f"code for {sorted(code)}")
    given = code[task.name]
    try:
        function = given if callable(given) else jax.export.deserialize(bytearray(given)).call
        ins, outs = (
            tuple(sharding_of(spec, program, devices) for spec in specs)
            for specs in (task.inputs, task.outputs)
        )
        jitted = jax.jit(
            lambda *arrays: tuple(function(*arrays)),
            in_shardings=ins,
            out_shardings=outs,
            donate_argnums=task.donated,
        )
        with warnings.catch_warnings():
            # What is donated only to be freed has no output to become.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            lowered = jitted.lower(*map(_struct, task.inputs, ins))
            compiled = lowered.compile()
    except Exception as error:
        raise WorkerError(
            f"{who} cannot be compiled",
            got=f"{type(error).__name__}: {error}",
        ) from error
    made = tuple((tuple(info.shape), str(info.dtype)) for info in lowered.out_info)
    wanted = tuple((spec.shape, spec.dtype) for spec in task.outputs)
    if made != wanted:
        raise WorkerError(f"{who} makes other outputs than planned", got=f"{made}, not {wanted}")
    return compiled


def _makers_of_zeros(
    program: WorkerProgram, devices: Sequence[Any]
) -> dict[BufferSpec, Callable[[], Any]]:
    specs = program.specs()
    zeroed = (specs[step.buffer] for step in program.instructions if isinstance(step, Zero))
    makers: dict[BufferSpec, Callable[[], Any]] = {}
    for spec in zeroed:
        if spec not in makers:
            zeros = jax.jit(
                lambda spec=spec: jnp.zeros(spec.shape, jnp.dtype(spec.dtype)),
                out_shardings=sharding_of(spec, program, devices),
            )
            makers[spec] = zeros.lower().compile()
    return makers


def _persistent(
    program: WorkerProgram, devices: Sequence[Any], hidden: Sequence[Any]
) -> dict[str, Any]:
    specs = program.specs()
    given = [(buffer, np.int32(value)) for buffer, value in program.constants]
    given += [(buffer, hidden[index]) for buffer, index in program.hidden]
    placed: dict[str, Any] = {}
    for buffer, array in given:
        spec = specs[buffer]
        placed[buffer] = put_array(array, spec, sharding_of(spec, program, devices))
    jax.block_until_ready(placed)
    return placed


def _senders(program: WorkerProgram, devices: Sequence[Any], memory: str) -> dict[int, Sender]:
    used = {step.transfer for step in program.instructions if isinstance(step, Send)}
    plans = program.transfers
    return {number: Sender(plans[number], devices, memory=memory) for number in sorted(used)}


def _receivers(program: WorkerProgram, devices: Sequence[Any], memory: str) -> dict[int, Receiver]:
    used = {step.transfer for step in program.instructions if isinstance(step, Recv)}
    plans = program.transfers
    return {number: Receiver(plans[number], devices, memory=memory) for number in sorted(used)}
