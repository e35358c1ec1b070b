"""The architecture as a test: imports go one way, one file factorises matrices, importing computes
nothing.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "ppl_gp"
FILES = sorted(ROOT.rglob("*.py"))
# A layer imports from those before it, and from itself. The layer of a file is the longest name
# here that its path begins with: a folder, or a file that stands between two folders. (`infer`
# returns a `Fit`, which `results` defines.)
LAYERS = [
    "native_logs",
    "errors",
    "frames",
    "runtime",
    "quick",
    "numerics",
    "kernels",
    "means",
    "observations",
    "priors",
    "gp",
    "reading",
    "settings",
    "local",
    "sparse",
    "mean_field",
    "deep",
    "posterior",
    "kept",
    "draws",
    "results.store.archive",
    "results.record",
    "results.part_draws",
    "results.query",
    "results.integrals",
    "results.parts",
    "results.predict",
    "results.tree_groups",
    "results.symmetry",
    "results.datatree",
    "results.left_out",
    "results.loo",
    "results.store",
    "results.fit",
    "results.load",
    "results.compare",
    "report",
    "infer.sources",
    "infer.stream_source",
    "infer.batches",
    "infer.maximised",
    "infer.probes",
    "infer.fit",
    "infer.chains",
    "infer.mcmc.nuts",
    "infer.hyper",
    "infer.local",
    "infer.svgp",
    "infer.mcmc",
    "infer.approximate",
    "infer.elbo",
    "infer.svi",
    "mean_field.batches",
    "mean_field.method",
    "infer.checklist",
    "sklearn",
    "cli",
]
FACTORISATIONS = {"cholesky", "cho_factor", "triangular_solve", "solve_triangular"}
ARRAY_MODULES = ("jax.numpy", "jax.lax", "jax.random", "jax.scipy", "jax.nn")


def parts(path):
    return path.relative_to(ROOT.parent).with_suffix("").parts


def imported(tree):
    """(module, name or None) of every import in a file, wherever it stands, and the names that are
    bound by it.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None, alias.asname or alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (
                (node.module, alias.name, alias.asname or alias.name) for alias in node.names
            )


def layer_of(module):
    """The longest name of LAYERS that a module's name begins with, `None` for the package
    itself.
    """
    inside = module.split(".")[1:]
    return next(
        (n for i in range(len(inside), 0, -1) if (n := ".".join(inside[:i])) in LAYERS), None
    )


def layers_imported(tree):
    for module, name, _ in imported(tree):
        if module.split(".")[0] == "ppl_gp":
            yield layer_of(f"{module}.{name}" if name else module)


@pytest.fixture(params=FILES, ids=lambda path: "/".join(parts(path)))
def source(request):
    return request.param, ast.parse(request.param.read_text())


def test_imports_go_one_way(source):
    path, tree = source
    if path == ROOT / "__init__.py":
        return
    if path.name == "__init__.py" and path.read_text().strip() == "":
        return
    layer = layer_of(".".join(parts(path)).removesuffix(".__init__"))
    assert layer in LAYERS, f"{'/'.join(parts(path))} has no place in LAYERS"
    above = sorted(
        x for x in set(layers_imported(tree)) if x and LAYERS.index(x) > LAYERS.index(layer)
    )
    assert not above, f"{path.name} (layer {layer}) imports {above}"


def test_results_see_of_mean_field_its_protocol(source):
    path, tree = source
    if (
        not {"results", "infer"} & set(parts(path)) or path.name == "likelihood.py"
    ):  # a check asks it
        return
    seen = {module for module, *_ in imported(tree) if "mean_field" in module}
    assert seen <= {"ppl_gp.mean_field.family"}


def test_every_layer_is_there():
    for layer in LAYERS:
        path = ROOT.joinpath(*layer.split("."))
        assert path.is_dir() or path.with_suffix(".py").is_file(), layer


def test_one_file_factorises(source):
    path, tree = source
    if parts(path)[1:] == ("numerics", "linalg"):
        return
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = {name for module, name, _ in imported(tree) if module != "ppl_gp.numerics.linalg"}
    assert not FACTORISATIONS & (attributes | names), (
        f"{path.name}: take factors and solves from ppl_gp.numerics.linalg"
    )


def run_at_import(node):
    """Every node that importing a file evaluates: all but the bodies of functions."""
    yield node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        children = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
    elif isinstance(node, ast.Lambda):
        children = [*node.args.defaults]
    else:
        children = ast.iter_child_nodes(node)
    for child in children:
        yield from run_at_import(child)


def test_no_array_function_is_called_at_import(source):
    path, tree = source
    bound = {
        alias: f"{module}.{name}" if name else module
        for module, name, alias in imported(tree)
        if f"{module}.{name}".startswith(ARRAY_MODULES)
    }
    for node in run_at_import(tree):
        if isinstance(node, ast.Call):
            root = ast.unparse(node.func).split(".")[0]
            assert root not in bound, (
                f"{path.name}:{node.lineno} calls {ast.unparse(node.func)} at import"
            )


def test_importing_starts_no_backend():
    # With a platform that does not exist, the first array of any kind would raise.
    environment = os.environ | {"JAX_PLATFORMS": "none_such"}
    done = subprocess.run(
        [sys.executable, "-c", "import ppl_gp"],
        env=environment,
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_checks_can_fail():
    tree = ast.parse(
        "from jax import numpy as jnp\nclass A:\n    x = jnp.zeros(3)\ndef f(y=jnp.ones(2)):\n   "
        " jnp.eye(2)\n"
    )
    calls = [ast.unparse(node) for node in run_at_import(tree) if isinstance(node, ast.Call)]
    assert calls == ["jnp.zeros(3)", "jnp.ones(2)"]
    tree = ast.parse(
        "def f():\n    from ppl_gp.infer.fit import fit\n    from ppl_gp.results import compare\n"
    )
    assert list(layers_imported(tree)) == ["infer.fit", "results.compare"]
