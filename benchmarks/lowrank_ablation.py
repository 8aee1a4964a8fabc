"""Each choice in LoRaQ and KroQuant against what else could have been chosen, on single layers.

    python benchmarks/lowrank_ablation.py --smollm2 MODEL.gguf TOKENS.npz --out benchmarks/results/lowrank_ablation.json

Rows are named by what they change; "base" is what it changes: LoRaQ alone as published, as far as that is known, and
the recipe ``kroquant_loraq``. Layers, measure and result file are those of ``lowrank_quality.py``.
"""

from dataclasses import replace

from lowrank_layers import arguments, run

import mxjax
from mxjax.transforms import BranchSmooth, Chain, Hadamard, KroQuant, SmoothQuant, Wush

# LoRaQ alone, data-free: start, steps, branch, rotation.
LORAQ = {
    "base": {},
    "no alternation, steps from the SVD of W": {"iterations": 1},
    "no steps, alternation only": {"steps": 0},
    "neither: the SVD of W": {"iterations": 1, "steps": 0},
    "branch int8": {"branch": "int8"},
    "branch w6a6": {"branch": "w6a6"},
    "branch w4a8": {"branch": "w4a8"},
    "branch w16a16, rank 32": {"branch": "w16a16"},
    "branch w16a16, rank 64, twice the bytes": {"branch": "w16a16", "rank": 64},
    "rotation": {"rotation": True},
}
# LoRaQ with KroQuant: what the branch is fitted to.
BRANCH = {
    "base": {},
    "objective weight": {"objective": "weight", "iterations": 10, "steps": 100},
    "objective weight, branch w8a8 (as published)": {
        "objective": "weight", "branch": "w8a8", "iterations": 10, "steps": 100
    },
    "no alternation": {"iterations": 1},
    "no steps": {"steps": 0},
    "damping 0.1": {"damping": 0.1},
    "branch w8a8": {"branch": "w8a8"},
    "branch w6a6": {"branch": "w6a6"},
    "branch w4a8": {"branch": "w4a8", "rank": 128},
    "branch w16a16, rank 32": {"branch": "w16a16", "rank": 32},
    "residual gptq": {"residual": "gptq", "gptq_observer": "mse", "gptq_act_order": "column"},
}  # fmt: skip
# KroQuant, beside the branch of the recipe: shape, sharing, parametrization, start, loss.
KRONECKER = {
    "base": {},
    "untrained": {"steps": 0},
    "no scales, factors private as far as they may": {"scales": "none"},
    "no scales, one pair of factors": {"scales": "none", "left_groups": 1, "right_groups": 1},
    "scales left": {"scales": "left"},
    "scales right": {"scales": "right"},
    "scales both": {"scales": "both"},
    "factors 2x16": {"left": 2},
    "factors 8x4": {"left": 8},
    "parametrization exp": {"parametrization": "exp"},
    "parametrization cayley": {"parametrization": "cayley"},
    "start identity": {"starts": ("identity",)},
    "start hadamard": {"starts": ("hadamard",)},
    "start wush": {"starts": ("wush",)},
    "start without SmoothQuant's scales": {"exponents": (0.0,)},
    "loss output": {"loss": "output"},
    "learned without the branch": {"rank": 0},
    "300 steps": {"steps": 300},
    "three starts trained": {"train": 3},
}
# What else could stand in KroQuant's place, with the same branch.
TRANSFORMS = {
    "none": None,
    "Hadamard": Hadamard(32),
    "SmoothQuant, K parameters": SmoothQuant(alpha=0.6),
    "SVDQuant's smoothing, K parameters": BranchSmooth(rank=64),
    "smoothing and Hadamard, K parameters": Chain((BranchSmooth(rank=64), Hadamard(32))),
    "WUSH, 32 K parameters": Wush(size=32),
}


def rows(fmt: str) -> dict[str, mxjax.Rule]:
    alone = mxjax.recipes.get(f"loraq_{fmt}").rules[0]
    both = mxjax.recipes.get(f"kroquant_loraq_{fmt}").rules[0]
    kro = both.transform
    assert isinstance(kro, KroQuant)
    out = {f"loraq: {k}": replace(alone, options={**alone.options, **v}) for k, v in LORAQ.items()}
    out |= {f"branch: {k}": replace(both, options={**both.options, **v}) for k, v in BRANCH.items()}
    out |= {f"kroquant: {k}": replace(both, transform=replace(kro, **v)) for k, v in KRONECKER.items()}
    return out | {f"transform: {k}": replace(both, transform=v) for k, v in TRANSFORMS.items()}


if __name__ == "__main__":
    run(arguments(__doc__).parse_args(), rows, "lowrank_ablation.py")
