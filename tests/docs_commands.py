"""How each command in a fenced block of the documents is checked; see test_docs.py.

RUN: as it stands, in small, by `test_commands_are_run`. Any other: why it is not, and a test file that runs the same
code in small where there is one; its settings, options and files are checked all the same.
"""

from typing import NamedTuple


class NotRun(NamedTuple):
    why: str
    covered_by: str = ""


RUN = "run"
GPU = NotRun("needs a GPU", "test_zero3.py")
NETWORK = NotRun("needs the network", "test_bench_setup.py")
HARNESS = NotRun("needs a harness that is set up over the network", "test_benchmarks.py")
LONG = NotRun("takes minutes to hours")
SERVER = NotRun("serves until it is stopped", "test_serve_process.py")
OTHERS = NotRun("starts a program that is not installed here")

SMALL = (
    "data.demonstrations=16 data.train_tasks=8 data.eval_tasks=3 eval.tasks=2 sft.steps=2 sft.batch_size=4 rl.steps=1 "
    "rl.prompts_per_step=2 rl.group_size=2 rollout.max_new_tokens=12"
)
SETUP = "make bench-setup-{}"
EVAL_8B = "make eval CONFIG=configs/qwen3_8b.yaml ARGS="
REHEARSED = 'CONFIG=configs/rehearsal.yaml ARGS="model.path=runs/tts/seed0/rl rehearsal.mode=parallel rehearsal.n=2"'

