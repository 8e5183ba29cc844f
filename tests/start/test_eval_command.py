"""`eval.py` validates unless it is told not to, and says on stderr what takes long."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from sidestream import evaluate
from sidestream.commands import eval as command
from sidestream.launch import status


@pytest.mark.parametrize("validate", [True, False])
def test_a_loss_is_printed_where_one_was_computed(
    validate: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    said: list[str] = []

    def fake(cfg: Any, **wanted: Any) -> dict[str, Any]:
        loss = 1.5 if wanted["validate"] else None
        return {"val_loss": loss, "unit": "byte", "prompt": "a", "sample": "b"}

    monkeypatch.setattr(evaluate, "evaluate", fake)
    monkeypatch.setattr(status, "say", said.append)
    layout: Any = SimpleNamespace()
    command.report(OmegaConf.create({}), layout=layout, checkpoint=tmp_path, validate=validate)
    loss = ["val_loss   1.5000 nats per byte"] if validate else []
    assert capsys.readouterr().out.splitlines() == [f"checkpoint {tmp_path}", *loss, "sample     ab"]
    assert said == ["importing torch"]


def test_whether_to_validate_is_true_or_false(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_checkpoint", lambda run, given: run)
    with pytest.raises(ValueError, match=r"validate=maybe: neither true nor false; .* set validate=true"):
        command.main([f"run={tmp_path}", "validate=maybe"])
