"""Settings come from defaults, files and overrides, in that order; every mistake is one helpful line."""

import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path

import pytest

from envace.config import ConfigError, load_config, nearest, save_config, schema, validate, versions
from envace.settings import Config, RLConfig

ROOT = Path(__file__).parent.parent

SRC = Path(__file__).parent.parent / "src"
MODEL = "model.path=some/model"  # the one setting without a default


def write(folder: Path, **files: str) -> str:
    """Writes NAME.yaml for each keyword; the path of the last one."""
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return str(folder / f"{name}.yaml")


def message(path: str | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    text = str(caught.value)
    assert "\n" not in text
    return text


def run_cli(*arguments: str, then: str = "") -> subprocess.CompletedProcess:
    code = (
        "import sys\nfrom envace.config import load_config, settings_parser\n"
        "options, unknown = settings_parser('what it does').parse_known_intermixed_args()\n"
        f"config = load_config(options.config, options.overrides + unknown)\n{then}"
    )
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=SRC, capture_output=True, text=True)


class TestMerging:
    def test_defaults_then_file_then_overrides(self, tmp_path):
        path = write(tmp_path, run="rl: {lr: 1e-4, steps: 7}\nmodel: {path: m}\n")
        config = load_config(path, ["rl.steps=9", "eval.sampling.top_p=0.5"])
        assert isinstance(config, Config) and isinstance(config.rl, RLConfig)
        assert (config.rl.lr, config.rl.steps, config.rl.group_size) == (1e-4, 9, 4)
        assert (config.eval.sampling.temperature, config.eval.sampling.top_p) == (0.6, 0.5)

    def test_a_chain_of_bases_is_merged_base_first(self, tmp_path):
        (tmp_path / "deep").mkdir()
        write(
            tmp_path,
            base="rl: {steps: 1, lr: 1, group_size: 8}\nmodel: {path: m}",
            middle="inherits: base.yaml\nrl: {steps: 2, lr: 2}",
        )
        path = write(tmp_path / "deep", run="inherits: ../middle.yaml\nrl: {steps: 3}")
        config = load_config(path, [])
        assert (config.rl.steps, config.rl.lr, config.rl.group_size) == (3, 2.0, 8)

    def test_an_empty_file_and_an_empty_section_change_nothing(self, tmp_path):
        expected = load_config(None, [MODEL])
        assert load_config(write(tmp_path, empty=""), [MODEL]) == expected
        assert load_config(write(tmp_path, section="rl: {}"), [MODEL]) == expected

    @pytest.mark.parametrize("number", ["1e-4", "1.0e-4", "0.0001", "'1e-4'"])
    def test_every_way_to_write_a_float(self, tmp_path, number):
        assert load_config(write(tmp_path, run=f"sft: {{lr: {number}}}"), [MODEL]).sft.lr == 1e-4
        assert load_config(None, [MODEL, f"rl.lr={number}"]).rl.lr == 1e-4

    def test_lists_are_replaced_and_mappings_merged(self):
        config = load_config(None, [MODEL, "sft.roles=[act]", "rl.role_weights.rehearse=0.5"])
        assert config.sft.roles == ["act"]
        assert config.rl.role_weights == {"act": 1.0, "rehearse": 0.5}

    def test_a_value_may_hold_an_equals_sign(self):
        assert load_config(None, [MODEL, "run_dir=runs/lr=1"]).run_dir == "runs/lr=1"

    def test_what_is_saved_reads_back_equal(self, tmp_path):
        config = load_config(
            None, [MODEL, "rl.lr=3e-7", "run_dir='007'", "sft.roles=[rehearse]", "rl.role_weights.act=0"]
        )
        save_config(config, tmp_path / "new" / "config.yaml")
        assert load_config(str(tmp_path / "new" / "config.yaml"), []) == config


