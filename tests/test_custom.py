"""Environments of one's own: tools from functions, loading, tasks and experts that go wrong, and the template."""

import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import yaml

import evaluate
import train_rl
import train_sft
from envace.config import ConfigError, load_config
from envace.custom.dialogue import Dialogue, work_rightly
from envace.custom.environment import CustomEnvironment, load_environment
from envace.custom.new import TEMPLATES, new_environment
from envace.custom.source import CustomSource
from envace.custom.tools import PythonTools, ToolError
from envace.data import ExecutableSource, open_source
from envace.gate import risk_of
from envace.rewards import score
from envace.types import ServiceFault, Task, ToolCall, Trajectory, UserError

ROOT = Path(__file__).parent.parent
TEMPLATE = ROOT / "src" / "envace" / "custom" / "template"


# Tools from functions


class Counter:
    def __init__(self, world):
        self.world = world

    def add(self, amount: int, unit: Literal["one", "ten"] = "one") -> dict:
        """Count on.

        Args:
            amount: How much.
            unit: What one of it is.
        """
        self.world["n"] += amount * (10 if unit == "ten" else 1)
        return self.world

    def value(self) -> int:
        """The count."""
        return self.world["n"]


def double(number: float) -> float:
    """Twice a number.

    Args:
        number: Any.
    """
    return 2 * number


COUNTER = PythonTools(Counter, reads=[Counter.value, double], destructive=[Counter.add])


def called(session, name, **arguments):
    return session.execute(ToolCall(name, arguments))


def test_the_schema_is_what_signature_and_docstring_say():
    value, _, add = COUNTER.schemas
    assert add["function"] == {
        "name": "add",
        "description": "Count on.",
        "parameters": {
            "type": "object",
            "properties": {
                "amount": {"type": "integer", "description": "How much."},
                "unit": {"type": "string", "enum": ["one", "ten"], "description": "What one of it is."},
            },
            "required": ["amount"],
            "additionalProperties": False,
        },
    }
    assert value["function"]["parameters"]["properties"] == {}
    assert COUNTER.read_only == {"value", "double"}
    assert [risk_of(name, COUNTER.schemas, {}) for name in ("value", "add")] == ["low", "high"]


def test_calls_change_the_state_of_their_own_episode_only():
    world = {"n": 1}
    first, second = COUNTER.open(world), COUNTER.open(world)
    assert called(first, "add", amount=2, unit="ten") == {"n": 21}
    assert called(first, "value") == {"result": 21} and called(second, "value") == {"result": 1}
    assert world == {"n": 1} and first.state() != second.state()
    assert called(first, "double", number=1.5) == {"result": 3.0}


def test_a_response_does_not_change_when_the_state_does():
    session = COUNTER.open({"n": 1})
    response = called(session, "add", amount=1)
    called(session, "add", amount=1)
    assert response == {"n": 2}


def tool(returns=None, raises=None):
    def act() -> dict:
        """Act."""
        if raises is not None:
            raise raises
        return returns

    return PythonTools(dict, writes=[act]).open({})


def test_values_become_json_as_the_agent_would_write_it():
    assert called(tool((1, {2: None})), "act") == [1, {"2": None}]
    assert called(tool("text"), "act") == {"result": "text"}
    assert called(tool(raises=ToolError("closed")), "act") == {"error": "closed"}


@pytest.mark.parametrize(
    ("session", "message"),
    [
        (tool({1, 2}), "tool act returned what is no JSON: Object of type set is not JSON serializable"),
        (tool(float("nan")), "tool act returned what is no JSON: "),
        (tool(raises=KeyError("A1\nB2")), "tool act raised KeyError: "),
        (tool(raises=SystemExit("A1\nB2")), "tool act raised SystemExit: "),
    ],
)
def test_a_tool_that_breaks_is_a_fault_and_no_observation(session, message):
    with pytest.raises(ServiceFault) as caught:
        called(session, "act")
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize("state", [{"n": [1]}, [1], "text"])
def test_a_state_without_attributes_is_its_own_state(state):
    assert PythonTools(lambda world: state, reads=[tool().functions["act"]]).open({}).state() == state


def test_a_state_that_is_no_json_is_a_fault():
    session = PythonTools(lambda world: {1, 2}, reads=[tool().functions["act"]]).open({})
    with pytest.raises(ServiceFault, match="the state of the environment is no JSON: Object of type set"):
        session.state()


def no_hint(amount):
    """Count."""


def no_docstring(amount: int):
    pass


def undescribed(amount: int):
    """Count."""


