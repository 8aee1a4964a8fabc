"""The HTML report in a browser: it is drawn, says nothing on the console, and its tables sort."""

import json
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.report import Result, html, plots

pytest.importorskip("matplotlib", reason="pip install 'mxjax[plot]'")

CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --enable-logging=stderr"
).split()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    keys = jax.random.split(jax.random.key(0), 6)
    layers = [{"proj": {"kernel": jax.random.normal(k, (64, 64))}, "norm": {"scale": jnp.ones(64)}} for k in keys]
    tree = {"layers": layers, "embed": {"embedding": jnp.ones((32, 64))}}
    return mxjax.report(
        tree,
        mxjax.quantize(tree, "mxfp4"),
        path=tmp_path_factory.mktemp("report") / "page.html",
        cfg="mxfp4",
        also={"nvfp4": mxjax.quantize(tree, "nvfp4")},
        results=[Result(label="float32", perplexity=10.0), Result(label="nvfp4", perplexity=12.0)],
        samples={"float32": "a", "mxfp4": "b"},
        extra=[html.section("More", "of somebody else's", html.table(["a"], [[2], [None], [10], [1]], sortable=True))],
    )


def browse(tmp_path, *arguments):
    """What Chromium prints, and the lines that the page wrote to its console."""
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run([CHROMIUM, *FLAGS, profile, *arguments], capture_output=True, timeout=120, check=True)
    return done.stdout.decode(), [line for line in done.stderr.decode().splitlines() if "CONSOLE" in line]


def seen_by(page, script, tmp_path):
    """Runs ``script`` in a copy of the page, and returns what its function ``result`` gives."""
    added = f'<script>{script}; document.body.textContent = "RESULT" + JSON.stringify(result()) + "END";</script>'
    copy = tmp_path / "page.html"
    text = page.read_text(encoding="utf-8")
    copy.write_text(text.replace("</body>", f"{added}</body>"), encoding="utf-8")
    dom, console = browse(tmp_path, "--dump-dom", copy.as_uri())
    assert not console
    return json.loads(re.search("RESULT(.*)END", dom)[1])


def test_it_is_drawn(page, tmp_path):
    shot = tmp_path / "page.png"
    _, console = browse(tmp_path, "--window-size=1200,3000", f"--screenshot={shot}", page.as_uri())
    assert not console
    image = np.asarray(pytest.importorskip("PIL.Image", reason="comes with matplotlib").open(shot).convert("RGB"))
    assert image.shape == (3000, 1200, 3)
    # Plots are there: the first two colours of the palette cover more than a few glyphs would.
    for colour in plots.COLOURS[:2]:
        rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert (np.abs(image.astype(int) - rgb).max(axis=-1) < 4).sum() > 2000


def test_an_error_on_the_console_would_be_seen(page, tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text(encoding="utf-8").replace("</body>", "<script>nothing.here()</script></body>"))
    assert "nothing is not defined" in "".join(browse(tmp_path, "--dump-dom", broken.as_uri())[1])


def test_a_click_sorts_and_another_turns_the_order(page, tmp_path):
    script = """function result() {
      const t = document.querySelector("section.layers table"), h = t.tHead.rows[0].cells[3];
      const read = () => [...t.tBodies[0].rows].map(r => +r.cells[3].dataset.v);
      h.click(); const up = read(); h.click(); return [up, read(), h.getAttribute("aria-sort")];
    }"""
    up, down, direction = seen_by(page, script, tmp_path)
    assert len(up) == 6 and len(set(up)) > 1
    assert up == sorted(up) and down == up[::-1] and direction == "descending"


def test_the_keyboard_sorts_paths_and_a_table_with_an_empty_cell(page, tmp_path):
    script = """function result() {
      const press = (th, key) => th.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
      const tables = [...document.querySelectorAll("table.sortable")];
      const paths = document.querySelector("section.layers table"), head = paths.tHead.rows[0].cells[0];
      press(head, "Enter"); press(head, " ");
      const more = tables.find(t => t.tHead.rows[0].cells.length == 1), th = more.tHead.rows[0].cells[0];
      press(th, "Enter");
      return [[...paths.tBodies[0].rows].map(r => r.cells[0].textContent), head.tabIndex,
              [...more.tBodies[0].rows].map(r => r.cells[0].textContent)];
    }"""
    paths, index, more = seen_by(page, script, tmp_path)
    assert paths == [f"layers/{i}/proj/kernel" for i in reversed(range(6))] and index == 0
    assert more == ["1", "2", "10", ""]


@pytest.mark.parametrize("width", [390, 1200])
def test_nothing_is_wider_than_the_screen(page, tmp_path, width):
    """Wide tables and pictures scroll inside the page. The browser's own window has a least width; a frame has none."""
    frame = tmp_path / "frame.html"
    inner = page.read_text(encoding="utf-8").replace("&", "&amp;").replace('"', "&quot;")
    script = """onload = () => {
      const inner = document.querySelector("iframe").contentDocument.documentElement;
      document.body.textContent = "RESULT" + inner.scrollWidth + "END"; }"""
    sized = f'<iframe width="{width}" height="900" style="border:0" srcdoc="{inner}"></iframe>'
    frame.write_text(f"<body>{sized}<script>{script}</script></body>", encoding="utf-8")
    dom, console = browse(tmp_path, "--dump-dom", frame.as_uri())
    assert not console and int(re.search("RESULT(.*)END", dom)[1]) <= width
