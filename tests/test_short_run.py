"""A short run on a device: steps in order, within their own limits and a total one."""

import json

from benchmarks import short_run


def step(name: str, code: str, seconds: float) -> str:
    command = f"python -c '{code}'"
    return f'[[step]]\nname = {name!r}\ncommand = """{command}"""\nseconds = {seconds}\n'


def test_steps_end_with_their_time_and_with_the_whole(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(short_run, "GRACE", 0.5)
    plan, found = tmp_path / "plan.toml", tmp_path / "found"
    plan.write_text(
        step("writes", 'open("{output}/result.json", "w").write("[]")', 60)
        + step("hangs", "import time; time.sleep(60)", 1)
        + step("is ended", "import time; time.sleep(60)", 60)
        + step("has no time", "", 60)
    )
    arguments = [str(plan), "--seconds", "5", "--output", str(found)]
    assert short_run.main(arguments) == 1
    steps = json.loads((found / "steps.json").read_text())
    assert [(one["name"], one["exit"]) for one in steps] == [
        ("writes", "0"),
        ("hangs", "timeout"),
        ("is ended", "timeout"),
        ("has no time", "left out"),
    ]
    assert (found / "result.json").read_text() == "[]" and (found / "hangs.log").exists()
    assert "hangs: at most 1 of " in capfd.readouterr().err


def test_a_plan_that_is_none(tmp_path, capsys):
    plan = tmp_path / "plan.toml"
    arguments = [str(plan), "--seconds", "5", "--output", str(tmp_path / "found")]
    for content, error in (
        ("[[step]", "not a plan"),
        ("", "it has no [[step]]"),
        ("[step]\nname = 'a'\n", "it has no [[step]]"),
        ("[[step]]\nname = 'a'\n", "step 1 needs `name` and `command`"),
        (step("a", "", 1).replace("= 1", "= 'soon'"), "and a number of seconds"),
        (step("a/b", "", 1), "`name`='a/b' is the name of a file"),
    ):
        plan.write_text(content)
        assert short_run.main(arguments) == 2
        assert error in capsys.readouterr().err
    assert not (tmp_path / "found").exists()
