"""A thread that measures or estimates changes nothing that another thread trains or measures."""

import itertools
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy
import pytest
import torch
from torch.nn.modules import module as module_hooks
from transformers import masking_utils

import hf_memsave
from hf_memsave import estimate, measure_kept
from hf_memsave.logs import is_measuring
from hf_memsave.measure import depth
from hf_memsave.measure.fake_device import fake_device
from support.helpers import on_stand_in
from support.threads import switching
from support.zoo import build, config_of

STEPS = 40
llama = partial(build, "llama", use_cache=False)


def losses(model):
    """Of a stock model, on padded batches and on batches of packed sequences in turn."""
    generator, found = torch.Generator().manual_seed(0), []
    for step in range(STEPS):
        ids = torch.randint(1, 64, (2, 24), generator=generator)
        batch = {"input_ids": ids, "labels": ids}
        if step % 2:
            batch["position_ids"] = torch.arange(24).remainder(10).expand(2, -1)
        else:
            batch["attention_mask"] = torch.ones_like(ids)
            batch["attention_mask"][0, :9] = 0
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        found.append(loss.item())
    return found


@contextmanager
def beside(work):
    """``work(n)`` for n = 1, 2, ... on another thread, until the end; gives a function that tells how often it was.

    An error of it is raised by that function, and at the end.
    """
    stop, begun, done = threading.Event(), threading.Event(), []

    def run():
        for n in itertools.takewhile(lambda _: not stop.is_set(), itertools.count(1)):
            begun.set()
            work(n)
            done.append(n)

    with switching(1e-4), ThreadPoolExecutor(1) as thread:
        running = thread.submit(run)
        begun.wait()
        try:
            yield lambda: running.result() if running.done() else len(done)
        finally:
            stop.set()
    running.result()


@on_stand_in
@pytest.mark.parametrize("padded", [False, True])
def test_losses_of_a_stock_model_stay_while_another_thread_is_on_the_stand_in(padded):
    wanted, model = losses(llama()), llama()
    inside, done = threading.Event(), threading.Event()

    def stay():
        with fake_device(padded=padded):
            inside.set()
            done.wait()
            return torch.accelerator.is_available()

    with ThreadPoolExecutor(1) as thread:
        staying = thread.submit(stay)
        inside.wait()
        try:
            assert not torch.accelerator.is_available()  # else a data loader pins memory for it
            assert losses(model) == wanted
        finally:
            done.set()
    assert staying.result() is True


def of_the_process():
    """What a thread could change for all others."""
    hooks = [of for name, of in vars(module_hooks).items() if name.startswith("_global_") and "hook" in name]
    functions = {**vars(masking_utils), **vars(torch.UntypedStorage), **vars(torch.nn.functional)}
    return {
        "functions": {name: id(of) for name, of in functions.items() if callable(of)},
        "hooks": [len(hook) for hook in hooks if hasattr(hook, "__len__")],
        "dtype": torch.get_default_dtype(), "measures": is_measuring(),
        "random": (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()),
    }  # fmt: skip


@on_stand_in
@pytest.mark.long
@pytest.mark.parametrize("work", ["estimate", "plan", "measure_kept", "compare"])
def test_what_measures_beside_changes_nothing_of_the_process(work):
    config, model, ids = config_of("llama"), llama(), torch.arange(48).view(2, 24) + 1
    report = hf_memsave.patch(patched := llama())
    doing = {
        "estimate": lambda n: estimate(config, batch_size=n, seq_len=32, dtype="bf16"),
        "plan": lambda n: hf_memsave.plan(config, batch_size=n, seq_len=32, budget="24GiB"),
        "measure_kept": lambda n: measure_kept(model, {"input_ids": ids, "labels": ids}),
        "compare": lambda n: report.compare({"input_ids": ids, "labels": ids}) and patched,
    }[work]
    before = of_the_process()
    with beside(doing) as times:
        while times() < 2:
            assert of_the_process() == before
            time.sleep(2e-3)  # else the other thread would wait for this one at every op


@on_stand_in
@pytest.mark.long
def test_threads_estimate_at_once_and_find_what_they_find_alone(monkeypatch):
    def work(attention):
        return repr(estimate(config_of("llama"), batch_size=2, seq_len=32, attention=attention))

    wanted = [work(attention) for attention in ("flash", "eager")]
    monkeypatch.setattr(depth, "_KNOWN", {})  # what was traced is not traced again
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, ("flash", "eager"))) == wanted


def test_measuring_and_training_threads_do_not_see_each_other():
    mine, other = llama(), llama()
    ids = torch.arange(48).view(2, 24) + 1
    batch = {"input_ids": ids, "labels": ids}
    wanted, stock = measure_kept(mine, batch), losses(llama())
    with beside(lambda n: mine(**batch).loss.backward()):
        found = [measure_kept(other, batch) for _ in range(20)]
    # But for what no op makes: a tensor of another thread that dies as the output does cannot be told from a kept one.
    wanted, *found = (Counter(s for s in kept.storages if s.op != "unseen") for kept in (wanted, *found))
    assert found == [wanted] * 20
    with beside(lambda n: measure_kept(mine, batch)):
        assert losses(other) == stock
