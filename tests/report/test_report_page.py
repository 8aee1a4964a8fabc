"""The HTML report: complete, escaped, self-contained."""

import base64
import html.parser
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.calibration import GramSum, stats_of, update
from mxjax.errors import ConfigError, MissingExtraError
from mxjax.eval import ArrayError, Sensitivity, WeightError
from mxjax.report import Result, depth, plots
from mxjax.report import html as page_html

matplotlib = pytest.importorskip("matplotlib", reason="pip install 'mxjax[plot]'")

EVIL = "<script>alert('&\"')</script>"


def params(blocks=3):
    keys = iter(jax.random.split(jax.random.key(0), 2 * blocks + 1))
    layers = [
        {
            "up_proj": {"kernel": jax.random.normal(next(keys), (64, 96))},
            "down_proj": {"kernel": jax.random.normal(next(keys), (96, 64)), "bias": jnp.zeros(64)},
        }
        for _ in range(blocks)
    ]
    return {"layers": layers, "embed": {"embedding": jax.random.normal(next(keys), (40, 64))}}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    tree = params()
    results = [
        Result(label="float32", bits_per_weight=32.0, nbytes=10**6, perplexity=10.0, tokens_per_second=50.0),
        Result(label=EVIL, algorithm=EVIL, bits_per_weight=4.25, nbytes=10**5, perplexity=12.5, kl=0.3),
        Result(label="broken", perplexity=float("inf")),
    ]
    path = mxjax.report(
        tree,
        mxjax.quantize(tree, "mxfp4"),
        path=tmp_path_factory.mktemp("report") / "page.html",
        label=EVIL,
        also={"nvfp4": mxjax.quantize(tree, "nvfp4"), "hadamard": mxjax.quantize(tree, "hadamard_mxfp4")},
        title=f"Title {EVIL}",
        results=results,
        drift={EVIL: [ArrayError(20.0, 1.0, 0.1, 0.1, 21.0), ArrayError(float("inf"), 1.0, 0.0, 0.0, float("inf"))]},
        prompt=f"prompt {EVIL}",
        samples={"float32": f"sample {EVIL}", EVIL: "line\nbreak"},
    )
    return tree, path


