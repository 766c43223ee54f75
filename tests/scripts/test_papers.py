"""The papers' tables: an estimate follows the batch, a figure that is off is reported, the largest batch is right."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

import papers
from paper_tables.rows import COLUMNS, GB, STOCK, Row, deep_trace, forward_peak, result_of, text_trace

CONFIG = BertConfig(hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, vocab_size=99)


def bert(config):
    return BertForSequenceClassification._from_config(config, attn_implementation="eager").train()


def inputs(batch, device):
    ids = torch.empty(batch, 32, dtype=torch.int64, device=device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0].clone()}


BERT = partial(bert, CONFIG)
BATCHES = {batch: partial(inputs, batch) for batch in (8, 32)}  # made once: equal questions are answered once


def peak(batch, setting=STOCK):
    return forward_peak(BERT, BATCHES[batch], setting)


def test_the_peak_of_a_model_grows_with_the_batch_and_is_the_estimate_of_its_configuration():
    assert peak(8) < peak(32)
    assert peak(32, COLUMNS["exact"]) < peak(32)
    step = {"dtype": "fp32", "optimizer": "adamw_fused", "attention": "eager", "padded": True}
    found = deep_trace(CONFIG, bert, BATCHES[32])
    assert found.peak == pytest.approx(text_trace(CONFIG, STOCK, batch=32, tokens=32, **step).peak, rel=0.01)


@pytest.mark.parametrize("off", [1.0, 0.95, 1.2], ids=str)
def test_a_wrong_figure_is_reported(off):
    stock = peak(32) / GB
    row = Row(
        table="1", work="BERT", stock=off * stock, method="a method", figure=0.01 * off * stock,
        measure=lambda setting: peak(32, setting) / GB, here=COLUMNS["exact"], columns=("exact",),
    )  # fmt: skip
    result = result_of(row)
    assert result.distance == pytest.approx(100 / off - 100)
    assert f"{int(abs(100 / off - 100) <= 10)} are within 10% with today's" in papers.count_line([result])
    assert result.behind == ["the paper's"] and "`exact`: the paper's" in papers.cells(result)  # a hundredth of stock
