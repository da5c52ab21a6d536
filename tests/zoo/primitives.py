"""Prints the primitives of each model's forward: `python -m tests.zoo.primitives [MODEL ...]`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

from tests.zoo import MODELS, Zoo
from tests.zoo.reference import first


def traced(zoo: Zoo) -> Any:
    """The jaxpr of the loss, at the shapes of the whole batch."""
    key = jax.random.key(0)
    params = jax.eval_shape(lambda: first(zoo.init, key))
    carried = [jax.eval_shape(lambda: first(zoo.carried, key))] if zoo.carried else []
    return jax.make_jaxpr(zoo.loss)(params, dict(zoo.batch), key, *carried)


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of all that it calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def primitives(zoo: Zoo) -> Counter[str]:
    return Counter(eqn.primitive.name for eqn in equations(traced(zoo).jaxpr))


def main(names: list[str]) -> None:
    every: Counter[str] = Counter()
    for name in names:
        found = primitives(MODELS[name]())
        every.update(dict.fromkeys(found, 1))
        print(f"{name} ({len(found)}): {' '.join(f'{primitive}*{n}' for primitive, n in sorted(found.items()))}\n")
    print(f"all ({len(every)}), with the number of models: {' '.join(f'{p}*{n}' for p, n in sorted(every.items()))}")


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main(sys.argv[1:] or list(MODELS))
