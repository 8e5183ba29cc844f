"""docs/overlap.md: every key of the script with its default, every schedule and whether it is another model."""

import pytest

from sidestream.build import make
from tests.docs.pages import REPOSITORY, rows, text

PAGE = REPOSITORY / "docs" / "overlap.md"


def test_the_page_has_every_key_of_the_script(compose):
    cfg = compose(config_name="measure_overlap")
    shown = {row[0].strip("`"): row[1] for row in rows(text(PAGE)) if row[0].startswith("`measure.")}
    plain = {f"measure.{key}": value for key, value in cfg.measure.items() if key != "_target_"}
    as_typed = {key: {None: "null", False: "false"}.get(value, str(value)) for key, value in plain.items()}
    as_typed["measure.layer"] = str(cfg.measure.layer)  # 0 == False
    assert shown == as_typed


def test_the_page_says_which_schedules_are_another_model(compose):
    shown = {
        row[0].strip("`"): row[2].strip("*")
        for row in rows(text(PAGE))
        if len(row) == 3 and row[2].strip("*") in ("yes", "no")
    }
    there = {path.stem for path in (REPOSITORY / "conf" / "overlap").glob("*.yaml")}
    assert set(shown) == there
    for name, word in shown.items():
        assert make(compose(f"overlap={name}").overlap).changes_model == (word == "yes"), name


@pytest.mark.parametrize("overrides", [["measure.scope=part"], ["measure.rounds=0"], ["+measure.bogus=1"]])
def test_a_wrong_key_is_refused(compose, overrides: list[str]):
    from sidestream.config.compatibility import check
    from sidestream.config.errors import ConfigError

    with pytest.raises(ConfigError, match="measure"):
        check(compose(*overrides, config_name="measure_overlap"), device_count=0)


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["measure.comm_share=0.3"], "link=throttled"),
        (["measure.sleep_ms={attention:20}"], "measure.compute=sleep"),
        (["measure.layer=2"], "measure.layer=0"),
        (["trainer.devices=1"], "trainer.devices=2"),
        (["strategy=fully_shard"], "strategy=replicate"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_helps(compose, overrides: list[str], fix: str):
    from sidestream.config.compatibility import check
    from sidestream.config.errors import ConfigError

    with pytest.raises(ConfigError, match=f"set {fix}"):
        check(compose(*overrides, config_name="measure_overlap"), device_count=0)
