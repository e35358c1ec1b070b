"""Random edits of the package, one at a time, and whether the default tests notice: `make mutants`.

    python tests/mutants.py 100 --seed 1 --seconds 150

Each mutant is one edit of the syntax tree of one file of `FOLDERS`, made in a copy of the tree: a
comparison turned round, + for -, a factor left out, another constant, a keyword argument left out,
a condition negated, any for all, the branches of `jnp.where` exchanged, a function that hands back
its argument. The test files that run are those of the mutated file's name, and those that `ALSO`
says of its folder, by their default marks. A mutant is caught where a test fails, where the package
no longer imports, or where the checks of types in `conftest.py` raise. What survives is printed as
a difference. The same seed makes the same mutants of the same code.
"""

import argparse
import ast
import difflib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("local", "sparse", "deep", "conjugate", "results", "infer")
LEFT_OUT = {".git", ".jax_cache", "__pycache__", ".pytest_cache", ".ruff_cache", "site", "dist"}
MOST = 4  # test files that a mutant is shown to
# files of tests whose name does not say what they exercise: {start of a path in ppl_gp: files}
ALSO = {
    "local/": ("test_evidence_formulas", "test_equivalence", "test_reference", "test_forms"),
    "local/ep": ("test_reference", "test_scales_and_statuses", "test_evidence_formulas"),
    "local/several": ("test_several_functions", "test_several_models", "test_modes"),
    "local/softmax": ("test_softmax_posterior", "test_several_functions"),
    "local/method": ("test_sparse_models", "test_option_checks"),
    "local/natural": ("test_forms", "test_equivalence", "test_several_functions"),
    "local/factor": ("test_predictor", "test_arrow", "test_gradients"),
    "sparse/": ("test_sparse", "test_sparse_models", "test_options_obeyed"),
    "sparse/features/": ("test_features",),
    "sparse/parts": ("test_arrow", "test_sparse_effects"),
    "sparse/families": ("test_arrow", "test_sparse", "test_sparse_models"),
    "sparse/expectation": ("test_sparse_functions", "test_sparse_models"),
    "sparse/own_effects": ("test_sparse_own", "test_sparse_effects"),
    "sparse/select": ("test_sparse", "test_sparse_models"),
    "sparse/process": ("test_sparse_functions", "test_part_draws"),
    "deep/": ("test_deep", "test_latent", "test_scales_and_statuses", "test_layer_results"),
    "deep/latents": ("test_latent", "test_elbo", "test_options_obeyed"),
    "mean_field/": ("test_mean_field", "test_mean_field_steps", "test_conjugacy"),
    "mean_field/paired": ("test_mean_field", "test_mean_field_steps", "test_mean_field_moments"),
    "mean_field/discrete": ("test_discrete_factors", "test_mean_field"),
    "mean_field/structure": ("test_mean_field_structure", "test_mean_field", "test_conjugacy"),
    "mean_field/forms": ("test_scales_and_statuses", "test_mean_field_forms"),
    "mean_field/sweep": ("test_mean_field", "test_mean_field_bad_input"),
    "results/": ("test_predict", "test_options_obeyed", "test_layer_results"),
    "results/compare/": ("test_compare", "test_compare_models", "test_truth"),
    "results/query/": ("test_predict", "test_declared", "test_names"),
    "results/store/": ("test_store", "test_saved_files"),
    "results/load": ("test_store", "test_saved_files"),
    "results/integrals/": ("test_predict", "test_quantiles", "test_layer_results"),
    "results/integrals/several": ("test_several", "test_predict"),
    "results/datatree": ("test_draws", "test_inference_data", "test_whole_tree"),
    "results/tree_groups": ("test_whole_tree", "test_inference_data"),
    "results/part": ("test_predictor", "test_part_draws", "test_part_mixtures"),
    "results/parts": ("test_predictor", "test_part_mixtures", "test_function_rows"),
    "results/loo": ("test_loo", "test_loo_labels", "test_loo_sparse"),
    "results/left_out": ("test_loo", "test_loo_sparse", "test_truth"),
    "results/symmetry": ("test_symmetry",),
    "results/fit": ("test_points",),
    "report/": ("test_plots", "test_names"),
    "results/slice": ("test_plots", "test_names"),
    "infer/": ("test_options_obeyed", "test_bad_input", "test_check"),
    "infer/svgp/": ("test_long_runs", "test_sparse_models", "test_options_obeyed"),
    "infer/hyper/": ("test_map", "test_grid", "test_options_obeyed", "test_hyper_guide"),
    "infer/hyper/point": ("test_map", "test_width"),
    "infer/hyper/grid": ("test_grid", "test_evidence_formulas"),
    "infer/hyper/sample": ("test_marginal", "test_samplers", "test_options_obeyed"),
    "infer/mcmc/": ("test_samplers", "test_elliptical", "test_options_obeyed"),
    "infer/chains": ("test_samplers", "test_interruption", "test_options_obeyed"),
    "infer/elbo/": ("test_elbo", "test_latent", "test_hyper_guide"),
    "infer/stochastic/": ("test_mean_field_steps",),
    "infer/mean_field": (
        "test_mean_field",
        "test_scales_and_statuses",
        "test_mean_field_bad_input",
    ),
    "infer/svi": ("test_svi", "test_options_obeyed"),
    "infer/sources": ("test_long_runs",),
    "infer/batches": ("test_long_runs",),
    "infer/stream_source": ("test_long_runs",),
    "infer/checklist/": ("test_check",),
    "infer/local": ("test_joint_mode", "test_without_gp"),
    "infer/probes/": ("test_bad_input", "test_check", "test_declared"),
    "runtime": ("test_interruption", "test_ctrl_c"),
    "infer/approximate": ("test_sparse_models", "test_elbo", "test_hyper_guide"),
}
SWAPPED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE}
SWAPPED |= {ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And}
SWAPPED |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
PAIRS = {"any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
PAIRS |= {"min": "max", "max": "min", "argmin": "argmax", "argmax": "argmin"}


class Mutant(NamedTuple):
    """One edit: a file below `ppl_gp`, what was done at which line, and the texts."""

    file: str
    line: int
    kind: str
    before: str
    text: str


def edits(tree: ast.Module) -> list:
    """(node, kind, edit): every edit that this file can have. `edit()` changes the tree."""
    found = []
    for node in ast.walk(tree):
        found += list(_edits_of(node))
    return found


def _edits_of(node):
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        yield node, "+ and -", lambda: setattr(node, "op", SWAPPED[type(node.op)]())
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
        yield node, "a factor left out", lambda: _become(node, node.left)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        yield node, "a comparison", lambda: node.ops.__setitem__(0, SWAPPED[type(node.ops[0])]())
    if isinstance(node, ast.BoolOp):
        yield node, "and, or", lambda: setattr(node, "op", SWAPPED[type(node.op)]())
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield node, "a constant", lambda: setattr(node, "value", _other(node.value))
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield node, "a truth value", lambda: setattr(node, "value", not node.value)
    if isinstance(node, ast.If | ast.IfExp):
        negated = ast.UnaryOp(ast.Not(), node.test)
        yield node, "a condition negated", lambda: setattr(node, "test", negated)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not | ast.Invert):
        yield node, "a sign left out", lambda: _become(node, node.operand)
    if isinstance(node, ast.Attribute) and node.attr in PAIRS:
        yield node, "any, all; min, max", lambda: setattr(node, "attr", PAIRS[node.attr])
    if isinstance(node, ast.Name) and node.id in PAIRS:
        yield node, "any, all; min, max", lambda: setattr(node, "id", PAIRS[node.id])
    if isinstance(node, ast.Call):
        yield from _edits_of_call(node)


