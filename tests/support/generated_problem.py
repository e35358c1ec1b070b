"""`Problem`: a declared model with its mathematics in NumPy, written from the spec and not from the
model.
"""

import copy

import numpy as np
from generated_model import JITTER, LENGTHSCALE, VARIANCE, DeclaredModel
from scipy.special import log_ndtr
from scipy.stats import norm

__all__ = ["JITTER", "LENGTHSCALE", "VARIANCE", "Problem"]


class Problem(DeclaredModel):
    """What the model says, for a second route: priors, likelihoods and moments at rows of the
    pool.
    """

    def at(self, hyper) -> "Problem":
        """The same problem at other hyperparameters."""
        other = copy.copy(self)
        other.variance, other.b = float(hyper["variance"]), np.asarray(hyper.get("b", self.b))
        if "s" in hyper:
            other.s = np.broadcast_to(np.ravel(hyper["s"]), (self.P,))
        return other

    def log_prior(self) -> float:
        """Of the hyperparameters that are sample sites, in the coordinates in which they are
        declared.
        """
        positive = [self.variance]
        if self.spec.noise in ("global", "outputs"):
            positive += list(self.s if self.spec.noise == "outputs" else self.s[:1])
        total = np.sum(norm.logpdf(np.log(positive)) - np.log(positive))
        return total + (np.sum(norm.logpdf(self.b)) if self.spec.effect != "none" else 0.0)

    def kernel(self, a, b):
        """k(x_a, x_b) between rows of the pool, without jitter."""
        squared = np.sum((self.x[a][:, None] - self.x[b][None]) ** 2, -1)
        return self.variance * np.exp(-0.5 * squared / LENGTHSCALE**2)

    def log_lik(self, rows, y=None, training=True):
        """f (..., rows) -> log p(y_n | f_n) (..., rows), nats; in training with scales, and factors
        that see no y.
        """
        spec, rows = self.spec, np.asarray(rows)
        y = self.y[rows] if y is None else y
        scale = self.weights[rows] * (2.0 if spec.scale == "constant" else 1.0)

        def value(f):
            eta = (f + self.offset(rows))[..., None, None]
            entries = self.family.log_prob(y, eta, self.s, self.e[rows][:, None, None])
            if spec.factor == "censored":
                entries = np.where(
                    self.censored[rows][:, None, None], self._log_above(y, eta, rows), entries
                )
            total = np.sum(np.where(self.mask[rows], entries, 0.0), (-1, -2))
            if spec.second in ("keyword", "dict", "tuple"):
                total = (
                    total
                    - 0.5 * ((self.v[rows] - 2.0 * f) / 0.5) ** 2
                    - np.log(0.5)
                    - 0.5 * np.log(2 * np.pi)
                )
            if not training:
                return total
            return scale * total - (0.25 * f**2 if spec.factor == "penalty" else 0.0)

        return value

    def _log_above(self, y, eta, rows):
        return log_ndtr((eta - y) / (self.s / np.sqrt(self.e[rows][:, None, None])))

    def shared(self) -> float:
        """What the evidence holds beside f: blanks that inform the noise, a factor of a
        hyperparameter.
        """
        if self.spec.second == "blanks":
            s = self.s[0]
            return float(np.sum(-0.5 * (self.z / s) ** 2 - np.log(s) - 0.5 * np.log(2 * np.pi)))
        return -0.5 * np.log(self.variance) ** 2 if self.spec.factor == "shared" else 0.0

    def moments(self, rows):
        """f (..., rows) -> (mean, variance) of the entries of y, (..., rows, R, P)."""
        rows = np.asarray(rows)
        shape = (len(rows), self.R, self.P)

        def value(f):
            eta = (f + self.offset(rows))[..., None, None]
            found = self.family.moments(eta + np.zeros(shape), self.s, self.e[rows][:, None, None])
            return [np.broadcast_to(m, (*f.shape[:-1], *shape)) for m in found]

        return value
