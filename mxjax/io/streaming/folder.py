"""``quantize_folder``: shards in, shards out, with memory for a few tensors."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mxjax import api, recipes
from mxjax.algorithms.spread import assign
from mxjax.config import QuantConfig
from mxjax.core.processes import several
from mxjax.errors import CheckpointError, ConfigError
from mxjax.io import hf, hf_write, sharded
from mxjax.io.atomic import swap, sync_tree
from mxjax.io.hashes import write_sums
from mxjax.io.streaming import plan
from mxjax.io.streaming.arrays import quantize_entry, tensor_scales
from mxjax.io.streaming.journal import JOURNALS, Journal
from mxjax.io.streaming.plan import Item, Shard
from mxjax.io.streaming.shards import ShardFile
from mxjax.io.streaming.targets import Target, target_of


@dataclass(frozen=True)
class FolderReport:
    """What :func:`quantize_folder` did.

    Attributes:
      summary: rows and totals of the result, as :func:`mxjax.summary` gives for a tree.
      float_bytes: bytes of tensors in the source.
      bytes_read: of these, read in this run.
      bytes_written: bytes of tensors written in this run.
      seconds: from the first byte to the last.
      files: files of tensors that this process wrote or had written.
      resumed: of these, finished by an earlier run.
      complete: the folder is there. False: other processes that share the work are not done; the last makes it.
    """

    summary: api.Summary
    float_bytes: int
    bytes_read: int
    bytes_written: int
    seconds: float
    files: int
    resumed: int
    complete: bool = True

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes of tensors read and written a second, in 10**9."""
        return (self.bytes_read + self.bytes_written) / self.seconds / 1e9


