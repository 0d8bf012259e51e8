import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.cli.settings import resumed_config
from hotbed.errors import ConfigError
from hotbed.run.config import (
    DENSE_RATES,
    FIELDS,
    ROW_RATES,
    SECTIONS,
    TYPES,
    DataConfig,
    ModelConfig,
    RunConfig,
    TablesConfig,
    TrainConfig,
)
from hotbed.run.config_check import check, raise_problems, read_tree
from hotbed.run.run_file import compose, read_run_file


def test_defaults_are_valid():
    assert check(RunConfig()) == []
    assert RunConfig().data.path == "criteo-like"


def test_every_setting_says_what_it_does():
    assert [path for path, one in FIELDS.items() if not one.metadata.get("about")] == []


PLAIN = st.recursive(
    st.one_of(
        st.integers(-(2**60), 2**60),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=8),
        st.booleans(),
    ),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@given(
    lr=st.floats(1e-12, 1e6),
    seed=st.integers(0, 2**63 - 1),
    options=st.dictionaries(st.text(min_size=1, max_size=5), PLAIN, max_size=3),
    path=st.text(min_size=1, max_size=12).filter(lambda text: not text[0].isspace() and "\n" not in text),
)
@settings(deadline=None, max_examples=60)
def test_json_round_trip_is_exact(lr, seed, options, path):
    config = RunConfig(
        data=DataConfig(path=path),
        model=ModelConfig(options=options),
        tables=TablesConfig(lr=lr),
        train=TrainConfig(seed=seed),
    )
    again = read_tree(json.loads(config.to_json()))
    assert again == config
    assert again.to_json() == config.to_json()


def test_all_mistakes_in_one_message():
    tree = {
        "data": {"batch_size": 0, "shufle": True},
        "model": {"dim": "wide"},
        "tables": {"optimizer": "adamm", "init": "normal"},
        "train": {"epochs": 1.5, "device": "tpu", "seed": True, "keep_best": 1},
        "extra": {},
        "dense": 3,
    }
    with pytest.raises(ConfigError) as caught:
        read_tree(tree)
    message = str(caught.value)
    expected = [
        "data.batch_size: must be at least 1, not 0",
        "data.shufle: no such setting; did you mean data.shuffle?",
        "model.dim: must be a whole number, not 'wide'",
        "tables.optimizer: must be one of sgd, adagrad, rowwise_adagrad, adam, ftrl, not 'adamm'",
        "tables.init: must be normal(std), uniform(bound) or constant(value), not 'normal'",
        "train.epochs: must be a whole number, not 1.5",
        "train.device: must be auto, cpu, cuda or cuda:N, not 'tpu'",
        "train.seed: must be a whole number, not True",
        "train.keep_best: must be true or false, not 1",
        "extra: no such setting",
        "dense: must be a mapping of settings, not 3",
    ]
    assert message.startswith(f"{len(expected)} settings are wrong")
    for line in expected:
        assert line in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, "x", None, [1], True, -1])
def test_a_learning_rate_is_a_finite_number(value):
    with pytest.raises(ConfigError, match=r"tables\.lr: must be"):
        read_tree({"tables": {"lr": value}})


@pytest.mark.parametrize("options", [{1: 2}, {"a": {1, 2}}, {"a": float("nan")}, {"a": (1, 2)}, [1]])
def test_options_must_survive_json(options):
    with pytest.raises(ConfigError, match=r"model\.options: must"):
        read_tree({"model": {"options": options}})


def test_check_sees_what_python_built():
    config = RunConfig(data=DataConfig(batch_size=-3), train=TrainConfig(epochs=0))
    assert [problem.partition(":")[0] for problem in check(config)] == ["data.batch_size", "train.epochs"]


TREE = {
    "data": {"path": "adult", "batch_size": 100},
    "model": {"options": {"hidden": [32, 16], "dropout": 0.1}},
    "tables": {"lr": 1e-3},
}
RUN_FILES = {
    "run.yaml": "data: {path: adult, batch_size: 100}\n"
    "model: {options: {hidden: [32, 16], dropout: 0.1}}\ntables: {lr: 1e-3}",
    "run.toml": 'model.options={hidden=[32,16],dropout=0.1}\n[data]\npath="adult"\nbatch_size=100\n[tables]\nlr=1e-3\n',
    "run.json": json.dumps(TREE),
}


@pytest.mark.parametrize("name", RUN_FILES)
def test_run_files_of_every_kind_say_the_same(tmp_path, name):
    path = tmp_path / name
    path.write_text(RUN_FILES[name])
    config, problems = compose(path)
    assert problems == []
    assert config == read_tree(TREE)
    assert config.tables.lr == 1e-3


