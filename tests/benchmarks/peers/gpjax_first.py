"""GPJax's first answer: the sparse benchmark's SVGP, trained by Adam on all data."""

from first import engine, main
from gpjax_svgp import Engine, __version__

if __name__ == "__main__":
    main("GPJax", __version__, *engine(Engine))
