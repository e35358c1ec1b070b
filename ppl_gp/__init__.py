"""Gaussian-process models declared once, as NumPyro models, and inferred by every method that matters."""

# The site and what it is made of
from ppl_gp import kernels, means, observations

# Compiled functions on disk
from ppl_gp.cache import cache

# Latents that stand one a datum
from ppl_gp.deep.latents import Amortised, Free

# Errors and results
from ppl_gp.errors import DataError, FitError, ModelError, NotPointwiseError, PplGpError, Result, StoreError

# Reading a model
from ppl_gp.factors import Factors, LogLikelihood, read
from ppl_gp.gp import GP, Whiten

# What happens to the hyperparameters
from ppl_gp.hyperparameters import MAP, Fixed, Sample
from ppl_gp.infer import local as _registers_local_methods
from ppl_gp.infer import sparse as _registers_svgp

# Sparse approximations
from ppl_gp.infer.approximate import approximate, guide

# Checking, fitting, exact posteriors
from ppl_gp.infer.check import check
from ppl_gp.infer.elbo import ELBO, GlobalImportanceWeightedELBO, ImportanceWeightedELBO
from ppl_gp.infer.elliptical import EllipticalSlice
from ppl_gp.infer.fit import fit
from ppl_gp.infer.handlers import marginal
from ppl_gp.infer.nuts import NUTS
from ppl_gp.infer.sources import Stream
from ppl_gp.infer.sparse_nuts import SparseNUTS

# Local approximations
from ppl_gp.local.bound import LocalBound
from ppl_gp.local.ep import EP
from ppl_gp.local.laplace import Laplace
from ppl_gp.local.method import LocalMethod, log_evidence
from ppl_gp.local.vi import VI

# What a fit gives, and how fits compare
from ppl_gp.results.compare import compare
from ppl_gp.results.fit import Fit
from ppl_gp.results.load import load
from ppl_gp.results.predict import Prediction
from ppl_gp.sparse import features
from ppl_gp.sparse.inducing import InducingVariables, Points
from ppl_gp.sparse.site import SparsePosterior
from ppl_gp.sparse.svgp import SVGP, Checkpoint

del _registers_local_methods, _registers_svgp

__all__ = [
    "Amortised",
    "ELBO",
    "EP",
    "Free",
    "GlobalImportanceWeightedELBO",
    "ImportanceWeightedELBO",
    "GP",
    "MAP",
    "NUTS",
    "SVGP",
    "VI",
    "Checkpoint",
    "DataError",
    "EllipticalSlice",
    "Factors",
    "Fit",
    "FitError",
    "Fixed",
    "Laplace",
    "InducingVariables",
    "LocalBound",
    "LocalMethod",
    "LogLikelihood",
    "ModelError",
    "NotPointwiseError",
    "Points",
    "PplGpError",
    "Prediction",
    "Result",
    "Sample",
    "StoreError",
    "SparseNUTS",
    "SparsePosterior",
    "Stream",
    "Whiten",
    "approximate",
    "cache",
    "check",
    "compare",
    "features",
    "fit",
    "guide",
    "kernels",
    "load",
    "log_evidence",
    "marginal",
    "means",
    "observations",
    "read",
]
__version__ = "0.1.0"
