"""The house's own rules that no linter holds: names of primitives, file sizes, links, wording."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("autopar", "solver", "runtime")
# Only these may know primitives by name; everything else works from their factor rules.
HOMES_OF_PRIMITIVE_NAMES = ("autopar/rules/", "autopar/trace/", "autopar/_compat/")
LONGEST_FILE = 500
LINKS = {"autopar/solver": "../solver", "autopar/runtime": "../runtime"}
FORBIDDEN = (
    r"(?<![\w.])/(?:work|root|home|Users)/\w",
    r"\b(?:TODO|FIXME|XXX|HACK)\b",
    r"\bchat-?gpt\b|\bcopilot\b|\bclaude\b|\banthropic\b",
    r"\bAI (?:assistant|agent|tool|helper)s?\b",
    r"\bas an AI\b",
)


def _files(*patterns: str) -> list[str]:
    """Tracked and new files, as paths from the root; what git ignores is left out."""
    listed = subprocess.run(
        ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *patterns),
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    names = sorted(set(listed.stdout.split("\0")) - {""})
    return [name for name in names if (ROOT / name).is_file()]


def _python_files(*rooms: str) -> list[str]:
    return [name for name in _files(*rooms) if name.endswith(".py")]


def _is_an_op(node: ast.expr) -> bool:
    """Whether an expression is called what ops and equations are: `op`, `graph.ops[0]`, `eqn`."""
    if isinstance(node, ast.Subscript):
        return _is_an_op(node.value)
    called = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return re.fullmatch(r"(?:\w*_)?(?:ops?|eqns?|equations?|producer|consumer)", called) is not None


def _speaks_of_a_primitive(node: ast.expr) -> bool:
    """Whether an expression reads a primitive or its name: `op.name`, `eqn.primitive.name`."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("primitive", "primitive_name") or (
            node.attr == "name" and (_speaks_of_a_primitive(node.value) or _is_an_op(node.value))
        )
    return isinstance(node, ast.Name) and node.id in ("primitive", "primitive_name", "prim")


def _holds_names(node: ast.expr, constants: dict[str, ast.expr]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in constants and _holds_names(constants[node.id], {})
    return any(
        isinstance(part, ast.Constant) and isinstance(part.value, str) for part in ast.walk(node)
    )


def _branches_on_names(source: str) -> Iterator[int]:
    """Lines that compare a primitive, or its name, with names written in the file."""
    tree = ast.parse(source)
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(_speaks_of_a_primitive, sides)) and any(
                _holds_names(side, constants) for side in sides if not _speaks_of_a_primitive(side)
            ):
                yield node.lineno
        elif isinstance(node, ast.Match) and _speaks_of_a_primitive(node.subject):
            yield node.lineno
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("startswith", "endswith")
            and _speaks_of_a_primitive(node.func.value)
        ):
            yield node.lineno


@pytest.mark.parametrize(
    "source",
    [
        'if eqn.primitive.name == "scan": pass',
        'if op.primitive in ("add", "mul"): pass',
        'if "while" != op.primitive: pass',
        'NAMES = frozenset({"add"})\ndef f(op): return op.primitive.name in NAMES',
        'match op.primitive:\n    case "add": pass',
        'if op.primitive.name.startswith("reduce_"): pass',
        'if op.name == "scan": pass',
        'if graph.ops[index].name in {"while", "cond"}: pass',
    ],
)
def test_a_branch_on_a_name_is_seen(source: str) -> None:
    assert list(_branches_on_names(source))


@pytest.mark.parametrize(
    "source",
    [
        "if op.primitive in registry: pass",
        "if a.primitive == b.primitive: pass",
        'if op.kind == "sum": pass',
        'if axis.name == "data": pass',
        "if op.name in table: pass",
        'text = f"{op.primitive} has no rule"',
    ],
)
def test_other_uses_of_a_primitive_are_left_alone(source: str) -> None:
    assert not list(_branches_on_names(source))


def test_only_rules_trace_and_compat_branch_on_primitive_names() -> None:
    found = [
        f"{name}:{line}"
        for name in _python_files(*ROOMS)
        if not name.startswith(HOMES_OF_PRIMITIVE_NAMES)
        for line in _branches_on_names((ROOT / name).read_text(encoding="utf-8"))
    ]
    assert not found, "these know primitives by name: " + ", ".join(found)


def test_no_file_is_too_long() -> None:
    lengths = {
        name: len((ROOT / name).read_text(encoding="utf-8").splitlines())
        for name in _python_files(".")
    }
    assert lengths
    assert {name: n for name, n in lengths.items() if n > LONGEST_FILE} == {}


def test_the_rooms_at_the_top_are_linked_into_the_package() -> None:
    listed = subprocess.run(
        ("git", "ls-files", "--stage", "--", *LINKS),
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    modes = {line.split("\t")[1]: line.split()[0] for line in listed.stdout.splitlines()}
    assert modes == dict.fromkeys(LINKS, "120000")
    assert {name: str((ROOT / name).readlink()) for name in LINKS} == LINKS


def test_no_file_holds_forbidden_wording() -> None:
    pattern = re.compile("|".join(FORBIDDEN))
    this_file = Path(__file__).resolve()
    found = []
    for name in _files("."):
        path = ROOT / name
        if path.resolve() == this_file:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # pictures and other binary files carry no wording
            continue
        found += [
            f"{name}:{number}: {line.strip()[:80]}"
            for number, line in enumerate(text.splitlines(), 1)
            if pattern.search(line)
        ]
    assert not found, "\n".join(found)
