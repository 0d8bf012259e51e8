"""The kinds of click logs that can be made up, by name."""

from __future__ import annotations

from hotbed.data.synthetic.avazu import AVAZU
from hotbed.data.synthetic.criteo import CRITEO
from hotbed.data.synthetic.criteo_1tb import CRITEO_1TB, CRITEO_1TB_BAGS
from hotbed.data.synthetic.shape import Shape
from hotbed.errors import ConfigError

SHAPES = {shape.name: shape for shape in (CRITEO, CRITEO_1TB, CRITEO_1TB_BAGS, AVAZU)}


def find_shape(name: str) -> Shape:
    """The shape of that name."""
    if name not in SHAPES:
        raise ConfigError(f"{name!r} cannot be made; {', '.join(SHAPES)} can.")
    return SHAPES[name]
