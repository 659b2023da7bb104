"""tau2: whose failure an end is, scores, the scripts of agent and user; gold actions end to end."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from serving import running, settings

from envace.benchmarks.benchmark import Trial
from envace.benchmarks.replay import tau2 as replay
from envace.benchmarks.replay.__main__ import ReplayEngine, script_of
from envace.benchmarks.replay.script import Answer, ScriptError
from envace.benchmarks.runs import pass_hats
from envace.benchmarks.tau2 import (
    JUDGE,
    PARTS,
    Tau2,
    check_partners,
    command,
    environment,
    is_own_failure,
    overall,
    read_part,
    settle,
)
from envace.benchmarks.verify import check, report, verify
from envace.config import load_config
from envace.metrics import pass_hat_k
from envace.types import ToolCall, UserError

HOME = Path(__file__).parent.parent / ".bench"
ASKED_AGENT = "  line 1, in step\n    agent_msg, self.agent_state = self.agent.generate_next_message(\n"
ASKED_USER = "  line 1, in step\n    user_msg, self.user_state = self.user.generate_next_message(\n"
PARTNERS = ["bench.user.url=http://u:1/v1", "bench.user.model=u", "bench.judge.url=http://j:1/v1"]
PARTNERS += [f"bench.judge.model={JUDGE}"]


def config_of(*overrides):
    return load_config(None, ["model.path=", *overrides])


def ended(task, reason="user_stop", reward=None, kind="", traceback=""):
    """A run as a results file has it."""
    run = {"task_id": task, "termination_reason": reason, "reward_info": None, "info": None}
    if reward is not None:
        run["reward_info"] = {"reward": reward}
    if kind:
        run["info"] = {"error": "?", "error_type": kind, "error_traceback": traceback}
    return run


def fault(task, kind="APIConnectionError", traceback=ASKED_AGENT):
    return ended(task, "infrastructure_error", kind=kind, traceback=traceback)


def write(path, *runs):
    path.write_text(json.dumps({"info": {"seed": 1}, "tasks": [], "simulations": runs}))
    return path


class TestEnds:
    @pytest.mark.parametrize(
        ("kind", "traceback", "is_own"),
        [
            ("ValueError", "in step\n    agent_msg.validate()\n", True),
            ("ValueError", "in step\n    user_msg.validate()\n", False),
            ("BadRequestError", ASKED_AGENT, True),
            ("ContextWindowExceededError", ASKED_AGENT, True),
            ("JSONDecodeError", ASKED_AGENT, True),
            ("BadRequestError", ASKED_USER, False),
            ("JSONDecodeError", ASKED_USER, False),
            ("JSONDecodeError", "in evaluate_nl_assertions\n    json.loads(assistant_message.content)\n", False),
            ("APIConnectionError", ASKED_AGENT, False),
            ("RateLimitError", ASKED_AGENT, False),
            ("InternalServerError", ASKED_AGENT, False),
            ("Timeout", ASKED_AGENT, False),
            ("ValueError", "in calculate_reward\n    raise ValueError\n", False),
        ],
    )
    def test_whose_failure_it_is(self, kind, traceback, is_own):
        assert is_own_failure(fault("0", kind, traceback)) is is_own

    def test_an_end_that_tau2_has_scored_stays(self):
        assert not is_own_failure(ended("0", "max_steps", 0.0))

    def test_own_failures_are_written_down_and_faults_stay(self, tmp_path):
        runs = [ended("0", reward=1.0), fault("1", "ValueError", "agent_msg.validate()"), fault("2")]
        path = write(tmp_path / "results.json", *runs)
        assert settle(path) == 1
        found = json.loads(path.read_text())
        assert (
            found["info"] == {"seed": 1} and found["simulations"][0] == runs[0] and found["simulations"][2] == runs[2]
        )
        settled = found["simulations"][1]
        assert settled["termination_reason"] == "agent_error" and settled["reward_info"]["reward"] == 0.0
        assert settle(path) == 1 and json.loads(path.read_text()) == found
        assert settle(tmp_path / "nothing.json") == 0

    def test_results_that_were_cut_off_are_one_clear_line(self, tmp_path):
        path = write(tmp_path / "results.json", ended("0", reward=1.0))
        path.write_text(path.read_text()[:-9])
        with pytest.raises(UserError, match=r"results.json is not whole, .*move it away"):
            settle(path)


class TestScores:
    def test_a_part(self, tmp_path):
        runs = [ended("0", reward=1.0), ended("1", "max_steps", 0.0), ended("2", "agent_error", 0.0), fault("3")]
        part = read_part(write(tmp_path / "r.json", *runs, ended("4", "agent_stop", 1.0)), 46.0)
        assert (part.score, part.tasks, part.faults, part.null) == (50.0, 4, 1, 46.0)
        assert part.details["rewards"] == {"0": 1.0, "1": 0.0, "2": 0.0, "4": 1.0}
        assert part.details["ends"]["max_steps"] == 1 and part.details["ends"]["infrastructure_error"] == 1

    def test_without_any_answer_the_score_is_unknown_not_zero(self, tmp_path):
        part = read_part(write(tmp_path / "r.json", fault("0"), fault("1")), None)
        assert (part.score, part.tasks, part.faults, part.null) == (None, 0, 2, None)

    def test_means_over_domains_and_over_tasks(self, tmp_path):
        right = {"airline": (23, 50), "retail": (11, 114), "telecom": (0, 114)}
        parts = {}
        for name, (count, tasks) in right.items():
            runs = [ended(str(k), reward=float(k < count)) for k in range(tasks)]
            parts[name] = read_part(write(tmp_path / "r.json", *runs), None)
        assert overall(parts) == pytest.approx({"macro": 18.5497, "weighted": 12.2302}, abs=1e-4)

    @pytest.mark.parametrize(
        ("rewards", "k", "expected"),
        [
            ({"a": [1, 1, 1, 0]}, 1, 0.75),
            ({"a": [1, 1, 1, 0]}, 2, 0.5),
            ({"a": [1, 1, 1, 0]}, 3, 0.25),
            ({"a": [1, 1, 1, 0]}, 4, 0.0),
            ({"a": [1, 1, 1, 0], "b": [1, 1, 1, 1]}, 2, 0.75),
            ({"a": [1, 0], "b": [1, 1, 1]}, 3, 1.0),
            ({"a": [1, 0.5]}, 1, 0.5),
        ],
    )
    def test_pass_hat_k(self, rewards, k, expected):
        assert pass_hat_k(rewards, k) == pytest.approx(expected)

    def test_pass_hat_over_trials_leaves_faults_out(self):
        def trial(**rewards):
            return {"parts": {"airline": {"details": {"rewards": rewards}}, "other": {"details": {}}}}

        hats = pass_hats([trial(a=1.0, b=1.0), trial(a=0.0, b=1.0), trial(a=1.0)])
        assert hats == {"airline": pytest.approx({"1": 250 / 3, "2": 200 / 3, "3": 0.0})}
        assert pass_hats([{"parts": {"other": {"details": {}}}}]) == {}


class TestSettings:
    @pytest.mark.parametrize(
        ("overrides", "said"),
        [
            ([], "set bench.user.url and bench.user.model"),
            (PARTNERS[:2], r"retail needs a judge: set bench.judge.url, .*bench.parts=\[airline,telecom\]"),
            ([*PARTNERS[:3], "bench.judge.model=big"], f"bench.judge.model='big': tau2 asks for its judge as {JUDGE}"),
        ],
    )
    def test_what_is_missing_is_named_in_one_line(self, overrides, said):
        with pytest.raises(UserError, match=said):
            check_partners(config_of(*overrides).bench, PARTS)

    def test_only_retail_is_judged(self):
        check_partners(config_of(*PARTNERS[:2]).bench, ("airline", "telecom"))
        check_partners(config_of(*PARTNERS).bench, PARTS)

    def test_a_missing_harness_is_one_clear_line(self, tmp_path):
        with pytest.raises(UserError, match="tau2 is not set up in .*: run `make bench-setup-tau2`"):
            Tau2().version(tmp_path)

    def test_the_command_says_everything_but_keys(self, tmp_path, monkeypatch):
        monkeypatch.setenv("KEY_OF_USER", "user-secret")
        monkeypatch.setenv("KEY_OF_JUDGE", "judge-secret")
        keys = ["bench.user.key_env=KEY_OF_USER", "bench.judge.key_env=KEY_OF_JUDGE", "bench.user.temperature=0.5"]
        config = config_of(*PARTNERS, *keys, "bench.tasks=3", "bench.concurrency=5", "eval.sampling.temperature=0.25")
        trial = Trial(tmp_path, "http://a:1/v1", "org/name", 7, config)
        words = command(trial, "retail")
        said = dict(zip(words[3::2], words[4::2], strict=True))
        assert words[0].endswith("/tau2/bin/tau2") and words[1:3] == ["run", "--auto-resume"]
        assert said["--domain"] == "retail" and said["--agent-llm"] == "openai/org/name" and said["--seed"] == "7"
        assert (said["--max-steps"], said["--max-errors"], said["--num-trials"]) == ("200", "10", "1")
        assert (said["--num-tasks"], said["--max-concurrency"], said["--max-retries"]) == ("3", "5", "0")
        agent, user = json.loads(said["--agent-llm-args"]), json.loads(said["--user-llm-args"])
        assert agent["api_base"] == "http://a:1/v1" and agent["temperature"] == 0.25 and agent["top_p"] == 0.95
        assert user["api_base"] == "http://u:1/v1" and user["temperature"] == 0.5
        given = environment(trial)
        assert "secret" not in " ".join(words) and given[user["api_key"].removeprefix("os.environ/")] == "user-secret"
        assert given["OPENAI_API_KEY"] == "judge-secret" and given["OPENAI_BASE_URL"] == "http://j:1/v1"
        assert agent["additional_drop_params"] == ["seed"] and "additional_drop_params" not in user
        behind = config_of(*PARTNERS, "serve.backend=http://b:1/v1", "serve.backend_model=b")
        assert "seed" not in " ".join(command(replace(trial, config=behind), "retail")).replace("--seed", "")
        assert "--num-tasks" not in command(replace(trial, config=config_of(*PARTNERS)), "retail")
        assert "OPENAI_API_KEY" not in environment(replace(trial, config=config_of(*PARTNERS[:2])))

    def test_a_key_that_is_not_there_is_named(self, tmp_path):
        config = config_of(*PARTNERS, "bench.user.key_env=NOT_THERE_AT_ALL")
        with pytest.raises(UserError, match="bench.user.key_env must NAME"):
            environment(Trial(tmp_path, "", "m", 0, config))


def action(name, requestor="assistant", **arguments):
    return {"name": name, "arguments": arguments, "requestor": requestor}


def task(name, reason, actions=(), facts=(), before=()):
    told = {"domain": "d", "reason_for_call": reason, "known_info": None, "task_instructions": "Be\n  brief."}
    return {
        "id": name,
        "user_scenario": {"persona": None, "instructions": told},
        "initial_state": {"initialization_actions": [{"func_name": f, "arguments": a} for f, a in before]},
        "evaluation_criteria": {"actions": list(actions), "communicate_info": list(facts)},
    }


def home_with(folder, **tasks):
    """A harness's data: tasks by domain, with one more that is not in the base split."""
    for part, of_part in tasks.items():
        home = folder / "tau2" / "data" / "tau2" / "domains" / part
        home.mkdir(parents=True)
        (home / "tasks.json").write_text(json.dumps([*of_part, task("more", of_part and "one")]))
        (home / "split_tasks.json").write_text(json.dumps({"base": [t["id"] for t in of_part]}))
    return folder


