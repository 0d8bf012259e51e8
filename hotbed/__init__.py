"""hotbed: click-through-rate and recommendation models with embedding tables of any size, exact on every device."""
