"""Versions of this package and of those that a result depends on."""

from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("ppl-gp", "jax", "numpyro", "numpy")


def package_versions() -> dict[str, str]:
    """{package: version}; "source" for a package that is imported without being installed."""
    return {name: _version(name) for name in _PACKAGES}


def _version(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "source"
