"""Select samples by an expression over the columns of an index.

For example, `min(width, height) >= 64 and size < 5_000_000` selects rows by size. Python's parser
turns the text into a tree, which is evaluated on whole columns. Only columns, numbers, comparisons,
`and`, `or`, `not`, `+ - * /`, `min` and `max` are allowed. An error names the position of anything
else.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vit.system.spelling import did_you_mean

COLUMNS = {
    "width": "pixels",
    "height": "pixels",
    "size": "bytes of the encoded image",
    "label": "number of the class",
}
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
    ast.In: operator.eq,
    ast.NotIn: operator.ne,
}
"""The comparison operators. `in` uses `==` to compare with each value on its right."""
_ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {"min": np.minimum, "max": np.maximum}
COLUMNS_AND_UNITS = (
    f"{', '.join(COLUMNS)} ({', '.join(f'{name}: {unit}' for name, unit in COLUMNS.items())})"
)
EXPECTED = "expected a comparison such as 'width >= 64 and size < 5_000_000'"


class RowFilter:
    """A parsed expression that selects rows of an index."""

    def __init__(self, text: str):
        """Parse `text`. Raises ValueError with the position of an expression that is not
        allowed."""
        self.text = text.strip()
        try:
            self._tree = ast.parse(self.text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            offset = getattr(error, "offset", None)
            place = f" at character {offset}" if offset else ""
            raise ValueError(f"{text!r} cannot be read{place}: {EXPECTED}") from None
        # Evaluate one dummy row, so that an invalid expression fails before the data are opened.
        self(np.zeros(1, [(name, np.int64) for name in COLUMNS]), None)

    def __call__(self, rows: np.ndarray, class_names: Sequence[str] | None) -> NDArray[np.bool_]:
        """Return a mask (n,) of the selected rows. Raises ValueError for an unknown class name.

        class_names: None accepts every name, for names that are not known yet.
        """
        # Division by 0 gives infinity, which comparisons handle.
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            chosen = _Computation(self.text, rows, class_names).value(self._tree)
        if chosen.dtype != np.bool_:
            raise ValueError(f"{self.text!r} computes numbers: {EXPECTED}")
        return np.broadcast_to(chosen, rows.shape)


@dataclass
class _Computation:
    """An evaluator of expressions for some rows. Raises ValueError for expressions that are not
    allowed.

    A value is a numpy array or scalar: bool for conditions, float64 for numbers.
    """

    text: str
    rows: np.ndarray
    class_names: Sequence[str] | None

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression."""
        match node:
            case ast.BoolOp(op=op, values=parts):
                function = np.logical_and if isinstance(op, ast.And) else np.logical_or
                return reduce(function, self._values(parts, is_truth=True))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return ~self._values([operand], is_truth=True)[0]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._values([operand], is_truth=False)[0]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
                return ARITHMETIC[type(op)](*self._values([left, right], is_truth=False))
            case ast.Compare(left=left, ops=ops, comparators=operands):
                pairs = zip([left, *operands], ops, operands, strict=False)
                return reduce(np.logical_and, [self._compare(node, *pair) for pair in pairs])
            case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if (
                name in FUNCTIONS and len(parts) > 1
            ):
                return reduce(FUNCTIONS[name], self._values(parts, is_truth=False))
            case ast.Name(id=name):
                if name not in COLUMNS:
                    hint = did_you_mean(name, COLUMNS)
                    raise self._refuse(
                        node, f"not a column{hint}; the columns are {COLUMNS_AND_UNITS}"
                    )
                return self.rows[name].astype(np.float64)
            case ast.Constant(value=bool() as value):
                return np.bool_(value)
            case ast.Constant(value=int() | float() as value):
                return np.float64(value)
        raise self._refuse(
            node,
            "not allowed: use columns, numbers, comparisons, and, or, not, + - * /, min(a, b) and"
            " max(a, b)",
        )

    def _values(self, parts: Sequence[ast.expr], is_truth: bool, has_label: bool = False) -> list:
        """Return the values of `parts`, which must be conditions if `is_truth`, else numbers.

        has_label: whether parts may be class names.
        """
        values = []
        for part in parts:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                if not has_label:
                    raise self._refuse(
                        part, "text is only allowed as a class name that label is compared with"
                    )
                values.append(np.float64(self._label(part, part.value)))
                continue
            value = self.value(part)
            if (value.dtype == np.bool_) != is_truth:
                expected = "a comparison" if is_truth else "a number or a column"
                raise self._refuse(part, f"expected {expected}")
            values.append(value)
        return values

    def _compare(self, node: ast.expr, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Any:
        if type(op) not in COMPARISONS:
            raise self._refuse(node, "not allowed: use < <= > >= == != or in")
        operands = [right]
        if isinstance(op, (ast.In, ast.NotIn)) and not isinstance(right, ast.Constant):
            # Python parses `(1)` as a Constant, so accept a Constant like a tuple with one value.
            operands = right.elts if isinstance(right, (ast.Tuple, ast.List)) else []
        if not operands:
            raise self._refuse(
                right, "expected values in brackets after `in`, such as label in (1, 2)"
            )
        columns = [part for part in (left, *operands) if not isinstance(part, ast.Constant)]
        # `label` must be on the left or be the only column: `label in ('a', width)`, `'a' in
        # (label, 'b')`.
        has_label = ast.unparse(left) == "label" or list(map(ast.unparse, columns)) == ["label"]
        value, *values = self._values(
            [left, *operands], False, has_label and not isinstance(op, _ORDERED)
        )
        results = [COMPARISONS[type(op)](value, operand) for operand in values]
        return reduce(np.logical_or if isinstance(op, ast.In) else np.logical_and, results)

    def _label(self, node: ast.expr, name: str) -> int:
        if self.class_names is None:
            return 0
        if name in self.class_names:
            return self.class_names.index(name)
        others = f"{len(self.class_names):,} classes" if self.class_names else "no class names"
        hint = did_you_mean(name, self.class_names) or f"; the data have {others}"
        raise self._refuse(node, f"not a class{hint}")

    def _refuse(self, node: ast.expr, reason: str) -> ValueError:
        segment = ast.get_source_segment(self.text, node) or self.text
        return ValueError(
            f"{segment!r} at character {node.col_offset + 1} of {self.text!r}: {reason}"
        )
