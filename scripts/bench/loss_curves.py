"""Train on a real text with the loss in chunks and with stock's, and draw both curves.

    python scripts/bench/loss_curves.py --text tinyshakespeare.txt --vocab bert-base-uncased-vocab.txt [--out [DIR]]

A small LLaMA in fp32 from random weights, AdamW, 8 x 160 tokens a step: with BERT's vocabulary of 30,522 words the
logits take 156 MB, more than the 128 MiB up to which stock's own expression runs. Both runs see the same batches.
--out writes loss-curves.json, .md and .png.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import BertTokenizer, LlamaConfig, LlamaForCausalLM

from hf_memsave import MemSaveConfig, patch
from publish import arguments, publish

BATCH, LENGTH, HIDDEN, LAYERS = 8, 160, 64, 2


def main(argv: Sequence[str] | None = None) -> None:
    """Train both and publish."""
    parser = arguments(__doc__)
    parser.add_argument("--text", type=Path, required=True, help="plain text to train on")
    parser.add_argument("--vocab", type=Path, required=True, help="a vocab.txt of BERT's")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(argv)
    tokenizer = BertTokenizer(vocab=str(options.vocab))
    ids = torch.tensor(tokenizer(options.text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"])
    curves = {loss: losses(loss, ids, len(tokenizer), options.steps) for loss in ("stock", "chunked")}
    stock, chunked = (torch.tensor(curves[name], dtype=torch.float64) for name in ("stock", "chunked"))
    largest = (stock - chunked).abs().max().item()
    shown = [s for s in (1, 10, 30, 100, 200, 300) if s <= options.steps]
    rows = [[str(s), f"{stock[s - 1]:.6f}", f"{chunked[s - 1]:.6f}"] for s in shown]
    title = (
        f"Loss on {options.text.name}: {LAYERS} layers of {HIDDEN}, {len(tokenizer):,} words, "
        f"{BATCH} x {LENGTH} tokens, {options.steps} steps; the curves are never further apart than {largest:.1e}"
    )
    publish("loss-curves", title, ["step", "stock", "in chunks"], rows, {**curves, "largest": largest}, options.out)
    if options.out is not None:
        draw(curves, options.out / "loss-curves.png")


def losses(loss: str, ids: Tensor, words: int, steps: int) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4,
        vocab_size=words, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    patch(model, MemSaveConfig(loss=loss))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for batch in track(batches(ids, steps), loss, steps, console=Console(stderr=True)):
        out = model(input_ids=batch, labels=batch)
        assert (type(out.logits) is Tensor) == (loss == "stock")  # which are not made at once where it is in chunks
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(out.loss.item())
    return found


def batches(ids: Tensor, steps: int) -> Iterator[Tensor]:
    """``[batch, length]`` from random places, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(ids) - LENGTH, (BATCH,), generator=generator)
        yield torch.stack([ids[start : start + LENGTH] for start in starts])


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Both curves, one over the other."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    axes.plot(curves["stock"], color="0.7", linewidth=4, label="stock")
    axes.plot(curves["chunked"], color="C0", linewidth=1, label="in chunks")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
