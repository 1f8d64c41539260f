"""Evaluate Python config files without running them.

The evaluator supports assignments, dictionaries, lists, numbers, strings, arithmetic, `if`,
functions that the file defines, and a few Python built-ins. Imported names are opaque. Calling an
opaque name returns an opaque value, which can be stored but not used in computations. Unsupported
code raises an error with its line number. Only the methods in `_METHODS` can be called on Python
objects.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}

_MOST_STEPS = 100_000
_LARGEST = 1_000_000
"""The limit on the length of strings and lists and on the bits of integers, which prevents a config
from exhausting memory. Each value is limited after it is computed, and a repetition before."""
_LARGEST_OF_POWER = 1000
"""The limit on base and exponent of `**`, because the result is computed before it is limited."""

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "round": round,
    "int": int,
    "float": float,
    "str": str,
    "len": len,
    "list": list,
    "tuple": tuple,
    "min": min,
    "max": max,
}
_METHODS: dict[type, tuple[str, ...]] = {
    str: ("split", "lower", "upper", "startswith", "endswith"),
    dict: ("get", "keys", "values", "items"),
}


class Opaque:
    """A value that is unknown unless the config runs. Assignments to attributes are ignored."""

    def __repr__(self) -> str:
        return "<not known without running it>"


class Returned(Exception):
    """An exception that implements the `return` statement. Its argument is the value."""


class _Function(NamedTuple):
    """A function that the config file defines."""

    node: ast.FunctionDef
    scopes: list[dict[str, Any]]


class PythonConfig:
    """The result of evaluating a config file: its names and functions.

    imported: replacements for imported functions by dotted name, such as `bvcc.parse_arg`.

    Raises ValueError with the file and the line for unsupported code.
    """

    def __init__(
        self, text: str, source: str, imported: Mapping[str, Callable[..., Any]] | None = None
    ):
        self.source = source
        self.names: dict[str, Any] = {}
        self._imported = imported or {}
        self._steps = 0
        self._depth = 0
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise ValueError(f"{source}:{error.lineno}: not valid Python: {error.msg}") from None
        except (RecursionError, MemoryError):
            raise ValueError(
                f"{source}:1: the config is nested too deeply: reduce the nesting"
            ) from None

        self._run(tree.body, [self.names])

    def call(self, name: str, *arguments: Any) -> Any:
        """Evaluate a call to the file's function `name`, with as many of `arguments` as it
        takes."""
        function = self.names.get(name)
        if not isinstance(function, _Function):
            raise ValueError(f"{self.source}: the config has no function {name}()")
        num_parameters = len(function.node.args.args)
        return self._apply(function, list(arguments[:num_parameters]), {}, function.node)

    # ---- statements ------------------------------------------------------------------------------

    def _run(self, body: list[ast.stmt], scopes: list[dict[str, Any]]) -> None:
        """Execute statements. Raises Returned at a `return`.

        scopes: the variables by name, from those of the file to those of the innermost function.
        """
        for statement in body:
            self._count(statement)
            match statement:
                case ast.Assign():
                    value = self._value(statement.value, scopes)
                    for target in statement.targets:
                        self._assign(target, value, scopes)
                case ast.AugAssign():
                    # `a += b` is evaluated as `a = a + b`.
                    read = ast.parse(ast.unparse(statement.target), mode="eval").body
                    both = ast.BinOp(read, statement.op, statement.value)
                    value = self._value(ast.copy_location(both, statement), scopes)
                    self._assign(statement.target, value, scopes)

                case ast.Expr():
                    self._value(statement.value, scopes)
                case ast.If():
                    holds = self._value(statement.test, scopes)
                    self._run(statement.body if holds else statement.orelse, scopes)
                case ast.FunctionDef():
                    scopes[-1][statement.name] = _Function(statement, scopes)
                case ast.Return():
                    raise Returned(
                        None if statement.value is None else self._value(statement.value, scopes)
                    )

                case ast.Import() | ast.ImportFrom():
                    for alias in statement.names:
                        scopes[-1][(alias.asname or alias.name).partition(".")[0]] = Opaque()
                case ast.Raise():
                    text = ast.unparse(statement.exc) if statement.exc else ""
                    raise self._error(statement, f"the config raises: {text}")
                case _:
                    raise self._error(
                        statement, "unsupported statement: only settings can be imported"
                    )

    def _assign(self, target: ast.expr, value: Any, scopes: list[dict[str, Any]]) -> None:
        """Assign to a variable, or to an item such as `config.lr` or `config["lr"]`."""
        match target:
            case ast.Name():
                scopes[-1][target.id] = value
            case ast.Attribute() | ast.Subscript():
                owner = self._value(target.value, scopes)
                key: Any = (
                    target.attr
                    if isinstance(target, ast.Attribute)
                    else self._value(target.slice, scopes)
                )

                if isinstance(owner, (dict, list)):
                    owner[key] = value
                elif not isinstance(owner, Opaque):
                    raise self._error(target, "only settings can be assigned to")
            case _:
                raise self._error(target, "only settings can be assigned to")

    # ---- values ----------------------------------------------------------------------------------

    def _value(self, node: ast.expr, scopes: list[dict[str, Any]]) -> Any:
        """Evaluate an expression with the method named after its type, such as `_binop`.

        Raises ValueError for a type without a method, and for a value too large for a config.
        """
        self._count(node)
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise self._error(node, "unsupported expression: only settings can be imported")

        try:
            value = method(node, scopes)
        except (TypeError, KeyError, IndexError, AttributeError, ZeroDivisionError) as error:
            raise self._error(node, f"{type(error).__name__}: {error}") from None

        is_long = isinstance(value, (str, list, tuple)) and len(value) > _LARGEST
        is_large = isinstance(value, int) and value.bit_length() > _LARGEST
        if is_long or is_large:
            raise self._error(node, "too long")
        return value

    def _constant(self, node: ast.Constant, scopes: list[dict[str, Any]]) -> Any:
        return node.value

    def _name(self, node: ast.Name, scopes: list[dict[str, Any]]) -> Any:
        for scope in reversed(scopes):
            if node.id in scope:
                return scope[node.id]
        if node.id in _FUNCTIONS:
            return _FUNCTIONS[node.id]
        raise self._error(node, f"{node.id} is not defined in the config")

    def _list(self, node: ast.List, scopes: list[dict[str, Any]]) -> list[Any]:
        return [self._value(item, scopes) for item in node.elts]

    def _tuple(self, node: ast.Tuple, scopes: list[dict[str, Any]]) -> tuple[Any, ...]:
        return tuple(self._value(item, scopes) for item in node.elts)

    def _dict(self, node: ast.Dict, scopes: list[dict[str, Any]]) -> dict[Any, Any]:
        mapping: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                mapping |= self._value(value, scopes)
            else:
                mapping[self._value(key, scopes)] = self._value(value, scopes)
        return mapping

    def _binop(self, node: ast.BinOp, scopes: list[dict[str, Any]]) -> Any:
        """Evaluate an operation, unless its result could be too large to compute."""
        left, right = self._value(node.left, scopes), self._value(node.right, scopes)
        if isinstance(node.op, ast.Pow):
            is_small = abs(left) <= _LARGEST_OF_POWER and abs(right) <= _LARGEST_OF_POWER
            if is_small:
                return left**right

        is_formatting = isinstance(node.op, ast.Mod) and isinstance(left, str)
        if type(node.op) not in _BINARY or is_formatting:
            raise self._error(node, "only + - * / // and % of numbers are supported")
        if isinstance(node.op, ast.Mult) and _repeated_length(left, right) > _LARGEST:
            raise self._error(node, "too long")
        return _BINARY[type(node.op)](left, right)

    def _unaryop(self, node: ast.UnaryOp, scopes: list[dict[str, Any]]) -> Any:
        value = self._value(node.operand, scopes)
        if isinstance(node.op, ast.Not):
            return not value
        return -value if isinstance(node.op, ast.USub) else value

    def _boolop(self, node: ast.BoolOp, scopes: list[dict[str, Any]]) -> Any:
        value: Any = None
        for part in node.values:
            value = self._value(part, scopes)
            if bool(value) is isinstance(node.op, ast.Or):
                break
        return value

    def _compare(self, node: ast.Compare, scopes: list[dict[str, Any]]) -> bool:
        left = self._value(node.left, scopes)
        for operation, part in zip(node.ops, node.comparators, strict=True):
            right = self._value(part, scopes)
            if not _COMPARE[type(operation)](left, right):
                return False
            left = right
        return True

    def _ifexp(self, node: ast.IfExp, scopes: list[dict[str, Any]]) -> Any:
        return self._value(node.body if self._value(node.test, scopes) else node.orelse, scopes)

    def _subscript(self, node: ast.Subscript, scopes: list[dict[str, Any]]) -> Any:
        owner = self._value(node.value, scopes)
        if isinstance(owner, Opaque):
            return Opaque()
        return owner[self._value(node.slice, scopes)]

    def _attribute(self, node: ast.Attribute, scopes: list[dict[str, Any]]) -> Any:
        owner = self._value(node.value, scopes)
        if isinstance(owner, Opaque):
            return Opaque()
        if isinstance(owner, dict) and node.attr in owner:
            return owner[node.attr]
        if node.attr in _METHODS.get(type(owner), ()):
            return getattr(owner, node.attr)
        raise self._error(node, f"unknown attribute {node.attr}")

    def _joinedstr(self, node: ast.JoinedStr, scopes: list[dict[str, Any]]) -> str:
        parts = []
        for part in node.values:
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            if getattr(part, "format_spec", None) is not None:
                raise self._error(node, "only plain {fields} are supported")
            parts.append(str(self._value(inner, scopes)))
        return "".join(parts)

    def _call(self, node: ast.Call, scopes: list[dict[str, Any]]) -> Any:
        """Evaluate a call of dict or ConfigDict, of a known import, of a text's `format`, or of a
        function of the file. The result of another import is unknown."""
        arguments = [self._value(item, scopes) for item in node.args]
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self._value(keyword.value, scopes)
            named |= value if keyword.arg is None else {keyword.arg: value}

        name = ast.unparse(node.func)
        if name == "dict" or name.endswith(".ConfigDict"):
            return dict(*arguments, **named)
        if name in self._imported:
            return self._imported[name](*arguments, **named)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "format":
            return _format(self._value(node.func.value, scopes), arguments, named)

        function = self._value(node.func, scopes)
        if isinstance(function, _Function):
            return self._apply(function, arguments, named, node)
        if isinstance(function, Opaque):
            return Opaque()
        return function(*arguments, **named)

    def _apply(
        self, function: _Function, arguments: list[Any], named: dict[str, Any], node: ast.AST
    ) -> Any:
        """Return what a function of the file returns for these arguments. node: the call."""
        if self._depth > 20:
            raise self._error(node, "function calls are nested too deeply")

        parameters = function.node.args
        names = [argument.arg for argument in parameters.args]
        defaults = dict(zip(names[::-1], parameters.defaults[::-1], strict=False))
        local = {name: self._value(value, function.scopes) for name, value in defaults.items()}
        local |= dict(zip(names, arguments, strict=False)) | named
        missing = [name for name in names if name not in local]
        if missing:
            raise self._error(
                node, f"missing arguments of {function.node.name}(): {', '.join(missing)}"
            )

        self._depth += 1
        try:
            self._run(function.node.body, [*function.scopes, local])
        except Returned as returned:
            return returned.args[0]
        finally:
            self._depth -= 1
        return None

    def _count(self, node: ast.AST) -> None:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise self._error(node, f"the config takes more than {_MOST_STEPS:,} steps")

    def _error(self, node: ast.AST, problem: str) -> ValueError:
        line = getattr(node, "lineno", 1)
        text = ast.unparse(node).splitlines()[0][:60]
        return ValueError(f"{self.source}:{line}: {text}: {problem}")


def _repeated_length(left: Any, right: Any) -> int:
    """Return the length of a repetition such as `[0] * 1000`, or 0 for other products."""
    for items, times in ((left, right), (right, left)):
        if isinstance(items, (str, list, tuple)) and isinstance(times, int):
            return len(items) * times
    return 0


def _format(text: str, arguments: list[Any], named: dict[str, Any]) -> str:
    """Evaluate `text.format(...)`. Format specs are rejected, because they could exhaust memory."""
    numbers = iter(range(len(arguments)))

    def field(match: re.Match[str]) -> str:
        name = match["name"] or str(next(numbers, len(arguments)))
        return str(arguments[int(name)] if name.isdigit() else named[name])

    filled = re.sub(r"\{(?P<name>\w*)\}", field, text)
    if set("{}") & set(re.sub(r"\{\w*\}", "", text)):
        raise TypeError("only plain {fields} are supported")
    return filled


def flattened(value: Any, path: str = "") -> dict[str, Any]:
    """Return the values in nested dictionaries, keyed by dotted path."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    leaves: dict[str, Any] = {}
    for key, inner in value.items():
        leaves |= flattened(inner, f"{path}.{key}" if path else str(key))
    return leaves


class ConfigLeaves(dict[str, Any]):
    """The values of a config, keyed by dotted path. Looking up a missing path raises ValueError."""

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"the config has no {key}: pass a training config that includes its bases")
