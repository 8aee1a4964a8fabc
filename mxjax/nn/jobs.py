"""The calls of an algorithm for one stage of a block: weights side by side, and equal shapes in one vmapped solve."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.algorithms.gptq import check_tokens, gptq
from mxjax.algorithms.spread import solver_cost, spread
from mxjax.calibration.stats import LayerStats
from mxjax.config import QuantConfig
from mxjax.core.qtensor import QTensor
from mxjax.errors import MxjaxWarning
from mxjax.ops.qweight import QWeight
from mxjax.transforms.base import needs_fit


@dataclass(frozen=True)
class Target:
    """One weight of a block: how it will be quantized (a WeightSpec) and by what."""

    path: str  # inside the block
    spec: Any
    algorithm: Callable[..., QWeight]
    needs_stats: bool  # plain rounding does not

    def sees_like(self, other: Target, *, rounded: bool = False) -> bool:
        """Whether one set of statistics serves both weights, if they multiply the same input.

        They do under the same transform (one that is fitted is chosen for the formats of its rule), and, where inputs
        are seen after they are ``rounded``, with the same activation format.
        """
        a, b = self.spec, other.spec
        fitted = needs_fit(a.transform)
        return (
            _equal(a.transform, b.transform)
            and (not fitted or a.rounding == b.rounding)
            and (not rounded or a.activation == b.activation)
        )


def _equal(a: Any, b: Any) -> bool:
    """Whether two transforms are the same; those that hold arrays only if they hold the very same ones."""
    if jax.tree.structure(a) != jax.tree.structure(b):  # type: ignore[operator]
        return False
    x, y = jax.tree.leaves(a), jax.tree.leaves(b)
    return all(u is v or (not hasattr(u, "shape") and u == v) for u, v in zip(x, y, strict=True))


@dataclass(frozen=True)
class Job:
    """One call of an algorithm: a weight, or several that share an input, side by side as one wide weight."""

    widths: dict[str, int]  # of the parts, by path
    kernel: jax.Array
    spec: Any
    algorithm: Callable[..., QWeight]
    stats: LayerStats | None

    def split(self, wide: QWeight) -> dict[str, QWeight]:
        """The parts of the quantized wide weight."""
        if len(self.widths) == 1:
            return {path: wide for path in self.widths}
        out: dict[str, QWeight] = {}
        start = 0
        for path, width in self.widths.items():
            rows = slice(start, start := start + width)
            branch = wide.branch
            if branch is not None:  # parts share A, as they share the input
                branch = replace(branch, b=_rows(branch.b, rows))
            out[path] = replace(wide, qtensor=_rows(wide.qtensor, rows), branch=branch)
        return out

    def alike(self, other: Job) -> bool:
        """Whether one vmapped solve can serve both."""
        return (
            self.algorithm is other.algorithm is gptq
            and self.kernel.shape == other.kernel.shape
            and self.kernel.dtype == other.kernel.dtype
            and replace(self.spec, path="", transform=None) == replace(other.spec, path="", transform=None)
            and jax.tree.map(jnp.shape, _plain(self.stats)) == jax.tree.map(jnp.shape, _plain(other.stats))
        )


def _plain(stats: LayerStats | None) -> LayerStats | None:
    """Statistics without the transform in whose space they are."""
    return None if stats is None else replace(stats, transform=None)


def _rows(x: Any, rows: slice) -> Any:
    """Some rows of an array or a QTensor [*stack, N, K] (codes [*stack, N, K / 2])."""
    if isinstance(x, QTensor):
        return replace(x, codes=x.codes[..., rows, :], scales=x.scales[..., rows, :])
    return x[..., rows, :]


def jobs_of(
    kernels: dict[str, jax.Array], targets: Mapping[str, Target], stats: LayerStats | None, fuse: bool
) -> list[Job]:
    """Weights with one input: as one wide weight where they are treated alike, so the Hessian is factorized once.

    ``stats`` of that input, in the space of the transform; None where nothing looks at data.
    """
    specs = {path: targets[path].spec for path in kernels}
    if stats is not None:
        specs = {path: replace(spec, transform=stats.transform) for path, spec in specs.items()}
    first = next(iter(specs))
    alike = all(
        replace(spec, path="") == replace(specs[first], path="")
        and targets[path].algorithm is targets[first].algorithm
        and kernels[path].shape[:-1] == kernels[first].shape[:-1]
        for path, spec in specs.items()
    )
    stacked = kernels[first].shape[:-2] == (() if stats is None else stats.hessian.shape[:-2])
    if fuse and alike and stacked and specs[first].axis == -2:
        spec = replace(specs[first], path=" + ".join(spec.path for spec in specs.values()))
        wide = jnp.concatenate(list(kernels.values()), axis=-1)
        return [Job({p: w.shape[-1] for p, w in kernels.items()}, wide, spec, targets[first].algorithm, stats)]
    return [Job({p: w.shape[-1]}, w, specs[p], targets[p].algorithm, stats) for p, w in kernels.items()]


def solved(jobs: list[Job], devices: Sequence[jax.Device] = ()) -> list[QWeight]:
    """The quantized weight of each job; jobs that are alike in one vmapped call.

    Args:
      jobs: of one stage.
      devices: that share the calls by cost; the results come back to the first. Which device solves what changes no
        bit. None: each call runs where its arrays are.
    """
    calls: list[list[int]] = []
    for i, job in enumerate(jobs):
        if not any(i in call for call in calls):
            calls.append([j for j in range(i, len(jobs)) if job.alike(jobs[j])] or [i])
    if len(devices) < 2:
        found = [_together([jobs[j] for j in call]) for call in calls]
    else:
        costs = [sum(solver_cost(jobs[j].kernel.shape, jobs[j].spec.axis) for j in call) for call in calls]
        work = [partial(_on_device, [jobs[j] for j in call]) for call in calls]
        found = jax.device_put(spread(work, costs, devices), devices[0])
    out = {j: w for call, weights in zip(calls, found, strict=True) for j, w in zip(call, weights, strict=True)}
    return [out[i] for i in range(len(jobs))]


def _on_device(jobs: list[Job], device: jax.Device) -> list[QWeight]:
    def moved(job: Job) -> Job:
        transform = jax.device_put(job.spec.transform, device)
        kernel, stats = jax.device_put((job.kernel, job.stats), device)
        return replace(job, kernel=kernel, stats=stats, spec=replace(job.spec, transform=transform))

    return _together([moved(job) for job in jobs])


def _together(jobs: list[Job]) -> list[QWeight]:
    """The quantized weights of jobs that are alike."""
    first = jobs[0]
    if len(jobs) == 1:
        return [first.algorithm(first.kernel, first.spec, first.stats)]
    for job in jobs:  # as one by one: what a stack of experts forgives is an error in a weight of its own
        assert job.stats is not None  # those of gptq have some
        if job.stats.hessian.ndim == 2:
            check_tokens(job.stats, job.stats.hessian, job.spec)
    # Statistics are in the space of each job's transform already. The weights go there here, one by one: a stack has
    # one transform, and these may differ.
    kernels = jnp.stack([_transformed(job) for job in jobs])
    stats = jax.tree.map(lambda *x: jnp.stack(x), *(_plain(job.stats) for job in jobs))
    spec = replace(first.spec, path=" | ".join(job.spec.path for job in jobs), transform=None)
    stack = first.algorithm(kernels, spec, stats)
    out = []
    for at, job in enumerate(jobs):
        member = jax.tree.map(lambda x, at=at: x[at], stack)
        qtensor = replace(member.qtensor, dtype_name=jnp.dtype(job.kernel.dtype).name)
        out.append(replace(member, qtensor=qtensor, transform=job.spec.transform))
    return out


def _transformed(job: Job) -> jax.Array:
    transform, axis = job.spec.transform, job.spec.axis
    if transform is None:
        return job.kernel
    return jnp.moveaxis(transform.weight(jnp.moveaxis(job.kernel, axis, -1).astype(jnp.float32)), -1, axis)


def warn_of_unshared_scales(weights: Mapping[str, QWeight], cfg: QuantConfig) -> None:
    """Warn of tensor scales that ``cfg.share_scales`` wants equal, and that are not.

    Weights are solved input by input, so the largest scale of a group is known only where all of it is one wide weight.
    """
    groups: dict[str, list[str]] = {}
    for path, w in weights.items():
        group = cfg.scale_group(path)
        if group is not None and w.qtensor.global_scale is not None:
            groups.setdefault(group, []).append(path)

    def differ(paths: list[str]) -> bool:
        first, *others = (np.asarray(weights[path].qtensor.global_scale) for path in paths)
        return any(not np.array_equal(first, other) for other in others)

    apart = [group for group, paths in groups.items() if differ(paths)]
    if apart:
        more = f" and {len(apart) - 3} more" if len(apart) > 3 else ""
        warnings.warn(
            f"share_scales: the weights of {', '.join(apart[:3])}{more} keep tensor scales of their own. Only weights "
            f"with one input, the same rule and CalibrationOptions(fuse=True) are solved with one scale here; "
            f"mxjax.quantize(params, cfg, stats) shares it among any",
            MxjaxWarning,
            stacklevel=4,
        )
