"""Transformers' models and trainers take ``memsave=``, and PEFT's adapters are patched as they are added."""
