"""Which mpirun and which MPI library there are, and whether they belong together."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from distcell.errors import BackendError

INSTALL = "pip install 'distcell[mpi]', or install Open MPI or MPICH"

_ASK_S = 60
_ASKED_ABOUT_LIBRARY = """
import json, pathlib
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
maps = pathlib.Path("/proc/self/maps")
lines = maps.read_text(errors="replace").splitlines() if maps.is_file() else []
paths = [line.split(maxsplit=5)[-1] for line in lines if "/libmpi" in line]
print(json.dumps([MPI.Get_library_version(), paths[0] if paths else ""]))
"""
_NAMES = {
    "open mpi": "Open MPI",
    "openrte": "Open MPI",
    "prrte": "Open MPI",
    "intel(r) mpi": "Intel MPI",
    "mvapich": "MVAPICH",
    "mpich": "MPICH",
    "hydra": "MPICH",
}
_VERSION = re.compile(r"(\d+\.\d+(?:\.\d+)*)")


@dataclass(frozen=True)
class Mpi:
    """An mpirun, or a library.

    Args:
        name: `Open MPI`, `MPICH`, `Intel MPI`, `MVAPICH`, or `an unknown MPI`.
        version: Its version; empty when it does not say.
        path: The file; empty when it is not known.
    """

    name: str
    version: str
    path: str

    def __str__(self) -> str:
        return " ".join(filter(None, [self.name, self.version]))

    @property
    def family(self) -> tuple[str, str]:
        """Equal for those whose mpirun and library understand each other."""
        if self.name == "Open MPI":  # how ranks are told who they are has changed between these
            return self.name, self.version.partition(".")[0]
        return ("MPICH", "") if self.name in ("Intel MPI", "MVAPICH") else (self.name, "")


def find_mpirun() -> Path | None:
    """Returns the mpirun beside this Python, else the first on the path; None without mpi4py."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    beside = Path(sys.executable).parent / "mpirun"
    if beside.is_file():
        return beside
    found = shutil.which("mpirun")
    return Path(found) if found else None


def mpirun_at(path: Path) -> Mpi:
    """Returns what the mpirun says of itself.

    Args:
        path: The file.
    """
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, check=False, timeout=_ASK_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return Mpi("an unknown MPI", "", str(path))
    return named(done.stdout + done.stderr, str(path))


def mpi_library() -> Mpi:
    """Returns the library that mpi4py loads. It is not initialised, and not loaded in this process.

    Raises:
        BackendError: mpi4py finds none.
    """
    command = [sys.executable, "-c", _ASKED_ABOUT_LIBRARY]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ASK_S)
    except subprocess.TimeoutExpired as error:
        raise BackendError("mpi4py does not load within a minute", hint=INSTALL) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        said = [line for line in lines if "Error: " in line] or lines[-1:]
        raise BackendError("mpi4py finds no MPI library", where=said[-1:], hint=INSTALL)
    text, path = json.loads(done.stdout.splitlines()[-1])
    return named(text, path)


def named(text: str, path: str) -> Mpi:
    """Returns the MPI that speaks of itself so.

    Args:
        text: What it says: `mpirun --version`, or MPI_Get_library_version.
        path: Its file.

    Example:
        >>> print(named("mpirun (Open MPI) 5.0.11", "/usr/bin/mpirun"))
        Open MPI 5.0.11
    """
    lower = text.lower()
    name = next((name for word, name in _NAMES.items() if word in lower), "an unknown MPI")
    version = _VERSION.search(text)
    return Mpi(name, version[1] if version else "", path)


def check_that_they_match(mpirun: Mpi, library: Mpi) -> None:
    """Returns when ranks that this mpirun starts find each other through this library.

    Raises:
        BackendError: They belong to different MPIs.

    Example:
        >>> library = Mpi("MPICH", "5.0.2", "/env/lib/libmpi.so.12")
        >>> check_that_they_match(Mpi("MPICH", "4.3.0", "/env/bin/mpirun"), library)
        >>> check_that_they_match(Mpi("Open MPI", "5.0.6", "/usr/bin/mpirun"), library)
        Traceback (most recent call last):
            ...
        distcell.errors.BackendError: mpirun is Open MPI, the library that mpi4py loads is MPICH
          |  mpirun   Open MPI 5.0.6  /usr/bin/mpirun
          |  library  MPICH 5.0.2  /env/lib/libmpi.so.12
          = hint: put the mpirun of MPICH first on PATH (most likely /env/bin/mpirun),
                  or set MPI4PY_LIBMPI to the libmpi.so of Open MPI, or use --backend gloo
    """
    if mpirun.family == library.family or "an unknown MPI" in (mpirun.name, library.name):
        return
    same_name = mpirun.name == library.name
    ours, theirs = (str(mpirun), str(library)) if same_name else (mpirun.name, library.name)
    beside = Path(library.path).parent.parent / "bin" / "mpirun"
    raise BackendError(
        f"mpirun is {ours}, the library that mpi4py loads is {theirs}",
        where=[f"mpirun   {mpirun}  {mpirun.path}", f"library  {library}  {library.path}"],
        hint=f"put the mpirun of {theirs} first on PATH (most likely {beside}),\n"
        f"or set MPI4PY_LIBMPI to the libmpi.so of {ours}, or use --backend gloo",
    )


def check_launcher(launcher: str, library: Mpi) -> None:
    """Returns when the library may be initialised in a process that the launcher started.

    Args:
        launcher: Who started the process, as `RankEnvironment` calls it.
        library: The library.

    Raises:
        BackendError: They are different MPIs.
    """
    families = Mpi(launcher, "", "").family[0], library.family[0]
    if families[0] != families[1] and set(families) == {"Open MPI", "MPICH"}:
        raise BackendError(
            f"the mpirun of {launcher} started the ranks, the library of mpi4py is {library}",
            hint=f"start with the mpirun of {library.name} (`python -m distcell doctor` finds it),"
            f"\nor set MPI4PY_LIBMPI to the libmpi.so of {launcher}, or use --backend gloo",
        )
