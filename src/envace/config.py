"""Every setting of a run, typed and documented; YAML files with `inherits`, then `key=value` overrides.

OmegaConf does the parsing, merging and type checks (structured configs over dataclasses). The comment behind a field
is its documentation, and what `--help` prints. A user's mistake is a ConfigError: one line with the key, where it was
set and the nearest valid name. No heavy library is imported here, so that a mistake shows at once.
"""

from __future__ import annotations

import argparse
import inspect
import io
import math
import platform
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, is_dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


@dataclass
class ModelConfig:
    path: str = "???"  # Hugging Face folder or hub name of a causal LM and its tokenizer
    rehearse_path: str = ""  # rl.team=per_role: what REHEARSE starts from; empty: the same as `path`
    dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of the weights in memory
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"  # passed to transformers
    embedded: bool = False  # if nothing is at `path`, train_sft.py first builds the tiny embedded model there
    add_missing_tokens: bool = False  # add <tool_call>, <tool_response>, ... to a tokenizer that lacks them
    trust_remote_code: bool = False  # run code that ships with the checkpoint


@dataclass
class LoraConfig:
    r: int = 0  # rank of the adapters; 0 trains all weights
    alpha: int = 32  # adapters are scaled by alpha / r
    targets: list[str] = field(default_factory=lambda: ["all-linear"])  # names of the modules that get one


@dataclass
class PolicyConfig:
    deepspeed: str = ""  # DeepSpeed JSON with ZeRO stage 3; empty: each rank holds all weights
    cpu: bool = False  # allow `deepspeed` on processes without a GPU, over gloo: slow, for tests
    lora: LoraConfig = field(default_factory=LoraConfig)  # train low-rank adapters in place of all weights
    rollout_weights: Literal["gathered", "partitioned"] = "gathered"  # ZeRO-3: a copy on each rank, or none
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time
    logprob_chunk: int = 1024  # tokens whose logits exist at once in an update
    pack_tokens: int = 0  # > 0: sequences without padding, in rows of at most so many tokens; 0 pads micro-batches
    offload_reference: bool = False  # ZeRO-3: keep the reference model in CPU memory


@dataclass
class CheckpointConfig:
    every: int = 0  # steps between checkpoints; 0 saves one only when SIGTERM asks to stop
    keep: int = 2  # how many to keep; older ones are deleted
    export_every: int = 0  # RL steps between models exported to <run_dir>/exports/step-000010; 0 exports none
    resume: bool = False  # go on from the last complete checkpoint of run_dir, if there is one


@dataclass
class DataConfig:
    source: Literal["demo", "cm2"] = "demo"  # the embedded world, or CM2 records
    path: str = ""  # cm2: records for RL; .json, .jsonl, .parquet, a folder, or OWNER/NAME[:PATTERN] on the hub
    sft_path: str = ""  # cm2: rows for SFT; empty: the reference dialogues of `path`
    eval_path: str = ""  # cm2: held-out records; empty: nothing is evaluated
    on_bad_row: Literal["skip", "fail"] = "skip"  # cm2: a row that fails its checks is left out and counted, or fatal
    max_prompt_tokens: int = 0  # tasks whose prompt with its tools is longer are left out and counted; 0 keeps all
    seed: int = 0  # demo: seed of the task templates and the demonstrations
    demonstrations: int = 4096  # recorded dialogues for SFT; of cm2 at most, and 0 takes all
    train_tasks: int = 2048  # tasks for RL; of cm2 at most, and 0 takes all
    eval_tasks: int = 320  # held-out tasks; of cm2 at most, and 0 takes all


@dataclass
class RewardConfig:
    name: Literal["goal", "gold_calls", "answer_facts", "checklist"] = "goal"  # see envace.rewards; checklist: a judge
    dependence: bool = False  # checklist: an item counts only if its prerequisites were met at an earlier step


