"""The frame of a benchmark: trials that differ and can be gone on with, what the server said, what is written down."""

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request

import psutil
import pytest
from openai_server import OpenAIServer, Reply

from envace.benchmarks import runs
from envace.benchmarks.benchmark import Outcome, Part, environment, run_harness
from envace.benchmarks.bfcl import BFCL
from envace.benchmarks.runs import alone_in, chosen_parts, described_model, evaluate_benchmark, over_trials
from envace.benchmarks.served import listening
from envace.benchmarks.setup import interpreter, set_up
from envace.benchmarks.verify import check
from envace.config import ConfigError, load_config
from envace.interrupts import sigterm_interrupts
from envace.records import write_record
from envace.types import UserError


class Asks:
    """A benchmark of one request a part. seeds: of its trials."""

    name = "bfcl"
    served_as = "known"
    parts = ("a", "b", "c")
    default_parts = ("a", "b")

    def __init__(self):
        self.seeds = []
        self.is_interrupted = False

    def version(self, home):
        return "1.0"

    def tools(self, home):
        return ["tail"]

    def run(self, trial, parts):
        self.seeds.append(trial.seed)
        if self.is_interrupted:
            self.server = psutil.Process().children()[-1]
            self.served = self.server.cmdline()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        body = json.dumps({"model": trial.model, "messages": [{"role": "user", "content": "q"}]}).encode()
        for _ in parts:
            asked = urllib.request.Request(f"{trial.endpoint}/chat/completions", body, method="POST")
            with urllib.request.urlopen(asked) as answer:
                assert json.loads(answer.read())["model"] == "known"
        return Outcome({part: Part(50.0 + trial.seed, 4) for part in parts}, {"overall": 25.0}, ["c"])


@pytest.fixture()
def asks(monkeypatch):
    benchmark = Asks()
    monkeypatch.setitem(runs.BENCHMARKS, "bfcl", benchmark)
    return benchmark


def config_of(tmp_path, url, *overrides):
    fixed = ["benchmark=bfcl", "model.path=", f"serve.backend={url}", "serve.backend_model=big", f"run_dir={tmp_path}"]
    return load_config(None, [*fixed, "bench.trials=2", *overrides])


@pytest.mark.slow
def test_trials_are_counted_kept_and_not_run_twice(tmp_path, asks):
    with OpenAIServer(lambda n, body: Reply("hello")) as backend:
        results = evaluate_benchmark(config_of(tmp_path, backend.url))
        assert len(backend.log) == 4 and {logged.body["model"] for logged in backend.log} == {"big"}
        again = evaluate_benchmark(config_of(tmp_path, backend.url))
        more = evaluate_benchmark(config_of(tmp_path, backend.url, "bench.trials=3"))
        with pytest.raises(UserError, match="bench.tasks"):
            evaluate_benchmark(config_of(tmp_path, backend.url, "bench.tasks=7"))
    assert asks.seeds == [0, 1, 2]
    assert [trial["tokens"] for trial in results["trials"]] == [{"prompt": 200, "completion": 40, "rehearsal": 0}] * 2
    assert again["scores"] == results["scores"]
    assert results["scores"]["a"]["mean"] == 50.5 and results["scores"]["a"]["trials"] == 2
    assert results["scores"]["a"]["interval"] == pytest.approx((50.5 - 6.353, 50.5 + 6.353), abs=1e-3)
    assert more["scores"]["a"]["mean"] == 51.0 and more["scores"]["overall"]["interval"] == (25.0, 25.0)
    written = json.loads((tmp_path / "bfcl" / "results.json").read_text())
    assert written["harness"] == {"name": "bfcl", "version": "1.0"}
    assert written["model"] == {"backend": backend.url, "name": "big"}
    assert written["trials"][0]["missing"] == ["c"] and written["settings"]["run"]["bench.trials"] == 3


@pytest.mark.slow
def test_what_an_interrupted_trial_left_is_not_gone_on_with_under_other_settings(tmp_path, asks):
    before = signal.getsignal(signal.SIGTERM)
    with OpenAIServer(lambda n, body: Reply("hello")) as backend:
        asks.is_interrupted = True
        with pytest.raises(UserError, match="interrupted: the same command goes on"):
            evaluate_benchmark(config_of(tmp_path, backend.url))
        assert "envace.serve" in asks.served and signal.getsignal(signal.SIGTERM) is before
        assert not psutil.pid_exists(asks.server.pid)
        asks.is_interrupted = False
        with pytest.raises(
            UserError, match="trial0.*begun.json was made with trial serve.backend_model=big, now it is o"
        ):
            evaluate_benchmark(config_of(tmp_path, backend.url, "serve.backend_model=other"))
        assert asks.seeds == [0] and not backend.log
        evaluate_benchmark(config_of(tmp_path, backend.url))
    assert asks.seeds == [0, 0, 1]


@pytest.mark.slow
def test_a_server_that_cannot_start_says_why(tmp_path, asks):
    config = load_config(None, ["benchmark=bfcl", "model.path=nowhere/at/all", f"run_dir={tmp_path}"])
    with pytest.raises(UserError, match="a server did not start.*nowhere/at/all"):
        evaluate_benchmark(config)
    assert not asks.seeds


def test_parts_are_known_ones():
    assert chosen_parts(Asks(), []) == ("a", "b")
    assert chosen_parts(Asks(), ["c"]) == ("c",)
    with pytest.raises(UserError, match="bfcl has no 'd'; it has a, b, c"):
        chosen_parts(Asks(), ["a", "d"])


