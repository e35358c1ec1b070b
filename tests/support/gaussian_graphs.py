"""Random directed Gaussian graphs of sites of three elements, and d-separation in plain Python: by
reachability in the moral graph of the ancestors (Lauritzen et al. 1990).
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

SITES, K = 5, 3

Parents = dict[Any, set]


class Graph(NamedTuple):
    """`links`: {(parent, child): (K, K)}, child's element by parent's; `latents`: site numbers."""

    links: dict
    latents: list[int]
    elementwise: set

    def model(self, y):
        """The sites in order."""
        values = []
        for i in range(SITES):
            mean = jnp.zeros(K)
            for (j, child), W in self.links.items():
                if child == i:
                    own = (j, i) in self.elementwise
                    mean = mean + (np.diag(W) * values[j] if own else W @ values[j])
            with numpyro.plate("elements", K):
                obs = None if i in self.latents else y[i]
                values.append(numpyro.sample(f"s{i}", dist.Normal(mean, 1.0), obs=obs))

    def sites(self) -> Parents:
        """Parents of each site."""
        return {i: {j for j, child in self.links if child == i} for i in range(SITES)}

    def elements(self) -> Parents:
        """Parents of each (site, element)."""
        found: Parents = {(i, b): set() for i in range(SITES) for b in range(K)}
        for (j, i), W in self.links.items():
            for b, a in zip(*np.nonzero(W), strict=True):
                found[i, int(b)].add((j, int(a)))
        return found


def random_graph(seed: int) -> Graph:
    """Two or three latent sites; links elementwise, or by sparse matrices."""
    rng = np.random.default_rng(seed)
    links, elementwise = {}, set()
    for i in range(SITES):
        for j in range(i):
            if rng.random() < 0.5:
                W = rng.choice([-1.0, 1.0], (K, K)) * rng.uniform(0.5, 1.5, (K, K))
                own = rng.random() < 0.6
                mask = np.eye(K) if own else rng.random((K, K)) < 0.3
                links[j, i] = W * mask
                elementwise |= {(j, i)} if own else set()
    latents = rng.choice(SITES, rng.integers(2, 4), replace=False)
    return Graph(links, sorted(int(i) for i in latents), elementwise)


def separated(parents: Parents, a, b, given: Iterable) -> bool:
    """Whether a and b are d-separated by `given`."""
    given = set(given)
    near = moral({n: parents[n] for n in ancestors(parents, {a, b} | given)})
    seen, open_ = {a}, [a]
    while open_:
        for n in near[open_.pop()] - seen - given:
            seen.add(n)
            open_.append(n)
    return b not in seen


def ancestors(parents: Parents, nodes: set) -> set:
    """The nodes themselves among them."""
    found, open_ = set(nodes), list(nodes)
    while open_:
        new = parents[open_.pop()] - found
        found |= new
        open_ += new
    return found


def moral(parents: Parents) -> Parents:
    """Neighbours: parents, children, and the children's other parents."""
    near: Parents = {n: set() for n in parents}
    for child, own in parents.items():
        family = own | {child}
        for n in family:
            near[n] |= family - {n}
    return near
