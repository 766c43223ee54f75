"""Architectures: which module takes which op. Adding one is one table file, and its line here."""

from hf_memsave.arch import bert, common, gpt2, llama, mistral, opt, phi, phi3, roberta, t5
from hf_memsave.arch.generic import adapter, guess
from hf_memsave.arch.spec import Arch, Site

ARCHS: dict[str, Arch] = {
    module.ARCH.model_type: module.ARCH for module in (bert, gpt2, llama, mistral, opt, phi, phi3, roberta, t5)
}
COMMON: Arch = common.ARCH

__all__ = ["ARCHS", "COMMON", "Arch", "Site", "adapter", "guess"]
