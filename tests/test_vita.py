"""VitaBench's adapter, with a stand-in for its harness, and the script that plays its tasks."""

import json
import stat
import sys
from pathlib import Path

import pytest
import yaml
from openai_server import OpenAIServer, Reply, error, in_order

from envace.benchmarks import vita
from envace.benchmarks.benchmark import Trial
from envace.benchmarks.replay import vita as script
from envace.benchmarks.replay.script import ScriptError
from envace.benchmarks.verify import report, verify
from envace.benchmarks.vita import DOMAINS, PARTS, Vita, read_done
from envace.config import load_config
from envace.types import UserError

# What `python -m vita.cli run` does, as far as the adapter sees it. `plan` says what becomes of each task.
HARNESS = """#!{python}
import argparse, json, os, sys, urllib.request
parser = argparse.ArgumentParser()
for name in ("domain agent-llm user-llm evaluator-llm language seed log-level max-concurrency save-to").split():
    parser.add_argument("--" + name)
parser.add_argument("--task-ids", nargs="+")
arguments = parser.parse_args(sys.argv[4:])
here = os.path.dirname(os.path.abspath(sys.argv[0]))
calls = os.path.join(here, "calls.jsonl")
models = open(os.environ["VITA_MODEL_CONFIG_PATH"]).read()
seen = dict(vars(arguments), models=models, environment=dict(os.environ), module=sys.argv[1:4])
open(calls, "a").write(json.dumps(seen) + "\\n")
plan = json.load(open(os.path.join(here, "plan.json")))
if plan.get("broken"):
    sys.exit("no such module")
runs = []
for task in arguments.task_ids:
    ends = plan.get(task, [[1.0, "user_stop"]])
    reward, end = ends.pop(0) if len(ends) > 1 else ends[0]
    if end != "failed":
        runs.append(dict(task_id=task, reward_info=dict(reward=reward), termination_reason=end))
json.dump(plan, open(os.path.join(here, "plan.json"), "w"))
json.dump(dict(simulations=runs), open(arguments.save_to, "w"))
if plan.get("ask"):
    urls = [line.split(": ", 1)[1] for line in models.splitlines() if "base_url" in line]
    url = urls[["agent", "user", "judge"].index(plan["ask"])]
    request = urllib.request.Request(url, b'{{"model": "m", "messages": []}}')
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({{}})).open(request)
    except Exception as failure:
        print(failure)
if not runs:
    sys.exit("IndexError: list index out of range")
"""


FAILS = (None, "failed")


@pytest.fixture
def home(tmp_path):
    """A .bench in which VitaBench seems to be, with three tasks of delivery."""
    root = tmp_path / "bench" / "vita"
    (root / "bin").mkdir(parents=True)
    (root / "installed.json").write_text("{}")
    program = root / "bin" / "python"
    program.write_text(HARNESS.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    put_tasks(root, "delivery", "chinese", ["t1", "t2", "t3"])
    plan(root)
    return root.parent


def put_tasks(root, part, language, ids):
    path = vita.tasks_file(root.parent, part, language)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([{"id": name} for name in ids]))


def plan(root, **tasks):
    """tasks: (reward, how it ends) at each try, the last one for all further ones; others end well."""
    (root / "bin" / "plan.json").write_text(json.dumps(tasks))


def calls(home):
    path = home / "vita" / "bin" / "calls.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


PARTNERS = ["bench.user.url=http://127.0.0.1:9/v1", "bench.user.model=u", "bench.judge.url=http://127.0.0.1:9/v1"]
PARTNERS += ["bench.judge.model=j", "bench.judge.temperature=0.5"]


def trial(home, tmp_path, *settings, endpoint="http://127.0.0.1:9/v1"):
    config = load_config(None, ["model.path=", f"bench.home={home}", "bench.retries=1", *PARTNERS, *settings])
    folder = tmp_path / "trial0"
    folder.mkdir(exist_ok=True)
    return Trial(folder, endpoint, "the-agent", 7, config)


