"""Options from a run file: converted, or refused with every mistake at once."""

import pytest

from hotbed.errors import ConfigError
from hotbed.models import MODELS, build_model, check_model, model_card


def build(name, **options):
    return build_model(name, num_features=3, dim=4, num_dense=2, options=options)


def test_values_take_the_declared_type():
    options = {"hidden": [40, 20], "dropout": 0, "batch_norm": True, "activation": "tanh"}
    assert check_model("dnn", options) == {**options, "hidden": (40, 20), "dropout": 0.0}
    assert check_model("dnn", {"hidden": 64}) == {"hidden": (64,)}
    assert check_model("finalmlp", {"second_hidden": None, "context": []}) == {"second_hidden": None, "context": ()}


def test_unknown_model_lists_the_known():
    with pytest.raises(ConfigError, match=r"'deepfn'.*lr, fm, dnn, wide_deep, deepfm, dlrm, dcnv2, autoint, finalmlp"):
        build("deepfn")


def test_unknown_option_lists_the_known_and_guesses():
    with pytest.raises(ConfigError, match=r"no option 'hiden'; it has hidden=\(128, 64\), dropout=0.0.*'hidden'\?"):
        build("dnn", hiden=[3])
    with pytest.raises(ConfigError, match="no options"):
        build("lr", hidden=[3])


def test_all_mistakes_in_one_message():
    with pytest.raises(ConfigError) as caught:
        build("dcnv2", dropout=1.0, hidden=[8, 0], structure="crossed", num_cross="two", low_rank=-1, batch_norm=1)
    lines = str(caught.value).splitlines()
    assert len(lines) == 6
    assert all(line.startswith("model 'dcnv2': option ") for line in lines)
    assert "at least 0 and less than 1" in lines[0]
    assert "one of 'parallel', 'stacked'" in lines[2]


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("dnn", "hidden", "wide"),
        ("dnn", "hidden", [1.5]),
        ("dnn", "hidden", [True]),
        ("dnn", "hidden", None),
        ("dnn", "dropout", float("nan")),
        ("dnn", "dropout", "0.1"),
        ("dnn", "dropout", True),
        ("dnn", "dropout", -0.1),
        ("dnn", "batch_norm", "yes"),
        ("dnn", "activation", "reluu"),
        ("dnn", "activation", ["relu"]),
        ("dcnv2", "num_cross", 0),
        ("autoint", "num_heads", True),
        ("finalmlp", "second_dropout", 2),
        ("finalmlp", "context", [-1]),
    ],
)
def test_bad_value_names_option_and_value(name, option, value):
    with pytest.raises(ConfigError, match=f"option '{option}' is .*must be"):
        build(name, **{option: value})


def test_options_that_contradict_each_other():
    with pytest.raises(ConfigError, match=r"attention_dim 10 .* num_heads 4"):
        build("autoint", attention_dim=10, num_heads=4)
    with pytest.raises(ConfigError, match="num_heads 3 must divide"):
        build("finalmlp", hidden=[6], second_hidden=[4], num_heads=3)
    with pytest.raises(ConfigError, match=r"features \[3\]; there are 3"):
        build("finalmlp", gating=True, context=[0, 3])


@pytest.mark.parametrize("name", MODELS)
def test_card_is_complete(name):
    card = model_card(name)
    assert card.summary.endswith(".")
    assert card.reference[-4:].isdigit() or "arXiv" in card.reference
    assert card.parameters
    assert "arXiv" in card.reference or name in ("lr", "fm", "dnn")
    assert all(default is not None or option.startswith("second_") for option, default in card.options.items())
