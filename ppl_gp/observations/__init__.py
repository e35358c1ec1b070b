"""Distributions of observations that GP models use and NumPyro lacks: probit likelihoods, exact in
their tails.
"""

from ppl_gp.observations.binary_and_ordinal import BernoulliProbit, MultinomialProbit, OrdinalProbit

__all__ = ["BernoulliProbit", "MultinomialProbit", "OrdinalProbit"]