@dataclass
class EndpointConfig:
    endpoints: list[str] = field(default_factory=list)  # base URLs such as http://localhost:8000/v1, used in turn
    model: str = ""  # name of the model at the endpoints
    key_env: str = ""  # NAME of the environment variable that holds the API key; empty: no key
    concurrency: int = 64  # requests in flight at once on each rank, over all endpoints
    timeout: float = 120.0  # seconds until a request is given up and tried again
    retries: int = 5  # tries after the first until an answer is unknown
    temperature: float = 0.6  # of the model; 0 means greedy
    top_p: float = 0.8  # nucleus
    max_tokens: int = 6000  # longest reply
    cache: str = ""  # JSON lines file with answers by content; empty: remembered in memory only
    max_unknown_share: float = 0.1  # a step with a larger share of unknown answers stops the run
    max_outage_minutes: float = 10.0  # how long to wait while no endpoint can be reached, then the run stops


@dataclass
class SamplingConfig:
    temperature: float = 1.0  # 0 means greedy; RL needs > 0
    top_p: float = 1.0  # nucleus; training refuses anything but 1
    top_k: int = 0  # 0 means off; training refuses anything but 0


@dataclass
class RolloutConfig:
    view: Literal["shared", "separate"] = "shared"  # REHEARSE inside ACT's stream, or in a chat of its own
    environment: Literal["rehearsed", "simulated", "recorded", "real", "constant", "mixed"] = "rehearsed"  # of training
    mixture: dict[str, float] = field(default_factory=dict)  # mixed: share of episodes by environment, sum 1
    max_rounds: int = 30  # ACT outputs that call tools, per trajectory
    max_parallel_calls: int = 20  # calls in one ACT output
    max_context_tokens: int = 12000  # a prompt of this length or more ends the trajectory; it is never shortened
    max_new_tokens: int = 8000  # longest output
    batch_size: int = 128  # episodes generated together
    thinking: bool = True  # False puts an empty think block before each ACT output, as Qwen3 does


@dataclass
class SimulatorConfig:
    path: str = ""  # folder or hub name of the frozen model that answers calls if rollout.environment is simulated
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(0.6, top_p=0.8))  # how it samples


@dataclass
class RehearseConfig:
    grounding: Literal["none", "earlier_recorded_calls"] = "none"  # shown to REHEARSE in view separate
    reuse_recorded: bool = False  # a call that the reference dialogue makes too gets the recorded response
    schema_check: bool = False  # a call that its tool's JSON schema forbids gets an error in place of a rehearsal


@dataclass
class SFTConfig:
    roles: list[str] = field(default_factory=lambda: ["act", "rehearse"])  # whose tokens carry loss
    steps: int = 400  # optimizer steps
    epochs: int = 0  # > 0: passes over the demonstrations, in place of `steps`
    max_tokens: int = 0  # demonstrations with a longer sequence are left out and counted; 0 keeps all
    batch_size: int = 32  # dialogues per optimizer step, over all ranks
    micro_batch_size: int = 32  # sequences per forward pass on one rank
    lr: float = 1e-5  # peak learning rate
    warmup: float = 0.1  # share of the steps with a linearly rising learning rate
    schedule: Literal["cosine", "constant"] = "cosine"  # after the warm-up
    adam_beta2: float = 0.999  # AdamW's second decay rate; lower for runs of a few hundred steps
    weight_decay: float = 0.01  # AdamW
    grad_clip: float = 1.0  # largest gradient norm
    max_nonfinite_steps: int = 5  # stop after this many skipped steps in a row


@dataclass
class RLConfig:
    steps: int = 470  # rollout batches
    prompts_per_step: int = 16  # tasks per rollout batch, over all ranks
    group_size: int = 4  # rollouts of one task
    updates_per_batch: int = 1  # optimizer steps on one rollout batch; 1 keeps the ratio at 1
    micro_batch_size: int = 32  # sequences per forward pass on one rank
    lr: float = 1e-6  # peak learning rate
    warmup: float = 0.0  # share of the steps with a linearly rising learning rate
    schedule: Literal["cosine", "constant"] = "constant"  # after the warm-up
    adam_beta2: float = 0.999  # AdamW's second decay rate; lower for runs of a few dozen steps
    weight_decay: float = 0.01  # AdamW
    grad_clip: float = 1.0  # largest gradient norm
    clip_eps_low: float = 0.2  # ratio is clipped to [1 - low, 1 + high]
    clip_eps_high: float = 0.2  # see clip_eps_low
    kl_coef: float = 1e-4  # weight of KL(policy || reference); 0 loads no reference
    kl_estimator: Literal["k2", "k3", "k3_ratio"] = "k3"  # see envace.losses
    normalize_std: bool = True  # divide advantages by the group's unbiased standard deviation
    team: Literal["shared", "per_role"] = "shared"  # one policy in both roles, or one for each; see envace.team
    keep: Literal["all", "consistent"] = "all"  # which trajectories are trained on; see envace.filters
    baseline: Literal["rolewise", "shared"] = "rolewise"  # whose mean: outputs of one prompt and role, or of one prompt
    baseline_over: Literal["outputs", "trajectories"] = "outputs"  # what the group mean is taken over
    loss_aggregation: Literal["token_mean", "output_mean", "role_mean"] = "token_mean"  # see envace.batching
    role_weights: dict[str, float] = field(default_factory=lambda: {"act": 1.0, "rehearse": 1.0})  # loss weight by role
    max_nonfinite_steps: int = 5  # stop after this many skipped steps in a row


