"""Where shipped files lie: beside the code in a wheel, at the top of a checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from distcell.errors import NotFoundError


def resource_dir(kind: Literal["strategies", "launcher"]) -> Path:
    """Returns the folder that holds a kind of shipped files.

    Args:
        kind: `strategies` for the library of strategy files, `launcher` for the job files.

    Raises:
        NotFoundError: neither the package nor the checkout has the folder.

    >>> resource_dir("strategies").name
    'strategies'
    """
    package = Path(__file__).resolve().parent
    places = (package / "_data" / kind, package.parent / kind)
    for place in places:
        if place.is_dir():
            return place
    raise NotFoundError(
        f"distcell's folder `{kind}` is missing",
        where=[f"looked in {place}" for place in places],
        hint="install distcell again; its wheel carries the folder",
    )
