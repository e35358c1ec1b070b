"""Declared models: ordinary NumPyro functions, each of which runs under every method and under
plain NUTS as it stands. `pg.models.binary` is the function `binary`, and so on.
"""

from .autoencoder import autoencoder
from .bayesian_network import bayesian_network
from .classification import binary
from .counts import poisson as counts
from .deep import deep, deep_binary
from .factor_analysis import factor_analysis
from .gaussian import gaussian
from .gplvm import gplvm
from .heteroscedastic import heteroscedastic
from .latent import latent
from .latent_deep import latent_deep
from .letters import letters
from .linear_regression import linear_regression
from .logistic_regression import logistic_regression
from .mixed import mixed_counts
from .mixture import mixture
from .multiclass import multiclass
from .ordinal import ordinal
from .outputs import outputs
from .regression import regression
from .robust import student_t
from .spatial_counts import spatial_counts

__all__ = [
    "autoencoder",
    "bayesian_network",
    "binary",
    "counts",
    "deep",
    "deep_binary",
    "factor_analysis",
    "gaussian",
    "gplvm",
    "heteroscedastic",
    "latent",
    "latent_deep",
    "letters",
    "linear_regression",
    "logistic_regression",
    "mixed_counts",
    "mixture",
    "multiclass",
    "ordinal",
    "outputs",
    "regression",
    "spatial_counts",
    "student_t",
]
