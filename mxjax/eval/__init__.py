"""How good a quantized model is: errors of arrays, images, trees and layers, perplexity, KL, top-1, sensitivity."""

from mxjax.eval.arrays import ArrayError as ArrayError
from mxjax.eval.arrays import compare_arrays as compare_arrays
from mxjax.eval.arrays import cosine as cosine
from mxjax.eval.arrays import sqnr as sqnr
from mxjax.eval.continuations import score_continuations as score_continuations
from mxjax.eval.continuations import score_texts as score_texts
from mxjax.eval.images import psnr as psnr
from mxjax.eval.images import ssim as ssim
from mxjax.eval.language import LanguageScore as LanguageScore
from mxjax.eval.language import block_errors as block_errors
from mxjax.eval.language import evaluate as evaluate
from mxjax.eval.language import perplexity as perplexity
from mxjax.eval.language import token_nll as token_nll
from mxjax.eval.layers import LayerError as LayerError
from mxjax.eval.layers import layer_errors as layer_errors
from mxjax.eval.layers import worth_measuring as worth_measuring
from mxjax.eval.running import check_tokens as check_tokens
from mxjax.eval.sensitivity import Sensitivity as Sensitivity
from mxjax.eval.sensitivity import sensitivity as sensitivity
from mxjax.eval.trees import WeightError as WeightError
from mxjax.eval.trees import weight_errors as weight_errors
