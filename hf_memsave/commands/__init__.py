"""The commands of ``memsave``: a file for each, with ``add_options`` and ``run``, and what they share."""
