"""The fenced blocks of a page, and how they are run.

A page is run from top to bottom in a folder of its own, its Python blocks in one namespace:

===========================  =====================================================================
```` ```python ````          executed; with `>>>` in it, run as a doctest
`{code-block}` with caption  written to the file that the caption names
```` ```diff ````            both sides are executed, the old one first
```` ```yaml ````            with `distcell:` in it, read as a strategy
```` ```console ````         each `$ command` is run; what follows it is what it prints
`<!-- not run: why -->`      before a block: it is left out
`<!-- exits 2 -->`           before a console block: the exit code of its last command
===========================  =====================================================================

In what a command prints, `...` stands for anything, and a speed for any speed. A command that
succeeds is compared by what it prints to its standard output, one that fails by its errors.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import distcell.random
from distcell.context import LaunchOptions, reset_auto_parallel_context, set_launch
from distcell.strategy import Strategy

ROOT = Path(__file__).parents[2]
COMMAND_TIMEOUT_S = 240
_FENCE = re.compile(r"(?P<ticks>`{3,})(?P<info>.*)")
_REMARK = re.compile(r"<!-- (?P<word>not run|exits):? ?(?P<rest>.*?) ?-->")
_SPEED = re.compile(r"[\d,]+ tokens/s")


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Args:
        page: The file.
        line: The number of its first line of content.
        kind: Its language: `python`, `console`, `yaml`, ...
        text: Its content.
        caption: The name of the file that it is.
        skip: Why it is not run; empty when it is.
        exit_code: What its last command exits with.
    """

    page: Path
    line: int
    kind: str
    text: str
    caption: str = ""
    skip: str = ""
    exit_code: int = 0

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    remark: re.Match[str] | None = None
    number = 0
    while number < len(lines):
        fence = _FENCE.fullmatch(lines[number].strip())
        if fence is None:
            if lines[number].strip():
                remark = _REMARK.fullmatch(lines[number].strip())
            number += 1
            continue
        end = number + 1
        while lines[end].strip() != fence["ticks"]:
            end += 1
        yield _block(page, number, lines[number + 1 : end], fence["info"].strip(), remark)
        remark, number = None, end + 1


def _block(
    page: Path, number: int, body: list[str], info: str, remark: re.Match[str] | None
) -> Block:
    kind, caption, first = info, "", number + 2
    if match := re.fullmatch(r"\{code-block\} *(\w*)", info):
        kind = match[1]
        while body and body[0].startswith(":"):
            if body[0].startswith(":caption:"):
                caption = body[0].removeprefix(":caption:").strip()
            body, first = body[1:], first + 1
    text = textwrap.dedent("\n".join(body)).strip("\n") + "\n"
    word, rest = (remark["word"], remark["rest"]) if remark else ("", "")
    skip = rest if word == "not run" else ""
    return Block(page, first, kind, text, caption, skip, int(rest) if word == "exits" else 0)


@dataclass
class Runner:
    """Runs the blocks of one page.

    Args:
        folder: Where files are written and commands are run.
        names: The namespace of the Python blocks.
        failures: What went wrong, one text each.
    """

    folder: Path
    names: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def run(self, block: Block) -> None:
        """Runs one block, and notes what goes wrong."""
        if block.skip:
            return
        if block.caption:
            file = self.folder / block.caption
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
        run = {
            "python": self._python,
            "console": self._console,
            "diff": self._diff,
            "yaml": self._yaml,
        }.get(block.kind)
        if run is not None and not (block.caption and block.kind == "python"):
            run(block)

    def _fail(self, block: Block, text: str) -> None:
        self.failures.append(f"{block.place}\n{textwrap.indent(text.rstrip(), '  ')}")

    def _python(self, block: Block) -> None:
        if ">>>" in block.text:
            self._doctest(block)
        else:
            self._execute(block, block.text)

    def _execute(self, block: Block, text: str) -> None:
        self.names.setdefault("__name__", "__page__")
        code = "\n" * (block.line - 1) + text  # so that tracebacks name the line of the page
        try:
            exec(compile(code, str(block.page), "exec"), self.names)
        except Exception as error:
            self._fail(block, f"{type(error).__name__}: {error}")

    def _doctest(self, block: Block) -> None:
        test = doctest.DocTestParser().get_doctest(
            block.text, self.names, block.place, str(block.page), block.line - 1
        )
        said: list[str] = []
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        runner = doctest.DocTestRunner(optionflags=flags, verbose=False)
        runner.run(test, out=said.append, clear_globs=False)
        self.names.update(test.globs)
        if runner.failures:
            self._fail(block, "".join(said))

    def _diff(self, block: Block) -> None:
        lines = block.text.splitlines()
        for leave in "+-":
            kept = [line[1:] if line[:1] in "+- " else line for line in lines if line[:1] != leave]
            self._execute(block, "\n".join(kept) + "\n")

    def _yaml(self, block: Block) -> None:
        if "distcell:" not in block.text:
            return
        try:
            Strategy.from_text(block.text, source=block.place)
        except ValueError as error:
            self._fail(block, str(error))

    def _console(self, block: Block) -> None:
        sessions = re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]
        for index, session in enumerate(sessions):
            command, expected = _command_of(session)
            want = block.exit_code if index == len(sessions) - 1 else 0
            done = run_command(command, self.folder)
            printed = f"{done.stdout}{done.stderr}"
            if done.returncode != want:
                exits = f"exits {done.returncode}, not {want}"
                self._fail(block, f"$ {command}\n{exits}\n{printed}")
            elif not same_output(expected, done.stderr if want else done.stdout):
                self._fail(block, f"$ {command}\nprints\n{printed}")


def _command_of(session: str) -> tuple[str, str]:
    """The command, over several lines where they end in a backslash, and what it prints."""
    lines = session.splitlines()
    count = 1
    while lines[count - 1].endswith("\\"):
        count += 1
    return "\n".join(lines[:count]), "\n".join(lines[count:]).rstrip()


def run_command(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What a command of the shell did in a folder, with distcell and its Python on the paths."""
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )


def same_output(expected: str, found: str) -> bool:
    """Whether a command printed what a page says; a page that says nothing says nothing of it."""
    if not expected:
        return True
    expected, found = (_SPEED.sub("N tokens/s", _stripped(text)) for text in (expected, found))
    pattern = ".*".join(re.escape(piece) for piece in expected.split("..."))
    return re.fullmatch(pattern, found, flags=re.DOTALL) is not None


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def _environment() -> dict[str, str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "COLUMNS": "120",
    }
    environment.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")  # more ranks than cores
    return environment


def run_page(page: Path, folder: Path) -> list[str]:
    """Runs all blocks of a page; returns what went wrong."""
    runner = Runner(folder)
    try:
        for block in blocks_of(page):
            runner.run(block)
    finally:
        set_launch(LaunchOptions())
        reset_auto_parallel_context()
        distcell.random.seed(None)
    return runner.failures
