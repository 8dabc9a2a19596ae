"""Strategy files, found by name in the library or by path."""

from __future__ import annotations

import os
from pathlib import Path

from distcell._resources import resource_dir
from distcell.errors import StrategyError, close_matches, did_you_mean
from distcell.strategy.strategy import Strategy

_SUFFIXES = (".yaml", ".yml")


def list_strategies() -> tuple[str, ...]:
    """Returns the names of the strategies in the library, in alphabetical order.

    >>> "data-tensor" in list_strategies()
    True
    """
    return tuple(sorted(path.stem for path in resource_dir("strategies").glob("*.yaml")))


def load_strategy(name_or_path: str | os.PathLike[str]) -> Strategy:
    """Returns the strategy of that name or file.

    Args:
        name_or_path: a name of the library, such as `tensor`; or a path: with a slash in it, or
            with the ending `.yaml` or `.yml`.

    Raises:
        StrategyError: there is no such name or file, or the file is malformed.

    >>> load_strategy("data").mesh
    (('dp', -1),)
    """
    text = os.fspath(name_or_path)
    if _is_path(name_or_path):
        return Strategy.from_text(_read(Path(text)), source=text)
    known = list_strategies()
    if text not in known:
        raise _unknown(text, known)
    path = resource_dir("strategies") / f"{text}.yaml"
    return Strategy.from_text(_read(path), source=f"strategies/{text}.yaml")


def _is_path(name_or_path: str | os.PathLike[str]) -> bool:
    if isinstance(name_or_path, os.PathLike):
        return True
    return os.sep in name_or_path or name_or_path.endswith(_SUFFIXES)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        folder = path.parent if path.parent.is_dir() else Path()
        near = [str(found) for suffix in _SUFFIXES for found in sorted(folder.glob(f"*{suffix}"))]
        near += list_strategies()
        hint = did_you_mean(str(path), near)
        raise StrategyError(f"there is no strategy file `{path}`", hint=hint) from error
    except UnicodeDecodeError as error:
        raise StrategyError(f"`{path}` is not UTF-8 text", where=[str(error)]) from error
    except OSError as error:
        raise StrategyError(f"`{path}` cannot be read", where=[str(error)]) from error


def _unknown(name: str, known: tuple[str, ...]) -> StrategyError:
    where = [f"known  {', '.join(known)}"]
    if Path(name).is_file():
        hint = f"is the file meant? write `./{name}`"
    else:
        close = close_matches(name, known)
        hint = f"did you mean `{close[0]}`?" if close else "a file needs a path with `/` or `.yaml`"
    return StrategyError(f"there is no strategy `{name}`", where=where, hint=hint)
