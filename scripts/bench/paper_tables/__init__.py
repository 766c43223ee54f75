"""The papers' tables of memory, as rows: a module a paper, and what they share (:mod:`rows`)."""
