"""Rewards: golden cases for every rule, on hand-made trajectories of a world that nobody executes."""

import pytest

from envace.rewards import Branch, Goal, Says, Seen, TurnGoal, score
from envace.types import Evidence, Exchange, Status, Task, ToolCall, Trajectory

READ_TOOLS = frozenset({"look", "find"})
STATES = ("open", "paid", "closed")
OUTCOMES = ("stopped", "repaid", "cannot")

LOOK = ToolCall("look", {"id": "A1"})
STOP = ToolCall("stop", {"id": "A1"})
STATE = Seen(LOOK, "state")
REPAY = ToolCall("repay", {"id": "A1", "sum": Seen(LOOK, "sum")})


def change_if(allowed, write, outcome):
    """Look, then write only if the state seen is `allowed`, else say cannot."""
    others = tuple(state for state in STATES if state != allowed)
    return TurnGoal(
        (
            Branch(((STATE, (allowed,)),), (write,), (Says(outcome, OUTCOMES),)),
            Branch(((STATE, others),), (), (Says("cannot", OUTCOMES),)),
        ),
        (LOOK,),
    )


STOP_IF_OPEN = change_if("open", STOP, "stopped")
REPAY_IF_PAID = change_if("paid", REPAY, "repaid")
TELL_STATE = TurnGoal((Branch(says=(Says(STATE, STATES),)),), (LOOK,))
REFUSE = TurnGoal((Branch(says=(Says("cannot", OUTCOMES),)),))


def look(state="open", *, id="A1", turn=0, **fields):
    return (ToolCall("look", {"id": id}), {"id": id, "state": state, **fields}, turn)


def done(name, *, turn=0, response=None, **arguments):
    return (ToolCall(name, arguments), {"ok": True} if response is None else response, turn)


def judged(goals, exchanges, answers, *, status=Status.FINISHED, evidence=Evidence.REHEARSED):
    goals = goals if isinstance(goals, list) else [goals]
    answers = answers if isinstance(answers, list) else [answers]
    task = Task("t", "", [], ["?"] * len(goals), goal=Goal(tuple(goals), READ_TOOLS))
    made = [Exchange(call, response, turn, i, evidence) for i, (call, response, turn) in enumerate(exchanges)]
    return score(Trajectory(task, "g", exchanges=made, answers=answers, status=status))


def failed(result):
    """The parts that are not satisfied."""
    reward, parts = result
    missing = {name for name, value in parts.items() if value != 1.0}
    assert reward == float(not missing)
    return missing


# Writes


def test_reading_then_the_right_write_then_saying_so_is_success():
    reward, parts = judged(STOP_IF_OPEN, [look(), done("stop", id="A1")], "A1 is stopped.")
    assert reward == 1.0
    assert parts == {"finished": 1.0, "reads": 1.0, "writes": 1.0, "answers": 1.0}


def test_an_identical_retry_counts_once():
    twice = [look(), done("stop", id="A1", response={"error": "busy"}), done("stop", id="A1")]
    assert not failed(judged(STOP_IF_OPEN, twice, "It is stopped."))


def test_the_order_of_arguments_does_not_matter():
    reordered = done("repay", sum=84, id="A1")
    assert not failed(judged(REPAY_IF_PAID, [look("paid", sum=84), reordered], "It is repaid."))


@pytest.mark.parametrize(
    ("seen", "written", "equal"),
    [(84, 84, True), (84, 84.0, True), (84.0, 84, True), (84, "84", False), ("84", 84, False), (84, 85, False)]
    + [(1, True, False), (84, None, False), (84, [84], False)],
)
def test_arguments_are_compared_as_json_values(seen, written, equal):
    exchanges = [look("paid", sum=seen), done("repay", id="A1", sum=written)]
    assert failed(judged(REPAY_IF_PAID, exchanges, "It is repaid.")) == (set() if equal else {"writes"})


def test_an_extra_argument_makes_another_write():
    exchanges = [look(), done("stop", id="A1", force=True)]
    assert failed(judged(STOP_IF_OPEN, exchanges, "It is stopped.")) == {"writes"}


@pytest.mark.parametrize("response", [{"ok": True}, {"error": "unknown_id"}, {"error": "not_permitted"}, None, []])
def test_no_response_erases_a_wrong_write(response):
    for wrong in (("stop", {"id": "A2"}), ("erase", {"id": "A1"}), ("a tool that does not exist", {})):
        exchanges = [look(), done("stop", id="A1"), (ToolCall(*wrong), response, 0)]
        assert failed(judged(STOP_IF_OPEN, exchanges, "It is stopped.")) == {"writes"}


