"""The clipping style of a configuration, and norms in the part of the metrics that is private."""

from __future__ import annotations

import json

import pytest
import torch

from dptrain import Automatic, Flat, PerGroup, PerLayer
from dptrain.clipping.base.styles import ClippingStyle
from dptrain.configuration.typed import build_clipping, members_of
from recipes.config import load_config, to_yaml
from recipes.debug_norms import DebugNorms
from recipes.runfolder import load_checkpoint
from recipes.vision import VisionSettings
from tests.helpers.tiny_vision import PLAIN, run

HALVES = """
clipping:
  type: PerGroup
  groups:
    body: ["[!h]*"]
    head: ["head.*"]
  shares: {body: 3, head: 4}
"""


def _style(*overrides, path=None):
    return load_config(VisionSettings, path, overrides).build_clipping()


def test_a_style_is_named_by_its_class_and_takes_its_own_arguments(tmp_path):
    assert _style() == Flat()
    assert _style("clipping.type=Automatic") == Automatic()
    assert _style("clipping.gamma=0.5", "clipping.type=Automatic") == Automatic(gamma=0.5)
    assert _style("clipping.type=Automatic", "clipping.gamma=null") == Automatic()
    path = tmp_path / "run.yaml"
    path.write_text(HALVES)
    halves = PerGroup({"body": ("[!h]*",), "head": ("head.*",)}, {"body": 3, "head": 4})
    assert _style(path=path) == halves
    path.write_text(to_yaml(load_config(VisionSettings, path)))
    assert _style(path=path) == halves
    assert _style("clipping.type=PerLayer", path=path) == PerLayer()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["clipping.type=Automatc"], "clipping.type='Automatc': did you mean Automatic"),
        (["clipping.type=null"], "clipping.type=None"),
        (["clipping.gamma=0.1"], "Flat has no field 'gamma'; it has no fields"),
        (["clipping.type=Automatic", "clipping.gama=1"], "did you mean clipping.gamma"),
        (["clipping.type=Automatic", "clipping.gamma=0"], "clipping: gamma=0.0 .*at least"),
        (["clipping.type=Automatic", "clipping.gamma=much"], "clipping: .*gamma='much'"),
        (["clipping.type=PerGroup"], "PerGroup needs clipping.groups"),
        (["clipping.type=PerGroup", "clipping.groups=[a]"], r"clipping: .*groups=\['a'\]"),
    ],
)
def test_impossible_styles_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_config(VisionSettings, None, ["steps=9", *overrides]).validate()


def test_every_style_refuses_what_it_does_not_have():
    styles = members_of(ClippingStyle)
    assert {"Automatic", "Flat", "PerGroup", "PerLayer"} <= set(styles)
    for name in styles:
        with pytest.raises(ValueError, match=f"{name} has no field 'color'"):
            build_clipping({"type": name, "color": 3})


def _metrics(output):
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_keeps_its_style_and_logs_norms_apart(config, tmp_path, capsys):
    automatic = ["clipping.type=Automatic", "clipping.gamma=0.1"]
    plain, debug = tmp_path / "plain", tmp_path / "debug"
    assert run(config, plain, *PLAIN, *automatic) == 0
    assert run(config, debug, *PLAIN, *automatic, "debug_norms=true") == 0
    settings = load_checkpoint(debug)["run"]["settings"]
    style = settings["gradients"]["clipping"]
    assert (style["type"], style["gamma"]) == ("Automatic", 0.1)

    found = _metrics(debug)
    assert [{k: v for k, v in r.items() if "debug" not in k} for r in found] == _metrics(plain)
    for record in found:
        norms = {name for name in record if name.startswith("debug/")}
        if record["split"] != "train":
            assert not norms
            continue
        assert norms == {"debug/median_norm", "debug/share_above_bound"}
        assert record["not_for_release"] is True
        assert record["debug/median_norm"] > 0
        assert 0 <= record["debug/share_above_bound"] <= 1
    report = (debug / "privacy_report.json").read_text()
    assert "median_norm" not in report
    assert "0.1" in (debug / "config.yaml").read_text()

    capsys.readouterr()
    assert run(config, debug, "--resume", *PLAIN, *automatic) == 0  # debug_norms may change
    assert run(config, debug, "--resume", *PLAIN) == 2
    assert "clipping.type: the run has 'Automatic', now 'Flat'" in capsys.readouterr().err


def test_norms_of_a_step_leave_out_padding_and_what_is_not_finite():
    norms = DebugNorms()
    assert norms.values(1.0) == {}
    norms.add(None, torch.ones(2))
    norms.add(torch.tensor([0.5, 9.0, float("nan"), 2.0]), torch.tensor([1.0, 0.0, 1.0, 1.0]))
    norms.add(torch.tensor([3.0, float("inf"), 1.0]), torch.ones(3))
    # 0.5, 1, 2, 3 are left: the median is between 1 and 2, and two of four are above 1.
    assert norms.values(1.0) == {"debug/median_norm": 1.5, "debug/share_above_bound": 0.5}