class Page(html.parser.HTMLParser):
    """Tags, their attributes, and the text of table rows."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.rows, self.text = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag  # well nested

    def handle_data(self, data):
        self.text.append(data)
        if self.open and self.open[-1] == "td":
            self.rows[-1].append(data)


def test_every_array_is_there(written):
    tree, path = written
    page = Page(path.read_text(encoding="utf-8"))
    assert not page.open
    first = [row[0] for row in page.rows if row]
    for i in range(3):
        for name in ("up_proj", "down_proj"):
            assert f"layers/{i}/{name}/kernel" in first
    assert "embed/embedding" in first and "layers/0/down_proj/bias" in first
    row = next(r for r in page.rows if r and r[0] == "layers/1/up_proj/kernel")
    errors = {
        recipe: mxjax.eval.weight_errors(tree, mxjax.quantize(tree, recipe)) for recipe in ("mxfp4", "hadamard_mxfp4")
    }
    sqnr = {recipe: next(e.sqnr_db for e in rows if e.path == row[0]) for recipe, rows in errors.items()}
    assert row[1:4] == ["64×96", "1", f"{sqnr['mxfp4']:.2f}"] and row[5] == f"{sqnr['hadamard_mxfp4']:.2f}"


def test_text_is_escaped(written):
    text = written[1].read_text(encoding="utf-8")
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("script") == 1  # ours
    assert "alert(" not in "".join(re.findall(r"<script>.*?</script>", text, re.S))
    shown = "".join(page.text)
    for prefix in ("Title ", "prompt ", "sample "):
        assert prefix + EVIL in shown


def test_nothing_is_loaded_from_outside(written):
    text = written[1].read_text(encoding="utf-8")
    for tag, attributes in Page(text).tags:
        assert tag not in ("link", "iframe", "object", "embed")
        for name in ("src", "href", "srcset"):
            assert attributes.get(name, "data:").startswith("data:")
    assert "@import" not in text and "url(" not in text
    images = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', text)
    assert len(images) == 7  # quality, error, drift, weights, and a histogram for each of three formats
    for image in images:
        svg = base64.b64decode(image).decode()
        assert svg.count("<svg") == 1 and "<text" not in svg


def test_numbers(written):
    shown = "".join(Page(written[1].read_text(encoding="utf-8")).text)
    assert "4.25 bits" in shown and "×1.250" in shown and "12.50" in shown
    assert "6 of 10" in shown and "∞" in shown


def test_what_the_numbers_mean_is_said(tmp_path):
    tree = params(1)
    results = [
        Result(label="float32", tokens_per_second=9.0, speed_of="one pass"),
        Result(label="mxfp4", tokens_per_second=5.0, quantize_seconds=1.0),
    ]
    also = {"nvfp4": mxjax.quantize(tree, "nvfp4")}
    path = mxjax.report(
        tree, mxjax.quantize(tree, "mxfp4"), path=tmp_path / "p.html", label="mxfp4", also=also, results=results
    )
    text = path.read_text(encoding="utf-8")
    assert "include compilation" in text and "The tokens/s are those of one pass." in text
    assert ("no 4-bit arithmetic" in text) == (jax.default_backend() == "cpu")
    for column in ("cosine mxfp4", "bits mxfp4", "bytes mxfp4"):
        assert f">{column}</th>" in text
    assert "cpu: cpu" not in text


def statistics(tree):
    """As mxjax.calibrate gives them, of random inputs, for the weights of every block."""
    out = {}
    for i, layer in enumerate(tree["layers"]):
        for name, module in layer.items():
            x = jax.random.normal(jax.random.key(i), (128, module["kernel"].shape[0])).at[0, 0].set(50.0)
            out[f"layers/{i}/{name}/kernel"] = stats_of(update(GramSum.zeros(x.shape[1]), x))
    return out


def cells(path, name):
    """Column ``name`` of the table of weights, by path, as text."""
    text = re.search(r'<section class="layers">.*?</section>', path.read_text(encoding="utf-8"), re.S)[0]
    head = re.findall(r"<th[^>]*>(.*?)</th>", text)
    rows = [row for row in Page(text).rows if row and row[0].startswith("layers/") and row[0].endswith("kernel")]
    # Page reads the text of cells, so a row with an empty cell would be short.
    assert all(len(row) == len(head[: head.index("bytes mxfp4") + 1]) for row in rows)
    return {row[0]: row[head.index(name)] for row in rows}


def test_statistics_add_columns_and_a_plot(tmp_path):
    tree = params(2)
    trees = {name: mxjax.quantize(tree, name) for name in ("mxfp4", "nvfp4")}
    stats = statistics(tree)
    options = {"path": tmp_path / "p.html", "label": "mxfp4", "also": {"nvfp4": trees["nvfp4"]}}
    path = mxjax.report(tree, trees["mxfp4"], stats, **options)
    for name, qtree in trees.items():
        expected = {row.path: f"{row.output_sqnr_db:.2f}" for row in mxjax.eval.layer_errors(tree, qtree, stats)}
        assert cells(path, f"output SQNR {name} (dB)") == expected and len(expected) == 4
    rows = {row.path: row for row in mxjax.eval.layer_errors(tree, trees["mxfp4"], stats)}
    assert cells(path, "input peak / rms") == {p: f"{row.input_peak:.2f}" for p, row in rows.items()}
    assert cells(path, "input SQNR (dB, estimate)") == {p: f"{row.input_sqnr_db:.2f}" for p, row in rows.items()}
    assert set(cells(path, "tokens seen").values()) == {"128"}
    text = path.read_text(encoding="utf-8")
    assert "Output SQNR by depth" in text and "tr W H W" in text
    without = mxjax.report(tree, trees["mxfp4"], **options).read_text(encoding="utf-8")
    assert without.count("data:image/svg") == text.count("data:image/svg") - 2  # outputs and inputs
    assert "output SQNR" not in without and "input peak" not in without


def test_sensitivity_of_blocks_and_of_weights(tmp_path):
    tree = params(2)
    qtree = mxjax.quantize(tree, "mxfp4")
    blocks = [Sensitivity(f"layers/{i}", 0.01 * (i + 1), 0.001, 0.02, 0.9) for i in range(2)]
    text = mxjax.report(tree, qtree, path=tmp_path / "p.html", sensitivity=blocks).read_text(encoding="utf-8")
    listed = [row for row in Page(text).rows if row and re.fullmatch(r"layers/\d", row[0])]
    assert listed == [["layers/1", "0.02000", "×1.0202", "90.00"], ["layers/0", "0.01000", "×1.0202", "90.00"]]
    (ax,) = depth.sensitivity_by_depth(blocks).axes
    assert [bar.get_height() for bar in ax.patches] == [0.01, 0.02] and len(ax.containers) == 2  # bars, their errors
    assert "KL alone" not in text  # a column of weights
    paths = [f"layers/{i}/{name}/kernel" for i in range(2) for name in ("up_proj", "down_proj")]
    weights = [Sensitivity(p, 0.001 * (n + 1), None, 0.0, 1.0) for n, p in enumerate(paths)]
    path = mxjax.report(tree, qtree, path=tmp_path / "p.html", label="mxfp4", sensitivity=weights)
    assert cells(path, "KL alone (mnats)") == {p: f"{n + 1:.2f}" for n, p in enumerate(paths)}
    (ax,) = depth.sensitivity_by_depth(weights).axes
    assert {line.get_label(): list(line.get_ydata()) for line in ax.lines} == {
        "up_proj": [0.001, 0.003],
        "down_proj": [0.002, 0.004],
    }
    alone = depth.sensitivity_by_depth([Sensitivity("layers/0", 0.0, None, 0.0, 1.0)]).axes[0]
    assert len(alone.containers) == 1  # a single sequence has no standard error


def test_a_label_has_one_colour(tmp_path, monkeypatch):
    """Bars, lines and histograms of a variant; the two trees of equal weights share the first one's histogram."""
    seen = []

    def note(module, name):
        plot = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a: seen.append((name, plot(*a))) or seen[-1][1])

    for module, name in ((plots, "quality"), (depth, "drift_by_depth"), (plots, "histograms")):
        note(module, name)
    tree = params(1)
    trees = {name: mxjax.quantize(tree, name) for name in ("mxfp4", "mxfp4_a16", "nvfp4")}
    labels = ["float32", "nvfp4", "mxfp4_a16", "mxfp4"]
    mxjax.report(
        tree,
        trees.pop("mxfp4"),
        path=tmp_path / "p.html",
        label="mxfp4",
        also=trees,
        results=[Result(label=name, perplexity=10.0) for name in labels],
        drift={name: [ArrayError(1.0, 1.0, 0.1, 0.1, 2.0)] for name in ("mxfp4_a16", "nvfp4", "mxfp4")},
    )
    colours = plots.label_colours(["mxfp4", "mxfp4_a16", "nvfp4"], "float32")
    assert len(set(colours.values())) == 4
    figures = [(name, fig.axes[0]) for name, fig in seen]
    bars, drift, first, second = (ax for _, ax in figures)
    assert [name for name, _ in figures] == ["quality", "drift_by_depth", "histograms", "histograms"]
    rgb = matplotlib.colors.to_rgba
    assert [bar.get_facecolor() for bar in bars.patches] == [rgb(colours[name]) for name in labels]
    assert {line.get_label(): line.get_color() for line in drift.lines} == {
        name: colours[name] for name in ("mxfp4", "mxfp4_a16", "nvfp4")
    }
    assert first.patches[0].get_facecolor() == rgb(colours["mxfp4"])
    assert second.patches[0].get_facecolor() == rgb(colours["nvfp4"])


