"""Jinja's immutable sandbox, with a budget of steps and a limit on every value that a template makes.

Templates come with models and are programs. Bounded for each rendering: the iterations of loops, weighted by the size
of their bodies; calls of macros; the text and lists that operators, filters and methods make; and the values that one
native operation visits, so that none holds the interpreter lock for long. Whatever may grow is estimated before it
runs. Memory follows from the steps: below 2 GB for the worst template, some MB for any published one. Not bounded:
the time in seconds, which depends on the machine, and the memory of many small objects below that figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from types import GeneratorType
from typing import Any, Final

import jinja2
import jinja2.nodes as nodes
import jinja2.runtime
import jinja2.sandbox
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer
from markupsafe import EscapeFormatter, Markup

from twofold.text.tokenizer.template_budget import CALL_STEPS, Budget, TemplateLimitError, ValueSize, allow
from twofold.text.tokenizer.template_growth import (
    FILTERS,
    METHODS,
    PRODUCTS,
    REFUSED_FILTERS,
    REFUSED_METHODS,
    check_numbers,
    multiplied,
    num_split_steps,
    number,
    percent_format,
)

BUDGET: Final = " budget"
"""Name of the budget among a rendering's variables. Templates cannot write a name with a space."""
MAX_NODES: Final = 20_000
"""Nodes of a parsed template, ten times those of the largest published one. Compiling takes about 0.1 ms for each."""
_CONSTANT_TIME: Final = frozenset(
    ("attr", "count", "d", "default", "first", "items", "last", "length", "map", "random", "reject", "rejectattr",
     "select", "selectattr")
)  # fmt: skip
"""Filters that visit no element before their result is read."""
_SHALLOW: Final = frozenset(("list", "reverse"))
"""Filters that do not visit the elements of elements."""
_COMPARING_TESTS: Final = frozenset(
    ("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lower",
     "lt", "ne", "upper", "divisibleby", "even", "odd")
)  # fmt: skip
_COUNTED, _SPEND, _VISITED, _SIZED, _CONCAT, _CONTAINS = (
    " counted", " spend", " visited", " sized", " concatenated", " contains"
)  # fmt: skip
"""Filters that `_Metering` inserts."""
_PRODUCT_PER_STEP_LOG2: Final = 8


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox. A rendering's variables must hold its `Budget` under the name BUDGET."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, **options: Any) -> None:
        # Constants would be computed while compiling, outside of any budget.
        super().__init__(optimized=False, finalize=_output, **options)
        self.globals.pop("lipsum")
        self.bound_filters(self.filters)
        for name in _COMPARING_TESTS:
            self.tests[name] = _bounded_test(self.tests[name])
        self.filters |= {
            _COUNTED: _counted, _SPEND: _spend, _VISITED: _visited, _SIZED: _sized, _CONCAT: _concatenated,
            _CONTAINS: _contains,
        }  # fmt: skip

    def bound_filters(self, filters: Mapping[str, Callable[..., Any]]) -> None:
        """Add filters, bounded by their names' estimates."""
        for name, function in list(filters.items()):
            self.filters[name] = _bounded_filter(name, function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = super()._parse(source, name, filename)
        if sum(1 for _ in parsed.find_all(nodes.Node)) > MAX_NODES:
            raise TemplateLimitError(f"it has more than {MAX_NODES} nodes")
        tree: nodes.Template = _Metering().visit(parsed)
        tree.set_environment(self)
        return tree

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            # The hash of a tuple visits all inside it.
            raise jinja2.TemplateRuntimeError("tuples are no keys in chat templates")
        return super().getitem(obj, argument)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        if operator == "%" and isinstance(left, str):
            allow(percent_format(budget.measure(right), left, right))
        elif operator == "*":
            allow(multiplied(left, right))
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, type(left)):
            allow(len(left) + len(right))
        if not isinstance(left, str):
            check_numbers(operator, left, right)
        return budget.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = _budget(__context)
        budget.spend(CALL_STEPS)
        # Jinja's own arguments of a call inside a loop or block.
        given = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
        if isinstance(__obj, _BoundedFormat):
            return budget.made(__obj.formatted(budget, args, given))
        if isinstance(__obj, jinja2.runtime.LoopContext):
            args = (budget.counted(args[0], 1), *args[1:]) if args else args
        elif not isinstance(__obj, jinja2.runtime.Macro) and __obj is not Namespace:
            args = tuple(_materialised(each) for each in args)
            _check_call(budget, __obj, args, given)
        return budget.made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        return None if super().wrap_str_format(value) is None else _BoundedFormat(self, value)


