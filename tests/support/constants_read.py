"""How a model can read a constant: {way: (a notebook's cell that leaves `model(x)`, a second cell
that changes the constant)}. There is a module `settings`, with `C` and `inner.C`.
"""

_CLASS = "class Object:\n    {}\n"
_INIT = "def __init__(self, c):\n        self.c = c\n    "

WAYS = {
    "global": ("c = 1.0\ndef model(x):\n    return x * c", "c = 2.0"),
    "global of another type": ("c = 2\ndef model(x):\n    return x / c", "c = 3.0"),
    "global of a helper": (
        "c = 1.0\ndef helper(x):\n    return x * c\ndef model(x):\n    return helper(x)",
        "c = 2.0",
    ),
    "helper": (
        "def helper(x):\n    return x + 1.0\ndef model(x):\n    return helper(x)",
        "def helper(x):\n    return x + 2.0",
    ),
    "global of a lambda inside": (
        "c = 1.0\ndef model(x):\n    return (lambda t: t * c)(x)",
        "c = 2.0",
    ),
    "closure": (
        "def make(c):\n    def model(x):\n        return x * c\n    return model\n"
        "model = make(1.0)",
        "model = make(2.0)",
    ),
    "closure that is rebound": (
        "def make(c):\n    def model(x):\n        return x * c\n    def change(new):\n"
        "        nonlocal c\n        c = new\n    return model, change\nmodel, change = make(1.0)",
        "change(2.0)",
    ),
    "closure of a helper": (
        "def make(c):\n    return lambda x: x * c\nhelper = make(1.0)\n"
        "def model(x):\n    return helper(x)",
        "helper = make(2.0)",
    ),
    "default": ("def model(x, c=1.0):\n    return x * c", "model.__defaults__ = (2.0,)"),
    "default by keyword": (
        "def model(x, *, c=1.0):\n    return x * c",
        "model.__kwdefaults__['c'] = 2.0",
    ),
    "default of a helper": (
        "def helper(x, c=1.0):\n    return x * c\ndef model(x):\n    return helper(x)",
        "helper.__defaults__ = (2.0,)",
    ),
    "dictionary": ("c = {'a': [1.0]}\ndef model(x):\n    return x * c['a'][0]", "c['a'][0] = 2.0"),
    "set": ("c = {'a'}\ndef model(x):\n    return x * len(c)", "c.add('b')"),
    "named tuple": (
        "from typing import NamedTuple\nclass C(NamedTuple):\n    c: float\nc = C(1.0)\n"
        "def model(x):\n    return x * c.c",
        "c = C(2.0)",
    ),
    "data class": (
        "from dataclasses import dataclass\n@dataclass\nclass C:\n    c: float\nc = C(1.0)\n"
        "def model(x):\n    return x * c.c",
        "c.c = 2.0",
    ),
    "data class with slots": (
        "from dataclasses import dataclass\n@dataclass(slots=True)\nclass C:\n    c: float\n"
        "c = C(1.0)\ndef model(x):\n    return x * c.c",
        "c.c = 2.0",
    ),
    "namespace": (
        "from types import SimpleNamespace\nc = SimpleNamespace(a=SimpleNamespace(b=1.0))\n"
        "def model(x):\n    return x * c.a.b",
        "c.a.b = 2.0",
    ),
    "enumeration": (
        "from enum import Enum\nclass E(Enum):\n    A = 1.0\n    B = 2.0\nc = E.A\n"
        "def model(x):\n    return x * c.value",
        "c = E.B",
    ),
    "object": (
        _CLASS.format(_INIT) + "c = Object(Object(1.0))\ndef model(x):\n    return x * c.c.c",
        "c.c.c = 2.0",
    ),
    "object that knows its owner": (
        _CLASS.format(_INIT)
        + "c = Object(1.0)\nc.back = Object(c)\ndef model(x):\n    return x * c.c",
        "c.c = 2.0",
    ),
    "attribute behind a descriptor": (
        "class Checked:\n    def __set_name__(self, owner, name):\n        self.name = name\n"
        "    def __get__(self, obj, owner=None):\n        return obj.__dict__[self.name]\n"
        "    def __set__(self, obj, value):\n        obj.__dict__[self.name] = value\n"
        + _CLASS.format("c = Checked()\n    " + _INIT)
        + "c = Object(1.0)\nc.other = 0.0\ndef model(x):\n    return x * c.c",
        "c.c = 2.0",
    ),
    "attribute of a class": (
        _CLASS.format("c = 1.0") + "def model(x):\n    return x * Object.c",
        "Object.c = 2.0",
    ),
    "attribute of a class above": (
        _CLASS.format("c = 1.0") + "class Lower(Object):\n    pass\n"
        "def model(x):\n    return x * Lower().c",
        "Object.c = 2.0",
    ),
    "global of a property": (
        "c = 1.0\n"
        + _CLASS.format("@property\n    def c(self):\n        return c")
        + "o = Object()\ndef model(x):\n    return x * o.c",
        "c = 2.0",
    ),
    "global of a static method": (
        "c = 1.0\n"
        + _CLASS.format("@staticmethod\n    def f(x):\n        return x * c")
        + "def model(x):\n    return Object.f(x)",
        "c = 2.0",
    ),
    "bound method": (
        _CLASS.format(_INIT + "def model(self, x):\n        return x * self.c")
        + "o = Object(1.0)\nmodel = o.model",
        "o.c = 2.0",
    ),
    "callable object": (
        _CLASS.format(_INIT + "def __call__(self, x):\n        return x * self.c['a']")
        + "model = Object({'a': 1.0})",
        "model.c['a'] = 2.0",
    ),
    "argument of a partial": (
        "from functools import partial\nc = [1.0]\nmodel = partial(lambda c, x: c[0] * x, c)",
        "c[0] = 2.0",
    ),
    "keyword of a partial": (
        "from functools import partial\nmodel = partial(lambda x, c: c * x, c=1.0)",
        "model = partial(model.func, c=2.0)",
    ),
    "attribute of the function": (
        "def model(x):\n    return x * model.c\nmodel.c = 1.0",
        "model.c = 2.0",
    ),
    "module": ("import settings\ndef model(x):\n    return x * settings.C", "settings.C = 2.0"),
    "module in a module": (
        "import settings\ndef model(x):\n    return x * settings.inner.C",
        "settings.inner.C = 2.0",
    ),
    "module in an object": (
        "import settings\n" + _CLASS.format(_INIT) + "o = Object(settings)\n"
        "def model(x):\n    return x * o.c.C",
        "settings.C = 2.0",
    ),
    "name that a module gave": (
        "from settings import C\ndef model(x):\n    return x * C",
        "C = 2.0",
    ),
    "import inside of the function": (
        "def model(x):\n    from settings import C\n    return x * C",
        "import settings\nsettings.C = 2.0",
    ),
    "module that is imported inside of the function": (
        "def model(x):\n    import settings as s\n    return x * s.C",
        "import settings\nsettings.C = 2.0",
    ),
    "NumPy array": (
        "import numpy as np\nc = np.ones(3)\ndef model(x):\n    return x * c.sum()",
        "c[1] = 2.0",
    ),
    "JAX array": (
        "import jax.numpy as jnp\nc = jnp.ones(3)\ndef model(x):\n    return x * c.sum()",
        "c = c.at[1].set(2.0)",
    ),
    "Equinox module": (
        "import equinox as eqx\nclass M(eqx.Module):\n    c: float\nm = M(1.0)\n"
        "def model(x):\n    return x * m.c",
        "m = M(2.0)",
    ),
    "distribution": (
        "import numpyro.distributions as dist\np = dist.Normal(1.0, 1.0)\n"
        "def model(x):\n    return x * p.mean",
        "p = dist.Normal(2.0, 1.0)",
    ),
    "pandas frame": (
        "import pandas as pd\nd = pd.DataFrame({'a': [1.0, 2.0]})\n"
        "def model(x):\n    return x * float(d['a'].sum())",
        "d.loc[0, 'a'] = 9.0",
    ),
    "decimal": (
        "from decimal import Decimal\nc = Decimal('1')\ndef model(x):\n    return x * float(c)",
        "c = Decimal('2')",
    ),
    "functions in a dictionary": (
        "c = 1.0\nlinks = {'a': lambda x: x * c}\ndef model(x):\n    return links['a'](x)",
        "c = 2.0",
    ),
    "decorated helper": (
        "import functools\nc = 1.0\ndef twice(f):\n    @functools.wraps(f)\n"
        "    def inner(x):\n        return f(f(x))\n    return inner\n"
        "@twice\ndef helper(x):\n    return x + c\ndef model(x):\n    return helper(x)",
        "c = 2.0",
    ),
    "helper under vmap": (
        "import jax, jax.numpy as jnp\nc = 1.0\nhelper = jax.vmap(lambda x: x * c)\n"
        "def model(x):\n    return helper(jnp.ones(2) * x).sum()",
        "c = 2.0",
    ),
    "object that cannot be read": (
        _CLASS.format(_INIT + "def __reduce_ex__(self, protocol):\n        raise TypeError")
        + "o = Object(1.0)\ndef model(x):\n    return x * o.c",
        "o = Object(2.0)",
    ),
    "object with parts that cannot be read": (
        "import threading\n"
        + _CLASS.format(_INIT)
        + "o = Object(1.0)\no.lock = threading.Lock()\ndef model(x):\n    return x * o.c",
        "o.c = 2.0",
    ),
    "default of a dictionary": (
        "from collections import defaultdict\nc = defaultdict(lambda: 1.0)\n"
        "def model(x):\n    return x * c['a']",
        "c = defaultdict(lambda: 2.0)",
    ),
    "unit of an array": (
        "import numpy as np\nclass Lengths(np.ndarray):\n    pass\n"
        "c = np.ones(2).view(Lengths)\nc.unit = 1.0\ndef model(x):\n    return x * c.unit",
        "c.unit = 2.0",
    ),
}
BY_IDENTITY = {"object that cannot be read", "object with parts that cannot be read"}
