"""What is said of a probe: labels, exponents, table, JSON and picture, from traces made up by hand."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from stability import probe_report
from stability.probe import Probe, labels, notes, slope, table, write
from stability.theory import Prediction, post_norm_gradient
from stability.trace import Trace
from tests.conftest import ROOT


def made(depth: int, scale: float = 1.0, last: float = 1.0, **changed: Any) -> Trace:
    place, layer = np.arange(depth + 1.0), np.arange(1.0, depth + 1)
    gradient = {
        part: (scale * last * depth / layer).tolist() for part in ("attention", "ffn", "norm", "residual", "down")
    }
    by_layer = ("attention_rms", "ffn_rms", "attention_skip_rms", "ffn_skip_rms", "logit_max", "attention_entropy")
    arrays: dict[str, Any] = dict.fromkeys((*by_layer, "gain_min", "gain_mean", "gain_max"), scale * layer)
    arrays |= {"stream_rms": scale * 2.0**place, "stream_grad_norm": scale / (1 + place), "token_cosine": place / depth}
    return Trace(**({"loss": 5.0 * scale, "grad_norm": {"total": 1.0} | gradient} | arrays | changed))


def probe(*words: str, depth: int = 4, predicted: Prediction | None = None, last: float = 1.0, **changed: Any) -> Probe:
    traces = [made(depth, 1.0, last, **changed), made(depth, 3.0, last, **changed)]
    return Probe(list(words), {"seed": 0}, 256, [0, 1], traces, predicted or Prediction())


def known(depth: int = 4) -> Prediction:
    layer = np.arange(depth + 1.0)
    return Prediction((1 + layer, 1 + 3 * layer), "a paper", post_norm_gradient(layer[1:], depth), -0.5, 48.0)


def said(*probes: Probe) -> str:
    console = Console(width=200, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(table(probes))
    return captured.get()


def row(text: str, name: str) -> list[str]:
    """The cells behind a row's name."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(name)]
    return [cell.strip() for cell in line.split(name, 1)[1].split("  ") if cell.strip()]


def test_labels_are_what_differs():
    words = [["model=deep", "placement=pre"], ["model=deep", "recipe=deepnorm"]]
    assert labels([probe(*one) for one in words]) == ["placement=pre", "recipe=deepnorm"]
    assert labels([probe("model=deep"), probe("model=deep", "norm=none")]) == ["model=deep", "norm=none"]
    assert labels([probe()]) == ["the default"]


def test_slope():
    assert slope([2, 4, 8], [3 * 2**-0.5, 3 * 4**-0.5, 3 * 8**-0.5]) == pytest.approx(-0.5)
    assert np.isnan(slope([2], [1])) and np.isnan(slope([2, 4], [1, 0])) and np.isnan(slope([2, 4], [1, np.nan]))


def test_the_table_has_mean_deviation_and_theory():
    text = said(probe("placement=pre", predicted=known()), probe("norm=none"))
    assert row(text, "loss (nats)") == ["10 ± 7.1"] * 2  # 5 and 15
    assert row(text, "ln of the vocabulary") == ["5.545"] * 2
    assert row(text, "stream RMS, embedding") == ["2 ± 1.4"] * 2  # 1 and 3
    assert row(text, "ln(last / embedding) / depth") == ["0.6931 ± 0"] * 2  # doubling
    assert row(text, "first / last") == ["4 ± 0"] * 2
    assert row(text, "block gradient, first") == ["16 ± 11"] * 2  # 4 parts of 4: 8, and 24
    assert row(text, "token cosine, last block") == ["1 ± 0"] * 2
    assert row(text, "largest attention logit") == ["8 ± 5.7"] * 2
    theory = [line for line in text.splitlines() if line.strip().startswith("theory")]
    assert "2.236 to 3.606" in theory[0] and "0.544" in theory[1] and all("none known" in line for line in theory)
    assert row(text, "update bound / lr (theory)") == ["48", "none known"]
    alone = Probe([], {}, 256, [0], [made(4)], Prediction())
    assert row(said(alone), "loss (nats)") == ["5"]


