"""Options of local methods, of what is chosen for the hyperparameters, and of samplers."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from obeyed import GROUP, X, Y, by, by_slow, caught, hyper_of_arrays
from small_fits import HYPER, classifier
from toy_models import evidence

import ppl_gp as pg
from ppl_gp.infer import chains, local
from ppl_gp.infer.hyper import grid, sample
from ppl_gp.infer.hyper import map as search
from ppl_gp.infer.mcmc import elliptical, nuts, sparse_nuts
from ppl_gp.reading.predictor.collapsed import Collapsed


def grouped(X, group, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("groups", 3):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f + u[group]), obs=y)


def problem_of(t, method, model=classifier, *args):
    """(what is chosen for the hyperparameters, the problem) that a fit hands on."""
    run = lambda: pg.fit(model, method, 0, X, *args, y=Y)  # noqa: E731
    return caught(t, local, "infer_hyper", run).given


def hyper_of(kind):
    def row(t):
        for config in (pg.Fixed(HYPER), pg.Grid(restarts=2)):
            found, problem = problem_of(t, kind(hyper=config))
            assert found is config and problem.method.hyper is config

    return row


def integrate_of(kind):
    def row(t):
        _, together = problem_of(t, kind(hyper=pg.Fixed({})), grouped, GROUP)
        assert isinstance(together.model, Collapsed)
        alone = kind(hyper=pg.Fixed({"u": np.zeros(3)}), integrate=())
        _, apart = problem_of(t, alone, grouped, GROUP)
        assert not isinstance(apart.model, Collapsed)

    return row


@functools.cache
def factors():
    hyper = {k: jnp.asarray(v) for k, v in HYPER.items()}
    return pg.read(classifier, jnp.asarray(X), y=jnp.asarray(Y), hyper=hyper)


def solving(method):
    """`solve`, traced."""
    at = factors()
    return lambda: jax.eval_shape(
        lambda K: method.solve(K, at.prior.mean, at.log_lik).steps, at.prior.covariance_matrix
    )


def looped(option, value, kind):
    """The loop over sweeps is told this number; that it obeys is `test_fixed_point.py`."""

    def row(t):
        method = kind(**{option: value})
        found = caught(t, sys.modules[kind.__module__], "fixed_point", solving(method))
        assert found.named[option] == value

    return row


def nodes(kind, module):
    def row(t):
        for num, wanted in ((17, 17), (None, 96)):
            method = kind(num_nodes=num, **({"closed_form": False} if kind is pg.EP else {}))
            found = caught(t, sys.modules[module], "likelihood_nodes", solving(method))
            assert found.named["num"] == wanted

    return row


def laplace_stops(t):
    for options, code in (({"max_steps": 1}, "max_steps"), ({}, "converged")):
        _, solution = evidence(classifier, pg.Laplace(**options), hyper_of_arrays(), X, y=Y)
        assert pg.Result.from_code(solution.code) == code
        assert (int(solution.steps) == 1) == bool(options)


def laplace_tolerance(t):
    steps = [
        int(evidence(classifier, pg.Laplace(tol=tol), hyper_of_arrays(), X, y=Y)[1].steps)
        for tol in (0.5, 1e-8)
    ]
    assert steps[0] < steps[1]


def one_after_another(t):
    with t.patch.context() as patch:
        patch.setattr(pg.EP, "_sequential_sweep", lambda *_: "one after another")
        patch.setattr(pg.EP, "_parallel_sweep", lambda *_: "all at once")
        for sequential, wanted in ((True, "one after another"), (False, "all at once")):
            method = pg.EP(sequential=sequential)
            module = sys.modules["ppl_gp.local.ep"]
            found = caught(t, module, "fixed_point", solving(method))
            assert found.given[0](None) == wanted


LOOP = "test_fixed_point::test_"


def of_local(kind, **more):
    return {"hyper": [hyper_of(kind)], "integrate": [integrate_of(kind)], **more}


def of_loop(kind, *options):
    shown = {
        "tol": by(LOOP + "finds_the_fixed_point_and_says_so"),
        "max_steps": by(LOOP + "step_limit_is_reported_with_the_last_point"),
        "damping": by(LOOP + "damping_still_reaches_the_fixed_point"),
    }
    values = {"tol": 1e-4, "max_steps": 17, "damping": 0.3}
    return {k: [looped(k, values[k], kind), shown[k]] for k in options}


# the hyperparameters


def map_searches(t):
    """One step from `init` leaves the point there; `tol` is what ends a step's run."""
    told, real = [], search.advance

    def advance(runs, at, tol):
        told.append(float(tol))
        return real(runs, at, tol)

    t.patch.setattr(search, "advance", advance)
    config = pg.MAP(max_steps=1, tol=0.03, init=HYPER)
    fit = pg.fit(classifier, pg.Laplace(hyper=config), 0, X, y=Y, throw=False)
    assert fit.result == "max_steps" and fit.stats["map_steps"] == 1 and told == [0.03]
    np.testing.assert_allclose([fit.hyper[k] for k in HYPER], list(HYPER.values()))


