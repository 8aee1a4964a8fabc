"""What a compiled program sends between devices, read from its HLO: no device and no clock needed."""

from __future__ import annotations

import re
from typing import Any

_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "f16": 16, "f4e2m1fn": 4}
_OPS = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|ragged-all-to-all"
_LINE = re.compile(rf"= (?P<type>.+?) (?P<op>{_OPS})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z\d]*)\[([\d,]+)\]")  # scalars are no data


def collective_bytes(compiled: Any) -> dict[str, int]:
    """Bytes that each device receives, by collective, in one run of a compiled program.

    By the usual ring algorithms over g devices: an all-gather or an all-to-all of n bytes receives ``n (g - 1) / g``, a
    reduce-scatter whose result has n bytes ``n (g - 1)``, an all-reduce ``2 n (g - 1) / g``. The body of a loop counts
    once.

    Args:
      compiled: ``jax.jit(f).lower(*args).compile()``, or its text.

    Example:
      >>> collective_bytes(jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile())
      {}
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    total: dict[str, int] = {}
    for line in text.splitlines():
        if (found := _LINE.search(line)) is None:
            continue
        op, sizes, g = found["op"], _sizes(found["type"]), _group(line)
        if found["start"] and op != "all-reduce":  # operands, then results, then scalars of the transfer
            arrays = sizes[: 2 * (len(sizes) // 2)]
            sizes = arrays[len(arrays) // 2 :]
        n = sum(sizes)
        moved = {"all-reduce": 2 * n * (g - 1) / g, "reduce-scatter": n * (g - 1), "collective-permute": n}
        total[op] = total.get(op, 0) + round(moved.get(op, n * (g - 1) / g))
    return total


def _sizes(text: str) -> list[int]:
    sizes = []
    for name, dims in _ARRAY.findall(text):
        bits = _BITS.get(name) or int(re.search(r"\d+", name)[0])  # type: ignore[index]
        count = 1
        for d in filter(None, dims.split(",")):
            count *= int(d)
        sizes.append(count * bits // 8)
    return sizes


def _group(line: str) -> int:
    """How many devices take part: XLA has three ways to write it."""
    if m := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(m[1].split(","))
    if m := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(m[1])
    if m := re.search(r"replica_groups=@?mesh\d*\[([^\]]+)\]\s*\{([^}]*)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", m[1])}
        count = 1
        for name in re.findall(r"'([^']+)'", m[2]):
            count *= sizes[name]
        return count
    return 1