def of_any_class(amount: Path):
    """Count.

    Args:
        amount: How much.
    """


def any_number(*amounts: int):
    """Count.

    Args:
        amounts: How much.
    """


def unknown_hint(amount: "Nowhere"):  # noqa: F821
    """Count.

    Args:
        amount: How much.
    """


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([no_hint], "tool no_hint: Argument amount is missing a type hint"),
        ([no_docstring], "tool no_docstring: .* no docstring"),
        ([undescribed], "tool undescribed: .* no description for the argument 'amount'"),
        ([of_any_class], "tool of_any_class: Couldn't convert the type hint"),
        ([any_number], r"tool any_number: .* write \*amounts: int as an ordinary parameter"),
        ([unknown_hint], "tool unknown_hint: name 'Nowhere' is not defined"),
        ([lambda: None], "tool <lambda>: .* no docstring"),
        ([double, double], "tool double: there are two of that name"),
        ([], "no tools"),
    ],
)
def test_a_function_that_makes_no_tool_is_one_line(functions, message):
    with pytest.raises(UserError, match=message) as caught:
        PythonTools(dict, writes=functions)
    assert "\n" not in str(caught.value)


def test_a_name_that_a_prompt_dislikes_is_refused():
    def odd() -> int:
        """Odd."""

    odd.__name__ = 'look "up"'
    with pytest.raises(UserError, match="a name has letters, digits, _, - and . only"):
        PythonTools(dict, writes=[odd])


# Loading


def package(folder, code, name="shop"):
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    return folder / name


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1\ny = 1 / 0\n", "__init__.py, line 2: ZeroDivisionError: division by zero$"),
        ("x = = 1\n", "__init__.py, line 1: SyntaxError: invalid syntax"),
        ("import no_such_module\n", "__init__.py, line 1: ModuleNotFoundError: No module named 'no_such_module'$"),
        ("", "ENVIRONMENT must be an envace.custom.environment.CustomEnvironment$"),
        ("ENVIRONMENT = 3", "ENVIRONMENT must be an"),
        ("from envace.custom.tools import PythonTools\nPythonTools(dict, writes=[])", "^the environment has no tools"),
    ],
)
def test_code_that_cannot_be_loaded_is_one_line_that_says_where(tmp_path, code, message):
    with pytest.raises(UserError, match=message) as caught:
        load_environment(package(tmp_path, code))
    assert "\n" not in str(caught.value)
    shutil.copytree(TEMPLATE, tmp_path / "shop", dirs_exist_ok=True)
    assert load_environment(tmp_path / "shop").tools.schemas


@pytest.mark.parametrize("name", ["nowhere", "no-package"])
def test_a_folder_that_is_none_is_one_line(tmp_path, name):
    (tmp_path / "no-package").mkdir()
    (tmp_path / "no-package" / "__init__.py").touch()
    with pytest.raises(UserError, match=f"{name} is no environment: a folder"):
        load_environment(tmp_path / name)


def test_two_environments_of_one_name_are_two(tmp_path):
    for number in "12":
        (tmp_path / number).mkdir()
        shutil.copytree(TEMPLATE, tmp_path / number / "shop")
    first, second = (load_environment(tmp_path / number / "shop") for number in "12")
    assert first is not second and load_environment(tmp_path / "1" / "shop") is first


def config(folder, *overrides):
    settings = ["model.path=m", "data.source=custom", f"data.path={folder}", "data.demonstrations=40"]
    return load_config(None, [*settings, "data.train_tasks=40", "data.eval_tasks=40", *overrides])


def test_a_custom_source_needs_a_folder_and_may_be_executed_and_gated():
    with pytest.raises(ConfigError, match="data.path=.*make new-env NAME="):
        config("")
    assert config(TEMPLATE, "rollout.environment=real", "gate.mode=block").gate.mode == "block"


# Tasks and experts


@pytest.fixture
def source():
    return open_source(config(TEMPLATE))


def changed(source, **parts):
    """The source with other parts of its environment."""
    old = source.environment
    source.environment = CustomEnvironment(**{**vars(old), **parts})
    return source


def test_the_template_is_a_source_with_an_executable_environment(source):
    assert isinstance(source, CustomSource) and isinstance(source, ExecutableSource)
    train, held_out = source.train_tasks(), source.eval_tasks()
    assert len(train) == len(held_out) == 40 and not {t.id for t in train} & {t.id for t in held_out}
    assert source.train_tasks() == train
    assert source.demonstrations() == source.demonstrations()


