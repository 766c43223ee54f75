"""Kept memory of sampled weight gradients, beside stock and beside ``exact``.

    python scripts/bench/wta_crs.py [--batch 8] [--out [DIR]]

Bytes kept per layer (the difference of two depths, every live storage counted) at the shapes of BERT-Base,
T5-Base and OPT-350M with sequences of 128 tokens, whole and with LoRA (r 32 on q, k, v, as in the paper, and on all
linears), attention dropout 0.
"""

import torch
from peft import LoraConfig, get_peft_model
from rich.progress import track
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    OPTConfig,
    OPTForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_memsave import WTACRS, MemSaveConfig, measure_kept, patch
from publish import RESULTS, arguments, publish

SEQ, VOCAB = 128, 512
SETTINGS = {
    "stock": None,
    "exact": MemSaveConfig(),
    "WTA-CRS @0.3": MemSaveConfig(linear=WTACRS(budget=0.3)),
    "WTA-CRS @0.1": MemSaveConfig(linear=WTACRS(budget=0.1)),
}


def bert(layers: int) -> nn.Module:
    """BERT-Base with that many layers."""
    return BertForSequenceClassification(
        BertConfig(vocab_size=VOCAB, num_hidden_layers=layers, attention_probs_dropout_prob=0.0)
    )


def t5(layers: int) -> nn.Module:
    """T5-Base with that many layers in each stack; its position bias is frozen."""
    model = T5ForConditionalGeneration(
        T5Config(
            d_model=768, d_kv=64, d_ff=3072, num_heads=12, num_layers=layers, num_decoder_layers=layers,
            vocab_size=VOCAB, decoder_start_token_id=0,
        )
    )  # fmt: skip
    for module in model.modules():
        if type(module).__name__ == "T5Attention":
            module.dropout = 0.0
            if module.has_relative_attention_bias:
                module.relative_attention_bias.weight.requires_grad_(False)
    return model


def opt(layers: int) -> nn.Module:
    """OPT-350M with that many layers."""
    return OPTForSequenceClassification(
        OPTConfig(
            vocab_size=VOCAB, hidden_size=1024, ffn_dim=4096, num_attention_heads=16, num_hidden_layers=layers,
            word_embed_proj_dim=512, do_layer_norm_before=False, pad_token_id=1,
        )
    )  # fmt: skip


#: Name -> builder, width, what LoRA targets in the paper, and the input of the down-projection per token, in features.
MODELS = {
    "BERT-Base": (bert, 768, ["query", "key", "value"], 3072),
    "T5-Base": (t5, 768, ["q", "k", "v"], 2 * 3072),
    "OPT-350M": (opt, 1024, ["q_proj", "k_proj", "v_proj"], 4096),
}


def kept_per_layer(name: str, targets: object, config: MemSaveConfig | None, dtype: torch.dtype, batch: int) -> int:
    """Bytes that one layer keeps (of T5, one of each stack), with adapters on ``targets`` (None: trained whole)."""
    build = MODELS[name][0]
    kept = []
    for layers in (1, 2):
        torch.manual_seed(0)
        model = build(layers)
        if targets is not None:
            lora = LoraConfig(r=32, lora_alpha=32, lora_dropout=0.1, target_modules=targets)
            model = get_peft_model(model, lora)
        model = model.to(dtype).train()
        if config is not None:
            patch(model, config)
        ids = torch.randint(5, VOCAB, (batch, SEQ))
        labels = ids if "T5" in name else torch.zeros(batch, dtype=torch.long)
        call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        kept.append(measure_kept(model, call).total)
    return kept[1] - kept[0]


def memory(batch: int) -> tuple[str, list[str], list[list[str]]]:
    """Kept memory, in u (one activation ``[batch, seq, hidden]``) per layer: title, header and rows."""
    cases = [(n, w, torch.float32) for n in MODELS for w in ("whole", "q, k, v", "all")]
    cases += [(n, "whole", torch.bfloat16) for n in MODELS]
    rows = []
    for name, what, dtype in track(cases, "memory"):
        _, width, qkv, down = MODELS[name]
        targets = {"whole": None, "q, k, v": qkv, "all": "all-linear"}[what]
        unit = batch * SEQ * width * dtype.itemsize
        found = {s: kept_per_layer(name, targets, c, dtype, batch) for s, c in SETTINGS.items()}
        whole = found["stock"] if targets is None else kept_per_layer(name, None, None, dtype, batch)
        saved = found["exact"] - found["WTA-CRS @0.3"]
        of_down = 1 - saved / (down * batch * SEQ * dtype.itemsize)
        label = "trained whole" if what == "whole" else f"LoRA on {what}"
        cells = [f"{found[s] / unit:.2f}" for s in SETTINGS]
        ratio = f"{whole / found['WTA-CRS @0.3']:.2f}"
        rows.append([name, label, str(dtype).removeprefix("torch."), *cells, ratio, f"{of_down:.3f}"])
    header = ["model", "training", "dtype", *SETTINGS, "stock whole / @0.3", "down-projection's input at @0.3"]
    title = f"""\
# Kept memory per layer with sampled weight gradients

In u, one activation [batch, seq, hidden] in the model's dtype; batch {batch}, {SEQ} tokens, hidden dropout .1,
attention dropout 0. T5: one encoder and one decoder layer. The last column is what @0.3 keeps of the bytes that `exact`
keeps of the down-projection's input, ReLU's 1-bit mask included; 1 means that nothing was to be gained, as on GELU
models, where that input is recomputed from what the activation keeps anyway."""
    return title, header, rows


def main() -> None:
    """Measure, print and write."""
    parser = arguments(__doc__, RESULTS)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    publish("wta-crs-memory", *memory(options.batch), {}, options.out)


if __name__ == "__main__":
    main()
