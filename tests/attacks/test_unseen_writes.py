"""Writes in the forward that no version tells, above all to parameters and buffers: gradients are stock's bits."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave import MemSaveConfig, patch
from hf_memsave.tape.content import BUFFER, MARK, PARAMETER
from support.helpers import assert_same_bits, kept


class Model(nn.Module):
    """Two linears; subclasses say what is between them."""

    def __init__(self):
        super().__init__()
        self.l1, self.l2, self.l3 = (nn.Linear(16, 16) for _ in range(3))
        self.add_parts()

    def add_parts(self):
        pass


class Codebook(Model):
    """Van den Oord et al. (2017), appendix A.1: codes that follow the mean of what they stand for."""

    def add_parts(self):
        self.register_buffer("codes", torch.randn(8, 16))
        self.register_buffer("sizes", torch.ones(8))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x):
        z = self.l1(x)
        index = torch.cdist(z, self.codes.expand(len(z), 8, 16)).argmin(-1)
        q, chosen = self.codes[index], F.one_hot(index, 8).float().flatten(0, 1)
        self.sizes.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        self.sums.data.mul_(0.9).add_(chosen.t() @ z.flatten(0, 1).detach(), alpha=0.1)
        self.codes.data.copy_(self.sums / (self.sizes[:, None] + 1e-5))
        return self.l2(z + (q - z).detach()) + F.mse_loss(z, q)


class Scaled(Model):
    """A parameter that is written to before anybody asked for what was made from it."""

    def add_parts(self):
        self.scale = nn.Parameter(torch.ones(16))

    def write(self):
        self.scale.data.mul_(0.5)

    def forward(self, x):
        h = self.l1(x)
        y = h * self.scale
        self.write()
        return self.l2(y) + h * h


class Stepped(Scaled):
    """The same by an optimizer's fused step."""

    @torch.no_grad()
    def write(self):
        options = dict(weight_decay=0.0, momentum=0.0, lr=0.5, dampening=0.0, nesterov=False, maximize=False)
        torch._fused_sgd_([self.scale], [torch.ones(16)], [], is_first_step=True, **options)


class TwiceNormed(Model):
    """A norm whose weight is written to between two uses: a copy of it must be of its own."""

    def add_parts(self):
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        h = self.l1(x)
        y = self.l2(self.norm(h))
        self.norm.weight.data.mul_(1.5)
        return y + self.l3(self.norm(h))


class Thin(Model):
    """A product that runs again reads its weight."""

    def add_parts(self):
        self.a, self.b = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x):
        h = self.l1(x)
        y = self.b(self.a(h))
        z = self.l2(y * h)
        self.b.weight.data.mul_(2)
        return z + self.l3(y + h)


class EvalThenTrain(Model):
    """A batch norm whose statistics are read, and then moved on."""

    def add_parts(self):
        self.norm, self.conv = nn.BatchNorm1d(16), nn.Conv1d(16, 16, 1)

    def forward(self, x):
        h = self.l1(x).transpose(1, 2).contiguous()
        y, z = self.norm.eval()(h), self.norm.train()(h)
        return self.conv(y) + z + h * h


class Renorm(Model):
    """Statistics that another function reads before their update."""

    def add_parts(self):
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        h = self.l1(x)
        y = h - self.norm.running_mean
        z = self.norm(h.transpose(1, 2)).transpose(1, 2)
        return self.l2(y) + z + h * h


class Statistics(Model):
    """Statistics that no module has."""

    def update(self, x, mean, var):
        with torch.no_grad():
            F.batch_norm(x, mean, var, training=True)

    def forward(self, x):
        mean, var, h = torch.zeros(16), torch.ones(16), self.l1(x)
        y = h - mean
        self.update(h.flatten(0, 1) + 1, mean, var)
        return self.l2(y) + h * h


class TorchStatistics(Statistics):
    """The same by ``torch.batch_norm``, with gradients."""

    def update(self, x, mean, var):
        torch.batch_norm(x, None, None, mean, var, True, 0.1, 1e-5, False)


class MovingSlice(Model):
    """Bounds that are tensors, and move on."""

    def forward(self, x):
        h = self.l1(x)
        h, low, high, rows, found = h * h.sigmoid(), torch.tensor(0), torch.tensor(4), torch.arange(4), []
        for _ in range(2):
            found.append(self.l2(F.pad(h[rows, low:high], (0, 0, 0, 0))))
            low += 2
            high += 2
        return torch.cat(found, 1)


class DroppedByTensor(Model):
    """A probability that is a tensor."""

    def forward(self, x):
        p = torch.tensor(0.3)
        y = F.dropout1d(self.l1(x), p, True)
        return self.l2(F.dropout(y, p, True)) + F.alpha_dropout(y, p, True)


