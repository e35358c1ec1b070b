"""GPyTorch's deep GP: eager PyTorch; Adam trains everything, q too.

The layers are ApproximateGPs whose units share one factor of K(Z, Z), and draws are rows of the
last layer's input. GPyTorch's own DeepGPLayer does the same work once a unit and once a draw: it
took twice as long with one draw, 18 times with ten.
"""

import copy

import gpytorch
import tasks
import torch
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy


class IdentityMean(gpytorch.means.Mean):
    """Unit d has the mean x_d: units first, rows last."""

    def forward(self, X):
        """X transposed."""
        return X.mT


class Layer(gpytorch.models.ApproximateGP):
    """Layer i: whitened q with a full covariance for each unit, one ARD RBF kernel and inducing
    inputs for all.
    """

    def __init__(self, problem, i, mean_module, mean, root, jitter):
        Z, mean, root = (torch.tensor(a) for a in (problem.Z[i], mean, root))
        q = CholeskyVariationalDistribution(len(Z), batch_shape=mean.shape[:-1], mean_init_std=0.0)
        super().__init__(VariationalStrategy(self, Z, q, jitter_val=jitter))
        self.mean_module = mean_module
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(ard_num_dims=Z.shape[1])
        )
        self.covar_module.outputscale = torch.tensor(problem.variance[i])
        self.covar_module.base_kernel.lengthscale = torch.tensor(problem.lengthscale[i])
        self(Z[:2])  # the first call sets q to the prior
        q.variational_mean.data.copy_(mean)
        q.chol_variational_covar.data.copy_(root)

    def forward(self, X):
        """The prior at X."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(X), self.covar_module(X))


class Model(gpytorch.models.deep_gps.DeepGP):
    """Two layers; the last sees the draws of a datum as rows, draw after draw."""

    def __init__(self, problem, settings):
        super().__init__()
        inner, last = (problem.inner_mean, problem.inner_root), (problem.mean, problem.root)
        self.inner = Layer(problem, 0, IdentityMean(), *inner, settings["jitter"])
        self.last = Layer(problem, 1, gpytorch.means.ZeroMean(), *last, settings["jitter"])
        self.draws = settings["num_draws"]

    def forward(self, X):
        """q(f) at the draws."""
        h = self.inner(X)
        mean, scale = h.mean, h.variance.sqrt()
        drawn = mean + scale * torch.randn(self.draws, *mean.shape)
        return self.last(drawn.mT.reshape(-1, X.shape[-1]))


class Engine:
    """See `protocol`."""

    def __init__(self, problem, settings, method, learning_rate, gamma):
        if method != "adam":
            raise ValueError(f"not run here: {method}")
        torch.set_default_dtype(getattr(torch, settings["dtype"]))
        torch.manual_seed(settings["seed"])
        self.X, self.y, self.n = torch.tensor(problem.X), torch.tensor(problem.y), len(problem.y)
        self.model, self.chunk = Model(problem, settings), settings["chunk"]
        likelihood = gpytorch.likelihoods.GaussianLikelihood(
            noise_constraint=gpytorch.constraints.Positive()
        )
        likelihood.noise = torch.tensor(problem.noise)
        self.elbo = gpytorch.mlls.VariationalELBO(likelihood, self.model, num_data=self.n)
        self.adam = torch.optim.Adam(self.elbo.parameters(), lr=learning_rate)
        self.start = [copy.deepcopy(part.state_dict()) for part in (self.elbo, self.adam)]

    def _bound(self, X, y):
        """The bound for each datum, the mean over draws."""
        return self.elbo(self.model(X), y.repeat(self.model.draws))

    def _step(self, X, y):
        """One step on a minibatch; the bound before it."""
        self.adam.zero_grad()
        loss = -self._bound(X, y)
        loss.backward()
        self.adam.step()
        return -loss.detach()

    def run(self, rows):
        """Steps; see `protocol`."""
        self.model.train()
        data = ((self.X[i], self.y[i]) if len(i) else (self.X, self.y) for i in torch.tensor(rows))
        return self.n * torch.stack([self._step(X, y) for X, y in data]).numpy()

    @torch.no_grad()
    def bound(self):
        """The bound on all data: the mean of the chunks' bounds, weighted by their sizes."""
        self.model.train()
        pairs = zip(self.X.split(self.chunk), self.y.split(self.chunk), strict=True)
        return sum(float(self._bound(X, y)) * len(y) for X, y in pairs)

    def reset(self):
        """Parameters and optimiser back to their start."""
        for part, state in zip((self.elbo, self.adam), self.start, strict=True):
            part.load_state_dict(copy.deepcopy(state))


if __name__ == "__main__":
    tasks.main("GPyTorch", gpytorch.__version__, Engine)