def _edits_of_call(node: ast.Call):
    for i, keyword in enumerate(node.keywords):
        if keyword.arg not in (None, "strict"):  # which changes nothing of what is right
            yield node, "a keyword argument left out", lambda i=i: node.keywords.pop(i)
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name == "where" and len(node.args) == 3:
        turned = [node.args[0], node.args[2], node.args[1]]
        yield node, "where turned round", lambda: setattr(node, "args", turned)
    if name in ("stop_gradient", "abs", "sqrt", "log", "exp", "square") and len(node.args) == 1:
        yield node, f"{name} left out", lambda: _become(node, node.args[0])


def _become(node: ast.AST, other: ast.AST) -> None:
    node.__class__ = other.__class__  # pyright: ignore[reportAttributeAccessIssue]
    node.__dict__ = dict(other.__dict__)


def _other(value):
    return value + 1 if isinstance(value, int) else 2.0 * value if value else 1.0


def is_code(node: ast.AST, told: set[int]) -> bool:
    """Not in a docstring, a message or an annotation."""
    return hasattr(node, "lineno") and id(node) not in told


def told_only(tree: ast.Module) -> set[int]:
    """Nodes of annotations, decorators, error messages, warnings and the like."""
    found: set[int] = set()
    for node in ast.walk(tree):
        parts: list = []
        if isinstance(node, ast.FunctionDef):
            each = [*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs]
            parts = [a.annotation for a in each] + [node.returns, *node.decorator_list]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation, node.value]  # a default is a choice, and no formula
        elif isinstance(node, ast.Raise):
            parts = [node.exc]
        elif isinstance(node, ast.JoinedStr):
            parts = [node]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "cast"):
            parts = [node]
        for part in filter(None, parts):
            found |= {id(x) for x in ast.walk(part)}
    return found


