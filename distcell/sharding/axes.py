"""From what the user wrote for a tensor to axes of the mesh: names, and numbers of slices."""

from __future__ import annotations

from dataclasses import dataclass, field

from distcell.errors import StrategyError, did_you_mean
from distcell.layout import Layout, canonical
from distcell.mesh import Mesh
from distcell.sharding.plan import Note
from distcell.strategy.spec import DimSpec, TensorSpec


@dataclass
class AxisReader:
    """Reads specs one after the other; cuts axes of the mesh where a number of slices needs it.

    A number of slices means, in this order: the leftmost axis of exactly that size that the tensor
    does not use yet; a run of neighbouring axes with that product; row-major sub-axes.
    """

    mesh: Mesh
    notes: list[Note] = field(default_factory=list)

    def read(self, spec: TensorSpec, shape: tuple[int, ...], what: str) -> Layout:
        """The layout that a spec asks for, on the mesh as it is after the call.

        Args:
            spec: What the user wrote.
            shape: The global shape of the tensor.
            what: What the tensor is called in notes and errors.

        Raises:
            StrategyError: When an axis is not in the mesh, is used twice, or no axes make a number
                of slices, or there are more dims than the tensor has.
        """
        padded = spec.padded(len(shape), what=what)
        named = {axis for dim in padded.dims for axis in dim.axes}
        self._check_names(named, padded, what)
        used = {part for name in named for part in self.mesh.resolve(name)}
        axes: list[tuple[str, ...]] = []
        for index, dim in enumerate(padded.dims):
            found = self._dim(dim, index, used, padded, what)
            used |= set(found)
            axes.append(found)
        return Layout.of(shape, axes)

    def final(self, layout: Layout) -> Layout:
        """A layout read earlier, on the mesh as it is now."""
        dims = []
        for dim in layout.dims:
            axes = tuple(part for axis in dim[0].axes for part in self.mesh.resolve(axis))
            dims.append(axes)
        return canonical(Layout.of(layout.shape, dims), self.mesh)

    def _check_names(self, names: set[str], spec: TensorSpec, what: str) -> None:
        for name in sorted(names):
            if name in self.mesh.names or any(a.startswith(f"{name}.") for a in self.mesh.names):
                continue
            raise StrategyError(
                f"the mesh has no axis `{name}`, which {what} is to be split over",
                where=[f"{spec}", f"mesh  {self.mesh}", *([spec.source] if spec.source else [])],
                hint=did_you_mean(name, self.mesh.names)
                or f"the axes are {', '.join(self.mesh.names) or 'none'}",
            )

    def _dim(
        self, dim: DimSpec, index: int, used: set[str], spec: TensorSpec, what: str
    ) -> tuple[str, ...]:
        if dim.slices is None:
            return tuple(part for axis in dim.axes for part in self.mesh.resolve(axis))
        found = self._axes_of_slices(dim.slices, used)
        if found is None:
            free = " ".join(f"{n}={s}" for n, s in self.mesh.axes if n not in used) or "none"
            raise StrategyError(
                f"dim {index} of {what} cannot have {dim.slices} slices",
                where=[
                    f"mesh  {self.mesh}     free axes  {free}",
                    *([spec.source] if spec.source else []),
                ],
                hint="a number of slices is a product of free neighbouring axes or their factors",
            )
        text = f"{dim.slices} slices of dim {index} of {what} are read as {', '.join(found)}"
        self.notes.append(Note("slices", what, text))
        return found

    def _axes_of_slices(self, slices: int, used: set[str]) -> tuple[str, ...] | None:
        free = [(name, size) for name, size in self.mesh.axes if name not in used and size > 1]
        for name, size in free:
            if size == slices:
                return (name,)
        return self._run(slices, used) or self._cut_run(slices, used)

    def _run(self, slices: int, used: set[str]) -> tuple[str, ...] | None:
        names = self.mesh.names
        for start in range(len(names)):
            rest, run = slices, []
            for name in names[start:]:
                size = self.mesh.axis_size(name)
                if name in used or rest % size:
                    break
                run.append(name)
                rest //= size
                if rest == 1:
                    return tuple(run)
        return None

    def _cut_run(self, slices: int, used: set[str]) -> tuple[str, ...] | None:
        names = self.mesh.names
        for start in range(len(names)):
            rest, run = slices, []
            for name in names[start:]:
                size = self.mesh.axis_size(name)
                if name in used:
                    break
                if rest % size == 0:
                    run.append(name)
                    rest //= size
                elif size % rest == 0:
                    self.mesh = self.mesh.refine(name, (rest, size // rest))
                    return (*run, f"{name}.0")
                else:
                    break
                if rest == 1:
                    return tuple(run)
        return None
