"""`hotbed models` names everything a run file may say."""

from hotbed.cli.models import models_command
from hotbed.models import MODELS, model_card


def test_lists_names_options_and_references(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    models_command()
    shown = capsys.readouterr().out
    for name in MODELS:
        assert f" {name} " in shown
        assert all(f"{option}=" in shown for option in model_card(name).options)
    assert "hidden=[128, 64]" in shown
    assert "batch_norm=false" in shown
    assert "second_hidden=null" in shown
    assert "arXiv 1703.04247" in shown
