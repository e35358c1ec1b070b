"""`hyper=Fixed({...})`: the hyperparameters at values that the user gives."""

from ppl_gp.hyperparameters import Fixed
from ppl_gp.infer.hyper.choice import LocalProblem, infer_hyper
from ppl_gp.infer.hyper.given import fixed_values
from ppl_gp.infer.hyper.point import fit_at, point_at
from ppl_gp.results.fit import Fit


@infer_hyper.register
def _fit_fixed(hyper: Fixed, problem: LocalProblem) -> Fit:
    values = fixed_values(hyper, problem.names, problem.model, problem.args, problem.kwargs)
    return fit_at(problem, point_at(problem, values))