@dataclass
class EvalConfig:
    every: int = 10  # RL steps between evaluations; 0 means only at the end
    samples: int = 1  # sampled runs per task
    tasks: int = 0  # use only the first N held-out tasks; 0 means all
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(0.6, top_p=0.95))  # how evaluation samples


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)  # which weights
    policy: PolicyConfig = field(default_factory=PolicyConfig)  # how they are trained, sharded and kept in memory
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)  # what an interrupted run goes on from
    data: DataConfig = field(default_factory=DataConfig)  # which tasks
    reward: RewardConfig = field(default_factory=RewardConfig)  # what a trajectory is worth
    judge: EndpointConfig = field(default_factory=EndpointConfig)  # who judges checklists
    rollout: RolloutConfig = field(default_factory=RolloutConfig)  # how episodes unfold
    simulator: SimulatorConfig = field(default_factory=SimulatorConfig)  # a frozen model as the environment
    simulator_endpoint: EndpointConfig = field(default_factory=EndpointConfig)  # or one behind an endpoint
    rehearse: RehearseConfig = field(default_factory=RehearseConfig)  # what answers a call besides the policy
    sampling: SamplingConfig = field(default_factory=SamplingConfig)  # how training samples
    sft: SFTConfig = field(default_factory=SFTConfig)  # supervised warm-up
    rl: RLConfig = field(default_factory=RLConfig)  # role-wise GRPO
    eval: EvalConfig = field(default_factory=EvalConfig)  # held-out evaluation
    run_dir: str = "runs/default"  # where checkpoints, logs and trajectories go
    seed: int = 0  # seed of sampling, shuffling and initialisation


COMMAND_LINE = "command line"
LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "datasets", "numpy", "omegaconf")
ROLES = ("act", "rehearse")
ANSWERERS = ("rehearsed", "simulated", "recorded", "real", "constant")  # environments that a mixture may hold
# Names of int fields; any other int field is a count, >= 1.
MAY_BE_ZERO = (
    *("seed", "steps", "epochs", "every", "tasks", "top_k", "r", "pack_tokens", "retries", "max_tokens"),
    *("export_every", "max_prompt_tokens", "demonstrations", "train_tasks", "eval_tasks"),
)

ENDPOINT_SECTIONS = tuple(name for name, section in vars(Config()).items() if isinstance(section, EndpointConfig))
# Where someone may have put a key: no message shows what is there.
SECRET = tuple(f"{section}.{name}" for section in ENDPOINT_SECTIONS for name in ("key_env", "endpoints"))