def test_notes_say_where_theory_comes_from_and_what_depths_say_together():
    three = [probe("a=b", f"model.depth={n}", depth=n, last=n**-0.4, predicted=known(n)) for n in (2, 4, 8)]
    lines = notes([*three, probe("norm=none")])
    assert "norm=none: no theory known for the stream" in lines
    assert "model.depth=4: stream by a paper" in [line.replace("a=b ", "") for line in lines]
    (exponent,) = [line for line in lines if "depth^" in line]
    assert "2, 4, 8 goes as depth^-0.40 (theory -0.5, Xiong et al. 2020, Theorem 1)" in exponent


def test_the_json_is_strict_and_whole(tmp_path: Path):
    broken = probe("placement=pre", predicted=known(), stream_rms=np.array([1.0, 2, np.inf, np.nan, 3]))
    write([broken, probe("norm=none")], tmp_path / "probe.json")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    found = json.loads((tmp_path / "probe.json").read_text(), parse_constant=refuse)
    first, second = found["configurations"]
    assert first["overrides"] == ["placement=pre"] and first["config"] == {"seed": 0} and first["seeds"] == [0, 1]
    assert first["arrays"]["stream_rms"] == [[1, 2, None, None, 3]] * 2
    assert "configurations[1].arrays.stream_rms[2][4]" in found["nonfinite"]
    assert first["arrays"]["ffn_rms"] == [[1, 2, 3, 4], [3, 6, 9, 12]]
    assert first["grad_norm"]["ffn"][0] == [4, 2, 4 / 3, 1] or first["grad_norm"]["ffn"][0][2] == pytest.approx(4 / 3)
    assert first["theory"]["stream"] == [[1, 2, 3, 4, 5], [1, 4, 7, 10, 13]] and second["theory"]["stream"] is None


def drawn(monkeypatch: pytest.MonkeyPatch, *probes: Probe) -> Figure:
    figures: list[Figure] = []
    monkeypatch.setattr(probe_report, "save", lambda figure, path: figures.append(figure))
    probe_report.draw(probes, Path("probe.png"))
    return figures[0]


def test_the_picture_shows_what_was_measured_beside_theory(monkeypatch: pytest.MonkeyPatch):
    figure = drawn(monkeypatch, probe("placement=pre", predicted=known()), probe("norm=none"))
    stream, block, gradient, cosine = figure.axes
    assert [panel.get_yscale() for panel in figure.axes] == ["log", "log", "log", "linear"]
    assert stream.lines[0].get_ydata().tolist() == [2, 4, 8, 16, 32]  # the mean of 1 and 3 times 2^l
    assert stream.lines[0].get_xdata().tolist() == [0, 1, 2, 3, 4]
    assert block.lines[0].get_ydata() == pytest.approx([16, 8, 16 / 3, 4])
    assert block.lines[0].get_xdata().tolist() == [1, 2, 3, 4]
    assert cosine.lines[0].get_ydata().tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert gradient.lines[1].get_ydata() == pytest.approx([2, 1, 2 / 3, 1 / 2, 2 / 5])
    assert [line.get_linestyle() for line in stream.lines] == ["-", "-", ":", ":"]
    assert stream.lines[2].get_ydata() == pytest.approx(np.sqrt([1, 2, 3, 4, 5]))
    assert block.lines[2].get_ydata() == pytest.approx(4 * post_norm_gradient(np.arange(1.0, 5), 4))
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts[:2] == ["placement=pre  [a paper]", "norm=none  [no theory known]"]
    assert len(texts) == len(figure.legends[0].legend_handles) == 4


def test_different_depths_share_an_axis_and_nothing_measured_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    collapsed = Prediction(gradient=1e-60 ** np.arange(1.0, 13))
    figure = drawn(monkeypatch, probe(depth=2), probe("model.depth=12", depth=12, predicted=collapsed))
    assert figure.axes[0].lines[1].get_xdata()[[0, -1]].tolist() == [0, 1]
    low, high = figure.axes[1].get_ylim()
    assert 0.05 < low < 2 and high > 24


@pytest.mark.slow
def test_a_picture_of_what_is_not_finite_and_of_one_block(tmp_path: Path):
    nothing = np.full(2, np.nan)
    probes = [probe(depth=1, stream_rms=nothing, stream_grad_norm=np.zeros(2), token_cosine=nothing)]
    probe_report.draw(probes, tmp_path / "probe.png")
    assert (tmp_path / "probe.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="at least one"):
        probe_report.draw([], tmp_path / "none.png")


def test_drawing_loads_no_torch():
    code = "import sys, stability.probe_report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