def test_the_harness_is_told_what_it_needs_and_its_rewards_are_read(home, tmp_path, monkeypatch):
    monkeypatch.setenv("USER_KEY", "sk-user-secret")
    plan(home / "vita", t2=[(0.0, "max_steps")])
    given = trial(home, tmp_path, "bench.user.key_env=USER_KEY", "serve.max_new_tokens=99", "bench.concurrency=3")
    outcome = Vita().run(given, ("delivery",))
    part = outcome.parts["delivery"]
    assert part.score == pytest.approx(100 * 2 / 3) and (part.tasks, part.faults, part.null) == (3, 0, 0.0)
    assert part.details["rewards"] == {"t1": 1.0, "t2": 0.0, "t3": 1.0} and part.details["failed"] == []
    assert part.details["ends"] == {"user_stop": 2, "max_steps": 1} and len(part.details["data_sha256"]) == 64
    # Without all four domains there is no aggregate.
    assert outcome.missing == ["instore", "ota", "cross_domain"] and outcome.overall == {}

    [call] = calls(home)
    assert call["module"] == ["-m", "vita.cli", "run"] and call["task_ids"] == ["t1", "t2", "t3"]
    assert (call["domain"], call["language"], call["seed"], call["max_concurrency"]) == (
        "delivery",
        "chinese",
        "7",
        "3",
    )
    assert Path(call["save_to"]) == given.folder / "delivery-0.json"
    assert call["environment"]["PYTHONPATH"] == str(home / "vita" / "src")
    entries = {entry["name"]: entry for entry in yaml.safe_load(call["models"])["models"]}
    # The harness passes an entry on as arguments beside these two.
    assert set(entries) == {"agent", "user", "judge"} and not any(
        {"model", "messages"} & set(e) for e in entries.values()
    )
    assert (entries["agent"]["temperature"], entries["agent"]["top_p"], entries["agent"]["max_tokens"]) == (
        0.6,
        0.95,
        99,
    )
    assert (entries["user"]["temperature"], entries["judge"]["temperature"]) == (0.0, 0.5)
    assert all(entry["base_url"].endswith("/chat/completions") for entry in entries.values())
    # The key is in nothing that the harness is given, and in no file.
    assert "secret" not in json.dumps(call)
    assert not any("secret" in path.read_text() for path in given.folder.iterdir())
    assert not Path(call["environment"]["VITA_MODEL_CONFIG_PATH"]).exists()


def test_a_task_that_raises_is_tried_again_and_then_a_fault_in_no_score(home, tmp_path):
    plan(home / "vita", t1=[FAILS, (1.0, "user_stop")], t3=[FAILS])
    part = Vita().run(trial(home, tmp_path), ("delivery",)).parts["delivery"]
    assert [call["task_ids"] for call in calls(home)] == [["t1", "t2", "t3"], ["t1", "t3"]]
    assert part.score == 100.0 and part.tasks == 2 and part.faults == 1
    assert part.details["failed"] == ["t3"] and part.details["rewards"] == {"t1": 1.0, "t2": 1.0}


def test_a_run_that_was_cut_off_goes_on(home, tmp_path, caplog):
    given = trial(home, tmp_path)
    run = {"task_id": "t1", "reward_info": {"reward": 0.0}, "termination_reason": "user_stop"}
    unscored = {"task_id": "t2", "reward_info": None, "termination_reason": "user_stop"}
    (given.folder / "delivery-0.json").write_text(json.dumps({"simulations": [run, unscored]}))
    (given.folder / "delivery-3.json").write_text('{"simulations": [')
    part = Vita().run(given, ("delivery",)).parts["delivery"]
    [call] = calls(home)
    assert call["task_ids"] == ["t2", "t3"] and call["save_to"].endswith("delivery-4.json")
    assert part.score == pytest.approx(100 * 2 / 3) and "delivery-3.json is not whole" in caplog.text
    Vita().run(given, ("delivery",))
    assert len(calls(home)) == 1  # nothing was left


def test_only_the_first_tasks(home, tmp_path):
    part = Vita().run(trial(home, tmp_path, "bench.tasks=2"), ("delivery",)).parts["delivery"]
    assert calls(home)[0]["task_ids"] == ["t1", "t2"] and part.tasks == 2