def test_an_error_does_not_undo_a_write_where_nothing_should_change():
    exchanges = [look("paid"), done("stop", id="A1", response={"error": "forbidden"})]
    assert failed(judged(STOP_IF_OPEN, exchanges, "I cannot do that.")) == {"writes"}


def test_a_gold_write_counts_whatever_its_response_said():
    exchanges = [look(), done("stop", id="A1", response={"error": "busy"})]
    assert not failed(judged(STOP_IF_OPEN, exchanges, "It is stopped."))


def test_claiming_a_write_is_not_doing_it():
    assert failed(judged(STOP_IF_OPEN, [look()], "It is stopped.")) == {"writes"}


def test_doing_it_and_denying_it_fails():
    exchanges = [look(), done("stop", id="A1")]
    assert failed(judged(STOP_IF_OPEN, exchanges, "I cannot do that.")) == {"answers"}


def test_extra_reads_are_free():
    exchanges = [look(id="A7"), look(), (ToolCall("find", {"id": "Z"}), {"error": "unknown_id"}, 0)]
    assert not failed(judged(STOP_IF_OPEN, [*exchanges, done("stop", id="A1")], "It is stopped."))


MARK = TurnGoal((Branch(writes=(ToolCall("mark", {"id": "A1"}),)),))


def test_the_writes_of_every_turn_must_be_made():
    goals, answers = [STOP_IF_OPEN, MARK], ["It is stopped.", "Marked."]
    assert failed(judged(goals, [look(), done("stop", id="A1")], answers)) == {"writes"}
    assert not failed(judged(goals, [look(), done("stop", id="A1"), done("mark", id="A1", turn=1)], answers))


def test_a_write_belongs_to_the_turn_that_asked_for_it():
    goals, answers = [STOP_IF_OPEN, MARK], ["It is stopped.", "Marked."]
    early = [look(), done("stop", id="A1"), done("mark", id="A1")]
    assert failed(judged(goals, early, answers)) == {"writes"}
    late = [look(), done("stop", id="A1", turn=1), done("mark", id="A1", turn=1)]
    assert "writes" in failed(judged(goals, late, answers))


def test_repeating_a_right_write_in_a_later_turn_changes_nothing():
    goals, answers = [STOP_IF_OPEN, MARK], ["It is stopped.", "Marked."]
    again = [look(), done("stop", id="A1"), done("stop", id="A1", turn=1), done("mark", id="A1", turn=1)]
    assert not failed(judged(goals, again, answers))


# Required reads


def test_a_skipped_read_fails_even_if_the_write_is_right():
    goal = TurnGoal((Branch(writes=(STOP,), says=(Says("stopped"),)),), (LOOK,))
    assert failed(judged(goal, [done("stop", id="A1")], "It is stopped.")) == {"reads"}
    assert not failed(judged(goal, [look(), done("stop", id="A1")], "It is stopped."))


def test_a_read_behind_the_write_comes_too_late():
    assert failed(judged(STOP_IF_OPEN, [done("stop", id="A1"), look()], "It is stopped.")) == {"reads"}


def test_a_read_behind_the_write_of_a_later_turn_comes_too_late():
    goals = [REFUSE, STOP_IF_OPEN]
    answers = ["I cannot do that.", "It is stopped."]
    late = [done("stop", id="A1", turn=1), look(turn=1)]
    assert failed(judged(goals, late, answers)) == {"reads"}
    assert not failed(judged(goals, late[::-1], answers))


def test_a_read_of_an_earlier_turn_counts():
    goals, answers = [TELL_STATE, STOP_IF_OPEN], ["It is open.", "It is stopped."]
    assert not failed(judged(goals, [look(), done("stop", id="A1", turn=1)], answers))


def test_a_write_of_an_earlier_turn_does_not_make_a_read_late():
    mark = TurnGoal((Branch(writes=(ToolCall("mark", {"id": "A1"}),)),))
    exchanges = [done("mark", id="A1"), look(turn=1), done("stop", id="A1", turn=1)]
    assert not failed(judged([mark, STOP_IF_OPEN], exchanges, ["Marked.", "It is stopped."]))


def test_a_read_of_another_id_does_not_count():
    goal = TurnGoal((Branch(writes=(STOP,)),), (LOOK,))
    assert failed(judged(goal, [look(id="A2"), done("stop", id="A1")], "")) == {"reads"}


