"""``memsave estimate --check``: a real step on this machine takes what was predicted, and another figure is seen."""

import pytest
import torch

from hf_memsave import MemSaveConfig
from hf_memsave.cli import main
from hf_memsave.errors import MeasureError
from hf_memsave.measure.check import SLACK, Check, check
from hf_memsave.measure.estimate import estimate
from hf_memsave.measure.training import Training
from support.helpers import on_stand_in
from support.zoo import Size, config_of

STEP = {"batch_size": 4, "seq_len": 64}


@pytest.mark.long
@on_stand_in
def test_what_fits_is_run(monkeypatch):
    config, memsave = config_of("llama", Size(hidden=64, layers=3)), MemSaveConfig()
    result = estimate(config, **STEP)
    stock, patched = result.stock, result.patched
    monkeypatch.setattr("hf_memsave.measure.check._on_cuda", lambda config, training, memsave: memsave)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (stock.peak - 1, 2**30))
    predicted = {"kept": patched.kept, "peak": patched.peak}
    assert check(config, result, Training(**STEP), memsave) == {"patched": Check(predicted=predicted, measured=memsave)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 2**30))
    with pytest.raises(MeasureError, match="are free on this machine's GPU"):
        check(config, result, Training(**STEP), memsave)


@pytest.mark.parametrize("what", SLACK)
def test_what_is_allowed_has_an_end(what):
    measured = {"kept": 10**6, "peak": 10**6}
    for times, agrees in ((-1.1, False), (-0.9, True), (0.9, True), (1.1, False)):
        predicted = measured | {what: round(10**6 * (1 + times * SLACK[what]))}
        assert Check(predicted=predicted, measured=measured).agrees is agrees


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("lora", [[], ["--lora", "r=16,dropout=0.05"]], ids=str)
def test_a_step_on_cuda_takes_what_was_predicted(lora, tmp_path, capsys):
    config_of("llama", Size(hidden=1024, heads=16, layers=11), vocab_size=32000).save_pretrained(tmp_path)
    argv = ["estimate", tmp_path, "--batch-size", 4, "--seq-len", 1024, "--check", *lora]
    assert main([*map(str, argv)]) == 0, capsys.readouterr().out
