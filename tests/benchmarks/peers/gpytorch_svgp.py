"""GPyTorch's ApproximateGP: eager PyTorch; Adam, or NGD for q and Adam for the rest ("ciq": contour
integrals too).
"""

import copy

import gpytorch
import numpy as np
import tasks
import torch
from gpytorch import variational
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood


class Logit(_OneDimensionalLikelihood):
    """Bernoulli with a logit link; its base integrates by 20-point quadrature."""

    def forward(self, f, *args, **kwargs):
        """p(y | f)."""
        return torch.distributions.Bernoulli(logits=f, validate_args=False)


class Model(gpytorch.models.ApproximateGP):
    """Zero mean, ARD RBF, whitened q with a full covariance."""

    def __init__(self, problem, settings, method):
        Z, natural = torch.tensor(problem.Z), method != "adam"
        q = (
            variational.NaturalVariationalDistribution
            if natural
            else variational.CholeskyVariationalDistribution
        )
        strategy = (
            variational.CiqVariationalStrategy
            if method == "ciq"
            else variational.VariationalStrategy
        )
        q = q(len(Z), mean_init_std=0.0)
        super().__init__(
            strategy(self, Z, q, learn_inducing_locations=True, jitter_val=settings["jitter"])
        )
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(ard_num_dims=Z.shape[1])
        )
        self.covar_module.outputscale = torch.tensor(problem.variance)
        self.covar_module.base_kernel.lengthscale = torch.tensor(problem.lengthscale)

    def forward(self, X):
        """The prior at X."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(X), self.covar_module(X))


class Engine:
    """See `protocol`."""

    def __init__(self, problem, settings, method, learning_rate, gamma):
        if method not in ("adam", "natgrad", "ciq"):
            raise ValueError(f"GPyTorch has no method {method}")
        torch.set_default_dtype(getattr(torch, settings["dtype"]))
        self.X, self.y, self.n = torch.tensor(problem.X), torch.tensor(problem.y), len(problem.y)
        self.model, self.likelihood, self.chunk = (
            Model(problem, settings, method),
            Logit(),
            settings["chunk"],
        )
        self.elbo = gpytorch.mlls.VariationalELBO(self.likelihood, self.model, num_data=self.n)
        self.optimisers = [torch.optim.Adam(self.model.parameters(), lr=learning_rate)]
        if method != "adam":
            natural = gpytorch.optim.NGD(
                self.model.variational_parameters(), num_data=self.n, lr=gamma
            )
            self.optimisers = [
                natural,
                torch.optim.Adam(self.model.hyperparameters(), lr=learning_rate),
            ]
        self.model(self.X[:2])  # the first call sets q to the prior
        if method == "adam":
            q = self.model.variational_strategy._variational_distribution
            q.variational_mean.data.copy_(torch.tensor(problem.mean))
            q.chol_variational_covar.data.copy_(torch.tensor(problem.root))
        self.parts = [self.model, *self.optimisers]
        self.start = [copy.deepcopy(part.state_dict()) for part in self.parts]

    def _step(self, X, y):
        """One step on a minibatch; the bound before it."""
        for optimiser in self.optimisers:
            optimiser.zero_grad()
        loss = -self.elbo(self.model(X), y)
        loss.backward()
        for optimiser in self.optimisers:
            optimiser.step()
        return -loss.detach()

    def run(self, rows):
        """Steps; see `protocol`."""
        self.model.train()
        data = ((self.X[i], self.y[i]) if len(i) else (self.X, self.y) for i in torch.tensor(rows))
        return self.n * torch.stack([self._step(X, y) for X, y in data]).numpy()

    @torch.no_grad()
    def bound(self):
        """The bound on all data, in chunks."""
        self.model.train()
        pairs = zip(self.X.split(self.chunk), self.y.split(self.chunk), strict=True)
        terms = sum(
            float(self.likelihood.expected_log_prob(y, self.model(X)).sum()) for X, y in pairs
        )
        return terms - float(self.model.variational_strategy.kl_divergence())

    @torch.no_grad()
    def predict(self, X):
        """Mean and variance of f; evaluation mode keeps the factor of K(Z, Z)."""
        self.model.train()
        self.model.eval()
        parts = [self._moments(part) for part in torch.tensor(X).split(self.chunk)]
        return tuple(np.concatenate([p[k] for p in parts]) for k in (0, 1))

    def _moments(self, X):
        f = self.model(X)
        return f.mean.numpy(), f.variance.numpy()

    def reset(self):
        """Parameters and optimisers back to their start."""
        for part, state in zip(self.parts, self.start, strict=True):
            part.load_state_dict(copy.deepcopy(state))


if __name__ == "__main__":
    tasks.main("GPyTorch", gpytorch.__version__, Engine)
