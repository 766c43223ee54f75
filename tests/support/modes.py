"""Ways to train: each function trains a model in its way, and returns what came out."""

import functools

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from hf_memsave.arch.versions import enable_checkpointing
from support.steps import backward, gradients, step
from support.zoo import Size, batch_for, build

FAMILIES = ("bert", "llama", "gpt2", "t5-decoder")
CAUSAL = ("llama", "gpt2", "t5-decoder")
SMALL = Size(seq=8)


def make(family, device="cpu"):
    """With dropout in attention too, where the family has it."""
    model = build(family, SMALL).to(device)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
        for name in ("attention_dropout", "dropout"):  # LLaMA's and T5's attention hold a number
            if isinstance(module.__dict__.get(name), float):
                setattr(module, name, 0.1)
    return model


def batch_of(model, seed=1):
    return batch_for(model, SMALL, padded=True, seed=seed)


def loss_of(model):
    torch.manual_seed(7)
    return model(**batch_of(model)).loss


def plain(model):
    return step(model, batch_of(model))


def checkpointed(use_reentrant):
    def train(model):
        enable_checkpointing(model, use_reentrant=use_reentrant)
        return plain(model)

    return train


def within(context, train=plain):
    """``train``, with its model's forward and backward in ``context()``."""

    def call(model):
        with context():
            return train(model)

    return call


def offloaded_forward(model):
    """Backward runs outside of the user's hooks."""
    with save_on_cpu():
        loss = loss_of(model)
    return backward(model, loss)


def hooks_of_ones_own():
    """Hooks that keep numbers only: no tensor identity, no storage. Strides too, by which kernels choose how to sum."""
    return saved_tensors_hooks(
        lambda t: (t.detach().cpu().numpy().copy("K"), t.device), lambda h: torch.from_numpy(h[0].copy("K")).to(h[1])
    )


def accumulated(*backwards):
    """Of each group of batches, forwards and then backwards; all add to the gradients."""

    def train(model):
        model.zero_grad()
        torch.manual_seed(7)
        found = []
        for seeds in backwards:
            losses = [model(**batch_of(model, seed)).loss / 3 for seed in seeds]
            for loss in losses:
                loss.backward()
            found += losses
        return {"losses": torch.stack(found).detach(), **gradients(model)}

    return train


def two_forwards_one_backward(model):
    return backward(model, loss_of(model) + model(**batch_of(model, 2)).loss)


def generated_in_between(model):
    first = plain(model)
    ids, outputs = batch_of(model)["input_ids"][:1], {}
    for mode in ("train", "eval"):
        getattr(model, mode)()
        torch.manual_seed(3)
        if model.can_generate():
            outputs[mode] = model.generate(ids, max_new_tokens=4, do_sample=False, num_beams=1, eos_token_id=None)
        else:
            with torch.no_grad():
                outputs[mode] = model(input_ids=ids).logits
    return {f"first.{k}": v for k, v in first.items()} | outputs | step(model.train(), batch_of(model, 2), seed=8)


def some_gradients_then_all_twice(model):
    loss, subset = loss_of(model), list(model.parameters())[-3:]
    some = torch.autograd.grad(loss, subset, retain_graph=True, allow_unused=True)
    loss.backward(retain_graph=True)
    once = {f"once.{k}": v for k, v in gradients(model).items()}
    loss.backward()
    return {f"some.{i}": g for i, g in enumerate(some) if g is not None} | once | gradients(model)


def gradient_penalty(model):
    with sdpa_kernel(SDPBackend.MATH):  # the others have no double backward
        loss = loss_of(model)
        wanted = [p for p in model.parameters() if p.requires_grad]
        first = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        penalty = sum(g.square().sum() for g in first if g is not None)
        return {"of model": loss.detach(), **backward(model, loss + penalty)}


def checkpointed_by_hand(use_reentrant):
    """The user's own checkpoint around one submodule inside a block."""

    def train(model):
        for module in model.modules():
            if type(module).__name__ in ("BertIntermediate", "LlamaMLP", "GPT2MLP", "T5DenseActDense"):
                module.forward = functools.partial(checkpoint, module.forward, use_reentrant=use_reentrant)
        return plain(model)

    return train


def logits(model):
    torch.manual_seed(7)
    return {"logits": model(**batch_of(model)).logits.clone()}


def with_hidden_states(model):
    """In the loss too; the input itself wants a gradient."""
    batch = batch_of(model)
    embedded = model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
    torch.manual_seed(7)
    output = model(**batch, inputs_embeds=embedded, output_hidden_states=True)
    hidden = output.hidden_states if "hidden_states" in output else output.decoder_hidden_states
    assert len(hidden) == 3
    found = backward(model, output.loss + sum(h.square().mean() for h in hidden))
    return found | {"input": embedded.grad} | {f"hidden.{i}": h.detach() for i, h in enumerate(hidden)}


def with_frozen_parameters(model):
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 == 0)
    return plain(model)


def scaled(model):
    """fp16 with a GradScaler whose first scale overflows: one skipped step, then real ones."""
    device = model.device.type
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**40, backoff_factor=2.0**-30)
    start = [p.detach().clone() for p in model.parameters()]
    moved, scales = [], []
    for seed in range(3):
        with torch.autocast(device, torch.float16):
            loss = model(**batch_of(model, seed)).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        moved.append(any(not torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True)))
    assert moved == [False, True, True]
    return {"scales": torch.tensor(scales), **dict(model.named_parameters())}


MODES = {
    "plain": plain,
    "reentrant checkpointing": checkpointed(use_reentrant=True),
    "non-reentrant checkpointing": checkpointed(use_reentrant=False),
    "save_on_cpu": within(save_on_cpu),
    "save_on_cpu in forward only": offloaded_forward,
    "checkpointing under save_on_cpu": within(save_on_cpu, checkpointed(use_reentrant=False)),
    "hooks of one's own": within(hooks_of_ones_own),
    "reentrant checkpoint by hand": checkpointed_by_hand(use_reentrant=True),
    "non-reentrant checkpoint by hand": checkpointed_by_hand(use_reentrant=False),
    "gradient accumulation": accumulated((0,), (1,), (2,)),
    "two forwards, two backwards": accumulated((1, 2)),
    "two forwards, one backward": two_forwards_one_backward,
    "generate in between": generated_in_between,
    "some gradients, then all, twice": some_gradients_then_all_twice,
    "gradient penalty": gradient_penalty,
    "eval mode": lambda model: plain(model.eval()),
    "hidden states of inputs_embeds": with_hidden_states,
    "frozen parameters": with_frozen_parameters,
    "GradScaler": scaled,
}
WITHOUT_GRADIENTS = {
    "no_grad": within(torch.no_grad, logits),
    "inference_mode": lambda model: within(torch.inference_mode, logits)(model.eval()),
}
