"""The result of a check as tables."""

from __future__ import annotations

from distcell.report.check import CheckResult, Comparison
from distcell.report.table import Block, Table

_MOST = 8


def blocks_of(result: CheckResult) -> list[Block]:
    """What `python -m distcell check` prints."""
    mesh = result.event.planned.plan.mesh
    head = (
        f"mesh {mesh}     {mesh.size} ranks simulated     strategy {result.event.strategy.source}\n"
        f"{result.steps} optimizer steps in {result.precision}, against one device uncaptured"
    )
    rows = tuple(_row(comparison) for comparison in result.comparisons)
    columns = ("", ">tensors", ">largest", ">difference", ">relative", ">limit", "", "worst")
    blocks: list[Block] = [head, Table("compared", columns, rows)]
    blocks += [f"note: {note}" for note in result.notes]
    if result.steps < result.asked:
        blocks.append(f"note: the script ended after {result.steps} of {result.asked} steps")
    blocks += [_unlike(comparison) for comparison in result.comparisons if comparison.unlike]
    blocks.append("equal" if result.is_equal else "NOT equal")
    return blocks


def _row(comparison: Comparison) -> tuple[str, ...]:
    return (
        comparison.kind,
        str(comparison.count),
        f"{comparison.largest:.3e}",
        f"{comparison.difference:.1e}",
        f"{comparison.relative:.1e}",
        f"{comparison.limit:.0e}",
        "equal" if comparison.is_equal else "NOT EQUAL",
        comparison.worst,
    )


def _unlike(comparison: Comparison) -> Table:
    rows = [(text,) for text in comparison.unlike[:_MOST]]
    if len(comparison.unlike) > _MOST:
        rows.append((f"and {len(comparison.unlike) - _MOST} more",))
    return Table(f"{comparison.kind} that cannot be compared", ("",), tuple(rows))
