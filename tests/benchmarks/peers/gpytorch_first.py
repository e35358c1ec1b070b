"""GPyTorch's first answer: the sparse benchmark's SVGP, trained by Adam on all data."""

import gpytorch
from first import engine, main
from gpytorch_svgp import Engine

if __name__ == "__main__":
    main("GPyTorch", gpytorch.__version__, *engine(Engine))