def map_restarts(t):
    method = pg.Laplace(hyper=pg.MAP(restarts=3))
    found = caught(t, search, "start", lambda: pg.fit(classifier, method, 0, X, y=Y))
    assert found.given[2] == 3


def grid_searches(t):
    """The search for its mode has the configuration, as under `MAP`."""
    config = {"restarts": 2, "max_steps": 7, "tol": 0.2, "init": HYPER}
    method = pg.Laplace(hyper=pg.Grid(**config))
    found = caught(t, grid, "maximise", lambda: pg.fit(classifier, method, 0, X, y=Y))
    assert {k: getattr(found.given[0], k) for k in config} == config


def fixed_holds(t):
    hyper = {"lengthscale": 0.7, "variance": 3.0}
    _, problem = problem_of(t, pg.Laplace(hyper=pg.Fixed(hyper)))
    assert problem.method.hyper.values == hyper
    fit = t.small_fit("laplace")
    assert {k: float(v) for k, v in fit.hyper.items()} == HYPER


# samplers


def normals(X, y=None):
    """Twenty numbers of different spreads."""
    scales = 10.0 ** jnp.linspace(-2.0, 0.0, 20)
    numpyro.sample("z", dist.Normal(0.0, scales).to_event(1))


@functools.cache
def short_chains():
    """(draws, the warm-up that the kernel was told, transitions before and after it)."""
    told, counted = [], {True: 0, False: 0}
    config = pg.NUTS(num_warmup=3, num_samples=7, num_chains=2)
    init = chains._init

    def begin(kernel, keys, num_warmup, *rest):
        told.append(num_warmup)
        return init(kernel, keys, num_warmup, *rest)

    for num, keep in chains._schedule(config):
        counted[keep] += num
    kernel = chains.Kernel(normals, step_size=1e-3, adapt_step_size=False, max_tree_depth=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chains, "_init", begin)
        draws = chains.run_chains(
            kernel, config, jax.random.key(0), (X,), {}, progress=False, label=""
        )
    return draws, told[0], counted


def chains_obey(t):
    draws, warmup, counted = short_chains()
    assert warmup == counted[False] == 3 and counted[True] == 7
    assert np.shape(draws.values["z"]) == (2, 7, 20)
    assert np.max(draws.extra["n_steps"]) == 3  # 2^2 - 1, of a depth of two


CHAIN = {
    "num_warmup": 11,
    "num_samples": 13,
    "num_chains": 3,
    "target_accept_prob": 0.93,
}


def sampled(t, module, method, model=classifier):
    """What `run_chains` is given: (kernel, configuration, ...)."""
    return caught(t, module, "run_chains", lambda: pg.fit(model, method, 0, X, y=Y)).given


def chain_of(make, module, config_of=lambda method: method):
    def row(t):
        method = make(**CHAIN)
        kernel, config, *_ = sampled(t, module, method)
        assert config is config_of(method)
        inner = getattr(kernel, "_nuts", kernel)
        assert inner._target_accept_prob == 0.93
        assert {k: getattr(config, k) for k in CHAIN} == CHAIN

    return {k: [row, chains_obey] for k in CHAIN}


def depth_of(make, module):
    def row(t):
        for depth in (2, 10):
            kernel, *_ = sampled(t, module, make(max_tree_depth=depth))
            assert kernel._max_tree_depth == depth

    return [row, chains_obey]


