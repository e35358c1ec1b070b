"""The reference's signatures of Equinox modules: an argument for each field, with its default.

Griffe reads sources and knows dataclasses by their decorator; a module is one by its base class. So
the signature is taken from the class itself, and the annotations from the sources.
"""

import importlib
import inspect

import equinox as eqx
from griffe import Extension, Function, Parameter, ParameterKind, Parameters


class ModuleFields(Extension):
    """Gives every module without an `__init__` of its own the one that Equinox made."""

    def on_package(self, *, pkg, loader, **kwargs):
        for cls in list(classes(pkg)):
            made = getattr(importlib.import_module(cls.module.path), cls.name)
            if inspect.isclass(made) and issubclass(made, eqx.Module):
                cls.set_member("__init__", constructor(cls, made, loader.modules_collection))


def classes(holder):
    """The classes of a package that have a base and no `__init__` in their source."""
    for member in list(holder.members.values()):
        if member.is_alias:
            continue
        if member.is_module:
            yield from classes(member)
        elif member.is_class and member.bases and "__init__" not in member.members:
            yield member


def constructor(cls, made, collection) -> Function:
    found = inspect.signature(made).parameters.values()
    fields = [
        Parameter(
            p.name,
            annotation=annotation(made, p.name, collection),
            kind=ParameterKind(p.kind.description),
            default=None if p.default is p.empty else text(p.default),
        )
        for p in found
    ]
    first = Parameter("self", kind=ParameterKind.positional_or_keyword)
    return Function("__init__", parent=cls, parameters=Parameters(first, *fields), returns="None")


def annotation(made, name: str, collection):
    """Of a field, from the class that declares it first."""
    for base in made.__mro__:
        if base.__module__.split(".")[0] != "ppl_gp":
            continue
        declared = collection[base.__module__].members.get(base.__qualname__)
        if declared is not None and name in declared.members:
            return declared.members[name].annotation
    return None


def text(value) -> str:
    """A default as one would write it: `MAP()`, not all that it is by default."""
    kind = type(value)
    if kind.__module__.startswith("ppl_gp") and value == kind():
        return f"{kind.__name__}()"
    return getattr(value, "__name__", None) or repr(value)