class Talk:
    """A dialogue as tau2 leads it: who speaks sees its own calls, their responses and what the other side says."""

    def __init__(self, script, scenario, respond=lambda call: "ok"):
        greeting = "Hi! How can I help you today?"
        told = f"Guidelines.\n<scenario>\n{scenario}\n</scenario>"
        self.user = [{"role": "system", "content": told}, {"role": "user", "content": greeting}]
        self.agent = [{"role": "system", "content": "Policy."}, {"role": "assistant", "content": greeting}]
        self.calls, self.said = [], []
        own, other, name = self.user, self.agent, "user"
        while True:
            answer = script(own, [])
            own.append({"role": "assistant", "content": answer.content})
            if answer.calls:
                [call] = answer.calls
                own[-1]["tool_calls"] = [{"id": "x", "function": {"name": call.name, "arguments": "{}"}}]
                own.append({"role": "tool", "content": respond(call)})
                self.calls.append((name, call))
                continue
            self.said.append(answer.content)
            if answer.content == "###STOP###":
                return
            other.append({"role": "user", "content": answer.content})
            own, other, name = other, own, "agent" if name == "user" else "user"


class TestScripts:
    def test_gold_actions_are_played_in_order_by_whom_they_belong_to(self, tmp_path):
        actions = [action("a"), action("b", "user"), action("c", "user", x=1), action("d"), action("e")]
        home = home_with(tmp_path, airline=[task("7", "other"), task("8", "one", actions, ["it costs 5", "bye"])])
        scenario = "Instructions:\n\tDomain: d\n\tReason for call:\n\t\tone\n\tTask instructions:\n\t\tBe\n\t\t  brief."
        talk = Talk(replay.oracle(home, ["airline"]), scenario)
        assert [(who, call.name) for who, call in talk.calls] == [
            ("agent", "a"),
            ("user", "b"),
            ("user", "c"),
            ("agent", "d"),
            ("agent", "e"),
        ]
        assert talk.calls[2][1] == ToolCall("c", {"x": 1})
        assert talk.said[0] == "airline 8" and talk.said[-2] == "airline 8\nit costs 5\nbye"
        assert "it costs 5" not in " ".join(talk.said[:-2])

    def test_a_task_without_actions(self, tmp_path):
        home = home_with(tmp_path, retail=[task("1", "one")])
        talk = Talk(replay.oracle(home, ["retail"]), replay.read_golds(home, "retail")[0].scenario)
        assert talk.calls == [] and talk.said == ["retail 1", "retail 1", "###STOP###"]

    @pytest.mark.parametrize("known", ["on", "off", "used"])
    def test_tasks_that_sound_alike_are_told_apart_by_looking(self, tmp_path, known):
        mode, used = ("turn_airplane_mode_on", {}), ("set_data_usage", {"data_used_gb": 15.1})
        tasks = [
            task("on", "one", [action("toggle", "user")], before=[mode]),
            task("off", "one", [action("wave", "user")], before=[]),
            task("used", "one", [action("refuel")], before=[mode, used]),
        ]
        home = home_with(tmp_path, telecom=tasks)

        def respond(call):
            shown = {
                "check_network_status": "Airplane Mode: OFF" if known == "off" else "Airplane Mode: ON",
                "check_app_permissions": "App 'messaging' has permission for: sms, storage.",
                "get_details_by_id": '{"data_used_gb": 15.1}' if known == "used" else '{"data_used_gb": 3.2}',
            }
            return shown.get(call.name, "nothing")

        scenario = replay.read_golds(home, "telecom")[0].scenario
        talk = Talk(replay.oracle(home, ["telecom"]), scenario, respond)
        own = {"on": ("user", "toggle"), "off": ("user", "wave"), "used": ("agent", "refuel")}
        assert [(who, call.name) for who, call in talk.calls][-1] == own[known]
        looks = [call for who, call in talk.calls if who == "user"][: len(replay.USER_LOOKS)]
        assert looks == replay.USER_LOOKS
        assert (("agent", replay.AGENT_LOOKS[0]) in talk.calls) == (known != "off")

    def test_a_scenario_that_no_task_has(self, tmp_path):
        script = replay.oracle(home_with(tmp_path, airline=[task("7", "one")]), ["airline"])
        with pytest.raises(ScriptError, match="no task fits"):
            Talk(script, "else")
        with pytest.raises(ScriptError, match="no task is called 'Hello.'"):
            script([{"role": "system", "content": ""}, {"role": "user", "content": "Hello."}], [])
        with pytest.raises(UserError, match="has no 'space'"):
            replay.oracle(tmp_path, ["space"])

    def test_doing_nothing(self):
        talk = Talk(script_of("tau2", "null", HOME, []), "anything")
        assert talk.calls == [] and len(talk.said) == 3 and talk.said[-1] == "###STOP###"

    def test_the_judge_finds_everything_met(self):
        asked = "conversation:\nuser: expectedOutcomes: none\n\nexpectedOutcomes:\n  ['It\\'s said.', \"b\"]\n  "
        answer = script_of("tau2", "judge", HOME, [])([{"role": "user", "content": asked}], [])
        results = json.loads(answer.content)["results"]
        assert [(r["expectedOutcome"], r["metExpectation"]) for r in results] == [("It's said.", True), ("b", True)]
        with pytest.raises(UserError, match="bfcl has no judge"):
            script_of("bfcl", "judge", HOME, [])


