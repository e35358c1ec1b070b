"""Gaussian-process models declared once, as NumPyro models, and inferred by every method that
matters.
"""

from pathlib import Path as _Path
from typing import TYPE_CHECKING

# `ppl_gp.models` is a folder of the package in a wheel, and of the repository in a clone
if not (_Path(__file__).parent / "models").is_dir():
    __path__.append(str(_Path(__file__).parents[1]))

# Before anything imports jax
from ppl_gp import native_logs as _sets_the_log_level

# isort: split
# The site and what it is made of
from ppl_gp import kernels, means, observations, priors

# Per-datum latents
from ppl_gp.deep.latents import Amortised, Free

# Errors and results
from ppl_gp.errors import (
    DataError,
    FitError,
    MissingPackageError,
    ModelError,
    NotConjugateError,
    NotPointwiseError,
    PplGpError,
    Result,
    StoreError,
)
from ppl_gp.gp import GP, Whiten
from ppl_gp.infer import local as _registers_local_methods

# Sparse approximations
from ppl_gp.infer.approximate import approximate, guide

# Checking, fitting, exact posteriors
from ppl_gp.infer.checklist.check import check
from ppl_gp.infer.elbo import ELBO, GlobalImportanceWeightedELBO, ImportanceWeightedELBO
from ppl_gp.infer.fit import fit
from ppl_gp.infer.hyper.sample import marginal
from ppl_gp.infer.mcmc.elliptical import EllipticalSlice
from ppl_gp.infer.mcmc.nuts import NUTS
from ppl_gp.infer.mcmc.sparse_nuts import SparseNUTS
from ppl_gp.infer.sources import Stream
from ppl_gp.infer.svgp import fit as _registers_svgp
from ppl_gp.infer.svi import SVI

# Local approximations
from ppl_gp.local.bound import LocalBound
from ppl_gp.local.ep import EP
from ppl_gp.local.laplace import Laplace
from ppl_gp.local.method import LocalMethod, log_evidence
from ppl_gp.local.vi import VI

# Mean field
from ppl_gp.mean_field.choose import register_family
from ppl_gp.mean_field.method import MeanField

# Compiled functions on disk
from ppl_gp.quick import cache

# Reading a model
from ppl_gp.reading.factors import Factors, LogLikelihood, read

# What a fit gives, and how fits compare
from ppl_gp.results.compare.compare import compare
from ppl_gp.results.compare.models import ModelComparison, compare_models
from ppl_gp.results.datatree import sample_prior
from ppl_gp.results.fit import Fit
from ppl_gp.results.load import load
from ppl_gp.results.predict.prediction import Prediction

# What happens to the hyperparameters
from ppl_gp.settings import MAP, Fixed, Grid, Sample
from ppl_gp.sparse import features
from ppl_gp.sparse.inducing import InducingVariables, Points
from ppl_gp.sparse.site import SparsePosterior
from ppl_gp.sparse.svgp import SVGP, Checkpoint, CollapsedSVGP, Expectation, Layers, Training

del _registers_local_methods, _registers_svgp, _sets_the_log_level

__all__ = [
    "Amortised",
    "ELBO",
    "EP",
    "Free",
    "GlobalImportanceWeightedELBO",
    "ImportanceWeightedELBO",
    "GP",
    "Grid",
    "MAP",
    "MeanField",
    "NUTS",
    "SVGP",
    "SVI",
    "VI",
    "Checkpoint",
    "CollapsedSVGP",
    "DataError",
    "EllipticalSlice",
    "Expectation",
    "Factors",
    "Fit",
    "FitError",
    "Fixed",
    "Laplace",
    "Layers",
    "InducingVariables",
    "LocalBound",
    "LocalMethod",
    "LogLikelihood",
    "MissingPackageError",
    "ModelComparison",
    "ModelError",
    "NotConjugateError",
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
    "Training",
    "Whiten",
    "approximate",
    "cache",
    "check",
    "compare",
    "compare_models",
    "features",
    "fit",
    "guide",
    "kernels",
    "load",
    "log_evidence",
    "marginal",
    "means",
    "observations",
    "priors",
    "read",
    "plot_calibration",
    "plot_components",
    "plot_effects",
    "plot_evidence",
    "plot_forest",
    "plot_predictions",
    "plot_surface",
    "register_family",
    "sample_prior",
]
__version__ = "0.1.0"

_PICTURES = {
    "plot_calibration": "pictures",
    "plot_components": "effects",
    "plot_effects": "effects",
    "plot_evidence": "pictures",
    "plot_forest": "pictures",
    "plot_predictions": "slices",
    "plot_surface": "pictures",
}

if TYPE_CHECKING:
    from ppl_gp import sklearn as sklearn
    from ppl_gp.report.effects import plot_components, plot_effects
    from ppl_gp.report.pictures import plot_calibration, plot_evidence, plot_forest, plot_surface
    from ppl_gp.report.slices import plot_predictions
else:

    def __getattr__(name):
        """`ppl_gp.sklearn`, `ppl_gp.models` and pictures, at their first use."""
        import importlib

        if name in ("sklearn", "models"):
            return importlib.import_module(f"ppl_gp.{name}")
        if name not in _PICTURES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"ppl_gp.report.{_PICTURES[name]}"), name)
