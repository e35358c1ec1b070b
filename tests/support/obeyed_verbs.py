"""Options of the verbs, of pictures and of the estimators."""

import functools
import sys
from inspect import unwrap
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro.distributions as dist
import pytest
from obeyed import X, Y, by, by_slow, caught
from small_fits import HYPER, classifier, made_fit

import ppl_gp as pg
from ppl_gp.infer.mcmc import nuts
from ppl_gp.report.effects import plot_components

RUNS = "test_long_runs::test_"
matplotlib.use("Agg")


@functools.cache
def fit():
    return made_fit(classifier, HYPER, X, y=Y)


def drawn(t):
    """As many draws as asked for, others by another key."""
    first, again, other = (fit().sample(key, X[:3], 5).f for key in (0, 0, 1))
    assert first.shape == (5, 3)
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)


def scored(t):
    value, error = fit().log_density(X[:3], Y[:3], with_error=True)
    assert value.shape == error.shape == (3,)
    np.testing.assert_allclose(fit().log_density(X[:3], Y[:3]), value)
    module = sys.modules["ppl_gp.results.predict.scores"]
    run = lambda: fit().log_density(X[:3], Y[:3], num_draws=12_345)  # noqa: E731
    assert caught(t, module, "log_density_at", run).given[2] == 12_345


def latents_inferred(t):
    """Numbers and key are those of the compiled draw."""
    module = sys.modules["ppl_gp.results.predict.scores"]
    with t.patch.context() as patch:
        for name in ("query_at", "coupled_groups"):
            patch.setattr(module, name, lambda *_: None)
        patch.setattr(module, "observing", lambda *_: None)
        patch.setattr(module.dataclasses, "replace", lambda case, **_: case)
        hidden = SimpleNamespace(local={"h": None}, method=None)
        patch.setattr(module, "with_observations", lambda fit, X, y, args, kwargs: (X, y, (), {}))
        ask = unwrap(module.infer_latents)
        run = lambda: ask(hidden, 7, X, Y, num_samples=12, num_proposals=34)  # noqa: E731
        *_, key, num_samples, num_proposals = caught(t, module, "_infer", run).given
    assert (num_samples, num_proposals) == (12, 34) and key == jax.random.key(7)


def tree(t):
    found = {k: fit().to_datatree(num_draws=6, rng_key=k).posterior["f"] for k in (0, 1)}
    assert found[0].shape == (1, 6, 9) and not np.allclose(found[0], found[1])


def judged(t):
    """`compare` hands its key and its number of draws to importance sampling."""
    module = sys.modules["ppl_gp.results.compare.compare"]
    key = jax.random.key(8)
    settings = {"rng_key": key, "num_importance_samples": 321}
    run = lambda: pg.compare({"a": fit()}, X[:3], Y[:3], **settings)  # noqa: E731
    found = caught(t, module, "importance_sampling", run)
    assert found.given[1] is key and found.given[2] == 321


def keys_differ(t):
    """A seed and its key are one thing, and reach what draws."""

    def given(key):
        return sampled_by(t, key)[2]

    assert given(1) == given(jax.random.key(1)) != given(2)


def sampled_by(t, key):
    run = lambda: pg.fit(classifier, pg.NUTS(), key, X, y=Y)  # noqa: E731
    return caught(t, nuts, "run_chains", run).given


def raised(t):
    method = pg.Laplace(hyper=pg.MAP(max_steps=1, tol=0.03, init=HYPER))
    with pytest.raises(pg.FitError):
        pg.fit(classifier, method, 0, X, y=Y)
    assert pg.fit(classifier, method, 0, X, y=Y, throw=False).result == "max_steps"


def terms_drawn(t):
    """The variable, what it is called, and the inverse of a link."""
    part = dist.Normal(jnp.linspace(-1.0, 1.0, 12), 0.1)
    t.patch.setattr(pg.Fit, "components", lambda self, X: {"f": part})
    draw = functools.partial(plot_components, fit(), X, along={"f": np.arange(12.0)})
    (plain,), (changed,) = draw().axes, draw(labels={"f": "age"}, response=jnp.exp).axes
    for panel, wanted in ((plain, part.mean), (changed, np.exp(part.mean))):
        np.testing.assert_allclose(panel.lines[0].get_xdata(), np.arange(12.0))
        np.testing.assert_allclose(panel.lines[0].get_ydata(), wanted, rtol=1e-6)
    assert changed.get_xlabel() == "age" != plain.get_xlabel()


# scikit-learn


def estimator(t):
    base = sys.modules["ppl_gp.sklearn.base"]

    def seeded(state, **options):
        own = pg.sklearn.GPClassifier(random_state=state, **options)
        return caught(t, base, "fit", lambda: own.fit(X, Y))

    first, again, other = (seeded(k).given[2] for k in (1, 1, 2))
    assert first == again != other
    method = pg.Laplace()
    found = seeded(0, model=classifier, method=method, arguments={"link": "probit"})
    assert found.given[0] is classifier and found.given[1] is method
    assert found.named["link"] == "probit"


def estimator_draws(t):
    own = pg.sklearn.GPRegressor()
    seen = []

    def draw(seed, X, num):
        seen.append((seed, num))
        return SimpleNamespace(y=np.zeros((num, len(X))))

    own.fit_result_, own.n_features_in_ = SimpleNamespace(sample=draw, kwargs={}), 2
    for state in (1, 1, 2):
        assert own.sample_y(X[:3], 4, random_state=state).shape == (3, 4)
    assert seen[0] == seen[1] != seen[2] and seen[0][1] == 4