# In the order in which they are run: what one leaves the next may need.
COMMANDS: dict[str, str | NotRun] = {
    # README.md
    "make demo": RUN,
    "make sft": RUN,
    'make rl ARGS="model.path=runs/demo/sft"': RUN,
    'make eval ARGS="model.path=runs/demo/rl eval.samples=4"': RUN,
    'make rl CONFIG=configs/mine.yaml ARGS="model.path=runs/demo/seed0/sft/sft"': RUN,
    'make eval CONFIG=configs/mine.yaml ARGS="model.path=runs/mine/rl eval.samples=4 eval.tasks=0"': RUN,
    'make report RUNS="runs/demo/seed0/rl runs/mine" OUT=compare.html': RUN,
    "make doctor CONFIG=configs/qwen3_8b.yaml": GPU._replace(covered_by="test_doctor.py"),
    "make sft CONFIG=configs/qwen3_8b.yaml": GPU,
    'make rl CONFIG=configs/qwen3_8b.yaml ARGS="model.path=runs/qwen3_8b/sft"': GPU,
    # CONTRIBUTING.md
    "make test": NotRun("runs this test"),
    "make test-fast": NotRun("runs this test"),
    "make lint": NotRun("is the first step of .ci/run"),
    # docs/gpus.md
    'make rl CONFIG=configs/qwen3_8b.yaml ARGS="model.path=runs/qwen3_8b/sft" NODES=2 NODE_RANK=0 '
    "MAIN_ADDRESS=10.0.0.1": GPU,
    "make merge ADAPTER=runs/x/rl OUT=runs/x/merged": NotRun("needs an adapter", "test_policy.py"),
    # docs/report.md
    'make report RUNS="runs/demo/seed0/rl"': RUN,
    'make report RUNS="runs/a runs/b" OUT=compare.html': LONG._replace(covered_by="test_report_page.py"),
    # docs/environments.md
    "make new-env NAME=my_shop": RUN,
    ".venv/bin/python -m pytest tests/test_my_shop.py": RUN,
    "make sft CONFIG=envs/my_shop/config.yaml": RUN,
    'make eval CONFIG=envs/my_shop/config.yaml ARGS="model.path=runs/my_shop/sft run_dir=runs/my_shop/eval-sft"': RUN,
    'make rl CONFIG=envs/my_shop/config.yaml ARGS="model.path=runs/my_shop/sft"': RUN,
    'make eval CONFIG=envs/my_shop/config.yaml ARGS="model.path=runs/my_shop/rl run_dir=runs/my_shop/eval-rl"': RUN,
    # docs/data.md
    ".venv/bin/python -m envace.data inspect tests/data/cm2_rl.json": RUN,
    ".venv/bin/python -m envace.data inspect data/cm2/rl_train.parquet": RUN,
    ".venv/bin/hf download namezz/Checklist --repo-type dataset --local-dir data/cm2": NotRun("needs the network"),
    "vllm serve Qwen/Qwen3-30B-A3B --port 8000": OTHERS,
    "python -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B --port 8000": OTHERS,
    "make doctor CONFIG=configs/cm2_qwen3_8b.yaml": GPU._replace(covered_by="test_doctor.py"),
    "make sft CONFIG=configs/cm2_qwen3_8b.yaml": GPU._replace(covered_by="test_cm2_training.py"),
    'make rl CONFIG=configs/cm2_qwen3_8b.yaml ARGS="model.path=runs/cm2_qwen3_8b/sft"': GPU,
    # docs/ablations.md
    'make rl CONFIG=configs/ablations/per_role_policy.yaml ARGS="model.path=runs/demo/sft run_dir=runs/two"': RUN,
    "make eval CONFIG=configs/ablations/per_role_policy.yaml "
    'ARGS="model.path=runs/two/rl model.rehearse_path=runs/two/rl_rehearse run_dir=runs/two"': RUN,
    'make rl ARGS="model.path=runs/demo/sft run_dir=runs/dynamics checkpoint.export_every=5"': RUN,
    'make dynamics ARGS="run_dir=runs/dynamics eval.tasks=0 eval.samples=2"': RUN,
    "make ablations": LONG._replace(covered_by="test_ablations.py"),
    "make ablations QUICK=1": LONG._replace(covered_by="test_ablations.py"),
    "make ablations SEEDS=3 ONLY=envace,grpo": LONG._replace(covered_by="test_ablations.py"),
    # docs/rehearsal.md
    "make tts": LONG._replace(covered_by="test_tts.py"),
    'make tts ARGS="--numbers 0,1,2,4,8 --modes parallel,sequential,candidates"': LONG._replace(
        covered_by="test_tts.py"
    ),
    f"make eval {REHEARSED}": RUN,
    # docs/serve.md
    'make serve CONFIG=configs/demo.yaml ARGS="model.path=runs/demo/rl rehearsal.mode=parallel rehearsal.n=2"': SERVER,
    'make serve CONFIG=configs/qwen3_8b.yaml ARGS="serve.backend=http://localhost:8001/v1 '
    'serve.backend_model=Qwen/Qwen3-8B model.path=Qwen/Qwen3-8B"': SERVER._replace(covered_by="test_serve_remote.py"),
    "curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d "
    '\'{"messages": [{"role": "user", "content": "Cancel order A1."}], "temperature": 0}\'': NotRun(
        "wants a server", "test_serve.py"
    ),
    # docs/benchmarks.md
    "make tables": RUN,
    'make tables RUNS="runs/a runs/b" ARGS="--name runs/a=EnvACE-8B"': NotRun("needs two runs", "test_tables.py"),
    **{SETUP.format(name): NETWORK for name in ("bfcl", "tau2", "vita", "finmcp", "trl")},
    "make bench-verify BENCH=bfcl": HARNESS._replace(covered_by="test_bfcl.py"),
    f'{EVAL_8B}"benchmark=bfcl model.path=runs/qwen3_8b/rl run_dir=runs/bfcl serve.max_new_tokens=8000"': HARNESS,
    f'{EVAL_8B}"benchmark=bfcl model.path= serve.backend=http://host:8000/v1 serve.backend_model=NAME '
    'run_dir=runs/other"': HARNESS,
    f'{EVAL_8B}"benchmark=tau2 model.path=runs/qwen3_8b/rl run_dir=runs/tau2 bench.user.url=http://user:8000/v1 '
    "bench.user.model=NAME bench.judge.url=http://judge:8000/v1 "
    'bench.judge.model=gpt-4.1-2025-04-14"': HARNESS._replace(covered_by="test_tau2.py"),
    f'{EVAL_8B}"benchmark=vita model.path=runs/qwen3_8b/rl run_dir=runs/vita bench.user.url=http://user:8000/v1 '
    "bench.user.model=NAME bench.judge.url=http://judge:8000/v1 bench.judge.model=NAME "
    'bench.language=english"': HARNESS._replace(covered_by="test_vita.py"),
    f'{EVAL_8B}"benchmark=finmcp model.path=runs/qwen3_8b/rl run_dir=runs/finmcp bench.data=benchmark_final.json '
    'bench.tool_schemas=tools.json"': HARNESS._replace(covered_by="test_finmcp.py"),
    # docs/performance.md
    "make bench": LONG._replace(covered_by="test_bench_tables.py"),
}