def test_a_required_read_that_only_returned_an_error_was_still_made():
    goal = TurnGoal((Branch(says=(Says("cannot"),)),), (LOOK,))
    assert not failed(judged(goal, [(LOOK, {"error": "unknown_id"}, 0)], "I cannot find it."))


# Facts in an answer


def test_the_rehearsed_value_counts_and_the_real_one_that_was_not_seen_does_not():
    # The world may say "open": what the agent was told is "closed".
    assert not failed(judged(TELL_STATE, [look("closed")], "A1 is closed."))
    assert failed(judged(TELL_STATE, [look("closed")], "A1 is open.")) == {"answers"}


def test_listing_every_alternative_is_no_answer():
    assert failed(judged(TELL_STATE, [look("paid")], "It is open, paid or closed.")) == {"answers"}
    assert failed(judged(TELL_STATE, [look("paid")], "paid, not open")) == {"answers"}
    assert failed(judged(REFUSE, [], "I cannot, but it is stopped.")) == {"answers"}


def test_a_fact_is_a_whole_word():
    for answer in ("It is unpaid.", "It is paid2.", "It is re_paid.", "PAID", "", "It is."):
        assert failed(judged(TELL_STATE, [look("paid")], answer)) == {"answers"}
    for answer in ("paid", "It is paid.", "(paid)", "It is 'paid'", "paid: yes", "It has been paid\nfor."):
        assert not failed(judged(TELL_STATE, [look("paid")], answer))


def test_an_alternative_inside_another_word_does_no_harm():
    assert not failed(judged(TELL_STATE, [look("paid")], "It is paid; I reopened nothing."))


TELL_ANYTHING = TurnGoal((Branch(says=(Says(STATE),)),), (LOOK,))


def test_a_seen_value_is_text_and_never_a_pattern():
    assert failed(judged(TELL_ANYTHING, [look("p.*d")], "It is paid.")) == {"answers"}
    assert not failed(judged(TELL_ANYTHING, [look("p.*d")], "It is p.*d ."))


@pytest.mark.parametrize("empty", ["", " ", ".", "\n", [], {}])
def test_a_response_that_says_nothing_cannot_be_stated(empty):
    assert failed(judged(TELL_ANYTHING, [look(empty)], "Something , or other . \n")) == {"answers"}


@pytest.mark.parametrize("invented", ["evaporated", "", "Paid", "open or paid", None, 3, ["paid"], {"paid": True}])
def test_a_seen_value_that_is_no_known_alternative_is_as_good_as_none(invented):
    for answer in ("It is evaporated.", "It is open or paid .", "It is Paid.", f"It is {invented}.", "It is paid."):
        assert judged(TELL_STATE, [look(invented)], answer)[0] == 0.0


def test_an_alternative_counts_however_it_is_spelled():
    assert failed(judged(TELL_STATE, [look("paid")], "It is paid, OPEN or Closed.")) == {"answers"}


@pytest.mark.parametrize(
    ("seen", "said", "equal"),
    [(84, "84", True), (84.0, "84", True), (84.5, "84.5", True), (84, "184", False), (84, "8", False)]
    + [(True, "true", True), (None, "null", True), (None, "open", False)],
)
def test_a_value_that_is_no_text_is_stated_as_json_writes_it(seen, said, equal):
    goal = TurnGoal((Branch(says=(Says(Seen(LOOK, "sum")),)),), (LOOK,))
    assert failed(judged(goal, [look(sum=seen)], f"The sum is {said} .")) == (set() if equal else {"answers"})


def two_states():
    other = ToolCall("look", {"id": "B2"})
    says = (Says(STATE, STATES), Says(Seen(other, "state"), STATES))
    return TurnGoal((Branch(says=says),), (LOOK, other))


def test_two_facts_must_both_be_stated():
    seen = [look("open"), look("paid", id="B2")]
    assert not failed(judged(two_states(), seen, "A1 is open. B2 is paid."))
    assert failed(judged(two_states(), seen, "A1 is open.")) == {"answers"}
    assert failed(judged(two_states(), seen, "B2 is paid.")) == {"answers"}
    assert not failed(judged(two_states(), [look("open"), look("open", id="B2")], "Both are open."))


def test_two_facts_do_not_excuse_listing_every_alternative():
    seen = [look("open"), look("paid", id="B2")]
    assert failed(judged(two_states(), seen, "They are open, paid and closed.")) == {"answers"}
    assert failed(judged(two_states(), [look("open"), look("open", id="B2")], "One is open, one paid.")) == {"answers"}


