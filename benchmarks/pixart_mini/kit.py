"""Writes the held-out pictures and prompts of the evaluation kit (``mxjax_models.pixart_mini_eval``).

    python benchmarks/pixart_mini/kit.py --data data/pixart_mini.npz --out models/data

One picture of each held-out family (skin tones and numbered copies are families), 192 at most, in an order that mixes
emoji and clip art, so that the first 64 are as good a sample as all.
"""

import argparse
import hashlib
from pathlib import Path

import data as dataset
import numpy as np
from captions import family
from mxjax_models.pixart_mini_eval import PICTURES

MOST = 192


def chosen(names: list[str], mask: np.ndarray, most: int = MOST) -> list[int]:
    """Rows of those in ``mask``, one a family, by the hash of the name."""
    families: dict[str, int] = {}
    for i in np.flatnonzero(mask):
        families.setdefault(family(names[i]), int(i))
    return sorted(families.values(), key=lambda i: hashlib.sha256(names[i].encode()).digest())[:most]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    data = dataset.load(args.data)
    rows = chosen(data.names, data.held_out)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / PICTURES
    lines = {"prompts": [data.captions[i][0] for i in rows], "names": [data.names[i] for i in rows]}
    text = {k: np.frombuffer("\n".join(v).encode(), np.uint8) for k, v in lines.items()}
    np.savez(path, pixels=dataset.packed(data.pixels[rows]), **text)
    print(f"{len(rows)} pictures, {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
