"""Logits that are not computed yet, where they are written to or watched, or the head's weights are freed."""

import datetime

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave import patch
from hf_memsave.ops.loss import chunked_loss
from hf_memsave.ops.loss.lazy_logits import LazyLogits
from support.families import Size, batch_for, build

SMALL, WORDS = 8192, 512
RANKS, TIMEOUT = 2, datetime.timedelta(seconds=60)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", SMALL)


def lm():
    return build("llama", Size(), dropout=0.0)


def assert_like_stock(step):
    """``step(model, batch)`` gives stock's gradients, and what it returns."""
    found = []
    for is_patched in (False, True):
        model = lm()
        if is_patched:
            patch(model)
        result = step(model, batch_for(model, Size()))
        found.append((result, [p.grad for p in model.parameters()]))
    (expected, of_stock), (result, ours) = found
    assert result == expected
    for a, b in zip(ours, of_stock, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def flat(logits):
    return logits.view(-1, WORDS)


def base_then_view(logits):
    rows = flat(logits)
    logits[..., 5] = -3.0
    return rows


def view_then_base(logits):
    flat(logits)[:, 5] = -3.0
    return flat(logits)


def float_of_float(logits):
    logits.float()[..., 5] = -3.0
    return flat(logits)


def copy_made_before(logits):
    rows = logits[:, ::2].reshape(-1, WORDS)
    logits.mul_(3.0)
    return torch.cat([rows, rows])


@pytest.mark.parametrize("write", [base_then_view, view_then_base, float_of_float, copy_made_before])
def test_a_write_is_seen_by_those_who_share_in_stock(write):
    def step(model, batch):
        labels = batch.pop("labels")
        F.cross_entropy(write(model(**batch).logits), labels.view(-1)).backward()

    assert_like_stock(step)


@pytest.mark.parametrize("how", ["gradient", "module"])
def test_a_hook_of_the_head_sees_and_changes_the_gradient(how):
    def step(model, batch):
        seen = []

        def watch(gradient):
            seen.append(gradient.shape)
            return 2 * gradient

        if how == "gradient":
            model.lm_head.register_forward_hook(lambda head, args, out: out.register_hook(watch) and None)
        else:
            model.lm_head.register_full_backward_pre_hook(lambda head, dy: (watch(dy[0]),))
        model(**batch).loss.backward()
        return seen

    assert_like_stock(step)


@pytest.mark.parametrize("is_kept", [False, True])
def test_watched_logits_have_a_gradient(is_kept):
    def step(model, batch):
        labels, seen = batch.pop("labels"), []
        logits = model(**batch).logits
        if is_kept:
            logits.retain_grad()
        rows = flat(logits)
        if not is_kept:
            logits.register_hook(lambda gradient: seen.append(gradient.shape))
        F.cross_entropy(rows, labels.view(-1)).backward()
        return logits.grad.shape if is_kept else seen

    assert_like_stock(step)


@pytest.mark.parametrize("ask", [lambda x: x.register_hook(print), lambda x: x.retain_grad()])
def test_who_asks_for_a_gradient_too_late_is_warned(ask):
    model = lm()
    patch(model)
    out = model(**batch_for(model, Size()))
    with pytest.warns(UserWarning, match=r"computed in chunks, and gives them no gradient\. Call it in a forward hook"):
        ask(out.logits)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_labels_that_stock_refuses_are_refused(dtype):
    model = lm()
    patch(model)
    batch = batch_for(model, Size())
    with pytest.raises(RuntimeError, match="expected target dtype|expected scalar type Long"):
        model(**batch | {"labels": batch["labels"].to(dtype)})


def test_a_patched_wrapper_of_peft_chunks_the_loss():
    model = get_peft_model(lm(), LoraConfig(target_modules=["q_proj"])).train()
    patch(model)
    assert type(model(**batch_for(model, Size())).logits) is LazyLogits


@pytest.mark.parametrize(("tokens", "kind"), [(16, torch.Tensor), (256, LazyLogits)])
def test_few_tokens_of_a_large_head_are_not_worth_its_sums(tokens, kind):
    """But in half precision, where a plain head needs none."""
    size = Size(hidden=256, seq=tokens, batch=1)
    for dtype in (torch.float32, torch.bfloat16):
        model = build("llama", size, dtype, dropout=0.0)
        patch(model)
        assert type(model(**batch_for(model, size)).logits) is (LazyLogits if dtype.itemsize == 2 else kind)
        model = build("llama", size, dtype, dropout=0.0)
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])).train()
        patch(model)
        assert type(model(**batch_for(model, size)).logits) is kind


def train(how, is_patched, rank, is_outside):
    model = lm()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    if is_patched:
        patch(model)
    mesh = init_device_mesh("cpu", (RANKS,))
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module, mesh=mesh)
    if how == "head":
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=how == "resharded" or None)
    batch = batch_for(model, Size(), seed=rank)
    if is_outside:
        labels = batch.pop("labels")
        loss = F.cross_entropy(flat(model(**batch).logits), labels.view(-1))
    else:
        loss = model(**batch).loss
    loss.backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def work(rank, folder):
    torch.set_num_threads(1)
    chunked_loss.CHUNK = SMALL
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=TIMEOUT)
    for how in ("root", "resharded", "head"):
        for is_outside in (False, True):
            stock, ours = (train(how, is_patched, rank, is_outside) for is_patched in (False, True))
            for name, gradient in stock.items():
                torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-7, msg=f"{how} {is_outside} {name}")
    dist.destroy_process_group()


@pytest.mark.long
def test_a_head_that_fsdp2_frees_trains_like_stock(tmp_path):
    mp.spawn(work, args=(str(tmp_path),), nprocs=RANKS)