def rewards_of(source, tasks):
    rng = random.Random(0)
    return [score(source.demonstrate(task, rng).trajectory())[0] for task in tasks]


def test_the_expert_of_the_template_errs_where_a_book_has_to_be_reserved_and_nowhere_else(source):
    tasks = source.train_tasks()
    assert 0.5 < sum(rewards_of(source, tasks)) / len(tasks) < 1
    is_in = [t for t in tasks if next(iter(t.world["books"].values()))["status"] == "in"]
    assert is_in and all(rewards_of(source, is_in))


def test_calls_of_every_purpose_are_counted(source):
    source.demonstrations()
    made = source.counter.calls["demonstrations"]
    [task, *_] = source.train_tasks()
    called(source.executable(task, "test"), "no_such_tool")
    assert made > 40 and source.counter.calls == {"demonstrations": made, "test": 1}


@pytest.mark.parametrize(
    ("name", "arguments"), [("no_such_tool", {}), ("get_book", {}), ("get_book", {"book_id": 3, "x": 1})]
)
def test_a_call_that_fits_no_schema_is_answered_and_never_reaches_the_tool(source, name, arguments):
    class Untouched:
        def execute(self, call):
            raise AssertionError(call)

    task = source.train_tasks()[0]
    executable = source.executable(task, "test")
    executable.session = Untouched()
    assert called(executable, name, **arguments).keys() == {"error_tool_call"}


def test_the_right_state_is_that_of_right_work(source):
    [task, *_] = [task for task in source.train_tasks() if task.kind == "borrow"]
    dialogue = Dialogue(task, source.executable(task, "test"))
    work_rightly(dialogue)
    assert source.reaches_right_state(dialogue.trajectory()) is True
    assert source.reaches_right_state(Trajectory(task, "", exchanges=dialogue.exchanges[:1])) is False


def test_a_world_that_cannot_tell_its_state_is_neither_right_nor_wrong(source, monkeypatch):
    [task, *_] = source.train_tasks()
    session = type(source.executable(task, "test").session)
    monkeypatch.setattr(session, "state", lambda self: None)
    assert source.reaches_right_state(Trajectory(task, "")) is None


def test_fewer_tasks_than_asked_for_are_told(source, caplog):
    caplog.set_level("INFO", "envace")
    make = source.environment.make_tasks
    changed(source, make_tasks=lambda n, seed, *, held_out: make(7, seed, held_out=held_out))
    assert len(source.eval_tasks()) == 7
    assert "there are 7 held-out tasks, 40 were asked for" in caplog.text


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda tasks: [], "was asked for 40 training tasks and gave 0"),
        (lambda tasks: [*tasks, *tasks], "was asked for 40 training tasks and gave 80"),
        (lambda tasks: [tasks[0], tasks[0]], "two training tasks with the id train-0-0"),
        (lambda tasks: [Task("a", "", tasks[0].tools, [])], "task a: it needs tools and at least one user turn"),
        (lambda tasks: [Task("a", "", tasks[0].tools, ["hi"], goal=1)], "task a: its goal must be an envace.rewards"),
        (lambda tasks: [Task("a", "", tasks[0].tools, ["?"] * 9, goal=tasks[0].goal)], "one TurnGoal per user turn"),
    ],
)
def test_tasks_that_cannot_be_used_are_one_line(source, spoil, message):
    make = source.environment.make_tasks
    changed(source, make_tasks=lambda n, seed, *, held_out: spoil(make(n, seed, held_out=held_out)))
    with pytest.raises(UserError, match=message):
        source.train_tasks()


def answer_twice_too_often(dialogue, rng):
    for _ in range(len(dialogue.task.user_turns) + 2):
        dialogue.answer("yes")


def call_after_the_end(dialogue, rng):
    for _ in dialogue.task.user_turns:
        dialogue.answer("yes")
    dialogue.call(ToolCall("get_book", {"book_id": "A1"}))


@pytest.mark.parametrize(
    ("expert", "message"),
    [
        (lambda dialogue, rng: None, "the expert leaves the user's turn 1 unanswered"),
        (answer_twice_too_often, "the expert answers more often than the user asks"),
        (call_after_the_end, "the expert calls a tool after its last answer"),
    ],
)
def test_an_expert_that_does_not_keep_to_the_dialogue_is_one_line(source, expert, message):
    changed(source, expert=expert)
    with pytest.raises(UserError, match=f"^task train-0-0: {message}"):
        source.demonstrations()