def test_all_parts_have_their_domains_and_two_means(home, tmp_path):
    for part in PARTS[1:]:
        put_tasks(home / "vita", part, "chinese", [f"{part}1"])
    plan(home / "vita", ota1=[(0.0, "user_stop")], t1=[(0.0, "user_stop")])
    outcome = Vita().run(trial(home, tmp_path), PARTS)
    assert [call["domain"] for call in calls(home)] == list(DOMAINS.values())
    assert outcome.missing == [] and outcome.overall["macro"] == pytest.approx((200 / 3 + 100 + 0 + 100) / 4)
    assert outcome.overall["weighted"] == pytest.approx(100 * 4 / 6)


def test_english_tasks_are_other_files(home, tmp_path):
    put_tasks(home / "vita", "delivery", "english", ["e1"])
    Vita().run(trial(home, tmp_path, "bench.language=english"), ("delivery",))
    assert calls(home)[0]["task_ids"] == ["e1"] and calls(home)[0]["language"] == "english"


def test_what_was_not_answered_is_not_the_models_failure(home, tmp_path):
    plan(home / "vita", t3=[FAILS], ask="agent")
    with pytest.raises(UserError, match=r"1 tasks of delivery have no score, .*the agent 1 \(.*run the same command"):
        Vita().run(trial(home, tmp_path), ("delivery",))
    done = read_done(tmp_path / "trial0", "delivery")
    assert set(done) == {"t1", "t2"}
    # With an answer it goes on with what is left.
    with OpenAIServer(in_order(Reply("yes"))) as server:
        plan(home / "vita", ask="agent")
        outcome = Vita().run(trial(home, tmp_path, endpoint=server.url), ("delivery",))
    assert calls(home)[-1]["task_ids"] == ["t3"] and outcome.parts["delivery"].score == 100.0
    assert {logged.body["model"] for logged in server.log} == {"the-agent"}


def test_a_refused_request_is_the_models_own_failure(home, tmp_path):
    plan(home / "vita", t3=[FAILS], ask="agent")
    with OpenAIServer(in_order(error(400, "too long"))) as server:
        outcome = Vita().run(trial(home, tmp_path, endpoint=server.url), ("delivery",))
    assert outcome.parts["delivery"].details["failed"] == ["t3"]


@pytest.mark.parametrize("role", ["user", "judge"])
def test_what_user_or_judge_refuses_is_not_the_models_failure(home, tmp_path, role):
    plan(home / "vita", t3=[FAILS], ask=role)
    with OpenAIServer(in_order(error(400, "too long"))) as server:
        with pytest.raises(UserError, match=f"1 tasks of delivery have no score, .*the {role} 1 .*too long"):
            Vita().run(trial(home, tmp_path, f"bench.{role}.url={server.url}"), ("delivery",))


def test_a_reply_without_choices_is_not_the_models_failure(home, tmp_path):
    plan(home / "vita", t3=[FAILS], ask="agent")
    with OpenAIServer(in_order(Reply(body='{"choices": []}'))) as server:
        with pytest.raises(UserError, match="the agent 1 .*no chat completion"):
            Vita().run(trial(home, tmp_path, endpoint=server.url), ("delivery",))


def test_a_harness_that_does_nothing_is_an_error(home, tmp_path):
    plan(home / "vita", broken=True)
    with pytest.raises(UserError, match="no such module"):
        Vita().run(trial(home, tmp_path), ("delivery",))
    plan(home / "vita", t1=[FAILS], t2=[FAILS], t3=[FAILS])
    with pytest.raises(UserError, match=r"no task of delivery was run to its end: .*vita.log says why"):
        Vita().run(trial(home, tmp_path), ("delivery",))


@pytest.mark.parametrize("role", ["user", "judge"])
def test_user_and_judge_are_needed(home, tmp_path, role):
    with pytest.raises(UserError, match=f"set bench.{role}.url and bench.{role}.model"):
        Vita().run(trial(home, tmp_path, f"bench.{role}.url=", f"bench.{role}.model="), ("delivery",))


def test_missing_data_is_named_with_where_to_get_it(home, tmp_path):
    with pytest.raises(UserError) as caught:
        Vita().run(trial(home, tmp_path), ("delivery", "ota"))
    said = str(caught.value)
    assert f"{vita.REPOSITORY}/raw/{vita.COMMIT}/data/vita/domains/ota/tasks.json" in said
    assert str(home / "vita" / "data/vita/domains/ota/tasks.json") in said and calls(home) == []