def test_a_saved_config_is_a_run_file(tmp_path):
    config = read_tree(TREE)
    (tmp_path / "config.json").write_text(config.to_json())
    assert compose(tmp_path / "config.json") == (config, [])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.yaml", "a: [1", "cannot be parsed"),
        ("run.toml", "a = ", "cannot be parsed"),
        ("run.json", "{", "cannot be parsed"),
        ("run.yaml", "- 1\n- 2\n", "must hold a mapping"),
        ("run.ini", "", "must end in"),
    ],
)
def test_broken_run_files(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_run_file(tmp_path / name)


def test_unreadable_run_files(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.yaml", tmp_path / "run.yaml"):
        with pytest.raises(ConfigError, match="cannot read the run file"):
            read_run_file(path)
    with pytest.raises(ConfigError, match="is a folder, not a run file"):
        read_run_file(tmp_path)


def test_an_empty_run_file_is_all_defaults(tmp_path):
    (tmp_path / "run.yaml").write_text("# nothing yet\ndata:\n")
    assert compose(tmp_path / "run.yaml") == (RunConfig(), [])


def test_later_sources_win(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("data: {path: a}\nmodel: {name: dnn, dim: 4, options: {dropout: 0.1, hidden: [8]}}\n")
    config, problems = compose(
        path,
        {"data.path": "b", "model.name": "fm"},
        ["data.path=c", "model.options.dropout=0.5", "tables.lr=1e-2", "train.max_steps=1e3"],
    )
    assert problems == []
    assert (config.data.path, config.model.name, config.model.dim) == ("c", "fm", 4)
    assert config.model.options == {"dropout": 0.5, "hidden": [8]}
    assert config.tables.lr == 0.01
    assert config.train.max_steps == 1000


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("data.path=2024", "data.path", "2024"),
        ('data.path="2024"', "data.path", "2024"),
        ("data.path = a=b", "data.path", "a=b"),
        ("data.shuffle=false", "data.shuffle", False),
        ("model.options.act=[relu, prelu]", "model.options", {"act": ["relu", "prelu"]}),
        ("model.options.hidden=[400,400]", "model.options", {"hidden": [400, 400]}),
        ('model.options={"a": 1}', "model.options", {"a": 1}),
        ("train.eval_every=10", "train.eval_every", 10),
    ],
)
def test_set_parses_values(text, path, value):
    config, problems = compose(sets=[text])
    assert problems == []
    section, name = path.split(".")
    assert getattr(getattr(config, section), name) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model.dim", "must have the form path=value"),
        ("modle.dim=3", "did you mean model.dim?"),
        ("train.batch_size=3", "did you mean data.batch_size?"),
        ("model.dropuot=3", r"model.options"),
        ("nonsense=3", "no such setting; there are data.path"),
        ("data.threads=[1, 2]", "data.threads: must be a whole number, not [1, 2]"),
        ("data.threads=", "data.threads: must be a whole number"),
        ("data.path=", "data.path: must be a name, not ''"),
        ("train.options.x=1", "train.options.x: no such setting"),
    ],
)
def test_set_mistakes_are_told(text, message):
    _, problems = compose(sets=[text])
    assert len(problems) == 1
    assert message in problems[0]


def test_mistakes_of_all_sources_come_together(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("data: {batch: 3}\n")
    _, problems = compose(path, {"train.epochs": 0}, ["model.dim=x", "oops"])
    with pytest.raises(ConfigError, match="4 settings are wrong"):
        raise_problems(problems)


def test_a_learning_rate_of_zero_is_the_usual_one_of_the_optimizer():
    config, _ = compose(sets=["tables.optimizer=adam", "dense.optimizer=sgd"])
    assert (config.tables.lr, config.dense.lr) == (ROW_RATES["adam"], DENSE_RATES["sgd"])
    assert TablesConfig(optimizer="adam", lr=0.5).lr == 0.5
    assert f'"lr": {ROW_RATES["adagrad"]}' in RunConfig().to_json()


def test_warmup_needs_its_schedule():
    assert "at least 1" in compose(sets=["train.schedule=warmup"])[1][0]
    assert "must be 0" in compose(sets=["train.warmup_steps=5"])[1][0]
    assert compose(sets=["train.schedule=cosine", "train.warmup_steps=5"])[1] == []


def test_a_merge_is_used_before_the_next_and_shares_only_what_there_is():
    assert "at most parallel.k_step (4)" in compose(sets=["parallel.k_step=4", "parallel.delay=5"])[1][0]
    assert compose(sets=["parallel.k_step=4", "parallel.delay=4"])[1] == []
    for rule in ("frozen_v", "shared_v"):
        assert "SGD has no" in compose(sets=["dense.optimizer=sgd", f"parallel.merge={rule}"])[1][0]
    assert compose(sets=["dense.optimizer=sgd", "parallel.k_step=4"])[1] == []


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["follow.idle_seconds=3"], "follow.idle_seconds: is for a log that is followed; give --follow"),
        (["follow.checkpoint_minutes=1"], "follow.checkpoint_minutes: is for a log that is followed"),
        (["follow.source=logs", "train.epochs=3"], "train.epochs: must be 1 with follow.source, not 3"),
        (["follow.source=logs", "train.recalibrate=true"], "train.recalibrate: must be false with follow.source"),
        (["follow.source=logs", "train.patience=2"], "train.patience: needs train.eval_every with follow.source"),
        (["follow.source=logs", "train.plateau_factor=0.5"], "train.plateau_factor: needs train.eval_every"),
        (["follow.source=kafka://a:1/b", "follow.late=skip"], "follow.late: is for files, not 'skip'"),
    ],
)
def test_settings_that_a_log_that_is_followed_has_no_use_for(sets, said):
    (problem,) = compose(sets=sets)[1]
    assert problem.startswith(said)


