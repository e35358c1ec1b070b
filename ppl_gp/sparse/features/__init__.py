"""Inter-domain inducing variables: projections on features and derivatives, and how kinds of them
combine.
"""

from ppl_gp.sparse.features.concatenated import Concatenated, Derivatives
from ppl_gp.sparse.features.spectral import FourierFeatures, LaplacianFeatures, MercerFeatures
from ppl_gp.sparse.features.structure import Additive, Kronecker

__all__ = [
    "FourierFeatures",
    "MercerFeatures",
    "LaplacianFeatures",
    "Derivatives",
    "Concatenated",
    "Additive",
    "Kronecker",
]
