"""Configs found by measuring: a format for each weight under a budget of bits, or a rule for each input."""

from mxjax.search.budget import allocate as allocate
from mxjax.search.formats import search_formats as search_formats
from mxjax.search.formats import sensitivities as sensitivities
from mxjax.search.rules import search_rules as search_rules