def mutants(num: int, seed: int, folders=FOLDERS) -> list[Mutant]:
    """`num` edits, each of a place drawn anew: a file by the number of its places."""
    rng, sites = random.Random(seed), []
    for path in sorted(p for f in folders for p in (ROOT / "ppl_gp" / f).rglob("*.py")):
        tree = ast.parse(path.read_text())
        told = told_only(tree)
        places = [i for i, (node, *_) in enumerate(edits(tree)) if is_code(node, told)]
        sites += [(path, i) for i in places]
    chosen = rng.sample(sites, min(num, len(sites)))
    return [_mutant(path, i) for path, i in chosen]


def _mutant(path: Path, which: int) -> Mutant:
    """By the lines that the edit changes; the others stay as they are written."""
    before = path.read_text()
    tree = ast.parse(before)
    node, kind, edit = edits(tree)[which]
    statement = _statement_of(tree, node)
    first, last, indent = statement.lineno, statement.end_lineno, statement.col_offset
    edit()
    ast.fix_missing_locations(tree)
    new = ast.unparse(statement)
    lines = before.splitlines()
    head = lines[first - 1][:indent]
    written = [head + new.splitlines()[0], *(" " * indent + x for x in new.splitlines()[1:])]
    text = "\n".join([*lines[: first - 1], *written, *lines[last:]]) + "\n"
    file, line = str(path.relative_to(ROOT / "ppl_gp")), getattr(node, "lineno", first)
    return Mutant(file, line, kind, before, text)


def _statement_of(tree: ast.Module, node: ast.AST) -> ast.stmt:
    """The innermost statement around a node."""
    found = None
    for statement in ast.walk(tree):
        if isinstance(statement, ast.stmt) and any(x is node for x in ast.walk(statement)):
            found = statement  # a walk goes from the outside in
    assert found is not None
    return found


