"""What the values of settings must satisfy, beyond their types: each rule says what to change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from envace.settings import Config, EndpointConfig

ROLES = ("act", "rehearse")
RISKS = ("low", "medium", "high")  # of a tool, rising
ANSWERERS = ("rehearsed", "simulated", "recorded", "real", "constant")  # environments that a mixture may hold
# Names of int fields; any other int field is a count, >= 1.
MAY_BE_ZERO = (
    *("seed", "steps", "epochs", "every", "tasks", "top_k", "r", "pack_tokens", "retries", "max_tokens"),
    *("n", "rehearsals", "export_every", "max_prompt_tokens", "demonstrations", "train_tasks", "eval_tasks"),
    "port",
)

ENDPOINT_SECTIONS = tuple(name for name, section in vars(Config()).items() if isinstance(section, EndpointConfig))
# Where someone may have put a key: no message shows what is there.
SECRET = (
    *(f"{section}.{name}" for section in ENDPOINT_SECTIONS for name in ("key_env", "endpoints")),
    *("serve.key_env", "serve.backend", "serve.backend_key_env"),
    *("bench.user.url", "bench.user.key_env", "bench.judge.url", "bench.judge.key_env"),
)


def is_plain_url(url: str) -> bool:
    """Whether it is an HTTP address and nothing more: no user, password or query."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is no number
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc and not parts.query


def is_base_url(url: str) -> bool:
    """Whether paths such as /chat/completions can be put behind it."""
    return is_plain_url(url) and not url.endswith(("/", "/chat/completions")) and not urlsplit(url).fragment


def is_variable(name: str) -> bool:
    """Whether it is the name of an environment variable, or empty."""
    return not name or name.isidentifier() and name.isupper()


Rule = tuple[str, Callable[[Any], bool], str]
ENDPOINT_RULES: list[Rule] = [  # a field of EndpointConfig, what its value must satisfy, what to change
    ("key_env", is_variable, "NAMES a variable: capitals, digits, _"),
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
    ("rehearsal.sampling.temperature", lambda t: t >= 0, "must be >= 0; 0 is greedy"),
    ("rehearsal.sampling.top_p", lambda p: 0 < p <= 1, "must be > 0 and <= 1"),
    ("bench.trials", lambda n: n <= 10, "must be <= 10: intervals over more trials are not in the table of quantiles"),
    ("gate.risk", lambda risks: all(r in RISKS for r in risks.values()), f"must say {', '.join(RISKS)} for each tool"),
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
    ("serve.port", lambda port: port < 2**16, "must be < 65536; 0 takes a free one"),
    ("serve.key_env", is_variable, "NAMES a variable: capitals, digits, _"),
    ("serve.backend_key_env", is_variable, "NAMES a variable: capitals, digits, _"),
    (
        "serve.backend",
        lambda url: not url or is_plain_url(url),
        "must be like http://host:8000/v1, without user or key",
    ),
    ("serve.timeout", lambda seconds: seconds > 0, "must be > 0"),
    *(
        (f"bench.{partner}.{name}", holds, advice)
        for partner in ("user", "judge")
        for name, holds, advice in [
            ("url", lambda u: not u or is_base_url(u), "must be like http://host:8000/v1, without user, key or more"),
            ("key_env", is_variable, "NAMES a variable: capitals, digits, _"),
            ("temperature", lambda t: t >= 0, "must be >= 0; 0 is greedy"),
        ]
    ),
]
# A key, what must hold of the whole (anything that is true will do), what to change.
COMBINATIONS: list[tuple[str, Callable[[Config], object], str]] = [
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
    (
        "data.path",
        lambda c: c.data.source != "custom" or c.data.path,
        "data.source=custom runs the code of an environment: name its folder; make new-env NAME=... writes one",
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
        lambda c: c.data.source != "cm2" or not _answered_by(c, "real"),
        "CM2 records have no environment that can be executed: set rehearsed",
    ),
    (
        "rollout.environment",
        lambda c: c.data.source == "cm2" or not _answered_by(c, "recorded"),
        "only CM2 records have recorded calls: set data.source=cm2",
    ),
    (
        "rehearse.grounding",
        lambda c: c.rehearse.grounding == "none" or (c.rollout.view == "separate" and c.data.source == "cm2"),
        "recorded calls come from CM2 records and show in a REHEARSE chat: set data.source=cm2 rollout.view=separate",
    ),
    (
        "rehearsal.path",
        lambda c: c.rehearsal.mode != "candidates" or not c.rehearsal.path,
        "candidates are imagined by the policy that acts: leave it empty",
    ),
    (
        "rehearsal.mode",
        lambda c: c.rehearsal.mode != "candidates" or c.rehearsal.n < 2 or c.eval.sampling.temperature > 0,
        "greedy candidates would all be the same: set eval.sampling.temperature > 0, or rehearsal.n=1",
    ),
    (
        "rehearsal.path",
        lambda c: not (c.rehearsal.path and c.policy.deepspeed),
        "a second model is not sharded in one run: leave policy.deepspeed empty",
    ),
    (
        "gate.mode",
        lambda c: c.gate.mode == "none" or c.data.source != "cm2",
        "only real calls are predicted, and CM2 records have no environment that can be executed: set it to none",
    ),
    (
        "rehearsal.path",
        lambda c: not (c.rehearsal.path and c.serve.backend),
        "over serve.backend its own model rehearses: leave it empty",
    ),
    *(
        (
            f"bench.{partner}.model",
            lambda c, partner=partner: bool(vars(c.bench)[partner].model) == bool(vars(c.bench)[partner].url),
            "url and model belong together: set both or none",
        )
        for partner in ("user", "judge")
    ),
    (
        "gate.mode",
        lambda c: c.gate.mode == "none" or c.benchmark == "none",
        "a harness executes calls itself, so nothing can be asked before: leave it at none",
    ),
    (
        "model.path",
        lambda c: c.benchmark == "none" or c.model.path or c.serve.backend,
        "name the checkpoint that is evaluated, or set serve.backend",
    ),
    (
        "serve.backend_model",
        lambda c: c.serve.backend_model or not c.serve.backend,
        "must be the name that the backend knows",
    ),
    (
        "data.rehearsals",
        lambda c: c.data.source == "demo" or not c.data.rehearsals,
        "only the embedded model is taught by examples; another one is prompted",
    ),
    (
        "reward.dependence",
        lambda c: not c.reward.dependence or c.reward.name == "checklist",
        "only checklists have prerequisites: set reward.name=checklist",
    ),
    (
        "rehearse.reuse_recorded",
        lambda c: not c.rehearse.reuse_recorded or c.data.source == "cm2",
        "only CM2 records have recorded calls: set data.source=cm2",
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
        "policy.decode",
        lambda c: c.policy.decode == "dynamic" or not c.policy.deepspeed,
        "compiled code wants weights that stay where they are: leave policy.deepspeed empty, or set it to dynamic",
    ),
    (
        "policy.decode",
        lambda c: c.policy.decode == "dynamic" or c.model.attn_implementation == "sdpa",
        "a cache of fixed length wants model.attn_implementation=sdpa",
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
