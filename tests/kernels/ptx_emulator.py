"""Runs a block of PTX on NumPy arrays: the few instructions of the decode kernels, to check them on any machine."""

import re

import ml_dtypes
import numpy as np

_U32 = np.uint32


def _prmt(a, b, selector):
    """Four bytes of the eight of (a, b), picked by the selector's low four nibbles; none replicates a sign here."""
    assert not (selector & 0x8888).any(), "a selector's nibble has its top bit set"
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.zeros_like(a)
    for i in range(4):
        place = ((selector >> _U32(4 * i)) & _U32(7)).astype(np.uint64) * np.uint64(8)
        out |= ((both >> place) & np.uint64(0xFF)).astype(_U32) << _U32(8 * i)
    return out


def _bf16x2(a, b):
    halves = [(v.reshape(-1).view(np.uint16).view(ml_dtypes.bfloat16)).astype(np.float32) for v in (a, b)]
    return (halves[0] * halves[1]).astype(ml_dtypes.bfloat16).view(np.uint32).reshape(a.shape)


_OPERATIONS = {
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "prmt.b32": _prmt,
    "mul.bf16x2": _bf16x2,
}


def run_ptx(text, results, *args):
    """The uint32 results ``$0``.. of a PTX block on uint32 arrays of one shape, the arguments after them."""
    args = [np.asarray(a, _U32) for a in args]
    state = {f"${results + i}": a for i, a in enumerate(args)}

    def read(name):
        return state[name] if name in state else np.full(args[0].shape, int(name, 0), _U32)

    for line in re.sub(r"\.reg[^;]*;|[{}]", "", text).replace("\n", " ").split(";"):
        if not line.strip():
            continue
        operation, operands = line.split(None, 1)
        target, *sources = (o.strip() for o in operands.split(","))
        values = [read(s) for s in sources]
        if operation == "lop3.b32":
            assert sources.pop() == "0xEA"  # (a & b) | c
            state[target] = (values[0] & values[1]) | values[2]
        else:
            state[target] = _OPERATIONS[operation](*values)
    return [state[f"${i}"] for i in range(results)]
