"""LoRA adapters, put into a model to be measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from transformers import PreTrainedModel

from hf_memsave.errors import MeasureError


@dataclass(frozen=True)
class Lora:
    """PEFT's LoRA, by short names.

    Attributes:
        r: The rank.
        alpha: ``lora_alpha``.
        dropout: ``lora_dropout``.
        targets: Names of modules, joined by "+".
        dtype: That of the adapters: fp32, PEFT's default, or the model's own.
        dora: With DoRA's magnitudes.
    """

    r: int = 8
    alpha: int = 16
    dropout: float = 0.0
    targets: str = "all-linear"
    dtype: str = "fp32"
    dora: bool = False

    def add_to(self, model: PreTrainedModel) -> None:
        """Freeze the model and put adapters into it.

        Raises:
            MeasureError: PEFT is missing, or refuses.
        """
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise MeasureError("LoRA needs PEFT, which is missing. Run: pip install peft") from error
        config = LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=self.targets if self.targets == "all-linear" else self.targets.split("+"),
            use_dora=self.dora,
        )
        try:
            inject_adapter_in_model(config, model)
        except ValueError as error:
            raise MeasureError(f"LoRA: {error} Name modules of {type(model).__name__} with targets=a+b.") from error
        for parameter in model.parameters():
            if self.dtype == "fp32" and parameter.requires_grad:
                parameter.data = parameter.data.float()

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())
