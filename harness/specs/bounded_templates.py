"""Jinja templates of others that may neither reach out of their sandbox nor take all memory or time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment

#: What a template may do in all, roughly in letters that it handles: a second or two.
WORK = 100_000_000

#: Letters that a prompt may have.
MOST_LETTERS = 1_000_000

#: Charges of a step of a loop, of a call and of an entry of a list, in addition to their content.
STEP, CALL, ENTRY = 100, 1_000, 50

#: Whatever rendering a template can raise: its expressions call methods of any value.
FAILURES = (
    *(TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError),
    *(RuntimeError, MemoryError, AssertionError),
)

#: Methods and filters with a result as long as their number.
WIDTHS = (
    *("center", "ljust", "rjust", "zfill", "expandtabs", "safe_range", "indent", "batch", "slice"),
    *("round", "tojson", "wordwrap", "truncate"),
)

#: Methods and filters with results that may repeat an argument at every position.
PRODUCTS = ("replace", "join", "format", "format_map", "translate", "indent", "wordwrap", "map")

#: Widths in a format, and places that take a width from an argument.
_WIDTH = re.compile(r"\d{3,}")
_OF_ARGUMENT = re.compile(r"%[-+ #0]*\*|\.\*|\{[^{}]*\{")


class TooMuch(RuntimeError):
    """A template would take more than its share of memory or time."""

    def __init__(self) -> None:
        super().__init__(
            f"it takes too much time or memory, or makes more than {MOST_LETTERS} letters"
        )


_left: ContextVar[int] = ContextVar("_left", default=WORK)


def spend(amount: int) -> None:
    """Subtract an amount of work from the template's remaining budget.

    Raises:
        TooMuch: nothing is left.
    """
    remaining = _left.get() - amount
    _left.set(remaining)
    if remaining < 0:
        raise TooMuch


def render(template: Template, values: Mapping[str, Any]) -> str:
    """Return a template of a `Bounded` environment, rendered with values.

    Raises:
        TooMuch: more than `WORK` or `MOST_LETTERS`.
        FAILURES: errors of its expressions.
    """
    _left.set(WORK)
    pieces, letters = [], 0
    for piece in template.generate(dict(values)):
        letters += len(piece)
        if letters > MOST_LETTERS:
            raise TooMuch
        pieces.append(piece)
    return "".join(pieces)


class Bounded(ImmutableSandboxedEnvironment):
    """A sandbox that charges every operation, call, filter and step of a loop with the most that it may handle."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, **options: Any) -> None:
        """Take the options of any environment; constants are not computed before a template is rendered."""
        super().__init__(**options, optimized=False, finalize=_charged)
        self.globals.pop("lipsum", None)
        self.filters.update({name: _guarded(name, call) for name, call in self.filters.items()})
        self.filters |= {"_steps": _steps, "_joined": _joined}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            # Each step may print all that the template has.
            charge = nodes.Const(STEP + len(source))
            loop.iter = nodes.Filter(loop.iter, "_steps", [charge], [], None, None)
        _without_concat(tree)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operation, charged by its result's size."""
        size, right_size = _size(left), _size(right)
        if operator == "**":
            power = min(abs(right), WORK) if isinstance(right, int | float) else 1
            spend(int(size * max(power, 1)))
        elif operator == "*":
            numbers = [side for side in (left, right) if isinstance(side, int)]
            times = max([1, *numbers]) if len(numbers) == 1 else 1
            spend((size + right_size) * times)
        elif operator == "%" and isinstance(left, str):
            spend(_of_format(left, [right]))
        else:
            spend(size + right_size)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, a method or a macro, charged by the size of its result."""
        name = getattr(called, "__name__", "")
        bound = getattr(getattr(called, "__wrapped__", called), "__self__", None)
        spend(_of_call(name, bound, [*args, *kwargs.values()]) + CALL)
        return super().call(context, called, *args, **kwargs)


def _charged(value: Any) -> Any:
    spend(_size(value))
    return value


def _steps(values: Iterable[Any], charge: int) -> Any:
    """Return the values of a loop, each step charged; Jinja handles values that are no lists."""
    return _Steps(values, charge) if hasattr(values, "__len__") else _each(values, charge)


class _Steps:
    """A list that charges its steps and still has a length."""

    def __init__(self, values: Any, charge: int) -> None:
        self._values, self._charge = values, charge

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return _each(self._values, self._charge)


def _each(values: Iterable[Any], charge: int) -> Iterator[Any]:
    for value in values:
        spend(charge)
        yield value


def _joined(values: list[Any]) -> str:
    """Return the texts of values one after the other, as Jinja's `~` does."""
    spend(sum(map(_size, values)))
    return str_join(values)


def _without_concat(tree: nodes.Node) -> None:
    """Put a filter in the place of `~`, which no environment can intercept."""
    for node in [tree, *tree.find_all(nodes.Node)]:
        for field, value in node.iter_fields():
            if isinstance(value, nodes.Concat):
                setattr(node, field, _filter(value))
            elif isinstance(value, list):
                value[:] = [
                    _filter(item) if isinstance(item, nodes.Concat) else item for item in value
                ]


def _filter(concat: nodes.Concat) -> nodes.Node:
    return nodes.Filter(nodes.List(concat.nodes), "_joined", [], [], None, None).set_lineno(
        concat.lineno
    )


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that is charged before it runs."""
    # Jinja hands a context or the like in front of the value, where a filter is marked so.
    ahead = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        value, arguments = args[ahead], args[ahead + 1 :]
        spend(_of_call(name, value, [*arguments, *kwargs.values()]) + CALL)
        return function(*args, **kwargs)

    return call


def _of_call(name: str, value: Any, args: list[Any]) -> int:
    """Return the most that a method or filter of a value may handle."""
    if name in ("format", "format_map") and isinstance(value, str):
        return _of_format(value, args)
    size = _size(value)
    numbers = [
        abs(argument)
        for argument in args
        if isinstance(argument, int | float) and argument == argument
    ]
    if name in WIDTHS:
        size = (size + 1) * int(min(max([1, *numbers]), WORK + 1))
    sizes = [_size(argument) for argument in args]
    if name in PRODUCTS:
        return (size + 1) * max([1, *sizes])
    return size + sum(sizes)


def _of_format(text: str, args: list[Any]) -> int:
    sizes = [_size(argument) for argument in args]
    if _OF_ARGUMENT.search(text):
        flat = [
            argument
            for arg in args
            for argument in (arg if isinstance(arg, tuple | list) else [arg])
        ]
        sizes += [abs(argument) for argument in flat if isinstance(argument, int)]
    widths = sum(int(width[:12]) for width in _WIDTH.findall(text))
    return (len(text) + 1) * max([1, *sizes]) + widths


def _size(value: Any) -> int:
    """Return how much text a value is, nested lists included; counting stops at the limit."""
    total, todo = 0, [value]
    while todo and total <= WORK:
        item = todo.pop()
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, int):
            total += 1 + item.bit_length() // 3
        elif isinstance(item, dict):
            total += 1 + ENTRY * len(item)
            todo += [*item, *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            total += 1 + ENTRY * len(item)
            todo += item
        elif isinstance(item, range):
            total += len(item)
        else:
            total += 1
    return total