STORE = "test_store::test_"
SETTINGS = by("test_sklearn::test_parameters_are_kept_and_settings_of_the_method_have_names")
SKLEARN = "test_sklearn::test_"
PLOTS = "test_plots::test_"


ROWS: dict[str, dict[str, list]] = {
    "fit": {
        "rng_key": [keys_differ],
        "throw": [raised],
        "progress": [by(RUNS + "progress_is_drawn_on_stderr_when_asked")],
        "tables": [by("test_tables::test_a_table_is_remembered_where_the_user_says_so")],
    },
    "log_evidence": {
        "init": [by("test_map::test_a_warm_start_and_another_start_end_at_the_same_optimum")]
    },
    "compare": {
        "reference": [by("test_compare::test_another_reference")],
        **dict.fromkeys(("rng_key", "num_importance_samples"), [judged]),
    },
    "compare_models": {
        "prior": [by("test_compare_models::test_probabilities_are_those_of_the_exact_evidences")],
        "log_symmetry": [by("test_compare_models::test_symmetric_modes_are_counted")],
        "mixed": [by_slow("test_compare_models::test_what_is_not_comparable_is_refused")],
    },
    "cache": {"path": [by("test_cache::test_a_second_process_finds_what_the_first_compiled")]},
    "read": {"hyper": [by("test_reading::test_reads_the_prior_and_the_likelihood")]},
    "Fit.predict": {
        "link_approximation": [by("test_predict::test_mackay_approximation_is_prml_4_153")],
        "quantiles": [by("test_quantiles::test_shares_of_draws_below_are_the_levels")],
    },
    "Fit.log_density": dict.fromkeys(("num_draws", "with_error"), [scored]),
    "Fit.sample": dict.fromkeys(("rng_key", "num_samples"), [drawn]),
    "Fit.infer_latents": dict.fromkeys(
        ("rng_key", "num_samples", "num_proposals"), [latents_inferred]
    ),
    "Fit.to_datatree": {
        **dict.fromkeys(("num_draws", "rng_key"), [tree]),
        "whole": [by("test_whole_tree::test_prior_draws_are_the_priors")],
        "coords": [by("test_whole_tree::test_coordinates_that_fit_nothing_are_told")],
        "predictions": [
            by("test_predictions_tree::test_columns_that_are_no_variables_of_their_own")
        ],
        "pred_coords": [by_slow("test_predictions_tree::test_groups_names_and_numbers")],
    },
    "Fit.save": {
        "path": [
            by(
                "test_store::test_an_interrupted_or_impossible_write_leaves_no_file_and_the_old_one_whole"
            )
        ]
    },
    "load": {"path": [by("test_store::test_every_draw_is_kept")]},
    "GPClassifier.get_params": {"deep": [SETTINGS]},
    "GPRegressor.get_params": {"deep": [SETTINGS]},
    "GPClassifier": {
        **dict.fromkeys(("model", "method", "arguments", "random_state"), [estimator]),
        "kernel": [by(SKLEARN + "a_classifier_takes_weights_and_a_kernel")],
        "ard": [by(SKLEARN + "options_of_the_default_model_declare_it")],
    },
    "GPRegressor": {
        **dict.fromkeys(("model", "method", "arguments", "random_state"), [estimator]),
        **dict.fromkeys(
            ("kernel", "ard", "likelihood"),
            [by(SKLEARN + "options_of_the_default_model_declare_it")],
        ),
    },
    **dict.fromkeys(
        ("GPClassifier.fit", "GPClassifier.set_fit_request"),  # the second is scikit-learn's own
        {"sample_weight": [by(SKLEARN + "a_classifier_takes_weights_and_a_kernel")]},
    ),
    **dict.fromkeys(
        ("GPRegressor.fit", "GPRegressor.set_fit_request"),
        {"sample_weight": [by(SKLEARN + "a_weight_is_a_number_of_equal_rows")]},
    ),
    "GPRegressor.predict": dict.fromkeys(
        ("return_std", "return_cov", "quantiles"),
        [by(SKLEARN + "regressor_is_that_of_scikit_learn")],
    ),
    "GPRegressor.sample_y": dict.fromkeys(("n_samples", "random_state"), [estimator_draws]),
    "plot_surface": dict.fromkeys(("labels", "classes", "num"), [by(PLOTS + "surface")]),
    "plot_forest": dict.fromkeys(("site", "num_latents"), [by(PLOTS + "forest")]),
    "plot_predictions": {
        **dict.fromkeys(("X_new", "xlabel", "flabel", "observed"), [by(PLOTS + "band")]),
        **dict.fromkeys(
            ("along", "at", "units", "num"),
            [by(PLOTS + "a_slice_holds_the_other_inputs", PLOTS + "slices")],
        ),
    },
    "plot_effects": {"sites": [by(PLOTS + "effects_have_their_intervals")]},
    "sample_prior": dict.fromkeys(
        ("num_samples", "rng_key"), [by("test_sample_prior::test_draws_of_a_prior")]
    ),
    "Fit.plot": dict.fromkeys(("X", "y"), [by(PLOTS + "a_fit_draws_itself")]),
    "plot_components": {
        **dict.fromkeys(("along", "labels", "response"), [terms_drawn]),
        **dict.fromkeys(("at", "num"), [by("test_names::test_components_along_a_column")]),
    },
}
