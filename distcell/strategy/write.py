"""A strategy as the text of a strategy file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from distcell.strategy.spec import RESERVED_NAMES, DimSpec, TensorSpec

if TYPE_CHECKING:
    from distcell.strategy.strategy import CellRule, Strategy

_BARE = re.compile(r"[A-Za-z][A-Za-z0-9_.]*")


def write(strategy: Strategy) -> str:
    r"""Returns the text of a file that reads back as the strategy.

    Args:
        strategy: what to write. Fields that have their default are left out.

    >>> from distcell.strategy import Strategy
    >>> write(Strategy(strict=True))
    'distcell: 1\nstrict: true\n'
    """
    lines = ["distcell: 1"]
    if strategy.mesh is not None:
        lines.append(f"mesh: {_mapping((name, str(size)) for name, size in strategy.mesh)}")
    if strategy.data != "full":
        lines.append(f"data: {strategy.data}")
    if not strategy.uneven:
        lines.append("uneven: false")
    if strategy.strict:
        lines.append("strict: true")
    if strategy.random != "counter":
        lines.append(f"random: {strategy.random}")
    if strategy.inputs:
        lines.append(f"inputs: {_mapping((name, _spec(spec)) for name, spec in strategy.inputs)}")
    if strategy.cells:
        lines.append("cells:")
        lines += [f"  {_quoted(rule.pattern)}: {_rule(rule)}" for rule in strategy.cells]
    return "\n".join(lines) + "\n"


def _rule(rule: CellRule) -> str:
    fields: list[tuple[str, str]] = []
    if rule.params:
        fields.append(("params", _mapping((k, _spec(v)) for k, v in rule.params.items())))
    if rule.inputs is not None:
        fields.append(("in", _specs(rule.inputs)))
    if rule.outputs is not None:
        fields.append(("out", _specs(rule.outputs)))
    if rule.optional:
        fields.append(("optional", "true"))
    return _mapping(fields)


def _specs(specs: Iterable[TensorSpec | None]) -> str:
    return f"[{', '.join('null' if spec is None else _spec(spec) for spec in specs)}]"


def _spec(spec: TensorSpec) -> str:
    return f"[{', '.join(map(_dim, spec.dims))}]"


def _dim(dim: DimSpec) -> str:
    # `?` means something else to most YAML readers; in quotes any of them reads the file.
    return re.sub(r"[a-z0-9_]*\?", lambda found: f'"{found[0]}"', str(dim))


def _mapping(entries: Iterable[tuple[str, str]]) -> str:
    return "{" + ", ".join(f"{_key(key)}: {value}" for key, value in entries) + "}"


def _key(key: str) -> str:
    bare = _BARE.fullmatch(key) and key.lower() not in RESERVED_NAMES | {"y", "n"}
    return key if bare else _quoted(key)


def _quoted(text: str) -> str:
    # JSON's strings are YAML's double-quoted ones, but for its pairs of surrogates.
    escaped = (f"\\U{ord(c):08x}" if ord(c) > 0xFFFF else json.dumps(c)[1:-1] for c in text)
    return f'"{"".join(escaped)}"'
