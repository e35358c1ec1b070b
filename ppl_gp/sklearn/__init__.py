"""Declared models as scikit-learn estimators: `GPClassifier` and `GPRegressor`.

`pg.sklearn` is imported where it is asked for, as scikit-learn is an optional package.
"""

from ppl_gp.errors import MissingPackageError

try:
    from sklearn.utils.validation import validate_data as _needed  # scikit-learn 1.6
except ImportError as error:
    raise MissingPackageError(
        "ppl_gp.sklearn needs scikit-learn, version 1.6 or newer; pip install 'ppl-gp[sklearn]'."
    ) from error

from ppl_gp.sklearn.estimators import GPClassifier, GPRegressor

del _needed

__all__ = ["GPClassifier", "GPRegressor"]
