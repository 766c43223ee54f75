"""Sites that every architecture shares: modules of PyTorch, PEFT, bitsandbytes, and Transformers' building blocks."""

from hf_memsave.arch.spec import Arch, Site

_RECTIFIERS = ("ReLU", "ReLU6", "LeakyReLU", "Hardtanh", "Threshold")
#: Layers that PyTorch has for one, two and three dimensions.
_BY_DIMENSION = {
    "conv.Conv": "convolution",
    "conv.ConvTranspose": "convolution",
    "batchnorm.BatchNorm": "batch_norm",
    "pooling.MaxPool": "max_pool",
    "pooling.AvgPool": "average_pool",
    "pooling.AdaptiveAvgPool": "average_pool",
    "dropout.Dropout": "channel_dropout",
}

ARCH = Arch(
    model_type="*",
    source="transformers.activations",
    sites=(
        Site(cls="torch.nn.modules.normalization.LayerNorm", op="layer_norm"),
        Site(cls="torch.nn.modules.dropout.Dropout", op="dropout"),
        Site(cls="torch.nn.modules.linear.Linear", op="linear"),
        Site(cls="transformers.pytorch_utils.Conv1D", op="conv1d"),
        Site(cls="bitsandbytes.nn.modules.Linear8bitLt", op="linear_8bit"),
        Site(cls="peft.tuners.lora.dora.DoraLinearLayer", op="dora"),
        Site(cls="torch.nn.modules.activation.GELU", op="activation"),
        Site(cls="torch.nn.modules.activation.SiLU", op="activation"),
        Site(cls="GELUActivation", op="activation"),
        Site(cls="GELUTanh", op="activation"),
        Site(cls="SiLUActivation", op="activation"),
        Site(cls="NewGELUActivation", op="new_gelu"),
        Site(cls="QuickGELUActivation", op="quick_gelu"),
        Site(cls="torch.nn.modules.normalization.GroupNorm", op="group_norm"),
        *(Site(cls=f"torch.nn.modules.activation.{name}", op="rectifier") for name in _RECTIFIERS),
        *(Site(cls=f"torch.nn.modules.{name}{d}d", op=op) for name, op in _BY_DIMENSION.items() for d in (1, 2, 3)),
    ),
)
