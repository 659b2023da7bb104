"""The report page in a real browser: what it shows, how it is driven, and that no text of a model ever acts."""

import json
import re
import shutil
import sys
from importlib.resources import files

import pytest

from envace.report.__main__ import main
from envace.report.page.build import write_page
from envace.report.page.runs import read_runs
from envace.types import UserError

FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
FLAGS += "--disable-component-update --disable-sync --window-size=1300,900"
HOSTILE = "<script>document.title='owned'</script></script><!-- <img src=x onerror=\"document.title='owned'\"> \x1b[31m"
HOSTILE += " \u202egnp\u2066 \0 \ud800 &amp; end"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("no browser: chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


def segment(role, evidence, text, **rest):
    common = {"sequence": 0, "tokens": 3, "finish_reason": None, "provenance": {}}
    return common | {"role": role, "evidence": evidence, "text": text} | rest


def call(name):
    return segment("act", "claimed", f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>')


def trajectory(number, *middle, **rest):
    given = segment("context", "given", f"system text\nuser says {number}\nassistant")
    record = {"stage": "rl", "step": number // 4, "split": "train", "task": f"task-{number}", "kind": "k"}
    record |= {"group_id": "g", "status": "finished", "reason": "", "reward": 1.0, "reward_parts": {"reads": 0.25}}
    record |= {"verdicts": [], "predictions": [], "user_turns": [f"user says {number}"]}
    return (
        record
        | {"segments": [given, *middle, segment("act", "claimed", f"answer {number}", finish_reason="stop")]}
        | rest
    )


def write_run(folder, trajectories=(), metrics=(), settings="rl:\n  lr: 0.1\n"):
    folder.mkdir(parents=True)
    for name, records in (("trajectories", trajectories), ("metrics", metrics)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "rl.config.yaml").write_text(settings)
    return folder


def curve(values, name="reward/mean"):
    return [{"stage": "rl", "step": step, "time": 0, name: value} for step, value in enumerate(values)]


def open_page(browser, tmp_path, *folders, fragment=""):
    """Afterwards `logs` must be empty: no error, and nothing that the policy of the page refused."""
    out = tmp_path / "report.html"
    write_page(read_runs(list(folders)), out)
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(out.as_uri() + fragment)
    wait(browser, "document.body.dataset.ready === 'true'")
    return out


def wait(browser, condition):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 60).until(lambda b: b.execute_script(f"return Boolean({condition})"), condition)


def keys(browser, text):
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser).send_keys(text).perform()


def set_value(browser, name, value):
    browser.execute_script(
        "const n = document.getElementById(arguments[0]); n.value = arguments[1];"
        "n.dispatchEvent(new Event('input', {bubbles: true}))",
        name,
        value,
    )


def text(browser, selector):
    return browser.execute_script("return document.querySelector(arguments[0]).innerText", selector)


def count_is(browser, expected):
    wait(browser, f"document.getElementById('count').textContent.startsWith('{expected} of')")


def test_curves_of_two_runs_and_what_differs(browser, tmp_path):
    a = write_run(tmp_path / "a", metrics=curve([0.1, 0.5]))
    b = write_run(tmp_path / "b", metrics=curve([0.2, "NaN", 0.75]), settings="rl:\n  lr: 0.2\n  new: 1\nseed: 0\n")
    open_page(browser, tmp_path, a, b)
    wait(browser, "document.querySelector('#charts canvas')")
    assert text(browser, "#charts .last").split() == ["0.5", "0.75"]
    keys(browser, "2")
    rows = text(browser, "#settings-table")
    assert "rl.lr\t0.1\t0.2\tdiffers" in rows and "rl.new\tnot recorded\t1\tonly in some" in rows
    assert browser.get_log("browser") == []


def test_filters_and_keys(browser, tmp_path):
    made = [trajectory(n, call("get_order")) for n in range(10)]
    made[3] |= {"status": "parse_error", "reward": 0.0}
    made[4]["segments"][1:1] = [call("refund")]
    made[5]["reward"] = None
    open_page(browser, tmp_path, write_run(tmp_path / "a", made))
    keys(browser, "3")
    count_is(browser, 10)
    for name, value, expected, neutral in (
        ("by-status", "parse_error", 1, "\0any"),
        ("by-tool", "refund", 1, "\0any"),
        ("by-tool", "get_order", 10, "\0any"),
        ("reward-high", "0.5", 1, ""),
        ("reward-low", "0.5", 8, ""),  # an unknown reward is in no range
        ("step-low", "2", 2, ""),
        ("search", "ANSWER 7", 1, ""),
        ("search", "no such text", 0, ""),
    ):
        set_value(browser, name, value)
        count_is(browser, expected)
        set_value(browser, name, neutral)
        count_is(browser, 10)
    browser.execute_script("document.getElementById('bad').click()")
    count_is(browser, 1)
    keys(browser, "j")
    wait(browser, "document.querySelector('#detail h2').textContent === 'task-3'")
    browser.execute_script("document.getElementById('bad').click()")
    count_is(browser, 10)
    keys(browser, "jj")
    wait(browser, "document.querySelector('#detail h2').textContent === 'task-5' && location.hash === '#t=5'")
    keys(browser, "k")
    wait(browser, "document.querySelector('#detail h2').textContent === 'task-4'")
    keys(browser, "/jk")  # in the search these are letters
    assert browser.execute_script("return document.getElementById('search').value") == "jk"
    count_is(browser, 0)
    assert browser.get_log("browser") == []


TOKENS = {"logprobs": [-0.1, -3.0], "updated_logprobs": [-0.2, -2.0]}


def test_segments_say_who_wrote_them_and_old_records_say_what_they_lack(browser, tmp_path):
    middle = [
        call("get_order") | {"advantage": -0.5, "token_texts": ["<tool", "_call>"]} | TOKENS,
        segment("rehearse", "rehearsed", "imagined", advantage=0.75),
        segment("context", "observed", "seen"),
        segment("context", "observed", "replayed", provenance={"source": "recorded dialogue"}),
        segment("context", "simulated", "played"),
        segment("act", "claimed", "no call </tool_call>", finish_reason="parse_error"),
    ]
    run = write_run(tmp_path / "a", [trajectory(0, *middle), trajectory(1)])
    open_page(browser, tmp_path, run, fragment="#t=0")
    wait(browser, "document.querySelector('#detail h2')?.textContent === 'task-0'")
    pills = browser.execute_script("return [...document.querySelectorAll('#detail .pill')].map((p) => p.textContent)")
    assert pills == ["GIVEN", "USER", "GIVEN", "ACT", "REHEARSE", "OBSERVED", "RECORDED", "SIMULATED", "ACT", "CLAIMED"]
    facts = " ".join(text(browser, "#detail dl").split())
    assert "reads 0.25" in facts and "advantage ACT -0.5" in facts and "advantage REHEARSE 0.75" in facts
    keys(browser, "p")
    wait(browser, "document.querySelectorAll('#detail .token').length === 2")
    assert browser.execute_script("return document.querySelectorAll('.token')[1].title") == "logprob -3, p 0.0498"
    keys(browser, "r")
    wait(browser, "document.getElementById('ratio').getAttribute('aria-pressed') === 'true'")
    shades = browser.execute_script(
        "return [...document.querySelectorAll('.token')].map((t) => [t.className, t.title])"
    )
    assert shades == [
        ["token level2 down", "ratio 0.9048, logprob -0.1 before"],
        ["token level5 up", "ratio 2.718, logprob -3 before"],
    ]
    keys(browser, "j")
    wait(browser, "document.querySelector('#detail h2').textContent === 'task-1'")
    facts = " ".join(text(browser, "#detail dl").split())
    assert "advantage ACT not recorded" in facts and "advantage REHEARSE no output" in facts
    assert "not recorded" in text(browser, "#detail .note")
    assert browser.get_log("browser") == []


def test_hostile_text_is_shown_and_does_nothing(browser, tmp_path):
    hostile = trajectory(0, segment("rehearse", "rehearsed", HOSTILE), task=HOSTILE, kind=HOSTILE, reason=HOSTILE)
    hostile |= {"reward_parts": {HOSTILE: 1.0}, "split": HOSTILE, "user_turns": [HOSTILE]}
    long = trajectory(1, segment("context", "observed", "x" * 1_000_000))
    metrics = [record | {HOSTILE: 1.0} for record in curve([0.1, 0.2])]
    run = write_run(tmp_path / "a", [hostile, long], metrics, settings=json.dumps({HOSTILE.replace("\ud800", ""): 1}))
    out = open_page(browser, tmp_path, run, fragment="#t=0")
    wait(browser, "document.querySelector('#detail h2')")
    shown = text(browser, "#detail .kind-rehearse-rehearsed pre")
    assert shown.startswith("<script>document.title='owned'</script></script><!-- <img")
    for escape in ("‹U+001B›[31m", "‹U+202E›gnp‹U+2066›", "‹U+0000›", "‹U+D800›", "&amp; end"):
        assert escape in shown
    keys(browser, "j")
    wait(browser, "document.querySelector('#detail h2').textContent === 'task-1'")
    length = "return document.querySelector('.kind-context-observed pre').textContent.length"
    assert browser.execute_script(length) < 10_000
    assert text(browser, ".more") == "show all 1,000,000 characters"
    browser.execute_script("document.querySelector('.more').click()")
    assert browser.execute_script(length) == 1_000_000
    for tab in "12":
        keys(browser, tab)
    assert browser.title == "EnvACE report"
    assert browser.execute_script("return document.querySelectorAll('img, iframe, link').length") == 0
    assert "owned" not in out.read_text()
    assert browser.get_log("browser") == []


def test_the_policy_of_the_page_refuses_scripts_and_requests(browser, tmp_path):
    """The control for the tests above: something hostile that did get in would be stopped, and they would see it."""
    open_page(browser, tmp_path, write_run(tmp_path / "a"))
    browser.execute_script(
        "const s = document.createElement('script'); s.textContent = \"document.title = 'owned'\";"
        "document.body.append(s); fetch('http://127.0.0.1:9/').catch(() => {})"
    )
    assert browser.title == "EnvACE report"
    assert "Content Security Policy" in str(browser.get_log("browser"))


def test_rehearsal_beside_its_committed_execution(browser, tmp_path):
    rehearsals = [trajectory(n, split="rehearsal", task="t", reward=None, execution=n) for n in range(2)]
    committed = [
        trajectory(2, split="committed", task="t", execution=1),
        trajectory(3, split="committed", task="other"),
    ]
    run = write_run(tmp_path / "a", [t | {"step": 0} for t in rehearsals + committed])
    open_page(browser, tmp_path, run, fragment="#t=2")
    wait(browser, "document.querySelector('#detail h2')")
    keys(browser, "c")
    wait(browser, "document.querySelectorAll('#detail .trajectory').length === 2")
    heads = browser.execute_script(
        "return [...document.querySelectorAll('.trajectory header p')].map((p) => p.innerText)"
    )
    assert "rehearsal" in heads[0] and "committed" in heads[1]
    names = browser.execute_script("return [...document.querySelectorAll('#beside option')].map((o) => o.text)")
    assert names == ["nothing", "rehearsal 2 of this task, same execution", "rehearsal 1 of this task"]
    assert browser.execute_script("return location.hash") == "#t=2&beside=1"


def test_an_empty_run_and_one_that_is_being_written(browser, tmp_path):
    empty, cut = write_run(tmp_path / "empty"), write_run(tmp_path / "cut", [trajectory(0)])
    with (cut / "trajectories.jsonl").open("a") as stream:
        stream.write('[1]\n{"stage": "rl", "st')
    open_page(browser, tmp_path, empty, cut)
    events = text(browser, "#events")
    assert "nothing was recorded yet" in events
    assert "the last line is cut" in events and "1 lines are no records and were left out (line 2)" in events
    keys(browser, "3")
    count_is(browser, 1)
    assert browser.get_log("browser") == []


def test_a_growing_imagination_gap_is_an_event(tmp_path):
    def events(real):
        rows = zip([0.5, 0.6, 0.7], real, strict=True)
        evaluated = [{"eval/rehearsed_success": a, "eval/real_success": b} for a, b in rows]
        metrics = [{"stage": "rl", "step": step} | values for step, values in enumerate(evaluated)]
        return read_runs([write_run(tmp_path / str(real), metrics=metrics)])[0].events

    assert any("grew by 20.0 points" in event and "hacking" in event for event in events([0.5, 0.5, 0.5]))
    assert events([0.5, 0.6, 0.7]) == []


def test_a_missing_run_is_one_clear_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path / "none")])
    with pytest.raises(SystemExit):
        main()
    assert re.fullmatch(r"error: no such run: .* is no folder; [^\n]*\n", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a, b):
    low, high = sorted([luminance(a), luminance(b)])
    return (high + 0.05) / (low + 0.05)


