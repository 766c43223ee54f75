"""Attacks on the count of the first step: copies of a model that share what waits to count."""

import torch
from torch import nn

from hf_memsave import patch
from support.attacks import WIDTH, Attack
from support.families import batch_for, build
from support.helpers import random


def replica_of(model):
    """As ``nn.parallel.replicate`` makes one for each device, at each step."""
    replica = model._replicate_for_data_parallel()
    replica._modules = dict(model._modules)
    for name, parameter in model._parameters.items():
        setattr(replica, name, parameter)
    return replica


def test_data_parallel_counts_the_first_replica_of_the_first_step(device):
    model = Attack(lambda model, x: model.f(x).exp().sin(), p=nn.Parameter(torch.ones(WIDTH))).to(device)
    x = random(2, 16, WIDTH, device=device)
    report = patch(model)
    model(x).sum().backward()
    expected = report.step.nbytes_kept, report.step.nbytes_avoided
    report = patch(model)
    found = []
    for _ in range(3):
        for replica in [replica_of(model) for _ in range(2)]:
            replica(x).sum().backward()
            found.append((report.step.nbytes_kept, report.step.nbytes_avoided))
    assert found == 6 * [expected] and expected[0] > 0


def test_a_forward_in_eval_mode_counts_until_there_is_a_training_step():
    model = build("bert", dropout=0.1).eval()
    report, batch = patch(model), batch_for(model)
    counted = []
    for is_training in (False, False, True, False, True):
        model.train(is_training)(**batch).loss.backward()
        counted.append((report.step.nbytes_kept, report.step.nbytes_avoided))
    in_eval, training = counted[0], counted[2]
    assert counted == [in_eval, in_eval, training, training, training] and in_eval[1] < training[1]
