"""nanoGPT's published figure for a small CPU setting: 4 layers, 4 heads, width 128, context 64, batch 12, 2,000 steps, no
dropout, on Tiny Shakespeare with the last tenth as validation: 1.88. Two to three minutes on two cores."""

import pytest
import torch

import train
from tests.conftest import SHARED, config

TEXT = SHARED / "data" / "tinyshakespeare.txt"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_quality_reaches_nanogpt(tmp_path):
    if not TEXT.is_file():
        pytest.skip("tinyshakespeare.txt is not here")
    words = ["data=files", f"data.paths=[{TEXT}]", "data.val_fraction=0.1", "data.val_windows=2000", "logger=none"]
    words += ["model.context=64", "batch=12", "steps=2000", "val_every=2000", "optimizer.betas=[0.9,0.99]"]
    before = torch.get_num_threads()
    cfg, choices = config(*words, "schedule.warmup=100")
    summary, code = train.train(cfg, tmp_path / "run", choices, words)
    torch.set_num_threads(before)
    assert code == 0
    assert summary["verdict"] == "stable"
    assert summary["final_val_loss"] <= 1.88