BAD_METRICS = [
    '{"stage": "rl", "step": 1, "reward/mean": "high"}',
    '{"stage": "rl", "step": 1, "loss/kl": null}',
    '{"stage": "rl", "step": 1e400}',
    '{"stage": 1, "step": 1}',
    f'{{"stage": "rl", "step": 1, "loss/kl": 1{"0" * 400}}}',
    "[" * 100_000,
    "[]",
]
BAD_TRAJECTORIES = [
    '{"stage": "rl", "step": 1}',
    '{"stage": "rl", "step": 1, "segments": 3}',
    '{"stage": "rl", "step": 1, "segments": [{"role": 5, "text": "x"}]}',
    '{"stage": "rl", "step": 1, "segments": [{"role": "act", "text": 3}]}',
    '{"stage": "rl", "step": 1, "segments": [], "user_turns": {"0": "x"}}',
    '{"stage": "rl", "step": 1, "segments": [], "user_turns": 1}',
]


@pytest.mark.parametrize(("name", "bad"), [("metrics", BAD_METRICS), ("trajectories", BAD_TRAJECTORIES)])
def test_lines_of_another_kind_are_left_out_and_counted(tmp_path, name, bad):
    good = (
        '{"stage": "rl", "step": 0, "loss/kl": "NaN"}'
        if name == "metrics"
        else '{"stage": "rl", "step": 0, "segments": []}'
    )
    (tmp_path / f"{name}.jsonl").write_text("\n".join([good, *bad]) + "\n")
    [run] = read_runs([tmp_path])
    assert len(run.metrics if name == "metrics" else run.trajectories) == 1
    assert f"{name}.jsonl: {len(bad)} lines are no records and were left out (line 2, 3, 4, 5" in run.events[0]
    assert write_page([run], tmp_path / "page.html") > 0