class _BoundedFormat:
    """The method `format` or `format_map` of one text."""

    def __init__(self, environment: jinja2.Environment, method: Any) -> None:
        self._environment, self._method = environment, method

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        return self.formatted(Budget(), args, kwargs)

    def formatted(self, budget: Budget, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        text = self._method.__self__
        if self._method.__name__ == "format_map":
            args, kwargs = (), dict(*args, **kwargs)
        if isinstance(text, Markup):
            fields: _Fields = _MarkupFields(self._environment, budget, escape=text.escape)
        else:
            fields = _Fields(self._environment, budget)
        whole: str = type(text)(fields.vformat(text, args, kwargs))
        return whole


class _Fields(jinja2.sandbox.SandboxedFormatter):
    """Formats the fields of a text, which are bounded together."""

    def __init__(self, environment: jinja2.Environment, budget: Budget, **options: Any) -> None:
        super().__init__(environment, **options)
        self._budget = budget
        self._num_chars = 0

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        self._budget.spend(10 * CALL_STEPS)
        return super().get_field(field_name, args, kwargs)

    def format_field(self, value: Any, format_spec: str) -> Any:
        widths = "".join(character if character.isdigit() else " " for character in format_spec)
        self._count(value, sum(map(number, widths.split())))
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._count(value, 0)
        return super().convert_field(value, conversion)

    def _count(self, value: Any, width: int) -> None:
        size = self._budget.measure(value)
        self._num_chars += width + size.chars + 2 * size.elements
        allow(self._num_chars)


class _MarkupFields(_Fields, EscapeFormatter):
    """The same for HTML, whose values are escaped."""


class _Metering(NodeTransformer):
    """Inserts the steps of loops and macros into a parsed template, and the checks of operators without a hook."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        steps = _num_steps([*node.body, *([node.test] if node.test is not None else [])])
        self.generic_visit(node)
        node.iter = _filter(_COUNTED, node.iter, nodes.Const(steps))
        if node.recursive:
            node.body.insert(0, _spending(steps, node.lineno))
        return node

    def _visit_callable(self, node: nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        steps = _num_steps(node.body)
        self.generic_visit(node)
        node.body.insert(0, _spending(steps, node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _visit_callable  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filter(_CONCAT, nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        first, *others = node.ops
        if not others and first.op in ("in", "notin"):
            contains = _filter(_CONTAINS, first.expr, node.expr)
            return contains if first.op == "in" else nodes.Not(contains, lineno=node.lineno)
        if not others and any(isinstance(operand, nodes.Const) for operand in (node.expr, first.expr)):
            return node
        node.expr = _filter(_VISITED, node.expr)
        for operand in node.ops:
            operand.expr = _filter(_VISITED, operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filter(_SIZED, node.node)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _filter(_VISITED, node.key)
        return node


_BODIES: Final[tuple[tuple[type[nodes.Node], tuple[str, ...]], ...]] = (
    (nodes.For, ("body", "test")),
    (nodes.Macro, ("body",)),
    (nodes.CallBlock, ("body",)),
    (nodes.Block, ("body",)),
)
"""Parts that count their own steps."""


def _num_steps(tree: Sequence[nodes.Node]) -> int:
    """Steps of these nodes once, with every branch, without the bodies of loops and macros."""
    steps, level = 0, list(tree)
    while level:
        node = level.pop()
        steps += 1 + (len(node.data) >> 5 if isinstance(node, nodes.TemplateData) else 0)
        separate = next((parts for kind, parts in _BODIES if isinstance(node, kind)), ())
        level += node.iter_child_nodes(exclude=separate)
    return steps


def _filter(name: str, value: nodes.Node, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)


def _spending(steps: int, line: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_filter(_SPEND, nodes.Const(steps, lineno=line)), lineno=line)


def _budget(context: jinja2.runtime.Context) -> Budget:
    budget: Budget = context.parent[BUDGET]
    return budget


@pass_context
def _output(context: jinja2.runtime.Context, value: Any) -> Any:
    """Before `value` is written as text."""
    _budget(context).measure(value)
    return value


@pass_context
def _counted(context: jinja2.runtime.Context, items: Iterable[Any], steps: int) -> Iterator[Any]:
    return _budget(context).counted(items, max(1, steps))


@pass_context
def _spend(context: jinja2.runtime.Context, steps: int) -> None:
    _budget(context).spend(max(1, steps))


@pass_context
def _visited(context: jinja2.runtime.Context, value: Any) -> Any:
    """Before an operator compares or hashes `value`."""
    _budget(context).measure(value)
    return value


@pass_context
def _sized(context: jinja2.runtime.Context, value: Any) -> Any:
    """Before a slice copies `value`."""
    return _budget(context).made(value)


@pass_context
def _contains(context: jinja2.runtime.Context, container: Any, item: Any) -> bool:
    budget = _budget(context)
    if isinstance(item, str | int | None) and isinstance(container, str | list | tuple | Mapping):
        budget.spend(0 if isinstance(container, Mapping) else len(container) >> 2)
    else:
        budget.measure(item)
        budget.measure(container)
    return item in container


@pass_context
def _concatenated(context: jinja2.runtime.Context, parts: list[Any]) -> str:
    """The operator ~."""
    budget = _budget(context)
    sizes = [budget.measure(part) for part in parts]
    allow(sum(size.chars + 2 * size.elements for size in sizes))
    join = jinja2.runtime.markup_join if context.eval_ctx.autoescape else jinja2.runtime.str_join
    text: str = budget.made(join(parts))
    return text


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    estimate = FILTERS.get(name)

    @pass_context
    def bounded(context: jinja2.runtime.Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        budget.spend(CALL_STEPS)
        if name in REFUSED_FILTERS:
            raise jinja2.TemplateRuntimeError(f"the filter {name!r} is not available in chat templates")
        if name == "sum" and not isinstance(kwargs.get("start", (*args, 0, 0)[1]), int | float):
            raise jinja2.TemplateRuntimeError("the filter 'sum' adds only numbers in chat templates")
        if name not in _CONSTANT_TIME:
            value = _materialised(value)
            size = _size(budget, name, value)
            given = sum(budget.measure(each).chars for each in (*args, *kwargs.values()))
            if name in PRODUCTS:
                budget.spend(size.chars * given >> _PRODUCT_PER_STEP_LOG2)
            if isinstance(value, str):
                budget.spend(num_split_steps(name, value))
            if estimate is not None:
                allow(estimate(size, value, *args, **kwargs))
        result = function(*_leading(function, context), value, *args, **kwargs)
        return budget.counted(result, 1) if isinstance(result, GeneratorType) else budget.made(result)

    return bounded


def _bounded_test(function: Any) -> Callable[..., Any]:
    @pass_context
    def bounded(context: jinja2.runtime.Context, value: Any, *args: Any) -> Any:
        budget = _budget(context)
        budget.spend(CALL_STEPS)
        for each in (value, *args):
            budget.measure(each)
            check_numbers("%", each, 0)
        return function(*_leading(function, context), value, *args)

    return bounded


def _leading(function: Callable[..., Any], context: jinja2.runtime.Context) -> tuple[Any, ...]:
    """The argument that Jinja passes to a filter or test before the value."""
    wanted = getattr(function, "jinja_pass_arg", None)
    leading = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
    return () if wanted is None else (leading[wanted.name],)


def _size(budget: Budget, name: str, value: Any) -> ValueSize:
    if name in _SHALLOW:
        num_elements = len(value) if isinstance(value, Sized) else 1
        budget.spend(num_elements >> 2)
        return ValueSize(num_elements, 0, 1)
    return budget.measure(value)


def _materialised(value: Any) -> Any:
    """The list of a lazy filter's elements."""
    return list(value) if isinstance(value, GeneratorType | reversed) else value


def _check_call(budget: Budget, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before a function or a method of a value is called."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if owner is not None and name in REFUSED_METHODS:
        raise jinja2.TemplateRuntimeError(f"the method {name!r} is not available in chat templates")
    sizes = [budget.measure(each) for each in (*args, *kwargs.values())]
    if not isinstance(owner, str):
        if isinstance(owner, list | tuple):
            budget.measure(owner)
        return
    size = budget.measure(owner)
    budget.spend(num_split_steps(name, owner, *args))
    if name in PRODUCTS:
        budget.spend(size.chars * sum(each.chars for each in sizes) >> _PRODUCT_PER_STEP_LOG2)
    if name in METHODS:
        joined = sizes[0] if name == "join" and sizes else size
        allow(METHODS[name](joined, owner, *args, **kwargs))
