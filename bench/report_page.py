"""How large and how fast the report page is with 2,000 trajectories, in headless Chromium. Medians of 5.

python -m bench.report_page [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from selenium import webdriver

from envace.report.page.build import write_page
from envace.report.page.runs import read_runs

TRAJECTORIES, STEPS, REPEATS = 2000, 100, 5
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync --window-size=1400,900"
WORDS = "order ship the refund status please when customer address damaged parcel open ticket late move cancel".split()
TOOLS = ("get_order", "get_customer", "refund_order", "move_order", "open_ticket")
# From the input to the first frame that shows a result, or the whole one.
FILTER = """
const [id, value, whole, done] = arguments, node = document.getElementById(id), before = performance.now();
const count = document.getElementById("count"), old = count.textContent;
node.value = value;
node.dispatchEvent(new Event("input", {bubbles: true}));
(function look() {
  if (count.textContent === old || (whole && count.textContent.endsWith("searching …"))) return setTimeout(look);
  requestAnimationFrame(() => { const c = new MessageChannel();
    c.port1.onmessage = () => done(performance.now() - before); c.port2.postMessage(0); });
})();
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep the run and its page here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.out or Path(temporary)
        write_run(folder / "run")
        page = folder / "report.html"
        raw = (folder / "run" / "trajectories.jsonl").stat().st_size
        builds = [build(folder / "run", page) for _ in range(REPEATS)]
        measured = [measure(page, Path(temporary) / f"profile{number}") for number in range(REPEATS)]
    print(f"{TRAJECTORIES} trajectories, {raw / 1e6:.1f} MB of jsonl, as a page {builds[0][1] / 1e6:.2f} MB")
    print(f"build {median(seconds for seconds, _ in builds):.2f} s")
    for name in measured[0]:
        print(f"{name} {median(m[name] for m in measured):.0f} ms")


def write_run(folder: Path) -> None:
    folder.mkdir(parents=True)
    chance = random.Random(0)
    made = [json.dumps(trajectory(number, chance)) + "\n" for number in range(TRAJECTORIES)]
    (folder / "trajectories.jsonl").write_text("".join(made))
    names = ("reward/mean", "eval/real_success", "loss/kl", "rollout/act_tokens", "status/parse_error")
    rows = [{"stage": "rl", "step": s, "time": 0} | {name: chance.random() for name in names} for s in range(STEPS)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def trajectory(number: int, chance: random.Random) -> dict[str, Any]:
    """A dialogue of 1 to 5 calls with a long prompt: about 14 KB; a tenth has every token."""

    def text(words: int) -> str:
        return " ".join(
            chance.choice(WORDS) + chance.choice(("", "", str(chance.randrange(999)))) for _ in range(words)
        )

    def segment(role: str, evidence: str, content: str) -> dict[str, Any]:
        record = {"sequence": 0, "role": role, "evidence": evidence, "tokens": len(content) // 4, "text": content}
        record |= {"finish_reason": "stop", "provenance": {}, "advantage": chance.gauss(0, 1)}
        if role != "context" and number % 10 == 0:
            pieces = [content[at : at + 4] for at in range(0, len(content), 4)]
            record |= {"token_texts": pieces, "logprobs": [round(-chance.expovariate(2), 4) for _ in pieces]}
        return record

    question = text(30)
    segments = [segment("context", "given", f"system {text(400)}\nuser\n{question}\n")]
    for _ in range(chance.randint(1, 5)):
        call = json.dumps({"name": chance.choice(TOOLS), "arguments": {"id": text(3)}})
        segments.append(segment("act", "claimed", f"<think>{text(150)}</think><tool_call>\n{call}\n</tool_call>"))
        segments.append(segment("rehearse", "rehearsed", json.dumps({"result": text(120)})))
    segments.append(segment("act", "claimed", text(60)))
    status = "finished" if chance.random() < 0.9 else "parse_error"
    return {
        **{"stage": "rl", "step": number * STEPS // TRAJECTORIES, "split": "train", "task": f"task-{number // 8}"},
        **{"kind": "", "group_id": f"{number // 8}", "status": status, "reason": "", "reward": chance.randint(0, 1)},
        **{"reward_parts": {"reads": 1.0}, "verdicts": [], "predictions": []},
        **{"user_turns": [question], "segments": segments},
    }


def build(run: Path, page: Path) -> tuple[float, int]:
    """Seconds, and the size in bytes."""
    started = time.perf_counter()
    size = write_page(read_runs([run]), page)
    return time.perf_counter() - started, size


def measure(page: Path, profile: Path) -> dict[str, float]:
    """Milliseconds, in a browser of its own with nothing cached."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in [*FLAGS.split(), f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        browser.get(page.resolve().as_uri())
        while not browser.execute_script("return document.body.dataset.ready"):
            time.sleep(0.02)
        paint = "return performance.getEntriesByName('first-contentful-paint')[0].startTime"
        found = {"first contentful paint": browser.execute_script(paint)}
        browser.execute_script("openTab('browser')")
        found["search while texts are read: first results"] = browser.execute_async_script(
            FILTER, "search", "refund7", False
        )
        while browser.execute_script("return texts.length < Browser.index.length"):
            time.sleep(0.02)
        browser.execute_async_script(FILTER, "search", "", True)
        found["filter by status"] = browser.execute_async_script(FILTER, "by-status", "parse_error", True)
        browser.execute_async_script(FILTER, "by-status", "\0any", True)
        found["filter by reward"] = browser.execute_async_script(FILTER, "reward-low", "0.5", True)
        browser.execute_async_script(FILTER, "reward-low", "", True)
        found["search"] = browser.execute_async_script(FILTER, "search", "damaged99", True)
        return found
    finally:
        browser.quit()


if __name__ == "__main__":
    main()
