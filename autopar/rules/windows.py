"""Windowed reductions: dims with a window of one pass through, the others stay whole."""

from __future__ import annotations

from autopar.rules.rule import Eqn, Rule, RuleMaker, make_rule


def _names(eqn: Eqn) -> list[str]:
    rank = len(eqn.in_shapes[0])
    plain = zip(
        eqn.params["window_dimensions"],
        eqn.params["window_strides"],
        eqn.params.get("base_dilation") or (1,) * rank,
        (tuple(pair) for pair in eqn.params["padding"] or ((0, 0),) * rank),
        strict=True,
    )
    return [
        f"d{dim}" if is_plain == (1, 1, 1, (0, 0)) else "." for dim, is_plain in enumerate(plain)
    ]


def reduce_window_sum(eqn: Eqn) -> Rule:
    """Sums over windows; linear."""
    return make_rule(eqn, [_names(eqn)], [_names(eqn)], linear=[(0,)])


def reduce_window_extreme(eqn: Eqn) -> Rule:
    """Maxima or minima over windows."""
    return make_rule(eqn, [_names(eqn)], [_names(eqn)])


def select_and_gather_add(eqn: Eqn) -> Rule:
    """The picked tangent of each window; linear in the tangents."""
    names = _names(eqn)
    return make_rule(eqn, [names, names], [names], linear=[(0,)])


def select_and_scatter_add(eqn: Eqn) -> Rule:
    """A max-pool's gradient: `(source, operand) -> operand`; linear in the source."""
    names = _names(eqn)
    return make_rule(eqn, [names, names], [names], linear=[(0,)])


RULES: dict[str, RuleMaker] = {
    "reduce_window_sum": reduce_window_sum,
    "reduce_window_max": reduce_window_extreme,
    "reduce_window_min": reduce_window_extreme,
    "select_and_gather_add": select_and_gather_add,
    "select_and_scatter_add": select_and_scatter_add,
}
