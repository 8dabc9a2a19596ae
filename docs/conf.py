"""How Sphinx builds the documentation."""

import re
from typing import Any

from distcell import __version__

project = "distcell"
author = "The distcell authors"
copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "distcell"
html_static_path = ["_static"]

myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature has them
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False

_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)(\w?)")


def _backticks(*args: Any) -> None:
    """Docstrings mark code with one backtick, as Markdown does."""
    lines: list[str] = args[-1]
    lines[:] = [
        line if line.lstrip().startswith(">>>") else _CODE.sub(_literal, line) for line in lines
    ]


def _literal(match: re.Match[str]) -> str:
    return f"``{match[1]}``" + (f"\\ {match[2]}" if match[2] else "")


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _backticks)
