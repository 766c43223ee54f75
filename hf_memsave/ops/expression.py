"""Does a module's ``forward`` say what an op computes? Answered by reading it, never by running it.

Running a module on an example proves little: a dropout hides in eval mode, a factor that starts at one, a clamp that no
small number reaches. Its source does not lie. Two functions say the same if their syntax trees are equal up to the
names of locals, of the attributes of ``self``, and of annotations; ``v = e; return v`` is ``return e``.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

_IGNORED = {"annotation", "returns", "type_comment", "ctx", "kind"}


def match(forward: Callable[..., Any], expressions: tuple[str, ...]) -> dict[str, str] | None:
    """Compare ``forward`` with functions given as source text, which call the attributes of self by their roles.

    Returns:
        Role -> attribute, for the first expression that ``forward`` equals; None if there is none, or no source.
    """
    theirs = None if hasattr(forward, "__wrapped__") else _parsed_function(forward)  # a wrapper may do anything
    if theirs is None or theirs.decorator_list:
        return None
    for expression in expressions:
        mine = _parsed(expression)
        matcher = _Matcher(mine, theirs)
        if matcher.same(mine, theirs):
            return matcher.attributes
    return None


class _Matcher:
    """Walks two functions side by side, pairing local names and attributes of self one to one."""

    def __init__(self, mine: ast.FunctionDef, theirs: ast.FunctionDef) -> None:
        self.locals = _locals(mine), _locals(theirs)
        self.names: dict[str, str] = {}
        self.attributes: dict[str, str] = {}

    def same(self, mine: Any, theirs: Any) -> bool:
        if type(mine) is not type(theirs):
            return False
        if isinstance(mine, list):
            return len(mine) == len(theirs) and all(map(self.same, mine, theirs))
        if not isinstance(mine, ast.AST):
            return mine == theirs
        if isinstance(mine, ast.Name):
            return self._same_name(mine.id, theirs.id)
        if isinstance(mine, ast.arg):
            return self._same_name(mine.arg, theirs.arg)
        if isinstance(mine, ast.FunctionDef):
            return self.same(mine.args, theirs.args) and self.same(_body(mine), _body(theirs))
        if isinstance(mine, ast.Attribute) and all(_is_self(node.value) for node in (mine, theirs)):
            return _pair(self.attributes, mine.attr, theirs.attr)
        return all(self.same(getattr(mine, f), getattr(theirs, f)) for f in mine._fields if f not in _IGNORED)

    def _same_name(self, mine: str, theirs: str) -> bool:
        if (mine in self.locals[0]) != (theirs in self.locals[1]):
            return False
        return _pair(self.names, mine, theirs) if mine in self.locals[0] else mine == theirs


def _pair(pairs: dict[str, str], mine: str, theirs: str) -> bool:
    if mine not in pairs and theirs in pairs.values():
        return False
    return pairs.setdefault(mine, theirs) == theirs


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _locals(function: ast.FunctionDef) -> set[str]:
    stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored | {n.arg for n in ast.walk(function.args) if isinstance(n, ast.arg)}


def _body(function: ast.FunctionDef) -> list[ast.stmt]:
    body = function.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):  # a docstring
        body = body[1:]
    if len(body) > 1 and isinstance(body[-1], ast.Return) and isinstance(body[-2], ast.Assign):
        value, targets = body[-1].value, body[-2].targets
        if isinstance(value, ast.Name) and [getattr(t, "id", None) for t in targets] == [value.id]:
            body = [*body[:-2], ast.Return(body[-2].value)]
    return body


@functools.cache
def _parsed_function(function: Callable[..., Any]) -> ast.FunctionDef | None:
    try:
        return _parsed(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, ValueError, SyntaxError):
        return None


@functools.cache
def _parsed(source: str) -> ast.FunctionDef:
    tree = ast.parse(source.strip()).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise ValueError("expected the source of one function")
    return tree
