"""The modules that a saved fit may hold: the classes that files name, and no others."""

from ppl_gp.deep.encoders import MLPEncoder
from ppl_gp.deep.latents import Encoded, FreeGaussian
from ppl_gp.sparse.families import Basis
from ppl_gp.sparse.inducing import InducingVariables
from ppl_gp.sparse.process import SparseLatent


def storable_modules() -> dict[str, type]:
    """{name: class}: what q(u) and q(h) are made of, and every kind of inducing variables of this package."""
    kinds = {cls.__name__: cls for cls in _descendants(InducingVariables) if cls.__module__.startswith("ppl_gp.")}
    known = (SparseLatent, Basis, MLPEncoder, Encoded, FreeGaussian)
    return {**{cls.__name__: cls for cls in known}, **kinds}


def _descendants(cls) -> list[type]:
    return [d for child in cls.__subclasses__() for d in (child, *_descendants(child))]