def is_plain_url(url: str) -> bool:
    """Whether it is an HTTP address and nothing more: no user, password or query."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is no number
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc and not parts.query


Rule = tuple[str, Callable[[Any], bool], str]
ENDPOINT_RULES: list[Rule] = [  # a field of EndpointConfig, what its value must satisfy, what to change
    (
        "key_env",
        lambda name: not name or name.isidentifier() and name.isupper(),
        "NAMES a variable: capitals, digits, _",
    ),
    (
        "endpoints",
        lambda urls: all(map(is_plain_url, urls)),
        "must be like http://host:8000/v1, without user or key",
    ),
    ("max_tokens", lambda tokens: tokens > 0, "must be > 0"),
    ("timeout", lambda seconds: seconds > 0, "must be > 0"),
    ("temperature", lambda t: t >= 0, "must be >= 0; 0 is greedy"),
    ("top_p", lambda p: 0 < p <= 1, "must be > 0 and <= 1"),
    ("max_unknown_share", lambda share: 0 <= share <= 1, "is a share: must be within 0 and 1"),
    ("max_outage_minutes", lambda minutes: minutes >= 0, "must be >= 0"),
]
RULES: list[Rule] = [  # key, what its value must satisfy, what to change
    ("sampling.temperature", lambda t: t > 0, "training samples: set it > 0 (evaluation: eval.sampling.temperature)"),
    ("sampling.top_p", lambda p: p == 1, "training cuts no token off: set it to 1 (evaluation: eval.sampling.top_p)"),
    ("sampling.top_k", lambda k: k == 0, "training cuts no token off: set it to 0 (evaluation: eval.sampling.top_k)"),
    ("eval.sampling.temperature", lambda t: t >= 0, "must be >= 0; 0 is greedy"),
    ("eval.sampling.top_p", lambda p: 0 < p <= 1, "must be > 0 and <= 1"),
    ("seed", lambda seed: seed < 2**31, "must be < 2**31"),
    *((f"{section}.{name}", holds, advice) for section in ENDPOINT_SECTIONS for name, holds, advice in ENDPOINT_RULES),
    ("sft.roles", lambda roles: roles and all(role in ROLES for role in roles), "must name act, rehearse or both"),
    ("sft.lr", lambda lr: lr >= 0, "must be >= 0"),
    ("sft.warmup", lambda share: 0 <= share <= 1, "is a share of the steps: must be within 0 and 1"),
    ("sft.weight_decay", lambda decay: decay >= 0, "must be >= 0"),
    ("sft.grad_clip", lambda norm: norm > 0, "must be > 0"),
    ("rl.group_size", lambda size: size >= 2, "must be >= 2: the baseline compares the rollouts of one task"),
    ("sft.adam_beta2", lambda beta: 0 < beta < 1, "must be > 0 and < 1"),
    ("rl.adam_beta2", lambda beta: 0 < beta < 1, "must be > 0 and < 1"),
    ("rl.lr", lambda lr: lr >= 0, "must be >= 0"),
    ("rl.warmup", lambda share: 0 <= share <= 1, "is a share of the steps: must be within 0 and 1"),
    ("rl.weight_decay", lambda decay: decay >= 0, "must be >= 0"),
    ("rl.grad_clip", lambda norm: norm > 0, "must be > 0"),
    ("rl.clip_eps_low", lambda eps: 0 <= eps < 1, "must be >= 0 and < 1: the ratio is clipped to 1 - low"),
    ("rl.clip_eps_high", lambda eps: eps >= 0, "must be >= 0"),
    ("rl.kl_coef", lambda coef: coef >= 0, "must be >= 0; 0 switches the KL term off"),
    ("rl.role_weights", lambda weights: all(role in ROLES for role in weights), "may name only act and rehearse"),
    ("rl.role_weights", lambda weights: all(0 <= w < math.inf for w in weights.values()), "must be finite and >= 0"),
    ("rl.role_weights", lambda weights: any(weights.values()), "would train nothing: set act or rehearse > 0"),
]
COMBINATIONS: list[tuple[str, Callable[[Config], bool], str]] = [  # a key, what must hold of the whole, what to change
    (
        "rollout.environment",
        lambda c: c.rollout.environment in ("rehearsed", "mixed") or c.rl.role_weights.get("act", 0) > 0,
        "only ACT speaks there, so nothing would be trained: set rl.role_weights.act > 0",
    ),
    (
        "rl.team",
        lambda c: c.rl.team == "shared" or c.rollout.environment in ("rehearsed", "mixed"),
        "one of the two policies would never speak: set rollout.environment=rehearsed",
    ),
    (
        "rl.team",
        lambda c: c.rl.team == "shared" or not c.policy.deepspeed,
        "two models are not sharded in one run: leave policy.deepspeed empty",
    ),
    (
        "simulator.path",
        lambda c: not _answered_by(c, "simulated") or bool(c.simulator.path) != bool(c.simulator_endpoint.endpoints),
        "rollout.environment=simulated needs one model: name its folder here, or set simulator_endpoint.endpoints",
    ),
    (
        "simulator_endpoint.model",
        lambda c: c.simulator_endpoint.model or not c.simulator_endpoint.endpoints,
        "must be the name that the endpoints know",
    ),
    (
        "simulator_endpoint.cache",
        lambda c: not c.simulator_endpoint.cache,
        "rollouts of one prompt shall differ, so responses are not kept: leave it empty",
    ),
    (
        "simulator.path",
        lambda c: not (c.simulator.path and c.policy.deepspeed),
        "a second model is not sharded in one run: leave policy.deepspeed empty",
    ),
    (
        "rollout.mixture",
        lambda c: c.rollout.environment != "mixed" or _is_mixture(c.rollout.mixture),
        f"must give some of {', '.join(ANSWERERS)} shares > 0 that sum to 1: {{rehearsed: 0.9, real: 0.1}}",
    ),
    (
        "data.path",
        lambda c: c.data.source != "cm2" or c.data.path,
        "data.source=cm2 reads records: name a file, a folder, or OWNER/NAME of a data set on the hub",
    ),
    *(
        (
            f"data.{name}",
            lambda c, name=name: c.data.source == "cm2" or vars(c.data)[name] > 0,
            "must be >= 1; only data.source=cm2 has an end",
        )
        for name in ("demonstrations", "train_tasks", "eval_tasks")
    ),
    (
        "reward.name",
        lambda c: c.reward.name != "checklist" or c.data.source == "cm2",
        "only CM2 records have checklists: set data.source=cm2, or reward.name=goal",
    ),
    (
        "judge.endpoints",
        lambda c: c.reward.name != "checklist" or (c.judge.endpoints and c.judge.model),
        "checklists need a judge: set judge.endpoints=[http://localhost:8000/v1] and judge.model",
    ),
    (
        "rollout.environment",
        lambda c: c.data.source == "demo" or not _answered_by(c, "real"),
        "only the embedded world can be executed: set rehearsed",
    ),
    (
        "rollout.environment",
        lambda c: c.data.source == "cm2" or not _answered_by(c, "recorded"),
        "the embedded world has no recorded calls: set data.source=cm2",
    ),
    (
        "rehearse.grounding",
        lambda c: c.rehearse.grounding == "none" or (c.rollout.view == "separate" and c.data.source == "cm2"),
        "recorded calls come from CM2 records and show in a REHEARSE chat: set data.source=cm2 rollout.view=separate",
    ),
    (
        "reward.dependence",
        lambda c: not c.reward.dependence or c.reward.name == "checklist",
        "only checklists have prerequisites: set reward.name=checklist",
    ),
    (
        "rehearse.reuse_recorded",
        lambda c: not c.rehearse.reuse_recorded or c.data.source == "cm2",
        "the embedded world has no recorded calls: set data.source=cm2",
    ),
    (
        "eval.tasks",
        lambda c: c.eval.tasks <= c.data.eval_tasks or not c.data.eval_tasks,
        "there are only data.eval_tasks held-out tasks",
    ),
    (
        "model.dtype",
        lambda c: c.model.dtype == "float32" or c.policy.deepspeed or c.policy.lora.r,
        "AdamW loses small updates of bfloat16 weights: set policy.deepspeed (float32 masters) or policy.lora.r",
    ),
    (
        "policy.rollout_weights",
        lambda c: c.policy.rollout_weights == "gathered" or c.policy.deepspeed,
        "only ZeRO-3 partitions weights: set policy.deepspeed",
    ),
    (
        "policy.offload_reference",
        lambda c: not c.policy.offload_reference or (c.policy.deepspeed and not c.policy.lora.r),
        "only ZeRO-3 offloads a reference, and LoRA keeps none: set policy.deepspeed without policy.lora.r",
    ),
    (
        "model.add_missing_tokens",
        lambda c: not (c.model.add_missing_tokens and c.policy.lora.r),
        "adapters would not train the new embeddings: set policy.lora.r=0, or add the tokens in a full SFT first",
    ),
    (
        "rl.prompts_per_step",
        lambda c: c.rl.prompts_per_step <= c.data.train_tasks or not c.data.train_tasks,
        "one step would draw a task twice: raise data.train_tasks",
    ),
]


def _is_mixture(shares: dict[str, float]) -> bool:
    named = shares.keys() <= set(ANSWERERS)
    return named and all(share > 0 for share in shares.values()) and abs(sum(shares.values()) - 1) < 1e-6


def _answered_by(config: Config, environment: str) -> bool:
    """Whether the calls of some training episode are answered so."""
    rollout = config.rollout
    return rollout.environment == environment or (rollout.environment == "mixed" and environment in rollout.mixture)


class ConfigError(Exception):
    """A mistake in a user's settings, said in one line."""