@pytest.mark.parametrize(
    ("settings", "found"), [("day: 2026-01-02", {"day": "2026-01-02"}), ("a: &x [1]\nb: *x", {"a": [1], "b": [1]})]
)
def test_a_config_may_hold_what_json_has_no_word_for(tmp_path, settings, found):
    [run] = read_runs([write_run(tmp_path / "a", settings=settings)])
    assert run.settings == {"rl": found} and write_page([run], tmp_path / "page.html") > 0


@pytest.mark.parametrize("settings", ["a: &x [*x]", "? [1]\n: 2", "a: [", "a: \0"])
def test_a_config_that_cannot_be_shown_is_one_clear_line(tmp_path, settings):
    with pytest.raises(UserError, match=r"rl.config.yaml cannot be read \([^\n]*\): restore or delete it$"):
        read_runs([write_run(tmp_path / "a", settings=settings)])


@pytest.mark.parametrize("out", [".", "{run}"])
def test_a_folder_as_the_page_is_one_clear_line(tmp_path, monkeypatch, capsys, out):
    run = write_run(tmp_path / "a")
    monkeypatch.setattr(sys, "argv", ["report", str(run), "--out", out.format(run=run)])
    with pytest.raises(SystemExit):
        main()
    assert re.fullmatch(r"error: \S+ is a folder: name a file, such as \S*report.html\n", capsys.readouterr().err)


def test_quiet_still_says_where_the_page_lies(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "a", [trajectory(0)])
    monkeypatch.setattr(sys, "argv", ["report", str(run), "--quiet"])
    main()
    assert capsys.readouterr().out.startswith(f"report  {run / 'report.html'}: 1 runs, 1 trajectories, ")


def test_colours_can_be_read_in_both_themes():
    style = files("envace.report.page").joinpath("static/page.css").read_text()
    light, dark, preferred = (
        dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in re.findall(r":root[^{]*\{([^}]*)\}", style)
    )
    assert dark == preferred
    for theme in (light, dark):
        for name in theme.keys() - {"paper", "card", "soft", "line"}:
            for background in ("paper", "card", "soft"):
                assert contrast(theme[name], theme[background]) >= 4.5, (name, background)
    assert contrast("#777777", "#ffffff") < 4.5