def test_the_drift_plot_shows_the_token_in_the_middle():
    """One massive row: the sums see nothing else (60 dB), the median row says 20 dB."""
    r = np.ones((5, 4), np.float32)
    x = r * 1.1  # error a tenth of the value: 20 dB
    r[0] *= 1e6
    x[0] = r[0] * 1.001
    error = mxjax.eval.compare_arrays(jnp.asarray(r), jnp.asarray(x))
    # 1.1 and 1.001 are float32: relative errors of 6e-8 / 0.1 and 6e-8 / 1e-3 of the difference, below 0.001 dB.
    assert error.sqnr_db == pytest.approx(60, abs=1e-3) and error.median_row_sqnr_db == pytest.approx(20, abs=1e-3)
    (line,) = depth.drift_by_depth({"a": [error]}).axes[0].lines
    assert line.get_ydata()[0] == error.median_row_sqnr_db


def test_defaults_and_one_format(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree = params(1)
    path = mxjax.report(tree, mxjax.quantize(tree, "nvfp4"))
    assert path.name == "mxjax-report.html" and [p.name for p in tmp_path.iterdir()] == [path.name]
    text = path.read_text(encoding="utf-8")
    assert "nvfp4" in text and "Text before and after" not in text and "Quality, size and speed" not in text


def test_trees_with_the_same_weights_are_shown_once(tmp_path):
    tree = params(1)
    also = {"weights only": mxjax.quantize(tree, "mxfp4_a16")}
    text = mxjax.report(
        tree, mxjax.quantize(tree, "mxfp4"), path=tmp_path / "p.html", label="both", also=also
    ).read_text()
    assert "SQNR both, weights only (dB)" in text and text.count("data:image/svg+xml") == 3


def test_depthless_paths_experts_and_other_formats(tmp_path):
    tree = {
        "w": jax.random.normal(jax.random.key(0), (32, 8)),
        "experts": jax.random.normal(jax.random.key(1), (3, 64, 8)),
    }
    for recipe in ("mxfp8_e4m3", "mxfp6_e2m3", "mxint8"):
        path = mxjax.report(tree, mxjax.quantize(tree, recipe), path=tmp_path / "page.html")
        assert "3×64×8" in path.read_text(encoding="utf-8")


def test_exactly_representable_weights(tmp_path):
    tree = {"layers": [{"w": jnp.ones((32, 32))}]}
    assert "∞" in mxjax.report(tree, mxjax.quantize(tree, "mxfp4"), path=tmp_path / "page.html").read_text(
        encoding="utf-8"
    )


def test_errors(tmp_path, monkeypatch):
    tree = params(1)
    with pytest.raises(ConfigError, match="nothing"):
        mxjax.report(tree, tree, path=tmp_path / "page.html")
    with pytest.raises(ConfigError, match="nothing is quantized in float"):
        mxjax.report(tree, mxjax.quantize(tree, "mxfp4"), path=tmp_path / "page.html", also={"float": tree})
    with pytest.raises(ConfigError, match="path="):
        mxjax.report(tree, mxjax.quantize(tree, "mxfp4"), "page.html")
    with pytest.raises(FileNotFoundError):
        mxjax.report(tree, mxjax.quantize(tree, "mxfp4"), path=tmp_path / "none" / "page.html")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"mxjax\[plot\]"):
        mxjax.report(tree, mxjax.quantize(tree, "mxfp4"), path=tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("start", ["import mxjax.report.plots", "import mxjax"])
def test_the_package_is_callable_whatever_was_imported_first(start):
    code = (
        f"{start}; import mxjax; assert callable(mxjax.report); assert mxjax.report.plots or True; import mxjax.report"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_element_counts_by_hand():
    q = mxjax.quantize_array(jnp.array([[6.0, -6.0, 0.5, 0.5] + [0.0] * 28] * 2), "mxfp4")
    values, counts = plots.element_counts([q, q])
    assert values.tolist() == [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = dict.fromkeys(values.tolist(), 0) | {6.0: 4, -6.0: 4, 0.5: 8, 0.0: 112}
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == expected


@pytest.mark.parametrize("fmt", list(mxjax.FORMATS))
def test_element_counts_are_complete(fmt):
    q = mxjax.quantize_array(jax.random.normal(jax.random.key(0), (8, 96)), fmt)
    values, counts = plots.element_counts([q])
    assert counts.sum() == 8 * 96 and np.all(np.diff(values) > 0)


def test_block_scales_by_hand():
    x = jnp.zeros((3, 32)).at[0, 0].set(6.0).at[1, 0].set(24.0)
    assert plots.block_scales([mxjax.quantize_array(x, "mxfp4")]).tolist() == [0.0, 2.0]  # the zero block is left out
    # NVFP4: amax / 6 is the scale of a block up to the rounding of E4M3, at most 1 part in 16.
    nv = plots.block_scales([mxjax.quantize_array(x, "nvfp4")])
    np.testing.assert_allclose(nv[nv > -3], [0.0, 2.0], atol=np.log2(1 + 1 / 16))


def test_place():
    assert plots.place("layers/3/mlp/up_proj/kernel") == (3, "up_proj")
    assert plots.place("block_12/attn/q/kernel") == (12, "q")
    assert plots.place("w") == (None, "w")


def test_figures_are_reproducible(written):
    tree, _ = written
    rows = {"a": mxjax.eval.weight_errors(tree, mxjax.quantize(tree, "mxfp4"))}
    draw = lambda: page_html.image(depth.error_by_depth(rows), "alt")  # noqa: E731
    assert draw() == draw()


def test_layers_of_one_name_in_a_block_have_lines_of_their_own():
    names = ("attn1/to_q", "attn2/to_q", "ff/net/0/proj", "experts/0/up", "experts/1/up")
    paths = [f"blocks/{i}/{name}/kernel" for i in range(2) for name in names]
    kinds = plots.kinds_of(paths)
    assert [kinds[p] for p in paths[:5]] == ["attn1/to_q", "attn2/to_q", "proj", "experts/up", "experts/up"]
    rows = [
        WeightError(p, (2, 2), "mxfp4", 1, 4.0, float(n), 1.0, 0.1, 0.1) for n, p in enumerate(paths[:2] + paths[5:7])
    ]
    lines = {line.get_label(): line.get_ydata().tolist() for line in depth.error_by_depth({"a": rows}).axes[0].lines}
    assert lines == {"attn1/to_q": [0.0, 2.0], "attn2/to_q": [1.0, 3.0]}
    assert plots.kinds_of(["layers/0/q/kernel", "layers/1/q/kernel", "a", "b"]) == {
        "layers/0/q/kernel": "q", "layers/1/q/kernel": "q", "a": "a", "b": "b"
    }  # fmt: skip


def test_a_number_keeps_its_digits_and_sorts_by_value():
    text = page_html.table(
        ["ratio"], [[page_html.Digits(1.25, 4, "×")], [page_html.Digits(0.5, 4, "×")]], sortable=True
    )
    assert '<td class="n" data-v="1.25">×1.2500</td>' in text and '<th class="n">' in text
