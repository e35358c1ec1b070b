"""The modules that a saved fit may hold: the classes that files name, and no others."""

from ppl_gp.conjugate.discrete import Discrete
from ppl_gp.conjugate.gaussian import Gaussian
from ppl_gp.conjugate.paired import NormalGamma, NormalWishart
from ppl_gp.conjugate.positive import Gamma
from ppl_gp.conjugate.simplex import Dirichlet
from ppl_gp.conjugate.wishart import Wishart
from ppl_gp.deep.encoders import MLPEncoder
from ppl_gp.deep.latents import Encoded, FreeGaussian
from ppl_gp.kept import FromInducing
from ppl_gp.numerics.arrow import Arrow
from ppl_gp.sparse.arrow_parts import ArrowVariables
from ppl_gp.sparse.inducing import InducingVariables


def storable_modules() -> dict[str, type]:
    """{name: class}: what q(u) and q(h) are made of, and every kind of inducing variables of this
    package.
    """
    kinds = {
        cls.__name__: cls
        for cls in _descendants(InducingVariables)
        if cls.__module__.startswith("ppl_gp.")
    }
    known = (Arrow, ArrowVariables, MLPEncoder, Encoded, FreeGaussian)
    factors = (Gaussian, Gamma, Wishart, Dirichlet, Discrete, NormalGamma, NormalWishart)
    named = {cls.__name__: cls for cls in known} | {f"Factor{cls.__name__}": cls for cls in factors}
    return {"SparseLatent": FromInducing, **named, **kinds}


def file_name(cls: type) -> str | None:
    """The name of a class in files, where it may stand in one."""
    return next((name for name, known in storable_modules().items() if known is cls), None)


def _descendants(cls) -> list[type]:
    return [d for child in cls.__subclasses__() for d in (child, *_descendants(child))]
