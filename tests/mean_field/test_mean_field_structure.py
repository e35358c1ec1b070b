"""What mean field holds apart, against d-separation in random directed Gaussian graphs."""

import itertools

import numpy as np
import pytest
from gaussian_graphs import SITES, Graph, K, random_graph, separated

from ppl_gp.infer.probes import first_trace
from ppl_gp.mean_field.log_joint import log_joint_of
from ppl_gp.mean_field.structure import find_structure
from ppl_gp.mean_field.sweep import updated

Y = np.random.default_rng(0).normal(size=(SITES, K))
MANY = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 70)]


def found(graph: Graph, factors):
    """The blocks. Compiled: operation by operation the loops of the proofs take minutes."""
    trace = first_trace(graph.model, (Y,), {})
    return find_structure(log_joint_of(graph.model, trace, (Y,), {}), trace, factors, True)


def check_blankets(graph: Graph, structure):
    """Two blocks stand in one term where they are not separated by all other sites."""
    assert {k for f in structure.blocks for k in f.sites} == {f"s{i}" for i in graph.latents}
    site = [int(f.sites[0][1:]) for f in structure.blocks]
    together = {frozenset((site[a], site[b])) for t in structure.terms for a, b in pairs(t.blocks)}
    for a, b in pairs(graph.latents):
        apart = separated(graph.sites(), a, b, set(range(SITES)) - {a, b})
        assert apart == (frozenset((a, b)) not in together), (a, b)


def check_elements(graph: Graph, structure):
    """A plate's elements are apart where all are separated by everything else."""
    parents = graph.elements()
    for f in structure.blocks:
        own = [(int(f.sites[0][1:]), k) for k in range(K)]
        apart = all(separated(parents, a, b, set(parents) - {a, b}) for a, b in pairs(own))
        assert f.batch == ((K,) if apart else ()), f.sites


def check_joint(graph: Graph, structure, group):
    """A block of two sites is one Gaussian, uncorrelated just where elements are separated by what
    lies outside of it.
    """
    (j,) = [j for j, f in enumerate(structure.blocks) if len(f.sites) == 2]
    q = updated(structure.joint, structure.terms, structure.blocks, j)
    assert q.sites == tuple(f"s{i}" for i in group) and q.batch == ()
    _, covariance = q.coordinates()
    parents, own = graph.elements(), [(i, k) for i in group for k in range(K)]
    for a, b in pairs(range(2 * K)):
        apart = separated(parents, own[a], own[b], set(parents) - set(own))
        size = abs(float(covariance[a, b]))
        assert size < 1e-9 if apart else size > 1e-7, (own[a], own[b], size)


def pairs(items):
    return list(itertools.combinations(items, 2))


@pytest.mark.one_case
@pytest.mark.parametrize("seed", [*range(10), *MANY])
def test_what_is_apart_is_separated(seed):
    graph = random_graph(seed)
    group = graph.latents[-2:]
    alone = found(graph, None)
    check_blankets(graph, alone)
    check_elements(graph, alone)
    check_joint(graph, found(graph, [[f"s{i}" for i in group]]), group)


@pytest.mark.slow
def test_the_graphs_have_both_kinds():
    """Otherwise agreement would say nothing."""
    kinds = set()
    for seed in range(10):
        graph = random_graph(seed)
        parents, own = graph.elements(), graph.latents[-2:]
        nodes = [(i, k) for i in own for k in range(K)]
        outside = set(parents) - set(nodes)
        kinds |= {separated(parents, a, b, outside) for a, b in pairs(nodes)}
        for i in graph.latents:
            of_plate = [(i, k) for k in range(K)]
            kinds |= {
                ("plate", separated(parents, a, b, set(parents) - {a, b}))
                for a, b in pairs(of_plate)
            }
    assert kinds == {True, False, ("plate", True), ("plate", False)}
