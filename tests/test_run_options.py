"""One list of options: flags, --set, --config and RunConfig agree, and say so where they do not."""

import json

import pytest
from typer.main import get_command

from conftest import refused
from vardass.adapt.config import RunConfig
from vardass.cli.app import app
from vardass.cli.run_options import settings_of
from vardass.errors import InputError


def flags(command):
    return {flag for parameter in get_command(app).commands[command].params for flag in parameter.opts}


@pytest.mark.parametrize("command", ["adapt", "train"])
def test_every_setting_of_a_run_has_a_flag(command):
    known = flags(command)
    for name in RunConfig.model_fields:
        flag = "--" + name.replace("_", "-")
        assert flag in known or flag.removesuffix("s") in known
    old = "--option --penalty --sampler-option --network-option --set --config --resume --json --holdout"
    assert set(old.split()) <= known


def test_values_have_the_types_of_their_settings():
    found = settings_of(
        {
            "steps": 5,
            "devices": "2",
            "cache_embeddings": "false",
            "lr_schedule": "none",
            "algorithm_options": ["penalty=0.5"],
            "optimiser_options": ["betas=(0.5, 0.9)", "lr_multipliers={'head': 10}"],
            "augment": None,
        }
    )
    config = RunConfig(**found)
    assert (config.steps, config.devices, config.cache_embeddings) == (5, 2, False)
    assert config.optimiser_options == {"betas": (0.5, 0.9), "lr_multipliers": {"head": 10}}
    assert config.algorithm_options == {"penalty": 0.5}
    assert "augment" not in found
    assert settings_of({"settings": ["lr_schedule=none", "devices=auto"]})["lr_schedule"] == "none"


def test_flag_before_set_before_config_before_default(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("steps: 1\nlr: 1e-2\nbatch_size: 4\nalgorithm_options: {penalty: 2, ramp: 5}\n")
    found = settings_of({"config": file, "settings": ["lr=0.5", "penalty=3"], "steps": 7})
    assert (found["steps"], found["lr"], found["batch_size"]) == (7, 0.5, 4)
    assert found["algorithm_options"] == {"penalty": 3, "ramp": 5}
    assert "eval_every" not in found


def test_config_reads_what_a_run_wrote(tmp_path):
    config = RunConfig(algorithm="coral", algorithm_options={"penalty": 0.3}, steps=12, lr=1e-5, devices=1)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    for place in (tmp_path, tmp_path / "config.json"):
        assert RunConfig(**settings_of({"config": place})) == config
    # options of another algorithm would be a surprise, or unknown to it
    other = settings_of({"config": tmp_path, "algorithm": "dann"})
    assert RunConfig(**other).algorithm_options == {}
    assert settings_of({"config": tmp_path, "algorithm": "coral"})["algorithm_options"] == {"penalty": 0.3}


@pytest.mark.parametrize(
    ("given", "field", "named"),
    [
        ({"steps": 1, "settings": ["steps=2"]}, None, ("--set steps=2", "--steps 1")),
        ({"penalty": 1.0, "algorithm_options": ["penalty=2"]}, None, ("--penalty 1.0", "--option penalty=2")),
        ({"settings": ["pnealty=2"]}, "setting", ("'pnealty'", "'penalty'")),
        ({"penalty": 1.0, "settings": ["penalty=2"]}, None, ("--set penalty=2", "--penalty 1.0")),
        (
            {"sampler_options": ["k=1"], "settings": ["sampler_options.k=2"]},
            None,
            ("--set sampler_options.k=2", "--sampler-option k=1"),
        ),
        (
            {"settings": ["sampler_options={'k': 1}", "sampler_options.k=2"]},
            None,
            ("--set sampler_options.k=2", "--set sampler_options={'k': 1}"),
        ),
        ({"settings": ["steps"]}, None, ("--set", "'steps'", "key=value")),
        ({"sampler_options": ["=1"]}, None, ("--sampler-option", "'=1'", "key=value")),
    ],
)
def test_two_that_say_different_things_are_refused(given, field, named):
    with refused(*named, field=field):
        settings_of(given)
    assert settings_of({"steps": 1, "settings": ["steps=1"]})["steps"] == 1


def test_only_groups_of_options_have_dots():
    with refused("'steps.x'", "'steps'", field="setting"):
        RunConfig(**settings_of({"steps": 3, "settings": ["steps.x=1"]}))


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("a.yaml", "step: 10\n", ("'step'", "'steps'")),
        ("a.yaml", "steps: ten\n", ("steps", "'ten'")),
        ("a.yaml", "- steps\n", ("mapping", "['steps']", "'steps: 100'")),
        ("a.yaml", "steps: 1\nsteps: 2\n", ("steps", "lines 1 and 2")),
        ("a.json", '{"steps": 1', ("line 1", "',' delimiter")),
        ("a.json", "[1]", ('{"steps": 100}', "list")),
        ("a.json", None, ("No such file or directory",)),
        ("a.yaml", b"\xff\xfe\x00", ("byte 0", "UTF-8")),
    ],
)
def test_bad_files_of_settings(tmp_path, name, text, named):
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with refused(f"--config {tmp_path / name}", *named):
        settings_of({"config": tmp_path / name})


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("c.yaml", "- steps\n- 100\n", ("['steps', 100]", "settings, such as 'steps: 100'")),
        ("c.yaml", "# nothing\n", ("empty", "settings, such as 'steps: 100'")),
        ("c.json", "[1]", ("list", 'settings by name, like {"steps": 100}')),
        ("c.json", "[" * 100_000, ("nested too deeply", "levels")),
    ],
)
def test_a_config_that_holds_no_settings_is_told_what_one_is(tmp_path, name, text, named):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError) as caught:
        settings_of({"config": tmp_path / name})
    assert all(each in str(caught.value) for each in (f"--config {tmp_path / name}", *named))
    assert "algorithms and samplers" not in str(caught.value)
