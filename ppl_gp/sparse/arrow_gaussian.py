"""q(v) in natural parameters with a precision that is an arrow: the optimum where each row of the
data sees one level of a grouping factor, at O(U V^2 + V^3) a step for U levels beside V others.

The gradient of sum_n E[log p(y_n | eta_n)] in Cov q(v) is sum_n g_n a_n a_n^T, and a_n has one
entry among the levels: an arrow, and so is the precision I + nat2 at the optimum. Of P = I - S the
arrow's entries are kept (`numerics.arrow`), the only ones that a_n^T P a_n sees.
"""

import jax.numpy as jnp

from ppl_gp.numerics.arrow import Arrow
from ppl_gp.numerics.loads import ArrowGram
from ppl_gp.numerics.triangular import product
from ppl_gp.sparse.families import Whitened
from ppl_gp.sparse.natural_gaussian import NaturalGaussian


class ArrowGaussian(NaturalGaussian):
    """As `NaturalGaussian`, with an arrow nat2, of one function, in whitened coordinates."""

    nat2: Arrow

    def whitened(self):
        gram = self._precision()
        m, trace = gram.solve(self.nat1), jnp.trace(gram.block) + jnp.sum(gram.own)
        kl = 0.5 * (trace + jnp.sum(m**2) - m.size) + gram.half_log_det()
        S = Arrow(gram.block, gram.across, gram.own, gram.start)
        return Whitened(m, S.times(-1.0).plus_diagonal(1.0), kl)

    def _precision(self) -> ArrowGram:
        return self.nat2.symmetric().plus_diagonal(1.0).factored()

    def narrowed(self, scale):
        nat2 = self.nat2.plus_diagonal(1.0).times(1.0 / scale**2).plus_diagonal(-1.0)
        return ArrowGaussian(self.nat1 / scale**2, nat2)

    def target(self, q, gradient, weight):
        """As there. An entry of `across` stands for two of the matrix: its derivative is twice the
        matrix's.
        """
        share = (1.0 / jnp.asarray(weight)).astype(gradient.mean.dtype)
        bar = gradient.reduction.symmetric()
        nat2 = Arrow(2.0 * bar.block, bar.across, 2.0 * bar.own, bar.start).times(share)
        return ArrowGaussian(share * gradient.mean + nat2 @ q.mean, nat2)

    def expected_gain(self, q, target, weight):
        """As there, O(U V^2): S = E + W B W^T with E = diag(1 / d) at the levels, W = (I; C) and B
        the few's block, so that tr((S D)^2) = tr((E D)^2) + 2 tr(B Y^T E Y) + tr((B W^T D W)^2), Y
        = D W at the levels.
        """
        gram, D = self._precision(), target.nat2 + self.nat2.times(-1.0)
        r = target.nat1 - self.nat1 - D @ q.mean
        C, d, B = -gram.cross / gram.d[:, None], gram.d, gram.block
        Y = D.across + D.own[:, None] * C
        inside = D.block + product(D.across.T, C) + product(C.T, Y)
        own = jnp.sum((D.own / d) ** 2) + 2.0 * jnp.sum(B * product(Y.T, Y / d[:, None]))
        BD = product(B, inside)
        return weight * (0.5 * r @ gram.solve(r) + 0.25 * (own + jnp.sum(BD * BD.T)))

    def is_proper(self):
        gram = self._precision()
        return jnp.isfinite(gram.half_log_det())
