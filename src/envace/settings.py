"""Every setting of a run. The comment behind a field is its documentation, and what `--help` prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


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
    decode: Literal["dynamic", "static"] = "dynamic"  # static: a compiled step; max_new_tokens counts as if used
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
    source: Literal["demo", "cm2", "custom"] = "demo"  # the embedded world, CM2 records, or an environment of your own
    path: str = ""  # cm2: .json, .jsonl, .parquet, a folder, or OWNER/NAME[:PATTERN]; custom: the folder of its code
    sft_path: str = ""  # cm2: rows for SFT; empty: the reference dialogues of `path`
    eval_path: str = ""  # cm2: held-out records; empty: nothing is evaluated
    on_bad_row: Literal["skip", "fail"] = "skip"  # cm2: a row that fails its checks is left out and counted, or fatal
    max_prompt_tokens: int = 0  # tasks whose prompt with its tools is longer are left out and counted; 0 keeps all
    seed: int = 0  # demo, custom: seed of the task templates and the demonstrations
    demonstrations: int = 4096  # recorded dialogues for SFT; of cm2 at most, and 0 takes all
    rehearsals: int = 0  # demo: dialogues for SFT that teach to judge a rehearsal, to imagine a user, to use a memory
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
class RehearsalConfig:
    mode: Literal["none", "parallel", "sequential", "candidates"] = "none"  # before evaluation acts: envace.rehearsal
    n: int = 2  # rehearsals of a task, or candidates for each action; 0 is none
    path: str = ""  # folder or hub name of another model that rehearses; empty: the one that acts
    sampling: SamplingConfig = field(default_factory=SamplingConfig)  # how rehearsals sample
    user_turns: int = 4  # user turns in one rehearsal at most; all but the first are imagined
    memory_tokens: int = 256  # longest memory
    verify: Literal["none", "schema", "consistency"] = "none"  # rehearsals that fail this stay out of the memory
    shuffle: bool = False  # a control: each run gets the memory of another task
    select: Literal["all", "agreement"] = "all"  # agreement: only those with the calls that most rehearsals made


@dataclass
class GateConfig:
    mode: Literal["none", "log", "block", "ask"] = "none"  # real calls to risky tools are predicted first: envace.gate
    at: Literal["low", "medium", "high"] = "high"  # the least risk that is predicted
    risk: dict[str, str] = field(default_factory=dict)  # by tool; others: its annotations, and without any medium
    samples: int = 4  # imagined responses of a prediction; greedy sampling makes them all the same


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
class ServeConfig:
    host: str = "127.0.0.1"  # address to listen on; any but a loopback one wants a key
    port: int = 8000  # 0 takes a free one and logs it
    key_env: str = ""  # NAME of the environment variable that holds the key clients must send; empty: no key
    name: str = ""  # what the model is called here; empty: the name of its folder, or that at the backend
    backend: str = ""  # base URL of an OpenAI-compatible server, http://host:8000/v1; empty: serve model.path itself
    backend_model: str = ""  # name of the model at the backend
    backend_key_env: str = ""  # NAME of the environment variable that holds the backend's key; empty: no key
    max_new_tokens: int = 1024  # longest reply, also of a request that asks for more or names no length
    max_body_bytes: int = 4194304  # a longer request is refused
    max_queue: int = 256  # requests waiting or being answered; one more is refused
    timeout: float = 300.0  # seconds until a request is given up, its rehearsals included
    cache: int = 1024  # conversations whose memory is kept
    only_offered_calls: bool = False  # a reply with a call to another tool, or with odd argument names, is text
    also_callable: list[str] = field(default_factory=list)  # tools that may then be called though they are not offered


@dataclass
class PartnerConfig:
    url: str = ""  # base URL of an OpenAI-compatible server, http://host:8000/v1; empty: there is none
    model: str = ""  # name of the model there
    key_env: str = ""  # NAME of the environment variable that holds its key; empty: no key
    temperature: float = 0.0  # of its answers


@dataclass
class BenchConfig:
    home: str = ".bench"  # where `make bench-setup-NAME` has put the harnesses
    parts: list[str] = field(default_factory=list)  # categories or domains; empty: all that need nothing from outside
    tasks: int = 0  # only the first N tasks of each part; 0 takes all
    trials: int = 4  # runs of each task, each with a seed of its own
    concurrency: int = 16  # tasks at once
    retries: int = 3  # further tries of tasks that ended by a fault of the infrastructure
    language: Literal["chinese", "english"] = "chinese"  # vita: of its tasks and prompts
    data: str = "DianJin/FinMCP-Bench:*benchmark_final.json"  # finmcp: a file, or OWNER/NAME:PATTERN on the hub
    tool_schemas: str = ""  # finmcp: JSON list of its tools; empty: made of the calls that its tasks show
    user: PartnerConfig = field(default_factory=PartnerConfig)  # tau2, vita: who plays the user
    judge: PartnerConfig = field(default_factory=PartnerConfig)  # tau2 retail, vita: who judges


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
    rehearsal: RehearsalConfig = field(default_factory=RehearsalConfig)  # private rehearsal before evaluation acts
    gate: GateConfig = field(default_factory=GateConfig)  # dry run before a real call to a risky tool
    sampling: SamplingConfig = field(default_factory=SamplingConfig)  # how training samples
    sft: SFTConfig = field(default_factory=SFTConfig)  # supervised warm-up
    rl: RLConfig = field(default_factory=RLConfig)  # role-wise GRPO
    eval: EvalConfig = field(default_factory=EvalConfig)  # held-out evaluation
    serve: ServeConfig = field(default_factory=ServeConfig)  # the endpoint that applications talk to
    benchmark: Literal["none", "bfcl", "tau2", "vita", "finmcp"] = "none"  # evaluate.py runs this official harness
    bench: BenchConfig = field(default_factory=BenchConfig)  # how
    record_tokens: int = 8  # trajectories of a step and split that are recorded with each token and logprob; 0: none
    run_dir: str = "runs/default"  # where checkpoints, logs and trajectories go
    seed: int = 0  # seed of sampling, shuffling and initialisation