def test_a_score_that_is_not_known_leaves_the_mean():
    def trial(score):
        return {"parts": {"a": {"score": score}}, "overall": {}}

    assert over_trials([trial(40.0), trial(None), trial(60.0)])["a"] | {"interval": 0} == {
        "mean": 50.0,
        "interval": 0,
        "trials": 2,
    }
    assert over_trials([trial(None)]) == {}
    assert over_trials([trial(40.0)])["a"]["interval"] is None


def test_a_checkpoint_is_known_by_its_weights(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = described_model(load_config(None, [f"model.path={tmp_path}"]))
    (tmp_path / "config.json").write_text("{}")
    assert described_model(load_config(None, [f"model.path={tmp_path}"])) == before
    (tmp_path / "model.safetensors").write_bytes(b"Weights")
    after = described_model(load_config(None, [f"model.path={tmp_path}"]))
    assert after["name"] == tmp_path.name and after["sha256"] != before["sha256"]


def test_a_harness_gets_no_key_of_this_process(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    given = environment({"OPENAI_API_KEY": "none"})
    assert "secret" not in given.values() and given["OPENAI_API_KEY"] == "none" and "PATH" in given


def test_a_harness_that_fails_is_named_with_its_last_words(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(UserError, match="sh ended with status 3; .*log ends with: first | then last"):
        run_harness(["sh", "-c", "echo first; echo then last >&2; exit 3"], log, {}, tmp_path / "new")
    run_harness(["sh", "-c", "pwd; echo $WORD"], log, {"WORD": "given"}, tmp_path / "new")
    assert log.read_text().splitlines()[-2:] == [str(tmp_path / "new"), "given"]


def test_weights_that_were_trained_on_in_place_are_another_model(tmp_path, asks):
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"before")
    run = f"run_dir={tmp_path / 'run'}"
    config = load_config(None, ["benchmark=bfcl", f"model.path={weights.parent}", "bench.trials=1", run])
    folder = tmp_path / "run" / "bfcl" / "trial0"
    folder.mkdir(parents=True)
    nothing = {"parts": {}, "overall": {}}
    with pytest.MonkeyPatch.context() as patch:  # all but the weights is as it was
        patch.setattr(runs, "is_done", lambda record, settings: write_record(record, settings, **nothing) or True)
        evaluate_benchmark(config)
    weights.write_bytes(b"after")
    with pytest.raises(UserError, match="trial.json was made with trial weights="):
        evaluate_benchmark(config)


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    with alone_in(tmp_path), pytest.raises(UserError, match="another run is at work there"), alone_in(tmp_path):
        pass
    with alone_in(tmp_path):
        pass


@pytest.mark.parametrize(("tasks", "ran", "holds"), [(0, 50, True), (0, 49, False), (5, 5, True), (5, 0, False)])
def test_a_verification_that_lost_tasks_does_not_hold(tasks, ran, holds):
    part = {"tasks": ran, "score": 100.0 if ran else None, "null": 46.0, "faults": 0}
    assert check("tau2", "oracle", "airline", part, tasks).holds is holds


def test_parts_that_are_named_twice_run_once():
    assert chosen_parts(BFCL(), ["irrelevance", "multiple", "irrelevance"]) == ("irrelevance", "multiple")


@pytest.mark.parametrize("url", ["http://h/v1/", "http://h/v1#x", "http://h/v1/chat/completions", "ftp://h/v1"])
def test_the_address_of_a_partner_ends_where_paths_begin(url):
    with pytest.raises(ConfigError, match="bench.judge.url.*must be like"):
        load_config(None, ["model.path=m", f"bench.judge.url={url}", "bench.judge.model=j"])


def test_a_harness_that_does_not_end_when_asked_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("envace.benchmarks.benchmark.STOP_SECONDS", 0.5)
    deaf = tmp_path / "deaf"
    shell = f"trap '' TERM; echo $$ > {deaf}.new; mv {deaf}.new {deaf}; while :; do sleep 0.1; done"

    def interrupt():
        while not deaf.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with sigterm_interrupts(), pytest.raises(KeyboardInterrupt):
        run_harness(["sh", "-c", shell], tmp_path / "log", {}, tmp_path)
    thread.join()
    assert not psutil.pid_exists(int(deaf.read_text()))


def test_a_server_ends_with_its_block(tmp_path):
    program = (
        "import http.server as h; s = h.HTTPServer(('127.0.0.1', 0), h.SimpleHTTPRequestHandler);"
        "print(f'serving on http://127.0.0.1:{s.server_port}/v1', flush=True); s.serve_forever()"
    )
    with pytest.raises(RuntimeError), listening(["python3", "-c", program], tmp_path / "log") as url:
        with urllib.request.urlopen(url) as answer:
            assert answer.status == 200
        raise RuntimeError
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url)


class TestSetUp:
    def test_an_unknown_python_is_named(self):
        with pytest.raises(UserError, match="needs Python 2.1 or 2.2 on the PATH"):
            interpreter(("2.1", "2.2"))

    def test_without_an_index_it_says_so_and_leaves_no_stamp(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", "")
        with pytest.raises(UserError, match="needs a package index once"):
            set_up("bfcl", tmp_path)
        assert not (tmp_path / "bfcl" / "installed.json").exists()
