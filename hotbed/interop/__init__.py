"""Weights from and to other libraries (state.py), and a callback for Lightning's trainer (lightning.py; docs/interop.md)."""

from hotbed.interop.state import STYLES, Place, Style, load_state_dict, state_dict, tables_of

__all__ = ["STYLES", "Place", "Style", "load_state_dict", "state_dict", "tables_of"]
