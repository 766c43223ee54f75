"""Doors into other libraries."""

from hf_memsave.integrations import adapters, from_pretrained, trainer_argument


def install() -> None:
    """Have models and trainers of Transformers take ``memsave=``: importing hf_memsave does it, until ``uninstall``."""
    for door in (from_pretrained, trainer_argument, adapters):
        door.install()
