"""The alert rules, held to promtool: they parse, and each fires when it is to, and not otherwise."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tunewright.telemetry.alerts import ALERTS
from tunewright.telemetry.alerts.__main__ import files, groups, main, prometheus_rule, rule_file, runbooks

pytestmark = pytest.mark.prometheus
ROOT = Path(__file__).parents[2]
CASES = yaml.safe_load((Path(__file__).parent / "alerts.test.yaml").read_text(encoding="utf-8"))


def promtool(*arguments: str, folder: Path) -> str:
    binary = shutil.which("promtool")
    if binary is None:
        pytest.skip("there is no promtool on the PATH (see tests/install-prometheus)")
    done = subprocess.run([binary, *arguments], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def annotations(name: str, labels: dict[str, str]) -> dict[str, str]:
    """What the alert tells, filled in with its labels as Prometheus would."""
    rule = next(rule for rule in groups()[0]["rules"] if rule["alert"] == name)

    def filled(text: str) -> str:
        text = re.sub(
            r"\{\{ with \$labels\.(\w+) \}\}(.*?)\{\{ end \}\}",
            lambda found: found[2].replace("{{ . }}", labels[found[1]]) if labels.get(found[1]) else "",
            text,
        )
        return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], text)

    return {key: filled(text) for key, text in rule["annotations"].items()}


def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(rule_file(), encoding="utf-8")
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", "rules.yaml", folder=tmp_path)


def test_each_alert_fires_when_it_is_to_and_not_otherwise(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(rule_file(), encoding="utf-8")
    cases = json.loads(json.dumps(CASES))
    for case in cases["tests"]:
        for check in case["alert_rule_test"]:
            for expected in check["exp_alerts"]:
                expected["exp_annotations"] = annotations(check["alertname"], expected["exp_labels"])
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(cases), encoding="utf-8")
    assert "SUCCESS" in promtool("test", "rules", "cases.yaml", folder=tmp_path)


@pytest.mark.parametrize("name", [alert.name for alert in ALERTS])
def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(name: str) -> None:
    checks = [check for case in CASES["tests"] for check in case["alert_rule_test"] if check["alertname"] == name]
    assert any(check["exp_alerts"] for check in checks)
    assert any(not check["exp_alerts"] for check in checks)


def test_the_operator_gets_the_same_rules() -> None:
    document = yaml.safe_load(prometheus_rule())
    assert document["kind"] == "PrometheusRule"
    assert document["spec"] == yaml.safe_load(rule_file())


def test_each_alert_has_its_section_in_the_runbooks() -> None:
    text = runbooks()
    assert "$labels" not in text
    for alert in ALERTS:
        section = text.split(f"## {alert.name}\n", 1)[1].split("\n## ", 1)[0]
        for part in ("**What it means.**", "**Where to look.**", "**What to do.**", alert.expr):
            assert part in section


def test_the_written_files_are_what_is_generated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", str(ROOT)]) == 0
    assert main([str(tmp_path)]) == 2
    (tmp_path / "docs").mkdir()
    assert main(["--check", str(tmp_path)]) == 1
    assert "run: python -m tunewright.telemetry.alerts" in capsys.readouterr().err
    assert not (tmp_path / "deploy").exists()
    assert main([str(tmp_path)]) == 0
    assert main(["--check", str(tmp_path)]) == 0
    assert all(path.exists() for path in files(tmp_path))
