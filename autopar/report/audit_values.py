"""Value numbers of a jaxpr: which equations compute the same, and which compute constants.

Two equations are equal if they do the same to equal operands (value numbering, Cocke and Schwartz
1970). A *splat* is an array of one constant number; cutting, moving or selecting between equal
splats makes a splat again, on whatever device and at whatever index. These are the facts by which
XLA leaves out a collective that a program asks for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

from autopar.ir.text import params_text

COLLECTIVE_KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
"""JAX's collective primitives, and what the plan calls them."""

_PLACES = ("axis_index",)
"""Equations without operands that differ from device to device."""

_MOVES = (
    "broadcast_in_dim reshape transpose squeeze copy rev slice dynamic_slice all_gather all_to_all"
).split()
"""Of a splat these make a splat of the same number, whatever their other operands."""

_POINTWISE = frozenset(
    "abs add ceil clamp convert_element_type cos div eq exp exp2 expm1 floor ge gt integer_pow "
    "is_finite le log log1p logistic lt max min mul ne neg pow rsqrt sign sin sqrt square sub "
    "tanh".split()
)
"""Of splats these make a splat: each element is worked out from one element of each operand."""

_CHOICES = ("select_n",)
"""These give one of their operands after the first: if all of those are equal, that one."""

_TRIVIAL = (
    "broadcast_in_dim",
    "reshape",
    "convert_element_type",
    "copy",
    "slice",
    # XLA drops barriers late and then merges what they kept apart.
    "optimization_barrier",
)
"""These change nothing where the result has the shape and dtype of the operand."""

_NEUTRAL = {"mul": (1, (0, 1)), "div": (1, (1,)), "add": (0, (0, 1)), "sub": (0, (1,))}
"""A number that changes nothing, and the operands where it does not."""

_POWER = {"integer_pow": "y"}
"""Powers, and the parameter that is their exponent: the first power changes nothing."""


@dataclass
class Numbering:
    """Value numbers of one jaxpr and of the calls in it: equal numbers mean equal values.

    Attributes:
        numbers: per variable.
        keys: what each number stands for.
        constant: numbers of values that depend on no input and on no device.
        splats: per number of a splat, what its one element is.
    """

    numbers: dict[Any, int] = field(default_factory=dict)
    keys: dict[object, int] = field(default_factory=dict)
    constant: set[int] = field(default_factory=set)
    splats: dict[int, object] = field(default_factory=dict)
    _fresh: Iterator[int] = field(default_factory=itertools.count)

    def of(self, atom: Any) -> int:
        """The number of a variable (a new one at its first sight) or of a literal."""
        if isinstance(atom, Literal):
            return self._splat(("literal", _plain(atom.val)), atom.aval)
        if atom not in self.numbers:
            self.numbers[atom] = next(self._fresh)
        return self.numbers[atom]

    def enter(self, parameters: Sequence[Any], arguments: Sequence[Any]) -> None:
        """Number the parameters of a called jaxpr as the arguments."""
        for parameter, argument in zip(parameters, arguments, strict=True):
            self.numbers[parameter] = self.of(argument)

    def leave(self, results: Sequence[Any], values: Sequence[Any]) -> None:
        """Number the results of a call as what the called jaxpr returns."""
        for result, value in zip(results, values, strict=True):
            self.numbers[result] = self.of(value)

    def equation(self, eqn: Any) -> tuple[object, bool]:
        """Number an equation's results; a key that equal equations share, and constness."""
        name, inputs = str(eqn.primitive), tuple(self.of(atom) for atom in eqn.invars)
        known = self._known(name, inputs, eqn)
        if known is not None:
            self.numbers[eqn.outvars[0]] = known
            return (name, inputs, params_text(eqn.params)), known in self.constant
        pure = not eqn.effects or name in COLLECTIVE_KINDS or name in _PLACES
        pure = pure and not any(True for _ in jaxprs_in_params(eqn.params))
        # what acts (a callback) or holds a program (a loop) is equal to nothing but itself
        key = (name, inputs, params_text(eqn.params) if pure else id(eqn))
        fixed = pure and name not in _PLACES and self.constant.issuperset(inputs)
        for position, var in enumerate(eqn.outvars):
            if fixed and (var.aval.shape == () or self._is_pointwise(name, inputs)):
                elements = tuple(self.splats.get(number, number) for number in inputs)
                element = (name, elements, key[2], position)
                self.numbers[var] = self._splat(element, var.aval)
                continue
            self.numbers[var] = self._keyed((key, position))
            if fixed:
                self.constant.add(self.numbers[var])
        return key, fixed

    def _is_pointwise(self, name: str, inputs: Sequence[int]) -> bool:
        return name in _POINTWISE and all(number in self.splats for number in inputs)

    def _known(self, name: str, inputs: tuple[int, ...], eqn: Any) -> int | None:
        """The number of a result that is a splat or one of the operands, else None."""
        if name in _MOVES and inputs[0] in self.splats:
            return self._splat(self.splats[inputs[0]], eqn.outvars[0].aval)
        if name in _CHOICES and len(set(inputs[1:])) == 1:
            return inputs[1]
        kept = self._kept(name, inputs, eqn.params)
        if kept is None or not _alike(eqn.invars[kept].aval, eqn.outvars[0].aval):
            return None
        return inputs[kept]

    def _kept(self, name: str, inputs: tuple[int, ...], params: Mapping[str, Any]) -> int | None:
        """The operand that an equation returns unchanged, if it keeps its shape and dtype."""
        if name in _TRIVIAL or params.get(_POWER.get(name, "")) == 1:
            return 0
        element, positions = _NEUTRAL.get(name, (None, ()))
        for position in positions:
            if self.splats.get(inputs[position]) == ("literal", element):
                return 1 - position
        return None

    def _splat(self, element: object, aval: Any) -> int:
        number = self._keyed(("splat", element, aval.shape, str(aval.dtype)))
        self.constant.add(number)
        self.splats[number] = element
        return number

    def _keyed(self, key: object) -> int:
        if key not in self.keys:
            self.keys[key] = next(self._fresh)
        return self.keys[key]


def _plain(value: Any) -> object:
    """A literal's number; of a random key its text."""
    array = np.asarray(value)
    return array.item() if array.dtype.kind in "bifcu" else repr(value)


def _alike(one: Any, other: Any) -> bool:
    return bool(one.shape == other.shape and one.dtype == other.dtype)


def live_equations(jaxpr: Any) -> frozenset[int]:
    """Positions of the equations whose results reach the jaxpr's results, or that act."""
    wanted = {var for var in jaxpr.outvars if not isinstance(var, Literal)}
    live = set()
    for position in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[position]
        names_axes = str(eqn.primitive) in COLLECTIVE_KINDS or str(eqn.primitive) in _PLACES
        if (eqn.effects and not names_axes) or any(var in wanted for var in eqn.outvars):
            live.add(position)
            wanted.update(var for var in eqn.invars if not isinstance(var, Literal))
    return frozenset(live)
