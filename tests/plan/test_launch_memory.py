"""Memory that a rank frees is used again without being given back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COUNTS_FAULTS = """
import resource, torch
from distcell.launch.memory import keep_freed_memory
assert keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step = [torch.ones(1 << 18) for _ in range(40)]
    del step
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_what_a_step_frees_is_there_for_the_next() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNTS_FAULTS], check=True, capture_output=True, text=True
    )
    assert int(done.stdout) < 1000  # of 40 MiB in pages of 4 KiB
