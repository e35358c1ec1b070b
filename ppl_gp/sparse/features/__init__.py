"""Inter-domain inducing variables: projections on features and derivatives, and how kinds of them
combine.
"""

from ppl_gp.sparse.features.composed import Additive, Kronecker
from ppl_gp.sparse.features.concatenated import Concatenated, Derivatives
from ppl_gp.sparse.features.fourier import FourierFeatures
from ppl_gp.sparse.features.laplacian import LaplacianFeatures
from ppl_gp.sparse.features.mercer import MercerFeatures

__all__ = [
    "FourierFeatures",
    "MercerFeatures",
    "LaplacianFeatures",
    "Derivatives",
    "Concatenated",
    "Additive",
    "Kronecker",
]
