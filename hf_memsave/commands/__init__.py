"""The commands of ``memsave``: what each can be asked, a file for each with ``run``, and what they share."""