def test_settings_of_a_log_that_is_followed():
    sets = [
        "follow.source=logs",
        "train.patience=2",
        "train.eval_every=50",
        "follow.late=skip",
        "follow.idle_seconds=3",
    ]
    assert compose(sets=sets)[1] == []


def test_a_run_of_the_first_version_goes_on_without_scaled_steps(tmp_path):
    """It has no such setting; one that is younger says it either way."""
    for said, expected in ((None, False), (True, True), (False, False)):
        tree = json.loads(RunConfig().to_json())
        del tree["parallel"]["scale_lr"]
        tree["parallel"] |= {} if said is None else {"scale_lr": said}
        (tmp_path / "config.json").write_text(json.dumps(tree))
        assert resumed_config(tmp_path, {}, [], {}).parallel.scale_lr == expected


def test_an_evaluation_batch_is_a_training_batch_unless_said():
    assert compose(sets=["data.batch_size=77"])[0].data.eval_batch_size == 77
    assert compose(sets=["data.eval_batch_size=5"])[0].data.eval_batch_size == 5


@pytest.mark.parametrize(("given", "kept"), [("2GiB", "2GiB"), ("512 MB", "512 MB"), (4096, "4096"), ("", "")])
def test_amounts_of_memory_stay_as_written(given, kept):
    config = read_tree({"tables": {"hbm": given}})
    assert config.tables.hbm == kept
    assert read_tree(json.loads(config.to_json())) == config
    assert compose(sets=[f"tables.hbm={given}"])[0] == config


@pytest.mark.parametrize("given", ["2G", "much", 0, 1.5, True, None, ["2GiB"]])
def test_what_is_no_amount_of_memory(given):
    with pytest.raises(
        ConfigError, match=r"1 setting is wrong:\n  - tables\.hbm: must be an amount of memory such as 2GiB"
    ):
        read_tree({"tables": {"hbm": given}})


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (
            ["cache=0.1", "hbm=2GiB"],
            "tables.hbm: is the other way to say how large the cache is, not '2GiB' in addition",
        ),
        (["cache=0.1", "decay_scope=table"], "tables.decay_scope: must be touched with tables.cache, not 'table'"),
        (["hbm=1MiB", "decay_scope=table"], "tables.decay_scope: must be touched with tables.hbm, not 'table'"),
        (
            ["memory=1GiB"],
            "tables.memory: is for the rows behind a cache; give --cache, --hbm or --ssd (tables.cache, hbm or ssd) too",
        ),
        (["cache=1.5"], "tables.cache: must be at most 1, not 1.5; 1.5 % is 0.015"),
        (["policy=fifo"], "tables.policy: must be one of oracle, lfu, lru, static, not 'fifo'"),
        (["warmup=0.5"], "tables.warmup: is the share of a cache; give --cache or --hbm"),
        (["window=-1"], "tables.window: must be at least 0, not -1"),
        (["precision=int8"], "tables.precision: must be one of fp32, fp16, bf16, not 'int8'"),
    ],
)
def test_mistakes_about_the_cache(sets, said):
    _, problems = compose(sets=[f"tables.{one}" for one in sets])
    assert len(problems) == 1
    assert said in problems[0]


def test_contradictions_come_with_all_other_mistakes():
    sets = ["tables.cache=0.1", "tables.hbm=2GiB", "tables.decay_scope=table", "model.dim=0", "tables.memory=2G"]
    assert [one.partition(":")[0] for one in compose(sets=sets)[1]] == [
        "model.dim",
        "tables.memory",
        "tables.hbm",
        "tables.decay_scope",
    ]


def test_types_know_every_field():
    assert set(TYPES) == set(FIELDS)
    assert all(dataclasses.is_dataclass(kind) for kind in SECTIONS.values())


@pytest.mark.parametrize("given", [True, False, ["user"], ["user", "ad"], []])
def test_dynamic_is_all_features_none_or_some(given):
    config = read_tree({"tables": {"dynamic": given}})
    assert config.tables.dynamic == given
    assert read_tree(json.loads(config.to_json())) == config


def test_dynamic_and_its_rules_contradict_other_settings():
    sets = ["tables.dynamic=user", "tables.admit=after 3", "tables.expire=unused 7d"]
    _, problems = compose(None, {}, sets)
    assert problems[0] == "tables.dynamic: must be true, false or a list of features, not 'user'"
    assert [problem.partition(":")[0] for problem in problems[1:]] == ["tables.admit", "tables.expire"]
    assert "--dynamic" in problems[1]
    sets = ["tables.dynamic=[user, ad]", "tables.policy=static", "tables.decay_scope=table", "tables.memory=1GiB"]
    _, problems = compose(None, {}, [*sets, "tables.warmup=0.5"])
    assert [problem.partition(":")[0] for problem in problems] == [
        "tables.policy",
        "tables.warmup",
        "tables.decay_scope",
    ]