class TestMistakesInAFile:
    @pytest.mark.parametrize(
        "text, expected",
        [
            ("rl: {lrr: 1}", ["'rl.lrr'", "did you mean rl.lr?"]),
            ("lr: 1", ["'lr'", "did you mean rl.lr or sft.lr?"]),
            ("modle: {path: x}", ["'modle.path'", "did you mean model.path"]),
            ("rl: {x: {y: {}}}", ["'rl.x.y'", "did you mean"]),
            ("3: 1", ["'3'", "did you mean"]),
            ("rl: {lr: fast}", ["rl.lr='fast'", "expected float"]),
            ("rl: {steps: 1.5}", ["rl.steps=1.5", "expected int"]),
            ("rl: {steps: null}", ["rl.steps=None", "expected int"]),
            ("rl: {normalize_std: perhaps}", ["rl.normalize_std='perhaps'", "expected bool"]),
            ("rl: {kl_estimator: k1}", ["rl.kl_estimator='k1'", "expected one of k2, k3, k3_ratio"]),
            ("rl: {role_weights: {act: much}}", ["rl.role_weights={'act': 'much'}", "expected dict[str, float]"]),
            ("sft: {roles: act}", ["sft.roles='act'", "expected list[str]"]),
            ("rl: 3", ["rl=3", "expected a section"]),
            ("rl: [1]", ["rl=[1]", "expected a section"]),
            ("rl:", ["rl=None", "expected a section"]),
            ("rl.lr: 1", ["'rl.lr'", "nest the names"]),
            ("run_dir: ${oc.env:HOME}", ["run_dir='${oc.env:HOME}'", "references"]),
            ("rl:\n  lr: ???", ["rl.lr must be set"]),
            ("rl:\n  lr: 1\n  lr: 2", ["line 3", "duplicate key lr"]),
            ("seed: 1\nrl: [1", ["line 2", "invalid YAML"]),
            ("a: b: c", ["line 1", "invalid YAML"]),
            ("seed: \x01", ["invalid YAML"]),
            ("seed: ${", ["invalid YAML"]),
            ("- 1", ["expected a mapping"]),
            ("seed", ["expected a mapping"]),
            ("inherits: [a, b]", ["inherits=['a', 'b']", "one YAML file"]),
            ("inherits: bse.yaml", ["inherits in", "cannot read", "base.yaml?"]),
        ],
    )
    def test_message_names_the_key_the_file_and_the_remedy(self, tmp_path, text, expected):
        path = write(tmp_path, base="seed: 1", run=text)
        text = message(path, MODEL)
        assert [part for part in [path, *expected] if part not in text] == [], text

    def test_the_file_named_is_the_one_that_set_the_key(self, tmp_path):
        path = write(tmp_path, base="rl: {group_size: 1}", run="inherits: base.yaml\nrl: {steps: 3}")
        assert f"rl.group_size=1 ({tmp_path / 'base.yaml'})" in message(path, MODEL)

    def test_a_circle_of_bases_names_every_file(self, tmp_path):
        path = write(tmp_path, a="inherits: b.yaml", b="inherits: a.yaml")
        assert "b.yaml -> " in (text := message(path)) and "a.yaml -> " in text

    def test_a_missing_file_names_the_nearest_one(self, tmp_path):
        write(tmp_path, demo="", qwen="")
        text = message(str(tmp_path / "dmeo.yaml"))
        assert "dmeo.yaml" in text and "command line" in text and f"did you mean {tmp_path / 'demo.yaml'}?" in text
        assert "cannot read" in message(str(tmp_path / "nowhere" / "demo.yaml"))
        assert "directory" in message(str(tmp_path))

    def test_a_setting_without_default_must_be_set(self, tmp_path):
        path = write(tmp_path, run="seed: 1")
        assert message(path) == f"model.path must be set ({path}): add it or pass model.path=..."


class TestMistakesOnTheCommandLine:
    @pytest.mark.parametrize(
        "override, expected",
        [
            ("lr=1", ["'lr'", "did you mean rl.lr or sft.lr?"]),
            ("rll.lr=1", ["'rll.lr'", "did you mean rl.lr or sft.lr?"]),
            ("rl.grup_size=4", ["'rl.grup_size'", "did you mean rl.group_size?"]),
            ("sampling.temp=1", ["'sampling.temp'", "did you mean sampling.temperature?"]),
            ("--seed=1", ["'--seed'", "did you mean seed?"]),
            ("=1", ["''", "did you mean"]),
            ("rl.steps", ["'rl.steps' has no '='", "rl.steps"]),
            ("rl.steps=", ["rl.steps=None", "expected int"]),
            ("rl.steps=many", ["rl.steps='many'", "expected int"]),
            ("rl.steps.x=1", ["rl.steps={'x': 1}", "expected int"]),
            ("sft.roles[0]=act", ["sft.roles={'0': 'act'}", "expected list[str]"]),
            ("rl.steps=[", ["rl.steps=[", "invalid YAML"]),
            ("rl=${sft}", ["rl='${sft}'", "references"]),
        ],
    )
    def test_message_names_the_key_the_place_and_the_remedy(self, override, expected):
        text = message(None, MODEL, override)
        assert [part for part in ["command line", *expected] if part not in text] == [], text

    def test_files_and_overrides_in_any_order_and_no_heavy_import(self, tmp_path):
        path = write(tmp_path, run="seed: 1")
        heavy = "{'torch', 'transformers'} & sys.modules.keys()"
        result = run_cli(
            MODEL, "--config", path, "rl.lr=1e-4", then=f"print(config.seed, config.rl.lr, {heavy} or '-')"
        )
        assert (result.stdout, result.stderr) == ("1 0.0001 -\n", "")

    def test_help_lists_every_key_with_its_doc(self):
        text = run_cli("--help").stdout
        assert "rl.lr=1e-06\n      peak learning rate (float)" in text
        assert "one of k2, k3, k3_ratio" in text
        fields = [key for key, setting in schema().items() if not is_dataclass(setting.kind)]
        assert [key for key in fields if f"  {key}=" not in text] == []


