"""Whether new rows have a covariance with the training rows."""

from collections.abc import Mapping

from ppl_gp.errors import ModelError
from ppl_gp.gp import GP
from ppl_gp.kernels.pairs import pair_fault


def unpaired(priors: Mapping[str, GP]) -> dict[str, str]:
    """{GP site whose kernel is no function of two rows: why}: it has a training covariance, and
    none with new rows.
    """
    faults = {k: pair_fault(prior.kernel, prior.X) for k, prior in priors.items()}
    return {k: fault for k, fault in faults.items() if fault is not None}


def require_pairs(faults: Mapping[str, str]) -> None:
    """Raise `ModelError` where new rows, or inducing points, have no covariance with the training
    rows.
    """
    for name, fault in faults.items():
        raise ModelError(
            f"the kernel of GP site '{name}' is no function k(X1, X2) -> (N1, N2) of any two "
            f"numbers of rows: {fault}. So other rows have no covariance with the training rows. "
            "Laplace, EP, VI and NUTS fit the model as it stands; f at the training rows is in "
            f"fit.latent['{name}']."
        )


def require_none_tied(sites: list[str], there: str = "fit.sites") -> None:
    """Raise `ModelError` where sites have an entry for each training row, and no others. `there`:
    where their posterior is.
    """
    if sites:
        raise ModelError(
            f"site(s) {sites} have an entry for each row of the data and covariances between "
            "them (a random walk, or a matrix, over the rows themselves), so that other rows have "
            "none of it. Declare a GP over inputs, pg.GP(kernel, X), or entries for all times "
            f"that rows index, z[time]. The posterior at the training rows is in {there}."
        )
