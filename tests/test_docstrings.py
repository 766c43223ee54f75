"""Docstrings of the package: they begin with a verb, and their examples run."""

import ast
import collections
import doctest
from pathlib import Path

import pytest

import hf_memsave

SOURCE = Path(hf_memsave.__file__).parent
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if "_vendor" not in path.parts]
#: Words that begin a clause without a verb of what the function does; ruff's D401 knows verbs in other moods.
CLAUSES = {
    "a", "all", "an", "any", "as", "every", "for", "how", "its", "of", "one", "so", "that", "the", "these", "this",
    "those", "what", "when", "where", "whether", "which", "who", "why",
}  # fmt: skip
#: What people call, each with one example.
EXAMPLES = [
    "MemSaveConfig", "measure_kept", "patch", *(pytest.param(n, marks=pytest.mark.long) for n in ("estimate", "plan")),
]  # fmt: skip


def functions(path):
    """Every function in a file that has a docstring, but properties, which name what they are."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            if not any(ast.unparse(one).endswith("property") for one in node.decorator_list):
                yield node, text


def begins_with_a_clause(text):
    first = text.split()[0]
    return first.lower() in CLAUSES or not first[0].isalpha()


def test_docstrings_of_functions_begin_with_a_verb():
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}: {text.splitlines()[0]}"
        for path in FILES
        for node, text in functions(path)
        if begins_with_a_clause(text)
    ]
    assert not found
    assert begins_with_a_clause("Whether it is one.") and begins_with_a_clause("``x``, kept.")
    assert not begins_with_a_clause("Return whether it is one.")


def test_no_two_classes_have_one_name():
    nodes = [node for path in FILES for node in ast.parse(path.read_text(encoding="utf-8")).body]
    counts = collections.Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert not {name for name, count in counts.items() if count > 1}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_what_people_call_runs(name):
    [test] = [one for one in doctest.DocTestFinder(recurse=False).find(getattr(hf_memsave, name), name)]
    lines = sum(len(one.source.splitlines()) + len(one.want.splitlines()) for one in test.examples)
    assert 0 < lines <= 8
    said = []
    doctest.DocTestRunner().run(test, out=said.append)
    assert not said, "".join(said)
