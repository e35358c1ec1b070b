"""XLA's own log, before JAX is imported, which reads its level then.

jaxlib 0.9 writes two lines of a thousand characters for every program that it finds in its cache on
disk, about processor features that are preferences and no instructions. Its errors reach Python as
exceptions all the same.
"""

import os
from importlib.metadata import version

if version("jaxlib").startswith("0.9."):
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
