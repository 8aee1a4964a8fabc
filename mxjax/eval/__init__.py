"""How good a quantized model is: errors of arrays and trees, perplexity, KL divergence, top-1 agreement."""

from mxjax.eval.arrays import ArrayError as ArrayError
from mxjax.eval.arrays import compare_arrays as compare_arrays
from mxjax.eval.arrays import cosine as cosine
from mxjax.eval.arrays import sqnr as sqnr
from mxjax.eval.language import LanguageScore as LanguageScore
from mxjax.eval.language import block_errors as block_errors
from mxjax.eval.language import check_tokens as check_tokens
from mxjax.eval.language import evaluate as evaluate
from mxjax.eval.language import perplexity as perplexity
from mxjax.eval.language import token_nll as token_nll
from mxjax.eval.trees import WeightError as WeightError
from mxjax.eval.trees import weight_errors as weight_errors