def tests_for(file: str, most: int = MOST) -> list[str]:
    """Test files by name, then those that `ALSO` says of the longest start of the path."""
    stem = file.removesuffix(".py")
    named = [f"test_{stem.rpartition('/')[2]}"]
    starts = sorted((s for s in ALSO if stem.startswith(s)), key=len, reverse=True)
    wanted = [*named, *(name for s in starts for name in ALSO[s])]
    there = {path.stem: str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    return [there[n] for n in dict.fromkeys(wanted) if n in there][:most]


def preload() -> None:
    """What every test imports, but for the package: a child of this process has it already."""
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
    os.environ |= {"JAX_ENABLE_X64": "true", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):  # as in conftest.py
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_fusion_emitters=false"
    import arviz_base  # noqa: F401
    import equinox  # noqa: F401
    import jax  # noqa: F401
    import numpyro  # noqa: F401
    import numpyro.infer.autoguide  # noqa: F401
    import optax  # noqa: F401
    import optimistix  # noqa: F401
    import pandas  # noqa: F401
    import pytest  # noqa: F401
    import scipy.stats  # noqa: F401
    import sklearn  # noqa: F401


class Told(NamedTuple):
    """How the tests of a mutant ended, and the first that failed."""

    status: str  # caught, survived, timed out
    test: str | None


def outcome(tree: Path, tests: list[str], seconds: float, but: set[str] = frozenset()) -> Told:
    """Of tests in a copy of the tree, by a child of this process."""
    note = tree / ".first_failure"
    note.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _child(tree, [*tests, *(f"--deselect={name}" for name in sorted(but))], note)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            passed = os.waitstatus_to_exitcode(status) in (0, 5)  # 5: nothing was left to run
            test = note.read_text() if note.exists() else None
            return Told("survived" if passed else "caught", test)
        time.sleep(0.2)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return Told("timed out", None)


class FirstFailure:
    """A plugin of pytest that writes down what failed first."""

    def __init__(self, note: Path):
        self.note = note

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.note.write_text(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


def _child(tree: Path, tests: list[str], note: Path):
    os.setpgid(0, 0)
    os.chdir(tree)
    sys.path[:0] = [str(tree)]
    os.environ["PYTHONPATH"] = str(tree)  # of processes that the tests start
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    import pytest

    options = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
    os._exit(int(pytest.main([*options, *tests], plugins=[FirstFailure(note)])))


class Judge:
    """Runs the tests of mutants; a test that fails without the mutant too catches nothing."""

    def __init__(self, tree: Path, seconds: float, most: int = MOST):
        self.tree, self.seconds, self.most = tree, seconds, most
        self.sound: set[str] = set()
        self.unsound: set[str] = set()
        alone = outcome(tree, ["tests/edges/test_import_layers.py"], seconds)
        if alone.status != "survived":
            raise SystemExit("the tests do not even start without a mutant: run `make test`")

    def judge(self, mutant: Mutant) -> Told:
        path = self.tree / "ppl_gp" / mutant.file
        before = path.read_text()
        while True:
            path.write_text(mutant.text)
            tests = tests_for(mutant.file, self.most)
            told = outcome(self.tree, tests, self.seconds, self.unsound)
            path.write_text(before)
            if told.status != "caught" or told.test is None or self._is_sound(told.test):
                return told

    def _is_sound(self, test: str) -> bool:
        if "::" not in test:  # a file that no longer imports
            return True
        if test not in self.sound:
            alone = outcome(self.tree, [test], self.seconds)
            (self.sound if alone.status == "survived" else self.unsound).add(test)
        return test in self.sound


def copied(folder: Path) -> Path:
    """The tree without what is built."""
    tree = folder / "tree"

    def ignored(_, names):
        return [n for n in names if n in LEFT_OUT or n.startswith(".venv")]

    shutil.copytree(ROOT, tree, ignore=ignored)
    return tree


def difference(mutant: Mutant) -> str:
    """In the words of `diff`."""
    texts = mutant.before.splitlines(), mutant.text.splitlines()
    found = difflib.unified_diff(*texts, n=0, lineterm="")
    return "\n".join(x for x in list(found)[2:] if not x.startswith("@@"))


def main(arguments=None) -> int:
    """Print the score; 1 where fewer than 85 of 100 that were settled are caught."""
    ask = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ask.add_argument("num", type=int, nargs="?", default=100)
    ask.add_argument("--seed", type=int, default=0)
    ask.add_argument("--seconds", type=float, default=300.0, help="for the tests of one mutant")
    ask.add_argument("--files", type=int, default=MOST, help="test files for one mutant, at most")
    ask.add_argument("--first", type=int, default=0, help="leave out those before this one")
    ask.add_argument("--dry", action="store_true", help="print the mutants and run nothing")
    given = ask.parse_args(arguments)
    chosen = list(enumerate(mutants(given.num, given.seed)))[given.first :]
    if given.dry:
        for i, mutant in chosen:
            print(i, mutant.file, mutant.line, mutant.kind, *tests_for(mutant.file))
            print(difference(mutant))
        return 0
    preload()
    counts = dict.fromkeys(("caught", "survived", "timed out"), 0)
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(copied(Path(folder)), given.seconds, given.files)
        for i, mutant in chosen:
            began = time.monotonic()
            told = judge.judge(mutant)
            counts[told.status] += 1
            by = f" by {told.test}" if told.test else ""
            took = f"{time.monotonic() - began:.0f} s"
            place = f"{i} {mutant.file}:{mutant.line}"
            print(f"{told.status}: {place} ({mutant.kind}){by}, {took}", flush=True)
            if told.status == "survived":
                ran = " ".join(tests_for(mutant.file, given.files))
                print(difference(mutant), f"  ran {ran}", sep="\n")
            sys.stdout.flush()
        if judge.unsound:
            print(f"left out, as they fail without a mutant: {sorted(judge.unsound)}")
    caught, total = counts["caught"], sum(counts.values())
    late = counts["timed out"]
    print(f"{caught} of {total} caught, {late} not settled in time (seed {given.seed})")
    return int(caught < 0.85 * (total - late))


if __name__ == "__main__":
    sys.exit(main())
