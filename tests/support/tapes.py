"""What tests ask of the insides of a tape, all in this place."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from hf_memsave.patching import taped
from hf_memsave.tape import Tape, attention, calls, content, decide, storage
from hf_memsave.tape.content import BUFFER, MARK, PARAMETER, Content, same
from support.helpers import is_remade

#: Where calls are numbered, functions that remaking one tensor may run, and how many blocks back.
CALLS, MOST_WORK, SPAN = calls, storage.MOST_WORK, decide.SPAN
#: What gives a tensor once in a backward; and the module where it asks which backward runs, on which stream.
OnDemand, HANDLES = Content, content
#: What a tape does for a model, and where: records, packs, decides to recompute, and recomputes.
COUNTED = (Tape, "record"), (Tape, "pack"), (Tape, "recompute"), (Content, "_made")


def is_counted(name, owner):
    """Whether a call of what is :data:`COUNTED` is work: not what gives a code, or hands on what is there."""
    return name != "_made" or (owner.stride is not None and owner.make is not same)


def work_of(handle):
    """How many functions run to give what is remade."""
    return handle.content.work


def sources_of(handle):
    """The tensors that are held to remake what ``handle`` gives."""
    found = handle.content.inputs
    assert found and not any(is_remade(one) for one in found)
    return [one.tensor for one in found if type(one) is Content]


def of_ones(y):
    """The gradient of a weight W in (y W).sum(), of y ``[4, *]``."""
    return y.detach().T @ torch.ones(4, 20, device=y.device)


#: What the tape knows of the storages of parameters and buffers, which are kept whatever it does.
STATIC = (PARAMETER, BUFFER)


def is_trusted(tensor):
    """Whether the tape takes the version of a parameter or buffer to tell of all writes."""
    return getattr(tensor.untyped_storage(), MARK, PARAMETER) in STATIC


def references(tape, tensor):
    """Weak references that the tape has for the storage of ``tensor``: to its views, what reads, and what it gives."""
    found = tape.content_of(tensor)
    others = tape.notes(tensor).get("others")
    return [() if others is None else others.valuerefs(), found.readers, found.recomputable]


def held_tensors():
    """What contents hold outside of the sight of Python's garbage collector."""
    contents = [one for one in gc.get_objects() if isinstance(one, Content)]
    found = [x for one in contents for x in (one.tensor, one.shared and one.shared.out)]
    return [tensor for tensor in found if tensor is not None]


def remembered(model):
    """How many calls the tape of a model remembers."""
    return sum(map(len, taped.CALLS[model].values()))


@pytest.fixture
def tapes(monkeypatch):
    """Of every tape that is laid from now on: the calls that it knew, and what it had made and used in the end."""
    found, enter, end = [], Tape.__enter__, calls.Calls.end

    def noted(tape):
        found.append(SimpleNamespace(known=tape.calls.known, made=[], used=set(), calls=weakref.ref(tape.calls)))
        return enter(tape)

    def ended(calls):
        last = next(one for one in found if one.calls() is calls)
        last.made, last.used = calls.made, calls.used
        end(calls)

    monkeypatch.setattr(Tape, "__enter__", noted)
    monkeypatch.setattr(calls.Calls, "end", ended)
    return found


@pytest.fixture
def composed(monkeypatch):
    """The calls of SDPA that are taken apart."""
    calls, compose = [], attention._composed

    def counted(*args, **kwargs):
        calls.append(None)  # not what it is given: that would keep it
        return compose(*args, **kwargs)

    monkeypatch.setattr(attention, "_composed", counted)
    return calls