def load_config(path: str | None, overrides: list[str]) -> Config:
    """The defaults, then the file (what it inherits first), then `key=value` overrides; the later one wins."""
    config, origins = OmegaConf.structured(Config), {}
    layers = _read(Path(path)) if path is not None else []
    for source, values in layers + [_parse(text) for text in overrides]:
        for key, value in _flatten(values, source):
            _set(config, key, value, source)
            origins[key] = source
    if missing := sorted(OmegaConf.missing_keys(config)):
        raise ConfigError(f"{missing[0]} must be set ({path or COMMAND_LINE}): add it or pass {missing[0]}=...")
    result = OmegaConf.to_object(config)
    validate(result, origins)
    return result


def validate(config: Config, origins: dict[str, str] | None = None) -> None:
    """Refuse values that cannot work. `origins` says where a key was set, for the message."""
    for key, holds, advice in [*_rules_by_type(), *RULES]:
        value = attrgetter(key)(config)
        if not holds(value):
            shown = "..." if key in SECRET else value
            raise ConfigError(f"{key}={shown} ({(origins or {}).get(key, 'default')}): {advice}")
    for key, holds, advice in COMBINATIONS:
        if not holds(config):
            raise ConfigError(f"{key}={attrgetter(key)(config)} ({(origins or {}).get(key, 'default')}): {advice}")


