"""A transport whose messages leave and arrive when a test says so, and an executor on it.

Nothing here has a thread or a clock: what an executor does between two waits is what its log says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from autopar.errors import TransportError, WorkerError
from autopar.lower.instructions import BufferSpec, Key, Recv, Run, Send
from autopar.runtime.executor import Event, Executor, Loaded, Step
from autopar.runtime.transfer import TILES_PER_TAG, Receiver, Sender
from autopar.runtime.transport.base import ArraySpec, Request, Transport
from tests.runtime.lists import worker_program

Arrays = Sequence[Any]
Task = Callable[..., Arrays]


class Message(Request):
    """A message under way.

    Attributes:
        name: such as `recv 5`, by its tag.
        array: of a send, until it has left.
    """

    def __init__(self, name: str, array: Any = None) -> None:
        self.name = name
        self.array = array
        self._done = False
        self._value: Any = None
        self._failure: TransportError | None = None

    def done(self) -> bool:
        return self._done

    def result(self) -> Any:
        if self._failure is not None:
            raise self._failure
        assert self._done, f"{self.name} was read before it was done"
        return self._value

    def leave(self) -> Any:
        """A send has left; the bytes as they were at that moment."""
        bytes_then, self.array, self._done = np.array(self.array), None, True
        return bytes_then

    def arrive(self, array: Any) -> None:
        """A receive has come."""
        self._value, self._done = array, True

    def fail(self, what: str) -> None:
        """It will never be done well."""
        self._failure, self._done = TransportError(what), True


class ManualTransport(Transport):
    """One rank's end; only an executor uses it, so nobody waits by it.

    Attributes:
        log: what is posted and launched.
        messages: by name, such as `recv 5`.
        arrived: what is there already when it is posted, by name.
        launched: called by each launch.
    """

    def __init__(self, log: list[str]) -> None:
        self.rank = 0
        self.log = log
        self.messages: dict[str, Message] = {}
        self.arrived: dict[str, Any] = {}
        self.launched: Callable[[], None] = lambda: None

    @property
    def address(self) -> str:
        return "manual"

    def connect(self, peers: Mapping[int, str], *, timeout: float) -> None:
        raise NotImplementedError

    def launch(self) -> None:
        self.log.append("launch")
        self.launched()

    def isend(self, peer: int, tag: int, array: Any) -> Request:
        return self._post(f"send {tag // TILES_PER_TAG}", array)

    def irecv(self, peer: int, tag: int, spec: ArraySpec) -> Request:
        return self._post(f"recv {tag // TILES_PER_TAG}", None)

    def _post(self, name: str, array: Any) -> Request:
        self.log.append(name)
        self.messages[name] = Message(name, array)
        if name in self.arrived:
            self.messages[name].arrive(self.arrived[name])
        return self.messages[name]

    def wait(self, requests: Sequence[Request], *, timeout: float) -> None:
        raise NotImplementedError

    def abort(self, reason: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def on_device(array: Any) -> Any:
    """A `jax.Array` of its own on the first device."""
    return jax.device_put(np.array(array), jax.devices()[0])


def _sums(outputs: int, *inputs: Any) -> list[Any]:
    total = sum((np.asarray(array) for array in inputs), np.float32(0))
    return [on_device(total + np.float32(1 + number)) for number in range(outputs)]


class Rig:
    """An executor of one list, and a log of what it does.

    Args:
        text: of the list.
        tasks: by name; another task's output `n` is the sum of its inputs and `1 + n`.
        donated: per task the positions of what it takes over.
        specs: of buffers that are no `float32[4]`.
        persistent: constants and closed-over arrays.
        awaits: whether results are awaited, as on CPU.
        recorded: events go here.
    """

    def __init__(  # noqa: PLR0913 - a keyword each
        self,
        text: str,
        tasks: Mapping[str, Task] | None = None,
        *,
        donated: Mapping[str, tuple[int, ...]] | None = None,
        specs: Mapping[str, BufferSpec] | None = None,
        persistent: Mapping[str, Any] | None = None,
        awaits: bool = True,
        recorded: list[Event] | None = None,
    ) -> None:
        self.log: list[str] = []
        self.transport = ManualTransport(self.log)
        self.program = worker_program(text, donated=donated, specs=specs)
        devices = jax.devices()[:1]
        code, plans = self.program.instructions, self.program.transfers
        sends = {item.transfer for item in code if isinstance(item, Send)}
        recvs = {item.transfer for item in code if isinstance(item, Recv)}
        outputs = {item.task: len(item.outputs) for item in code if isinstance(item, Run)}
        loaded = Loaded(
            tasks={
                name: partial(self._run, name, (tasks or {}).get(name, partial(_sums, count)))
                for name, count in outputs.items()
            },
            zeros={
                laid: partial(self._zeros, laid) for laid in dict(self.program.buffers).values()
            },
            persistent=persistent or {},
            senders={number: Sender(plans[number], devices) for number in sends},
            receivers={number: Receiver(plans[number], devices) for number in recvs},
        )
        self.executor = Executor(
            self.program,
            loaded,
            self.transport,
            awaits=awaits,
            recorder=None if recorded is None else recorded.append,
            report=lambda step, position: self.log.append(f"at {step}.{position}"),
        )

    def _run(self, name: str, task: Task, *inputs: Any) -> Arrays:
        self.log.append(f"run {name}")
        return task(*inputs)

    def _zeros(self, laid: BufferSpec) -> Any:
        return on_device(np.zeros(laid.shape, laid.dtype))

    def step(
        self,
        args: Mapping[Key, Any] | None = None,
        given_away: Collection[Key] = (),
        *,
        number: int = 0,
    ) -> Step:
        """A step that has not begun."""
        return self.executor.run(number, args or {}, given_away)

    def done(self) -> list[str]:
        """What was done since it was last asked: runs, sends and receives, in order."""
        found = [line for line in self.log if not line.startswith(("at ", "launch"))]
        self.log.clear()
        return found

    def message(self, name: str) -> Message:
        """The last message of that name, such as `send 5`."""
        return self.transport.messages[name]


def waits_for(step: Step) -> list[str]:
    """Go on until the step waits: the messages it then waits for."""
    return [request.name for request in next(step) if isinstance(request, Message)]


def end_of(step: Step) -> dict[int, Any]:
    """Go on to the end, which must come without another wait: the results."""
    with pytest.raises(StopIteration) as end:
        next(step)
    results: dict[int, Any] = end.value.value
    return results


def values_of(step: Step) -> dict[int, list[float]]:
    """As `end_of`, with the results as numbers."""
    return {index: np.asarray(array).tolist() for index, array in end_of(step).items()}


def failure_of(rig: Rig, args: Mapping[Key, Any] | None = None, *, number: int = 0) -> WorkerError:
    """The error of a step that fails before it waits."""
    with pytest.raises(WorkerError) as caught:
        next(rig.step(args, number=number))
    return caught.value
