"""The console: one line for an error, a summary of what lies where, and plain text where no terminal is."""

import io
import logging
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from envace.config import ConfigError, load_config
from envace.console import SUMMARY, command, conclude, progress, setup_logging
from envace.demo.demonstrations import make_demonstrations
from envace.demo.desk import CallCounter
from envace.demo.model import build_model
from envace.types import UserError

ROOT = Path(__file__).parent.parent
TINY = [
    "data.demonstrations=8 data.train_tasks=8 data.eval_tasks=4 rollout.max_rounds=1 rollout.max_new_tokens=8",
    "rollout.max_context_tokens=1024 sft.steps=2 sft.batch_size=4 sft.micro_batch_size=4",
    "rl.steps=2 rl.prompts_per_step=2 rl.group_size=2 eval.samples=1",
]


@pytest.fixture(autouse=True)
def logging_is_put_back():
    logger = logging.getLogger("envace")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


class Terminal(io.StringIO):
    def isatty(self):
        return True


def started(monkeypatch, entry, *arguments):
    """Runs an entry point, a script of the repository or a module, as `python` would."""
    monkeypatch.setattr(sys, "argv", [entry, *map(str, arguments)])
    if entry.endswith(".py"):
        runpy.run_path(str(ROOT / entry), run_name="__main__")
    else:
        runpy.run_module(entry, run_name="__main__", alter_sys=True)


def options(**chosen):
    from argparse import Namespace

    return Namespace(**{"quiet": False, "debug": False} | chosen)


# Quiet


def test_quiet_leaves_warnings_errors_and_the_summary(capsys):
    logger = logging.getLogger("envace")
    for quiet in (False, True):
        with command(options(quiet=quiet)):
            logger.info("a step")
            logger.warning("a warning")
            logger.error("an error")
            conclude({"weights": "runs/x/rl", "next": "make eval"})
    loud, quiet = capsys.readouterr().out.split("make eval\n")[:2]
    assert loud.splitlines() == ["a step", "a warning", "an error", "weights  runs/x/rl", "next     "]
    assert quiet.splitlines() == ["a warning", "an error", "weights  runs/x/rl", "next     "]


def test_the_summary_is_said_by_one_rank_alone(capsys):
    setup_logging()
    logging.getLogger("envace").setLevel(logging.ERROR)  # as Policy does on the others
    conclude({"weights": "runs/x/rl"})
    assert capsys.readouterr().out == "" and SUMMARY < logging.ERROR


@pytest.mark.parametrize("quiet", [False, True])
def test_bars_are_for_terminals_and_not_for_quiet(monkeypatch, quiet):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    setup_logging(quiet=quiet)
    for only_terminal in (False, True):
        terminal.truncate(0)
        with progress(3, "rollout", only_terminal=only_terminal) as bar:
            bar.update(3)
        assert ("rollout" in terminal.getvalue()) is not quiet


def test_a_phase_off_a_terminal_says_nothing(capsys):
    setup_logging()
    with progress(3, "rollout", only_terminal=True) as bar:
        bar.update(3)
    assert capsys.readouterr() == ("", "")
    with progress(3, "rollout") as bar:  # the negative control
        bar.update(3)
    assert "rollout 3/3" in capsys.readouterr().out


# Errors


@pytest.mark.parametrize(
    "error, code", [(ConfigError("a key"), 2), (UserError("a file"), 1), (OSError(28, "No space left", "runs/x"), 1)]
)
def test_a_failure_is_one_line_and_its_traceback_is_for_debug(capsys, error, code):
    with pytest.raises(SystemExit) as ended, command(options()):
        raise error
    said = capsys.readouterr().err
    assert ended.value.code == code and said.startswith("error: ") and said.count("\n") == 1
    with pytest.raises(type(error)), command(options(debug=True)):
        raise error


def test_a_fault_of_the_program_keeps_its_traceback():
    with pytest.raises(KeyError), command(options()):
        raise KeyError("a bug")


def test_another_rank_says_which_it_is(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit), command(options()):
        raise UserError("it broke")
    assert capsys.readouterr().err == "error in process 3: it broke\n"


ENTRY_POINTS = {
    "train_sft.py": (["model.path=./none"], 1, "error: model.path './none' is no folder"),
    "train_rl.py": (["model.path=./none"], 1, "error: model.path './none' is no folder"),
    "evaluate.py": (["model.path=./none"], 1, "error: model.path './none' is no folder"),
    "envace.demo.__main__": (["seed=1"], 2, "error: seed=1 is set by the demo itself"),
    "envace.serve.__main__": (["model.path=./none", "serve.port=0"], 1, "error: model.path './none' is no folder"),
    "envace.dynamics.__main__": (["model.path=x", "run_dir=TMP"], 1, "has no exports"),
    "envace.tts.__main__": (["--samples", "0"], 2, "error: eval.samples=0"),
    "envace.ablations.__main__": (["--only", "gpro"], 2, "error: there is no variant 'gpro'"),
    "envace.report.__main__": (["./none"], 1, "none"),
    "envace.custom.__main__": (["class"], 1, "class"),
    "envace.tables": (["TMP"], 1, "has no results"),
    "envace.merge": (["./none", "TMP/out"], 1, "error: model.path 'none' cannot be loaded"),
    "envace.doctor": (["rl.lrr=1"], 2, "error: unknown key 'rl.lrr' (command line): did you mean rl.lr?"),
    "envace.launch": (["--gpus", "99", "train_rl.py", "model.path=x"], 1, "asked for with --gpus"),
    "envace.data": (["inspect", "./none.json"], 1, "error: ./none.json is missing"),
    "envace.benchmarks.setup": (["tau2", "--source", "TMP"], 1, "is not a checkout"),
    "envace.benchmarks.verify": (["bfcl", "--home", "TMP"], 1, "error: BFCL is not set up in"),
    "envace.benchmarks.replay.__main__": (["bfcl", "--mode", "oracle", "--home", "TMP"], 1, "error: "),
}
ITSELF = {
    "envace.elastic",  # started by envace.launch, with the command line of accelerate
    "envace.custom.template_mcp.server",  # of the user's from then on, started by an MCP client
}