def save_config(config: Config, path: str | Path) -> None:
    """Write every setting as YAML that `load_config` reads back to an equal config."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.structured(config), path)


def settings_of(config: Config) -> dict[str, Any]:
    """Every setting by its dotted key."""
    keys = [key for key, setting in schema().items() if not is_dataclass(setting.kind)]
    return {key: attrgetter(key)(config) for key in keys}


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide the numbers; in a git clone the commit too."""
    found = {d.name: d.version for d in metadata.distributions() if d.name in LIBRARIES}
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found["git_commit"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pass  # no git, or no clone: the versions still say what ran
    return {"python": platform.python_version(), **found}


def cli(description: str) -> Config:
    """The config an entry point was called with. A mistake ends the program here, before any model is loaded."""
    keys = [
        f"  {key}={'(must be set)' if default == MISSING else default}\n      {doc} ({_expected(kind)})"
        for key, (kind, default, doc) in schema().items()
        if not is_dataclass(kind)
    ]
    parser = argparse.ArgumentParser(
        description=description,
        epilog="\n".join(["keys and their defaults:", *keys]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="PATH", help="YAML file; `inherits: other.yaml` in it names its base")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    arguments, unknown = parser.parse_known_intermixed_args()
    try:
        return load_config(arguments.config, arguments.overrides + unknown)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


class Setting(NamedTuple):
    kind: Any
    default: Any
    doc: str


@cache
def schema() -> dict[str, Setting]:
    """Every dotted key, sections included."""

    def walk(section: Any, prefix: str) -> Iterator[tuple[str, Setting]]:
        tokens = tokenize.generate_tokens(io.StringIO(inspect.getsource(type(section))).readline)
        docs = {t.line.split(":")[0].strip(): t.string[1:].strip() for t in tokens if t.type == tokenize.COMMENT}
        for name, kind in get_type_hints(type(section)).items():
            value = getattr(section, name)
            yield prefix + name, Setting(kind, value, docs.get(name, ""))
            if is_dataclass(kind):
                yield from walk(value, f"{prefix}{name}.")

    return dict(walk(Config(), ""))


def nearest(key: str) -> str:
    """What a wrong key was probably meant to be: the keys that end in the same name, else the most similar one."""

    def similarity(valid: str) -> float:
        pairs = [(key, valid), (_name(key), _name(valid))]
        return sum(SequenceMatcher(None, a, b).ratio() for a, b in pairs)

    same_name = [valid for valid in schema() if _name(valid) == _name(key)]
    ranked = sorted(same_name or schema(), key=similarity, reverse=True)
    return " or ".join(ranked[: 3 if same_name else 1])


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _expected(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if is_dataclass(kind):
        return "a section of keys"
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _reason(error: yaml.YAMLError | OmegaConfBaseException) -> str:
    return error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error).partition("\n")[0]


def _rules_by_type() -> Iterator[Rule]:
    for key, setting in schema().items():
        if setting.kind is int:
            least = 0 if _name(key) in MAY_BE_ZERO else 1
            yield key, least.__le__, f"must be >= {least}"
        elif setting.kind is float:
            yield key, math.isfinite, "must be a finite number"


def _read(path: Path, heirs: tuple[Path, ...] = ()) -> list[tuple[str, dict[Any, Any]]]:
    """(file, its settings) for a file and everything it inherits, base first."""
    if path.resolve() in [heir.resolve() for heir in heirs]:
        raise ConfigError(f"inherits goes round in a circle: {' -> '.join(map(str, [*heirs, path]))}")
    try:
        text = path.read_bytes()
    except OSError as error:
        asked_by = f"inherits in {heirs[-1]}" if heirs else f"{COMMAND_LINE}, --config"
        close = get_close_matches(path.name, [file.name for file in path.parent.glob("*.y*ml")], n=1, cutoff=0)
        hint = f": did you mean {path.parent / close[0]}?" if close else ""
        raise ConfigError(f"cannot read {path} ({asked_by}), {str(error.strerror).lower()}{hint}") from None
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        if not isinstance(root, yaml.MappingNode | None):  # OmegaConf would take a lone word for a key
            raise ConfigError(f"{path}: expected a mapping of keys to values, such as 'seed: 0'")
        settings = OmegaConf.to_container(OmegaConf.load(io.BytesIO(text)))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        line = f", line {error.problem_mark.line + 1}" if isinstance(error, yaml.MarkedYAMLError) else ""
        raise ConfigError(f"{path}{line}: invalid YAML, {_reason(error)}") from None
    base = settings.pop("inherits", None)
    if base is not None and not isinstance(base, str):
        raise ConfigError(f"inherits={base!r} ({path}): expected the name of one YAML file")
    inherited = _read(path.parent / base, (*heirs, path)) if base else []
    return [*inherited, (str(path), settings)]


def _parse(override: str) -> tuple[str, dict[Any, Any]]:
    key, equals, value = override.partition("=")
    if not equals:
        raise ConfigError(f"'{key}' has no '=' ({COMMAND_LINE}): write key=value; did you mean {nearest(key)}?")
    try:
        return COMMAND_LINE, OmegaConf.to_container(OmegaConf.from_dotlist([override]))
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeError) as error:
        raise ConfigError(f"{key}={value} ({COMMAND_LINE}): invalid YAML, {_reason(error)}") from None


def _flatten(values: dict[Any, Any], source: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys down to the fields; the value of a field may be a mapping itself."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if "." in str(name):
            raise ConfigError(f"'{key}' ({source}): nest the names, dots are for the command line")
        if isinstance(value, dict) and value and (key not in schema() or is_dataclass(schema()[key].kind)):
            yield from _flatten(value, source, f"{key}.")
        else:
            yield key, value


def _set(config: DictConfig, key: str, value: Any, source: str) -> None:
    if key not in schema():
        raise ConfigError(f"unknown key '{key}' ({source}): did you mean {nearest(key)}?")
    if "${" in str(value):  # OmegaConf would look it up, also in the environment; here a value is what it says
        raise ConfigError(f"{key}={value!r} ({source}): references with ${{...}} are not supported, write the value")
    kind = schema()[key].kind
    value = "" if value is None and kind is str else value  # `key=` empties it
    shown = "..." if key in SECRET else repr(value)
    expected = ConfigError(f"{key}={shown} ({source}): expected {_expected(kind)}")
    if is_dataclass(kind) and value != {}:  # _flatten goes into sections, so this is no section
        raise expected
    try:
        OmegaConf.update(config, key, value)
    except OmegaConfBaseException:
        raise expected from None