def two_subjects():
    other = ToolCall("look", {"id": "B2"})
    says = (Says(STATE, STATES, about="A1"), Says(Seen(other, "state"), STATES, about="B2"))
    return TurnGoal((Branch(says=says),), (LOOK, other))


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("A1 is open. B2 is paid.", True),
        ("B2 is paid! A1 is open?", True),
        ("Gladly. A1 is open.\nB2 is paid.", True),
        ("A1 is paid. B2 is open.", False),
        ("A1 is open. The other is paid.", False),
        ("A1 is open. B2 is open, closed or paid.", False),
        ("A1 is open. A1 is paid. B2 is paid.", False),
        ("A10 is open. B2 is paid.", False),
        ("", False),
    ],
)
def test_facts_about_two_things_cannot_be_swapped(answer, right):
    seen = [look("open"), look("paid", id="B2")]
    assert failed(judged(two_subjects(), seen, answer)) == (set() if right else {"answers"})


def test_a_subject_may_be_known_only_from_a_read():
    last = Seen(ToolCall("find", {"who": "K"}), "last")
    says = Says(Seen(ToolCall("look", {"id": last}), "state"), STATES, about=last)
    goal = TurnGoal((Branch(says=(says,)),))
    assert not failed(judged(goal, [find("B2"), look("paid", id="B2")], "B2 is paid."))
    assert failed(judged(goal, [find("B2"), look("paid", id="B2")], "A1 is paid.")) == {"answers"}


def test_each_turn_is_judged_by_its_own_answer():
    goals = [TELL_STATE, REFUSE]
    assert not failed(judged(goals, [look("paid")], ["It is paid.", "I cannot do that."]))
    assert failed(judged(goals, [look("paid")], ["I cannot do that.", "It is paid."])) == {"answers"}


def test_a_read_beside_the_write_in_one_output_comes_too_late():
    task = Task("t", "", [], ["?"], goal=Goal((STOP_IF_OPEN,), READ_TOOLS))
    read, write = (LOOK, {"id": "A1", "state": "open"}), (STOP, {"ok": True})
    for rounds, expected in (((0, 1), 1.0), ((0, 0), 0.0)):
        made = [Exchange(*e, 0, r, Evidence.REHEARSED) for e, r in zip((read, write), rounds, strict=True)]
        assert score(Trajectory(task, "g", exchanges=made, answers=["It is stopped."]))[0] == expected


# Values known only from a response


CHAIN = TurnGoal(
    (
        Branch(
            says=(Says(Seen(ToolCall("look", {"id": Seen(ToolCall("find", {"who": "K"}), "last")}), "state"), STATES),)
        ),
    ),
    (ToolCall("look", {"id": Seen(ToolCall("find", {"who": "K"}), "last")}),),
)


def find(last):
    return (ToolCall("find", {"who": "K"}), {"last": last}, 0)


def test_an_id_known_only_from_a_read_is_followed():
    assert not failed(judged(CHAIN, [find("A1"), look("paid"), look("open", id="B2")], "It is paid."))
    assert not failed(judged(CHAIN, [find("B2"), look("paid"), look("open", id="B2")], "It is open."))


def test_a_chain_that_was_not_followed_to_its_end_is_unsolved():
    assert failed(judged(CHAIN, [find("A1"), look("open", id="B2")], "It is open.")) == {"reads", "answers"}
    assert failed(judged(CHAIN, [look("paid")], "It is paid.")) == {"reads", "writes", "answers"}


def test_a_write_may_need_an_id_from_a_read():
    stop_last = ToolCall("stop", {"id": Seen(ToolCall("find", {"who": "K"}), "last")})
    goal = TurnGoal((Branch(writes=(stop_last,)),))
    assert not failed(judged(goal, [find("A1"), done("stop", id="A1")], ""))
    assert failed(judged(goal, [find("B2"), done("stop", id="A1")], "")) == {"writes"}


def test_the_first_response_that_has_the_field_decides():
    retried = [(LOOK, {"error": "busy"}, 0), look("paid"), look("open")]
    assert not failed(judged(TELL_STATE, retried, "It is paid."))
    assert failed(judged(TELL_STATE, retried, "It is open.")) == {"answers"}


def test_nothing_read_later_makes_an_earlier_answer_right():
    goals, answers = [TELL_STATE, TELL_STATE], ["It is paid.", "It is paid."]
    assert not failed(judged(goals, [look("paid")], answers))
    assert failed(judged(goals, [look("paid", turn=1)], answers)) == {"reads", "answers"}


def test_nothing_read_later_makes_an_earlier_write_right():
    goals, answers = [STOP_IF_OPEN, TELL_STATE], ["It is stopped.", "It is open."]
    guessed = [done("stop", id="A1"), look("open", turn=1)]
    assert judged(goals, guessed, answers)[0] == 0.0