def test_it_must_be_set_up(home, tmp_path):
    assert Vita().version(home) == "0.0.1 (96f3b85)"
    with pytest.raises(UserError, match="make bench-setup-vita"):
        Vita().version(tmp_path)


PLACE = {"address": "somewhere", "longitude": 1.0, "latitude": 2.0}


def order(key, status, products=(("p1", 2),), store="s1", **more):
    items = [{"product_id": product, "quantity": quantity, "price": 1.0} for product, quantity in products]
    fixed = {"user_id": "U", "note": "", "location": PLACE, "dispatch_time": ""}
    return (
        {"order_id": key, "order_type": "delivery", "store_id": store, "status": status, "products": items}
        | fixed
        | more
    )


def shown(record, key, status):
    """As the delivery tools show an order."""
    products = ", ".join(
        f"StoreProduct(store_name=x, store_id={record['store_id']}, product_name=y, product_id={p['product_id']}, "
        f"attributes=, quantity={p['quantity']}, price=1.0, tags=[])"
        for p in record["products"]
    )
    return (
        f"Order(order_id:{key}, order_type:delivery, user_id:U, store_id:{record['store_id']}, dispatch_time:now, "
        f"total_price:2.0, create_time:now, update_time:now, note:, status:{status}, products:[{products}])"
    )


def task(expected, before=()):
    return {
        "id": "T1",
        "instructions": "Order noodles.",
        "environment": {"time": "2025-06-21 11:20:00", "user_id": "U", "orders": {o["order_id"]: o for o in before}},
        "evaluation_criteria": {"expected_states": [{"required_orders": expected}]},
    }


@pytest.fixture
def played(tmp_path):
    """The oracle and the judge for one task of delivery."""

    def make(expected, before=()):
        path = vita.tasks_file(tmp_path, "delivery", "english")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([task(expected, before)]))
        return script.oracle(tmp_path, ["delivery"]), script.judge(tmp_path, ["delivery"])

    return make


def play(answer, respond):
    """The agent's calls and what was answered, as windows show them."""
    messages = [{"role": "system", "content": "now"}, {"role": "user", "content": "T1 english"}]
    lines = ["[1] assistant: Hello, how can I help you?", "[2] user: T1 english"]
    while calls := answer(messages, []).calls:
        [call] = calls
        response = respond(call)
        messages += [{"role": "assistant", "content": ""}, {"role": "tool", "content": response}]
        spelled = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
        lines += [f"[{len(lines) + 1}] assistant: {call.name}({spelled})", f"[{len(lines) + 2}] tool: {response}"]
    return [*lines, f"[{len(lines) + 1}] assistant: Done."]


def judged(verdicts, *windows):
    """Whether all rubrics are met after the windows, each of which gets what was said about the one before."""
    rubrics = [
        {"rubric_idx": f"rubric_{i}", "rubric": "r", "justification": "-", "meetExpectation": False} for i in (0, 1)
    ]
    for lines in windows:
        asked = f"# Input\n<window_content>\n{chr(10).join(lines)}\n</window_content>\n\n<current_rubrics>\n"
        asked += f"{json.dumps(rubrics)}\n</current_rubrics>\n"
        system = "sliding window ... Order noodles. ..."
        said = verdicts([{"role": "system", "content": system}, {"role": "user", "content": asked}], [])
        rubrics = json.loads(said.content)
    assert len({rubric["meetExpectation"] for rubric in rubrics}) == 1
    return rubrics[0]["meetExpectation"]