class TestImpossibleValues:
    @pytest.mark.parametrize(
        "override",
        [
            "sampling.temperature=0",
            "sampling.top_p=0.9",
            "sampling.top_k=5",
            "eval.sampling.top_p=0",
            "eval.sampling.top_p=1.1",
            "eval.sampling.temperature=-1",
            "rl.group_size=1",
            "rl.steps=-1",
            "rl.prompts_per_step=0",
            "rl.updates_per_batch=0",
            "sft.batch_size=0",
            "sft.micro_batch_size=-2",
            "rollout.max_rounds=0",
            "rollout.max_context_tokens=0",
            "rollout.max_new_tokens=0",
            "data.train_tasks=0",
            "sft.roles=[]",
            "sft.roles=[act, judge]",
            "sft.roles=[[act]]",
            "rl.role_weights={judge: 1}",
            "rl.role_weights={act: -1}",
            "rl.role_weights={act: .nan}",
            "rl.role_weights={act: 0, rehearse: 0}",
            "rl.role_weights={judge: {x: 1}}",
            "rl.kl_coef=-0.1",
            "rl.clip_eps_low=-0.1",
            "rl.clip_eps_low=1",
            "rl.clip_eps_high=-0.1",
            "rl.warmup=1.5",
            "sft.warmup=-0.1",
            "rl.lr=-1",
            "sft.lr=.inf",
            "rl.lr=.nan",
            "sft.grad_clip=0",
            "rl.weight_decay=-1",
        ],
    )
    def test_refused_with_key_and_place(self, override):
        key = override.partition("=")[0]
        text = message(None, MODEL, override)
        assert text.startswith(f"{key}=") and "(command line): " in text

    @pytest.mark.parametrize(
        "override",
        [
            "rl.steps=0",
            "sft.steps=0",
            "eval.every=0",
            "eval.sampling.temperature=0",
            "rl.kl_coef=0",
            "rl.role_weights.act=0",
        ],
    )
    def test_zero_is_possible_where_it_means_something(self, override):
        load_config(None, [MODEL, override])

    def test_greedy_candidates_are_refused_as_they_would_all_be_one(self):
        greedy = [MODEL, "rehearsal.mode=candidates", "eval.sampling.temperature=0"]
        with pytest.raises(ConfigError, match=r"rehearsal\.mode.*eval\.sampling\.temperature > 0"):
            load_config(None, [*greedy, "rehearsal.n=2"])
        load_config(None, [*greedy, "rehearsal.n=1"])

    def test_a_config_made_in_code_can_be_checked_too(self):
        validate(Config())
        with pytest.raises(ConfigError, match=r"rl.group_size=1 \(default\)"):
            validate(Config(rl=RLConfig(group_size=1)))


def test_every_key_has_a_line_of_documentation():
    assert [key for key, setting in schema().items() if not setting.doc] == []


def test_every_key_is_its_own_nearest():
    assert [key for key in schema() if nearest(key).split(" or ")[0] != key] == []


def test_versions_name_the_libraries():
    found = versions()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "transformers", "omegaconf"} <= found.keys()


@pytest.mark.parametrize(
    "overrides, key",
    [
        (["rollout.environment=constant", "rl.role_weights.act=0"], "rollout.environment=constant"),
        (["data.eval_tasks=8", "eval.tasks=9"], "eval.tasks=9"),
        (["data.train_tasks=8", "rl.prompts_per_step=9"], "rl.prompts_per_step=9"),
        (["seed=4294967296"], "seed=4294967296"),
    ],
)
def test_impossible_combinations_are_refused(overrides, key):
    assert key in message(None, MODEL, *overrides)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_can_be_loaded_and_has_a_folder_of_its_own(path):
    config = load_config(str(path), [])
    others = [load_config(str(other), []).run_dir for other in path.parent.glob("*.yaml") if other != path]
    assert config.run_dir not in others
    if config.data.source == "cm2":
        sft = config.sft
        assert (sft.epochs, sft.batch_size, sft.max_tokens, sft.lr) == (2, 64, 12000, 1e-5)
        assert (sft.schedule, sft.warmup, config.data.max_prompt_tokens) == ("cosine", 0.1, 3500)
        assert (config.rl.steps, config.rl.prompts_per_step, config.rl.group_size, config.rl.lr) == (470, 16, 4, 1e-6)


@pytest.mark.parametrize(
    "setting",
    [
        *(
            "judge.key_env=sk-live-SECRET",
            "judge.key_env=sk_live_SECRET",
            "judge.endpoints=['http://me:SECRET@host/v1']",
        ),
        *("judge.endpoints=['http://host/v1?key=SECRET']", "judge.endpoints=http://me:SECRET@host/v1"),
    ],
)
def test_a_key_in_the_settings_is_refused_and_not_shown(setting):
    with pytest.raises(ConfigError, match="judge") as caught:
        load_config(None, ["model.path=m", setting])
    assert "SECRET" not in str(caught.value)


def test_a_text_can_be_emptied():
    assert load_config(None, ["model.path=m", "judge.cache=x", "judge.cache="]).judge.cache == ""
