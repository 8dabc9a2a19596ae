"""YAML text as located nodes, with errors that show file, line, column and an excerpt.

PyYAML composes the nodes; what they mean is read here, because YAML 1.1 takes `no`, `010` and
`1:30` for something else than what is written, and lets the last of two equal keys win.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import yaml

from distcell.errors import StrategyError, combine

_INT = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER_LIKE = re.compile(r"[-+]?[0-9.][0-9a-fA-FxXob_:.eE+-]*")
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NULLS = frozenset({"null", "Null", "NULL", "~"})
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """PyYAML's loader, except that `?` is text: `[dp, tp?, ?]` is a list of three words.

    In flow style PyYAML takes `?` for the mark of a complex key, which no strategy file has.
    """

    _in_plain = False

    def check_key(self) -> bool:
        return False

    def check_plain(self) -> bool:
        return self.peek() == "?" or bool(super().check_plain())

    def scan_plain(self) -> yaml.ScalarToken:
        self._in_plain = True
        try:
            return super().scan_plain()
        finally:
            self._in_plain = False

    def peek(self, index: int = 0) -> str:
        letter = str(super().peek(index))
        return "." if self._in_plain and letter == "?" else letter


@dataclass
class Document:
    """The text of one file, its outermost node, and the errors found so far.

    Args:
        source: what the file is called in errors.
        text: its content.
    """

    source: str
    text: str
    errors: list[StrategyError] = field(default_factory=list)

    def compose(self) -> yaml.Node:
        """Returns the outermost node.

        Raises:
            StrategyError: the text is no YAML, or is empty.
        """
        try:
            node = yaml.compose(self.text, Loader=_Loader)
        except yaml.MarkedYAMLError as error:
            raise self._syntax_error(error) from error
        except yaml.YAMLError as error:
            raise StrategyError(f"{self.source} is not YAML", where=str(error)) from error
        if node is None:
            raise StrategyError(f"{self.source} is empty", hint="it begins with `distcell: 1`")
        return node

    def _syntax_error(self, error: yaml.MarkedYAMLError) -> StrategyError:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(text for text in (error.context, error.problem) if text)
        hint = None
        if "alias" in problem:
            hint = 'a name that begins with `*` needs quotes: `"*": [dp]`'
        elif "expected a single document" in problem:
            hint = "a strategy file is one document; remove `---`"
        where = () if mark is None else self.excerpt(mark.line, mark.column, mark.column + 1)
        return StrategyError(f"not YAML: {problem}", where=where, hint=hint)

    def place(self, node: yaml.Node) -> str:
        """Returns where a node begins: `strategies/tensor.yaml:12:20`."""
        mark = node.start_mark
        return f"{self.source}:{mark.line + 1}:{mark.column + 1}"

    def excerpt(self, line: int, column: int, end_column: int) -> list[str]:
        """Returns the place, the line, and carets below the part that is meant."""
        lines = self.text.splitlines()
        shown = lines[line].replace("\t", " ") if line < len(lines) else ""
        carets = " " * column + "^" * max(1, min(end_column, len(shown)) - column)
        return [f"{self.source}:{line + 1}:{column + 1}", f"  {shown}", f"  {carets}"]

    def report(
        self, node: yaml.Node, message: str, *, hint: str | None = None, also: Sequence[str] = ()
    ) -> None:
        """Notes an error at a node; all errors of a file are raised together.

        Args:
            node: what the error is about.
            message: what is wrong.
            hint: what to do.
            also: further lines of facts.
        """
        start, end = node.start_mark, node.end_mark
        end_column = end.column if end.line == start.line else len(self.text)
        where = [*self.excerpt(start.line, start.column, end_column), *also]
        self.errors.append(StrategyError(message, where=where, hint=hint))

    def raise_errors(self) -> None:
        """Returns nothing when no error was noted.

        Raises:
            StrategyError: all the errors that were noted.
        """
        if self.errors:
            raise combine(self.errors, f"{self.source} has {len(self.errors)} errors")

    def entries(self, node: yaml.Node, what: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        """Yields key, key's node and value's node; notes what is no mapping and keys that repeat.

        Args:
            node: the mapping.
            what: what it is called in an error.
        """
        if not isinstance(node, yaml.MappingNode):
            self.report(
                node, f"{what} is {describe(node)}, not a mapping", hint="write `key: value`"
            )
            return
        seen: dict[str, yaml.Node] = {}
        for key_node, value in node.value:
            key = self.string(key_node, f"a key of {what}")
            if key is None:
                continue
            if key in seen:
                self.report(
                    key_node,
                    f"key `{key}` stands twice in {what}",
                    also=[f"first at {self.place(seen[key])}"],
                    hint="YAML would silently take the last; remove one",
                )
                continue
            seen[key] = key_node
            yield key, key_node, value

    def items(self, node: yaml.Node, what: str, *, hint: str) -> list[yaml.Node] | None:
        """Returns the nodes of a list, or None after noting that it is none."""
        if isinstance(node, yaml.SequenceNode):
            return list(node.value)
        self.report(node, f"{what} is {describe(node)}, not a list", hint=hint)
        return None

    def string(self, node: yaml.Node, what: str) -> str | None:
        """Returns the text of a word, or None after noting that it is none."""
        if not isinstance(node, yaml.ScalarNode):
            self.report(node, f"{what} is {describe(node)}, not a word")
        elif is_plain(node) and node.value == "":
            self.report(node, f"{what} is empty")
        elif not is_plain(node) or node.tag == f"{_TAG}str":
            return str(node.value)
        else:
            self.report(
                node,
                f"{what} is `{node.value}`, which YAML reads as {_read_as(node)}",
                hint=f'write "{node.value}" in quotes; an axis needs another name, like `dp`',
            )
        return None

    def integer(self, node: yaml.Node, what: str) -> int | None:
        """Returns a whole number, or None after noting that it is none."""
        if isinstance(node, yaml.ScalarNode) and is_plain(node) and _INT.fullmatch(node.value):
            return int(node.value)
        self.report(
            node, f"{what} is {describe(node)}, not a whole number", hint=_number_hint(node)
        )
        return None

    def boolean(self, node: yaml.Node, what: str) -> bool | None:
        """Returns true or false, or None after noting that it is neither."""
        if isinstance(node, yaml.ScalarNode) and is_plain(node) and node.value in _BOOLS:
            return _BOOLS[node.value]
        self.report(
            node, f"{what} is {describe(node)}, not true or false", hint="write `true` or `false`"
        )
        return None


def is_plain(node: yaml.Node) -> bool:
    """Returns whether a word stands without quotes."""
    return isinstance(node, yaml.ScalarNode) and node.style is None


def is_null(node: yaml.Node) -> bool:
    """Returns whether a node is `null` or `~`; an empty value is not."""
    return isinstance(node, yaml.ScalarNode) and is_plain(node) and node.value in _NULLS


def is_number_like(node: yaml.Node) -> bool:
    """Returns whether a node looks like a number, in whatever notation."""
    return (
        isinstance(node, yaml.ScalarNode)
        and is_plain(node)
        and _NUMBER_LIKE.fullmatch(node.value) is not None
        and any(letter.isdigit() for letter in node.value)
    )


def describe(node: yaml.Node) -> str:
    """Returns what a node is, in words."""
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return "empty" if node.value == "" and is_plain(node) else f"`{node.value}`"


def _read_as(node: yaml.ScalarNode) -> str:
    names = {"bool": "true or false", "int": "a number", "float": "a number", "null": "nothing"}
    kind = node.tag.removeprefix(_TAG)
    return names.get(kind, f"a {kind}")


def _number_hint(node: yaml.Node) -> str:
    if not is_number_like(node):
        return "write digits, like 8"
    if ":" in node.value:
        return "YAML 1.1 reads digits with colons in base 60; write digits alone"
    if re.fullmatch(r"-?0[0-9]+", node.value):
        return "YAML 1.1 reads a leading 0 as octal; write it without"
    return "write all digits, without exponent, sign, point or underscore"