class ComplexConvolution(Model):
    """Frozen, and several convolutions of reals, which keep weights of their own."""

    def add_parts(self):
        self.conv = nn.Conv1d(16, 4, 3, dtype=torch.complex64).requires_grad_(False)

    def forward(self, x):
        return self.conv(torch.complex(self.l1(x), self.l2(x)).transpose(1, 2))


class FreshNoise(Model):
    """A tensor that ``nn.init`` fills again."""

    def forward(self, x):
        noise, h = torch.empty(8, 16), self.l1(x)
        for layer in (self.l2, self.l3):
            nn.init.normal_(noise)
            h = layer(h) * noise.repeat(4, 1, 1)
        return h


class ShortRows(Model):
    """An embedding that shortens the rows of a weight which others read, under autocast."""

    def add_parts(self):
        self.embedding = nn.Embedding(16, 16, max_norm=1.0)

    def forward(self, x):
        weight = self.embedding.weight
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.linear(F.linear(x, weight), weight) + self.embedding(torch.arange(8))


MODELS = [
    Codebook, Scaled, Stepped, TwiceNormed, Thin, EvalThenTrain, Renorm, Statistics, TorchStatistics, MovingSlice,
    DroppedByTensor, ComplexConvolution, FreshNoise, ShortRows,
]  # fmt: skip


def trained(make, config=None):
    """Loss, gradients and buffers of one step; and the model."""
    torch.manual_seed(0)
    model = make()
    if config is not None:
        patch(model, config)
    torch.manual_seed(1)
    x = torch.randn(4, 8, 16, requires_grad=True)
    loss = model(x).abs().pow(2).mean()
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), x.grad, *gradients, *model.buffers()], model


@pytest.mark.parametrize("make", MODELS, ids=lambda m: m.__name__)
@pytest.mark.parametrize("config", [MemSaveConfig(), MemSaveConfig(norm="stock", frozen=False)], ids=["exact", "part"])
def test_it_is_as_in_stock(make, config):
    (expected, _), (found, model) = trained(make), trained(make, config)
    assert len(found) == len(expected)
    for mine, stocks in zip(found, expected, strict=True):
        assert_same_bits(mine, stocks)
    marks = [getattr(tensor.untyped_storage(), MARK, PARAMETER) for tensor in (*model.parameters(), *model.buffers())]
    assert all(mark is PARAMETER or mark is BUFFER for mark in marks)  # trusted again by the next forward


def test_what_is_not_written_to_is_remade():
    """Reading ``.data`` of a norm's weight, as ZeRO does, costs nothing."""
    norm = nn.LayerNorm(16)

    def called(x):
        norm.weight.data.is_cpu  # noqa: B018
        return norm(x)

    x = torch.randn(4, 16)
    assert kept(called, x, True) == kept(norm, x, True)


def test_parameters_remember_nothing_of_what_was_made_from_them():
    class Standardized(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight * 0.5, self.bias)

    model = nn.Sequential(Standardized(16, 16), nn.ReLU(), Standardized(16, 16))
    patch(model)
    for length in range(1, 20):
        model(torch.randn(length, 16)).sum().backward()
    assert PARAMETER.remakes == BUFFER.remakes == ()


def test_a_batch_that_lives_on_holds_no_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    patch(model)
    ids = torch.randint(32, (2, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    weight = weakref.ref(model.lm_head.weight)
    del model
    gc.collect()
    assert weight() is None


class Block(GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x) * self.scale)))


class Checkpointed(Model):
    """What is distrusted in the forward is not when the block runs again, in backward: it must keep the same."""

    def __init__(self, parts):
        super().__init__()
        self.block, self.parts = Block(), parts

    def forward(self, x):
        x = self.l1(x)
        if "parameter" in self.parts:
            self.block.scale.data.mul_(0.5)
        if "early" in self.parts:
            x = x * 2
            x.data.add_(1)
        run = (lambda x: self.block(x.data)) if "inside" in self.parts else self.block
        return checkpoint(run, x, use_reentrant=False)


@pytest.mark.parametrize("parts", ["parameter", "early", "inside", "early, parameter", "early, inside"])
def test_what_was_distrusted_before_a_checkpoint_is_kept_as_when_it_runs_again(parts):
    found = []
    for is_patched in (False, True):
        torch.manual_seed(0)
        model = Checkpointed(parts)
        if is_patched:
            patch(model)
        for step in range(3):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
            model(x).square().sum().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for mine, stock in zip(*reversed(found), strict=True):
        assert_same_bits(mine, stock)
