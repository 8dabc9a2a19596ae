"""Patterns on dotted names: `*` within a component, `**` across dots, `{q,k,v}` and `{0..3}`."""

from __future__ import annotations

import re
from functools import lru_cache

from distcell.errors import StrategyError

_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAX_ALTERNATIVES = 4096


def matches(pattern: str, name: str) -> bool:
    """Returns whether a dotted name fits a pattern.

    Args:
        pattern: components between dots. `*` stands for any characters but a dot, `?` for one; a
            component `**` for any number of components, none included; `{a,b}` for either.
        name: a dotted name, or the empty name of the outermost cell.

    Raises:
        StrategyError: the pattern is malformed.

    >>> matches("**.attn", "attn"), matches("**.attn.{q,k}", "blocks.3.attn.k")
    (True, True)
    >>> matches("blocks.*", "blocks.3.attn"), matches("blocks.{0..3}", "blocks.3")
    (False, True)
    """
    return compile_glob(pattern).fullmatch(name) is not None


@lru_cache(maxsize=1024)
def compile_glob(pattern: str) -> re.Pattern[str]:
    """Returns the regular expression of a pattern.

    Raises:
        StrategyError: the pattern is malformed.

    >>> bool(compile_glob("a.**").fullmatch("a.b.c"))
    True
    """
    alternatives = expand_braces(pattern)
    return re.compile("|".join(f"(?:{_plain_regex(plain, pattern)})" for plain in alternatives))


def expand_braces(pattern: str) -> list[str]:
    """Returns the patterns without braces that a pattern stands for.

    Raises:
        StrategyError: a brace is not closed, or the pattern stands for too many.

    >>> expand_braces("mlp.{up,down}")
    ['mlp.up', 'mlp.down']
    """
    return _expand(pattern, pattern)


def _expand(text: str, pattern: str) -> list[str]:
    """Returns what a part of the pattern stands for; errors name the whole pattern."""
    start = text.find("{")
    if "}" in (text if start < 0 else text[:start]):
        raise StrategyError(f"pattern `{pattern}` closes a brace that it did not open")
    if start < 0:
        return [text]
    end, parts = _split_braces(text, start, pattern)
    middles = [middle for part in parts for middle in _expand(part, pattern)]
    rests = _expand(text[end + 1 :], pattern)
    if len(middles) * len(rests) > _MAX_ALTERNATIVES:
        raise StrategyError(
            f"pattern `{pattern}` stands for more than {_MAX_ALTERNATIVES} names", hint="use `*`"
        )
    return [text[:start] + middle + rest for middle in middles for rest in rests]


def _split_braces(text: str, start: int, pattern: str) -> tuple[int, list[str]]:
    """Returns where the brace at `start` closes, and its alternatives."""
    depth, parts, begin = 0, [], start + 1
    for place in range(start, len(text)):
        letter = text[place]
        depth += (letter == "{") - (letter == "}")
        if (letter == "," and depth == 1) or depth == 0:
            parts.append(text[begin:place])
            begin = place + 1
        if depth == 0:
            return place, _expand_range(parts, pattern)
    raise StrategyError(f"pattern `{pattern}` has a brace that is not closed", hint="add `}`")


def _expand_range(parts: list[str], pattern: str) -> list[str]:
    found = _RANGE.fullmatch(parts[0]) if len(parts) == 1 else None
    if found is None:
        return parts
    first, last = int(found[1]), int(found[2])
    if last < first or last - first >= _MAX_ALTERNATIVES:
        raise StrategyError(f"pattern `{pattern}` has the range {first}..{last}")
    return [str(number) for number in range(first, last + 1)]


def _plain_regex(plain: str, pattern: str) -> str:
    split = plain.split(".")
    # A second `**` in a row adds nothing, and would break the regex of the first.
    components = [
        c for c, before in zip(split, ["", *split], strict=False) if (c, before) != ("**", "**")
    ]
    if components == ["**"]:
        return r".*"
    regex = ""
    for place, component in enumerate(components):
        last = place == len(components) - 1
        if component == "**":
            # It takes its own dot along, so that it can also stand for no component at all.
            regex = regex.removesuffix(r"\.") + r"(?:\.[^.]+)*" if last else regex + r"(?:[^.]+\.)*"
            continue
        if "**" in component:
            raise StrategyError(
                f"pattern `{pattern}` has `**` within a component",
                hint="`**` stands alone between dots, `*` within a component",
            )
        if not component and len(components) > 1:
            raise StrategyError(f"pattern `{pattern}` has an empty component", hint="remove a dot")
        regex += _component_regex(component) + ("" if last else r"\.")
    return regex


def _component_regex(component: str) -> str:
    if component == "*":
        return r"[^.]+"
    special = {"*": r"[^.]*", "?": r"[^.]"}
    return "".join(special.get(letter, re.escape(letter)) for letter in component)