def test_a_floor_of_all_tasks_is_checked_on_all_tasks():
    part = {"tasks": 114, "score": 100 * 11 / 114, "faults": 0, "null": 100 * 11 / 114}
    assert check("tau2", "null", "retail", part, 0).holds
    assert not check("tau2", "null", "retail", part | {"score": 100 * 12 / 114}, 0).holds
    assert not check("tau2", "oracle", "retail", part, 0).holds


@pytest.mark.slow
@pytest.mark.skipif(not (HOME / "tau2" / "installed.json").exists(), reason="tau2 is not set up: make bench-setup-tau2")
class TestHarness:
    """With the official harness, where it is set up."""

    @pytest.fixture(autouse=True)
    def key(self, monkeypatch):
        monkeypatch.setenv("KEY_OF_USER", "open sesame")

    def test_gold_actions_are_right_and_judged(self, tmp_path):
        checks = verify("tau2", "oracle", ("retail",), 3, HOME, tmp_path)
        assert all(c.holds for c in checks), report(checks)
        assert [(c.part, c.right, c.tasks) for c in checks] == [("retail", 3, 3)]
        results = json.loads((tmp_path / "tau2" / "results.json").read_text())
        assert results["trials"][0]["overall"] == {} and results["trials"][0]["missing"] == ["airline", "telecom"]
        assert results["harness"] == {"name": "tau2", "version": "1.0.1"}
        assert results["pass_hat"] == {"retail": {"1": 100.0}}
        assert "only_offered_calls: false" in (tmp_path / "tau2" / "trial0" / "serve.yaml").read_text()
        runs = json.loads((tmp_path / "tau2" / "trial0" / "retail" / "results.json").read_text())["simulations"]
        assert any(run["reward_info"]["nl_assertions"] for run in runs)

    def test_agent_and_user_act_in_turn(self, tmp_path):
        part = run_directly(tmp_path, replay.oracle(HOME, ["telecom"]), "bench.tasks=3", part="telecom")
        assert (part.score, part.tasks, part.faults) == (100.0, 3, 0)

    def test_doing_nothing_is_right_where_nothing_is_to_be_done(self, tmp_path):
        rewards = run_directly(tmp_path, replay.null, "bench.tasks=4").details["rewards"]
        idle = {gold.id for gold in replay.read_golds(HOME, "airline") if not writes(gold)}
        assert rewards == {str(k): float(str(k) in idle) for k in range(4)} and 0 < sum(rewards.values()) < 4

    def test_whose_failure_it_is_and_what_is_run_again(self, tmp_path):
        gold, third = replay.oracle(HOME, ["airline"]), replay.read_golds(HOME, "airline")[2].scenario
        is_healed = False

        def script(messages, tools):
            texts = [message["content"] or "" for message in messages]
            if "airline 0" in texts:
                return gold(messages, tools) if "<scenario>" in texts[0] else Answer("")
            if "airline 1" in texts and "<scenario>" not in texts[0]:
                raise ScriptError("the prompt is too long")
            if third in replay.squeezed(texts[0]) and not is_healed:
                raise ScriptError("the user is not there")
            asked.append(messages)
            return gold(messages, tools)

        asked = []
        part = run_directly(tmp_path, script, "bench.tasks=3", "bench.retries=0")
        assert (part.details["rewards"], part.faults, part.score) == ({"0": 0.0, "1": 0.0}, 1, 0.0)
        is_healed = True
        asked.clear()
        part = run_directly(tmp_path, script, "bench.tasks=3", "bench.retries=0")
        assert (part.details["rewards"], part.faults) == ({"0": 0.0, "1": 0.0, "2": 1.0}, 0)
        assert part.details["ends"] == {"agent_error": 2, "user_stop": 1}
        assert not any("airline 0" in str(messages) or "airline 1" in str(messages) for messages in asked)

    def test_a_server_that_is_not_there_is_a_fault_and_no_score(self, tmp_path):
        user = ["bench.user.url=http://127.0.0.1:9/v1", "bench.user.model=u"]
        config = config_of(*user, f"bench.home={HOME}", "bench.tasks=1", "bench.retries=0")
        part = Tau2().run(Trial(tmp_path, "http://127.0.0.1:9/v1", "m", 0, config), ("airline",)).parts["airline"]
        assert (part.score, part.tasks, part.faults) == (None, 0, 1)


