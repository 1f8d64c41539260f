"""Expressions over the columns of an index that choose samples.

Such as `min(width, height) >= 64 and size < 5_000_000`. Python's own parser makes a tree of the
text. A tree with anything but columns, numbers, comparisons, `and`, `or`, `not`, `+ - * /`, `min`
and `max` is refused, with its position; the rest is computed on columns of many rows at a time.
"""

from __future__ import annotations

import ast
import difflib
import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLUMNS = {
    "width": "pixels",
    "height": "pixels",
    "size": "bytes of the encoded image",
    "label": "number of the class",
}
MAX_CHARACTERS = 2000
"""Length of an expression, so that no parser runs out of stack."""
MAX_DEPTH = 100
"""Nesting, for the same reason: `width + 1 + 1` is three deep."""
MAX_INTEGER = 2**53
"""Up to here float64, in which everything is computed, represents every integer."""
ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {"min": np.minimum, "max": np.maximum}
COLUMNS_AND_UNITS = (
    f"{', '.join(COLUMNS)} ({', '.join(f'{name}: {unit}' for name, unit in COLUMNS.items())})"
)


class RowFilter:
    """A parsed expression: rows of an index -> which of them it chooses."""

    def __init__(self, text: str):
        """Raises ValueError with the position of what is not allowed."""
        self.text = text
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"{len(text):,} characters, at most {MAX_CHARACTERS:,} are read")
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            place = ""
            if isinstance(error, SyntaxError) and error.offset:
                place = f" at character {error.offset}"
            raise ValueError(
                f"{text!r} cannot be read{place}: expected a comparison such as 'width >= 64 and"
                " size < 5_000_000'"
            ) from None
        if _depth(self._tree) > MAX_DEPTH:
            raise ValueError(
                f"{text[:60]!r}... is nested more than {MAX_DEPTH} deep: write it shorter"
            )
        if not self._check(self._tree):
            raise ValueError(
                f"{text!r} gives numbers: expected a comparison such as 'width >= 64 and size <"
                " 5_000_000'"
            )

    def __call__(self, rows: np.ndarray, class_names: Sequence[str]) -> NDArray[np.bool_]:
        """Return whether each row is chosen, (n,). Raises ValueError for an unknown class."""
        # A division by 0 gives infinity, which compares as such.
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            chosen = np.asarray(self._value(self._tree, rows, class_names), np.bool_)
        return np.broadcast_to(chosen, rows.shape)

    def _refuse(self, node: ast.AST, what: str) -> ValueError:
        segment = ast.get_source_segment(self.text.strip(), node) or self.text
        start = getattr(node, "col_offset", 0) + 1
        return ValueError(f"{segment!r} at character {start} of {self.text!r}: {what}")

    def _check(self, node: ast.expr) -> bool:
        """Return whether a part is true or false, and not a number.

        Raises ValueError for what is not allowed.
        """
        match node:
            case ast.BoolOp(values=parts):
                self._want(parts, is_truth=True)
                return True
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self._want([operand], is_truth=True)
                return True
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                self._want([operand], is_truth=False)
                return False
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
                self._want([left, right], is_truth=False)
                return False
            case ast.Compare(left=left, ops=ops, comparators=others):
                for value, comparison, other in zip([left, *others], ops, others, strict=False):
                    self._check_comparison(node, value, comparison, other)
                return True
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if (
                name in FUNCTIONS and len(arguments) > 1
            ):
                self._want(arguments, is_truth=False)
                return False
            case ast.Name(id=name):
                if name not in COLUMNS:
                    near = difflib.get_close_matches(name, COLUMNS, n=1)
                    hint = f", did you mean {near[0]}?" if near else ""
                    raise self._refuse(node, f"no column{hint}; there are {COLUMNS_AND_UNITS}")
                return False
            case ast.Constant(value=int() | float() as value):
                if isinstance(value, int) and value > MAX_INTEGER:
                    raise self._refuse(node, f"expected integers up to 2**53 ({MAX_INTEGER:,})")
                return isinstance(value, bool)
        raise self._refuse(
            node,
            "not allowed; columns, numbers, comparisons, and, or, not, + - * /, min(a, b) and"
            " max(a, b) are",
        )

    def _want(self, parts: Sequence[ast.expr], is_truth: bool) -> None:
        for part in parts:
            if self._check(part) != is_truth:
                expected = "a comparison" if is_truth else "a number or a column"
                raise self._refuse(part, f"expected {expected}")

    def _check_comparison(
        self, node: ast.Compare, value: ast.expr, op: ast.cmpop, other: ast.expr
    ) -> None:
        if isinstance(op, (ast.In, ast.NotIn)):
            others = _listed(other)
            if not others:
                raise self._refuse(
                    other, "expected values in brackets behind `in`, as label in (1, 2)"
                )
        elif type(op) in COMPARISONS:
            others = [other]
        else:
            raise self._refuse(node, "not allowed; < <= > >= == != and in are")
        columns = [part for part in (value, *others) if not isinstance(part, ast.Constant)]
        # `label in ('a', width)`, or label in any place as the only column: `'a' in (label, 'b')`.
        has_label = ast.unparse(value) == "label" or list(map(ast.unparse, columns)) == ["label"]
        for part in (value, *others):
            if not (isinstance(part, ast.Constant) and isinstance(part.value, str)):
                self._want([part], is_truth=False)
            elif not has_label or isinstance(op, _ORDERED):
                raise self._refuse(part, "a text can only be a class that label is compared with")

    def _value(self, node: ast.expr, rows: np.ndarray, names: Sequence[str]) -> Any:
        def value_of(part: ast.expr) -> Any:
            return self._value(part, rows, names)

        match node:
            case ast.BoolOp(op=op, values=values):
                function = np.logical_and if isinstance(op, ast.And) else np.logical_or
                return reduce(function, map(value_of, values))
            case ast.UnaryOp(op=op, operand=operand):
                value = value_of(operand)
                return np.logical_not(value) if isinstance(op, ast.Not) else -value
            case ast.BinOp(left=left, op=op, right=right):
                return ARITHMETIC[type(op)](value_of(left), value_of(right))
            case ast.Compare(left=left, ops=ops, comparators=others):
                sides = [value_of(left), *map(value_of, others)]
                found = [_compare(*pair) for pair in zip(sides, ops, sides[1:], strict=False)]
                return reduce(np.logical_and, found)
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return reduce(FUNCTIONS[name], map(value_of, arguments))
            case ast.Name(id=name):
                return rows[name].astype(np.float64)
            case ast.Constant(value=str() as name):
                if name not in names:
                    near = difflib.get_close_matches(name, names, n=1)
                    hint = f"; there are {len(names):,}" if names else "; the data name none"
                    if near:
                        hint = f", did you mean {near[0]!r}?"
                    raise self._refuse(node, f"no class{hint}")
                return list(names).index(name)
            case ast.Constant(value=int() | float() as value):
                return np.float64(value)
        if isinstance(node, (ast.Tuple, ast.List)):
            return [value_of(part) for part in node.elts]
        raise AssertionError("checked before")


def _compare(left: Any, op: ast.cmpop, right: Any) -> Any:
    if not isinstance(op, (ast.In, ast.NotIn)):
        return COMPARISONS[type(op)](left, right)
    # Brackets around a single value make no tuple in Python.
    values = right if isinstance(right, list) else [right]
    found = reduce(np.logical_or, (left == value for value in values))
    return found if isinstance(op, ast.In) else np.logical_not(found)


def _listed(node: ast.expr) -> list[ast.expr]:
    """Return the values after `in`: brackets around a single one make no tuple in Python."""
    if isinstance(node, (ast.Tuple, ast.List)):
        return node.elts
    return [node] if isinstance(node, ast.Constant) else []


def _depth(tree: ast.expr) -> int:
    """Return how deep parts are nested, without recursion."""
    level: list[ast.AST] = [tree]
    depth = 0
    while level:
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        depth += 1
    return depth
