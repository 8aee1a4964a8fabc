"""Which recipe each weight got and why, and the outliers of inputs: what the page says is what the tree holds."""

import jax
import jax.numpy as jnp
import pytest

import mxjax
from mxjax.eval import LayerError
from mxjax.report import choices, depth, html
from mxjax.transforms import Hadamard, SmoothQuant, describe

pytest.importorskip("matplotlib", reason="pip install 'mxjax[plot]'")

CFG = mxjax.QuantConfig(
    rules=[
        mxjax.Rule(path="layers/0/", weight=None),
        mxjax.Rule(path="down", weight="mxfp8_e4m3", activation="mxfp8_e4m3"),
        mxjax.Rule(weight="mxfp4", activation="mxfp4", transform=Hadamard(32)),
    ]
)


def tree():
    keys = iter(jax.random.split(jax.random.key(0), 8))
    layers = [{name: {"kernel": jax.random.normal(next(keys), (64, 64))} for name in ("up", "down")} for _ in range(3)]
    return {"embed": {"embedding": jnp.ones((32, 64))}, "layers": layers, "odd": {"kernel": jnp.ones((40, 8))}}


def test_reasons_name_the_rule_or_why_an_array_stays():
    why = choices.reasons(tree(), CFG)
    assert why["layers/0/up/kernel"] == "rule 'layers/0/' leaves it"
    assert why["layers/1/down/kernel"] == "rtn, rule 'down'"
    assert why["layers/2/up/kernel"] == "rtn, the rule for all"
    assert why["embed/embedding"].startswith("excluded by")
    assert "no multiple of 32" in why["odd/kernel"], "an uneven axis is a reason here, not an error"


def test_reasons_say_what_a_transform_was_chosen_from():
    cfg = CFG.replace(rules=[mxjax.Rule(weight="mxfp4", transform=SmoothQuant())])
    assert choices.reasons(tree(), cfg)["layers/1/up/kernel"].endswith(f"transform: {describe(SmoothQuant())}")


def test_a_row_for_each_recipe():
    qtree = mxjax.quantize(tree(), CFG.replace(on_uneven="skip"))
    text = choices.choices_section(mxjax.summary(qtree), choices.reasons(tree(), CFG))
    assert text.count("<tr>") == 3  # head, mxfp4, mxfp8
    for cell in ("mxfp4 × mxfp4, hadamard 32", "mxfp8_e4m3 × mxfp8_e4m3", "rtn, the rule for all",
                 "layers/1/up/kernel ... layers/2/up/kernel"):  # fmt: skip
        assert f"<td>{cell.replace(chr(39), '&#x27;')}</td>" in text
    assert '<td class="n" data-v="4.25">4.25</td>' in text and '<td class="n" data-v="2">2</td>' in text
    unknown = choices.choices_section(mxjax.summary(qtree), {})
    assert "why" not in unknown.split("<tbody>")[0].split("<thead>")[1] and "cfg=" in unknown


def test_weights_without_activations():
    (row,) = [r for r in mxjax.summary(mxjax.quantize({"a": {"kernel": jnp.ones((64, 8))}}, "nvfp4_a16")).rows]
    assert choices.recipe_of(row) == "nvfp4 × float inputs"


def test_the_page_has_recipes_reasons_and_parts_of_others(tmp_path):
    params, cfg = tree(), CFG.replace(on_uneven="skip")
    more = html.section("Pictures <of> others", "plain text", "<b>content</b>")
    options = dict(path=tmp_path / "p.html", label="mixed", samples={"a": "text"})
    text = mxjax.report(params, mxjax.quantize(params, cfg), cfg=cfg, extra=[more], **options).read_text("utf-8")
    assert (
        text.index("Text before and after") < text.index("Pictures &lt;of&gt; others") < text.index("Weight by weight")
    )
    assert "<b>content</b>" in text
    layers = text.split('<section class="layers">')[1]
    assert ">recipe mixed</th>" in layers and "<td>mxfp4 × mxfp4, hadamard 32</td>" in layers
    assert ">why</th>" in layers and "leaves it</td>" in layers and "no multiple of 32" in layers
    without = mxjax.report(params, mxjax.quantize(params, cfg), **options).read_text("utf-8")
    assert ">why</th>" not in without


def rows(sqnr):
    return [
        LayerError(f"layers/{i}/{n}/kernel", 20.0, 0.01, sqnr, 4.0 + 10 * i, 8) for i in range(3) for n in ("q", "k")
    ]


def test_inputs_by_depth():
    fig = depth.inputs_by_depth({"a4": rows(18.0), "a16": rows(None)})
    peaks, sqnr = [ax for ax in fig.axes if ax.get_visible()]
    assert [list(line.get_ydata()) for line in peaks.lines] == [[4, 14, 24]] * 2 and peaks.get_yscale() == "log"
    assert (
        sqnr.get_title() == "input SQNR (dB), a4"
        and [list(line.get_ydata()) for line in sqnr.lines] == [[18.0] * 3] * 2
    )
    assert len([ax for ax in depth.inputs_by_depth({"a16": rows(None)}).axes if ax.get_visible()]) == 1


def test_inputs_that_layers_share_are_listed_once(tmp_path):
    from mxjax.report import sections

    text = sections.inputs_section({"a4": rows(18.0)})
    assert "layers/2/q/kernel, layers/2/k/kernel" in text and text.count("<tr>") == 4
    assert "SQNR" not in sections.inputs_section({"a16": rows(None)}).split("<table")[1]
    assert sections.inputs_section({}) == ""
