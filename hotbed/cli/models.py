"""`hotbed models`: the models that can be trained, with their options and where they come from."""

from __future__ import annotations

from hotbed.cli.options import AsJson


def models_command(as_json: AsJson = False) -> None:
    """List the models: what they do, table width, options with defaults, reference.

    [bold]For example:[/bold]

    hotbed models
    """
    from rich.table import Table

    from hotbed.cli.console import out, print_json
    from hotbed.models import ALL_MODELS, model_card, own_names, read_source

    if as_json:
        cards = [model_card(name)._asdict() for name in ALL_MODELS]
        print_json({"models": cards, "own": {name: read_source(name).name for name in own_names()}})
        return
    table = Table(title="Models (hotbed train --model NAME)", show_lines=True)
    for heading in ("name", "what it is", "row width", "options", "reference"):
        table.add_column(heading, no_wrap=heading in ("name", "row width", "options"), overflow="fold")
    for name in ALL_MODELS:
        card = model_card(name)
        options = "\n".join(f"{option}={_shown(default)}" for option, default in card.options.items())
        table.add_row(card.name, card.summary, card.width, options or "-", card.reference)
    out().print(table)
    for name in own_names():
        out().print(f"{name}: {read_source(name).name}, from an installed package")
    out().print("a model of your own: --model my_model.py:MyModel (docs/own-models.md)")


def _shown(value: object) -> str:
    """A default as a run file would write it."""
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