# Branches


@pytest.mark.parametrize("state", STATES)
def test_the_state_that_was_seen_decides_what_is_right(state):
    wrote = judged(STOP_IF_OPEN, [look(state), done("stop", id="A1")], "It is stopped.")
    refused = judged(STOP_IF_OPEN, [look(state)], "I cannot do that.")
    assert failed(wrote) == (set() if state == "open" else {"writes", "answers"})
    assert failed(refused) == ({"writes", "answers"} if state == "open" else set())


def test_a_state_that_no_branch_knows_cannot_be_solved():
    unknown = look("evaporated")
    for exchanges, answer in (([unknown], "I cannot do that."), ([unknown, done("stop", id="A1")], "It is stopped.")):
        assert failed(judged(STOP_IF_OPEN, exchanges, answer)) == {"reads", "writes", "answers"}


@pytest.mark.parametrize("goal", [STOP_IF_OPEN, REPAY_IF_PAID, TELL_STATE, CHAIN, two_states()])
@pytest.mark.parametrize("response", [{"ok": True}, {}, [], [{"state": "open"}], {"error": "unknown_id"}])
def test_a_world_that_answers_nothing_is_never_rewarded(goal, response):
    exchanges = [(ToolCall(name, {key: value}), response, 0) for name, key, value in READS]
    for answer in ("I cannot do that.", "It is open.", "It is stopped.", "unknown", ""):
        for writes in ([], [done("stop", id="A1")]):
            assert judged(goal, exchanges + writes, answer)[0] == 0.0


READS = [("look", "id", "A1"), ("look", "id", "B2"), ("find", "who", "K")]


def test_a_refusal_without_any_call_is_right_only_where_nothing_has_to_be_seen():
    assert not failed(judged(REFUSE, [], "I cannot do that."))
    for goal in (STOP_IF_OPEN, REPAY_IF_PAID, TELL_STATE, CHAIN):
        assert judged(goal, [], "I cannot do that.")[0] == 0.0


# Endings


@pytest.mark.parametrize("status", [Status.PARSE_ERROR, Status.TRUNCATED])
def test_an_unfinished_trajectory_has_a_known_reward_of_zero(status):
    reward, parts = judged(STOP_IF_OPEN, [look(), done("stop", id="A1")], "It is stopped.", status=status)
    assert reward == 0.0
    assert parts == {"finished": 0.0, "reads": 0.0, "writes": 0.0, "answers": 0.0}


def test_a_service_fault_leaves_the_reward_unknown():
    reward, parts = judged(STOP_IF_OPEN, [look(), done("stop", id="A1")], "It is stopped.", status=Status.FAULT)
    assert reward is None and parts == {}


@pytest.mark.parametrize("answers", [[], ["It is paid."], ["It is paid.", "I cannot do that.", "Bye."]])
def test_every_turn_needs_exactly_one_answer(answers):
    reward, parts = judged([TELL_STATE, REFUSE], [look("paid")], answers)
    assert reward == 0.0 and parts["finished"] == 0.0


# One scorer for both worlds


@pytest.mark.parametrize(
    ("goal", "exchanges", "answer"),
    [
        (STOP_IF_OPEN, [look(), done("stop", id="A1")], "It is stopped."),
        (STOP_IF_OPEN, [done("stop", id="A1"), look()], "It is stopped."),
        (STOP_IF_OPEN, [look("evaporated")], "I cannot do that."),
        (REPAY_IF_PAID, [look("paid", sum=84), done("repay", id="A1", sum=48)], "It is repaid."),
        (TELL_STATE, [look("paid")], "It is open."),
    ],
)
def test_the_same_exchanges_score_the_same_rehearsed_or_real(goal, exchanges, answer):
    rehearsed = judged(goal, exchanges, answer, evidence=Evidence.REHEARSED)
    assert rehearsed == judged(goal, exchanges, answer, evidence=Evidence.OBSERVED)


def test_scoring_leaves_the_trajectory_alone():
    task = Task("t", "", [], ["?"], goal=Goal((TELL_STATE,), READ_TOOLS))
    exchange = Exchange(LOOK, {"state": "paid"}, 0, 0, Evidence.OBSERVED)
    trajectory = Trajectory(task, "g", exchanges=[exchange], answers=["It is paid."])
    score(trajectory)
    assert trajectory.reward is None and trajectory.reward_parts == {} and trajectory.exchanges == [exchange]
