"""docs/overlap.md: every key of the script with its default, every schedule and whether it is another model."""

from collections.abc import Iterator

import pytest
from omegaconf import DictConfig

from sidestream.build import make
from sidestream.config.compatibility import check
from sidestream.config.errors import ConfigError, as_typed
from tests.docs.pages import REPOSITORY, rows, text

PAGE = REPOSITORY / "docs" / "overlap.md"


def test_the_page_has_every_key_of_the_script(compose):
    shown = {row[0].strip("`"): row[1] for row in rows(text(PAGE)) if row[0].startswith("`measure.")}
    assert shown == dict(flat("measure", compose(config_name="measure_overlap").measure))


def test_the_help_has_every_key_of_the_script(compose):
    text = compose(config_name="measure_overlap", return_hydra_config=True).hydra.help.template
    keys = [key for key in compose(config_name="measure_overlap").measure if key != "_target_"]
    assert all(f"measure.{key}" in text for key in keys)


def flat(prefix: str, node: DictConfig) -> Iterator[tuple[str, str]]:
    """Key -> value as typed."""
    for key, value in node.items():
        if isinstance(value, DictConfig):
            yield from flat(f"{prefix}.{key}", value)
        elif key != "_target_":
            yield f"{prefix}.{key}", as_typed(value)


def test_the_page_says_which_schedules_are_another_model(compose):
    shown = {
        row[0].strip("`"): row[2].strip("*")
        for row in rows(text(PAGE))
        if len(row) == 3 and row[2].strip("*") in ("yes", "no")
    }
    there = {path.stem for path in (REPOSITORY / "conf" / "overlap").glob("*.yaml")}
    assert set(shown) == there
    for name, word in shown.items():
        assert make(compose(f"overlap={name}"), "overlap").changes_model == (word == "yes"), name


@pytest.mark.parametrize("overrides", [["measure.scope=part"], ["measure.rounds=0"], ["+measure.bogus=1"]])
def test_a_wrong_key_is_refused(compose, overrides: list[str]):
    with pytest.raises(ConfigError, match="measure"):
        check(compose(*overrides, config_name="measure_overlap"), device_count=0)


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["measure.comm_share=0.3"], "link=throttled"),
        (["measure.sleep_ms.attention=20"], "measure.compute=sleep"),
        (["measure.sleep_ms={attention:20}"], "measure.compute=sleep"),
        (["measure.layer=2"], "measure.layer=0"),
        (["trainer.devices=1"], "trainer.devices=2"),
        (["strategy=fully_shard"], "strategy=replicate"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_helps(compose, overrides: list[str], fix: str):
    with pytest.raises(ConfigError, match=f"set {fix}"):
        check(compose(*overrides, config_name="measure_overlap"), device_count=0)
