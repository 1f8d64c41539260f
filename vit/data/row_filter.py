"""An expression over the columns of an index, such as `min(width, height) >= 64 and size <
5_000_000`, that chooses samples. Free of torch.

The data's story: Python's own parser makes a tree of the text; a tree that holds anything but
columns, numbers, comparisons, `and`, `or`, `not`, `+ - * /`, `min` and `max` is refused with its
place; what is left is computed on columns of many rows at a time.
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
MOST_CHARACTERS = 2000
"""Of an expression, so that no parser runs out of stack."""
MOST_NESTED = 100
"""Parts in parts, for the same reason: `width + 1 + 1` are three."""
MOST = 2**53
"""Up to here float64, in which all is computed, holds every integer."""
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
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {"min": np.minimum, "max": np.maximum}
KNOWN = f"{', '.join(COLUMNS)} ({', '.join(f'{name}: {unit}' for name, unit in COLUMNS.items())})"


class RowFilter:
    """A parsed expression; called with index rows it says which of them are chosen."""

    def __init__(self, text: str):
        """Raises ValueError with the place of what is not allowed."""
        self.text = text
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"{len(text):,} characters, at most {MOST_CHARACTERS:,} are read")
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            place = (
                f" at character {error.offset}"
                if isinstance(error, SyntaxError) and error.offset
                else ""
            )
            raise ValueError(
                f"{text!r} cannot be read{place}: expected a comparison such as 'width >= 64 and"
                " size < 5_000_000'"
            ) from None
        if _depth(self._tree) > MOST_NESTED:
            raise ValueError(
                f"{text[:60]!r}... has parts in parts more than {MOST_NESTED} deep: write it"
                " shorter"
            )
        if not self._check(self._tree):
            raise ValueError(
                f"{text!r} gives numbers: expected a comparison such as 'width >= 64 and size <"
                " 5_000_000'"
            )

    def __call__(self, rows: np.ndarray, class_names: Sequence[str]) -> NDArray[np.bool_]:
        """Whether each row is chosen, (n,). Raises ValueError for a name that is no class."""
        # of a division by 0 comes infinity, which compares as such
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return np.broadcast_to(
                np.asarray(self._value(self._tree, rows, class_names), np.bool_), rows.shape
            )

    def _refuse(self, node: ast.AST, what: str) -> ValueError:
        segment = ast.get_source_segment(self.text.strip(), node) or self.text
        start = getattr(node, "col_offset", 0) + 1
        return ValueError(f"{segment!r} at character {start} of {self.text!r}: {what}")

    def _check(self, node: ast.expr) -> bool:
        """Whether a part gives truth values and not numbers. Raises ValueError for what is not
        allowed."""
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
                    raise self._refuse(
                        node,
                        f"no column{f', did you mean {near[0]}?' if near else ''}; there are"
                        f" {KNOWN}",
                    )
                return False
            case ast.Constant(value=int() | float() as value):
                if isinstance(value, int) and value > MOST:
                    raise self._refuse(node, f"numbers up to 2**53 ({MOST:,}) are computed with")
                return isinstance(value, bool)
        raise self._refuse(
            node,
            "not allowed; columns, numbers, comparisons, and, or, not, + - * /, min(a, b) and"
            " max(a, b) are",
        )

    def _want(self, parts: Sequence[ast.expr], is_truth: bool) -> None:
        for part in parts:
            if self._check(part) != is_truth:
                raise self._refuse(
                    part, "expected a comparison" if is_truth else "expected a number or a column"
                )

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
        for part in (value, *others):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                sides = [side for side in (value, *others) if not isinstance(side, ast.Constant)]
                is_class = isinstance(op, (ast.In, ast.NotIn, ast.Eq, ast.NotEq)) and [
                    ast.unparse(side) for side in sides
                ] == ["label"]
                if not is_class:
                    raise self._refuse(
                        part, "a text can only be a class that label is compared with"
                    )
            else:
                self._want([part], is_truth=False)

    def _value(self, node: ast.expr, rows: np.ndarray, names: Sequence[str]) -> Any:
        def of(part: ast.expr) -> Any:
            return self._value(part, rows, names)

        match node:
            case ast.BoolOp(op=op, values=parts):
                return reduce(
                    np.logical_and if isinstance(op, ast.And) else np.logical_or, map(of, parts)
                )
            case ast.UnaryOp(op=op, operand=operand):
                return np.logical_not(of(operand)) if isinstance(op, ast.Not) else -of(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return ARITHMETIC[type(op)](of(left), of(right))
            case ast.Compare(left=left, ops=ops, comparators=others):
                pairs = zip([left, *others], ops, others, strict=False)
                return reduce(
                    np.logical_and, (self._compared(*pair, rows, names) for pair in pairs)
                )
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return reduce(FUNCTIONS[name], map(of, arguments))
            case ast.Name(id=name):
                return rows[name].astype(np.float64)
            case ast.Constant(value=str() as name):
                if name not in names:
                    near = difflib.get_close_matches(name, names, n=1)
                    hint = (
                        f", did you mean {near[0]!r}?"
                        if near
                        else f"; there are {len(names):,}"
                        if names
                        else "; the data name none"
                    )
                    raise self._refuse(node, f"no class{hint}")
                return list(names).index(name)
            case ast.Constant(value=int() | float() as value):
                return np.float64(value)
        raise AssertionError("checked before")

    def _compared(
        self,
        value: ast.expr,
        op: ast.cmpop,
        other: ast.expr,
        rows: np.ndarray,
        names: Sequence[str],
    ) -> Any:
        left = self._value(value, rows, names)
        if isinstance(op, (ast.In, ast.NotIn)):
            found = reduce(
                np.logical_or, (left == self._value(part, rows, names) for part in _listed(other))
            )
            return found if isinstance(op, ast.In) else np.logical_not(found)
        return COMPARISONS[type(op)](left, self._value(other, rows, names))


def _listed(node: ast.expr) -> list[ast.expr]:
    """The values behind `in`: brackets around a single one make no tuple in Python."""
    if isinstance(node, (ast.Tuple, ast.List)):
        return node.elts
    return [node] if isinstance(node, ast.Constant) else []


def _depth(tree: ast.expr) -> int:
    """How many parts lie in each other, found without a stack."""
    level: list[ast.AST] = [tree]
    depth = 0
    while level:
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        depth = depth + 1
    return depth
