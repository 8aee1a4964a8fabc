"""Trains the small classifier whose features measure distances between images, on the pictures of PixArt-Mini.

    python benchmarks/pixart_mini/classifier.py --data data/pixart_mini.npz --out models/data

Five minutes on one core, seconds on a GPU. Classes are the folders of clip art and the groups of emoji with at least 20
trained pictures; held-out pictures give the accuracy that it prints.
"""

import argparse
import collections
import time
from functools import partial
from pathlib import Path

import data as dataset
import jax
import jax.numpy as jnp
import numpy as np
import objective
import optax
from flax import nnx
from mxjax_models.pixart_mini_eval import CLASSIFIER, Classifier, save_classifier

SHIFT = 3  # pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2e-3)
    args = parser.parse_args()
    data = dataset.load(args.data)
    counts = collections.Counter(g for g, h in zip(data.groups, data.held_out, strict=True) if not h)
    classes = sorted(g for g, n in counts.items() if n >= 20)
    label = np.array([classes.index(g) if g in classes else -1 for g in data.groups])
    train, test = (np.flatnonzero((label >= 0) & (data.held_out == held)) for held in (False, True))
    # Between as many of every class and as many as there are: by the root of a class's size.
    share = np.array([counts[classes[c]] ** -0.5 for c in label[train]]) * data.weight[train]
    cumulative = jnp.asarray(np.cumsum(share) / share.sum(), jnp.float32)
    graph, params = nnx.split(Classifier(len(classes), rngs=nnx.Rngs(0)))
    optimizer = optax.adamw(optax.cosine_onecycle_schedule(args.steps, args.rate), weight_decay=0.02)
    images, labels = jnp.asarray(data.pixels[train]), jnp.asarray(label[train])

    # One step a call, not a scan of them: on a CPU XLA's convolutions are 30 times slower inside a loop.
    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, moments, key):
        pick, move = jax.random.split(key)
        rows = jnp.minimum(jnp.searchsorted(cumulative, jax.random.uniform(pick, (args.batch,))), len(labels) - 1)
        moves = jax.random.randint(move, (args.batch, 2), -SHIFT, SHIFT + 1)
        pixels = objective.moved(images[rows], moves, SHIFT)

        def loss(params):
            smooth = optax.smooth_labels(jax.nn.one_hot(labels[rows], len(classes)), 0.1)
            return optax.softmax_cross_entropy(nnx.merge(graph, params)(pixels), smooth).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, value

    moments, begun, losses = optimizer.init(params), time.perf_counter(), []
    for i in range(args.steps):
        params, moments, value = step(params, moments, jax.random.fold_in(jax.random.key(1), i))
        losses.append(value)
        if (i + 1) % 50 == 0 or i + 1 == args.steps:
            mean, losses = float(jnp.mean(jnp.stack(losses))), []
            print(f"step {i + 1}: loss {mean:.3f}, {time.perf_counter() - begun:.0f} s", flush=True)
    model = nnx.merge(graph, params)
    answer = jnp.argmax(jax.jit(lambda p: nnx.merge(graph, params)(p))(data.pixels[test]), -1)
    args.out.mkdir(parents=True, exist_ok=True)
    save_classifier(args.out / CLASSIFIER, model, classes)
    size = (args.out / CLASSIFIER).stat().st_size
    print(f"{len(classes)} classes, {(np.asarray(answer) == label[test]).mean():.1%} of {len(test)} held-out pictures, "
          f"{size / 1e6:.2f} MB")  # fmt: skip


if __name__ == "__main__":
    main()