def test_an_expert_in_a_broken_environment_is_one_line(source, monkeypatch):
    def broken(self, call):
        raise ServiceFault("tool get_book raised KeyError: 'A1'")

    monkeypatch.setattr(type(source.executable(source.train_tasks()[0], "test").session), "execute", broken)
    with pytest.raises(UserError, match="task train-0-0: the expert met a broken environment: tool get_book raised"):
        source.demonstrations()


# make new-env


def run_tests(folder, name):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/test_{name}.py"]
    environ = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("tools", TEMPLATES)
def test_a_new_environment_passes_its_tests_at_once_and_not_when_it_is_broken(tmp_path, tools):
    command = [sys.executable, "-m", "envace.custom", "my_shop", "--tools", tools]
    environ = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and "envs/my_shop/config.yaml" in done.stdout.split()
    assert "9 passed" in run_tests(tmp_path, "my_shop").stdout
    library = tmp_path / "envs" / "my_shop" / "library.py"
    right = library.read_text()
    assert '(book_id, "in", "out")' in right
    library.write_text(right.replace('(book_id, "in", "out")', '(book_id, "in", "in")'))
    assert "FAILED tests/test_my_shop.py::test_a_book_that_is_lent_is_out" in run_tests(tmp_path, "my_shop").stdout
    library.write_text(right.replace('(book_id, "in", "out")', '(book_id, "out", "in")'))
    assert "FAILED tests/test_my_shop.py::test_right_work_is_never_refused" in run_tests(tmp_path, "my_shop").stdout


def test_every_file_of_a_new_environment_names_it_and_not_the_template(tmp_path):
    written = new_environment("my_shop", "mcp", tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in written} >= {
        "tests/test_my_shop.py",
        "envs/my_shop/server.py",
        "envs/my_shop/__init__.py",
    }
    assert not [path for path in written if "NAME" in path.read_text()]
    settings = load_config(str(tmp_path / "envs" / "my_shop" / "config.yaml"), [])
    assert (settings.data.path, settings.run_dir) == ("envs/my_shop", "runs/my_shop")


@pytest.mark.parametrize(
    ("name", "tools", "message"),
    [
        ("", "python", "NAME='': take a Python identifier"),
        ("my-shop", "python", "NAME='my-shop': take a Python identifier"),
        ("../shop", "python", "take a Python identifier"),
        ("class", "python", "take a Python identifier"),
        ("__init__", "python", "take a Python identifier"),
        ("nowhere", "python", "envs/nowhere is there already"),
        ("shop", "rest", "TOOLS=rest: take one of python, mcp"),
        ("taken", "python", "envs/taken is there already: take another NAME"),
        ("gate", "python", "tests/test_gate.py is there already"),
    ],
)
def test_a_name_that_cannot_be_used_is_one_line_and_nothing_is_written(tmp_path, name, tools, message):
    (tmp_path / "envs" / "taken").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_gate.py").touch()
    (tmp_path / "envs" / "nowhere").symlink_to("no_such_folder")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=message):
        new_environment(name, tools, tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_in_the_way_is_one_line(tmp_path):
    (tmp_path / "envs").touch()
    with pytest.raises(UserError, match="cannot write .*envs.*: "):
        new_environment("shop", "python", tmp_path)


def test_the_command_says_a_mistake_in_one_line(tmp_path):
    command = [sys.executable, "-m", "envace.custom", "my-shop"]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and done.stderr.startswith("error: NAME=")


@pytest.mark.slow
def test_sft_rl_and_evaluation_run_on_an_mcp_environment(tmp_path, monkeypatch):
    """A policy that has learned next to nothing: what counts is that every stage meets the real server."""
    new_environment("my_shop", "mcp", tmp_path)
    monkeypatch.chdir(tmp_path)
    small = "data.demonstrations=32 data.train_tasks=8 data.eval_tasks=4 sft.steps=40 rl.steps=1 rl.prompts_per_step=2"

    def settings(model, *overrides):
        overrides = [*small.split(), "rl.group_size=2", f"model.path={model}", *overrides]
        return load_config("envs/my_shop/config.yaml", overrides)

    sft = train_sft.main(settings("runs/my_shop/base"))
    rl = train_rl.main(settings(sft))
    results = evaluate.main(settings(rl))
    assert results["tasks"] == 4 and results["unknown_rewards"] == 0
    assert 0 <= results["right_final_state"] <= 1
    counted = yaml.safe_load(Path("runs/my_shop/metrics.jsonl").read_text().splitlines()[40])
    assert counted["env_calls/training"] == 0 and counted["env_calls/evaluation"] > 0
    load_environment("envs/my_shop").tools.close()