def quantize_folder(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    recipe: str | QuantConfig,
    *,
    format: str = "mxjax",
    names: Callable[[str], str] | None = None,
    dtype: Any = None,
    shard_size: int = sharded.SHARD_SIZE,
    workers: int | None = None,
    overwrite: bool = False,
    restart: bool = False,
    progress: Callable[[int, int], None] | None = None,
    process_index: int | None = None,
    process_count: int | None = None,
) -> FolderReport:
    """Quantize a Hugging Face folder of any size, tensor by tensor, with a data-free recipe.

    The numbers are those of ``mxjax.save(folder, mxjax.quantize(mxjax.load(source), recipe), format)``, bit for bit;
    memory holds a few megabytes and the quantized form of ``workers`` tensors. Tensors are read through memory maps,
    those that no rule matches are copied byte for byte, and the other files that a model needs come along. No code of
    the model is needed: rules see the tensors' names, ``model/layers/0/mlp/up_proj/weight``, or what ``names`` makes of
    them. ``SHA256SUMS`` lists the hash of every file.

    The folder appears when it is complete. Until then everything is in ``.NAME.partial`` beside it; after a crash, a
    kill or Ctrl-C the same call goes on from the last finished file, whose hash it checks.

    Several processes, on one machine or many with one file system, share the work: each makes the same call, reads the
    tensors of its own files of the result and writes these; the last to end adds the index, and the folder appears.
    A process that dies is started again, with the same numbers. (Weights that share a tensor scale are looked at by
    each process that has one of them, and so are two tensors that the config ties.)

    Args:
      source: folder with ``config.json`` and safetensors files.
      folder: where the result should be.
      recipe: a recipe name or a QuantConfig whose algorithms need no data.
      format: "mxjax", or a Hugging Face layout such as "compressed-tensors" (:mod:`mxjax.io.layouts`).
      names: tensor name -> tree path, as in :func:`mxjax.load`.
      dtype: cast the float tensors that are not quantized. Default: keep theirs.
      shard_size: bytes of tensors in a file, unless one tensor is larger.
      workers: tensors at work at a time; default: one more than cores, four at the most.
      overwrite: replace a quantized checkpoint.
      restart: begin anew where another run was interrupted.
      progress: called with the bytes of the source that are done and all of them (of this process).
      process_index, process_count: which process of how many this is; default: those of ``jax.distributed``, else one.
        ``shard_size`` is lowered so far that each has a file. ``restart`` is for each its own part.

    Raises:
      CheckpointError: a source that is damaged or quantized, a layout that cannot carry the weights, a folder in the
        way, an interrupted run of another recipe or source, a full disk.
      ConfigError: a recipe that needs data, or that matches nothing.
      BlockShapeError, NonFiniteError: as :func:`mxjax.quantize`.

    Example:
      >>> import tempfile
      >>> a, b = tempfile.mkdtemp(), tempfile.mkdtemp()
      >>> tree = {"layer": {"weight": jnp.ones((8, 64))}}
      >>> mxjax.io.safetensors.write(Path(a) / "model.safetensors", {"layer.weight": jnp.ones((8, 64))})
      >>> _ = (Path(a) / "config.json").write_text("{}")
      >>> report = mxjax.io.quantize_folder(a, b + "/out", "mxfp4")
      >>> report.summary.bits_per_weight, mxjax.load(b + "/out")["layer"]["weight"].format
      (4.25, <mxfp4>)
    """
    from mxjax.io import check_replaceable

    index, count = _who(process_index, process_count)
    if format == "orbax":
        raise ConfigError("quantize_folder writes 'mxjax' and Hugging Face layouts, not 'orbax'")
    sharded.check_size(shard_size)
    cfg = recipes.get(recipe)
    if cfg.needs_data:
        raise ConfigError(f"recipe {cfg.name!r} needs calibration data; quantize_folder takes data-free recipes")
    target_folder = Path(os.path.realpath(folder))
    check_replaceable(target_folder)
    if target_folder.exists() and any(target_folder.iterdir()) and not overwrite:
        raise CheckpointError(f"{folder} is there already and not empty; pass overwrite=True to replace it")
    with hf.naming(Path(source)):
        config, entries = plan.read_source(Path(source))
        hf.companions(Path(source))  # what they refuse should be known before the work, not after it
    if dtype is not None:
        config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": np.dtype(dtype).name}
    with hf.naming(Path(source)):
        items = plan.plan_items(config, entries, cfg, names, dtype)
    target = target_of(format, items)
    stored = [(item, target.specs_of(item)) for item in items]
    if count > 1:
        shard_size = min(shard_size, max(1, sum(s.nbytes for _, specs in stored for s in specs.values()) // count))
    shards = plan.into_shards(stored, target.weights, shard_size)
    owners = assign([shard.float_bytes for shard in shards], count)
    own = [shard for shard, owner in zip(shards, owners, strict=True) if owner == index]
    run = {
        "source": plan.source_fingerprint(entries),
        "recipe": f"{cfg.name} {plan.fingerprint(*(item.spec for item in items), cfg.share_scales)}",
        "format": f"{format} {plan.fingerprint([(s.name, sorted(s.specs.items())) for s in shards], config)}",
    }
    names_of_own = [shard.name for shard in own]
    journal = Journal(target_folder, run, restart=restart, index=index, count=count, own=names_of_own)
    try:
        total, resumed = sum(shard.float_bytes for shard in own), len(journal.finished)
        work = _Work(journal, target, progress or (lambda done, total: None), total)
        work.groups = {
            item.path: _Group(group, work.check) for group in plan.scale_groups(items, cfg) for item in group
        }
        start = time.perf_counter()
        work.run(own, workers or min(4, (os.cpu_count() or 1) + 1))
        with journal.ending([shard.name for shard in shards]) as finished:
            if finished is not None:
                _finish(journal, finished, target, shards, config, Path(source), target_folder)
        seconds = time.perf_counter() - start
    except OSError as e:
        raise CheckpointError(
            f"{e.filename or journal.folder}: {e.strerror or e}; the finished files in {journal.folder} are kept, and "
            f"the same command goes on from them"
        ) from e
    finally:
        journal.close()
    return FolderReport(
        summary=api.summary(hf.nest((item.path, item.leaf) for item in items)),
        float_bytes=sum(item.entry.nbytes for item in items),
        bytes_read=work.read,
        bytes_written=work.written,
        seconds=seconds,
        files=len(own),
        resumed=resumed,
        complete=not journal.folder.exists(),
    )


def _who(index: int | None, count: int | None) -> tuple[int, int]:
    """Which process of how many this is.

    Raises:
      ConfigError: numbers that mean none.
    """
    if index is None and count is None:
        return (jax.process_index(), jax.process_count()) if several() else (0, 1)
    if index is None or count is None or not 0 <= index < count:
        raise ConfigError(f"process_index is 0 to process_count - 1, not {index} of {count}")
    return index, count


class _Work:
    """The tensors of all shards, in order, shared among threads: while one waits for the disk, XLA computes."""

    def __init__(self, journal: Journal, target: Target, progress: Callable[[int, int], None], total: int) -> None:
        self.journal, self.target, self.progress, self.total = journal, target, progress, total
        self.lock, self.stopped = threading.Lock(), threading.Event()
        self.read = self.written = self.skipped = 0
        self.groups: dict[str, _Group] = {}  # by the paths of the members

    def run(self, shards: list[Shard], workers: int) -> None:
        """Write the shards that are not finished; however it ends, no thread is left."""
        left = [_OneShard(self, shard) for shard in shards if shard.name not in self.journal.finished]
        self.skipped = self.total - sum(item.entry.nbytes for one in left for item, _ in one.shard.items)
        self.progress(self.skipped, self.total)
        pool = ThreadPoolExecutor(workers, "mxjax-stream")
        try:
            futures = [pool.submit(one.item, item, specs) for one in left for item, specs in one.shard.items]
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        finally:
            self.stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)
            for one in left:
                one.close()

    def check(self) -> None:
        """Ends a thread when another has failed."""
        if self.stopped.is_set():
            raise CheckpointError("stopped")

    def count(self, item: Item, written: int) -> None:
        with self.lock:
            self.read += item.entry.nbytes
            self.written += written
            self.progress(self.skipped + self.read, self.total)


class _Group:
    """Weights that share a tensor scale, the largest of theirs; the first that is quantized looks at all of them."""

    def __init__(self, members: list[Item], check: Callable[[], None]) -> None:
        self.members, self.check, self.lock = members, check, threading.Lock()
        self.scale: np.ndarray | None = None

    def tensor_scale(self) -> Any:
        with self.lock:
            if self.scale is None:
                scales = [
                    tensor_scales(m.entry, m.spec, m.algorithm, turned=m.turned, check=self.check)
                    for m in self.members
                    if m.spec is not None
                ]
                self.scale = np.max(scales, axis=0)
            return self.scale


class _OneShard:
    """A shard that is opened by its first tensor and finished by its last."""

    def __init__(self, work: _Work, shard: Shard) -> None:
        self.work, self.shard = work, shard
        self.lock, self.left = threading.Lock(), len(shard.items)
        self.file: ShardFile | None = None
        self.exact: dict[str, float] = {}

    def _open(self) -> ShardFile:
        with self.lock:
            if self.file is None:
                target, items = self.work.target, self.shard.items
                reserve = sum(target.reserve(item) for item, _ in items)
                path = self.work.journal.folder / self.shard.name
                reserve += len(hf_write.EXACT) + 16 if reserve else 0
                self.file = ShardFile(path, self.shard.specs, target.metadata, reserve)
            return self.file

    def item(self, item: Item, specs: dict[str, Any]) -> None:
        self.work.check()
        file, target = self._open(), self.work.target
        if item.spec is not None:
            group, spec = self.work.groups.get(item.path), item.spec
            if group is not None:
                spec = replace(spec, tensor_scale=group.tensor_scale())
            weight = quantize_entry(item.entry, spec, item.algorithm, turned=item.turned, check=self.work.check)
            tensors, exact = target.tensors_of(item, weight)
            for name, x in tensors.items():
                file.put(name, x)
            with self.lock:
                self.exact |= exact
        elif item.turned and target.turns:
            (name,) = specs
            file.put(name, item.entry.read().T.astype(item.dtype, copy=False))
        else:
            for name in specs:  # none, where it has no values and the layout leaves such away
                file.copy(name, item.entry, self.work.check)
        self.work.count(item, sum(spec.nbytes for spec in specs.values()))
        with self.lock:
            self.left -= 1
            last = not self.left
        if last:
            more = {hf_write.EXACT: json.dumps(dict(sorted(self.exact.items())))} if self.exact else {}
            self.work.journal.record(self.shard.name, *file.finish(more))

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def _finish(
    journal: Journal,
    finished: dict[str, tuple[int, str]],
    target: Target,
    shards: list[Shard],
    config: dict[str, Any],
    source: Path,
    folder: Path,
) -> None:
    partial = journal.folder
    sharded.write_index(partial, target.weights, [(shard.name, shard.specs) for shard in shards])
    target.write_config(partial, config)
    hf.copy_companions(source, partial)
    skip = [path.name for path in partial.glob(JOURNALS)]
    write_sums(partial, {name: digest for name, (_, digest) in finished.items()}, skip=skip)
    sync_tree(partial)
    journal.remove()
    swap(partial, folder, folder.parent / f".{folder.name}.{os.getpid()}.old")
    for path in folder.glob(JOURNALS):  # of a process that was started again in the meantime
        path.unlink()