class Heard(ReplayEngine):
    """seeds: of all requests."""

    def __init__(self, script):
        super().__init__(script)
        self.seeds = []

    async def complete(self, request, memory):
        self.seeds.append(request.seed)
        return await super().complete(request, memory)


def run_directly(folder, script, *overrides, part="airline"):
    """One part, with the script itself as the agent's endpoint and, behind a key, as the user's."""
    agent, user = Heard(script), Heard(script)
    with (
        running(lambda _: agent, settings()) as agents,
        running(lambda _: user, settings(), key="open sesame") as users,
    ):
        partner = [f"bench.user.url={users.url}", "bench.user.model=replay", "bench.user.key_env=KEY_OF_USER"]
        config = config_of(*partner, f"bench.home={HOME}", *overrides)
        outcome = Tau2().run(Trial(folder, agents.url, "replay", 0, config), (part,))
    assert set(agent.seeds) == {None} and None not in user.seeds
    kept = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert kept and not any("open sesame" in text for text in kept)
    return outcome.parts[part]


def writes(gold):
    """Whether a task of airline wants anything but looking."""
    looks = ("get_", "search_", "list_", "calculate", "transfer_to_human_agents", "think")
    return bool(gold.facts) or any(not call.name.startswith(looks) for calls, _ in gold.rounds for call in calls)
