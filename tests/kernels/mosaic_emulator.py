"""Runs the register code of a Mosaic GPU kernel on NumPy, all threads of a block at once, on any machine.

The functions that build MLIR (mosaic_asm, and what kernels take from ``_compat.mosaic_ir``) compute instead: a value is
an array with one number a thread, a pointer a buffer with one offset a thread. Threads run in step, so barriers do
nothing and what a warp exchanges is there; branches are masks. For kernels that are one ``inline_mgpu`` body.
"""

import re
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np

from pallas_kernels import _compat
from pallas_kernels import mosaic_asm as ma
from pallas_kernels.transform_quantize import mosaic_gpu, mosaic_kronecker, mosaic_rows

U32, U64, F32 = np.uint32, np.uint64, np.float32
TYPES = {"i32": U32, "i64": U64, "f32": F32, "index": U32}


@dataclass
class Pointer:
    bytes: np.ndarray
    offset: np.ndarray


@dataclass
class Vector:
    values: list
    type: None = None


def wgmma_registers(acc):
    """float32 [64, columns] as a warpgroup holds it: registers of two, 4g + c is the lane of rows g and g + 8 of a
    warp's 16 and of columns 2c and 2c + 1 of each 8."""
    w, h, g, j, c, v = np.ix_(*(np.arange(n) for n in (4, 2, 8, acc.shape[1] // 8, 4, 2)))
    values = acc[16 * w + 8 * h + g, 8 * j + 2 * c + v].transpose(3, 1, 5, 0, 2, 4).reshape(-1, 2, 128)
    out = np.empty(len(values), object)
    out[:] = [Vector(list(pair)) for pair in values]
    return SimpleNamespace(registers=out, shape=acc.shape)


def of_wgmma_registers(registers):
    """The inverse of :func:`wgmma_registers`."""
    values = np.stack([np.stack(r.values) for r in registers]).reshape(-1, 2, 2, 4, 8, 4)  # j, h, v, w, g, c
    return values.transpose(3, 1, 4, 0, 5, 2).reshape(64, -1)


class Emulator:
    """A block of ``threads`` threads; ``run`` calls a kernel's body with arrays in the place of references."""

    def __init__(self, threads, monkeypatch):
        self.threads, self.mask = threads, np.ones(threads, bool)
        for name in ("const", "add", "mul", "div", "rem", "below", "smaller", "pointer", "offset64", "load",
                     "load_words", "store", "asm", "when"):  # fmt: skip
            monkeypatch.setattr(ma, name, getattr(self, name))
        monkeypatch.setattr(ma, "offset", lambda p, n: self.offset64(p, n))
        monkeypatch.setattr(ma, "scalar", lambda v: v)
        monkeypatch.setattr(ma, "barrier", lambda: None)
        monkeypatch.setattr(ma, "i32", lambda: "i32")
        monkeypatch.setattr(ma, "f32", lambda: "f32")
        for module in (mosaic_gpu, mosaic_kronecker):
            monkeypatch.setattr(module, "over_rows", self.over_rows)
        monkeypatch.setattr(_compat, "mosaic_ir", lambda: self.dialects())
        monkeypatch.setattr(ma, "extract", lambda vector, i: vector.values[i])
        monkeypatch.setattr(ma, "same_layout", lambda _, registers: registers)
        layout = SimpleNamespace(WG_SPLAT=lambda _: None, WGMMA=None)
        bare = dict(RefType=lambda *_: None, Layout=layout, inline_mgpu=lambda **_: lambda body: partial(body, None))
        bare |= dict(TilingTransform=lambda _: None, SwizzleTransform=lambda _: None)
        bare |= dict(ShapeDtypeStruct=lambda *_, **__: None)
        monkeypatch.setattr(_compat, "mosaic", lambda: SimpleNamespace(**bare))

    def run(self, body, *arrays, blocks):
        for block in range(blocks):
            self.mask[:] = True
            body(*arrays, U32(block))

    @staticmethod
    def over_rows(rounds, first, step, load, finish):
        for i in range(rounds):
            row = first + U32(i * step)
            finish(U32(i), row, load(row))

    # --- integers, memory, branches

    def const(self, v):
        return U32(v & 0xFFFFFFFF)

    def value(self, v):
        return self.const(v) if isinstance(v, int) else v

    def add(self, *terms):
        with np.errstate(over="ignore"):
            return sum((self.value(t) for t in terms[1:]), self.value(terms[0]))

    def mul(self, a, b):
        with np.errstate(over="ignore"):
            return self.value(a) * self.value(b)

    def div(self, a, b):
        return a // U32(b)

    def rem(self, a, b):
        return a % U32(b)

    def below(self, a, b):
        return self.value(a) < self.value(b)

    def smaller(self, a, b):
        return np.minimum(self.value(a), self.value(b))

    def pointer(self, ref):
        return Pointer(ref.reshape(-1).view(np.uint8), np.zeros(self.threads, np.int64))

    def offset64(self, p, n):
        return Pointer(p.bytes, p.offset + np.asarray(n).astype(np.int64))

    def at(self, p, words, mask):
        """Indices [threads, words] into the buffer's 32-bit words, in bounds and aligned where the mask holds."""
        index = p.offset[:, None] // 4 + np.arange(words)
        used = index[mask]
        assert (p.offset[mask] % (4 * words) == 0).all(), "misaligned"
        assert used.size == 0 or (used.min() >= 0 and used.max() < p.bytes.size // 4), "out of bounds"
        return np.where(mask[:, None], index, 0)

    def read(self, p, words, mask=None):
        mask = self.mask if mask is None else self.mask & mask
        out = p.bytes.view(U32)[self.at(p, words, mask)]
        return list(np.where(mask[:, None], out, U32(0)).T)

    def write(self, p, values):
        index = self.at(p, len(values), self.mask)
        stacked = np.stack([np.broadcast_to(v, self.threads).view(U32) for v in values], axis=1)
        p.bytes.view(U32)[index[self.mask]] = stacked[self.mask]

    def load(self, ty, p, alignment):
        return self.read(p, 1)[0].view(TYPES[ty])

    def load_words(self, p, n):
        return self.read(p, n)

    def store(self, value, p):
        self.write(p, [np.asarray(value)])

    def when(self, condition, body):
        before = self.mask
        self.mask = before & condition
        if self.mask.any():
            body()
        self.mask = before

    # --- MLIR dialects

    def dialects(self):
        def signed(f):
            return lambda a, b: f(np.asarray(a).view(np.int32), np.asarray(b).view(np.int32)).view(U32)

        def quiet(f):
            def run(*args):
                with np.errstate(all="ignore"):
                    return f(*args)

            return run

        arith = SimpleNamespace(
            constant=lambda ty, v: TYPES[ty](v), extui=lambda ty, v: np.asarray(v).astype(TYPES[ty]),
            muli=lambda a, b: a * b, subi=quiet(lambda a, b: a - b), andi=lambda a, b: a & b, ori=lambda a, b: a | b,
            xori=lambda a, b: a ^ b, shli=quiet(lambda a, b: a << b), shrui=lambda a, b: a >> b,
            maxui=np.maximum, maxsi=signed(np.maximum), select=np.where,
            bitcast=lambda ty, v: np.asarray(v).view(TYPES[ty]),
            mulf=quiet(lambda a, b: a * b), addf=quiet(lambda a, b: a + b), subf=quiet(lambda a, b: a - b),
            negf=lambda a: -a, minimumf=np.minimum, maximumf=np.maximum,
        )  # fmt: skip
        ir = SimpleNamespace(
            IntegerType=SimpleNamespace(get_signless=lambda n: f"i{n}"),
            IntegerAttr=SimpleNamespace(get=lambda _, v: v),
            FloatAttr=SimpleNamespace(get=lambda _, v: v),
        )
        utils = SimpleNamespace(thread_idx=lambda: np.arange(self.threads, dtype=U32))
        vector = SimpleNamespace(from_elements=lambda _, values: Vector(values))
        return SimpleNamespace(
            arith=arith, ir=ir, utils=utils, llvm=SimpleNamespace(ptrtoint=lambda _, p: p), vector=vector
        )

    # --- PTX

    def asm(self, text, constraints, args, results=(), *, volatile=False):
        args = list(args)
        with np.errstate(all="ignore"):
            if text == ma.LOAD_IF:
                return self.read(args[0], 4, np.broadcast_to(args[1] != 0, self.threads))
            if text.startswith("ld."):
                kind = F32 if "v4.f32" in text else U32
                return [v.view(kind) for v in self.read(args[0], 4)]
            if text.startswith("st."):
                return self.write(args[0], args[1:])
            if text.startswith("bar.sync"):
                return None
            if text.startswith("redux.sync.max.u32"):
                assert self.mask.reshape(-1, 32).all(1).any(), "a warp is split"
                most = np.broadcast_to(args[0], self.threads).reshape(-1, 32).max(1)
                return [np.repeat(most, 32)]
            return self.register_code(text, args)

    def register_code(self, text, args):
        if text.startswith("fma.rn.f32"):
            a, b, c = (np.asarray(v, np.float64) for v in args)
            return [(a * b + c).astype(F32)]
        if text == mosaic_rows.LARGEST:
            return [np.abs(np.stack(np.broadcast_arrays(*args))).max(0)]
        if text == mosaic_gpu._QUAD:
            most = np.broadcast_to(args[0], self.threads).reshape(-1, 4).max(1)
            return [np.repeat(most, 4)]
        if "add.rn.f32 z, z, f" in text:
            step = int(re.search(r"add\.s32 c, c, (0x\w+)", text).group(1), 16)
            assert text == mosaic_rows.ROUND.format(step=step)
            z = (args[0] * args[1]).astype(F32)
            c = (z.view(np.int32) & 0x7F800000) + np.int32(step)
            f = np.maximum(c, np.asarray(args[2]).view(np.int32)).view(F32)
            return [((z + f).astype(F32) - f).astype(F32)]
        if text == mosaic_rows.CONVERT:
            clipped = [np.clip(v, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8) for v in args]
            return [sum(v.astype(U32) << U32(8 * i) for i, v in enumerate(clipped))]
        if text.startswith("cvt.rn.bf16x2.f32"):
            low, high = (np.asarray(v, F32).astype(ml_dtypes.bfloat16).view(np.uint16).astype(U32) for v in args)
            return [low | (high << U32(16))]
        if text == ma.MMA:
            return self.mma(args)
        raise NotImplementedError(text)

    def mma(self, args):
        """m16n8k16, bfloat16: 4g + c is the lane of rows g and g + 8 of A and C, and of column g of B."""

        def halves(words):
            words = np.stack([np.broadcast_to(w, self.threads) for w in words], axis=-1).reshape(-1, 32, len(words), 1)
            both = np.concatenate([words & U32(0xFFFF), words >> U32(16)], axis=-1).astype(np.uint16)
            return both.view(ml_dtypes.bfloat16).astype(np.float64).reshape(-1, 8, 4, len(words[0, 0]), 2)

        a, b = halves(args[:4]), halves(args[4:6])  # warp, g, c, register, half
        a = a.reshape(-1, 8, 4, 2, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, 16)  # register = 2 * k half + row
        b = b.transpose(0, 3, 2, 4, 1).reshape(-1, 16, 8)
        c = np.stack([np.broadcast_to(v, self.threads) for v in args[6:]], axis=-1).reshape(-1, 8, 4, 2, 2)
        out = c + (a @ b).reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4)
        return list(out.astype(F32).reshape(-1, 4).T)
