"""The commands of ``memsave``: their options, a module with ``run`` for each, and what they share."""