def slices(t):
    for num in (3, 7):
        kernel, _, _, args, kwargs, *_ = sampled(t, elliptical, pg.EllipticalSlice(num_slices=num))

        def transition(key, kernel=kernel, args=args, kwargs=kwargs):
            return kernel.sample(kernel.init(key, 1, None, args, kwargs), args, kwargs).z

        assert f"length={num}\n" in str(jax.make_jaxpr(transition)(jax.random.key(0)))


def sparse_sampler(t):
    """Inducing variables, and nodes of the expectation."""
    _, _, _, (variables, *_), *_ = sampled(
        t, sparse_nuts, pg.SparseNUTS(num_inducing=4, inducing="subset")
    )
    assert variables["f"].Z.shape == (4, 2)
    assert all(any(np.array_equal(z, x) for x in X) for z in np.asarray(variables["f"].Z))
    Z = np.ones((3, 2)) * [[1.0], [2.0], [3.0]]
    method = pg.SparseNUTS(inducing=Z, num_nodes=7)
    _, _, _, (variables, *_), *_ = sampled(t, sparse_nuts, method)
    np.testing.assert_array_equal(variables["f"].Z, Z)
    made = caught(t, sparse_nuts, "sparse_model", lambda: sampled_anew(t, method))
    assert made.given[1].num_nodes == 7


def sampled_anew(t, method):
    sparse_nuts._kernel.cache_clear()
    pg.fit(classifier, method, 0, X, y=Y)


ROWS: dict[str, dict[str, list]] = {
    "Laplace": of_local(
        pg.Laplace,
        tol=[laplace_tolerance],
        max_steps=[laplace_stops],
        marginals=[by("test_simplified_laplace::test_the_error_of_means_falls_by_two_orders")],
    ),
    "EP": of_local(
        pg.EP,
        **of_loop(pg.EP, "damping", "tol", "max_steps"),
        power=[
            by(
                "test_evidence_formulas::test_a_power_of_a_gaussian_is_exact",
                "test_evidence_formulas::"
                "test_the_closed_form_of_a_probit_is_left_alone_under_a_power",
            )
        ],
        sequential=[one_after_another],
        closed_form=[
            by(
                "test_evidence_formulas::"
                "test_the_closed_form_of_a_probit_is_left_alone_under_a_power"
            )
        ],
        num_nodes=[
            nodes(pg.EP, "ppl_gp.local.tilted"),
            by(
                "test_several_functions::test_more_nodes_are_what_a_funnel_needs_and_the_fit_says_so"
            ),
        ],
    ),
    "VI": of_local(
        pg.VI,
        **of_loop(pg.VI, "damping", "tol", "max_steps"),
        num_nodes=[nodes(pg.VI, "ppl_gp.local.vi")],
    ),
    "LocalBound": of_local(pg.LocalBound, **of_loop(pg.LocalBound, "tol", "max_steps")),
    "MAP": {
        "restarts": [
            map_restarts,
            by_slow("test_map::test_the_given_start_decides_the_basin_and_restarts_keep_the_best"),
        ],
        "max_steps": [map_searches],
        "tol": [map_searches],
        "init": [map_searches],
        "maximise": [
            by("test_priors_of_effects::test_maximise_says_that_they_are_known_to_be_points")
        ],
    },
    "Grid": dict.fromkeys(("restarts", "max_steps", "tol", "init"), [grid_searches, map_searches]),
    "Fixed": {"values": [fixed_holds]},
    "Sample": chain_of(lambda **k: pg.Laplace(hyper=pg.Sample(**k)), sample, lambda m: m.hyper),
    "NUTS": {**chain_of(pg.NUTS, nuts), "max_tree_depth": depth_of(pg.NUTS, nuts)},
    "EllipticalSlice": {**chain_of(pg.EllipticalSlice, elliptical), "num_slices": [slices]},
    "SparseNUTS": {
        **chain_of(lambda **k: pg.SparseNUTS(4, "subset", **k), sparse_nuts),
        "max_tree_depth": depth_of(lambda **k: pg.SparseNUTS(4, "subset", **k), sparse_nuts),
        **dict.fromkeys(("num_inducing", "inducing", "num_nodes"), [sparse_sampler]),
    },
}
