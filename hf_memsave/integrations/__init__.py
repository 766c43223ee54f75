"""Doors into other libraries: models and trainers of Transformers take ``memsave=``, adapters of PEFT are patched."""