def test_the_script_plays_agent_user_and_judge(played):
    gold = order("G1", "processed")
    answer, verdicts = played([gold])
    told = "You play a user: tell <instructions> to the agent.\n<instructions>\nOrder noodles.\n</instructions>"
    heard = [{"role": "system", "content": told}, {"role": "user", "content": "Hello"}]
    assert answer(heard, []).content == "T1 english"
    later = [*heard, {"role": "assistant", "content": "T1 english"}, {"role": "user", "content": "Done."}]
    assert answer(later, []).content == "###STOP###"

    made = []

    def respond(call):
        made.append(call)
        return shown(gold, "OT1", "unpaid") if call.name == "create_delivery_order" else "Payment successful"

    lines = play(answer, respond)
    assert [call.name for call in made] == ["create_delivery_order", "pay_delivery_order"]
    assert made[0].arguments["product_ids"] == ["p1"] and made[0].arguments["product_cnts"] == [2]
    assert made[0].arguments["dispatch_time"] == "2025-06-21 11:20:00" and made[1].arguments == {"order_id": "OT1"}
    assert judged(verdicts, lines)
    # Windows overlap; what the first one showed is not lost.
    assert judged(verdicts, lines[:4], lines[2:])
    assert not judged(verdicts, lines[:4])  # not paid yet
    assert not judged(verdicts, lines[:2])  # an agent that does nothing
    assert not judged(verdicts, [*lines[:3], "[4] tool: Error: s1 not found", *lines[6:]])
    assert not judged(verdicts, lines, [line.replace("OT1", "OT2") for line in lines])  # ordered twice
    assert not judged(verdicts, [line.replace("quantity=2", "quantity=3") for line in lines])


def test_what_was_there_before_is_paid_cancelled_or_left(played):
    before = [order("A", "paid"), order("B", "unpaid"), order("C", "paid")]
    answer, verdicts = played([order("A", "cancelled"), order("B", "paid"), order("C", "paid")], before)
    responses = {"cancel_delivery_order": "Order A has been cancelled.", "pay_delivery_order": "Payment successful"}
    lines = play(answer, lambda call: responses[call.name])
    assert "cancel_delivery_order(order_id='A')" in lines[2] and "pay_delivery_order(order_id='B')" in lines[4]
    assert judged(verdicts, lines)
    assert not judged(verdicts, lines[:4] + ["[5] assistant: cancel_delivery_order(order_id='C')", "[6] tool: done"])
    assert not judged(verdicts, lines[:2])


def test_orders_that_stand_among_products_are_found(played):
    nested = order("G1", "paid")
    nested["products"].append(order("G2", "cancelled"))
    nested["products"].append(order("G3", "unpaid", store="s2"))
    made = []

    def respond(call):
        made.append(call)
        if call.name == "pay_delivery_order":
            return "Payment successful"
        gold = order("", "", store=call.arguments["store_id"])
        return shown(gold, f"OT{call.arguments['store_id']}", "unpaid")

    answer, verdicts = played([nested])
    assert judged(verdicts, play(answer, respond))
    assert [call.name for call in made] == ["create_delivery_order", "pay_delivery_order", "create_delivery_order"]


def test_doing_nothing():
    told = {"role": "system", "content": "<instructions>\nOrder noodles.\n</instructions>"}
    heard = [told, {"role": "user", "content": "Hello"}]
    first = script.null(heard, []).content
    assert first == "Please help me."
    assert not script.null([{"role": "system", "content": "now"}, {"role": "user", "content": first}], []).calls
    heard += [{"role": "assistant", "content": first}, {"role": "user", "content": "I do nothing."}]
    assert script.null(heard, []).content == "###STOP###"


def test_a_judge_is_asked_about_rubrics(played):
    with pytest.raises(ScriptError, match="no rubrics"):
        played([order("G1", "paid")])[1]([{"role": "user", "content": "Order noodles."}], [])


def test_parts_without_a_script_are_refused(tmp_path):
    with pytest.raises(UserError, match="'ota' is not scripted; there are delivery and instore"):
        script.oracle(tmp_path, ["ota"])
    with pytest.raises(UserError, match="delivery has no data"):
        script.oracle(tmp_path, ["delivery"])


HOME = Path(__file__).parent.parent / ".bench"


@pytest.mark.slow
@pytest.mark.skipif(not (HOME / "vita/installed.json").exists(), reason="vita is not set up: make bench-setup-vita")
@pytest.mark.parametrize("mode", ["oracle", "null"])
def test_the_official_harness_end_to_end(tmp_path, mode):
    """Two tasks through serve, relay and the real harness: right with the expected orders, wrong without."""
    checks = verify("vita", mode, ("delivery",), 2, HOME, tmp_path)
    assert all(c.holds for c in checks), report(checks)
    assert [(c.part, c.right, c.tasks) for c in checks] == [("delivery", 2 if mode == "oracle" else 0, 2)]
    assert "only_offered_calls: false" in (tmp_path / "vita" / "trial0" / "serve.yaml").read_text()
