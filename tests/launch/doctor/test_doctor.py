"""The doctor on this machine, and on one that is ill."""

import json
import sys
from types import SimpleNamespace

import pytest

import launch.__main__ as launch
from launch.doctor import checks


def test_doctor_looks_over_this_machine(tmp_path, capfd):
    """Real disk, real imports, real ranks."""
    assert launch.main(["doctor", "--run-dir", str(tmp_path / "runs"), "--json"]) == 0
    found = {finding["name"]: finding for finding in json.loads(capfd.readouterr().out)}
    assert found["torch"]["state"] == found["megatron-core"]["state"] == "ok"
    assert "GB/s with fsync" in found[f"disk at {tmp_path}/runs"]["detail"]
    assert list((tmp_path / "runs").iterdir()) == []
    ranks = next(finding for name, finding in found.items() if "local rank" in name)
    assert ranks["state"] == "ok"
    assert "GB/s a rank" in ranks["detail"]
    # What is missing says what is lost and how to get it.
    assert all(finding["remedy"] for finding in found.values() if finding["state"] != "ok")


def test_what_does_not_work_gives_exit_code_1_and_one_line(tmp_path, capfd, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(checks, "imports", lambda: checks.Finding("import", "ok", ""))
    monkeypatch.setattr(checks, "ranks", lambda: checks.Finding("gloo", "ok", ""))
    assert launch.main(["doctor", "--run-dir", str(file)]) == 1
    output, errors = capfd.readouterr()
    assert "bad" in output
    assert errors == f"error: disk at {file}: File exists; choose another run.dir\n"


def test_versions_that_were_not_tested_together_are_told(tmp_path, monkeypatch):
    (tmp_path / "requirements.txt").write_text("torch==1.0\nPyYAML==0.1\n# numpy==3\n")
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    found = {finding.name: finding for finding in checks.packages()}
    assert found["torch"].state == found["pyyaml"].state == "bad"
    assert found["torch"].remedy == "pip install torch==1.0"
    assert found["numpy"].state == "ok"


def test_ranks_that_fail_or_hang_are_told(tmp_path, monkeypatch):
    package = tmp_path / "launch/doctor"
    package.mkdir(parents=True)
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    (package / "selftest.py").write_text("raise SystemExit('rank 1: wrong sums')")
    assert checks.ranks().state == "bad"
    assert checks.ranks().detail == "rank 1: wrong sums"
    monkeypatch.setattr(checks, "_SELFTEST_SECONDS", 0.5)
    (package / "selftest.py").write_text("import time; time.sleep(60)")
    assert "no result within 0.5 s" in checks.ranks().detail


def test_an_import_that_hangs_is_told(monkeypatch):
    monkeypatch.setattr(checks, "_IMPORT_SECONDS", 0.5)
    assert checks.python_says("import time; time.sleep(60)") == "has not ended within 0.5 s"


@pytest.mark.parametrize(("minor", "state"), [(11, "bad"), (12, "ok"), (13, "ok"), (14, "bad")])
def test_pythons_without_wheels_are_refused(minor, state, monkeypatch):
    fake = SimpleNamespace(version=f"3.{minor}.0 (main)", version_info=(3, minor, 0))
    monkeypatch.setattr(checks, "sys", fake)
    assert checks.python().state == state
    assert sys is not fake
