"""Configurations: what is wrong is named before anything runs."""

from pathlib import Path

import pytest
import yaml

from tests.evaluation.runs import BASE, small_config, write_config
from vllm_kvmerge.errors import CommandError
from vllm_kvmerge.evaluation.config import read_config
from vllm_kvmerge.evaluation.runner import cells_of


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policies": ["nope"]}, "policies.0: policy: unknown policy 'nope'; allowed: adakv, "),
        ({"policies": [3]}, "policies.0: must be a policy's name or an object with the field policy, got 3"),
        ({"policies": ["full", "h2o", "full"]}, "policies: full is listed twice"),
        ({"policies": [{"policy": "h2o", "budget": 0.1}]}, "policies.0: budget: is not set here but by budgets"),
        ({"policies": [{"policy": "h2o", "context_tokens": 9}]}, "context_tokens: is not set here but by question_"),
        ({"compare": [["full", "snapkv"]]}, "compare: 'snapkv' is no policy of this configuration; allowed: full"),
        ({"budgets": []}, "budgets: keepkv zip_mode=votes needs at least one"),
        ({"budgets": [1.5]}, "budgets.0: must be an integer from 1 to 16777216 (entries per KV head) or a float in"),
        ({"budgets": [64, 64]}, "budgets: 64 is listed twice"),
        ({"policies": ["snapkv"], "budgets": [8]}, "policies: snapkv with budget 8: budget: 8 entries are too few"),
        ({"tasks": ["nope"]}, "tasks.0: task: unknown task 'nope'; allowed: "),
        ({"tasks": [{"length": 64}]}, "tasks.0: must be a task's name or an object with the field task"),
        ({"tasks": [{"task": "demo_recall", "lenght": 64}]}, "tasks.0: lenght: unknown field; allowed: length, facts"),
        ({"tasks": [{"task": "demo_recall", "metric": "f1"}]}, "tasks.0.metric: Input should be 'agreement', got 'f1'"),
        ({"tasks": [{"task": "demo_text", "metric": "agreement"}]}, "tasks.0: metric: demo_text gives the model its"),
        ({"temperature": 0.5}, "temperature: unknown field; allowed: model, policies, budgets"),
        (
            {"sampling": {"min_p": 0.1}},
            "sampling.min_p: unknown field; allowed: temperature, top_p, top_k, repetition_",
        ),
        (
            {"sampling": {"temperature": -1.0}},
            "sampling.temperature: Input should be greater than or equal to 0, got -1",
        ),
        (
            {"sampling": {"temperature": 1.0}, "tasks": [{"task": "demo_recall", "metric": "agreement"}]},
            "sampling.temperature: demo_recall metric=agreement compares most probable tokens; allowed: 0",
        ),
        ({"engine": {"max_len": 5}}, "engine.max_len: unknown field; allowed: dtype, max_model_len, "),
        ({"endpoint": {"url": "localhost"}}, "endpoint.url: String should match pattern '^https?://', got 'localhost'"),
        ({"endpoint": {"url": "http://x"}, "engine": {"dtype": "float32"}}, "engine: its options are for the engine"),
        ({"tasks": ["demo_text"], "endpoint": {"url": "http://x"}}, "tasks: demo_text reads log-probabilities of"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict, said: str) -> None:
    with pytest.raises(CommandError) as fault:
        small_config(tmp_path, **changes)
    assert said in str(fault.value)


@pytest.mark.parametrize("text", ["[1", "- a", "", "\x00"])
def test_files_that_hold_no_configuration(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(CommandError, match="broken.yaml: "):
        read_config(path, {})
    with pytest.raises(CommandError, match="none.yaml: no such file"):
        read_config(tmp_path / "none.yaml", {})


def test_cells_and_labels(tmp_path: Path) -> None:
    config = small_config(tmp_path, tasks=["demo_recall", {"task": "demo_recall", "length": 64, "samples": 2}])
    first = ["full", "keepkv zip_mode=votes | 0.25", "keepkv zip_mode=votes | 64"]
    assert [cell.key for cell in cells_of(config)] == [
        f"{task} | {cell}" for task in ("demo_recall", "demo_recall length=64") for cell in first
    ]
    assert [config.samples_of(entry) for entry in config.tasks] == [4, 2]
    both = [{"task": "demo_recall"}, {"task": "demo_recall", "question_agnostic": False}]
    config = small_config(tmp_path, tasks=both)
    assert [entry.label for entry in config.tasks] == ["demo_recall", "demo_recall question_agnostic=false"]


def test_command_line_wins(tmp_path: Path) -> None:
    path = write_config(tmp_path / "some.yaml", endpoint={"url": "http://a", "concurrency": 3}, model="m")
    config = read_config(path, {"seed": 9, "samples": None, "endpoint.url": "http://b", "endpoint.tokenizer": None})
    assert (config.seed, config.samples, config.model) == (9, 4, "m")
    assert config.endpoint is not None
    assert (config.endpoint.url, config.endpoint.concurrency) == ("http://b", 3)
    assert read_config(write_config(path, engine={"dtype": "half"}), {"endpoint.url": "http://b"}, ["engine"]).endpoint


def test_identity_has_every_option_and_survives_yaml(tmp_path: Path) -> None:
    identity = small_config(tmp_path, tasks=[{"task": "demo_recall", "length": 128}]).identity()
    (task,) = identity["tasks"]
    ways = {"question_agnostic": False, "chat_template": False, "metric": None}
    assert task == {"task": "demo_recall", "length": 128, "facts": 16, "asked_in": 1.0, "samples": 4, **ways}
    assert identity["budgets"] == BASE["budgets"] and identity["model"] == "demo"
    assert yaml.safe_load(yaml.safe_dump(identity)) == identity


def test_example_configurations() -> None:
    paths = sorted((Path(__file__).parents[2] / "configs" / "eval").rglob("*.yaml"))
    assert paths
    for path in paths:
        assert cells_of(read_config(path, {}))