def test_no_entry_point_is_missing_here():
    guarded = [path for path in [*ROOT.glob("*.py"), *ROOT.glob("src/**/*.py")] if "__main__" in path.read_text()]
    names = {
        path.name if path.parent == ROOT else ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        for path in guarded
        if 'if __name__ == "__main__":' in path.read_text()
    }
    assert names == ENTRY_POINTS.keys() | ITSELF


@pytest.mark.parametrize("entry", ENTRY_POINTS)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules.*:RuntimeWarning")
def test_every_entry_point_fails_in_one_line(monkeypatch, capsys, tmp_path, entry):
    arguments, code, message = ENTRY_POINTS[entry]
    arguments = [argument.replace("TMP", str(tmp_path)) for argument in arguments]
    module = entry.removesuffix(".__main__")
    with pytest.raises(SystemExit) as ended:
        started(monkeypatch, module, *arguments)
    said = capsys.readouterr().err
    assert ended.value.code == code and message in said, said
    assert said.count("\n") == 1 and "Traceback" not in said
    # The option of the script stands behind the script.
    with pytest.raises((UserError, ConfigError)):
        started(monkeypatch, module, *arguments, "--debug")


@pytest.mark.slow
def test_debug_shows_the_traceback():
    def ended(*more):
        asked = [sys.executable, "train_sft.py", "model.path=./none", *more]
        return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)

    plain, debug = ended(), ended("--debug")
    assert (plain.returncode, plain.stdout) == (1, "") and debug.returncode == 1
    assert plain.stderr.startswith("error: ") and plain.stderr.count("\n") == 1
    assert "Traceback" in debug.stderr and "LoadError: model.path './none'" in debug.stderr


# A whole run


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("console") / "base"
    recorded = make_demonstrations(64, 0, CallCounter())
    build_model(path, [(task.tools, messages) for task, messages in recorded], seed=0, hidden=32, layers=1)
    return path


def stages(monkeypatch, base, run_dir, *more):
    """SFT, RL and evaluation, the latter two by the command that the one before names as the next."""
    settings = [f"model.path={base}", f"run_dir={run_dir}", *" ".join(TINY).split()]
    started(monkeypatch, "train_sft.py", *settings, *more)
    yield "sft"
    started(monkeypatch, "train_rl.py", *of_make("rl", run_dir), *more)
    yield "rl"
    started(monkeypatch, "evaluate.py", *of_make("eval", run_dir), *more)
    yield "evaluation"


NEXT = {}


def of_make(target, run_dir):
    """The arguments of the script that `make TARGET CONFIG=... ARGS=...` starts."""
    make, named, *variables = shlex.split(NEXT[run_dir])
    assert (make, named) == ("make", target)
    values = dict(variable.split("=", 1) for variable in variables)
    return ["--config", values["CONFIG"], *shlex.split(values["ARGS"])]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Cannot enable progress bars")
@pytest.mark.parametrize("quiet", [False, True])
def test_a_run_is_plain_and_ends_by_saying_where_all_of_it_is(monkeypatch, capfd, tmp_path, base, quiet):
    from transformers.utils import logging as transformers_logging

    transformers_logging.enable_progress_bar()
    for stage in stages(monkeypatch, base, tmp_path, *(["--quiet"] if quiet else [])):
        out, err = capfd.readouterr()
        assert not {"\r", "\x1b"} & set(out + err), err
        assert "Loading weights" not in err and "Writing model shards" not in err
        lines = out.splitlines()
        assert [line for line in lines if len(line) > 100 and str(tmp_path) not in line] == []
        summary = dict(line.split("  ", 1) for line in lines if str(tmp_path) in line and "  " in line)
        summary = {name.strip(): value.strip() for name, value in summary.items()}
        wanted = {"metrics", "TensorBoard", "config"} | ({"trajectories"} if stage != "sft" else set())
        assert wanted <= summary.keys() and ("trajectories" in summary) is (stage != "sft")
        for name in wanted | ({"weights"} if stage != "evaluation" else {"results"}):
            assert Path(summary[name]).exists(), name
        assert load_config(summary["config"], []).run_dir == str(tmp_path)
        NEXT[tmp_path] = summary.get("next", "")
        steps = [line for line in lines if line.startswith(("rl ", "train both roles "))]
        assert bool(steps) is not quiet if stage != "evaluation" else True
        if quiet:
            assert len(lines) <= 8
