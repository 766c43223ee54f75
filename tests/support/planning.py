"""What the tests of the planner share: a model as if pretrained, and what it needs, counted by hand."""

import copy

import peft  # noqa: F401  patch() would load it: the meter is slow on what is loaded after pytest has collected
from torch import nn

from hf_memsave import MemSaveConfig, measure_kept, patch, unpatch
from support.zoo import Size, build

SIZE = Size(hidden=64, layers=4, batch=4)
EPS = 1e-5
EXACT = MemSaveConfig()


def once(run):
    """A timer for tests that ask nothing of time."""
    run()
    return 1.0


def bert(device="cpu", size=SIZE):
    """As if pretrained: eager, in eval mode, with LayerNorms of their own weights and eps; attention has dropout."""
    fields = dict(layer_norm_eps=EPS, attn_implementation="eager", attention_probs_dropout_prob=0.1)
    model = build("bert", size, **fields)
    for norm in norms(model):
        nn.init.normal_(norm.weight, 1.0, 0.3)
        nn.init.normal_(norm.bias)
    return model.to(device).eval()


def norms(model):
    return [module for module in model.modules() if isinstance(module, nn.LayerNorm)]


def fixed(model):
    """Weights and buffers, and a gradient and AdamW's state for each weight."""
    own = sum(t.numel() * t.itemsize for t in (*model.parameters(), *model.buffers()))
    return own + sum(p.numel() * (p.itemsize + 8) for p in model.parameters() if p.requires_grad)


def needs(model, batch, config=None):
    """Counted by hand, on a copy."""
    model = copy.deepcopy(model).train()
    unpatch(model)
    if config is not None:
        patch(model, config)
    return fixed(model) + measure_kept(model, batch).total


def between(model, batch, share, config="tempo"):
    """A limit that leaves ``share`` of what conversion frees."""
    least, stock = needs(model, batch, config), needs(model, batch)
    assert least < stock
    return int(least + share * (stock - least))
